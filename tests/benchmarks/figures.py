"""What is measured."""

import asyncio
import gc
import os
import time
import tracemalloc

from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

from a2a.server.cluster import TaskVersion, VersionedEvent
from a2a.server.models import TaskEventModel, TaskVersionModel
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    StreamResponse,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
)
from sqlalchemy import insert, select, text, update

from cluster_subscribe import ClusterSubscribeHandler, SharedTailEventStream
from cluster_subscribe.event_log.wakeup import SharedPostgresqlWakeup
from tests.benchmarks.measure import (
    CONTEXT,
    Counted,
    Figure,
    Server,
    idle,
    lags,
    percentile,
    resident,
    servers,
    timed,
)

RATE: Final = 20
"""Events a second, as an agent that streams words."""
SIZE: Final = 16_000
"""Bytes of text in a paused task, where what it holds in memory is measured."""


async def latency(url: str, runs: int) -> list[Figure]:
    """From the executor's enqueue to the event coming out of a subscription."""
    figures = {
        (place, share): Figure(f'latency at {place}, p{share}', 'ms')
        for place in ('the same replica', 'another replica')
        for share in (50, 99)
    }
    for _ in range(runs):
        for ours in (False, True):
            async with servers(url, 2, ours=ours) as (runner, other):
                # In turn: in one process, the reading of one would delay the other.
                for place, server in (('the same replica', runner), ('another replica', other)):
                    task = await runner.send(f'{RATE} {RATE * 10}')
                    (values,) = await lags([server.subscribe(task)])
                    for share in (50, 99):
                        figure = figures[place, share]
                        (figure.ours if ours else figure.stock).append(
                            percentile(values, share / 100)
                        )
    return list(figures.values())


async def statements(url: str, runs: int) -> list[Figure]:
    """What idle subscribers cost the database and the processor."""
    figures = []
    for count, tasks in ((1, 1), (100, 10), (1000, 100), (5000, 500)):
        asked = Figure(f'statements, {count:,} idle subscribers', '1/s')
        busy = Figure(f'processor, {count:,} idle subscribers', '% of a core')
        for ours in (False, True) if count <= 1000 else (True,):
            async with (
                servers(url, 2, ours=ours) as (server, other),
                idle(server, count, tasks, holder=other),
            ):
                await asyncio.sleep(1)
                counted = Counted(server)
                for _ in range(runs):
                    before, began = counted.statements, time.process_time()
                    await asyncio.sleep(2)
                    used = time.process_time() - began
                    (asked.ours if ours else asked.stock).append((counted.statements - before) / 2)
                    (busy.ours if ours else busy.stock).append(used / 2 * 100)
        figures += [asked, busy]
    return figures


