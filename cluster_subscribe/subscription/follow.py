"""One stream: the task as stored at version V, then the event log after V.

Rules 1 to 5 of the contract over any store and any event stream. Versions of a
foreign event stream are opaque: it is trusted to keep its order, and its events
are only filtered by whether they follow the snapshot.
"""

import asyncio

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from a2a.server.cluster import (
    DatabaseTaskEventStream,
    StoredTask,
    TaskEventStream,
    TaskVersion,
    VersionedEvent,
)
from a2a.server.events import Event
from a2a.types import (
    Message,
    Role,
    Task,
    TaskState,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import A2AError, TaskNotFoundError

from cluster_subscribe import sdk
from cluster_subscribe.background import Background
from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.event_log.subscriber import Current
from cluster_subscribe.settings import CloseOn, Settings
from cluster_subscribe.telemetry import Telemetry

TERMINAL_STATES: Final = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_REJECTED,
    }
)


class Feed(Protocol):
    """What a stream takes its events from."""

    exact: bool
    """Whether versions are the store's own, and can be compared with it."""

    @property
    def drained(self) -> bool:
        """Whether nothing is buffered."""

    @property
    def ended(self) -> bool:
        """Whether the event stream is over and everything it gave was taken."""

    async def next(self) -> VersionedEvent | None:
        """Takes the next event, or `None` when the store should be looked at.

        Raises:
            Exception: Whatever ended the event stream.
        """

    async def compare(self, version: TaskVersion, owner: str | None, position: TaskVersion) -> None:
        """Takes what the stream's own look at the store has found, and where it stands.

        Raises:
            TaskNotFoundError: It is another task than the one that was followed.
            Exception: That cannot be told at the moment.
        """

    async def current(self) -> Current | None:
        """The stored version and state, where they are cheaper to have than the task."""

    async def is_exhausted(self, stored: StoredTask) -> bool:
        """Whether the events hold nothing more, though the store knows more than they do."""

    def restart(self, stored: StoredTask) -> None:
        """Goes on behind a task that the stream got as a snapshot."""

    def reconcile_failed(self) -> None:
        """Has `next()` give `None` again in a while: the look at the store failed."""

    def close(self) -> None:
        """Ends the reading, without waiting."""


class OwnedTask(NamedTuple):
    """A task as stored, and whose it is."""

    stored: StoredTask
    owner: str | None
    """The owner of its rows, read before the task; `None` where that is not known."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stream gets its events, and who judges them."""

    open: Callable[[TaskVersion, TaskState], Feed]
    """Begins to read behind a version, at which the task had a state."""
    read: Callable[[], Awaitable[OwnedTask | None]]
    """Reads the task as stored, with the subscriber's own call context."""
    variables: Context
    """The context variables of the subscriber's request."""


async def follow(
    snapshot: StoredTask,
    source: Source,
    close_on: CloseOn,
    telemetry: Telemetry,
) -> AsyncGenerator[Event, None]:
    """Yields the snapshot, then each later event exactly once.

    Args:
        snapshot: The task as stored at the moment of subscribing; not terminal.
        source: The event log and the store.
        close_on: Which events end the stream.
        telemetry: Told of every disagreement between the log and the store.

    Raises:
        TaskNotFoundError: The task was deleted, or deleted and recreated.
        EventStreamEndedError: The event stream ended before the task did.
    """
    course = _StreamState(snapshot)
    event: Event | None
    versioned: VersionedEvent | None
    stored: StoredTask | None
    paused = False

    telemetry.opened()
    try:
        event = _copy(snapshot.task)
        del snapshot
        telemetry.delivered(event)
        yield event
        feed = source.variables.run(source.open, course.position, course.state)
        try:
            while True:
                # Nothing that was delivered or looked at is held while waiting.
                event = versioned = stored = None
                if versioned := await feed.next():
                    paused = False
                    event = course.admit(versioned)
                elif stored := await _look(source, feed, course, telemetry):
                    if course.agrees(stored, exact=feed.exact):
                        if paused:
                            return
                    elif (feed.exact and course.is_ahead_of(stored)) or await feed.is_exhausted(
                        stored
                    ):
                        telemetry.reconciled(course.task_id, stored.version)
                        event = course.restart(stored)
                        feed.restart(stored)
                if event is None:
                    if feed.ended:
                        raise EventStreamEndedError(
                            f'The event stream of task {course.task_id} ended before the task did'
                        )
                    continue

                telemetry.delivered(event)
                yield event

                if isinstance(event, Message) or (state := _state(event)) in TERMINAL_STATES:
                    return
                # AUTH_REQUIRED does not pause a stream: the agent may go on by itself
                # (A2A 7.6.1).
                paused = (
                    close_on is CloseOn.INTERRUPTED and state == TaskState.TASK_STATE_INPUT_REQUIRED
                )
                if paused and feed.drained:
                    current = await _is_current(source, feed, course, telemetry)
                    if current:
                        return
                    paused = current is None
        finally:
            feed.close()
    finally:
        telemetry.closed()


