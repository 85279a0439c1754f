"""Cancels of one task wait for each other, and end whoever waits for them (F33, F34)."""

import asyncio

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from a2a.server.agent_execution import RequestContext
from a2a.server.cluster import ConcurrentTaskModificationError, StoredTask
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.types import CancelTaskRequest, Task, TaskState, TaskStatus
from a2a.utils.errors import InternalError, TaskNotCancelableError, TaskNotFoundError

from cluster_subscribe import Settings, background, sdk, wrap
from cluster_subscribe._testing import Cluster, Decorate, Gates, Parts, Replica, ScriptedAgent
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from tests.support.memory import Memory, MemoryStore, MemoryStream
from tests.support.replicas import stock_handler, wrapping
from tests.support.waiting import eventually

WORKING = TaskState.TASK_STATE_WORKING
COMPLETED = TaskState.TASK_STATE_COMPLETED
CANCELED = TaskState.TASK_STATE_CANCELED
FAILED = TaskState.TASK_STATE_FAILED
LIMIT = 10
"""Seconds after which a test does not wait any more for what has to happen."""
WHO: ContextVar[str] = ContextVar('who', default='nobody')

both = pytest.mark.parametrize('wrapped', [False, True], ids=['bare', 'wrapped'])


def decorate(*, wrapped: bool) -> Decorate:
    return wrapping() if wrapped else (lambda handler: handler)


class Mute(ScriptedAgent):
    """Takes its time to cancel, until gate `cancel` opens, and says nothing."""

    def __init__(self, gates: Gates) -> None:
        super().__init__(gates)
        self.gates = gates
        self.cancels: list[str] = []
        self.ended = asyncio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        try:
            await super().execute(context, event_queue)
        finally:
            self.ended.set()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.cancels.append(WHO.get())
        await self.gates.arrive('cancel')


class Lab:
    """A cluster whose replica A runs a turn that waits."""

    def __init__(self, lab: Cluster, agents: list[Mute], task: Task) -> None:
        self.cluster, self.agents, self.task = lab, agents, task
        self.gates = lab.gates
        self.calls: list[asyncio.Task[Task | None]] = []

    def cancel(self, at: Replica) -> None:
        """Begins a cancel."""
        self.calls.append(asyncio.create_task(at.cancel(self.task)))

    async def canceled(self, at: Replica, user: str = 'user') -> Task | None:
        return await at.cancel(self.task, user)

    async def state(self) -> TaskState:
        return (await self.cluster.c.get(self.task.id)).status.state


@asynccontextmanager
async def running(
    url: str, *, wrapped: bool = True, agent: type[Mute] = Mute, script: str = 'work wait=1 done'
) -> AsyncIterator[Lab]:
    agents: list[Mute] = []

    def make(gates: Gates) -> Mute:
        agents.append(agent(gates))
        return agents[-1]

    parts = Parts(agent=make)
    async with cluster(url, decorate=decorate(wrapped=wrapped), parts=parts) as lab:
        made = Lab(lab, agents, await lab.a.start(script).at('1'))
        try:
            yield made
        finally:
            for call in made.calls:
                call.cancel()
            if made.calls:
                await asyncio.wait(made.calls)


def answers(calls: list[asyncio.Task[Task | None]]) -> list[Any]:
    """The state that each cancel was answered with, or the type of its error."""
    return [
        type(error) if (error := call.exception()) else (call.result() or Task()).status.state
        for call in calls
    ]


async def test_many_at_one_replica(database_url: str) -> None:
    """F33: the SDK alone cancels the agent each time, and may never return."""
    async with running(database_url) as lab:
        watch = await lab.cluster.b.watch(lab.task)
        for _ in range(10):
            lab.cancel(lab.cluster.a)
        await lab.gates.reached('cancel')
        lab.gates.open('cancel')
        await asyncio.wait(lab.calls)
        assert answers(lab.calls) == [CANCELED] * 10
        assert len(lab.agents[0].cancels) == 1
        assert await lab.state() == CANCELED
        assert await watch.until(lambda w: w.ending, 10)
        assert watch.timeline[-1] == 'closed'
        # One that comes later is too late.
        with pytest.raises(TaskNotCancelableError):
            await lab.canceled(lab.cluster.a)


async def test_many_at_two_replicas(database_url: str) -> None:
    async with running(database_url) as lab:
        for replica in (lab.cluster.a, lab.cluster.b):
            for _ in range(5):
                lab.cancel(replica)
            await lab.gates.reached('cancel')
        await asyncio.wait(lab.calls[5:])
        lab.gates.open('cancel')
        await asyncio.wait(lab.calls)
        assert answers(lab.calls) == [CANCELED] * 10
        assert await lab.state() == CANCELED


