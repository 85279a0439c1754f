"""Handlers, agents and senders that somebody builds."""

import asyncio

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from typing import Any

from a2a.server.agent_execution import RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import Event, EventQueue
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.server.tasks import PushNotificationSender
from a2a.types import (
    CancelTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
)
from a2a.utils.errors import UnsupportedOperationError

from cluster_subscribe._testing import Gates, ScriptedAgent, label


class Untouched(DefaultRequestHandler):
    """A subclass that overrides nothing."""


class Outer(RequestHandler):
    """A handler that delegates to another."""

    def __init__(self, inner: RequestHandler) -> None:
        self.inner = inner

    async def on_message_send_stream(
        self, params: Any, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self.inner.on_message_send_stream(params, context)) as events:
            async for event in events:
                yield event

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self.inner.on_subscribe_to_task(params, context)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        await self.inner.aclose()  # type: ignore[attr-defined]


def _delegated(name: str) -> Any:
    async def method(self: Outer, params: Any, context: ServerCallContext) -> Any:
        return await getattr(self.inner, name)(params, context)

    return method


for _name in RequestHandler.__abstractmethods__ - vars(Outer).keys():
    setattr(Outer, _name, _delegated(_name))
Outer.__abstractmethods__ = frozenset()


class Inside(Outer):
    """A handler of one's own that has the SDK's inside."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(DefaultRequestHandler(**parts))
        self.task_store, self.event_stream = parts['task_store'], parts['event_stream']


def no_guests(context: ServerCallContext) -> None:
    """An access rule of an app."""
    if context.user.user_name == 'guest':
        raise UnsupportedOperationError('guests may not')


class _GuardsSubscribe(RequestHandler):
    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        no_guests(context)
        events: AsyncGenerator[Event, None] = super().on_subscribe_to_task(params, context)
        async with aclosing(events):
            async for event in events:
                yield event


class GuardedSubscribe(_GuardsSubscribe, DefaultRequestHandler):
    """A subclass with an access rule for streams."""


class GuardedInside(_GuardsSubscribe, Inside):
    """A handler of one's own with an access rule for streams."""


class GuardedRest(DefaultRequestHandler):
    """A subclass with access rules for everything but streams of tasks."""

    async def on_cancel_task(
        self, params: CancelTaskRequest, context: ServerCallContext
    ) -> Task | None:
        no_guests(context)
        canceled: Task | None = await super().on_cancel_task(params, context)
        return canceled

    async def on_message_send(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> Message | Task:
        no_guests(context)
        answer: Message | Task = await super().on_message_send(params, context)
        return answer


class Recorder(PushNotificationSender):
    """A sender that keeps what it sends, and waits or fails where it is told to."""

    def __init__(self, gates: Gates, *, fails: bool = False, slow: bool = False) -> None:
        self.sent: dict[str, list[str]] = {}
        self.over = asyncio.Event()
        """Set when the last event of a task has been sent, or not."""
        self._gates = gates
        self._fails = fails
        self._slow = slow

    async def send_notification(self, task_id: str, event: Event) -> None:
        last = label(event) == 'COMPLETED'
        try:
            if self._slow and last:
                await self._gates.arrive('webhook')
            self.sent.setdefault(task_id, []).append(label(event))
        finally:
            if last:
                self.over.set()
        if self._fails:
            raise ConnectionError('no such webhook')


class Lively(ScriptedAgent):
    """An agent with a life after its last event.

    What stands behind `then` in its script runs in a job of its own, once `execute()` has
    returned; `say` answers with a bare message. It notes how each part of its work ended.
    """

    def __init__(self, gates: Gates) -> None:
        super().__init__(gates)
        self.ended: dict[str, str] = {}
        self.over: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.jobs: set[asyncio.Task[None]] = set()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        script = context.get_user_input()
        if script.startswith('say'):
            reply = Message(role=Role.ROLE_AGENT, message_id=script, parts=[Part(text='hello')])
            await event_queue.enqueue_event(reply)
            return
        now, _, later = script.partition(' then ')
        await self._noting(now, context, event_queue)
        if later:
            job = asyncio.create_task(self._noting(later, context, event_queue))
            self.jobs.add(job)
            job.add_done_callback(self.jobs.discard)

    async def _noting(self, script: str, context: RequestContext, queue: EventQueue) -> None:
        ending = 'cancelled'
        part = copy(context)
        part.get_user_input = lambda delimiter='': script  # type: ignore[method-assign]
        try:
            await super().execute(part, queue)
            context.current_task = Task(id=context.task_id)
            ending = 'done'
        except Exception as error:
            ending = type(error).__name__
            raise
        finally:
            self.ended[script] = ending
            self.over[script].set()
