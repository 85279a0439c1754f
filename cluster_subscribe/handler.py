"""The decorator around a `DefaultRequestHandler`."""

import asyncio
import logging

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from a2a.server.cluster import (
    TaskEventStream,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler
from a2a.types import (
    CancelTaskRequest,
    Message,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
)

from cluster_subscribe.background import Background
from cluster_subscribe.cancels import Cancels
from cluster_subscribe.delegation import Delegate, delegates_the_rest
from cluster_subscribe.event_log import SharedTailEventStream
from cluster_subscribe.executor_seam import ExecutorSeam
from cluster_subscribe.local_tasks import LocalTasks
from cluster_subscribe.protocol_errors import protocol_error
from cluster_subscribe.settings import Mode, Settings
from cluster_subscribe.streams import Streams
from cluster_subscribe.task_reader import TaskReader
from cluster_subscribe.telemetry import Statistics, Telemetry

if TYPE_CHECKING:
    from a2a.server.request_handlers import DefaultRequestHandler

    class _Base(DefaultRequestHandler):
        """To a type checker the decorator is what it wraps, attribute by attribute."""

        def __getattr__(self, name: str) -> Any: ...
else:
    _Base = Delegate

logger = logging.getLogger(__name__)


@delegates_the_rest
class ClusterSubscribeHandler(_Base):
    """A drop-in for the handler it wraps, with a `SubscribeToTask` of its own.

    Every other method and attribute reads and writes through to the wrapped handler.
    Where a stream differs from the SDK's on purpose, the rules of the contract say
    how (docs/contract.md).
    """

    def __init__(  # noqa: PLR0913
        self,
        handler: RequestHandler,
        *,
        settings: Settings,
        task_store: VersionedTaskStore,
        event_stream: TaskEventStream,
        owns_stream: bool = False,
        turns: ExecutorSeam | None = None,
    ) -> None:
        """Wraps `handler`; `wrap()` finds the arguments by itself.

        Args:
            handler: The handler to wrap.
            settings: What it does.
            task_store: The store that is authoritative.
            event_stream: The event log that is followed.
            owns_stream: Whether `aclose()` closes the event stream too. Who builds a
                `SharedTailEventStream` closes it.
            turns: What runs the agent for `handler`. Without it no `ActiveTask` is closed.
        """
        Delegate.__init__(self, handler)  # type: ignore[arg-type]
        self.__wrapped = handler
        self.__settings = settings
        self.__store = task_store
        self.__stream = event_stream
        self.__owns_stream = owns_stream
        self.__background = Background()
        self.__telemetry = Telemetry()
        self.__reader = TaskReader(task_store, self.__background)
        self.__local_tasks = LocalTasks(
            handler,
            settings=settings,
            store=task_store,
            stream=event_stream,
            read=self.__reader.try_to_read,
            background=self.__background,
            telemetry=self.__telemetry,
            turns=turns,
        )
        self.__cancels = Cancels(
            handler,
            store=task_store,
            tasks=self.__local_tasks,
            turns=turns,
            read=self.__reader.read_at_once,
            wake=self.__wake,
            background=self.__background,
        )
        self.__streams = Streams(
            handler,
            settings=settings,
            stream=event_stream,
            reader=self.__reader,
            local_tasks=self.__local_tasks,
            background=self.__background,
            telemetry=self.__telemetry,
        )

    def statistics(self) -> Statistics:
        """The counters of this handler."""
        stream = self.__stream
        tail = stream.statistics() if isinstance(stream, SharedTailEventStream) else None
        return self.__telemetry.statistics(tail)

    async def aclose(self) -> None:
        """Ends every open stream with an error, and closes the wrapped handler."""
        if self.__owns_stream and isinstance(self.__stream, SharedTailEventStream):
            await self.__stream.aclose()
        closing = [self.__background.aclose()]
        if (close := getattr(self.__wrapped, 'aclose', None)) is not None:
            # At the same time: a cancel that waits for its `ActiveTask` to end is not cut off, and
            # one whose agent hangs does not keep the `ActiveTask` from closing.
            closing.append(close())
        for ended in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    def __wake(self, task_id: str) -> None:
        if isinstance(self.__stream, SharedTailEventStream):
            self.__stream.wake(task_id, 'cancel')

    async def on_cancel_task(
        self, params: CancelTaskRequest, context: ServerCallContext
    ) -> Task | None:
        """Delegates, one cancel of a task at a time and to its end (docs/contract.md, D14)."""
        if self.__settings.mode is Mode.OBSERVE:
            with self.__local_tasks.request(params.id):
                canceled = await self.__wrapped.on_cancel_task(params, context)
            self.__wake(params.id)
            return canceled
        return await self.__cancels.cancel(params, context)

    async def on_message_send(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> Message | Task:
        """Delegates, the context filled in."""
        params = await self.__with_context(params, context)
        task_id = params.message.task_id
        with self.__local_tasks.request(task_id), self.__local_tasks.message(task_id):
            return await self.__wrapped.on_message_send(params, context)

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Delegates, the context filled in."""
        params = await self.__with_context(params, context)
        task_id = params.message.task_id
        with self.__local_tasks.request(task_id), ExitStack() as incoming:
            incoming.enter_context(self.__local_tasks.message(task_id))
            async with aclosing(self.__wrapped.on_message_send_stream(params, context)) as events:
                async for event in events:
                    # The message is queued by now: whether a turn runs shows by itself.
                    incoming.close()
                    yield event

    async def __with_context(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> SendMessageRequest:
        """Gives a follow-up that names only its task the task's context (F18)."""
        message = params.message
        if not message.task_id or message.context_id or self.__settings.mode is Mode.OBSERVE:
            return params
        stored = await self.__reader.try_to_read(message.task_id, context)
        if stored is None:
            # Unknown, foreign or unreadable: the SDK's own answer.
            return params
        filled = deepcopy(params)
        filled.message.context_id = stored.task.context_id
        return filled

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Yields the task as stored, then each later event exactly once.

        Raises:
            TaskNotFoundError: The task is unknown, or another owner's, or was deleted.
            UnsupportedOperationError: The task is in a terminal state, or the agent
                does not stream.
            InternalError: The task cannot be read, or the event stream ended before the
                task did.
        """
        try:
            async with aclosing(await self.__streams.subscribe(params, context)) as events:
                async for event in events:
                    yield event
                    # A stream may idle for days, and its snapshot is most of what it holds.
                    del event
        except Exception as error:
            if self.__settings.mode is Mode.OBSERVE or (told := protocol_error(error)) is error:
                raise
            self.__telemetry.stream_failed(params.id, error)
            raise told from None

    async def sweep(self) -> int:
        """Closes the superseded and finished `ActiveTask`s of this replica.

        Runs by itself every `sweep_interval` seconds; the stored versions of all that
        are at rest come from one read.

        Returns:
            How many were closed.
        """
        return await self.__local_tasks.sweep()
