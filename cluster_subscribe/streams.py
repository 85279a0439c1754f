"""Where the stream of a request comes from: the event log, or the SDK."""

import logging

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import Context, copy_context

from a2a.server.cluster import StoredTask, TaskEventStream, TaskVersion
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler, validate_request_params
from a2a.types import SubscribeToTaskRequest, TaskState
from a2a.utils.errors import TaskNotFoundError, UnsupportedOperationError

from cluster_subscribe import sdk
from cluster_subscribe.background import Background
from cluster_subscribe.event_log import SharedTailEventStream
from cluster_subscribe.local_state import LocalState
from cluster_subscribe.local_tasks import LocalTasks
from cluster_subscribe.settings import Mode, Settings
from cluster_subscribe.subscription.feed import Feed, OwnedTask, Source
from cluster_subscribe.subscription.follow import follow
from cluster_subscribe.subscription.local_stream import LocalSubscription
from cluster_subscribe.subscription.rules import TERMINAL_STATES
from cluster_subscribe.subscription.stream_feed import StreamFeed
from cluster_subscribe.task_reader import TaskReader
from cluster_subscribe.telemetry import Telemetry

logger = logging.getLogger(__name__)


class Streams:
    """Makes the streams of one wrapped handler. Lives as long as the app."""

    def __init__(  # noqa: PLR0913
        self,
        handler: RequestHandler,
        *,
        settings: Settings,
        stream: TaskEventStream,
        reader: TaskReader,
        local_tasks: LocalTasks,
        background: Background,
        telemetry: Telemetry,
    ) -> None:
        self._handler = handler
        self._settings = settings
        self._stream = stream
        self._reader = reader
        self._local_tasks = local_tasks
        self._background = background
        self._telemetry = telemetry

    @validate_request_params
    async def subscribe(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """The stream of a `SubscribeToTask` request.

        Raises:
            TaskNotFoundError: The task is unknown, or another owner's.
            UnsupportedOperationError: The task is in a terminal state.
            Exception: The task cannot be read.
        """
        task_id = params.id
        # A transport may read on from another task than the request's.
        variables = copy_context()

        async def read() -> OwnedTask | None:
            return await self._reader.read_shared(task_id, context, variables)

        if sdk.streaming(self._handler) is False:
            return self._handler.on_subscribe_to_task(params, context)
        if self._settings.mode is Mode.OBSERVE:
            try:
                owned = await read()
                if owned and owned.stored.task.status.state not in TERMINAL_STATES:
                    local_state = self._local_tasks.check(owned.stored)
                    if local_state is not LocalState.ABSENT:
                        self._telemetry.redirected(task_id, local_state, observed=True)
            except Exception as error:
                logger.warning(
                    'Task %s could not be observed (%s)',
                    task_id,
                    type(error).__name__,
                    exc_info=logger.isEnabledFor(logging.DEBUG),
                )
            return self._handler.on_subscribe_to_task(params, context)

        owned = await self._reader.read_first(task_id, context, variables)
        if owned is None:
            raise TaskNotFoundError
        stored, owner = owned
        del owned
        if stored.task.status.state in TERMINAL_STATES:
            raise UnsupportedOperationError(
                f'Task {task_id} is in terminal state: {TaskState.Name(stored.task.status.state)}'
            )
        local_state = self._local_tasks.check(stored)
        source = self._source(stored.task.id, owner, read, variables)
        if self._settings.mode is Mode.STALE and local_state is LocalState.LIVE:
            return self._delegate(params, context, source)
        if local_state is not LocalState.ABSENT:
            self._telemetry.redirected(task_id, local_state)

        return self._follow(stored, source)

    def _source(
        self,
        task_id: str,
        owner: str | None,
        read: Callable[[], Awaitable[OwnedTask | None]],
        variables: Context,
    ) -> Source:
        def open_feed(version: TaskVersion, state: TaskState) -> Feed:
            if isinstance(self._stream, SharedTailEventStream) and owner is not None:
                return self._stream.open(task_id, version, owner, state=state)
            return self._feed(self._stream, task_id, version)

        return Source(open_feed, read, variables)

    def _feed(self, stream: TaskEventStream, task_id: str, after: TaskVersion) -> StreamFeed:
        return StreamFeed(
            stream, task_id, after, settings=self._settings, background=self._background
        )

    async def _delegate(
        self, params: SubscribeToTaskRequest, context: ServerCallContext, source: Source
    ) -> AsyncGenerator[Event, None]:
        """Leaves a stream to the SDK until another replica writes, which it does not tell (F3)."""
        task_id = params.id
        local = LocalSubscription(self._handler, params, context)

        async def read() -> StoredTask | None:
            return owned.stored if (owned := await source.read()) else None

        with self._local_tasks.request(task_id):
            feed = source.variables.run(self._feed, local, task_id, TaskVersion.MISSING)
            stored: StoredTask | None = None
            try:
                while stored is None:
                    if versioned := await feed.next():
                        yield versioned.event
                        del versioned
                    elif feed.ended:
                        return
                    else:
                        stored = await self._local_tasks.overtaken(task_id, read)
            finally:
                feed.close()
        self._telemetry.redirected(task_id, LocalState.STALE)
        if stored.task.status.state in TERMINAL_STATES:
            yield stored.task
            return
        async with aclosing(self._follow(stored, source)) as events:
            del stored
            async for event in events:
                yield event
                del event

    def _follow(self, stored: StoredTask, source: Source) -> AsyncGenerator[Event, None]:
        return follow(stored, source, close_on=self._settings.close_on, telemetry=self._telemetry)
