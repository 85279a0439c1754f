"""What was stored as the end of a task stays the end of it (F32)."""

import asyncio
import gc

from typing import Any

import pytest

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    StoredTask,
    TaskVersion,
    VersionedTaskStore,
)
from a2a.server.events import EventQueue
from a2a.server.tasks import PushNotificationSender, TaskUpdater
from a2a.types import (
    ListTasksRequest,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskState,
    TaskStatus,
)
from sqlalchemy import select

from cluster_subscribe import Settings, sdk, store_seam, wrap
from cluster_subscribe._testing import Decorate, Gates, Parts, Replica
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller, label, user_message
from cluster_subscribe.store_seam import StoreSeam
from tests.support.memory import Memory, MemoryStore, MemoryStream
from tests.support.replicas import stock_handler, wrapping
from tests.support.waiting import eventually

WORKING = TaskState.TASK_STATE_WORKING
COMPLETED = TaskState.TASK_STATE_COMPLETED
CANCELED = TaskState.TASK_STATE_CANCELED

both = pytest.mark.parametrize('wrapped', [False, True], ids=['bare', 'wrapped'])


def decorate(*, wrapped: bool) -> Decorate:
    return wrapping() if wrapped else (lambda handler: handler)


class Webhook(PushNotificationSender):
    """Notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send_notification(self, task_id: str, event: Any) -> None:
        self.sent.append(label(event))


class Talkative(AgentExecutor):
    """Works until gate `burst` opens, says several things at once, and tidies up."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self.ended = asyncio.Event()
        self.tidied = False

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task = Task(id=context.task_id, context_id=context.context_id)
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        try:
            await updater.start_work()
            await self.gates.arrive('burst')
            for _ in range(3):
                await updater.start_work()
            await updater.complete()
            await self.gates.arrive('never')
        finally:
            for _ in range(100):
                await asyncio.sleep(0.001)
            self.tidied = True
            self.ended.set()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None: ...


async def settled(replica: Replica, task: Task) -> None:
    """Waits until a replica has stored, or refused, all that its agent said."""
    gc.collect()
    await eventually(
        lambda: (
            (local := sdk.local_task(replica.stock, task.id)) is None
            or (local.finished and not local.unhandled)
        )
    )


async def logged(replica: Replica, task: Task) -> list[str]:
    model = replica.store._event_model
    log = select(model.event_data).where(model.task_id == task.id).order_by(model.seq)
    async with replica.store._db.async_session_maker() as session:
        events = [StreamResponse.FromString(data) for (data,) in await session.execute(log)]
    return [label(getattr(event, str(event.WhichOneof('payload')))) for event in events]


@pytest.mark.cancels_queries
@both
async def test_a_burst_after_a_cancel_elsewhere_changes_nothing(
    database_url: str, wrapped: bool
) -> None:
    """The agent is cancelled once and may tidy up, as it is by the SDK alone."""
    webhook = Webhook()
    agents: list[Talkative] = []

    def agent(gates: Gates) -> AgentExecutor:
        agents.append(Talkative(gates))
        return agents[-1]

    parts = Parts(push=lambda _: webhook, agent=agent)
    async with cluster(database_url, decorate=decorate(wrapped=wrapped), parts=parts) as lab:
        # Nobody reads: up to a2a-sdk 1.2.2 a reader's queue would hold up the SDK.
        immediately = SendMessageConfiguration(return_immediately=True)
        request = SendMessageRequest(message=user_message('go'), configuration=immediately)
        task = await lab.a.handler.on_message_send(request, caller())
        assert isinstance(task, Task)
        gc.collect()
        await lab.gates.commits(2)
        await lab.b.cancel(task)
        told, before = len(webhook.sent), await logged(lab.c, task)
        assert before[-1] == 'CANCELED'
        lab.gates.open('burst')
        await agents[0].ended.wait()
        if wrapped:
            await settled(lab.a, task)
        else:
            await eventually(lambda: 'COMPLETED' in webhook.sent)
        stored = (await lab.c.get(task.id)).status.state
        assert stored == (CANCELED if wrapped else COMPLETED)
        late = [] if wrapped else ['WORKING', 'WORKING', 'COMPLETED']
        assert webhook.sent[told:] == late
        assert await logged(lab.c, task) == before + late
        assert agents[0].tidied


