"""Eviction never cancels work that still runs, and never closes a queue that is written to (F31).

Each case runs bare first: what the SDK alone gets right, the wrapped handler gets right.
"""

import asyncio
import gc

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import PushNotificationSender, TaskUpdater
from a2a.types import (
    CancelTaskRequest,
    Part,
    SendMessageConfiguration,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import TaskNotCancelableError

from cluster_subscribe import Settings, wrap
from cluster_subscribe._testing.messages import caller, label, new_task, user_message
from cluster_subscribe.executor_seam import ExecutorSeam
from tests.support.memory import Memory, MemoryStore, MemoryStream
from tests.support.replicas import active_tasks, stock_handler

Act = Callable[[TaskUpdater], Awaitable[None]]
both = pytest.mark.parametrize('wrapped', [False, True], ids=['bare', 'wrapped'])


class Acting(AgentExecutor):
    """Makes the task, then does what it was given to do."""

    def __init__(self, act: Act) -> None:
        self._act = act

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        if context.current_task is None:
            await event_queue.enqueue_event(new_task(context))
        assert context.task_id
        assert context.context_id
        await self._act(TaskUpdater(event_queue, context.task_id, context.context_id))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None: ...


class Webhook(PushNotificationSender):
    """Takes its time for COMPLETED."""

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send_notification(self, task_id: str, event: Any) -> None:
        if label(event) == 'COMPLETED':
            self.reached.set()
            self.sent.set_result(await told(self.go))


async def told(go: asyncio.Event) -> str:
    """How a wait ended: 'done' or 'cancelled'."""
    try:
        await go.wait()
    except asyncio.CancelledError:
        return 'cancelled'
    return 'done'


class Replica:
    """One replica over a memory, whose tasks another writer may advance."""

    def __init__(self, act: Act, *, wrapped: bool, webhook: Webhook | None = None) -> None:
        self.memory = Memory()
        self.store = MemoryStore(self.memory)
        self.stock = stock_handler(
            self.store, MemoryStream(self.memory), Acting(act), push_sender=webhook
        )
        self.handler: Any = wrap(self.stock, settings=Settings()) if wrapped else self.stock
        self.wrapped = wrapped

    async def send(self, task: Task | None = None, *, wait: bool = True) -> Task:
        configuration = SendMessageConfiguration(return_immediately=not wait)
        request = SendMessageRequest(message=user_message('go', task), configuration=configuration)
        answer: Task = await self.handler.on_message_send(request, caller())
        return answer

    async def get(self, task: Task) -> Task:
        stored = await self.store.get(task.id, caller())
        assert stored is not None
        return stored.task

    async def write_elsewhere(self, task: Task, state: TaskState) -> None:
        stored = await self.store.get(task.id, caller())
        assert stored is not None
        stored.task.status.state = state
        await self.store.save(stored.task, prev_version=stored.version, context=caller())

    async def sweep(self) -> None:
        """Sweeps in many turns of the loop."""
        gc.collect()
        for _ in range(10):
            if self.wrapped:
                await self.handler.sweep()
            await asyncio.sleep(0)

    async def subscribe(self, task: Task) -> None:
        events = self.handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
        await anext(events)
        await events.aclose()
        for _ in range(30):
            await asyncio.sleep(0)

    async def until(self, true: Callable[[], Any]) -> None:
        while not (await value if asyncio.iscoroutine(value := true()) else value):  # noqa: ASYNC110
            await asyncio.sleep(0)

    @property
    def held(self) -> dict[str, Any]:
        return active_tasks(self.stock)


@asynccontextmanager
async def replica(act: Act, **how: Any) -> AsyncIterator[Replica]:
    made = Replica(act, **how)
    try:
        yield made
    finally:
        await made.handler.aclose()


@both
async def test_an_agent_may_tidy_up_after_its_last_event(wrapped: bool) -> None:
    go = asyncio.Event()
    tail: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def act(updater: TaskUpdater) -> None:
        await updater.complete()
        tail.set_result(await told(go))

    async with replica(act, wrapped=wrapped) as one:
        await one.send()
        await one.sweep()
        go.set()
        assert await tail == 'done'
        await one.until(lambda: not one.held)


@both
async def test_the_webhook_hears_of_the_end_however_long_it_takes(wrapped: bool) -> None:
    async def act(updater: TaskUpdater) -> None:
        await updater.complete()

    webhook = Webhook()
    async with replica(act, wrapped=wrapped, webhook=webhook) as one:
        await one.send(wait=False)
        await webhook.reached.wait()
        await one.sweep()
        webhook.go.set()
        assert await webhook.sent == 'done'


@both
@pytest.mark.parametrize('by', ['sweep', 'subscribe'])
async def test_a_job_of_the_agents_own_may_go_on_after_its_turn(wrapped: bool, by: str) -> None:
    go = asyncio.Event()
    jobs = []

    async def act(updater: TaskUpdater) -> None:
        async def job() -> None:
            await go.wait()
            await updater.add_artifact([Part(text='result')], artifact_id='late')

        await updater.requires_input()
        jobs.append(asyncio.create_task(job()))

    async with replica(act, wrapped=wrapped) as one:
        task = await one.send()
        await one.until(jobs.copy)
        await one.write_elsewhere(task, TaskState.TASK_STATE_WORKING)
        await (one.sweep() if by == 'sweep' else one.subscribe(task))
        go.set()

        async def stored() -> bool:
            return bool((await one.get(task)).artifacts)

        await one.until(stored)
        if wrapped:
            # Once nobody may write any more, what another replica has overtaken goes (F15).
            jobs.clear()
            await one.write_elsewhere(task, TaskState.TASK_STATE_WORKING)
            await one.sweep()
            assert not one.held


@both
async def test_what_a_job_says_after_the_end_elsewhere_is_not_stored(wrapped: bool) -> None:
    go = asyncio.Event()
    jobs = []

    async def act(updater: TaskUpdater) -> None:
        async def job() -> None:
            await go.wait()
            await updater.start_work()

        await updater.requires_input()
        jobs.append(asyncio.create_task(job()))

    async with replica(act, wrapped=wrapped) as one:
        task = await one.send()
        await one.until(jobs.copy)
        await one.write_elsewhere(task, TaskState.TASK_STATE_COMPLETED)
        await one.sweep()
        with pytest.raises(TaskNotCancelableError):
            await one.handler.on_cancel_task(CancelTaskRequest(id=task.id), caller())
        go.set()
        await jobs[0]
        await one.until(lambda: not one.held)
        assert (await one.get(task)).status.state == TaskState.TASK_STATE_COMPLETED


# The executor that tells.


class Noting(AgentExecutor):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.queues: list[Any] = []

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.queues.append(event_queue)
        raise LookupError('its own')

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.queues.append(event_queue)


class Unlike(dict[str, Any]):
    """A queue that cannot be aliased."""


async def test_it_passes_on_what_it_is_given_and_what_is_raised() -> None:
    from a2a.server.events.event_queue_v2 import EventQueueSource

    noting = Noting()
    seam = ExecutorSeam(noting)
    context: Any = RequestContext(call_context=caller(), task_id='t')
    queue = EventQueueSource()
    unlike: Any = Unlike()
    for given in (queue, unlike):
        with pytest.raises(LookupError, match='its own'):
            await seam.execute(context, given)
        await seam.cancel(context, given)
    one, same, *others = noting.queues
    assert one is same is not queue
    assert type(one) is type(queue)
    assert one.__dict__ is queue.__dict__
    assert others == [unlike, unlike]
    assert not seam.runs('t')
    await queue.close(immediate=True)
    assert one.is_closed()


def test_the_handler_keeps_the_executor_that_it_was_given() -> None:
    async def act(updater: TaskUpdater) -> None: ...

    async def main() -> None:
        one = Replica(act, wrapped=True)
        assert isinstance(one.handler.agent_executor, Acting)
        assert isinstance(one.stock._active_task_registry._agent_executor, ExecutorSeam)
        wrap(one.stock, settings=Settings())
        seam: Any = one.stock._active_task_registry._agent_executor
        assert isinstance(seam._executor, Acting)
        await one.handler.aclose()

    asyncio.run(main())
