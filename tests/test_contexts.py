"""Which context and event loop a query runs in, and tasks that begin at once."""

import asyncio
import sys
import threading
import uuid

from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from a2a.server.cluster import TaskVersion, VersionedDatabaseTaskStore, VersionedEvent
from a2a.types import SubscribeToTaskRequest, Task
from a2a.utils.errors import InternalError
from sqlalchemy import NullPool, make_url
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import EventStreamEndedError, SharedTailEventStream
from cluster_subscribe._testing import Cluster, Decorate, label
from cluster_subscribe._testing.cluster import Replica, cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.event_log import retry
from cluster_subscribe.event_log.queries import EventLog
from tests.support.replicas import wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take

NO_POOL = {'poolclass': NullPool}

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


# Row-level security, and hooks that need a request.

OWNER: ContextVar[str] = ContextVar('owner')


@asynccontextmanager
async def as_a_tenant_sees_it(url: str) -> AsyncIterator[str]:
    """A database that shows rows to `app.owner` only, and the URL of a role that is bound to it."""
    role = f'tenant_{uuid.uuid4().hex}'
    admin = create_async_engine(url, isolation_level='AUTOCOMMIT')
    await VersionedDatabaseTaskStore(admin).initialize()
    statements = [
        f'CREATE ROLE {role} LOGIN',
        f'GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}',
        f'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}',
    ]
    for table in ('tasks', 'task_versions', 'task_events'):
        statements.append(f'ALTER TABLE {table} ENABLE ROW LEVEL SECURITY')
        statements.append(f'DROP POLICY IF EXISTS own ON {table}')
        statements.append(
            f"CREATE POLICY own ON {table} USING (owner = current_setting('app.owner', true))"
        )
    async with admin.connect() as connection:
        for statement in statements:
            await connection.exec_driver_sql(statement)
        try:
            yield make_url(url).set(username=role).render_as_string(hide_password=False)
        finally:
            await connection.exec_driver_sql(f'DROP OWNED BY {role}')
            await connection.exec_driver_sql(f'DROP ROLE {role}')
    await admin.dispose()


def guard(replica: Replica, *, strict: bool) -> None:
    """Sets the tenant of each transaction from a context variable."""

    def begin(connection: Any) -> None:
        owner = OWNER.get() if strict else OWNER.get('')
        connection.exec_driver_sql(f"SELECT set_config('app.owner', '{owner}', true)")

    sqlalchemy_event.listen(replica.engine.sync_engine, 'begin', begin)


@pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)
@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.cancels_queries
async def test_row_level_security(
    strict: bool, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`strict`: the hook fails without a request, where else it finds no tenant."""
    for decorate in (lambda handler: handler, wrapping(poll_interval=0.05)):
        async with (
            as_a_tenant_sees_it(database_url) as url,
            cluster(url, decorate=decorate, poll_interval=0.05) as lab,
        ):
            for replica in lab.replicas:
                guard(replica, strict=strict)
            OWNER.set('user')
            task = await lab.a.start('work wait=1 art=x done').at('1')
            watches = await lab.watch(task)
            lab.gates.open('1')
            for watch in watches:
                assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
                assert watch.timeline == ('Task(WORKING)', 'art x', 'COMPLETED', 'closed')
    assert 0 < caplog.text.count('Streams are read one by one') <= len(lab.replicas)


def in_a_loop_of_its_own(work: Coroutine[Any, Any, Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result(BACKSTOP)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
async def test_streams_go_on_in_the_next_loop(sqlite_url: str) -> None:
    """The loop before ended with a stream open."""
    lab = Cluster(
        sqlite_url, decorate=wrapping(poll_interval=1000, wakeup='poll'), engine_options=NO_POOL
    )
    handler: Any = lab.c.handler
    tail: Any = lab.c.stock._event_stream
    read = tail._reader._round
    rested = threading.Event()

    async def round_(*how: Any, **more: Any) -> None:
        await read(*how, **more)
        # A query that ends with its loop would leave a lock on the file.
        rested.set()

    tail._reader._round = round_

    async def first() -> None:
        writer = Writer(sqlite_url)
        await writer.store.initialize()
        await writer.begin()
        await writer.engine.dispose()
        await lab.c.watch(Task(id='task'))
        await eventually(rested.is_set)

    async def second() -> list[str]:
        writer = Writer(sqlite_url)
        watch = await lab.c.watch(Task(id='task'))
        await writer.say('a', 'b')
        tail.wake('task', 'publish')
        assert await watch.until(lambda w: len(w.told) == 3, BACKSTOP), watch.timeline
        assert handler.statistics().event_log.open_subscriptions == 1
        await writer.engine.dispose()
        await handler.aclose()
        return watch.told

    await asyncio.to_thread(in_a_loop_of_its_own, first())
    told = await asyncio.to_thread(in_a_loop_of_its_own, second())
    assert told == ['Task(WORKING)', 'art a', 'art b']


async def test_another_loop_beside_a_running_one_is_told_so_at_once(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(poll_interval=0.05)) as lab:
        task = await lab.a.turn('ask')
        watch = await lab.c.watch(task)
        stream: Any = lab.c.stock._event_stream

        async def elsewhere() -> None:
            events = lab.c.handler.on_subscribe_to_task(
                SubscribeToTaskRequest(id=task.id), caller()
            )
            with pytest.raises(InternalError, match='one handler per loop'):
                await anext(events)
            # The agent may run there, and is not disturbed; nor are the streams here.
            await stream.publish(
                task.id, VersionedEvent(event=Task(id=task.id), version=TaskVersion(2))
            )

        wakeups = stream.statistics().wakeups.get('publish', 0)
        await asyncio.to_thread(in_a_loop_of_its_own, elsewhere())
        await eventually(lambda: stream.statistics().wakeups.get('publish', 0) > wakeups)
        await lab.c.turn('work done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')


@pytest.mark.parametrize('often', [3, 1000])
async def test_a_mistake_in_a_driver_is_tried_again_some_times(
    often: int, writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, 'MAX_PAUSE', 0.01)
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: tail.statistics().rounds > 1)
    stored, left = EventLog.stored, often

    async def mistaken(*how: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise AttributeError("'NoneType' object has no attribute 'send'")
        return await stored(*how)

    monkeypatch.setattr(EventLog, 'stored', mistaken)
    await eventually(lambda: left <= often - 3)
    if often > 3:
        with pytest.raises(EventStreamEndedError, match='AttributeError'):
            await take(subscriber)
    else:
        await writer.say('a')
        assert await take(subscriber) == ['art a']
    subscriber.close()
