"""The SDK's subscription to a task that runs here, as an event stream like any other."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from a2a.server.cluster import TaskEventStream, TaskVersion, VersionedEvent
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.types import SubscribeToTaskRequest


class LocalSubscription(TaskEventStream):
    """What the SDK answers to one request; its events have no version."""

    def __init__(
        self, handler: RequestHandler, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> None:
        self._handler = handler
        self._params = params
        self._context = context

    async def publish(self, task_id: str, event: VersionedEvent) -> None:
        """Does nothing: the task publishes."""

    async def destroy(self, task_id: str) -> None:
        """Does nothing: the task is the SDK's."""

    async def subscribe(
        self, task_id: str, *, after: TaskVersion
    ) -> AsyncGenerator[VersionedEvent, None]:
        """Yields the events as they come, the task's snapshot first."""
        del task_id, after
        answer = self._handler.on_subscribe_to_task(self._params, self._context)
        async with aclosing(answer) as events:
            async for event in events:
                yield VersionedEvent(event=event, version=TaskVersion.MISSING)
