"""One stream's place in the log, and the few events it has not taken yet."""

import asyncio

from collections.abc import Callable, Sequence
from contextvars import copy_context
from copy import deepcopy
from typing import Final, Protocol

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.types import Task, TaskState, TaskStatusUpdateEvent
from a2a.utils.errors import TaskNotFoundError

from cluster_subscribe import sdk
from cluster_subscribe.event_log.rows import Current, Cursor, Page, Row, Stored

Decode = Callable[[Row], Event | None]
"""Gives the event of a row, `None` if it cannot be decoded."""
_MAX_BYTES: Final = 1 << 20
"""Bytes of events that a subscriber may hold, unless a single one is larger."""
NEVER: Final = Stored(None, -1)
"""Equal to nothing that a store holds."""


class LogReader(Protocol):
    """What a subscriber asks of the reader."""

    page_size: int
    """How many events a subscriber may hold."""

    def schedule_read(self, task_id: str) -> None:
        """Has a task's log read in the next round."""

    def leave(self, subscriber: 'Subscriber') -> None:
        """Forgets a stream, at once."""

    def isolate(self, subscriber: 'Subscriber', reason: str) -> None:
        """Has a stream read by a reader of its own, with its own context variables."""

    async def current(self, task_id: str) -> Current | None:
        """The task's stored version and state, from a read that starts now or later."""

    async def recreated(self, task_id: str, after: Cursor) -> bool:
        """Whether the log proves that the task was recreated since a place in it."""


