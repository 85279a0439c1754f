"""What tasks wait with: bare futures, so that no cancellation is lost.

On the older Pythons `asyncio.wait_for` may swallow a cancellation (F8), and it starts another task
for each call.
"""

import asyncio

from collections import deque
from collections.abc import Awaitable
from typing import Final, TypeVar

T = TypeVar('T')

ANSWER_TIMEOUT: Final = 30.0
"""Seconds that a database may take for an answer that somebody waits for."""


async def in_time(work: Awaitable[T], seconds: float | None = None) -> T:
    """Awaits `work`, and cancels it each time so many seconds have passed.

    More than once, since what tidies up after a cancelled query may use the same half-open
    connection. Only for a task of this package's own, as it is cancelled.

    Args:
        work: What to do.
        seconds: The limit; as long as a database may take for an answer when not given.

    Raises:
        TimeoutError: It was cancelled.
    """
    seconds = ANSWER_TIMEOUT if seconds is None else seconds
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - for the type checker
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    late = False

    def give_up() -> None:
        nonlocal late, timer
        late = True
        task.cancel()
        timer = loop.call_later(seconds, give_up)

    timer = loop.call_later(seconds, give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if not late:
            raise
        raise TimeoutError(f'no answer within {seconds:g} seconds') from None
    finally:
        timer.cancel()


class Signal:
    """A flag that may be waited for, with a limit, by any number of tasks.

    A task for each wait would cost an event several iterations of the loop.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Sets it and wakes whoever waits."""
        self._set = True
        for waiter in self._waiters:
            _release(waiter)

    def clear(self) -> None:
        """Unsets it."""
        self._set = False

    async def within(self, seconds: float) -> bool:
        """Waits until it is set; `False` if it was not within `seconds`."""
        if self._set or seconds <= 0:
            return self._set
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _release, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)
        return self._set


def _release(waiter: 'asyncio.Future[None]') -> None:
    if not waiter.done():
        waiter.set_result(None)


class Slots:
    """A semaphore for so many at once, in the order in which they came."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Waits for a free one."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Gives one back, to whoever has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
