"""What the database is asked: statements, plans, the index, pages."""

import asyncio
import re

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from a2a.server.cluster import TaskVersion, VersionedDatabaseTaskStore
from a2a.types import Task, TaskState, TaskStatus
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import ClusterSubscribeHandler, Settings, SharedTailEventStream
from cluster_subscribe._testing import Decorate
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.event_log import queries as event_log
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.rows import Cursor, Page
from tests.support.replicas import tail_of, wrapping
from tests.support.waiting import eventually
from tests.support.writer import Writer, take


async def count(engine: AsyncEngine, during: Callable[[], Any]) -> Counter[str]:
    asked: Counter[str] = Counter()

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        asked[statement.split(maxsplit=1)[0]] += 1

    sqlalchemy_event.listen(engine.sync_engine, 'before_cursor_execute', note)
    await during()
    sqlalchemy_event.remove(engine.sync_engine, 'before_cursor_execute', note)
    return asked


@pytest.mark.cancels_queries
async def test_statements_do_not_grow_with_subscribers_or_tasks(database_url: str) -> None:
    """F17: the stock stream asks twice a second for each subscriber."""
    asked: dict[tuple[str, int], int] = {}
    asking: list[tuple[str, Decorate, int]] = [('ours', wrapping(), n) for n in (1, 40)]
    if database_url.startswith('sqlite'):
        asking.append(('stock', lambda handler: handler, 40))
    for name, decorate, subscribers in asking:
        async with cluster(database_url, decorate=decorate, poll_interval=0.5) as lab:
            tasks = [await lab.a.turn('ask') for _ in range(4)]
            for number in range(subscribers):
                await lab.c.watch(tasks[number % len(tasks)])
            if name == 'ours':
                # The index is looked for once in a process.
                log = tail_of(lab.c)._reader._log
                await eventually(partial(getattr, log.schema, '_advised'))
            window = await count(lab.c.engine, lambda: asyncio.sleep(1))
            asked[name, subscribers] = window['SELECT']
    assert asked.get(('stock', 40), 41) > 40
    assert asked['ours', 40] <= asked['ours', 1] + 2
    assert asked['ours', 40] <= 4


