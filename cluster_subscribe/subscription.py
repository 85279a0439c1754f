"""One stream: the task as stored at version V, then the event log after V.

Rules 1 to 5 of the contract over any store and any event stream. Versions of a
foreign event stream are opaque: it is trusted to keep its order, and its events
are only filtered by whether they follow the snapshot.
"""

import asyncio

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True)
class Source:
    """Where a stream gets its events, and who judges them."""

    stream: TaskEventStream
    read: Callable[[], Awaitable[StoredTask | None]]
    """Reads the task as stored, with the subscriber's own call context."""


async def follow(
    snapshot: StoredTask,
    source: Source,
    *,
    settings: Settings,
    background: Background,
    telemetry: Telemetry,
) -> AsyncGenerator[Event, None]:
    """Yields the snapshot, then each later event exactly once.

    Args:
        snapshot: The task as stored at the moment of subscribing; not terminal.
        source: The event log and the store.
        settings: `close_on`, `reconcile_interval` and `max_buffered_events` apply.
        background: Runs the reader of the event stream.
        telemetry: Told of every disagreement between the log and the store.

    Raises:
        TaskNotFoundError: The task was deleted, or deleted and made anew.
        EventStreamEndedError: The event stream ended before the task did.
    """
    task_id = snapshot.task.id
    course = _Course(snapshot, exact=isinstance(source.stream, DatabaseTaskEventStream))
    # What was committed before one look has reached the feed by the next.
    quiet = max(settings.reconcile_interval / 2, 2 * sdk.poll_interval(source.stream))
    doubt: StoredTask | None = None
    paused = False

    async def look() -> StoredTask | None:
        try:
            stored = await source.read()
        except A2AError:
            raise
        except Exception as error:  # noqa: BLE001 - delays the judgement, loses nothing
            telemetry.look_failed(task_id, error)
            return None
        if stored is None or course.began_anew(stored):
            raise TaskNotFoundError(f'Task {task_id} was deleted')
        return stored

    yield _copy(snapshot.task)
    feed = _Feed(source.stream, task_id, snapshot.version, settings.max_buffered_events, background)
    try:
        while True:
            event: Event | None = None
            if versioned := await feed.next(quiet):
                doubt, paused = None, False
                event = course.admit(versioned)
            elif stored := await look():
                if not course.contradicts(stored):
                    if paused:
                        return
                    doubt = None
                elif feed.ended or (doubt is not None and _alike(doubt, stored)):
                    telemetry.reconciled(task_id)
                    event, doubt = course.restart(stored), None
                else:
                    doubt = stored
            if event is None:
                if feed.ended:
                    raise EventStreamEndedError(
                        f'The event stream of task {task_id} ended before the task did'
                    )
                continue

            yield event

            if isinstance(event, Message) or (state := _state(event)) in TERMINAL_STATES:
                return
            # AUTH_REQUIRED does not pause a stream: the agent may go on by itself (A2A 7.6.1).
            paused = (
                settings.close_on is CloseOn.INTERRUPTED
                and state == TaskState.TASK_STATE_INPUT_REQUIRED
            )
            if paused and feed.drained and (stored := await look()):
                if not course.contradicts(stored):
                    return
                paused = False
    finally:
        feed.close()


class _Course:
    """Where one stream stands: what it has delivered, and what it may deliver next."""

    def __init__(self, snapshot: StoredTask, *, exact: bool) -> None:
        self._exact = exact
        self._floor = self._position = snapshot.version
        self._state = snapshot.task.status.state

    def admit(self, versioned: VersionedEvent) -> Event | None:
        """The event, if it is one for this stream (rules 2 and 3)."""
        event, version = versioned.event, versioned.version
        if isinstance(event, Message):
            return event
        if not version.is_after(self._floor):
            return None
        if version.is_after(self._position):
            self._position = version
        if self._records_a_message(event):
            return None
        self._state = _state(event) or self._state
        return event

    def _records_a_message(self, event: Event) -> bool:
        return (
            isinstance(event, Task)
            and event.status.state == self._state
            and event.status.state not in TERMINAL_STATES
            and len(event.history) > 0
            and event.history[-1].role == Role.ROLE_USER
        )

    def restart(self, stored: StoredTask) -> Task:
        """Goes on from the task as stored (rule 5)."""
        self._floor = self._position = stored.version
        self._state = stored.task.status.state
        return _copy(stored.task)

    def contradicts(self, stored: StoredTask) -> bool:
        """Whether the store knows something that this stream has not delivered."""
        return stored.task.status.state != self._state or (
            self._exact and _newer(stored.version, self._position)
        )

    def began_anew(self, stored: StoredTask) -> bool:
        """Whether the stored task is a later life under the same id."""
        return (
            self._exact and not stored.version.is_missing and _newer(self._position, stored.version)
        )


class _Feed:
    """Reads an event stream in a task of its own into a bounded buffer.

    Waiting for it is a bare future, so that a cancellation is never swallowed
    (rule 6); a full buffer makes the reader wait, so that nothing is lost (rule 7).
    """

    def __init__(
        self,
        stream: TaskEventStream,
        task_id: str,
        after: TaskVersion,
        limit: int,
        background: Background,
    ) -> None:
        self._limit = limit
        self._background = background
        self._buffer: deque[VersionedEvent] = deque()
        self._room = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None
        self._reader = background.spawn(self._read(stream, task_id, after), f'follow {task_id}')
        self._reader.add_done_callback(lambda _: self._wake())

    @property
    def drained(self) -> bool:
        """Whether nothing is buffered."""
        return not self._buffer

    @property
    def ended(self) -> bool:
        """Whether the stream is over and everything it gave was taken."""
        return self._reader.done() and self.drained

    async def next(self, timeout: float) -> VersionedEvent | None:
        """Takes the next event, or `None` after `timeout` seconds of silence or at the end.

        Raises:
            EventStreamEndedError: The reader was cancelled.
            Exception: Whatever ended the event stream.
        """
        if not self._buffer and not self._reader.done():
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._buffer:
            self._room.set()
            return self._buffer.popleft()
        if self._reader.done():
            if self._reader.cancelled():
                raise EventStreamEndedError('The server is stopping')
            self._reader.result()
        return None

    def close(self) -> None:
        """Ends the reader without waiting for it."""
        self._background.end(self._reader)

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


def _alike(one: StoredTask, other: StoredTask) -> bool:
    return one.version == other.version and one.task.status.state == other.task.status.state


def _copy(task: Task) -> Task:
    copy = Task()
    copy.CopyFrom(task)
    return copy
