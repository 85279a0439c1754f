"""Comparing streams with the store (rule 5), in the reader's rounds.

The reader may not see what a stream's own caller sees, so nothing is concluded here: a stream
that differs from the store is made to read the stored task itself.
"""

import asyncio

from collections.abc import Collection, Iterable

from a2a.types import TaskState
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_subscribe.event_log.by_task import ByTask
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.rows import Current, Cursor, Page, Stored
from cluster_subscribe.event_log.subscriber import Subscriber
from cluster_subscribe.settings import Settings


class Reconciler:
    """Compares the streams of one reader with the stored versions and states.

    Args:
        log: The event log and its tables.
        streams: The streams that the reader feeds, kept up to date by the reader.
        settings: `poll_interval` and `reconcile_interval` apply.
    """

    def __init__(self, log: EventLog, streams: ByTask[Subscriber], settings: Settings) -> None:
        self._log = log
        self._streams = streams
        self._poll_interval = settings.poll_interval
        self._reconcile_interval = settings.reconcile_interval
        self._states_due = 0.0
        """The loop's time of the next comparison of states; 0 before the first."""
        self._mismatches: dict[Subscriber, TaskState] = {}
        """Stored states that the last comparison found to differ."""

    async def compare_versions(self, connection: AsyncConnection) -> dict[Subscriber, int]:
        """Suspends the streams whose task is gone, another's, or stored with a lower version.

        Returns:
            The streams that the store is ahead of, with the stored version.
        """
        cursors = [(subscriber, subscriber.cursor) for subscriber in self._streams]
        stored = await self._log.stored(connection, list(self._streams.task_ids))
        ahead: dict[Subscriber, int] = {}
        for subscriber, cursor in cursors:
            task = stored.get(subscriber.task_id)
            subscriber.retry_reconcile(task)
            if subscriber.cursor != cursor:
                # It was restarted during the query.
                continue
            if task and _is_owned(subscriber, task) and task.version >= cursor.version:
                if task.version > cursor.version:
                    ahead[subscriber] = task.version
            elif cursor.version and not subscriber.has_refuted(task):
                subscriber.suspend(task)
        return ahead

    async def compare_states(self, connection: AsyncConnection) -> None:
        """Finds tasks that were changed under the same version (F19), or lost their row.

        Does so twice in each reconcile interval. Two comparisons in a row have to agree on
        a state: one alone may fall between a commit and its delivery.
        """
        now, first = asyncio.get_running_loop().time(), not self._states_due
        if now < self._states_due:
            return
        states = await self._log.states(connection, list(self._streams.task_ids))
        interval = self._reconcile_interval / 2
        if states is None:
            interval = max(interval, self._reconcile_interval - 2 * self._poll_interval)
        self._states_due = now + interval
        before, self._mismatches = self._mismatches, {}
        for subscriber in self._streams:
            subscriber.forget_refuted()
            if states is None:
                # The rows of tasks are not known here, so each stream has to read the store.
                if not first:
                    subscriber.request_reconcile()
                continue
            if subscriber.task_id not in states:
                subscriber.request_reconcile()
                continue
            state, version = states[subscriber.task_id]
            # With another version there are rows to read, which bring the state.
            if state in (None, subscriber.state) or version != subscriber.cursor.version:
                continue
            if before.get(subscriber) == state:
                subscriber.request_reconcile()
            elif state is not None:
                self._mismatches[subscriber] = state

    async def skip_earlier_incarnation(
        self, connection: AsyncConnection, page: Page, subscribers: Iterable[Subscriber]
    ) -> None:
        """Makes streams skip the rows that an earlier incarnation of their task has left."""
        min_seq = await self._log.end_of_earlier_incarnation(connection, page.task_id)
        for subscriber in subscribers:
            if subscriber.page == page:
                subscriber.skip_up_to(min_seq)


def _is_owned(subscriber: Subscriber, task: Stored) -> bool:
    return subscriber.owner in (None, task.owner)


async def read_stored(log: EventLog, task_ids: Collection[str]) -> dict[str, Stored]:
    """The stored owner and version of each task that is there."""
    await log.schema.prepare()
    async with log.connect() as connection:
        return await log.stored(connection, task_ids)


async def read_current(log: EventLog, task_ids: Collection[str]) -> dict[str, Current]:
    """The stored version and state of each task that is there."""
    await log.schema.prepare()
    async with log.connect() as connection:
        stored = await log.stored(connection, task_ids)
        states = await log.states(connection, task_ids)
    found: dict[str, Current] = {}
    for task_id, (owner, version) in stored.items():
        if states is None:
            found[task_id] = Current(owner, version, None)
        elif task_id in states:
            # Read after the other, so its version is never lower.
            state, later = states[task_id]
            found[task_id] = Current(owner, max(version, later), state)
    return found


async def was_recreated(log: EventLog, task_id: str, after: Cursor) -> bool:
    """Whether the log proves that a task was recreated since a place in it."""
    async with log.connect() as connection:
        return await log.recreated(connection, task_id, after)
