"""How a test waits: for something to be true, never for time to pass."""

import asyncio

from collections.abc import Callable

BACKSTOP = 60.0
"""Seconds after which something counts as hung."""


async def eventually(happened: Callable[[], object]) -> None:
    for _ in range(int(BACKSTOP * 100)):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise AssertionError('It never happened')
