"""Waiting that never swallows a cancellation."""

import asyncio


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Waits until an event is set; `False` if it was not within `seconds`.

    `asyncio.wait_for` may swallow a cancellation on the older Pythons.
    """
    if event.is_set() or seconds <= 0:
        return event.is_set()
    loop = asyncio.get_running_loop()
    waiting = loop.create_task(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
        return event.is_set()
    finally:
        waiting.cancel()
