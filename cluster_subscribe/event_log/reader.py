"""One reader per replica: woken, it reads the log once and feeds every stream.

Who may touch what: the reader alone queries and moves cursors. It feeds only the
streams it planned a round for, from the cursor it planned with; a stream that joins,
leaves or restarts while the query runs is left to the next round.
"""

import asyncio
import logging
import random

from collections.abc import Collection, Iterable, Iterator
from contextvars import Context
from typing import Final

from a2a.server.events import Event
from a2a.types import StreamResponse, TaskState
from google.protobuf.message import DecodeError
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_subscribe.background import Background, SharedReads, Signal
from cluster_subscribe.engines import has_hooks
from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.event_log.connection import ROUND_TIMEOUT, prepared_elsewhere
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.rows import Current, Cursor, Page, Row, Stored
from cluster_subscribe.event_log.subscriber import NEVER, Subscriber
from cluster_subscribe.event_log.wakeup import WakeupSource
from cluster_subscribe.settings import Settings
from cluster_subscribe.telemetry import Once, TailStatistics, TailTelemetry

logger = logging.getLogger(__name__)

_FEW: Final = 8
"""Tasks up to which a wakeup that names none has all their logs read."""
_LARGE: Final = 1 << 16
"""Bytes of a page after which others get their turn of the event loop."""
_LONGEST_PAUSE: Final = 5.0
"""Seconds between two attempts to read, at most."""
_MAX_TIMEOUT_FACTOR: Final = 6
"""The longest that an attempt may take, in terms of the first."""
_MOST_UNEXPECTED: Final = 8
"""Rounds in a row that may fail for a reason that is not known, until the streams end."""
_FINAL_SQLSTATES: Final = frozenset({'3F000', '42P01', '42501', '42703'})
"""PostgreSQL: missing schemas, tables and columns, missing permissions."""
_FINAL_MYSQL_CODES: Final = frozenset({1044, 1054, 1142, 1143, 1146})
"""MySQL: missing tables and columns, missing permissions."""