async def test_no_subscriber_no_statement(database_url: str, wrapped: Decorate) -> None:
    async with cluster(database_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        watch = await lab.c.watch(task)
        watch.reader.cancel()
        await asyncio.wait([watch.reader])
        await asyncio.sleep(0.2)
        assert not await count(lab.c.engine, lambda: asyncio.sleep(1.2))


async def drop_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        for name in ('task_events', 'task_versions', 'tasks'):
            await connection.execute(text(f'DROP TABLE IF EXISTS {name}'))


PLANS = {
    'sqlite': ('EXPLAIN QUERY PLAN ', r'USING INDEX ix_task_events_cursor', r'SCAN task_events'),
    'postgresql': ('EXPLAIN ', r'ix_task_events_cursor', r'Seq Scan on task_events'),
    'mysql': (
        'EXPLAIN FORMAT=JSON ',
        r'"key": "ix_task_events_cursor"',
        r'"task_events",\s+"access_type": "ALL"',
    ),
}


async def test_a_page_is_one_seek_in_the_index(database_url: str) -> None:
    engine = create_async_engine(database_url)
    log = EventLog(engine, 'task_events', 'task_versions', create_table=True)
    await drop_tables(engine)
    await log.schema.prepare()
    async with engine.begin() as connection:
        for task in ('long', 'other'):
            rows = [
                {'task': task, 'version': number, 'data': b'x' * 50} for number in range(1, 3001)
            ]
            await connection.execute(
                text(
                    'INSERT INTO task_events (task_id, owner, task_version, event_data) '
                    "VALUES (:task, 'user', :version, :data)"
                ),
                rows,
            )
            await connection.execute(
                text(
                    "INSERT INTO task_versions (task_id, owner, version) VALUES (:t, 'user', 3000)"
                ),
                {'t': task},
            )
    name = engine.dialect.name
    explain, index, scan = PLANS[name]
    async with engine.connect() as connection:
        await connection.execute(
            text('ANALYZE TABLE task_events' if name == 'mysql' else 'ANALYZE')
        )
        for pages in (1, 2):
            values: dict[str, object] = {'limit': 256, 'inline': 2**14}
            for number in range(pages):
                values |= {f'task_{number}': 'long', f'version_{number}': 2990}
                values |= {f'seq_{number}': 2990, f'min_seq_{number}': 0}
            sql = (
                log._statement(pages)
                .params(values)
                .compile(dialect=engine.dialect, compile_kwargs={'literal_binds': True})
            )
            plan = '\n'.join(
                ' '.join(map(str, row))
                for row in await connection.exec_driver_sql(explain + str(sql).replace('%%', '%'))
            )
            # The rows, and on some databases also the first rows of the task's incarnations.
            assert len(re.findall(index, plan)) >= pages, plan
            assert not re.search(scan, plan), plan
    await engine.dispose()


async def test_the_index_comes_with_the_table(database_url: str) -> None:
    engine = create_async_engine(database_url)
    await drop_tables(engine)
    SharedTailEventStream(engine)
    store = VersionedDatabaseTaskStore(engine)
    await store.initialize()
    log = EventLog(engine, 'task_events', 'task_versions', create_table=False)
    async with engine.connect() as connection:
        assert await log.schema.is_indexed(connection)
    await engine.dispose()


async def test_a_missing_index_is_named_once_and_not_built(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_async_engine(database_url)
    log = EventLog(engine, 'task_events', 'task_versions', create_table=True)
    await drop_tables(engine)
    await log.schema.prepare()
    async with engine.begin() as connection:
        on = ' ON task_events' if engine.dialect.name == 'mysql' else ''
        await connection.execute(text(f'DROP INDEX ix_task_events_cursor{on}'))
    log = EventLog(engine, 'task_events', 'task_versions', create_table=True)
    await log.schema.prepare()
    await log.schema.advise()
    await log.schema.advise()
    (record,) = caplog.records
    _, _, statement = record.getMessage().partition(': ')
    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level='AUTOCOMMIT')
        assert await log.schema.is_indexed(autocommit) is False
        await autocommit.execute(text(statement))
        assert await log.schema.is_indexed(autocommit)
    await engine.dispose()


@pytest.mark.filterwarnings('ignore:This declarative base already contains a class')
async def test_custom_table_names_are_honoured(sqlite_url: str) -> None:
    engine = create_async_engine(sqlite_url)
    store = VersionedDatabaseTaskStore(
        engine, event_table_name='my_events', version_table_name='my_versions'
    )
    await store.initialize()
    tail = SharedTailEventStream(
        engine, table_name='my_events', version_table_name='my_versions', settings=Settings()
    )
    task = Task(id='t', context_id='c', status=TaskStatus(state=TaskState.TASK_STATE_WORKING))
    version = await store.save(task, event=task, prev_version=TaskVersion.MISSING, context=caller())
    subscriber = tail.open('t', version, 'user')
    await store.save(task, event=task, prev_version=version, context=caller())
    assert await take(subscriber) == ['Task(WORKING)']
    subscriber.close()
    await tail.aclose()
    await engine.dispose()


async def test_the_reader_holds_no_connection_between_its_reads(
    database_url: str, wrapped: Decorate
) -> None:
    async with cluster(database_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        for _ in range(5):
            await lab.c.watch(task)
        pool: Any = lab.c.engine.pool
        most = 0

        def note(*_: object) -> None:
            nonlocal most
            most = max(most, pool.checkedout())

        sqlalchemy_event.listen(lab.c.engine.sync_engine, 'before_cursor_execute', note)
        await lab.b.turn('work done', task)
        await eventually(
            lambda: (
                isinstance(lab.c.handler, ClusterSubscribeHandler)
                and not lab.c.handler.statistics().open_subscriptions
            )
        )
        assert most <= 1
        await eventually(lambda: not pool.checkedout())


def test_a_cursor_behind_a_version_skips_all_its_rows() -> None:
    assert Cursor.end_of(3) > Cursor(3, 10**15)
    assert Cursor.end_of(3) < Cursor(4, 1)
    assert Page('t', Cursor.end_of(0), 0).after.version == 0


async def test_pages_are_bounded_in_bytes_and_miss_nothing(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 rows of large events were 256 MB for each slow client."""
    monkeypatch.setattr(event_log, 'PAGE_BYTES', 300_000)
    await writer.begin()
    sizes = [100, 50_000, 100_000, 20_000, 100_000, 60_000, 400, 400_000, 30_000, 10]
    for number, size in enumerate(sizes, 2):
        await writer.execute(
            'INSERT INTO task_events (task_id, owner, task_version, event_data) '
            "VALUES ('task', 'user', :version, :data)",
            version=number,
            data=b'x' * (size if writer.engine.dialect.name != 'mysql' else min(size, 60_000)),
        )
    log = EventLog(writer.engine, 'task_events', 'task_versions')
    cursor, versions, pages = Cursor.end_of(1), list[int](), list[int]()
    async with log.connect() as connection:
        more = True
        while more:
            ((rows, more),) = await log.pages(connection, [Page('task', cursor, 0)], 256)
            pages.append(sum(len(row.data or b'') for row in rows))
            versions += [row.cursor.version for row in rows]
            cursor = rows[-1].cursor
    assert versions == list(range(2, len(sizes) + 2))
    assert len(pages) > 1
    # A page of one event is as large as that event.
    assert all(read <= 320_000 or read >= 400_000 for read in pages), pages
    assert max(pages) <= 400_500


async def test_a_commit_elsewhere_costs_its_rows_and_not_the_watched_tasks(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10,000 watched tasks each compared all their versions."""
    writer = Writer(sqlite_url)
    await writer.store.initialize()
    engine = create_async_engine(sqlite_url)
    tail = SharedTailEventStream(engine, settings=Settings(poll_interval=1000))
    compared: list[int] = []
    stored = EventLog.stored

    async def note(log: EventLog, connection: Any, task_ids: Any) -> Any:
        compared.append(len(task_ids))
        return await stored(log, connection, task_ids)

    monkeypatch.setattr(EventLog, 'stored', note)
    names = [f'task-{number}' for number in range(30)]
    subscribers = [tail.open(name, await writer.begin(name), 'user') for name in names]
    # Whatever was committed before it listened is looked for in all.
    await eventually(lambda: compared and tail.statistics().wakeups.get('data_version'))
    await writer.say('first', task_id=names[0])
    assert await take(subscribers[0]) == ['art first']
    compared.clear()
    before = tail.statistics().rows
    for number in range(20):
        await writer.say(str(number), task_id=names[7])
        assert await take(subscribers[7]) == [f'art {number}']
    assert not compared
    assert tail.statistics().rows - before == 20

    # A pruned log gives numbers of rows anew.
    await writer.execute('DELETE FROM task_events WHERE seq > 25')
    await writer.say('after', task_id=names[8])
    assert await take(subscribers[8]) == ['art after']
    for subscriber in subscribers:
        subscriber.close()
    await tail.aclose()
    await engine.dispose()
    await writer.engine.dispose()