class Outspoken(Talkative):
    """Still has something to say when its task has ended."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task = Task(id=context.task_id, context_id=context.context_id)
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        try:
            await updater.start_work()
            await self.gates.arrive('end')
            await updater.complete()
        except asyncio.CancelledError:
            pass
        # Not by the updater, which says no more after an end.
        await self.gates.arrive('more')
        for _ in range(2):
            await TaskUpdater(event_queue, task.id, task.context_id).start_work()
        self.ended.set()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await asyncio.sleep(0)
        assert context.task_id
        assert context.context_id
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


@pytest.mark.cancels_queries
@both
@pytest.mark.parametrize('end', ['COMPLETED', 'CANCELED'])
async def test_what_an_agent_says_after_its_own_end_is_stored(
    sqlite_url: str, end: str, wrapped: bool
) -> None:
    parts = Parts(agent=Outspoken)
    async with cluster(sqlite_url, decorate=decorate(wrapped=wrapped), parts=parts) as lab:
        task = await lab.a.start('go').at('end')
        await lab.gates.commits(2)
        if end == 'CANCELED':
            canceled = await lab.a.cancel(task)
            assert canceled
            assert canceled.status.state == CANCELED
        lab.gates.open('end')
        await lab.gates.reached('more')
        await lab.gates.commits(3)
        # As a client that asks for the task in between.
        store: Any = lab.a.stock._active_task_registry._task_store
        stored = await store.get(task.id, caller())
        assert stored
        assert label(stored.task) == f'Task({end})'
        lab.gates.open('more')
        await lab.gates.commits(5)
        assert await logged(lab.c, task) == ['Task(UNSPECIFIED)', 'WORKING', end, *2 * ['WORKING']]


# The seam alone.


class Shelf(MemoryStore):
    """A store with something of its own, whose versions may be of any kind."""

    label = 'its own'
    made: Any = int
    """Makes a version's value of its number."""
    error: Exception | None = None

    def _as(self, version: TaskVersion) -> TaskVersion:
        return version if version.is_missing else TaskVersion(self.made(version._value))

    async def save(self, task: Task, *, prev_version: TaskVersion, **how: Any) -> TaskVersion:
        if self.error:
            raise self.error
        numbers = map(TaskVersion, range(100))
        number = next(one for one in numbers if self._as(one) == prev_version)
        return self._as(await super().save(task, prev_version=number, **how))

    async def get(self, task_id: str, *context: Any) -> StoredTask | None:
        stored = await super().get(task_id, *context)
        return stored and StoredTask(stored.task, self._as(stored.version))


class Bench:
    """One replica's seam, and the store that it shares with another."""

    def __init__(self) -> None:
        self.store = Shelf(Memory())
        self.lost: list[str] = []
        self.seam = StoreSeam(self.store, self.note)

    async def note(self, task_id: str) -> None:
        self.lost.append(task_id)

    async def save(self, state: TaskState, on: VersionedTaskStore, prev: TaskVersion) -> Any:
        task = Task(id='t', status=TaskStatus(state=state))
        return await on.save(task, event=None, prev=None, prev_version=prev, context=caller())

    async def read(self) -> TaskVersion:
        stored = await self.seam.get('t', caller())
        assert stored
        return stored.version


@pytest.mark.parametrize('made', [int, str, lambda number: f'{number:x}-etag'])
@pytest.mark.parametrize('end', [COMPLETED, CANCELED])
async def test_an_end_that_was_read_is_not_written_over(made: Any, end: TaskState) -> None:
    bench = Bench()
    bench.store.made = made
    began = await bench.save(WORKING, bench.seam, TaskVersion.MISSING)
    await bench.save(end, bench.store, began)
    version = await bench.read()
    assert bench.lost == ['t']
    for state in (WORKING, COMPLETED, CANCELED):
        with pytest.raises(ConcurrentTaskModificationError) as refused:
            await bench.save(state, bench.seam, version)
        assert refused.value.task_id == 't'
    # It is the other replica's.
    await bench.save(WORKING, bench.store, version)
    await bench.save(WORKING, bench.seam, await bench.read())


async def test_an_end_of_its_own_is() -> None:
    bench = Bench()
    version = await bench.save(WORKING, bench.seam, TaskVersion.MISSING)
    for state in (COMPLETED, COMPLETED, WORKING, CANCELED, WORKING):
        version = await bench.save(state, bench.seam, version)
        assert await bench.read() == version
    assert bench.lost == []


