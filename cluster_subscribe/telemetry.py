"""Counters, OpenTelemetry metrics and span attributes, log lines.

Every counter is kept twice: in `Statistics`, which needs nothing, and in a metric, where
OpenTelemetry is installed. Its meter provider may be set before or after.
"""

import logging
import time

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from a2a.server.cluster import TaskVersion
from a2a.server.events import Event
from a2a.types import TaskStatusUpdateEvent

from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.local_state import LocalState

try:
    from opentelemetry import metrics, trace
except ImportError:  # an extra of the SDK that many servers do without
    metrics = trace = None  # type: ignore[assignment]

logger = logging.getLogger('cluster_subscribe')

METRICS: Final = {
    'subscriptions.open': ('updowncounter', '{subscription}', 'Streams being served'),
    'subscribes': ('counter', '{subscribe}', 'Subscribes that found their task'),
    'redirects': (
        'counter',
        '{redirect}',
        'Subscribes that the SDK alone would answer from its `ActiveTask`',
    ),
    'events.delivered': ('counter', '{event}', 'Events handed to subscribers'),
    'delivery.lag': ('histogram', 's', "From a status event's own timestamp to its delivery"),
    'reconciled': ('counter', '{snapshot}', 'Snapshots sent in mid-stream'),
    'evictions': ('counter', '{task}', 'Superseded or finished local tasks that were closed'),
    'reader.rounds': ('counter', '{round}', 'Times that the reader went to the database'),
    'reader.rows': ('counter', '{row}', 'Rows of the event log that were read'),
    'reader.reconnects': ('counter', '{round}', 'Rounds that failed and were tried again'),
    'wakeups': ('counter', '{wakeup}', 'Hints that a task has moved'),
}
"""Kind, unit and meaning of each metric, named below `cluster_subscribe.`."""
_BOUNDARIES: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds between the buckets of a histogram: OpenTelemetry's own begin at five."""
_REMEMBERED: Final = 1024
"""How many things a `Once` knows to be said."""


class Once:
    """Knows what was said lately, so that many streams say it once."""

    def __init__(self) -> None:
        self._said: dict[Hashable, None] = {}

    def __call__(self, *what: Hashable) -> bool:
        """Whether this is still to be said; from now on it is not."""
        if what in self._said:
            return False
        self._said[what] = None
        if len(self._said) > _REMEMBERED:
            del self._said[next(iter(self._said))]
        return True


@dataclass(frozen=True)
class TailStatistics:
    """A snapshot of one event stream's counters since it was made."""

    open_subscriptions: int
    watched_tasks: int
    rounds: int
    """Times that the reader went to the database."""
    rows: int
    """Rows of the log that it read."""
    wakeups: Mapping[str, int]
    """By source: `publish`, `cancel`, `listen`, `notify`, `data_version`."""
    reconnects: int
    """Rounds that failed and were tried again."""


@dataclass(frozen=True)
class Statistics:
    """A snapshot of one handler's counters since it was wrapped."""

    open_subscriptions: int
    """Streams that the decorator serves right now."""
    subscribes: Mapping[LocalState, int]
    """Subscribes that found their task, by what the replica held of it."""
    redirects: int
    """Subscribes served from the event log that the SDK alone would answer from its `ActiveTask`.

    In mode `observe`, those that mode `on` would have served so.
    """
    events_delivered: int
    """Events handed to subscribers, their first snapshots included."""
    evictions: int
    """Superseded or finished `ActiveTask`s that were closed."""
    reconciled: int
    """Snapshots sent in mid-stream because the store and the log disagreed (rule 5)."""
    event_log: TailStatistics | None
    """The counters of the shared reader; `None` over another event stream."""


class TailTelemetry:
    """Counts what one reader does. Lives as long as the app."""

    def __init__(self) -> None:
        self._rounds = self._rows = self._reconnects = 0
        self._wakeups: Counter[str] = Counter()

    def round(self) -> None:
        """Counts a visit to the database."""
        self._rounds += 1
        _instrument('reader.rounds').add(1)

    def read(self, rows: int) -> None:
        """Counts rows of the log."""
        self._rows += rows
        if rows:
            _instrument('reader.rows').add(rows)

    def reconnecting(self) -> None:
        """Counts a round that failed and is tried again."""
        self._reconnects += 1
        _instrument('reader.reconnects').add(1)

    def woken(self, source: str) -> None:
        """Counts a hint that a task has moved."""
        self._wakeups[source] += 1
        _instrument('wakeups').add(1, {'cluster_subscribe.wakeup.source': source})

    def statistics(self, *, open_subscriptions: int, watched_tasks: int) -> TailStatistics:
        """The counters as they are now."""
        return TailStatistics(
            open_subscriptions=open_subscriptions,
            watched_tasks=watched_tasks,
            rounds=self._rounds,
            rows=self._rows,
            wakeups=MappingProxyType(dict(self._wakeups)),
            reconnects=self._reconnects,
        )


