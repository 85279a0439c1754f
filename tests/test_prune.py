"""The pruning recipe of the docs, under open streams."""

import importlib.util

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from a2a.server.models import TaskEventModel
from sqlalchemy import func, select

from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe._testing.watching import Watch
from tests.support.replicas import decorated, wrapping

RECIPE = Path(__file__).parent.parent / 'docs' / 'examples' / 'prune.py'
EVENTS = 60


@pytest.fixture(scope='module')
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location('prune', RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def streams_over_pruning(url: str, recipe: Any, keep: int) -> tuple[list[Watch], int]:
    """Streams at every replica, one of them slow, while the log is pruned behind each event."""
    async with cluster(url, decorate=wrapping(max_buffered_events=4, poll_interval=0.1)) as lab:
        words = ' '.join(f'chunk={number} wait={number}' for number in range(EVENTS))
        turn = lab.a.start(f'work wait=g {words} done')
        task = await turn.at('g')
        watches = [*await lab.watch(task), slow := await lab.b.watch(task)]
        slow.hold()
        paused = await lab.c.watch(await lab.a.turn('work chunk=0 ask'))
        lab.gates.open('g')
        removed = 0
        for number in range(EVENTS):
            await lab.gates.reached(str(number))
            if number == EVENTS // 2:
                slow.resume()
            removed += await recipe.prune(lab.a.engine, keep=keep, batch=3)
            lab.gates.open(str(number))
        for watch in watches:
            assert await watch.until(lambda w: w.ending, 20), watch.timeline
        assert paused.timeline == ('Task(INPUT_REQUIRED)', 'open')
        assert removed > 0
        reconciled = 0
        for replica in lab.replicas:
            reconciled += decorated(replica).statistics().reconciled
        return watches, reconciled


async def test_no_open_stream_notices_the_pruning(database_url: str, recipe: Any) -> None:
    watches, reconciled = await streams_over_pruning(database_url, recipe, keep=40)
    right = ('Task(WORKING)', *(f'chunk {n}' for n in range(EVENTS)), 'COMPLETED', 'closed')
    assert [watch.timeline for watch in watches] == [right] * 4
    assert not reconciled


async def test_a_stream_that_has_fallen_behind_it_gets_the_task_as_stored(
    sqlite_url: str, recipe: Any
) -> None:
    watches, reconciled = await streams_over_pruning(sqlite_url, recipe, keep=5)
    assert reconciled
    assert 'Task(WORKING)' in watches[-1].timeline[1:]
    assert watches[-1].timeline[-2:] == ('COMPLETED', 'closed')


async def test_what_has_ended_goes_and_what_goes_on_stays(database_url: str, recipe: Any) -> None:
    async with cluster(database_url) as lab:
        ended = await lab.a.turn('work chunk=0 done')
        deleted = await lab.a.turn('work chunk=0 ask')
        waiting = await lab.a.turn('work chunk=0 ask')
        await lab.a.store.delete(deleted.id, caller())

        async def left() -> set[str]:
            async with lab.a.engine.connect() as connection:
                counted = select(TaskEventModel.task_id, func.count()).group_by(
                    TaskEventModel.task_id
                )
                found = {task_id for task_id, _ in await connection.execute(counted)}
            # The database was cloned from one in which others play.
            return found & {ended.id, deleted.id, waiting.id}

        await recipe.prune(lab.a.engine)
        assert await left() == {ended.id, waiting.id}
        await recipe.prune(lab.a.engine, ended_for=timedelta(days=-1))
        assert await left() == {waiting.id}