@pytest.mark.cancels_queries
@both
async def test_one_that_another_replica_overtakes(database_url: str, wrapped: bool) -> None:
    """F33: the SDK alone tells the store's raw error."""
    async with running(database_url, wrapped=wrapped) as lab:
        save = lab.cluster.a.store.save

        async def slow(task: Task, **how: Any) -> Any:
            await lab.gates.arrive('save')
            return await save(task, **how)

        lab.cluster.a.store.save = slow  # type: ignore[method-assign]
        lab.gates.open('cancel')
        lab.cancel(lab.cluster.a)
        await lab.gates.reached('save')
        await lab.canceled(lab.cluster.b)
        lab.gates.open('save')
        await asyncio.wait(lab.calls)
        lost = CANCELED if wrapped else ConcurrentTaskModificationError
        assert answers(lab.calls) == [lost]
        assert await lab.state() == CANCELED


async def test_one_that_the_end_of_the_task_overtakes(database_url: str) -> None:
    async with running(database_url) as lab:
        lab.cancel(lab.cluster.a)
        await lab.gates.reached('cancel')
        lab.cancel(lab.cluster.a)
        store = lab.cluster.b.store
        stored = await store.get(lab.task.id, caller())
        assert stored
        stored.task.status.state = COMPLETED
        await store.save(stored.task, prev_version=stored.version, context=caller())
        lab.gates.open('cancel')
        await asyncio.wait(lab.calls)
        # The first is answered as by the SDK alone.
        assert answers(lab.calls) == [COMPLETED, TaskNotCancelableError]


@pytest.mark.cancels_queries
@both
async def test_one_whose_client_leaves(database_url: str, wrapped: bool) -> None:
    """F34: the SDK alone ends the turn, and the task is WORKING for ever."""
    async with running(database_url, wrapped=wrapped) as lab:
        watch = await lab.cluster.b.watch(lab.task)
        lab.cancel(lab.cluster.a)
        (left,) = lab.calls
        await lab.gates.reached('cancel')
        left.cancel()
        await asyncio.wait({left})
        assert left.cancelled()
        lab.gates.open('cancel')
        await lab.agents[0].ended.wait()
        if wrapped:
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline[-1] == 'closed'
        assert await lab.state() == (CANCELED if wrapped else WORKING)


async def test_one_that_may_not_be_is_refused_at_once(sqlite_url: str) -> None:
    async with running(sqlite_url) as lab:
        lab.cancel(lab.cluster.a)
        await lab.gates.reached('cancel')
        with pytest.raises(TaskNotFoundError):
            await lab.canceled(lab.cluster.a, 'somebody else')
        lab.gates.open('cancel')
        await lab.calls[0]


async def test_the_agent_sees_the_callers_variables(sqlite_url: str) -> None:
    async with running(sqlite_url) as lab:
        lab.gates.open('cancel')
        WHO.set('the caller')
        await lab.canceled(lab.cluster.a)
        assert lab.agents[0].cancels == ['the caller']