async def _look(
    source: Source, feed: Feed, course: '_StreamState', telemetry: Telemetry
) -> StoredTask | None:
    """The task as stored; `None` if the store does not answer."""
    try:
        look = await source.read()
        telemetry.reconcile_succeeded()
        if look and not course.is_another(look.stored):
            await feed.compare(look.stored.version, look.owner, course.position)
            return look.stored
    except A2AError:
        raise
    except Exception as error:  # noqa: BLE001 - delays the judgement, loses nothing
        telemetry.reconcile_failed(course.task_id, error)
        feed.reconcile_failed()
        return None
    raise TaskNotFoundError(f'Task {course.task_id} was deleted')


async def _is_current(
    source: Source, feed: Feed, course: '_StreamState', telemetry: Telemetry
) -> bool | None:
    """Whether the stream has delivered all that is stored; `None` if the store does not answer."""
    try:
        current = await feed.current()
    except A2AError:
        raise
    except Exception:  # noqa: BLE001 - the look says so if it fails as well
        current = None
    if current is not None:
        return course.is_at(TaskVersion(current.version), current.state)
    stored = await _look(source, feed, course, telemetry)
    return None if stored is None else course.agrees(stored, exact=feed.exact)


class _StreamState:
    """Where one stream stands: what it has delivered, and what it may deliver next."""

    __slots__ = ('_context_id', '_floor', 'position', 'state', 'task_id')

    def __init__(self, snapshot: StoredTask) -> None:
        self.task_id = snapshot.task.id
        self._context_id = snapshot.task.context_id
        self._floor = self.position = snapshot.version
        self.state = snapshot.task.status.state

    def admit(self, versioned: VersionedEvent) -> Event | None:
        """The event, if it is one for this stream (rules 2 and 3)."""
        event, version = versioned.event, versioned.version
        if isinstance(event, Message):
            return event
        if not version.is_after(self._floor):
            return None
        if version.is_after(self.position):
            self.position = version
        if self._records_a_message(event):
            return None
        self.state = _state(event) or self.state
        return event

    def _records_a_message(self, event: Event) -> bool:
        return (
            isinstance(event, Task)
            and event.status.state == self.state
            and event.status.state not in TERMINAL_STATES
            and len(event.history) > 0
            and event.history[-1].role == Role.ROLE_USER
        )

    def restart(self, stored: StoredTask) -> Task:
        """Goes on from the task as stored (rule 5)."""
        self._floor = self.position = stored.version
        self.state = stored.task.status.state
        return _copy(stored.task)

    def agrees(self, stored: StoredTask, *, exact: bool) -> bool:
        """Whether this stream has delivered all that the store knows, and nothing else."""
        return self.is_at(stored.version if exact else self.position, stored.task.status.state)

    def is_at(self, version: TaskVersion, state: TaskState | None) -> bool:
        """Whether this stream stands at a version and state; `None` for any state."""
        return version == self.position and state in (None, self.state)

    def is_ahead_of(self, stored: StoredTask) -> bool:
        """Whether the store went back behind what was delivered."""
        return stored.version != self.position and not _newer(stored.version, self.position)

    def is_another(self, stored: StoredTask) -> bool:
        """Whether the stored task cannot be the one that was followed."""
        return stored.task.context_id != self._context_id != ''


