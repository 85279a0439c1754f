"""Tasks of our own: named, watched, and ended together.

Queries never run in a subscriber's task. A transport cancels that task whenever
its client leaves, and a driver that is cancelled in mid-query can lose its
connection.
"""

import asyncio
import logging

from collections.abc import Coroutine
from typing import Any, TypeVar

from cluster_subscribe.errors import EventStreamEndedError

logger = logging.getLogger(__name__)

T = TypeVar('T')


class Background:
    """The asyncio tasks of one wrapped handler. Lives as long as the app."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts `work` in a task of its own.

        Raises:
            EventStreamEndedError: After `aclose()`.
        """
        if self._closed:
            work.close()
            raise EventStreamEndedError('The server is stopping')
        task = asyncio.create_task(work, name=f'cluster-subscribe:{name}')
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Awaits `work` in a task of its own, which a cancelled caller leaves to finish."""
        return await asyncio.shield(self.spawn(work, name))

    def end(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task, once: a second cancellation would interrupt its tidying up."""
        if task in self._tasks and task not in self._ending:
            self._ending.add(task)
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever still waits for the task gets the error; nobody may be left to.
            logger.debug('%s failed', task.get_name(), exc_info=error)

    async def aclose(self) -> None:
        """Ends every task and waits until they are gone. Safe to call again."""
        self._closed = True
        for task in (tasks := list(self._tasks)):
            self.end(task)
        await asyncio.gather(*tasks, return_exceptions=True)
