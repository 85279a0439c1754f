"""A loop whose clock is moved on by hand."""

import asyncio

from collections.abc import Callable

BACKSTOP, PARTS = 12.0, 4
"""Seconds after which something that should have happened counts as never happening."""


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is moved on, and which says when something has come true."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._hopes: dict[asyncio.Future[None], Callable[[], object]] = {}
        super().__init__()

    def time(self) -> float:
        """The time, as far as anybody in this loop can tell."""
        return super().time() + self._ahead

    def move_on(self, seconds: float) -> None:
        """Lets time pass at once."""
        self._ahead += seconds

    async def until(self, come_true: Callable[[], object], what: str) -> None:
        """Waits until something is true while no callback waits for its turn."""
        hope = self.create_future()
        self._hopes[hope] = come_true
        try:
            # In parts: a process that was stopped for a while is late for one of them only.
            for _ in range(PARTS):
                if (await asyncio.wait({hope}, timeout=BACKSTOP / PARTS))[0]:
                    return
        finally:
            del self._hopes[hope]
        raise AssertionError(f'It never happened: {what}')

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        if not self._ready:  # type: ignore[attr-defined]
            for hope, come_true in self._hopes.items():
                if not hope.done() and come_true():
                    hope.set_result(None)
