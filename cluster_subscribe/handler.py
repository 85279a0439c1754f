"""The decorator around a `DefaultRequestHandler`."""

import logging

from abc import update_abstractmethods
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from contextvars import Context, copy_context
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

from a2a.server.cluster import (
    StoredTask,
    TaskEventStream,
    TaskVersion,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler, validate_request_params
from a2a.types import (
    CancelTaskRequest,
    Message,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import TaskNotFoundError, UnsupportedOperationError

from cluster_subscribe import sdk
from cluster_subscribe.background import Background
from cluster_subscribe.event_log import SharedTailEventStream
from cluster_subscribe.executor_seam import ExecutorSeam
from cluster_subscribe.local_state import LocalState
from cluster_subscribe.local_tasks import Eviction
from cluster_subscribe.protocol_errors import protocol_error
from cluster_subscribe.settings import Mode, Settings
from cluster_subscribe.subscription.follow import (
    TERMINAL_STATES,
    Feed,
    OwnedTask,
    Source,
    StreamFeed,
    follow,
)
from cluster_subscribe.subscription.local_stream import LocalSubscription
from cluster_subscribe.task_reader import TaskReader
from cluster_subscribe.telemetry import Statistics, Telemetry

if TYPE_CHECKING:
    # To a type checker the decorator is what it wraps, attribute by attribute.
    from a2a.server.request_handlers import DefaultRequestHandler as _Base
else:
    _Base = RequestHandler

logger = logging.getLogger(__name__)

T = TypeVar('T')


def _delegates_the_rest(cls: type[T]) -> type[T]:
    """Delegates every public method of `RequestHandler` that the class does not define.

    The names are taken from the installed SDK, so that a method which a later one
    adds is delegated too, be it abstract or with a default.
    """
    for name in dir(RequestHandler):
        if not name.startswith('_') and name not in vars(cls):
            setattr(cls, name, _through(name))
    update_abstractmethods(cls)
    return cls


def _through(name: str) -> property:
    def read(self: 'ClusterSubscribeHandler') -> Any:
        return self.__getattr__(name)

    return property(read)


@_delegates_the_rest
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
            task_store: The store that judges.
            event_stream: The event log that is followed.
            owns_stream: Whether `aclose()` closes the event stream too. Who builds a
                `SharedTailEventStream` closes it.
            turns: What runs the agent for `handler`. Without it no `ActiveTask` is closed.
        """
        self.__wrapped = handler
        self.__settings = settings
        self.__store = task_store
        self.__stream = event_stream
        self.__owns_stream = owns_stream
        self.__background = Background()
        self.__telemetry = Telemetry()
        self.__reader = TaskReader(task_store, self.__background)
        self.__eviction = Eviction(
            handler,
            settings=settings,
            store=task_store,
            stream=event_stream,
            read=self.__reader.try_to_read,
            background=self.__background,
            telemetry=self.__telemetry,
            turns=turns,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_OWN):
            raise AttributeError(name)
        return getattr(self.__wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_OWN):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped, name)

    def statistics(self) -> Statistics:
        """The counters of this handler."""
        stream = self.__stream
        tail = stream.statistics() if isinstance(stream, SharedTailEventStream) else None
        return self.__telemetry.statistics(tail)

    async def aclose(self) -> None:
        """Ends every open stream with an error, then closes the wrapped handler."""
        if self.__owns_stream and isinstance(self.__stream, SharedTailEventStream):
            await self.__stream.aclose()
        await self.__background.aclose()
        close: Callable[[], Awaitable[None]] | None = getattr(self.__wrapped, 'aclose', None)
        if close is not None:
            await close()

    async def on_cancel_task(
        self, params: CancelTaskRequest, context: ServerCallContext
    ) -> Task | None:
        """Delegates, after a stale copy of the task is gone (F9); then wakes the streams.

        The SDK may log CANCELED without a publish (F11).
        """
        if self.__settings.mode is not Mode.OBSERVE:
            await self.__eviction.drop_stale_copy(params.id, context)
        with self.__eviction.request(params.id):
            canceled = await self.__wrapped.on_cancel_task(params, context)
        # Only now: the caller may not have such a task, and a hint goes to every replica.
        if isinstance(self.__stream, SharedTailEventStream):
            self.__stream.wake(params.id, 'cancel')
        return canceled

    async def on_message_send(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> Message | Task:
        """Delegates, the context filled in."""
        params = await self.__with_context(params, context)
        task_id = params.message.task_id
        with self.__eviction.request(task_id), self.__eviction.message(task_id):
            return await self.__wrapped.on_message_send(params, context)

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Delegates, the context filled in."""
        params = await self.__with_context(params, context)
        task_id = params.message.task_id
        with self.__eviction.request(task_id), ExitStack() as arriving:
            arriving.enter_context(self.__eviction.message(task_id))
            async with aclosing(self.__wrapped.on_message_send_stream(params, context)) as events:
                async for event in events:
                    # The message is queued by now: whether a turn runs shows by itself.
                    arriving.close()
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
            async with aclosing(await self.__answer(params, context)) as events:
                async for event in events:
                    yield event
                    # A stream may idle for days, and its snapshot is most of what it holds.
                    del event
        except Exception as error:
            if self.__settings.mode is Mode.OBSERVE or (told := protocol_error(error)) is error:
                raise
            self.__telemetry.stream_failed(params.id, error)
            raise told from None

    @validate_request_params
    async def __answer(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        task_id = params.id
        # A transport may read on from another task than the request's.
        variables = copy_context()

        async def read() -> OwnedTask | None:
            return await self.__reader.read_shared(task_id, context, variables)

        if sdk.streaming(self.__wrapped) is False:
            return self.__wrapped.on_subscribe_to_task(params, context)
        if self.__settings.mode is Mode.OBSERVE:
            try:
                look = await read()
                if look and look.stored.task.status.state not in TERMINAL_STATES:
                    local_state = self.__eviction.check(look.stored)
                    if local_state is not LocalState.ABSENT:
                        self.__telemetry.redirected(task_id, local_state, observed=True)
            except Exception as error:
                logger.warning(
                    'Task %s could not be observed (%s)',
                    task_id,
                    type(error).__name__,
                    exc_info=logger.isEnabledFor(logging.DEBUG),
                )
            return self.__wrapped.on_subscribe_to_task(params, context)

        look = await self.__reader.read_first(task_id, context, variables)
        if look is None:
            raise TaskNotFoundError
        stored, owner = look
        del look
        if stored.task.status.state in TERMINAL_STATES:
            raise UnsupportedOperationError(
                f'Task {task_id} is in terminal state: {TaskState.Name(stored.task.status.state)}'
            )
        local_state = self.__eviction.check(stored)
        source = self.__source(stored.task.id, owner, read, variables)
        if self.__settings.mode is Mode.STALE and local_state is LocalState.LIVE:
            return self.__delegate(params, context, source)
        if local_state is not LocalState.ABSENT:
            self.__telemetry.redirected(task_id, local_state)

        return self.__follow(stored, source)

    def __source(
        self,
        task_id: str,
        owner: str | None,
        read: Callable[[], Awaitable[OwnedTask | None]],
        variables: Context,
    ) -> Source:
        def open_feed(version: TaskVersion, state: TaskState) -> Feed:
            if isinstance(self.__stream, SharedTailEventStream) and owner is not None:
                return self.__stream.open(task_id, version, owner, state=state)
            return self.__feed(self.__stream, task_id, version)

        return Source(open_feed, read, variables)

    def __feed(self, stream: TaskEventStream, task_id: str, after: TaskVersion) -> StreamFeed:
        return StreamFeed(
            stream, task_id, after, settings=self.__settings, background=self.__background
        )

    async def __delegate(
        self, params: SubscribeToTaskRequest, context: ServerCallContext, source: Source
    ) -> AsyncGenerator[Event, None]:
        """Leaves a stream to the SDK until another replica writes, which it does not tell (F3)."""
        task_id = params.id
        local = LocalSubscription(self.__wrapped, params, context)

        async def read() -> StoredTask | None:
            return look.stored if (look := await source.read()) else None

        with self.__eviction.request(task_id):
            feed = source.variables.run(self.__feed, local, task_id, TaskVersion.MISSING)
            stored: StoredTask | None = None
            try:
                while stored is None:
                    if versioned := await feed.next():
                        yield versioned.event
                        del versioned
                    elif feed.ended:
                        return
                    else:
                        stored = await self.__eviction.overtaken(task_id, read)
            finally:
                feed.close()
        self.__telemetry.redirected(task_id, LocalState.STALE)
        if stored.task.status.state in TERMINAL_STATES:
            yield stored.task
            return
        async with aclosing(self.__follow(stored, source)) as events:
            del stored
            async for event in events:
                yield event
                del event

    def __follow(self, stored: StoredTask, source: Source) -> AsyncGenerator[Event, None]:
        return follow(stored, source, close_on=self.__settings.close_on, telemetry=self.__telemetry)

    async def sweep(self) -> int:
        """Closes the superseded and finished `ActiveTask`s of this replica.

        Runs by itself every `sweep_interval` seconds; the stored versions of all that
        are at rest come from one read.

        Returns:
            How many were closed.
        """
        return await self.__eviction.sweep()


_OWN = f'_{ClusterSubscribeHandler.__name__}__'
