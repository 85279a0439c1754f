"""A look inside the replicas of a cluster."""

from typing import Any

from a2a.server.events import Event
from a2a.types import Part, Task, TaskArtifactUpdateEvent

from cluster_subscribe import ClusterSubscribeHandler, SharedTailEventStream


def open_at(replica: Any) -> int:
    handler = replica.handler
    assert isinstance(handler, ClusterSubscribeHandler)
    return handler.statistics().open_subscriptions


def parts(event: Event) -> list[Part]:
    if isinstance(event, Task):
        return [part for artifact in event.artifacts for part in artifact.parts]
    return list(event.artifact.parts) if isinstance(event, TaskArtifactUpdateEvent) else []


def tail_of(replica: Any) -> SharedTailEventStream:
    stream = replica.stock._event_stream
    assert isinstance(stream, SharedTailEventStream)
    return stream