async def test_closing_ends_one_whose_agent_hangs(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(sqlite_url) as lab:
        lab.cancel(lab.cluster.a)
        await lab.gates.reached('cancel')
        lab.cancel(lab.cluster.a)
        handler: Any = lab.cluster.a.handler
        cancels = handler._ClusterSubscribeHandler__cancels
        await eventually(lambda: cancels._queues[lab.task.id]._waiting)
        monkeypatch.setattr(background, '_GRACE', 0.05)
        await handler.aclose()
        await asyncio.wait(lab.calls)
        # The one behind it finds no `ActiveTask` any more.
        assert answers(lab.calls) == [InternalError, CANCELED]


class Stubborn(Mute):
    """Ends at the second cancellation only."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        try:
            await super().execute(context, event_queue)
        except asyncio.CancelledError:
            await self.gates.arrive('stubborn')


@both
async def test_an_agent_that_swallows_a_cancellation(sqlite_url: str, wrapped: bool) -> None:
    """The second cancel reaches it, as with the SDK alone."""
    async with running(sqlite_url, wrapped=wrapped, agent=Stubborn) as lab:
        lab.gates.open('cancel')
        lab.cancel(lab.cluster.a)
        await lab.gates.reached('stubborn')
        lab.cancel(lab.cluster.a)
        await asyncio.wait(lab.calls, timeout=LIMIT)
        assert set(answers(lab.calls)) <= {CANCELED, ConcurrentTaskModificationError}
        assert await lab.state() == CANCELED


@both
async def test_closing_completes_one_that_waits_for_the_turn_to_end(
    sqlite_url: str, wrapped: bool
) -> None:
    async with running(sqlite_url, wrapped=wrapped, agent=Stubborn) as lab:
        lab.gates.open('cancel')
        lab.cancel(lab.cluster.a)
        await lab.gates.reached('stubborn')
        handler: Any = lab.cluster.a.handler
        await handler.aclose()
        await asyncio.wait(lab.calls, timeout=LIMIT)
        assert answers(lab.calls) == [CANCELED]
        assert await lab.state() == CANCELED


class Failing(Mute):
    """Fails to cancel the first time."""

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await super().cancel(context, event_queue)
        if len(self.cancels) == 1:
            raise LookupError


async def test_one_behind_another_whose_agent_raises(sqlite_url: str) -> None:
    """It does not interrupt the closing of the queues, and leaves nothing behind."""
    async with running(sqlite_url, agent=Failing) as lab:
        save = lab.cluster.a.store.save

        async def slow(task: Task, **how: Any) -> Any:
            await lab.gates.arrive('save')
            return await save(task, **how)

        lab.cancel(lab.cluster.a)
        await lab.gates.reached('cancel')
        lab.cluster.a.store.save = slow  # type: ignore[method-assign]
        lab.cancel(lab.cluster.a)
        lab.gates.open('cancel')
        await lab.gates.reached('save')
        await asyncio.wait(lab.calls[:1])
        await lab.agents[0].ended.wait()
        local = sdk.local_task(lab.cluster.a.handler, lab.task.id)
        assert local
        await eventually(local.active._lock.locked)
        lab.gates.open('save')
        await asyncio.wait(lab.calls, timeout=LIMIT)
        assert answers(lab.calls) == [LookupError, FAILED]
        assert await lab.state() == FAILED
        await eventually(lambda: not sdk.local_tasks(lab.cluster.a.handler))


# Around a handler that does what a test says.


class Stub(DefaultRequestHandler):
    """Has an `on_cancel_task` of its own."""

    answer: Any = None

    async def on_cancel_task(self, params: Any, context: ServerCallContext) -> Any:
        return await self.answer(params, context)


class Bench:
    """A wrapped handler over a memory that holds a task `t` of `user`."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        memory = Memory()
        memory.tasks['t', 'user'] = (self.task(WORKING).SerializeToString(), 1)
        self.store = MemoryStore(memory)
        stub: Any = stock_handler(self.store, MemoryStream(memory), kind=Stub)
        stub.answer = answer
        self.stub: Any = stub
        handler: Any = wrap(stub, settings=Settings())
        self.handler = handler
        self.cancels: Any = handler._ClusterSubscribeHandler__cancels
        self.woken: list[str] = []
        self.cancels._wake = self.woken.append

    @staticmethod
    def task(state: TaskState) -> Task:
        return Task(id='t', context_id='c', status=TaskStatus(state=state))

    async def cancel(self, task_id: str = 't', user: str = 'user') -> Any:
        return await self.handler.on_cancel_task(CancelTaskRequest(id=task_id), caller(user))

    async def store_state(self, state: TaskState) -> None:
        stored = await self.store.get('t', caller())
        assert isinstance(stored, StoredTask)
        await self.store.save(self.task(state), prev_version=stored.version, context=caller())

    @property
    def begun_or_waiting(self) -> int:
        return sum(queue.taken + len(queue._waiting) for queue in self.cancels._queues.values())

    @property
    def idle(self) -> bool:
        return not self.cancels._queues


async def test_an_answer_and_an_error_are_the_handlers_own() -> None:
    given: list[Any] = [object(), LookupError('its own'), TaskNotCancelableError(message='no')]

    async def answer(*_: Any) -> Any:
        one = given[0]
        if isinstance(one, BaseException):
            raise one
        return one

    bench = Bench(answer)
    assert await bench.cancel() is given.pop(0)
    for error in given.copy():
        with pytest.raises(type(error)) as caught:
            await bench.cancel()
        assert caught.value is given.pop(0)
    given.append(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await bench.cancel()
    assert bench.idle
    await eventually(lambda: len(bench.woken) > 1)
    # A hint for what was canceled or may have been; none where it was refused.
    assert bench.woken == ['t', 't']
    await bench.handler.aclose()


async def test_no_hint_for_a_task_of_somebody_else() -> None:
    async def answer(*_: Any) -> Any:
        raise LookupError

    bench = Bench(answer)
    for task_id, user in (('t', 'somebody else'), ('unknown', 'user')):
        with pytest.raises(LookupError):
            await bench.cancel(task_id, user)
    assert bench.woken == []
    await bench.handler.aclose()


async def test_the_streams_are_woken_also_when_the_client_has_left() -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def answer(*_: Any) -> Any:
        reached.set()
        await go.wait()

    bench = Bench(answer)
    call = asyncio.create_task(bench.cancel())
    await reached.wait()
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    assert not bench.woken
    go.set()
    await eventually(lambda: bench.woken == ['t'])
    assert bench.idle
    await bench.handler.aclose()


async def test_they_take_turns_in_order_and_each_task_has_its_own() -> None:
    begun: list[str] = []
    go = {name: asyncio.Event() for name in ('first', 'second', 'third', 'other')}

    async def answer(*_: Any) -> None:
        begun.append(WHO.get())
        await go[WHO.get()].wait()

    bench = Bench(answer)
    calls = []
    for name in go:
        WHO.set(name)
        calls.append(asyncio.create_task(bench.cancel('other' if name == 'other' else 't')))
        await eventually(lambda: bench.begun_or_waiting == len(calls))
    assert begun == ['first', 'other']
    # One whose client leaves gives up its place: nothing was begun for it.
    calls[1].cancel()
    for event in go.values():
        event.set()
    await eventually(lambda: bench.idle)
    assert begun == ['first', 'other', 'third']
    await asyncio.wait(calls)
    await bench.handler.aclose()


async def test_one_behind_another_that_fails_is_tried() -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def answer(*_: Any) -> Any:
        if reached.is_set():
            return 'its own'
        reached.set()
        await go.wait()
        raise LookupError

    bench = Bench(answer)
    calls = [asyncio.create_task(bench.cancel()) for _ in range(2)]
    await reached.wait()
    await eventually(lambda: bench.begun_or_waiting == 2)
    go.set()
    with pytest.raises(LookupError):
        await calls[0]
    assert await calls[1] == 'its own'
    assert bench.idle
    await bench.handler.aclose()


async def test_a_handler_with_a_cancel_of_its_own_answers_itself() -> None:
    reached, go = asyncio.Event(), asyncio.Event()
    errors = [ConcurrentTaskModificationError('t'), TaskNotCancelableError()]

    async def answer(*_: Any) -> Any:
        reached.set()
        await go.wait()
        await bench.store_state(CANCELED) if len(errors) == 2 else None
        raise errors.pop(0)

    bench = Bench(answer)
    calls = [asyncio.create_task(bench.cancel()) for _ in range(2)]
    await reached.wait()
    await eventually(lambda: bench.begun_or_waiting == 2)
    go.set()
    await asyncio.wait(calls)
    assert answers(calls) == [ConcurrentTaskModificationError, TaskNotCancelableError]
    await bench.handler.aclose()


async def test_it_is_left_to_the_handler_once_closed_and_on_another_loop() -> None:
    async def answer(*_: Any) -> Any:
        return 'its own'

    bench = Bench(answer)
    assert await bench.cancel() == 'its own'
    with ThreadPoolExecutor(1) as thread:
        elsewhere = thread.submit(asyncio.run, bench.cancel())
        assert await asyncio.wrap_future(elsewhere) == 'its own'
    await bench.handler.aclose()
    assert await bench.cancel() == 'its own'
    assert bench.idle


async def test_observing_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: Any) -> Any:
        return asyncio.current_task()

    bench = Bench(answer)
    bench.handler = wrap(bench.stub, settings=Settings(mode='observe'))
    assert await bench.cancel() is asyncio.current_task()
    await bench.handler.aclose()


async def test_one_that_cannot_look_waits_its_turn() -> None:
    """What cannot be read may well be a task that another cancel of is under way."""
    reached, go = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    async def answer(*_: Any) -> None:
        begun.append(WHO.get())
        reached.set()
        await go.wait()

    bench = Bench(answer)
    calls = [asyncio.create_task(bench.cancel())]
    await reached.wait()

    async def fail(*_: Any) -> None:
        raise ConnectionError

    bench.store.get = fail  # type: ignore[method-assign,assignment]
    calls.append(asyncio.create_task(bench.cancel()))
    await eventually(lambda: bench.begun_or_waiting == 2)
    assert len(begun) == 1
    go.set()
    await asyncio.wait(calls)
    assert len(begun) == 2
    await bench.handler.aclose()


async def test_an_error_does_not_wait_for_a_read() -> None:
    async def answer(*_: Any) -> Any:
        raise LookupError

    hung = asyncio.Event()
    bench = Bench(answer)
    bench.store.get = lambda *_: hung.wait()  # type: ignore[method-assign,assignment]
    call = asyncio.create_task(bench.cancel())
    await asyncio.wait({call}, timeout=LIMIT)
    assert answers([call]) == [LookupError]
    hung.set()
    await bench.handler.aclose()


async def test_an_error_after_its_client_has_left_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def answer(*_: Any) -> Any:
        reached.set()
        await go.wait()
        raise LookupError

    bench = Bench(answer)
    call = asyncio.create_task(bench.cancel())
    await reached.wait()
    call.cancel()
    await asyncio.wait({call})
    go.set()
    await eventually(lambda: bench.idle)
    told = 'The cancel of task t failed after its client had left (LookupError)'
    await eventually(lambda: told in caplog.messages)
    await bench.handler.aclose()