class Reader:
    """Tails one event log for all streams of this process."""

    def __init__(  # noqa: PLR0913 - the last two make it the reader of a single stream
        self,
        log: EventLog,
        wakeup: WakeupSource | None,
        background: Background,
        settings: Settings,
        *,
        parent: 'Reader | None' = None,
        context: Context | None = None,
    ) -> None:
        self._settings = settings
        self._log = log
        self._wakeup = wakeup
        self._background = background
        self._poll_interval = settings.poll_interval
        self._reconcile_interval = settings.reconcile_interval
        self._states_due = 0.0
        self._state_mismatches: dict[Subscriber, TaskState] = {}
        self.page_size = settings.max_buffered_events
        self._watched: dict[str, set[Subscriber]] = {}
        self._dirty_tasks: dict[str, None] = {}
        self._check_due = False
        self._wake_event = Signal()
        self._closing = Signal()
        self._task: asyncio.Task[None] | None = None
        self._wakeup_task: asyncio.Task[None] | None = None
        self._open = 0
        self.telemetry: TailTelemetry = parent.telemetry if parent else TailTelemetry()
        self._parent = parent
        self._context = context
        self._isolated: dict[str, set[Reader]] = {}
        self.once: Once = parent.once if parent else Once()
        self._current = SharedReads(background, self._read_current, 'read versions', context)

    def statistics(self) -> TailStatistics:
        """The counters as they are now."""
        return self.telemetry.statistics(
            open_subscriptions=self._open + sum(map(len, self._isolated.values())),
            watched_tasks=len(self._watched.keys() | self._isolated.keys()),
        )

    def join(self, subscriber: Subscriber) -> None:
        """Begins to feed a stream."""
        self._watched.setdefault(subscriber.task_id, set()).add(subscriber)
        self._open += 1
        # Where others are read one by one, this one may have to be, and should not wait.
        self._check_due = self._check_due or bool(self._isolated)
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
        streams = self._watched.get(subscriber.task_id)
        if streams is None or subscriber not in streams:
            return
        streams.discard(subscriber)
        self._open -= 1
        if not streams:
            del self._watched[subscriber.task_id]
            self._dirty_tasks.pop(subscriber.task_id, None)
            self._wake_event.set()
            if self._parent is not None:
                self._parent.ended(subscriber.task_id, self)

    def ended(self, task_id: str, reader: 'Reader') -> None:
        """Forgets the reader of a single stream."""
        self._isolated[task_id].discard(reader)
        if not self._isolated[task_id]:
            del self._isolated[task_id]

    def schedule_read(self, task_id: str) -> None:
        """Has a task's log read in the next round."""
        self._dirty_tasks[task_id] = None
        self._wake_event.set()

    def wake(self, task_ids: Iterable[str] | None, source: str) -> None:
        """Takes a hint that tasks have moved; `None` for any task."""
        self.telemetry.woken(source)
        for task_id in list(self._isolated) if task_ids is None else task_ids:
            for reader in self._isolated.get(task_id, ()):
                reader.schedule_read(task_id)
        if task_ids is None and len(self._watched) > _FEW:
            self._check_due = True
            self._wake_event.set()
            return
        # A few logs are read sooner than the versions that tell which of them moved.
        for task_id in list(self._watched) if task_ids is None else task_ids:
            if task_id in self._watched:
                self.schedule_read(task_id)

    def task_changed(self, task_id: str, source: str) -> None:
        """Takes the hint that this replica moved a task, and hints to the others."""
        self.wake((task_id,), source)
        if self._wakeup is not None and self._wakeup.notifies and not self._background.closed:
            self._wakeup.notify(task_id)
            self._start_wakeup()

    def isolate(self, subscriber: Subscriber, reason: str) -> None:
        """Has a stream read by a reader of its own, with its own context variables.

        It has no wakeup of its own, and is woken as the streams here are.
        """
        if self._parent is not None:
            return
        if self.once('isolated'):
            logger.warning(
                'Streams are read one by one, as the shared reader cannot read for them: %s',
                reason,
            )
        self.leave(subscriber)
        own = Reader(
            self._log,
            None,
            self._background,
            self._settings,
            parent=self,
            context=subscriber.variables,
        )
        subscriber.reader = own
        self._isolated.setdefault(subscriber.task_id, set()).add(own)
        own.join(subscriber)

    async def stored(self, task_ids: Collection[str]) -> dict[str, Stored]:
        """The stored owner and version of each task that is there, in one read."""
        await self._log.schema.prepare()
        async with self._log.connect() as connection:
            return await self._log.stored(connection, task_ids)

    async def current(self, task_id: str) -> Current | None:
        """What is stored of a task, read once for all streams that ask at a time."""
        return await self._current.get(task_id)

    async def _read_current(self, task_ids: Collection[str]) -> dict[str, Current]:
        await self._log.schema.prepare()
        async with self._log.connect() as connection:
            stored = await self._log.stored(connection, task_ids)
            states = await self._log.states(connection, task_ids)
        found: dict[str, Current] = {}
        for task_id, (owner, version) in stored.items():
            if states is None:
                found[task_id] = Current(owner, version, None)
            elif task_id in states:
                # Read later, so never older.
                state, later = states[task_id]
                found[task_id] = Current(owner, max(version, later), state)
        return found

    async def recreated(self, task_id: str, after: Cursor) -> bool:
        """Whether the log proves that the task was recreated since a place in it."""

        async def read() -> bool:
            async with self._log.connect() as connection:
                return await self._log.recreated(connection, task_id, after)

        context = self._context or Context()
        return await self._background.run(read(), 'compare incarnations', context)

    def fail(self, message: str) -> None:
        """Ends every open stream with an error."""
        for subscriber in list(self._subscribers()):
            subscriber.fail(EventStreamEndedError(message))
            self.leave(subscriber)

    def close(self) -> None:
        """Ends every open stream with an error, also of those that are read one by one."""
        for readers in list(self._isolated.values()):
            for reader in list(readers):
                reader.fail('The server is stopping')
        self.fail('The server is stopping')

    def _subscribers(self) -> Iterator[Subscriber]:
        for streams in self._watched.values():
            yield from streams

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._background.spawn(
                self._run(), f'reader of {self._log.table}', self._stop, self._context
            )
        self._start_wakeup()

    def _start_wakeup(self) -> None:
        if self._wakeup is not None and (self._wakeup_task is None or self._wakeup_task.done()):
            self._wakeup_task = self._background.spawn(
                self._listen(self._wakeup),
                f'wakeups of {self._log.table}',
                stop=self._stop,
            )

    def _stop(self) -> None:
        self._closing.set()
        self._wake_event.set()
        if self._wakeup is not None:
            self._wakeup.stop()

    async def _listen(self, wakeup: WakeupSource) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        began: float | None = None

        def wake(task_ids: Iterable[str] | None, source: str) -> None:
            nonlocal began
            began = began or loop.time()
            self.wake(task_ids, source)

        while not self._background.closed:
            began = None
            try:
                await wakeup.run(wake, lambda: bool(self._watched or self._isolated))
            except Exception as error:  # noqa: BLE001 - a wakeup is a hint, the timer serves
                # What has worked for a while and fails is news; a connection in vain is none.
                if began is not None and loop.time() - began > _LONGEST_PAUSE:
                    failures = 0
                log = logger.debug if failures else logger.warning
                log('Wakeups of %s are lost (%s); the timer serves', self._log.table, _brief(error))
            else:
                if not (self._watched or self._isolated):
                    return
                # Wanted again while it closed its connection.
                continue
            failures += 1
            await self._closing.within(_pause(failures))

    async def _run(self) -> None:
        failures = unexpected = 0
        due = 0.0
        loop = asyncio.get_running_loop()
        try:
            while self._watched and not self._background.closed:
                await self._wake_event.within(due - loop.time())
                check = self._check_due or loop.time() >= due
                # Cleared before the read: a wakeup that comes now leads to another round.
                self._check_due = False
                self._wake_event.clear()
                woken, self._dirty_tasks = self._dirty_tasks, {}
                try:
                    # Each attempt gets more time, up to a limit: a slow database is not a dead
                    # one, and after a long outage a dead connection is one all the same.
                    timeout = ROUND_TIMEOUT * min(failures + 1, _MAX_TIMEOUT_FACTOR)
                    await self._round(woken, check=check, timeout=timeout)
                except Exception as error:
                    unexpected = unexpected + 1 if is_unexpected(error) else 0
                    final = is_final(error) or unexpected >= _MOST_UNEXPECTED
                    if (final or unexpected) and self._isolate_all(error):
                        continue
                    if final:
                        raise
                    self._dirty_tasks = woken | self._dirty_tasks
                    await self._wait_after(error, failures := failures + 1)
                    due = 0.0
                    continue
                unexpected = 0
                if failures:
                    logger.info('The event log %s can be read again', self._log.table)
                    failures = 0
                if check:
                    due = loop.time() + self._poll_interval
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
        for subscriber in list(self._subscribers()):
            self.isolate(subscriber, f'a hook of the engine may have failed, {_brief(error)}')
        return True

    async def _wait_after(self, error: Exception, failures: int) -> None:
        self.telemetry.reconnecting()
        if failures == 1:
            logger.warning(
                'Reading the event log %s failed (%s); its streams wait until it can be read',
                self._log.table,
                _brief(error),
            )
        await self._closing.within(_pause(failures))

    async def _round(self, woken: dict[str, None], *, check: bool, timeout: float) -> None:
        if not (check or woken):
            return
        self.telemetry.round()
        await self._log.schema.prepare()
        # Before the database takes a snapshot: who asks later is answered by the next round.
        confirming = {
            subscriber
            for task_id in woken
            for subscriber in self._watched.get(task_id, ())
            if subscriber.confirming
        }
        async with self._log.connect(timeout) as connection:
            ahead = await self._check(connection, woken) if check else {}
            drained = await self._read(connection, woken)
            for subscriber in confirming & drained:
                subscriber.confirm()
            if check and asyncio.get_running_loop().time() >= self._states_due:
                await self._check_states(connection)
        if check and not woken:
            # With time to spare: it takes longer than a round.
            await self._log.schema.advise()
        for subscriber in drained & ahead.keys():
            # The log was read after the version: what it did not hold was never logged.
            if subscriber.cursor.version < ahead[subscriber]:
                subscriber.request_reconcile()

    async def _check(
        self, connection: AsyncConnection, woken: dict[str, None]
    ) -> dict[Subscriber, int]:
        """Compares all streams with the stored versions; wakes the tasks that moved.

        Returns:
            The streams that the store is ahead of, with the stored version.
        """
        planned = [(subscriber, subscriber.cursor) for subscriber in self._subscribers()]
        stored = await self._log.stored(connection, list(self._watched))
        ahead: dict[Subscriber, int] = {}
        for subscriber, cursor in planned:
            if subscriber.reconcile_overdue:
                subscriber.reconcile_overdue = False
                subscriber.request_reconcile()
                if subscriber.suspended:
                    subscriber.suspend(stored.get(subscriber.task_id))
            if subscriber.cursor != cursor:
                continue
            task = stored.get(subscriber.task_id)
            if task and subscriber.owner in (None, task.owner) and task.version >= cursor.version:
                if task.version > cursor.version:
                    woken[subscriber.task_id] = None
                    ahead[subscriber] = task.version
            elif cursor.version and subscriber.not_confirmed != task:
                subscriber.suspend(task)
        return ahead

    async def _check_states(self, connection: AsyncConnection) -> None:
        """Finds tasks that were changed under the same version (F19), or lost their row.

        Two checks in a row have to agree on a state: one alone may fall between a commit
        and its delivery.
        """
        now, first = asyncio.get_running_loop().time(), not self._states_due
        states = await self._log.states(connection, list(self._watched))
        interval = self._reconcile_interval / 2
        if states is None:
            interval = max(interval, self._reconcile_interval - 2 * self._poll_interval)
        self._states_due = now + interval
        suspects, self._state_mismatches = self._state_mismatches, {}
        for subscriber in self._subscribers():
            subscriber.not_confirmed = NEVER
            if states is None:
                # Only the store knows how to find its tasks.
                if not first:
                    subscriber.request_reconcile()
                continue
            if subscriber.task_id not in states:
                subscriber.request_reconcile()
                continue
            state, version = states[subscriber.task_id]
            # Under another version the log has more to say, and says it by itself.
            if state in (None, subscriber.state) or version != subscriber.cursor.version:
                continue
            if suspects.get(subscriber) == state:
                subscriber.request_reconcile()
            elif state is not None:
                self._state_mismatches[subscriber] = state

    async def _read(self, connection: AsyncConnection, woken: Iterable[str]) -> set[Subscriber]:
        """Reads what follows the cursors of the woken tasks' streams, and feeds them.

        Returns:
            The streams that have everything the log held for them.
        """
        drained: set[Subscriber] = set()
        planned: dict[Page, list[Subscriber]] = {}
        for task_id in woken:
            for subscriber in self._watched.get(task_id, ()):
                if subscriber.waiting:
                    planned.setdefault(subscriber.page, []).append(subscriber)
        decoded: dict[int, Event | None] = {}

        def decode(row: Row) -> Event | None:
            if row.cursor.seq not in decoded:
                decoded[row.cursor.seq] = self._event(row)
            return decoded[row.cursor.seq]

        pages = list(planned)
        for page, (rows, more) in zip(
            pages, await self._log.pages(connection, pages, self.page_size), strict=True
        ):
            self.telemetry.read(len(rows))
            if any(row.is_of_earlier_incarnation for row in rows):
                await self._skip_earlier_incarnation(connection, page, planned[page])
                continue
            for subscriber in planned[page]:
                if subscriber.page == page:
                    subscriber.feed(rows, decode, more=more)
                    if not subscriber.behind:
                        drained.add(subscriber)
            if sum(map(_size, rows)) > _LARGE:
                await asyncio.sleep(0)
        return drained

    def _event(self, row: Row) -> Event | None:
        try:
            response = StreamResponse.FromString(row.data)
            if kind := response.WhichOneof('payload'):
                event: Event = getattr(response, kind)
                return event
        # SQLite's columns hold values of any type.
        except (DecodeError, TypeError):
            pass
        if self.once(row.cursor.seq):
            logger.warning('The event log has a row that is no event (seq %d)', row.cursor.seq)
        return None

    async def _skip_earlier_incarnation(
        self, connection: AsyncConnection, page: Page, subscribers: Iterable[Subscriber]
    ) -> None:
        min_seq = await self._log.end_of_earlier_incarnation(connection, page.task_id)
        for subscriber in subscribers:
            if subscriber.page != page:
                continue
            if min_seq > subscriber.min_seq:
                subscriber.min_seq = min_seq
                self.schedule_read(subscriber.task_id)
            else:
                subscriber.request_reconcile()
                self.schedule_read(subscriber.task_id)