class StreamFeed:
    """Reads any event stream, in a task of its own, into a bounded buffer.

    Waiting for it is a bare future, so that a cancellation is never swallowed
    (rule 6); a full buffer makes the reader wait, so that nothing is lost (rule 7).
    """

    def __init__(
        self,
        stream: TaskEventStream,
        task_id: str,
        after: TaskVersion,
        *,
        settings: Settings,
        background: Background,
    ) -> None:
        self.exact = isinstance(stream, DatabaseTaskEventStream)
        # What was committed before one look has arrived here by the next.
        self._quiet = max(settings.reconcile_interval / 2, 2 * sdk.poll_interval(stream))
        self._limit = settings.max_buffered_events
        self._closed = False
        self._looks = 0
        self._contradicted: tuple[int, TaskVersion, TaskState] | None = None
        self._buffer: deque[VersionedEvent] = deque()
        self._room = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None
        self._reader = background.spawn(
            self._read(stream, task_id, after), f'follow {task_id}', self.close, copy_context()
        )
        self._reader.add_done_callback(lambda _: self._wake())

    @property
    def drained(self) -> bool:
        """Whether nothing is buffered."""
        return not self._buffer

    @property
    def ended(self) -> bool:
        """Whether the stream is over and everything it gave was taken."""
        return self._reader.done() and self.drained

    def restart(self, stored: StoredTask) -> None:
        """Does nothing: what comes before the snapshot is left out when it is taken."""

    async def compare(self, version: TaskVersion, owner: str | None, position: TaskVersion) -> None:
        """Takes what the stream's own look at the store has found.

        Raises:
            TaskNotFoundError: Its version is lower, as that of a task that was recreated.
        """
        del owner
        self._looks += 1
        if self.exact and not version.is_missing and _newer(position, version):
            raise TaskNotFoundError('The task was deleted')

    async def current(self) -> None:
        """Not known here."""

    async def is_exhausted(self, stored: StoredTask) -> bool:
        """Whether two looks in a row found the same, or nothing more can come."""
        looks, *before = self._contradicted or (0,)
        found = [stored.version, stored.task.status.state]
        self._contradicted = self._looks, stored.version, stored.task.status.state
        return self.ended or (looks + 1 == self._looks and before == found)

    def reconcile_failed(self) -> None:
        """Does nothing: silence alone makes the stream look."""

    async def next(self) -> VersionedEvent | None:
        """Takes the next event, or `None` after some seconds of silence or at the end.

        Raises:
            EventStreamEndedError: The reader was cancelled.
            Exception: Whatever ended the event stream.
        """
        if not self._buffer and not self._reader.done():
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(self._quiet, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._buffer:
            self._contradicted = None
            self._room.set()
            return self._buffer.popleft()
        if self._reader.done():
            if self._reader.cancelled():
                raise EventStreamEndedError('The server is stopping')
            self._reader.result()
        return None

    def close(self) -> None:
        """Ends the reader without waiting for it.

        Cancelled once: a second cancellation would interrupt its tidying up.
        """
        if not self._closed:
            self._closed = True
            self._reader.cancel()

    async def _read(self, stream: TaskEventStream, task_id: str, after: TaskVersion) -> None:
        async with aclosing(stream.subscribe(task_id, after=after)) as events:
            async for versioned in events:
                self._buffer.append(versioned)
                self._wake()
                while len(self._buffer) >= self._limit:
                    self._room.clear()
                    await self._room.wait()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _state(event: Event) -> TaskState | None:
    return event.status.state if isinstance(event, Task | TaskStatusUpdateEvent) else None


def _newer(one: TaskVersion, other: TaskVersion) -> bool:
    # The SDK calls everything newer than MISSING, MISSING itself included.
    return one != other and one.is_after(other)


def _copy(task: Task) -> Task:
    copy = Task()
    copy.CopyFrom(task)
    return copy
