"""The stored task decides (rule 5): versioned or not, newer, older, or without a row."""

import asyncio

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from a2a.server.cluster import DatabaseTaskEventStream, TaskVersion, VersionedDatabaseTaskStore
from a2a.server.request_handlers import RequestHandler
from a2a.types import SubscribeToTaskRequest, Task, TaskState, TaskStatus
from a2a.utils.errors import A2AError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import ClusterSubscribeHandler, Settings, SharedTailEventStream, wrap
from cluster_subscribe._testing import label
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.event_log.subscriber import Subscriber
from tests.support.replicas import stock_handler, wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer

FAST = {'poll_interval': 0.05, 'reconcile_interval': 0.4}


class Reading:
    """What one subscriber was told, and how its stream ended."""

    def __init__(self, handler: RequestHandler, task_id: str = 'task', user: str = 'user') -> None:
        self.told: list[str] = []
        events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task_id), caller(user))
        self.task = asyncio.ensure_future(self._read(events))

    async def _read(self, events: Any) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self.told.append(label(event))
            self.told.append('closed')
        except A2AError as error:
            self.told.append(type(error).__name__)

    async def up_to(self, count: int) -> list[str]:
        await eventually(lambda: len(self.told) >= count)
        return self.told

    async def end(self) -> list[str]:
        await asyncio.wait_for(self.task, BACKSTOP)
        return self.told


@asynccontextmanager
async def serving(
    url: str, *, by_hand: bool = False, **settings: Any
) -> AsyncIterator[ClusterSubscribeHandler]:
    """A wrapped handler; over an event stream that was built by hand where one is named."""
    engine: AsyncEngine = create_async_engine(url)
    chosen = Settings(**{**FAST, **settings})
    shared = SharedTailEventStream(engine, settings=chosen)
    handler = wrap(
        stock_handler(
            VersionedDatabaseTaskStore(engine),
            shared if by_hand else DatabaseTaskEventStream(engine),
        ),
        settings=chosen,
    )
    assert isinstance(handler, ClusterSubscribeHandler)
    yield handler
    await handler.aclose()
    await shared.aclose()
    await engine.dispose()


def subscribers(handler: Any) -> list[Subscriber]:
    return list(handler._event_stream._reader._watched)


async def test_a_stream_reads_the_log_once_more_before_it_compares(sqlite_url: str) -> None:
    """A stream that reconciles while events wait in the log gets the events, not a snapshot."""
    async with cluster(sqlite_url, decorate=wrapping(poll_interval=1000, wakeup='poll')) as lab:
        task = await lab.a.turn('ask')
        watch = await lab.c.watch(task)
        handler: Any = lab.c.handler
        await eventually(lambda: handler.statistics().event_log.rounds)
        await lab.b.turn('work art=x done', task)
        (subscriber,) = subscribers(handler)
        subscriber.request_reconcile()
        assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
        assert watch.timeline == (
            *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED'),
            'closed',
        )


@pytest.mark.parametrize('logged_too', [False, True])
async def test_a_row_that_is_removed_from_the_task_table_alone_ends_the_streams(
    database_url: str, logged_too: bool
) -> None:
    async with cluster(database_url, decorate=wrapping(**FAST)) as lab:
        task = await lab.a.turn('work ask')
        writer = Writer(database_url)
        watches = await lab.watch(task)
        await writer.execute('DELETE FROM tasks WHERE id = :id', id=task.id)
        if logged_too:
            await writer.execute('DELETE FROM task_events WHERE task_id = :id', id=task.id)
        for watch in watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'TaskNotFoundError')
        await writer.engine.dispose()


async def test_where_no_task_table_is_known_the_store_is_read(writer: Writer) -> None:
    url = writer.engine.url.render_as_string(hide_password=False)
    async with serving(url, by_hand=True) as handler:
        await writer.begin()
        reading = Reading(handler)
        await reading.up_to(1)
        await writer.execute("DELETE FROM tasks WHERE id = 'task'")
        assert await reading.end() == ['Task(WORKING)', 'TaskNotFoundError']


@pytest.mark.parametrize('by_hand', [False, True])
async def test_a_task_without_a_version_is_completed_or_deleted(
    writer: Writer, by_hand: bool
) -> None:
    """As a replica does that is not in cluster mode yet."""
    url = writer.engine.url.render_as_string(hide_password=False)
    plain = writer.store.as_task_store

    def task(task_id: str, state: TaskState) -> Task:
        return Task(id=task_id, context_id='c', status=TaskStatus(state=state))

    async with serving(url, by_hand=by_hand) as handler:
        for task_id in ('completed', 'deleted'):
            await plain.save(task(task_id, TaskState.TASK_STATE_WORKING), caller())
        completed, deleted = Reading(handler, 'completed'), Reading(handler, 'deleted')
        await asyncio.gather(completed.up_to(1), deleted.up_to(1))
        await plain.save(task('completed', TaskState.TASK_STATE_COMPLETED), caller())
        await plain.delete('deleted', caller())
        assert await completed.end() == ['Task(WORKING)', 'Task(COMPLETED)', 'closed']
        assert await deleted.end() == ['Task(WORKING)', 'TaskNotFoundError']


@pytest.mark.parametrize('known', [False, True])
async def test_a_database_that_went_back_has_the_task_delivered_as_stored(
    writer: Writer, known: bool
) -> None:
    """A failover that lost two commits; `known`: the stream has had the last row that was lost."""
    url = writer.engine.url.render_as_string(hide_password=False)
    async with serving(url) as handler:
        await writer.begin()
        version = await writer.say('a', 'b')
        if not known:
            version = await writer.say('c')
        reading = Reading(handler)
        await reading.up_to(1)
        if known:
            version = await writer.say('c')
            await reading.up_to(2)
        else:
            await eventually(lambda: subscribers(handler))
        assert version == TaskVersion(4)
        async with writer.engine.begin() as connection:
            for statement in (
                'DELETE FROM task_events WHERE task_version > 2',
                'UPDATE task_versions SET version = 2',
            ):
                await connection.exec_driver_sql(statement)
        before = ['Task(WORKING)', *(['art c'] if known else [])]
        assert await reading.up_to(len(before) + 1) == [*before, 'Task(WORKING)']
        await writer.say('d')
        assert await reading.up_to(len(before) + 2) == [*before, 'Task(WORKING)', 'art d']


async def test_another_context_is_another_task(writer: Writer) -> None:
    """Recreated at once under its id, in another context, the log gone with the first."""
    url = writer.engine.url.render_as_string(hide_password=False)
    async with serving(url) as handler:
        await writer.begin()
        await writer.say('a', 'b')
        reading = Reading(handler)
        await reading.up_to(1)
        await eventually(lambda: subscribers(handler))
        async with writer.engine.begin() as connection:
            for statement in (
                'DELETE FROM task_events',
                'UPDATE task_versions SET version = 1',
                "UPDATE tasks SET context_id = 'other'",
            ):
                await connection.exec_driver_sql(statement)
        assert await reading.end() == ['Task(WORKING)', 'TaskNotFoundError']
