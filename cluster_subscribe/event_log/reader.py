"""One reader per replica: one loop that waits, reads the log, and feeds every stream.

The invariant: a stream's cursor is at the last row that was put into its buffer or left out
for good, and the rows of a round are given only to streams whose cursor is still where the
round was planned from. So each row is given once, in (version, seq) order. A stream that
joins, leaves or restarts while the query runs is left to the next round.

- When to read: when a stream or a wakeup asks for a task, or the poll interval is over.
- What to read: the rows of the tasks that were asked for. After a poll interval the stored
  versions come first, and the tasks that the store is ahead of are read as well.
- Whom to feed: the streams of these tasks that have room.
"""

import asyncio
import logging

from collections.abc import Iterable
from contextvars import Context
from functools import partial
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_subscribe.background import Background, SharedReads
from cluster_subscribe.engines import has_hooks
from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.event_log import retry
from cluster_subscribe.event_log.by_task import ByTask
from cluster_subscribe.event_log.decoding import Decoder
from cluster_subscribe.event_log.isolation import IsolatedReaders
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.reconcile import Reconciler, read_current, was_recreated
from cluster_subscribe.event_log.rows import Current, Cursor, Page
from cluster_subscribe.event_log.subscriber import Subscriber
from cluster_subscribe.event_log.wakeup import WakeupRunner, WakeupSource
from cluster_subscribe.settings import Settings
from cluster_subscribe.telemetry import Once, TailStatistics, TailTelemetry
from cluster_subscribe.waiting import Signal

logger = logging.getLogger(__name__)

_MAX_READ_AT_ONCE: Final = 8
"""Watched tasks up to which a wakeup that names none has all of them read."""
_YIELD_ABOVE: Final = 1 << 16
"""Bytes of a page after which the other tasks of the event loop get a turn."""
_MAX_UNEXPECTED: Final = 8
"""Rounds in a row that may fail for a reason that is not known, until the streams end."""


