"""Whose context variables a query runs with, and tasks that begin at once."""

import asyncio
import sys

from contextlib import aclosing
from contextvars import ContextVar, copy_context

import pytest

from a2a.types import SubscribeToTaskRequest
from sqlalchemy import event as sqlalchemy_event

from cluster_subscribe.cli.lab import Decorate, label
from cluster_subscribe.cli.lab.cluster import Replica, caller, cluster
from tests.writer import BACKSTOP, wrapping

REQUEST: ContextVar[str] = ContextVar('request', default='none')


@pytest.mark.skipif(sys.version_info < (3, 12), reason='asyncio has no eager tasks')
@pytest.mark.cancels_queries
@pytest.mark.parametrize('decorate', [lambda handler: handler, wrapping(poll_interval=0.05)])
async def test_eager_tasks(decorate: Decorate, sqlite_url: str) -> None:
    """A reader that begins at once finds the stream that it was started for."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    try:
        async with cluster(sqlite_url, decorate=decorate, poll_interval=0.05) as lab:
            task = await lab.a.turn('ask')
            (watch,) = await lab.watch(task, [lab.c])
            await lab.b.turn('work done', task)
            assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
            assert watch.timeline[-1] == 'closed'
    finally:
        loop.set_task_factory(None)


def queries(replica: Replica) -> list[tuple[str, str]]:
    """The asyncio task of each statement from now on, and the request it belongs to."""
    asked: list[tuple[str, str]] = []

    def note(*_: object) -> None:
        task = asyncio.current_task()
        asked.append((task.get_name() if task else '', REQUEST.get()))

    sqlalchemy_event.listen(replica.engine.sync_engine, 'before_cursor_execute', note)
    return asked


async def test_the_reader_belongs_to_no_request_and_a_streams_own_reads_to_its_own(
    sqlite_url: str,
) -> None:
    async with cluster(sqlite_url, decorate=wrapping(poll_interval=0.05)) as lab:
        task = await lab.a.turn('ask')
        asked = queries(lab.c)
        told: list[str] = []

        async def read_on() -> None:
            told.extend([label(event) async for event in events])

        def of(request: str) -> None:
            REQUEST.set(request)

        own = copy_context()
        own.run(of, 'alice')
        events = lab.c.handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
        async with aclosing(events):
            # As a transport does: the first event in the request's task, the rest in another.
            first = own.run(asyncio.ensure_future, anext(events))
            assert label(await first) == 'Task(INPUT_REQUIRED)'
            reading = asyncio.ensure_future(read_on())
            await lab.b.turn('work ask', task)
            await asyncio.wait_for(reading, BACKSTOP)
        assert told == ['WORKING', 'INPUT_REQUIRED']
        reads = [request for name, request in asked if name.endswith(f' read {task.id}')]
        assert len(reads) > 1
        assert set(reads) == {'alice'}
        assert {request for name, request in asked if ' of task_events' in name} == {'none'}


async def test_what_closes_a_task_belongs_to_no_request(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(poll_interval=0.05)) as lab:
        task = await lab.a.turn('ask')
        await lab.b.turn('work ask', task)
        seen: list[str] = []
        active = lab.a.stock._active_task_registry._active_tasks[task.id]
        close = active.aclose

        async def note() -> None:
            seen.append(REQUEST.get())
            await close()

        active.aclose = note  # type: ignore[method-assign]
        REQUEST.set('alice')
        watch = await lab.a.watch(task)
        await lab.b.turn('work done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert seen == ['none']
