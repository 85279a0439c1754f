"""Between a replica's reader and its log."""

import asyncio

from collections.abc import Awaitable, Callable
from typing import Any, Final

from cluster_subscribe import SharedTailEventStream
from cluster_subscribe._testing import Replica
from tests.model.clock import Clock

POLL: Final = 0.5


class Reading:
    """Between a reader and its log: counts looks, and stops one in the middle."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._clock = clock
        stream = replica.stock._event_stream
        assert isinstance(stream, SharedTailEventStream)
        self.stream = stream
        self.reader = stream._reader
        self.now = self.looked = 0
        self.stop_at: str | None = None
        self.stopped = self._busy = False
        self._go = asyncio.Event()
        self._round = self.reader._round
        self.reader._round = self._counted  # type: ignore[method-assign]
        for name in ('pages', 'stored'):
            query = getattr(self.reader._log, name)
            setattr(self.reader._log, name, self._stopping(name, query))

    @property
    def running(self) -> bool:
        return self.reader.statistics().watched_tasks > 0

    @property
    def idle(self) -> bool:
        """Whether the reader has nothing to read."""
        return not (self._busy or self.reader._wake_event.is_set()) or not self.running

    def waiting(self) -> int:
        """How many streams have taken all that was read for them."""
        return sum(s._waiter is not None and not s._waiter.done() for s in self.reader._watched)

    def go(self) -> None:
        self.stop_at = None
        self._go.set()

    async def _counted(self, dirty: dict[str, None], *, check: bool, timeout: float) -> None:
        began = self.now
        self._busy = True
        try:
            await self._round(dirty, check=check, timeout=timeout)
        finally:
            self._busy = False
        if check:
            self.looked = began
            if began < self.now:
                # It had begun before the time that has passed meanwhile.
                self._clock.call_soon(self._clock.move_on, POLL)

    def _stopping(self, name: str, query: Callable[..., Awaitable[Any]]) -> Any:
        async def ask(*arguments: Any) -> Any:
            answer = await query(*arguments)
            if self.stop_at == name and asyncio.current_task() is self.reader._task:
                self.stopped = True
                self._go.clear()
                await self._go.wait()
                self.stopped = False
            return answer

        return ask
