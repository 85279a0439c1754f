"""Make `SubscribeToTask` answer the same on every replica of an A2A server.

A stream opened through a wrapped handler is *the task as stored at version V,
then the event log after V*. A subscriber never misses an event that follows its
snapshot and never sees one twice, whichever replica it asked and whichever
replica produced the event. The task store is authoritative, and the event log is the only
source of events. What a replica holds in memory only makes it read the log sooner.
"""

from cluster_subscribe.errors import (
    ClusterSubscribeError,
    EventStreamEndedError,
    SettingsError,
    UnsupportedHandlerError,
)
from cluster_subscribe.event_log import SharedTailEventStream
from cluster_subscribe.handler import ClusterSubscribeHandler
from cluster_subscribe.local_state import LocalState
from cluster_subscribe.settings import CloseOn, Evict, Mode, Settings, WakeupMode
from cluster_subscribe.telemetry import Statistics, TailStatistics
from cluster_subscribe.wrapping import wrap

__all__ = [
    'CloseOn',
    'ClusterSubscribeError',
    'ClusterSubscribeHandler',
    'EventStreamEndedError',
    'Evict',
    'LocalState',
    'Mode',
    'Settings',
    'SettingsError',
    'SharedTailEventStream',
    'Statistics',
    'TailStatistics',
    'UnsupportedHandlerError',
    'WakeupMode',
    'wrap',
]
