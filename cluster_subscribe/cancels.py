"""A cancel, from the request to its end: one of a task at a time, whoever still waits for it.

Two at once would cancel the SDK's producer twice, and the second time while it closes its queues:
then neither ever returns, or the loser gets the store's raw error (F33). And a cancel whose
client leaves in the middle would end the turn without storing CANCELED (F34).
"""

import asyncio
import logging

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Final

from a2a.server.cluster import ConcurrentTaskModificationError, StoredTask, VersionedTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.types import CancelTaskRequest, Task, TaskState
from a2a.utils.errors import A2AError, InternalError, TaskNotCancelableError, TaskNotFoundError

from cluster_subscribe.background import Background
from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.executor_seam import ExecutorSeam
from cluster_subscribe.local_tasks import LocalTasks
from cluster_subscribe.subscription.rules import TERMINAL_STATES

logger = logging.getLogger(__name__)

_IGNORED_AFTER: Final = 1.0
"""Seconds that `execute()` may go on after the agent's `cancel()` until the next cancel begins."""


class Cancels:
    """The cancels of one wrapped handler. Lives as long as the app."""

    def __init__(  # noqa: PLR0913
        self,
        handler: RequestHandler,
        *,
        store: VersionedTaskStore,
        tasks: LocalTasks,
        turns: ExecutorSeam | None,
        read: Callable[[str, ServerCallContext], Awaitable[StoredTask | None]],
        wake: Callable[[str], None],
        background: Background,
    ) -> None:
        """Guards `on_cancel_task` of `handler`.

        Args:
            handler: The wrapped handler.
            store: Its store.
            tasks: What this replica's memory holds.
            turns: What runs its agent.
            read: Reads the task with the caller's rights, and raises where it cannot.
            wake: Tells the streams of every replica that a task has changed.
            background: What runs the cancels.
        """
        self._handler = handler
        self._store = store
        self._tasks = tasks
        self._turns = turns
        self._read = read
        self._wake = wake
        self._background = background
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, _Queue] = {}
        """The queue of each task that has a cancel under way in the event loop."""

    async def cancel(self, params: CancelTaskRequest, context: ServerCallContext) -> Task | None:
        """Delegates a cancel, which goes on if the caller is cancelled.

        It takes as long as the agent's `cancel()` does.

        Returns:
            The wrapped handler's own answer; the task as stored, if it was canceled meanwhile.

        Raises:
            TaskNotFoundError: The task is unknown, or another owner's.
            TaskNotCancelableError: The task has ended otherwise, or had before.
            InternalError: `aclose()` ended the cancel.
            Exception: Whatever the wrapped handler raised.
        """
        task_id = params.id
        queue = self._queue(task_id)
        overlaps = queue is not None
        if queue is None:
            queue = self._queues[task_id] = _Queue()
        elif await self._is_refused(task_id, context):
            # At once, so that an agent that hangs holds nobody up whose task it is not.
            return await self._answer(params, context, overlaps=True)
        await queue.take(partial(self._is_ignored, task_id))
        try:
            task = self._background.start(
                self._answer(params, context, overlaps=overlaps),
                f'cancel {task_id}',
                copy_context(),
            )
        except EventStreamEndedError:
            # After aclose(), and on a second event loop, it is left to the SDK.
            try:
                return await self._answer(params, context, overlaps=overlaps)
            finally:
                self._release(task_id, queue)
        task.add_done_callback(lambda _: self._release(task_id, queue))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(partial(_log_failure, task_id))
            raise
        if task.cancelled() and self._background.closed:
            # Nobody cancelled the caller.
            raise InternalError(message='The server is stopping')
        return task.result()

    async def settled(self, task_id: str) -> None:
        """Waits until no cancel of a task is under way here."""
        if (queue := self._queue(task_id)) is not None:
            await queue.take(lambda: False)
            self._release(task_id, queue)

    def _queue(self, task_id: str) -> '_Queue | None':
        if (loop := asyncio.get_running_loop()) is not self._loop:
            self._loop, self._queues = loop, {}
        return self._queues.get(task_id)

    def _release(self, task_id: str, queue: '_Queue') -> None:
        queue.release()
        if not queue.taken and self._queues.get(task_id) is queue:
            del self._queues[task_id]

    def _is_ignored(self, task_id: str) -> bool:
        return self._turns is not None and self._turns.ignores_cancel(task_id, _IGNORED_AFTER)

    async def _is_refused(self, task_id: str, context: ServerCallContext) -> bool:
        """Whether the SDK refuses a cancel at once; `False` also where that cannot be told."""
        try:
            stored = await self._read(task_id, context)
        except Exception:  # noqa: BLE001 - the SDK's own read says so if it fails as well
            return False
        return stored is None or stored.task.status.state in TERMINAL_STATES

    async def _answer(
        self, params: CancelTaskRequest, context: ServerCallContext, *, overlaps: bool
    ) -> Task | None:
        """Cancels, and wakes the streams unless the cancel was refused."""
        try:
            canceled = await self._delegate(params, context, overlaps=overlaps)
        except A2AError:
            raise
        except Exception:
            with suppress(EventStreamEndedError):
                _ = self._background.start(
                    self._wake_if_found(params.id, context), f'wake {params.id}', copy_context()
                )
            raise
        # The SDK may log CANCELED without a publish (F11).
        self._wake(params.id)
        return canceled

    async def _wake_if_found(self, task_id: str, context: ServerCallContext) -> None:
        # The caller may not have such a task, and a hint goes to every replica.
        if await self._read(task_id, context) is not None:
            self._wake(task_id)

    async def _delegate(
        self, params: CancelTaskRequest, context: ServerCallContext, *, overlaps: bool
    ) -> Task | None:
        try:
            await self._tasks.drop_stale_copy(params.id, context)
            with self._tasks.request(params.id):
                return await self._handler.on_cancel_task(params, context)
        except (ConcurrentTaskModificationError, TaskNotCancelableError) as error:
            refused = isinstance(error, TaskNotCancelableError)
            # Where the task ended while it was being canceled, the SDK gives a cause.
            if not self._is_the_sdks_own or (refused and not overlaps and not error.__cause__):
                raise
            try:
                stored = await self._store.get(params.id, context)
            except Exception:
                logger.debug('Task %s could not be read again', params.id, exc_info=True)
                raise error from None
            if stored is None:
                raise TaskNotFoundError from None
            if stored.task.status.state == TaskState.TASK_STATE_CANCELED:
                return stored.task
            if refused:
                raise
            raise TaskNotCancelableError from None

    @property
    def _is_the_sdks_own(self) -> bool:
        """Whether the handler has no `on_cancel_task` of its own, whose rules are not known."""
        method = self._handler.on_cancel_task
        return (
            getattr(method, '__func__', None) is DefaultRequestHandler.on_cancel_task
            and getattr(method, '__self__', None) is self._handler
        )


class _Queue:
    """The cancels of one task, in the order in which they came."""

    def __init__(self) -> None:
        self.taken = 0
        """How many are under way: more than one only where an agent ignores cancels."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, ignored: Callable[[], bool]) -> None:
        """Waits until no other cancel is under way, or the agent has ignored it."""
        if not self.taken:
            self.taken = 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=_IGNORED_AFTER)
                if not turn.done() and ignored():
                    turn.cancel()
                    self.taken += 1
        except BaseException:
            if not turn.cancel():
                self.release()
            raise

    def release(self) -> None:
        """Ends one that is under way."""
        self.taken -= 1
        while self._waiting and not self.taken:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.taken = 1


def _log_failure(task_id: str, cancel: 'asyncio.Task[Task | None]') -> None:
    error = None if cancel.cancelled() else cancel.exception()
    if error is not None and not isinstance(error, A2AError):
        logger.warning(
            'The cancel of task %s failed after its client had left (%s)',
            task_id,
            type(error).__name__,
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )
