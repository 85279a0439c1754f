"""A stale replica forgets, and loses nothing by it."""

import asyncio
import gc
import os
import random

from collections import Counter
from typing import Any

import pytest

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.cluster import ConcurrentTaskModificationError, DatabaseTaskEventStream, TaskVersion
from a2a.server.events import EventQueue
from a2a.types import (
    CancelTaskRequest,
    SendMessageConfiguration,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import A2AError

from cluster_subscribe import Settings, sdk, wrap
from cluster_subscribe._testing import Cluster, Replica
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller, new_task, status_update, user_message
from tests.support.memory import TERMINAL, Memory, MemoryStore, MemoryStream
from tests.support.replicas import OwnStream, active_tasks, decorated, stock_handler, wrapping
from tests.support.waiting import eventually

SCHEDULES = int(os.environ.get('CLUSTER_SUBSCRIBE_TEST_SCHEDULES', '60'))
"""Random schedules in one run of the test."""


@pytest.mark.cancels_queries
@pytest.mark.parametrize('stream_type', [DatabaseTaskEventStream, OwnStream])
async def test_a_sweep_closes_what_another_replica_has_overtaken(
    database_url: str, stream_type: type[DatabaseTaskEventStream]
) -> None:
    """F15: stock keeps an ActiveTask and its asyncio tasks for every such task, for ever."""
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        async with cluster(database_url, decorate=decorate, stream_type=stream_type) as lab:
            paused = [await lab.a.turn('ask') for _ in range(3)]
            moved = [await lab.a.turn('ask') for _ in range(3)]
            for task in moved:
                await lab.b.turn('done', task)
            if name == 'stock':
                assert held(lab.a).keys() == {task.id for task in paused + moved}
                continue
            await eventually_swept(lab.a, {task.id for task in paused})
            assert decorated(lab.a).statistics().evictions == 3
            await lab.a.turn('done', paused[0])


def held(replica: Replica) -> dict[str, Any]:
    gc.collect()
    return active_tasks(replica.stock)


async def eventually_swept(replica: Replica, left: set[str]) -> None:
    for _ in range(200):
        gc.collect()
        await decorated(replica).sweep()
        if held(replica).keys() == left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f'still held: {held(replica).keys() - left}')


async def test_the_sweep_runs_by_itself(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(sweep_interval=0.05)) as lab:
        task = await lab.a.turn('ask')
        await lab.b.turn('done', task)
        await eventually(lambda: not held(lab.a))


async def test_a_subscribe_closes_the_stale_one_it_finds(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping()) as lab:
        task = await lab.a.turn('ask')
        await lab.b.turn('work ask', task)
        gc.collect()
        await lab.a.watch(task)
        assert task.id not in held(lab.a)
        await lab.a.turn('work done', task)
        assert (await lab.c.get(task.id)).status.state == TaskState.TASK_STATE_COMPLETED


@pytest.mark.parametrize('settings', [{'evict': 'off'}, {'mode': 'observe'}], ids=str)
async def test_eviction_can_be_switched_off(sqlite_url: str, settings: dict[str, str]) -> None:
    async with cluster(sqlite_url, decorate=wrapping(**settings)) as lab:
        task = await lab.a.turn('ask')
        await lab.b.turn('done', task)
        gc.collect()
        await decorated(lab.a).sweep()
        assert task.id in held(lab.a)


async def test_a_finished_one_that_the_sdk_left_behind_is_closed(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(mode='stale')) as lab:
        task = await lab.a.start('work wait=1 done').at('1')
        watch = await lab.a.watch(task)
        lab.gates.open('1')
        assert await watch.until(lambda w: w.ending, 10)
        await eventually_swept(lab.a, set())


async def canceled(lab: Cluster, task: Task) -> Task:
    """Cancels a task at A, and gives it as stored."""
    assert await lab.a.cancel(task) is not None
    stored = await lab.c.get(task.id)
    assert stored.status.state == TaskState.TASK_STATE_CANCELED
    return stored


@pytest.mark.cancels_queries
@pytest.mark.parametrize('evict', ['superseded', 'off'])
async def test_a_cancel_at_the_stale_replica_keeps_the_work_of_the_other(
    database_url: str, evict: str
) -> None:
    """F9."""
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping(evict=evict))):
        async with cluster(database_url, decorate=decorate) as lab:
            task = await lab.a.turn('ask')
            await lab.b.start('work art=one art=two wait=1 done', task).at('1')
            stored = await canceled(lab, task)
            kept = [artifact.artifact_id for artifact in stored.artifacts]
            if name == 'stock':
                assert kept == []
                assert len(stored.history) == 1
            else:
                assert kept == ['one', 'two']
                assert len(stored.history) == 2


