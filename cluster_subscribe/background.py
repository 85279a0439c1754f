"""The asyncio tasks of this package: named, awaited and ended together.

Queries never run in a subscriber's task, and none is cancelled while the database may
still answer. A transport cancels its task whenever a client leaves, and a driver that
is cancelled in mid-query can lose its connection.
"""

import asyncio
import logging

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, Final, Generic, TypeVar

from cluster_subscribe import waiting
from cluster_subscribe.errors import EventStreamEndedError

logger = logging.getLogger(__name__)

K = TypeVar('K', bound=Hashable)
T = TypeVar('T')

_GRACE: Final = 5.0
"""Seconds that a task may take to end before it is cancelled after all."""


class Background:
    """The asyncio tasks of one wrapped handler or event stream. Lives as long as the app."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], Callable[[], object]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the tasks run on."""
        self.closed = False

    def enter(self) -> bool:
        """Serves the running event loop from now on, if the one before has ended.

        Returns:
            Whether there was one before: its tasks are gone, whatever they held.

        Raises:
            EventStreamEndedError: The one before still runs.
        """
        loop, before = asyncio.get_running_loop(), self.loop
        if loop is before:
            return False
        if before is not None and before.is_running():
            raise EventStreamEndedError(
                'The handler serves another event loop that is still running: '
                'build one handler per loop'
            )
        self.loop = loop
        self._tasks.clear()
        return before is not None

    def can_run(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task may be started in the running loop in the place of one that has ended."""
        try:
            self.enter()
        except EventStreamEndedError:
            return False
        return not self.closed and task not in self._tasks

    def spawn(
        self,
        work: Coroutine[Any, Any, T],
        name: str,
        stop: Callable[[], object],
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Starts `work` in a task of its own.

        Args:
            work: What to do.
            name: What it is called in a list of tasks.
            stop: Asks it to end.
            context: The context variables to run with, of which it gets a copy. None when
                not given: it may outlive the request that happens to start it.

        Raises:
            EventStreamEndedError: After `aclose()`, or on another loop than the one that it
                serves.
        """
        try:
            self.enter()
            if self.closed:
                raise EventStreamEndedError('The server is stopping')  # noqa: TRY301 - see below
        except EventStreamEndedError:
            work.close()
            raise
        # Python 3.10 has no create_task(context=...).
        task = (context or Context()).run(
            asyncio.create_task, work, name=f'cluster-subscribe: {name}'
        )
        self._tasks[task] = stop
        task.add_done_callback(self._forget)
        return task

    def start(
        self, work: Coroutine[Any, Any, T], name: str, context: Context | None = None
    ) -> asyncio.Task[T]:
        """Starts `work` that ends by itself."""
        return self.spawn(work, name, lambda: None, context)

    async def run(
        self, work: Coroutine[Any, Any, T], name: str, context: Context | None = None
    ) -> T:
        """Awaits `work` in a task of its own, which a cancelled caller leaves to finish.

        Args:
            work: What to do.
            name: What it is called in a list of tasks.
            context: The context variables to run with; the caller's when not given.

        Raises:
            TimeoutError: It took too long, as on a half-open connection.
        """
        context = copy_context() if context is None else context
        task = self.start(work, name, context)
        return await self.answer(task)

    async def answer(self, task: asyncio.Task[T]) -> T:
        """Awaits a task, which a cancelled caller leaves to finish.

        Raises:
            TimeoutError: It took too long, as on a half-open connection.
            EventStreamEndedError: `aclose()` ended it.
        """
        await asyncio.wait({task}, timeout=waiting.ANSWER_TIMEOUT)
        if not task.done():
            task.cancel()
            raise TimeoutError(f'no answer within {waiting.ANSWER_TIMEOUT:g} seconds')
        if task.cancelled():
            # Nobody cancelled the caller.
            raise EventStreamEndedError('The server is stopping')
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits for the task gets the error; nobody may be left to.
            logger.debug('%s failed', task.get_name(), exc_info=error)

    async def aclose(self) -> None:
        """Asks every task to end and waits until all are gone. Safe to call again.

        Raises:
            EventStreamEndedError: On another loop than the one that it serves.
        """
        self.enter()
        self.closed = True
        for stop in list(self._tasks.values()):
            stop()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=_GRACE)
            for task in late:
                task.cancel()
            if late:
                # A half-open connection may hold even a cancelled task.
                await asyncio.wait(late, timeout=_GRACE)


class SharedReads(Generic[K, T]):
    """Reads by key, once for all who ask: whoever asks while it reads waits for the next.

    So nobody gets an answer that is older than the question.
    """

    def __init__(
        self,
        background: Background,
        read: Callable[[Sequence[K]], Coroutine[Any, Any, Mapping[K, T]]],
        name: str,
        context: Context | None = None,
    ) -> None:
        self._background = background
        self._read = read
        self._name = name
        self._context = context
        self._pending: dict[K, list[asyncio.Future[T | None]]] = {}
        self._reading = False

    async def get(self, key: K) -> T | None:
        """What a read that starts now or later finds for a key.

        Raises:
            Exception: Whatever the read failed with.
        """
        future: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(key, []).append(future)
        if not self._reading:
            self._reading = True
            try:
                _ = self._background.start(self._serve(), self._name, self._context)
            except BaseException:
                self._reading = False
                self._pending.clear()
                raise
        return await future

    async def _serve(self) -> None:
        pending: dict[K, list[asyncio.Future[T | None]]] = {}
        error: Exception = EventStreamEndedError('The server is stopping')
        try:
            while self._pending:
                # Who asks in this iteration of the event loop is answered by one read.
                await asyncio.sleep(0)
                pending, self._pending = self._pending, {}
                pending = {
                    key: open_
                    for key, futures in pending.items()
                    if (open_ := [future for future in futures if not future.done()])
                }
                if not pending:
                    continue
                try:
                    found = await waiting.in_time(self._read(list(pending)))
                except Exception as failed:  # noqa: BLE001 - is given to whoever asked
                    _fail(pending, failed)
                    continue
                for key, futures in pending.items():
                    for future in futures:
                        if not future.done():
                            future.set_result(found.get(key))
        finally:
            self._reading = False
            _fail(pending, error)
            _fail(self._pending, error)


def _fail(pending: Mapping[Any, list['asyncio.Future[Any]']], error: Exception) -> None:
    for futures in pending.values():
        for future in futures:
            if not future.done():
                future.set_exception(error)
