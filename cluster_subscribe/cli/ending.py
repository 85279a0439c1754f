"""How a command ends: its exit status, its one line on stderr, its signals."""

import asyncio
import os
import signal
import threading

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar('T')

RIGHT: Final = 0
BROKEN: Final = 1
"""The wrapped run breaks the contract."""
UNUSABLE: Final = 2
"""Bad usage, an unreachable database, a missing package."""
SIGNALLED: Final = 128
"""Plus the number of the signal that ended the command."""
_GRACE: Final = 2.0
"""Seconds for what is left in the loop of a command that was ended and has tidied up."""


class Failure(Exception):  # noqa: N818 - what the user is told of, not what went wrong in here
    """Ends the command as unusable: what is wrong, with its remedy if there is one.

    Whatever it is made of, it is one line.
    """

    def __str__(self) -> str:
        return ' '.join(super().__str__().split())


def reason(error: BaseException) -> str:
    """The first line of what an error, or the driver's error below it, has to say."""
    error = getattr(error, 'orig', None) or error
    # Drivers and the operating system put a number before their words.
    numbered = len(error.args) > 1 and isinstance(error.args[0], int)
    said = error.args[1] if numbered else error
    # SQLAlchemy may put the class of the error that it translates before the words.
    words = str(said).removeprefix(f'{type(error.__cause__)}: ').strip()
    return next(iter(words.splitlines()), type(error).__name__)


def run_until_signalled(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine to its result.

    The first Ctrl-C or SIGTERM cancels it, so that it tidies up. Later ones are ignored:
    whoever is impatient would leave processes and rows behind.

    Raises:
        SystemExit: A signal ended it; the status is 128 plus the signal's number.
    """
    caught: list[int] = []

    async def supervised() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker

        def stop(number: int) -> None:
            caught.append(number)
            # The thread of a cancelled query may still speak to a loop that is gone.
            threading.excepthook = lambda _: None
            for each in signals:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_IGN)
            task.cancel()

        signals = signal.SIGINT, signal.SIGTERM
        try:
            for each in signals:
                loop.add_signal_handler(each, stop, each)
        except NotImplementedError:
            # A loop without signal handlers (Windows): there Ctrl-C alone cancels.
            pass
        try:
            return await work
        finally:
            if caught:
                end.start()

    # A driver that was cancelled while it connected may keep its loop busy for ever.
    end = threading.Timer(_GRACE, lambda: os._exit(SIGNALLED + caught[0]))
    end.daemon = True
    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        if not caught:
            raise
        raise SystemExit(SIGNALLED + caught[0]) from None
    finally:
        end.cancel()