@pytest.mark.cancels_queries
async def test_a_cancel_where_a_turn_runs_keeps_the_work_of_another(database_url: str) -> None:
    """F9, where two turns of the task run at once."""
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        async with cluster(database_url, decorate=decorate) as lab:
            task = await lab.a.turn('ask')
            await lab.a.start('work wait=1 done', task).at('1')
            await lab.b.start('art=one art=two wait=2 done', task).at('2')
            stored = await canceled(lab, task)
            kept = [artifact.artifact_id for artifact in stored.artifacts]
            assert kept == ([] if name == 'stock' else ['one', 'two'])


@pytest.mark.cancels_queries
@pytest.mark.parametrize('evict', ['superseded', 'off'])
async def test_a_cancel_where_an_earlier_incarnation_ran_keeps_the_new_one(
    database_url: str, evict: str
) -> None:
    """F9, for a task that was deleted and recreated: there the copy has the later version."""
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping(evict=evict))):
        async with cluster(database_url, decorate=decorate) as lab:
            old = await lab.a.turn('work art=old ask')
            await lab.b.store.delete(old.id, caller())
            recreated = Task(id=old.id, context_id=old.context_id, metadata={'incarnation': 'new'})
            await lab.b.store.save(
                recreated, event=recreated, prev_version=TaskVersion.MISSING, context=caller()
            )
            stored = await canceled(lab, recreated)
            kept = [artifact.artifact_id for artifact in stored.artifacts]
            assert kept == (['old'] if name == 'stock' else [])
            assert dict(stored.metadata) == ({} if name == 'stock' else {'incarnation': 'new'})


async def test_a_cancel_answers_as_the_sdk_does(database_url: str) -> None:
    async with cluster(database_url, decorate=wrapping()) as lab:
        running = await lab.a.start('work wait=1').at('1')
        paused = await lab.a.turn('ask')
        done = await lab.a.turn('done')
        for task in (running, paused):
            watches = await lab.watch(task)
            canceled = await lab.a.cancel(task)
            assert canceled is not None
            assert canceled.status.state == TaskState.TASK_STATE_CANCELED
            for watch in watches:
                assert await watch.until(lambda w: w.ending, 10)
                assert watch.timeline[-2].removeprefix('Task(').removesuffix(')') == 'CANCELED'
        for task, user in ((running, 'user'), (done, 'user'), (paused, 'somebody else')):
            errors = []
            for handler in (lab.b.handler, lab.b.stock):
                with pytest.raises(A2AError) as caught:
                    await handler.on_cancel_task(CancelTaskRequest(id=task.id), caller(user))
                errors.append(caught.value)
            assert [(type(error), str(error)) for error in errors] == [
                (type(errors[0]), str(errors[0]))
            ] * 2


# Evict, sweep, send, subscribe, cancel and cleanup against each other.


class Recording(AgentExecutor):
    """Keeps the ids of the messages it served, and who may still be running."""

    def __init__(self, memory: Memory, served: Counter[str]) -> None:
        self._memory = memory
        self._served = served

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        message = context.message
        assert message is not None
        self._served[message.message_id] += 1
        if context.current_task is None:
            await event_queue.enqueue_event(new_task(context))
        for state in (TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_INPUT_REQUIRED):
            await self._memory.breathe()
            await event_queue.enqueue_event(status_update(context, state))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await event_queue.enqueue_event(status_update(context, TaskState.TASK_STATE_CANCELED))


