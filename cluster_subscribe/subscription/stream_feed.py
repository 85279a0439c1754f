"""Any event stream as the feed of a subscription."""

import asyncio

from collections import deque
from contextlib import aclosing
from contextvars import copy_context

from a2a.server.cluster import (
    DatabaseTaskEventStream,
    StoredTask,
    TaskEventStream,
    TaskVersion,
    VersionedEvent,
)
from a2a.types import TaskState
from a2a.utils.errors import TaskNotFoundError

from cluster_subscribe import sdk
from cluster_subscribe.background import Background
from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.settings import Settings
from cluster_subscribe.subscription.rules import is_newer


class StreamFeed:
    """Reads any event stream, in a task of its own, into a bounded buffer.

    `next()` waits for a bare future, so that a cancellation is never swallowed (rule 6). A full
    buffer makes the reader wait, so that nothing is lost (rule 7).
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
        self.versions_comparable = isinstance(stream, DatabaseTaskEventStream)
        # What was committed before one read of the store has arrived here by the next.
        self._quiet = max(settings.reconcile_interval / 2, 2 * sdk.poll_interval(stream))
        self._limit = settings.max_buffered_events
        self._closed = False
        self._compared = 0
        self._missing: tuple[int, TaskVersion, TaskState] | None = None
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
        """Takes the stored version, as the stream has read it.

        Raises:
            TaskNotFoundError: Its version is lower, as that of a task that was recreated.
        """
        del owner
        self._compared += 1
        if self.versions_comparable and not version.is_missing and is_newer(position, version):
            raise TaskNotFoundError('The task was deleted')

    async def current(self) -> None:
        """Not known here."""

    async def is_exhausted(self, stored: StoredTask) -> bool:
        """Whether two reads of the store in a row found the same, or nothing more can come."""
        compared, *before = self._missing or (0,)
        found = [stored.version, stored.task.status.state]
        self._missing = self._compared, stored.version, stored.task.status.state
        return self.ended or (compared + 1 == self._compared and before == found)

    def reconcile_failed(self) -> None:
        """Does nothing: silence alone makes the stream compare itself with the store."""

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
            self._missing = None
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