class Subscriber:
    """Fed by the reader, emptied by one stream; lives as long as the stream.

    The reader alone moves the cursor, except that `restart()` sets it anew. What the reader
    sees of the store makes the stream look at it, and concludes nothing.
    """

    __slots__ = (
        '_buffer',
        '_bytes',
        '_confirmed',
        '_error',
        '_limit',
        '_position',
        '_reconcile_requested',
        '_strict',
        '_suspended_at',
        '_waiter',
        'behind',
        'confirming',
        'cursor',
        'min_seq',
        'not_confirmed',
        'owner',
        'reader',
        'reconcile_overdue',
        'state',
        'suspended',
        'task_id',
        'variables',
    )

    versions_comparable = True

    def __init__(
        self, task_id: str, owner: str | None, cursor: Cursor, reader: LogReader, *, strict: bool
    ) -> None:
        self.task_id = task_id
        self.owner = owner
        self.cursor = cursor
        self.min_seq = 0
        self.state: TaskState | None = None
        """The state last fed, where it is known."""
        self.behind = False
        """Whether the log may hold more than the buffer had room for."""
        self.reconcile_overdue = False
        """Whether the stream wanted to look at the store and could not."""
        self.suspended = False
        """Whether nothing may be fed until the stream has looked at the store."""
        self.confirming = False
        """Whether the stream waits for a read that begins now or later."""
        self.not_confirmed: Stored | None = NEVER
        """What the reader saw of the store and the stream's own look did not confirm."""
        self.reader = reader
        self.variables = copy_context()
        """The context variables of whoever subscribes."""
        self._limit = reader.page_size
        self._strict = strict
        # A list, since an empty deque takes ten times its room and most streams are idle.
        self._buffer: list[tuple[Event, Cursor, int]] = []
        self._bytes = 0
        self._position = cursor
        self._waiter: asyncio.Future[None] | None = None
        self._reconcile_requested = self._confirmed = False
        self._suspended_at: Stored | None = NEVER
        self._error: Exception | None = None

    @property
    def page(self) -> Page:
        """What the reader should read for this stream."""
        return Page(self.task_id, self.cursor, self.min_seq)

    @property
    def position(self) -> int:
        """The version of what was taken last."""
        return self._position.version

    @property
    def waiting(self) -> bool:
        """Whether the reader should read for this stream; a slow one asks by itself."""
        return not (self._error or self.suspended or (self.behind and self._buffer))

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
            if len(self._buffer) >= self._limit or self._bytes >= _MAX_BYTES:
                self.behind = True
                break
            if self.owner is None and not self._strict:
                # There was no task yet: whoever creates it owns it.
                self.owner = row.owner
            if row.owner != self.owner or row.cursor.seq <= self.min_seq:
                continue
            gap = row.cursor.version > self.cursor.version + 1 and self.cursor.version
            event = decode(row)
            if self._strict and (gap or event is None):
                self.request_reconcile()
                break
            if event is not None:
                self._buffer.append((event, row.cursor, len(row.data)))
                self._bytes += len(row.data)
                if isinstance(event, Task | TaskStatusUpdateEvent):
                    self.state = event.status.state
            self.cursor = row.cursor
        if self._buffer:
            self.behind = self.behind or more
            self._wake()
        elif more and self._strict:
            # Nothing in a whole page was for this stream: the store has to say, and has the log
            # read again. Until the stream looks, the page would be the same.
            self.request_reconcile()
        elif more and rows:
            self.cursor = rows[-1].cursor
            self.reader.schedule_read(self.task_id)

    def request_reconcile(self) -> None:
        """Makes the stream look at the store once it has taken what is buffered."""
        if self._strict or self.suspended:
            self._reconcile_requested = True
            self._wake()

    def suspend(self, seen: Stored | None) -> None:
        """Makes the stream look at the store before anything more is fed.

        Args:
            seen: What the reader saw: no task, another's, or a version that is behind the
                stream. It may not see what the stream's own caller does, and there may be
                another task under the id by the time a slow stream looks.
        """
        if self.suspended and seen == self._suspended_at:
            # The look that is under way, or was asked for, answers this too.
            return
        self._suspended_at = seen
        self.suspended = self._reconcile_requested = True
        self._wake()

    async def compare(
        self, version: TaskVersion, owner: str | None, position: TaskVersion | None = None
    ) -> None:
        """Takes what the stream's own look at the store has found.

        Args:
            version: The stored version.
            owner: The owner of the task's rows, where it is known.
            position: Where the stream stands, which is known here.

        Raises:
            TaskNotFoundError: The task was deleted and another is stored under its id.
            Exception: The log cannot be read.
        """
        del position
        number = sdk.version_number(version)
        # By now the new incarnation of a deleted task may have a higher version than the stream,
        # and the reader may have seen it since it saw no task.
        suspect = number > 0 and (
            self.suspended
            or number < self._position.version
            or (owner is not None and self.owner not in (None, owner))
        )
        if (
            self._suspended_at is None
            and number > 0
            # What the reader saw after this look had begun is for the next.
            and not self._reconcile_requested
            and await self.reader.current(self.task_id) is None
        ):
            self.reader.isolate(self, f'it does not see task {self.task_id}, which its owner does')
        elif suspect and await self.reader.recreated(self.task_id, self._position):
            raise TaskNotFoundError(f'Task {self.task_id} was deleted')
        self.owner = owner if owner is not None else self.owner
        if not self._reconcile_requested:
            self._resume()

    def _resume(self) -> None:
        if self.suspended:
            self.not_confirmed, self._suspended_at, self.suspended = (
                self._suspended_at,
                NEVER,
                False,
            )
            self.reader.schedule_read(self.task_id)

    async def is_exhausted(self, stored: StoredTask) -> bool:
        """Whether the log holds nothing for this stream, read once more from now on."""
        del stored
        self.confirming, self._confirmed = True, False
        self.reader.schedule_read(self.task_id)
        while not (self._buffer or self._error or self.suspended or self._confirmed):
            await self._wait()
        self.confirming = False
        return not (self._buffer or self._error or self.suspended)

    def confirm(self) -> None:
        """Notes that a read which began after `is_exhausted()` has brought all that there was."""
        self._confirmed = True
        self._wake()

    async def current(self) -> Current | None:
        """The stored version and state; `None` where only a look at the store can tell."""
        current = await self.reader.current(self.task_id)
        return current if current and current.owner == self.owner else None

    def reconcile_failed(self) -> None:
        """Makes the stream look once more when the database has been reached."""
        self.reconcile_overdue = True

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error once it has taken what is buffered."""
        self._error = self._error or error
        self._wake()

    def restart(self, stored: StoredTask) -> None:
        """Goes on behind a task that the stream got as a snapshot."""
        self.go_on_behind(sdk.version_number(stored.version))
        self.state = stored.task.status.state

    def go_on_behind(self, version: int) -> None:
        """Goes on behind a version, whatever was fed before."""
        self._buffer.clear()
        self._bytes = 0
        self.cursor = self._position = Cursor.end_of(version)
        # What the reader saw meanwhile is looked at, or it would never be fed again.
        self.behind, self._reconcile_requested = False, self.suspended
        self.reader.schedule_read(self.task_id)

    async def next(self) -> VersionedEvent | None:
        """Takes the next event, or `None` if the store should be looked at."""
        while not (self._buffer or self._error or self._reconcile_requested):
            await self._wait()
        if self._buffer:
            event, self._position, size = self._buffer.pop(0)
            self._bytes -= size
            if self.behind and not self._buffer:
                # What was doubted long ago may be in the log by now, and is judged anew.
                self.behind, self._reconcile_requested = False, self.suspended
                self.reader.schedule_read(self.task_id)
            # The event is shared by all streams of this replica.
            return VersionedEvent(
                event=deepcopy(event), version=TaskVersion(self._position.version)
            )
        if self._error:
            raise self._error
        self._reconcile_requested = False
        return None

    def close(self) -> None:
        """Leaves the reader, at once."""
        self.reader.leave(self)

    async def _wait(self) -> None:
        # A bare future, so that a cancellation is never swallowed (F8).
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