class Schedule:
    """Two replicas, one task, and everything at once in an order of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.memory = Memory(seed)
        self.served: Counter[str] = Counter()
        self.sent: list[str] = []
        self.refused: list[Exception] = []
        self.canceled = False
        self.stock = [
            stock_handler(
                MemoryStore(self.memory),
                MemoryStream(self.memory),
                Recording(self.memory, self.served),
            )
            for _ in range(2)
        ]
        self.handlers = [wrap(handler, settings=Settings()) for handler in self.stock]

    async def send(self, handler: Any, task: Task | None = None) -> Task | None:
        message = user_message('go', task)
        await self.pause(6)
        request = SendMessageRequest(
            message=message,
            configuration=SendMessageConfiguration(return_immediately=self.chance.random() < 0.5),
        )
        try:
            answer: Task = await handler.on_message_send(request, caller())
        except Exception as error:  # noqa: BLE001 - judged at the end
            self.refused.append(error)
            return None
        self.sent.append(message.message_id)
        return answer

    async def pause(self, most: int) -> None:
        for _ in range(self.chance.randrange(most)):
            await asyncio.sleep(0)

    async def sweep(self, handler: Any) -> None:
        while True:
            await self.pause(8)
            await handler.sweep()

    async def evict_at_once(self, number: int, task: Task) -> None:
        """Tries in every single turn of the loop, with the version as stored at that moment."""
        handler: Any = self.handlers[number]
        evict = handler._ClusterSubscribeHandler__local_tasks.evict
        while True:
            if (local := sdk.local_task(self.stock[number], task.id)) is not None:
                evict(local, TaskVersion(self.memory.tasks[task.id, 'user'][1]))
            await asyncio.sleep(0)

    async def write_from_outside(self, task: Task) -> None:
        """Another writer advances the task, so that whoever holds it is behind."""
        await self.pause(30)
        store = MemoryStore(self.memory)
        stored = await store.get(task.id, caller())
        assert stored is not None
        try:
            await store.save(stored.task, prev_version=stored.version, context=caller())
        except ConcurrentTaskModificationError:
            pass

    async def subscribe(self, handler: Any, task: Task) -> None:
        await self.pause(12)
        events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
        try:
            async for _ in events:
                if self.chance.random() < 0.3:
                    break
        except A2AError:
            assert self.canceled
        finally:
            await events.aclose()

    async def cancel(self, handler: Any, task: Task) -> None:
        self.canceled = True
        await self.pause(20)
        try:
            await handler.on_cancel_task(CancelTaskRequest(id=task.id), caller())
        except A2AError:
            pass

    async def at_rest(self, task: Task) -> None:
        def busy() -> bool:
            local = [sdk.local_task(stock, task.id) for stock in self.stock]
            return any(one is not None and one.turn_running for one in local)

        while busy() or not all(map(self.served.get, self.sent)):  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)

    async def play(self) -> bool:
        """Plays to the end; `False` if the SDK gave up a turn for a reason of its own."""
        a, b = self.handlers
        task = await self.send(a)
        assert task is not None
        for _ in range(3):
            # Turns of one task at two replicas at once are not serialised by the SDK.
            number = self.chance.randrange(2)
            disturbers = [
                asyncio.ensure_future(work)
                for work in (
                    self.sweep(a),
                    self.sweep(b),
                    self.evict_at_once(0, task),
                    self.evict_at_once(1, task),
                    self.subscribe(a, task),
                    self.subscribe(b, task),
                )
            ]
            await asyncio.wait_for(
                asyncio.gather(
                    *(
                        self.send(self.handlers[number], task)
                        for _ in range(self.chance.choice((1, 2)))
                    ),
                    self.write_from_outside(task),
                ),
                20,
            )
            void = any('modified concurrently' in str(error) for error in self.refused)
            if not void:
                assert not self.refused, self.refused
                await asyncio.wait_for(self.at_rest(task), 20)
            for disturber in disturbers:
                disturber.cancel()
            await asyncio.gather(*disturbers, return_exceptions=True)
            if void:
                # The SDK gives up after a second conflict with the outside writer, with
                # eviction or without.
                return False
        assert [self.served[message_id] for message_id in self.sent] == [1] * len(self.sent)
        if self.chance.random() < 0.5:
            sweep = asyncio.ensure_future(self.sweep(a))
            await asyncio.wait_for(
                asyncio.gather(self.cancel(a, task), self.subscribe(b, task)), 20
            )
            sweep.cancel()
            data, _ = self.memory.tasks[task.id, 'user']
            assert Task.FromString(data).status.state in TERMINAL
        return True

    async def close(self) -> None:
        for handler in self.handlers:
            await handler.aclose()


async def test_no_message_is_refused_or_lost_in_any_schedule() -> None:
    """The recipe that reads only the SDK's own locks loses 1 to 3 of 400."""
    before = asyncio.all_tasks()
    evictions = void = 0
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        try:
            void += not await schedule.play()
        except BaseException as error:
            raise AssertionError(f'schedule {seed}') from error
        evictions += sum(handler.statistics().evictions for handler in schedule.handlers)  # type: ignore[attr-defined]
        await schedule.close()
        for _ in range(50):
            if not asyncio.all_tasks() - before:
                break
            gc.collect()
            await asyncio.sleep(0)
        assert not asyncio.all_tasks() - before, f'schedule {seed} left an orphan'
    assert evictions > SCHEDULES
    assert void <= SCHEDULES / 20
