"""Mode `stale`: a stream is left to the SDK only while that is right (F30, F3)."""

import asyncio

from typing import Any

import pytest

from a2a.types import SubscribeToTaskRequest

from cluster_subscribe import LocalState
from cluster_subscribe._testing import Decorate, Replica
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from tests.support.replicas import decorated, wrapping


def stale(**settings: Any) -> Decorate:
    return wrapping(mode='stale', **settings)


def counted(replica: Replica, state: LocalState) -> int:
    return decorated(replica).statistics().subscribes[state]


async def test_a_stream_that_is_open_makes_no_replica_live(sqlite_url: str) -> None:
    """One stream that hung kept the old answer for all that followed."""
    async with cluster(sqlite_url, decorate=stale()) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        hung = await lab.a.watch(task)
        lab.gates.open('1')
        assert await hung.until(lambda w: 'INPUT_REQUIRED' in w.told, 10)
        await lab.b.start('work wait=2 done', task).at('2')
        watch = await lab.a.watch(task)
        assert counted(lab.a, LocalState.LIVE) == 1
        assert counted(lab.a, LocalState.STALE) == 1
        lab.gates.open('2')
        assert await watch.until(lambda w: w.ending, 10)
        assert watch.timeline == ('Task(WORKING)', 'COMPLETED', 'closed')


async def test_a_stream_that_was_left_to_the_sdk_follows_the_task_elsewhere(
    database_url: str,
) -> None:
    async with cluster(database_url, decorate=stale(reconcile_interval=0.2)) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watch = await lab.a.watch(task)
        lab.gates.open('1')
        assert await watch.until(lambda w: 'INPUT_REQUIRED' in w.told, 10)
        await lab.b.start('work wait=2 art=x done', task).at('2')
        assert await watch.until(lambda w: len(w.told) > 2, 10)
        lab.gates.open('2')
        assert await watch.until(lambda w: w.ending, 10)
        # The snapshot is of the task before or after the later turn's first event.
        moved = {('Task(WORKING)',), ('Task(INPUT_REQUIRED)', 'WORKING')}
        assert watch.timeline[:2] == ('Task(WORKING)', 'INPUT_REQUIRED')
        assert watch.timeline[2:-3] in moved
        assert watch.timeline[-3:] == ('art x', 'COMPLETED', 'closed')


@pytest.mark.parametrize(('script', 'end'), [('done', 'closed'), (None, 'TaskNotFoundError')])
async def test_a_stream_that_was_left_to_the_sdk_hears_of_the_end_elsewhere(
    script: str | None, end: str, sqlite_url: str
) -> None:
    async with cluster(sqlite_url, decorate=stale(reconcile_interval=0.2)) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watch = await lab.a.watch(task)
        lab.gates.open('1')
        assert await watch.until(lambda w: 'INPUT_REQUIRED' in w.told, 10)
        if script:
            await lab.b.turn(script, task)
        else:
            await lab.b.store.delete(task.id, caller())
        assert await watch.until(lambda w: w.ending, 10)
        # The snapshot is of the task before or after the later turn's end.
        moved = {('Task(COMPLETED)',), ('Task(INPUT_REQUIRED)', 'COMPLETED')} if script else {()}
        assert watch.timeline[:2] == ('Task(WORKING)', 'INPUT_REQUIRED')
        assert watch.timeline[2:-1] in moved
        assert watch.timeline[-1] == end


async def test_a_later_turn_here_stays_with_the_sdk(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=stale(reconcile_interval=0.05)) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watch = await lab.a.watch(task)
        lab.gates.open('1')
        assert await watch.until(lambda w: 'INPUT_REQUIRED' in w.told, 10)
        await lab.a.turn('work done', task)
        assert await watch.until(lambda w: w.ending, 10)
        right = 'Task(WORKING)', 'INPUT_REQUIRED', 'WORKING', 'COMPLETED', 'closed'
        assert watch.timeline == right


async def test_its_cancellation_is_not_swallowed(sqlite_url: str) -> None:
    """F8: the SDK's own stream ends as if it had been closed."""
    async with cluster(sqlite_url, decorate=stale()) as lab:
        task = await lab.a.start('work wait=1 done').at('1')
        for handler, swallowed in ((lab.a.stock, True), (lab.a.handler, False)):
            events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
            await anext(events)
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            reading.cancel()
            (error,) = await asyncio.gather(reading, return_exceptions=True)
            assert isinstance(error, StopAsyncIteration if swallowed else asyncio.CancelledError)
            await events.aclose()
        assert counted(lab.a, LocalState.LIVE) == 1
