"""One stream's place in the log, and the few events it has not taken yet."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from copy import deepcopy
from typing import Final

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.types import Task, TaskState, TaskStatusUpdateEvent
from a2a.utils.errors import TaskNotFoundError

from cluster_subscribe import sdk
from cluster_subscribe.event_log.buffer import EventBuffer
from cluster_subscribe.event_log.log_reader import LogReader
from cluster_subscribe.event_log.rows import Current, Cursor, Page, Row, Stored

Decode = Callable[[Row], Event | None]
"""Gives the event of a row, `None` if it cannot be decoded."""
_NOTHING: Final = Stored(None, -1)
"""Stands for no observation, as `None` is one: that no task is stored."""


class Subscriber(EventBuffer):
    """What the reader has for one stream, and how far it has read for it.

    The reader feeds it and the stream takes from it. Only `feed()`, `restart()` and
    `continue_after()` move the cursor. Where the reader finds that the store differs, the
    stream is made to read the stored task, as `next()` returns `None`.
    """

    __slots__ = (
        '_error',
        '_observed',
        '_position',
        '_read_confirmed',
        '_reader',
        '_reconcile_requested',
        '_refuted',
        '_retry_reconcile',
        '_strict',
        'awaits_read',
        'cursor',
        'log_has_more',
        'min_seq',
        'owner',
        'state',
        'suspended',
        'task_id',
        'variables',
    )

    versions_comparable = True

    def __init__(  # noqa: PLR0913 - a stream's own, and its reader
        self,
        task_id: str,
        owner: str | None,
        cursor: Cursor,
        reader: LogReader,
        *,
        state: TaskState | None = None,
        strict: bool,
    ) -> None:
        super().__init__(reader.page_size)
        self.task_id = task_id
        self.owner = owner
        """Whose rows alone are taken; `None` where that is not known."""
        self.cursor = cursor
        self.min_seq = 0
        """Rows up to this `seq` belong to an earlier incarnation of the task."""
        self.state = state
        """The state that was fed last, where it is known."""
        self.log_has_more = False
        """Whether the log may hold more than the buffer had room for."""
        self.suspended = False
        """Whether nothing may be fed until the stream has read the store."""
        self.awaits_read = False
        """Whether the stream waits for a read of the log that begins now or later."""
        self.variables = copy_context()
        """The context variables of whoever subscribes."""
        self._reader = reader
        self._strict = strict
        """Whether the stream reads the store at a gap in the log; if not, it passes over it."""
        self._position = cursor
        self._error: Exception | None = None
        self._read_confirmed = self._reconcile_requested = self._retry_reconcile = False
        self._observed: Stored | None = _NOTHING
        """What the reader saw of the store when it suspended the stream."""
        self._refuted: Stored | None = _NOTHING
        """What the reader saw, and the stream did not find when it read the store."""

    @property
    def page(self) -> Page:
        """What the reader should read for this stream."""
        return Page(self.task_id, self.cursor, self.min_seq)

    @property
    def position(self) -> int:
        """The version of what was taken last."""
        return self._position.version

    @property
    def accepts_rows(self) -> bool:
        """Whether the reader should read for this stream: a slow one asks when it has room."""
        return not (self._error or self.suspended or (self.log_has_more and self._buffer))

    @property
    def ended(self) -> bool:
        """Never: the log ends with an error or not at all."""
        return False

    def feed(self, rows: Sequence[Row], decode: Decode, *, more: bool) -> None:
        """Takes the rows after the cursor, up to the first that cannot be right.

        `more` says that the log may hold more than these.
        """
        for row in rows:
            if self._is_full:
                self.log_has_more = True
                break
            if self.owner is None and not self._strict:
                # There was no task yet: whoever creates it owns it.
                self.owner = row.owner
            if self._is_anothers(row) or row.cursor.seq <= self.min_seq:
                continue
            event = decode(row)
            if self._strict and (event is None or self._misses_before(row)):
                self.request_reconcile()
                break
            if event is not None:
                self._put(event, row.cursor, len(row.data))
                if isinstance(event, Task | TaskStatusUpdateEvent):
                    self.state = event.status.state
            self.cursor = row.cursor
        if self._buffer:
            self.log_has_more = self.log_has_more or more
            self._wake()
        elif more and self._strict:
            # Nothing in a whole page was for this stream. It reads the store, then has the log
            # read again; until then the page would be the same.
            self.request_reconcile()
        elif more and rows:
            self.cursor = rows[-1].cursor
            self._reader.schedule_read(self.task_id)

    def _is_anothers(self, row: Row) -> bool:
        return row.owner != self.owner

    def _misses_before(self, row: Row) -> bool:
        return self.cursor.version > 0 and row.cursor.version > self.cursor.version + 1

    def skip_up_to(self, min_seq: int) -> None:
        """Leaves out the rows up to a `seq`, which an earlier incarnation has left.

        Where they are left out already, and are not all, the stream has to read the store.
        """
        if min_seq > self.min_seq:
            self.min_seq = min_seq
        else:
            self.request_reconcile()
        self._reader.schedule_read(self.task_id)

    def move_to(self, reader: LogReader) -> None:
        """Has the stream fed by another reader."""
        self._reader = reader

    def request_reconcile(self) -> None:
        """Makes the stream read the store once it has taken what is buffered."""
        if self._strict or self.suspended:
            self._reconcile_requested = True
            self._wake()

    def suspend(self, observed: Stored | None) -> None:
        """Makes the stream read the store before anything more is fed.

        The reader has observed no task, another's, or a version that is lower than the stream's.
        It may not see what the stream's own caller does, and there may be another task under the
        id by the time a slow stream reads the store.
        """
        if self.suspended and observed == self._observed:
            # Reading the store, which is under way or was requested, answers this too.
            return
        self._observed = observed
        self.suspended = self._reconcile_requested = True
        self._wake()

    def has_refuted(self, observed: Stored | None) -> bool:
        """Whether the reader saw this before, and the stream did not find it in the store."""
        return self._refuted == observed

    def forget_refuted(self) -> None:
        """Lets the stream be suspended again for what it did not find in the store."""
        self._refuted = _NOTHING

    def reconcile_failed(self) -> None:
        """Makes the stream read the store again when the database has been reached."""
        self._retry_reconcile = True

    def retry_reconcile(self, observed: Stored | None) -> None:
        """Makes the stream read the store again if it failed to; the reader has seen `observed`."""
        if self._retry_reconcile:
            self._retry_reconcile = False
            self.request_reconcile()
            if self.suspended:
                self.suspend(observed)

    async def compare(
        self, version: TaskVersion, owner: str | None, position: TaskVersion | None = None
    ) -> None:
        """Takes the stored version and owner, as the stream has read them, and resumes.

        Raises:
            TaskNotFoundError: The task was deleted and another is stored under its id.
            Exception: The log cannot be read.
        """
        del position
        number = sdk.version_number(version)
        # By now the new incarnation of a deleted task may have a higher version than the stream,
        # and the reader may have seen it since it saw no task.
        may_be_another = number > 0 and (
            self.suspended
            or number < self._position.version
            or (owner is not None and self.owner not in (None, owner))
        )
        if (
            self._observed is None
            and number > 0
            # What the reader saw after the stream had begun to read is for the next time.
            and not self._reconcile_requested
            and await self._reader.current(self.task_id) is None
        ):
            self._reader.isolate(self, f'it does not see task {self.task_id}, which its owner does')
        elif may_be_another and await self._reader.recreated(self.task_id, self._position):
            raise TaskNotFoundError(f'Task {self.task_id} was deleted')
        self.owner = owner if owner is not None else self.owner
        if self.suspended and not self._reconcile_requested:
            self._refuted, self._observed, self.suspended = self._observed, _NOTHING, False
            self._reader.schedule_read(self.task_id)

    async def is_exhausted(self, stored: StoredTask) -> bool:
        """Whether the log holds nothing for this stream, read once more from now on."""
        del stored
        self.awaits_read, self._read_confirmed = True, False
        self._reader.schedule_read(self.task_id)
        while not (self._buffer or self._error or self.suspended or self._read_confirmed):
            await self._wait()
        self.awaits_read = False
        return not (self._buffer or self._error or self.suspended)

    def confirm_read(self) -> None:
        """Ends the wait of `is_exhausted()`: a read that began after it has brought everything."""
        self._read_confirmed = True
        self._wake()

    async def current(self) -> Current | None:
        """The stored version and state; `None` where the stream has to read the store itself."""
        current = await self._reader.current(self.task_id)
        return current if current and current.owner == self.owner else None

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error once it has taken what is buffered."""
        self._error = self._error or error
        self._wake()

    def restart(self, stored: StoredTask) -> None:
        """Goes on after a task that the stream got as a snapshot."""
        self.continue_after(sdk.version_number(stored.version))
        self.state = stored.task.status.state

    def continue_after(self, version: int) -> None:
        """Goes on after a version, and drops what is buffered."""
        self._clear()
        self.cursor = self._position = Cursor.end_of(version)
        # What the reader saw meanwhile still needs the store, or the stream would stay suspended.
        self.log_has_more, self._reconcile_requested = False, self.suspended
        self._reader.schedule_read(self.task_id)

    async def next(self) -> VersionedEvent | None:
        """Takes the next event, or `None` if the stream should read the store."""
        while not (self._buffer or self._error or self._reconcile_requested):
            await self._wait()
        if self._buffer:
            event, self._position = self._take()
            if self.log_has_more and not self._buffer:
                # An earlier request to read the store may be met by rows that are in the log now.
                self.log_has_more, self._reconcile_requested = False, self.suspended
                self._reader.schedule_read(self.task_id)
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
        self._reader.leave(self)
