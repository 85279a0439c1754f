"""A cancel, from the request to its end: one of a task at a time, whoever still waits for it.

Two at once would cancel the SDK's producer twice, and the second time while it closes its queues:
then neither ever returns, or the loser gets the store's raw error (F33). And a cancel whose
client leaves in the middle would end the turn without storing CANCELED (F34).
"""

import asyncio

from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from weakref import WeakKeyDictionary

from a2a.server.cluster import ConcurrentTaskModificationError, StoredTask, VersionedTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.types import CancelTaskRequest, Task, TaskState
from a2a.utils.errors import A2AError, InternalError, TaskNotCancelableError, TaskNotFoundError

from cluster_subscribe.background import Background
from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.local_tasks import LocalTasks
from cluster_subscribe.subscription.rules import TERMINAL_STATES


class Cancels:
    """The cancels of one wrapped handler. Lives as long as the app."""

    def __init__(  # noqa: PLR0913
        self,
        handler: RequestHandler,
        *,
        store: VersionedTaskStore,
        tasks: LocalTasks,
        read: Callable[[str, ServerCallContext], Awaitable[StoredTask | None]],
        wake: Callable[[str], None],
        background: Background,
    ) -> None:
        """Guards `on_cancel_task` of `handler`.

        Args:
            handler: The wrapped handler.
            store: Its store.
            tasks: What this replica's memory holds.
            read: Reads the task with the caller's rights; `None` also where it cannot.
            wake: Tells the streams of every replica that a task has changed.
            background: What runs the cancels.
        """
        self._handler = handler
        self._store = store
        self._tasks = tasks
        self._read = read
        self._wake = wake
        self._background = background
        self._queues: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[str, deque[asyncio.Future[None]]]
        ] = WeakKeyDictionary()
        """Who waits for the cancel under way, by event loop and task."""

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
        try:
            task = self._background.start(
                self._cancel(params, context), f'cancel {params.id}', copy_context()
            )
        except EventStreamEndedError:
            # After aclose(), and on a second event loop, it is left to the SDK.
            return await self._cancel(params, context)
        await asyncio.wait({task})
        if task.cancelled() and self._background.closed:
            # Nobody cancelled the caller.
            raise InternalError(message='The server is stopping')
        return task.result()

    async def _cancel(self, params: CancelTaskRequest, context: ServerCallContext) -> Task | None:
        task_id = params.id
        queues = self._queues.setdefault(asyncio.get_running_loop(), {})
        overlaps = task_id in queues
        if overlaps:
            stored = await self._read(task_id, context)
            if stored is None or stored.task.status.state in TERMINAL_STATES:
                # The SDK refuses it at once; an agent that hangs holds nobody up whose task it
                # is not.
                return await self._answer(params, context, overlaps=True)
        await _take_turn(queues, task_id)
        try:
            return await self._answer(params, context, overlaps=overlaps)
        finally:
            _pass_on(queues, task_id)

    async def _answer(
        self, params: CancelTaskRequest, context: ServerCallContext, *, overlaps: bool
    ) -> Task | None:
        """Cancels, and wakes the streams unless the cancel was refused."""
        try:
            canceled = await self._delegate(params, context, overlaps=overlaps)
        except A2AError:
            raise
        except Exception:
            # The caller may not have such a task, and a hint goes to every replica.
            if await self._read(params.id, context) is not None:
                self._wake(params.id)
            raise
        # The SDK may log CANCELED without a publish (F11).
        self._wake(params.id)
        return canceled

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
            stored = await self._store.get(params.id, context)
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


async def _take_turn(queues: dict[str, deque['asyncio.Future[None]']], task_id: str) -> None:
    """Waits until no other cancel of the task is under way, in the order of those who wait."""
    if task_id not in queues:
        queues[task_id] = deque()
        return
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    queues[task_id].append(turn)
    try:
        await turn
    except BaseException:
        if turn.done() and not turn.cancelled():
            _pass_on(queues, task_id)
        raise


def _pass_on(queues: dict[str, deque['asyncio.Future[None]']], task_id: str) -> None:
    waiting = queues[task_id]
    while waiting:
        turn = waiting.popleft()
        if not turn.done():
            turn.set_result(None)
            return
    del queues[task_id]
