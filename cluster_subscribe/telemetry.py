"""Counters and log lines."""

import logging

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from a2a.server.cluster import TaskVersion

from cluster_subscribe.local_task import Verdict

logger = logging.getLogger('cluster_subscribe')

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
    subscribes: Mapping[Verdict, int]
    """Subscribes that found their task, by the verdict of the check."""
    redirects: int
    """Subscribes served from the event log although the SDK would have used a local tap.

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


class Telemetry:
    """Counts what one handler does. Lives as long as the app."""

    def __init__(self) -> None:
        self.open_subscriptions = 0
        self.events_delivered = 0
        self._subscribes: Counter[Verdict] = Counter()
        self._redirects = 0
        self._evictions = 0
        self._reconciled = 0
        self._once = Once()

    def checked(self, task_id: str, verdict: Verdict) -> None:
        """Counts a verdict."""
        self._subscribes[verdict] += 1
        logger.debug('Subscribe to task %s: %s', task_id, verdict.value)

    def redirected(self, task_id: str, verdict: Verdict, *, observed: bool = False) -> None:
        """Counts a subscribe that the SDK ties to its local `ActiveTask`."""
        self._redirects += 1
        if verdict is Verdict.STALE:
            logger.info(
                'Task %s has moved on at another replica; its stream %s from the event log',
                task_id,
                'would be served' if observed else 'is served',
            )

    def evicted(self, task_id: str) -> None:
        """Counts an `ActiveTask` that was closed."""
        self._evictions += 1
        logger.debug('Task %s: its local copy was superseded and is closed', task_id)

    def reconciled(self, task_id: str, version: TaskVersion) -> None:
        """Counts a snapshot sent in mid-stream, of the task at a version."""
        self._reconciled += 1
        if self._once(task_id, version):
            logger.warning(
                'Task %s was changed without an entry in the event log; '
                'its subscriber got a snapshot',
                task_id,
            )

    def look_failed(self, task_id: str, error: Exception) -> None:
        """Notes that a stream could not compare itself with the store."""
        logger.warning(
            'The stored task %s could not be read (%s); its stream goes on and looks again later',
            task_id,
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )

    def statistics(self, event_log: TailStatistics | None) -> Statistics:
        """The counters as they are now."""
        return Statistics(
            open_subscriptions=self.open_subscriptions,
            subscribes=MappingProxyType({v: self._subscribes[v] for v in Verdict}),
            redirects=self._redirects,
            events_delivered=self.events_delivered,
            evictions=self._evictions,
            reconciled=self._reconciled,
            event_log=event_log,
        )