class Telemetry:
    """Counts what one handler does. Lives as long as the app."""

    def __init__(self) -> None:
        self._open_subscriptions = 0
        self._events_delivered = 0
        self._subscribes: Counter[LocalState] = Counter()
        self._redirects = 0
        self._evictions = 0
        self._reconciled = 0
        self._once = Once()
        self._reconciles_fail = False

    def opened(self) -> None:
        """Counts a stream that begins."""
        self._open_subscriptions += 1
        _instrument('subscriptions.open').add(1)

    def closed(self) -> None:
        """Counts a stream that ends, however it does."""
        self._open_subscriptions -= 1
        _instrument('subscriptions.open').add(-1)

    def delivered(self, event: Event) -> None:
        """Counts an event that is handed to a subscriber."""
        self._events_delivered += 1
        _instrument('events.delivered').add(1)
        if isinstance(event, TaskStatusUpdateEvent) and event.status.HasField('timestamp'):
            lag = time.time() - event.status.timestamp.ToNanoseconds() / 1e9
            # Another machine's clock may be ahead of this one's.
            _instrument('delivery.lag').record(max(0.0, lag))

    def checked(self, task_id: str, local_state: LocalState, version: TaskVersion) -> None:
        """Counts a subscribe and notes its `LocalState` on the current span."""
        self._subscribes[local_state] += 1
        _instrument('subscribes').add(1, {'cluster_subscribe.local_state': local_state.value})
        if trace is not None:
            span = trace.get_current_span()
            span.set_attribute('cluster_subscribe.local_state', local_state.value)
            span.set_attribute('cluster_subscribe.snapshot.version', str(version))
        logger.debug('Subscribe to task %s: %s', task_id, local_state.value)

    def redirected(self, task_id: str, local_state: LocalState, *, observed: bool = False) -> None:
        """Counts a subscribe that the SDK ties to its local `ActiveTask`."""
        self._redirects += 1
        _instrument('redirects').add(1)
        if local_state is LocalState.STALE and self._once(task_id, int(time.monotonic() / 60)):
            logger.info(
                'Task %s has moved on at another replica; its stream %s from the event log',
                task_id,
                'would be served' if observed else 'is served',
                extra={'task_id': task_id, 'local_state': local_state.value},
            )

    def evicted(self, task_id: str) -> None:
        """Counts an `ActiveTask` that was closed."""
        self._evictions += 1
        _instrument('evictions').add(1)
        logger.debug('Task %s: its local copy was superseded and is closed', task_id)

    def reconciled(self, task_id: str, version: TaskVersion) -> None:
        """Counts a snapshot sent in mid-stream, of the task at a version."""
        self._reconciled += 1
        _instrument('reconciled').add(1)
        if self._once(task_id, version):
            logger.warning(
                'Task %s was changed without an entry in the event log; '
                'its subscriber got a snapshot',
                task_id,
                extra={'task_id': task_id},
            )

    def reconcile_succeeded(self) -> None:
        """Notes that a stream could compare itself with the store."""
        self._reconciles_fail = False

    def reconcile_failed(self, task_id: str, error: Exception) -> None:
        """Notes that a stream could not compare itself with the store; warns once per outage."""
        first, self._reconciles_fail = not self._reconciles_fail, True
        logger.log(
            logging.WARNING if first else logging.DEBUG,
            'The stored task %s could not be read (%s); its stream goes on and reads it later',
            task_id,
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
            extra={'task_id': task_id},
        )

    def stream_failed(self, task_id: str, error: Exception) -> None:
        """Notes that a client was told an error of the server's."""
        if isinstance(error, EventStreamEndedError):
            return
        if self._once(type(error).__name__, int(time.monotonic() / 60)):
            logger.warning(
                'A stream of task %s failed (%s); its client was told so',
                task_id,
                type(error).__name__,
                exc_info=logger.isEnabledFor(logging.DEBUG),
                extra={'task_id': task_id},
            )

    def statistics(self, event_log: TailStatistics | None) -> Statistics:
        """The counters as they are now."""
        return Statistics(
            open_subscriptions=self._open_subscriptions,
            subscribes=MappingProxyType({v: self._subscribes[v] for v in LocalState}),
            redirects=self._redirects,
            events_delivered=self._events_delivered,
            evictions=self._evictions,
            reconciled=self._reconciled,
            event_log=event_log,
        )


class _Nothing:
    """Stands for every instrument where OpenTelemetry is not installed."""

    def add(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...


@cache
def _instrument(name: str) -> Any:
    if metrics is None:
        return _Nothing()
    kind, unit, meaning = METRICS[name]
    meter = metrics.get_meter('cluster_subscribe')
    told: dict[str, Any] = {'unit': unit, 'description': meaning}
    name = f'cluster_subscribe.{name}'
    if kind == 'counter':
        return meter.create_counter(name, **told)
    if kind == 'updowncounter':
        return meter.create_up_down_counter(name, **told)
    try:
        return meter.create_histogram(name, explicit_bucket_boundaries_advisory=_BOUNDARIES, **told)
    except TypeError:  # older releases of OpenTelemetry take no advice
        return meter.create_histogram(name, **told)