class Reader:
    """Tails one event log for all streams of this process.

    With a parent, the shared reader, it is the reader of a single stream, and runs with that
    stream's context variables. The shared reader has none.
    """

    def __init__(  # noqa: PLR0913 - the last two make it the reader of a single stream
        self,
        log: EventLog,
        wakeup: WakeupSource | None,
        background: Background,
        settings: Settings,
        telemetry: TailTelemetry,
        *,
        parent: 'Reader | None' = None,
        context: Context | None = None,
    ) -> None:
        self.page_size = settings.max_buffered_events
        self.once: Once = parent.once if parent else Once()
        self._log = log
        self._background = background
        self._settings = settings
        self._telemetry = telemetry
        self._parent = parent
        self._context = context
        self._watched: ByTask[Subscriber] = ByTask()
        single = partial(Reader, log, None, background, settings, telemetry, parent=self)
        self.isolated = IsolatedReaders(single, self.once)
        self._dirty_tasks: dict[str, None] = {}
        """The tasks to read in the next round, in the order in which they were asked for."""
        self._check_due = False
        """Whether the next round compares versions, however soon it begins."""
        self._wake_event = Signal()
        self._stopping = Signal()
        self._task: asyncio.Task[None] | None = None
        self._reconciler = Reconciler(log, self._watched, settings)
        self._current = SharedReads(
            background, partial(read_current, log), 'read versions', context
        )
        self._wakeup = WakeupRunner(
            wakeup, background, log.table, self.wake, lambda: bool(self._watched or self.isolated)
        )

    def statistics(self) -> TailStatistics:
        """The counters as they are now."""
        return self._telemetry.statistics(
            open_subscriptions=len(self._watched) + len(self.isolated),
            watched_tasks=len({*self._watched.task_ids, *self.isolated.task_ids}),
        )

    def join(self, subscriber: Subscriber) -> None:
        """Begins to feed a stream."""
        self._watched.add(subscriber.task_id, subscriber)
        # Where others are read one by one, this one may have to be, and should not wait.
        self._check_due = self._check_due or bool(self.isolated)
        # What was committed between its snapshot and now.
        self.schedule_read(subscriber.task_id)
        try:
            # Last: an eager task runs at once, and would find nobody to read for.
            self._start()
        except EventStreamEndedError:
            self.leave(subscriber)
            raise

    def leave(self, subscriber: Subscriber) -> None:
        """Forgets a stream, at once."""
        task_id = subscriber.task_id
        if not self._watched.remove(task_id, subscriber):
            return
        if not self._watched.of(task_id):
            self._dirty_tasks.pop(task_id, None)
            self._wake_event.set()
            if self._parent is not None:
                self._parent.isolated.remove(task_id, self)

    def schedule_read(self, task_id: str) -> None:
        """Has a task's log read in the next round."""
        self._dirty_tasks[task_id] = None
        self._wake_event.set()

    def wake(self, task_ids: Iterable[str] | None, source: str) -> None:
        """Takes the hint that tasks have changed; `None` for any task."""
        self._telemetry.woken(source)
        self.isolated.schedule_read(task_ids)
        if task_ids is None and len(self._watched.task_ids) > _MAX_READ_AT_ONCE:
            self._check_due = True
            self._wake_event.set()
            return
        # A few logs are read sooner than the versions that tell which of them have more.
        for task_id in list(self._watched.task_ids) if task_ids is None else task_ids:
            if self._watched.of(task_id):
                self.schedule_read(task_id)

    def task_changed(self, task_id: str, source: str) -> None:
        """Takes the hint that this replica changed a task, and passes it to the others."""
        self.wake((task_id,), source)
        self._wakeup.notify(task_id)

    def isolate(self, subscriber: Subscriber, reason: str) -> None:
        """Has a stream read by a reader of its own, with its own context variables."""
        if self._parent is None:
            self.isolated.add(subscriber, reason)

    async def current(self, task_id: str) -> Current | None:
        """The stored version and state of a task, read once for all streams that ask at a time."""
        return await self._current.get(task_id)

    async def recreated(self, task_id: str, after: Cursor) -> bool:
        """Whether the log proves that the task was recreated since a place in it."""
        read = was_recreated(self._log, task_id, after)
        return await self._background.run(read, 'compare incarnations', self._context or Context())

    def fail(self, message: str) -> None:
        """Ends every open stream with an error."""
        for subscriber in list(self._watched):
            subscriber.fail(EventStreamEndedError(message))
            self.leave(subscriber)

    def close(self) -> None:
        """Ends every open stream with an error, also of those that are read one by one."""
        self.isolated.fail('The server is stopping')
        self.fail('The server is stopping')

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._background.spawn(
                self._run(), f'reader of {self._log.table}', self._stop, self._context
            )
        self._wakeup.start()

    def _stop(self) -> None:
        self._stopping.set()
        self._wake_event.set()

    @property
    def _wanted(self) -> bool:
        return bool(self._watched) and not self._background.closed

    async def _wait_until(self, due: float) -> None:
        await self._wake_event.within(due - asyncio.get_running_loop().time())

    async def _run(self) -> None:
        failures = unexpected = 0
        due = 0.0
        loop = asyncio.get_running_loop()
        try:
            while self._wanted:
                await self._wait_until(due)
                check = self._check_due or loop.time() >= due
                # Cleared before the read: a wakeup that comes now leads to another round.
                self._check_due = False
                self._wake_event.clear()
                dirty, self._dirty_tasks = self._dirty_tasks, {}
                try:
                    await self._round(dirty, check=check, timeout=retry.timeout(failures))
                except Exception as error:
                    unexpected = unexpected + 1 if retry.is_unexpected(error) else 0
                    final = retry.is_final(error) or unexpected >= _MAX_UNEXPECTED
                    if (final or unexpected) and self._isolate_all(error):
                        continue
                    if final:
                        raise
                    self._dirty_tasks = dirty | self._dirty_tasks
                    await self._wait_after(error, failures := failures + 1)
                    due = 0.0
                    continue
                unexpected = 0
                if failures:
                    logger.info('The event log %s can be read again', self._log.table)
                    failures = 0
                if check:
                    due = loop.time() + self._settings.poll_interval
        except Exception as error:
            if self._parent is None or self.once('unreadable'):
                logger.exception('The event log %s cannot be read', self._log.table)
            self.fail(f'The event log cannot be read ({type(error).__name__})')
        finally:
            self.fail('The server is stopping')

    def _isolate_all(self, error: Exception) -> bool:
        """Has all streams read one by one, if a hook may be why the round failed."""
        if self._parent is not None or not has_hooks(self._log.engine):
            return False
        for subscriber in list(self._watched):
            self.isolate(subscriber, f'a hook of the engine may have failed, {retry.brief(error)}')
        return True

    async def _wait_after(self, error: Exception, failures: int) -> None:
        self._telemetry.reconnecting()
        if failures == 1:
            logger.warning(
                'Reading the event log %s failed (%s); its streams wait until it can be read',
                self._log.table,
                retry.brief(error),
            )
        await self._stopping.within(retry.pause(failures))

    async def _round(self, dirty: dict[str, None], *, check: bool, timeout: float) -> None:
        """Reads some tasks, and first compares all streams with the store if `check` is true.

        Tasks that the store is ahead of are added to `dirty`.
        """
        if not (check or dirty):
            return
        self._telemetry.round()
        await self._log.schema.prepare()
        # Before the database takes a snapshot: who asks later is answered by the next round.
        awaiting = {s for task_id in dirty for s in self._watched.of(task_id) if s.awaits_read}
        async with self._log.connect(timeout) as connection:
            ahead = await self._reconciler.compare_versions(connection) if check else {}
            dirty.update({subscriber.task_id: None for subscriber in ahead})
            drained = await self._read(connection, dirty)
            for subscriber in awaiting & drained:
                subscriber.confirm_read()
            if check:
                await self._reconciler.compare_states(connection)
        if check and not dirty:
            # It takes longer than a round, so it waits for one that had nothing to read.
            await self._log.schema.advise()
        for subscriber in drained & ahead.keys():
            # The log was read after the version: what it did not hold was never logged.
            if subscriber.cursor.version < ahead[subscriber]:
                subscriber.request_reconcile()

    async def _read(self, connection: AsyncConnection, dirty: Iterable[str]) -> set[Subscriber]:
        """Feeds the streams of some tasks; gives those that have everything the log held."""
        drained: set[Subscriber] = set()
        planned: dict[Page, list[Subscriber]] = {}
        for task_id in dirty:
            for subscriber in self._watched.of(task_id):
                if subscriber.accepts_rows:
                    planned.setdefault(subscriber.page, []).append(subscriber)
        decode = Decoder(self.once)
        found = await self._log.pages(connection, list(planned), self.page_size)
        for page, (rows, more) in zip(list(planned), found, strict=True):
            self._telemetry.read(len(rows))
            if any(row.is_of_earlier_incarnation for row in rows):
                await self._reconciler.skip_earlier_incarnation(connection, page, planned[page])
                continue
            for subscriber in self._receivers(page, planned[page]):
                subscriber.feed(rows, decode, more=more)
                if not subscriber.log_has_more:
                    drained.add(subscriber)
            if sum(row.size for row in rows) > _YIELD_ABOVE:
                await asyncio.sleep(0)
        return drained

    def _receivers(self, page: Page, planned: Iterable[Subscriber]) -> Iterable[Subscriber]:
        """The streams that are still where a page was planned from; asked one by one."""
        return (subscriber for subscriber in planned if subscriber.page == page)
