"""One stream's place in the log, and the few events it has not taken yet."""

import asyncio

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Protocol

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.types import Task, TaskState, TaskStatusUpdateEvent
from a2a.utils.errors import TaskNotFoundError

from cluster_subscribe import sdk
from cluster_subscribe.event_log.log import Cursor, Page, Row

Decode = Callable[[Row], Event | None]
"""Gives the event of a row, `None` if it cannot be decoded."""


class Feeder(Protocol):
    """What a subscriber asks of the reader."""

    page_size: int
    """How many events a subscriber may hold."""

    def more(self, task_id: str) -> None:
        """Has a task's log read in the next round."""

    def leave(self, subscriber: 'Subscriber') -> None:
        """Forgets a stream, at once."""


class Subscriber:
    """Fed by the reader, emptied by one stream; lives as long as the stream.

    The reader alone moves the cursor, except that `restart()` sets it anew.
    """

    __slots__ = (
        '_buffer',
        '_doubted',
        '_error',
        '_limit',
        '_reader',
        '_strict',
        '_waiter',
        'behind',
        'cursor',
        'floor',
        'owner',
        'state',
        'task_id',
        'unsure',
    )

    exact = True
    proven = True

    def __init__(
        self, task_id: str, owner: str | None, cursor: Cursor, reader: Feeder, *, strict: bool
    ) -> None:
        self.task_id = task_id
        self.owner = owner
        self.cursor = cursor
        self.floor = 0
        self.state: TaskState | None = None
        """The state last fed, where it is known."""
        self.behind = False
        """Whether the log may hold more than the buffer had room for."""
        self.unsure = False
        """Whether the stream wanted to look at the store and could not."""
        self._limit = reader.page_size
        self._strict = strict
        self._reader = reader
        # A list, since an empty deque takes ten times its room and most streams are idle.
        self._buffer: list[tuple[Event, int]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._doubted = False
        self._error: Exception | None = None

    @property
    def page(self) -> Page:
        """What the reader should read for this stream."""
        return Page(self.task_id, self.cursor, self.floor)

    @property
    def waiting(self) -> bool:
        """Whether the reader should read for this stream; a slow one asks by itself."""
        return not (self._error or (self.behind and self._buffer))

    @property
    def drained(self) -> bool:
        """Whether nothing is buffered."""
        return not self._buffer

    @property
    def ended(self) -> bool:
        """Never: the log ends with an error or not at all."""
        return False

    def feed(self, rows: Sequence[Row], decode: Decode, *, more: bool) -> None:
        """Takes the rows behind the cursor, up to the first that cannot be right.

        Args:
            rows: What the log holds behind the cursor, in order.
            decode: Gives the event of a row.
            more: Whether the log may hold more than these.
        """
        for row in rows:
            if len(self._buffer) >= self._limit:
                self.behind = True
                break
            if row.owner != self.owner or row.cursor.seq <= self.floor:
                continue
            hole = row.cursor.version > self.cursor.version + 1 and self.cursor.version
            event = decode(row)
            if self._strict and (hole or event is None):
                self.doubt()
                break
            if event is not None:
                self._buffer.append((event, row.cursor.version))
                if isinstance(event, Task | TaskStatusUpdateEvent):
                    self.state = event.status.state
            self.cursor = row.cursor
        if self._buffer:
            self.behind = self.behind or more
            self._wake()
        elif more:
            # Nothing in a whole page was for this stream: the store has to say.
            self.doubt()

    def doubt(self, *, gone: bool = False) -> None:
        """Makes the stream look at the store once it has taken what is buffered.

        Where the task is gone there is nothing to look at: by the time a slow stream looks,
        there may be another under its id.
        """
        if gone:
            self.fail(TaskNotFoundError(f'Task {self.task_id} was deleted'))
        elif self._strict:
            self._doubted = True
            self._wake()

    def look_again(self) -> None:
        """Makes the stream look once more when the database has been reached."""
        self.unsure = True

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error once it has taken what is buffered."""
        self._error = self._error or error
        self._wake()

    def restart(self, stored: StoredTask) -> None:
        """Goes on behind a task that the stream got as a snapshot."""
        self._buffer.clear()
        self.cursor = Cursor.behind(sdk.version_number(stored.version))
        self.state = stored.task.status.state
        self.behind = self._doubted = False
        self._reader.more(self.task_id)

    async def next(self) -> VersionedEvent | None:
        """Takes the next event, or `None` if the store should be looked at.

        Waiting is a bare future, so that a cancellation is never swallowed (F8).
        """
        while not (self._buffer or self._error or self._doubted):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._buffer:
            event, version = self._buffer.pop(0)
            if self.behind and not self._buffer:
                # What was doubted long ago may be in the log by now, and is judged anew.
                self.behind = self._doubted = False
                self._reader.more(self.task_id)
            # The event is shared by all streams of this replica.
            return VersionedEvent(event=deepcopy(event), version=TaskVersion(version))
        if self._error:
            raise self._error
        self._doubted = False
        return None

    def close(self) -> None:
        """Leaves the reader, at once."""
        self._reader.leave(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