async def test_a_task_that_is_recreated_under_its_id_goes_on() -> None:
    bench = Bench()
    began = await bench.save(WORKING, bench.seam, TaskVersion.MISSING)
    await bench.save(COMPLETED, bench.store, began)
    ended = await bench.read()
    for recreated_by in (bench.seam, bench.store):
        await bench.store.delete('t', caller())
        assert await bench.seam.get('t', caller()) is None
        version = await bench.save(WORKING, recreated_by, TaskVersion.MISSING)
        assert await bench.save(WORKING, recreated_by, version) == ended
        assert await bench.read() == ended
        await bench.save(COMPLETED, bench.seam, ended)


async def test_two_owners_of_one_id_do_not_mix() -> None:
    bench = Bench()
    version = await bench.save(WORKING, bench.seam, TaskVersion.MISSING)
    version = await bench.save(WORKING, bench.seam, version)
    for prev in (0, 1):
        theirs = Task(id='t', status=TaskStatus(state=COMPLETED))
        await bench.store.save(theirs, prev_version=TaskVersion(prev), context=caller('other'))
    assert await bench.seam.get('t', caller('other'))
    # The SDK reads the task again, and saves.
    with pytest.raises(ConcurrentTaskModificationError):
        await bench.save(WORKING, bench.seam, version)
    await bench.save(WORKING, bench.seam, await bench.read())


async def test_versions_that_cannot_be_hashed_refuse_nothing() -> None:
    bench = Bench()
    bench.store.made = lambda number: {'clock': number}
    began = await bench.save(WORKING, bench.seam, TaskVersion.MISSING)
    await bench.save(COMPLETED, bench.store, began)
    await bench.save(WORKING, bench.seam, await bench.read())


async def test_a_store_that_tracks_no_versions_refuses_nothing() -> None:
    class Untracked(MemoryStore):
        async def save(self, task: Task, **how: Any) -> TaskVersion:
            return TaskVersion.MISSING

        async def get(self, task_id: str, *context: Any) -> StoredTask:
            return StoredTask(Task(id='t', status=TaskStatus(state=CANCELED)), TaskVersion.MISSING)

    bench = Bench()
    bench.seam = StoreSeam(Untracked(Memory()), bench.note)
    await bench.save(WORKING, bench.seam, await bench.read())


async def test_it_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_seam, '_REMEMBERED', 3)
    bench = Bench()
    for number in range(10):
        task = Task(id=f'{number}', status=TaskStatus(state=COMPLETED))
        await bench.seam.save(task, prev_version=TaskVersion.MISSING, context=caller())
    assert [task_id for task_id, _ in bench.seam._ends] == ['7', '8', '9']


async def test_it_passes_on_what_it_is_given_and_what_is_raised() -> None:
    bench = Bench()
    assert bench.seam.label == 'its own'
    with pytest.raises(AttributeError, match='nothing_of_the_kind'):
        _ = bench.seam.nothing_of_the_kind
    with pytest.raises(NotImplementedError):
        await bench.seam.list(ListTasksRequest(), caller())
    version = await bench.save(WORKING, bench.seam, TaskVersion.MISSING)
    bench.store.error = LookupError('its own')
    with pytest.raises(LookupError, match='its own'):
        await bench.save(WORKING, bench.seam, version)
    bench.store.error = None
    await bench.seam.delete('t', caller())
    assert await bench.seam.get('t', caller()) is None


async def test_the_handler_keeps_the_store_that_it_was_given() -> None:
    store = MemoryStore(memory := Memory())
    for mode, seam in (('on', True), ('stale', True), ('observe', False), ('off', False)):
        stock = stock_handler(store, MemoryStream(memory))
        for _ in range(2):
            wrapped = wrap(stock, settings=Settings(mode=mode))
            assert wrapped.task_store is wrapped._versioned_store is store
        found: Any = stock._active_task_registry._task_store
        assert isinstance(found, StoreSeam) is seam
        assert not isinstance(getattr(found, '_store', None), StoreSeam)


async def test_without_its_place_there_is_one_warning_and_no_seam(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock = stock_handler(MemoryStore(memory := Memory()), MemoryStream(memory))
    del stock._active_task_registry._task_store
    sdk._warn_of_missing.cache_clear()
    for _ in range(2):
        assert store_seam.install(stock) is None
    assert caplog.text.count('_task_store') == 1
    sdk._warn_of_missing.cache_clear()