def _size(row: Row) -> int:
    # SQLite's columns hold values of any type.
    data: object = row.data
    return len(data) if isinstance(data, bytes) else 0


def is_final(error: Exception) -> bool:
    """Whether trying again cannot help: a missing table or column, a missing permission.

    Everything else is retried, what a driver raises while connecting included.
    """
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return False
    code = error.orig.args[0] if error.orig and error.orig.args else None
    return (
        getattr(error.orig, 'sqlstate', None) in _FINAL_SQLSTATES
        or code in _FINAL_MYSQL_CODES
        or str(error.orig).startswith(('no such table', 'no such column'))
    )


def is_unexpected(error: Exception) -> bool:
    """Whether an error that is not final may be a mistake of somebody's, and not the network's."""
    if isinstance(error, ProgrammingError):
        return not (error.connection_invalidated or prepared_elsewhere(error))
    return isinstance(
        error, ArithmeticError | AssertionError | AttributeError | LookupError | TypeError
    )


def _pause(failures: int) -> float:
    """Seconds until the next attempt: growing, capped, and spread over the replicas."""
    most = min(_LONGEST_PAUSE, 0.025 * 2.0 ** min(failures, 10))
    return most * random.uniform(0.5, 1)  # noqa: S311 - no secret


def _brief(error: Exception) -> str:
    """An error in one line, without the statement and its parameters."""
    cause = getattr(error, 'orig', None) or error
    return f'{type(cause).__name__}: {cause}'.splitlines()[0]