async def beside(url: str, runs: int) -> list[Figure]:
    """An agent at 20 events a second on a replica with idle subscribers, pool 5 + 10."""
    figures = []
    for count in (0, 1000):
        rate = Figure(f'agent beside {count:,} idle subscribers, rate', 'events/s')
        p50 = Figure(f'agent beside {count:,} idle subscribers, local p50', 'ms')
        p99 = Figure(f'agent beside {count:,} idle subscribers, local p99', 'ms')
        for _ in range(max(1, runs // 2)):
            for ours in (False, True):
                async with (
                    servers(url, 2, ours=ours) as (server, other),
                    idle(server, count, 100, holder=other),
                ):
                    task = await server.send(f'{RATE} {RATE * 5}')
                    began = time.perf_counter()
                    (values,) = await lags([server.subscribe(task)])
                    spent = time.perf_counter() - began
                    for figure, value in (
                        (rate, len(values) / spent),
                        (p50, percentile(values, 0.5)),
                        (p99, percentile(values, 0.99)),
                    ):
                        (figure.ours if ours else figure.stock).append(value)
        figures += [rate, p50, p99]
    return figures


async def fan_out(url: str, runs: int) -> list[Figure]:
    """One task read by 100 subscribers on another replica."""
    figures = [Figure(f'100 subscribers elsewhere, p{share}', 'ms') for share in (50, 99)]
    for _ in range(runs):
        for ours in (False, True):
            async with servers(url, 2, ours=ours) as (runner, other):
                task = await runner.send(f'{RATE} {RATE * 3}')
                streams = [other.subscribe(task) for _ in range(100)]
                values = [age for ages in await lags(streams) for age in ages]
                for figure, share in zip(figures, (0.5, 0.99), strict=True):
                    (figure.ours if ours else figure.stock).append(percentile(values, share))
    return figures


async def memory(url: str, runs: int) -> list[Figure]:
    """What an idle subscriber holds, beside a bare generator with the same snapshot."""
    beside_stock = Figure('memory of an idle subscriber, task of 16 KB', 'KB')
    beside_bare = Figure('the same (left: a bare generator)', 'KB')
    for _ in range(runs):
        stock, ours, bare = (_held_by_idle(url, kind) for kind in ('stock', 'ours', 'bare'))
        beside_stock.stock.append(stock)
        beside_bare.stock.append(bare)
        for figure in (beside_stock, beside_bare):
            figure.ours.append(ours)
    return [beside_stock, beside_bare]


def _held_by_idle(url: str, kind: str) -> float:
    # In a process of its own: memory that was freed before hides what is taken.
    with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as process:
        return process.submit(_held_by_idle_here, url, kind).result()


def _held_by_idle_here(url: str, kind: str) -> float:
    async def bare(server: Server, task: Task) -> Any:
        stored = await server.store.get(task.id, CONTEXT)
        assert stored is not None
        yield stored.task
        await asyncio.Event().wait()
        yield stored

    async def held(count: int) -> float:
        async with (
            servers(url, 2, ours=kind == 'ours') as (server, holder),
            # Whatever the first streams load is there before the others are counted.
            idle(server, 50, holder=holder, size=SIZE) as (task,),
        ):
            await asyncio.sleep(1)
            before = resident()
            streams = [
                bare(server, task) if kind == 'bare' else server.subscribe(task)
                for _ in range(count)
            ]
            for stream in streams:
                await anext(stream)
            readers = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(1)
            held = resident() - before
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
            return held / count / 1024

    return asyncio.run(held(2000))


async def long_task(url: str, runs: int) -> list[Figure]:
    """A subscriber at the end of a task with many events."""
    figures = []
    async with servers(url, 1, ours=True) as (server,):
        for length in (1_000, 100_000):
            figure = Figure(f'event to subscriber, task with {length:,} events', 'ms')
            task, version = await _long(server, length)
            stream = server.subscribe(task)
            await anext(stream)
            for _ in range(runs * 10):
                reading = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                event = TaskArtifactUpdateEvent(task_id=task.id, context_id='c')
                version = await server.store.save(
                    task, event=event, prev_version=version, context=CONTEXT
                )
                saved = time.perf_counter()
                await server.stock._event_stream.publish(  # type: ignore[union-attr]
                    task.id, VersionedEvent(event=event, version=version)
                )
                await reading
                figure.ours.append((time.perf_counter() - saved) * 1000)
            await stream.aclose()
            figures.append(figure)
    return figures


async def backlog(url: str, runs: int) -> list[Figure]:
    """A stream that has 100,000 events to catch up with, alone and beside a thousand others."""
    speed = Figure('backlog of 100,000 events', 'events/s')
    grown = Figure('memory grown meanwhile', 'MB')
    others = Figure('1,000 others during a backlog, p99 (left: without one)', 'ms')
    async with servers(url, 2, ours=True) as (server, runner):
        task, last = await _long(server, 100_000)
        tracemalloc.start()
        began, seen = time.perf_counter(), await _catch_up(server, task, last)
        speed.ours.append(seen / (time.perf_counter() - began))
        grown.ours.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
        for _ in range(runs):
            others.stock.append(await _slowest_of_a_thousand(runner, server))
            catching_up = asyncio.ensure_future(_catch_up(server, task, last, times=1000))
            others.ours.append(await _slowest_of_a_thousand(runner, server))
            catching_up.cancel()
            await asyncio.wait([catching_up])
    return [speed, grown, others]


async def _catch_up(server: Server, task: Task, last: TaskVersion, times: int = 1) -> int:
    """Reads the events of a long task, and says how many there were."""
    stream, seen = server.stock._event_stream, 0
    assert stream is not None
    for _ in range(times):
        events = stream.subscribe(task.id, after=TaskVersion(1))
        async for event in events:
            seen += 1
            if event.version == last:
                break
        await events.aclose()
    return seen


async def _slowest_of_a_thousand(runner: Server, server: Server) -> float:
    """The p99 of a hundred subscribers each of ten tasks that emit once a second."""
    tasks = [await runner.send('1 10') for _ in range(10)]
    streams = [server.subscribe(task) for task in tasks for _ in range(100)]
    return percentile([age for ages in await lags(streams) for age in ages], 0.99)


async def _long(server: Server, length: int) -> tuple[Task, TaskVersion]:
    """A running task with a log of its own, written without an agent."""
    task = Task(
        id=f'long-{length}-{time.time_ns() % 10**9}',
        context_id='c',
        status=TaskStatus(state=TaskState.TASK_STATE_WORKING),
    )
    await server.store.save(task, event=task, prev_version=TaskVersion.MISSING, context=CONTEXT)
    event = TaskArtifactUpdateEvent(task_id=task.id, context_id='c')
    data = StreamResponse(artifact_update=event).SerializeToString()
    async with server.engine.begin() as connection:
        for start in range(2, length, 5_000):
            await connection.execute(
                insert(TaskEventModel),
                [
                    {
                        'task_id': task.id,
                        'owner': 'user',
                        'task_version': version,
                        'event_data': data,
                    }
                    for version in range(start, min(start + 5_000, length))
                ],
            )
        await connection.execute(
            update(TaskVersionModel)
            .where(TaskVersionModel.task_id == task.id)
            .values(version=length - 1)
        )
    if server.engine.dialect.name == 'postgresql':
        # As autovacuum does within a minute; until then plans are those of a small table.
        async with server.engine.begin() as connection:
            await connection.execute(text('ANALYZE'))
    return task, TaskVersion(length - 1)


async def calls(url: str, runs: int) -> list[Figure]:
    """What the decorator adds to calls that are not a subscribe, and to the snapshot."""
    snapshot = Figure('time to the snapshot', 'us')
    get = Figure('GetTask', 'us')
    publish = Figure('publish()', 'us')
    for _ in range(runs):
        for ours in (False, True):
            async with servers(url, 1, ours=ours) as (server,), idle(server, 1) as (task,):
                snapshots, gets, publishes = [], [], []
                stream = server.stock._event_stream
                assert stream is not None
                told = VersionedEvent(event=task, version=TaskVersion(1))
                for _ in range(100):
                    subscription = server.subscribe(task)
                    snapshots.append(await timed(anext(subscription)))
                    await subscription.aclose()
                    gets.append(
                        await timed(server.handler.on_get_task(GetTaskRequest(id=task.id), CONTEXT))
                    )
                for _ in range(100):
                    publishes.append(await timed(stream.publish(task.id, told)))
                    # The reader it wakes is not what is timed.
                    await asyncio.sleep(0.01)
                for figure, values in ((snapshot, snapshots), (get, gets), (publish, publishes)):
                    (figure.ours if ours else figure.stock).append(percentile(values, 0.5))
    return [snapshot, get, publish]


async def hints(url: str, runs: int) -> list[Figure]:
    """What a replica pays for a notification about a task that nobody watches there."""
    if not url.startswith('postgresql'):
        return []
    heard = Figure('a notification that is not for this replica', 'us of a core')
    count = 20_000
    async with servers(url, 2, ours=True) as (server, other), idle(server, 1, holder=other):
        tail = server.stock._event_stream
        assert isinstance(tail, SharedTailEventStream)
        wakeup = tail._reader._wakeup.source
        assert isinstance(wakeup, SharedPostgresqlWakeup)
        channel = wakeup._join().wakeup._channel
        send = text('SELECT count(pg_notify(:channel, n::text)) FROM generate_series(1, :count) n')
        for _ in range(runs):
            already = tail.statistics().wakeups['notify'] if heard.ours else 0
            began = time.process_time()
            async with other.engine.begin() as connection:
                await connection.execute(send, {'channel': channel, 'count': count})
            while tail.statistics().wakeups.get('notify', 0) < already + count:  # noqa: ASYNC110 - a counter
                await asyncio.sleep(0.01)
            heard.ours.append((time.process_time() - began) / count * 1e6)
    return [heard]


async def zombies(url: str, runs: int) -> list[Figure]:
    """Ten thousand tasks whose second turn ran elsewhere: what the first replica keeps (F15)."""
    del runs
    count = int(os.environ.get('TASKS', '10000'))
    kept = Figure(f'asyncio tasks kept, {count:,} tasks that went on elsewhere', '')
    grown = Figure('memory grown by them', 'MB')
    for ours in (False, True):
        async with servers(url, 2, ours=ours) as (first, second):
            await _two_turns(first, second)
            if isinstance(first.handler, ClusterSubscribeHandler):
                await first.handler.sweep()
            before = len(asyncio.all_tasks())
            resident_before = resident()
            for _ in range(count):
                await _two_turns(first, second)
            gc.collect()
            for handler in (first.handler, second.handler):
                if isinstance(handler, ClusterSubscribeHandler):
                    await handler.sweep()
            await asyncio.sleep(1)
            (kept.ours if ours else kept.stock).append(len(asyncio.all_tasks()) - before)
            (grown.ours if ours else grown.stock).append((resident() - resident_before) / 2**20)
    return [kept, grown]


async def _two_turns(first: Server, second: Server) -> None:
    task = await first.send('1 0', wait=True)
    await second.send('1000 1', task, wait=True)


async def cancels(url: str, runs: int) -> list[Figure]:
    """Cancels at the replica of an earlier turn, while the agent saves elsewhere (F9, F20)."""
    tries = 60
    undone = Figure(f'cancels undone, of {tries}', '')
    lost = Figure(f'cancels that lost an event of the running turn, of {tries}', '')
    for _ in range(max(1, runs // 2)):
        for ours in (False, True):
            async with servers(url, 2, ours=ours) as (first, second):
                undone_now = lost_now = 0
                for number in range(tries):
                    task = await first.send('1 0', wait=True)
                    await second.send('40 60', task)
                    await asyncio.sleep(0.05 + 0.003 * number)
                    await first.handler.on_cancel_task(CancelTaskRequest(id=task.id), CONTEXT)
                    told = await _last_told(second, task)
                    stored = await second.store.get(task.id, CONTEXT)
                    assert stored is not None
                    kept = [part.text for one in stored.task.artifacts for part in one.parts]
                    undone_now += stored.task.status.state != TaskState.TASK_STATE_CANCELED
                    lost_now += bool(told) and told != kept[-1:]
                (undone.ours if ours else undone.stock).append(undone_now)
                (lost.ours if ours else lost.stock).append(lost_now)
    return [undone, lost]


async def _last_told(server: Server, task: Task) -> list[str]:
    """The text of the last artifact in the log, once the agent has stopped."""
    await asyncio.sleep(0.1)
    query = (
        select(TaskEventModel.event_data)
        .where(TaskEventModel.task_id == task.id)
        .order_by(TaskEventModel.seq.desc())
    )
    async with server.engine.connect() as connection:
        for (data,) in await connection.execute(query):
            event = StreamResponse.FromString(data)
            if event.HasField('artifact_update'):
                return [part.text for part in event.artifact_update.artifact.parts]
    return []


FIGURES: Final[dict[str, Callable[[str, int], Awaitable[list[Figure]]]]] = {
    'latency': latency,
    'statements': statements,
    'beside': beside,
    'fan-out': fan_out,
    'memory': memory,
    'long-task': long_task,
    'backlog': backlog,
    'calls': calls,
    'hints': hints,
    'cancels': cancels,
    'zombies': zombies,
}
