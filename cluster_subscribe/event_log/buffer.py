"""The few events that were read for a stream and not taken yet."""

import asyncio

from typing import Final

from a2a.server.events import Event

from cluster_subscribe.event_log.rows import Cursor

_MAX_BYTES: Final = 1 << 20
"""Bytes of events that a buffer may hold, unless a single one is larger."""


class EventBuffer:
    """A bounded buffer of events, for one task that waits for them.

    Args:
        max_events: How many it may hold.
    """

    __slots__ = ('_buffer', '_bytes', '_max_events', '_waiter')

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        # A list, since an empty deque takes ten times its room and most streams are idle.
        self._buffer: list[tuple[Event, Cursor, int]] = []
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def drained(self) -> bool:
        """Whether nothing is buffered."""
        return not self._buffer

    @property
    def _is_full(self) -> bool:
        return len(self._buffer) >= self._max_events or self._bytes >= _MAX_BYTES

    def _put(self, event: Event, cursor: Cursor, size: int) -> None:
        self._buffer.append((event, cursor, size))
        self._bytes += size

    def _take(self) -> tuple[Event, Cursor]:
        event, cursor, size = self._buffer.pop(0)
        self._bytes -= size
        return event, cursor

    def _clear(self) -> None:
        self._buffer.clear()
        self._bytes = 0

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
