"""The shared tail: exact under joins, holes, second lives, slow readers and broken wires."""

import asyncio
import logging
import random
import re

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from a2a.server.cluster import (
    DatabaseTaskEventStream,
    TaskVersion,
    VersionedDatabaseTaskStore,
    VersionedEvent,
)
from a2a.server.events import Event
from a2a.types import (
    Part,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
)
from a2a.utils.errors import TaskNotFoundError
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import (
    ClusterSubscribeHandler,
    EventStreamEndedError,
    Settings,
    SharedTailEventStream,
    sdk,
)
from cluster_subscribe._testing import Cluster, Decorate, label
from cluster_subscribe._testing.cluster import caller, cluster
from cluster_subscribe.event_log import queries as event_log
from cluster_subscribe.event_log import reader as event_log_reader
from cluster_subscribe.event_log.queries import Cursor, EventLog, Page, Stored
from cluster_subscribe.event_log.subscriber import Subscriber
from cluster_subscribe.event_log.wakeup import postgresql as postgresql_wakeup
from cluster_subscribe.event_log.wakeup import sqlite as sqlite_wakeup
from cluster_subscribe.event_log.wakeup.detached import detached
from tests.support.writer import BACKSTOP, Writer, eventually, take, wrapping

FAST = {'poll_interval': 0.1, 'reconcile_interval': 0.4}


# Exactly once, in order.


async def test_random_joins_are_exact_at_every_replica(
    database_url: str, wrapped: Decorate, request: pytest.FixtureRequest
) -> None:
    """A stream that joins in the middle of a round gets that round's rows too."""
    events, joins = 100, 1000 if 'postgresql' in request.node.name else 150
    async with cluster(database_url, decorate=wrapped) as lab:
        script = ' '.join(f'chunk={number}' for number in range(events))
        task = await lab.a.start(f'wait=1 {script} wait=2 done').task()
        gates, chance = lab.gates, random.Random(7)

        async def join(replica: Any, after: int) -> list[int]:
            await gates.commits(after)
            watch = replica.subscribe(task)
            await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline[-2:] == ('COMPLETED', 'closed'), watch.timeline
            return [int(part.text) for event in watch.events for part in parts(event)]

        joining = [
            asyncio.ensure_future(join(chance.choice(lab.replicas), chance.randrange(1, events)))
            for _ in range(joins)
        ]
        gates.open('1')
        await gates.reached('2')
        await eventually(lambda: sum(open_at(replica) for replica in lab.replicas) == joins)
        gates.open('2')
        for numbers in await asyncio.gather(*joining):
            assert numbers == list(range(events))


def open_at(replica: Any) -> int:
    handler = replica.handler
    assert isinstance(handler, ClusterSubscribeHandler)
    return handler.statistics().open_subscriptions


def parts(event: Event) -> list[Part]:
    if isinstance(event, Task):
        return [part for artifact in event.artifacts for part in artifact.parts]
    return list(event.artifact.parts) if isinstance(event, TaskArtifactUpdateEvent) else []


async def test_a_subscriber_gets_what_follows_its_version(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    version = await writer.say('a', 'b')
    subscriber = tail.open('task', version, 'user')
    await writer.say('c', 'd')
    assert await take(subscriber, 2) == ['art c', 'art d']
    subscriber.close()
    assert tail.statistics().open_subscriptions == tail.statistics().watched_tasks == 0


async def test_an_event_is_decoded_once_and_never_shared(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    one, other = (tail.open('task', version, 'user') for _ in range(2))
    await writer.say('a')
    first = await asyncio.wait_for(one.next(), BACKSTOP)
    second = await asyncio.wait_for(other.next(), BACKSTOP)
    assert first is not None
    assert second is not None
    assert first.event == second.event
    first.event.artifact.artifact_id = 'changed'  # type: ignore[union-attr]
    assert label(second.event) == 'art a'
    for subscriber in (one, other):
        subscriber.close()


async def test_the_cursor_is_version_then_seq(writer: Writer, tail: SharedTailEventStream) -> None:
    """A sequence that hands out numbers in blocks allocates out of commit order."""
    version = await writer.begin()
    await writer.say('a', 'b')
    await writer.execute('UPDATE task_events SET seq = seq + 1000 WHERE task_version = 2')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber, 2) == ['art a', 'art b']
    subscriber.close()


async def test_a_slow_reader_costs_a_bounded_buffer_and_misses_nothing(
    writer: Writer, database_url: str
) -> None:
    engine = create_async_engine(database_url)
    settings = Settings(poll_interval=0.05, max_buffered_events=4)
    tail = SharedTailEventStream(engine, settings=settings)
    version = await writer.begin()
    slow, quick = (tail.open('task', version, 'user') for _ in range(2))
    for number in range(30):
        await writer.say(str(number))
        assert await take(quick) == [f'art {number}']
        assert len(slow._buffer) <= 4
    assert await take(slow, 30) == [f'art {number}' for number in range(30)]
    slow.close()
    quick.close()
    await tail.aclose()
    await engine.dispose()


async def test_more_tasks_than_one_statement_asks_for(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, 'PAGES_PER_STATEMENT', 3)
    monkeypatch.setattr(event_log, 'TASKS_PER_STATEMENT', 4)
    names = [f'task-{number}' for number in range(11)]
    subscribers = [tail.open(name, await writer.begin(name), 'user') for name in names]
    for name in names:
        await writer.say(name, task_id=name)
    for name, subscriber in zip(names, subscribers, strict=True):
        assert await take(subscriber) == [f'art {name}']
        subscriber.close()


# Holes, deletions, second lives, owners.


async def test_a_write_that_was_not_logged_makes_the_stream_look(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    subscriber = tail.open('task', version, 'user')
    version = await writer.say('a', logged=False)
    assert await take(subscriber) == ['look']
    stored = await writer.store.get('task', caller())
    assert stored is not None
    assert stored.version == version
    subscriber.restart(stored)
    await writer.say('b')
    assert await take(subscriber) == ['art b']
    subscriber.close()


async def test_rows_behind_a_hole_wait_for_the_look(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    await writer.say('a')
    await writer.say('b', logged=False)
    await writer.say('c')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber, 2) == ['art a', 'look']
    subscriber.close()


async def test_a_log_pruned_behind_a_reader_makes_it_look(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    await writer.say('a', 'b', 'c')
    await writer.execute('DELETE FROM task_events WHERE task_version < 4')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber) == ['look']
    subscriber.close()


async def look(writer: Writer, subscriber: Subscriber, user: str = 'user') -> None:
    """Looks at the store as a stream does when it is made to."""
    assert await take(subscriber) == ['look']
    stored = await writer.store.get('task', caller(user))
    if stored is None or not await sdk.is_exact_match(writer.store, 'task', caller(user), user):
        raise TaskNotFoundError
    await subscriber.compare(stored.version, user)


async def test_a_deleted_task_ends_its_stream(writer: Writer, tail: SharedTailEventStream) -> None:
    await writer.begin()
    subscriber = tail.open('task', await writer.say('a'), 'user')
    await writer.store.delete('task', caller())
    with pytest.raises(TaskNotFoundError):
        await look(writer, subscriber)
    subscriber.close()


async def test_a_slow_stream_of_a_deleted_task_does_not_take_the_next_for_its_own(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    subscriber = tail.open('task', version, 'user')
    await writer.say('a')
    await eventually(lambda: subscriber.cursor.version == 2)
    await writer.store.delete('task', caller())
    await eventually(lambda: subscriber.suspended)
    await writer.begin()
    await writer.say('b', 'c', 'd')
    assert await take(subscriber) == ['art a']
    with pytest.raises(TaskNotFoundError):
        await look(writer, subscriber)
    subscriber.close()


async def test_a_recreated_task_that_the_reader_has_seen_again_is_another(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    subscriber = tail.open('task', version, 'user')
    await writer.say('a')
    await eventually(lambda: subscriber.cursor.version == 2)
    await writer.store.delete('task', caller())
    await eventually(lambda: subscriber.suspended)
    await writer.begin()
    await eventually(lambda: subscriber._suspended_at == Stored('user', 1))
    await writer.say('b', 'c', 'd')
    assert await take(subscriber) == ['art a']
    with pytest.raises(TaskNotFoundError):
        await look(writer, subscriber)
    subscriber.close()


async def test_a_slow_stream_reads_on_before_it_acts_on_an_old_doubt(writer: Writer) -> None:
    engine = create_async_engine(writer.engine.url)
    tail = SharedTailEventStream(
        engine, settings=Settings(poll_interval=0.05, max_buffered_events=1)
    )
    subscriber = tail.open('task', await writer.begin(), 'user')
    await writer.say('a')
    await eventually(lambda: subscriber.behind)
    subscriber.request_reconcile()
    await writer.say('b')
    assert await take(subscriber, 2) == ['art a', 'art b']
    subscriber.close()
    await tail.aclose()
    await engine.dispose()


async def test_a_second_life_is_seen_from_the_first(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    subscriber = tail.open('task', await writer.say('a', 'b', 'c'), 'user')
    await writer.store.delete('task', caller())
    await writer.begin()
    with pytest.raises(TaskNotFoundError):
        await look(writer, subscriber)
    subscriber.close()


async def test_an_earlier_life_that_the_new_one_has_overtaken_is_not_delivered(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    await writer.say('a', 'b')
    await writer.store.delete('task', caller())
    version = await writer.begin()
    await writer.say('c', 'd', 'e')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber, 3) == ['art c', 'art d', 'art e']
    subscriber.close()


async def test_an_earlier_life_without_a_first_row_is_not_delivered(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    await writer.say('old 2', 'old 3', 'old 4')
    # A life whose beginning is not logged is known by its length alone.
    await writer.execute('DELETE FROM task_events WHERE task_version = 1')
    await writer.store.delete('task', caller())
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: subscriber.min_seq)
    for number in range(2, 7):
        await writer.say(f'new {number}')
        assert await take(subscriber) == [f'art new {number}']
    subscriber.close()


async def test_rows_of_another_owner_are_never_delivered(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin(user='one')
    await writer.say('secret', user='one')
    await writer.store.delete('task', caller('one'))
    version = await writer.begin(user='Other')
    thief = tail.open('task', version, 'other')
    owner = tail.open('task', version, 'Other')
    await writer.say('mine', user='Other')
    assert await take(owner) == ['art mine']
    with pytest.raises(TaskNotFoundError):
        await look(writer, thief, 'other')
    owner.close()
    thief.close()


# Without the decorator: a drop-in for the SDK's own event stream.


async def test_it_serves_the_sdk_as_an_event_stream(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    events = tail.subscribe('task', after=version)
    reading = asyncio.ensure_future(anext(events))
    await writer.say('a')
    await writer.say('b', logged=False)
    await writer.say('c')
    assert label((await asyncio.wait_for(reading, BACKSTOP)).event) == 'art a'
    assert label((await asyncio.wait_for(anext(events), BACKSTOP)).event) == 'art c'
    await writer.store.delete('task', caller())
    with pytest.raises(TaskNotFoundError):
        await asyncio.wait_for(anext(events), BACKSTOP)
    await events.aclose()


async def test_publish_never_waits_and_never_raises(tail: SharedTailEventStream) -> None:
    publishing = tail.publish(
        'no such task', VersionedEvent(event=Task(id='x'), version=TaskVersion.MISSING)
    )
    with pytest.raises(StopIteration):
        publishing.send(None)
    await tail.aclose()
    await tail.publish('x', VersionedEvent(event=Task(id='x'), version=TaskVersion.MISSING))


async def test_closing_ends_every_stream_with_an_error(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    subscriber = tail.open('task', await writer.begin(), 'user')
    reading = asyncio.ensure_future(subscriber.next())
    await asyncio.sleep(0)
    await tail.aclose()
    with pytest.raises(EventStreamEndedError):
        await reading
    with pytest.raises(EventStreamEndedError):
        tail.open('task', TaskVersion(1), 'user')
    assert tail.statistics().open_subscriptions == 0


# What the database is asked.


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
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        for subscribers in (1, 40):
            async with cluster(database_url, decorate=decorate, poll_interval=0.5) as lab:
                tasks = [await lab.a.turn('ask') for _ in range(4)]
                for number in range(subscribers):
                    await lab.c.watch(tasks[number % len(tasks)])
                if name == 'ours':
                    # The index is looked for once in a process.
                    log = tail_of(lab.c)._reader._log
                    await eventually(partial(getattr, log, '_advised'))
                window = await count(lab.c.engine, lambda: asyncio.sleep(1))
                asked[name, subscribers] = window['SELECT']
    assert asked['stock', 40] > 40
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
    await log.prepare()
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
                log._pages(pages)
                .params(values)
                .compile(dialect=engine.dialect, compile_kwargs={'literal_binds': True})
            )
            plan = '\n'.join(
                ' '.join(map(str, row))
                for row in await connection.exec_driver_sql(explain + str(sql).replace('%%', '%'))
            )
            # The rows, and on some databases also the first rows of the task's lives.
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
    await log.prepare()
    async with engine.begin() as connection:
        on = ' ON task_events' if engine.dialect.name == 'mysql' else ''
        await connection.execute(text(f'DROP INDEX ix_task_events_cursor{on}'))
    log = EventLog(engine, 'task_events', 'task_versions', create_table=True)
    await log.prepare()
    await log.advise()
    await log.advise()
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


# Broken wires.


@pytest.mark.cancels_queries
async def test_the_stream_survives_its_connections(
    database_url: str, request: pytest.FixtureRequest
) -> None:
    """F16: every connection of the replica's pool dies under a live subscription."""
    if 'postgresql' not in request.node.name:
        pytest.skip('only PostgreSQL lets a test kill another connection by name')
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        options = {'connect_args': {'server_settings': {'application_name': 'replica'}}}
        async with cluster(database_url, decorate=decorate, engine_options=options) as lab:
            task = await lab.a.turn('ask')
            (watch,) = await lab.watch(task, [lab.c])
            if name == 'ours':
                await eventually(lambda: tail_of(lab.c).statistics().wakeups.get('listen', 0))
            admin = create_async_engine(database_url)
            async with admin.connect() as connection:
                await connection.execute(
                    text(
                        'SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
                        "WHERE application_name = 'replica' AND datname = current_database()"
                    )
                )
            await admin.dispose()
            if name == 'stock':
                assert await watch.until(lambda w: w.ending, BACKSTOP)
                assert watch.ending not in ('closed', None)
                continue
            for replica in lab.replicas:
                await replica.engine.dispose()
            await lab.b.turn('work done', task)
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')
            await eventually(lambda: tail_of(lab.c).statistics().wakeups.get('listen', 0) == 2)


def tail_of(replica: Any) -> SharedTailEventStream:
    stream = replica.stock._event_stream
    assert isinstance(stream, SharedTailEventStream)
    return stream


@pytest.mark.cancels_queries
async def test_an_exhausted_pool_delays_and_loses_nothing(database_url: str) -> None:
    """F17: a pool held for longer than its timeout ends a stock stream."""
    options = {'pool_size': 1, 'max_overflow': 0, 'pool_timeout': 0.2}
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        async with cluster(database_url, decorate=decorate, engine_options=options) as lab:
            task = await lab.a.turn('ask')
            (watch,) = await lab.watch(task, [lab.c])
            async with lab.c.engine.connect():
                if name == 'stock':
                    assert await watch.until(lambda w: w.ending, BACKSTOP)
                    assert watch.ending == 'TimeoutError'
                    continue
                await lab.b.turn('work done', task)
                await eventually(lambda: tail_of(lab.c).statistics().reconnects)
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')


async def test_a_missing_table_ends_the_streams_with_one_clear_error(
    writer: Writer, tail: SharedTailEventStream, caplog: pytest.LogCaptureFixture
) -> None:
    version = await writer.begin()
    one, other = (tail.open('task', version, 'user') for _ in range(2))
    await writer.say('a')
    assert await take(one) == ['art a']
    await writer.execute('DROP TABLE task_versions')
    assert await take(other) == ['art a']
    for subscriber in (one, other):
        with pytest.raises(EventStreamEndedError, match='cannot be read'):
            await take(subscriber)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


# Wakeups are hints.


@pytest.mark.parametrize('muted', ['timer only', 'publish', 'others', 'everything'])
async def test_a_muted_wakeup_costs_only_latency(
    muted: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(FAST)
    if muted == 'timer only':
        settings['wakeup'] = 'poll'  # type: ignore[assignment]
    if muted in ('publish', 'everything'):

        async def deaf(*_: object) -> None: ...

        monkeypatch.setattr(SharedTailEventStream, 'publish', deaf)
        monkeypatch.setattr(SharedTailEventStream, 'wake', lambda *_: None)
    if muted in ('others', 'everything'):

        async def broken(*_: object) -> None:
            raise OSError('no wakeups today')

        monkeypatch.setattr(postgresql_wakeup.PostgresqlWakeup, 'run', broken)
        monkeypatch.setattr(sqlite_wakeup.SqliteWakeup, 'run', broken)
    async with cluster(database_url, decorate=wrapping(**settings)) as lab:
        task = await lab.a.turn('ask')
        watches = await lab.watch(task)
        await lab.b.turn('work art=x done', task)
        for watch in watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == (
                *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED'),
                'closed',
            )


class Broken:
    """A wakeup whose connection cannot be had."""

    notifies = False
    runs = 0

    async def run(self, *_: object) -> None:
        self.runs += 1
        await asyncio.sleep(0)
        raise TimeoutError('no answer')

    def stop(self) -> None: ...

    def notify(self, task_id: str) -> None: ...


async def test_wakeups_that_never_work_are_missed_with_one_warning(
    writer: Writer,
    tail: SharedTailEventStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However long each attempt takes."""
    monkeypatch.setattr(event_log_reader, '_LONGEST_PAUSE', 0.0)
    tail._reader._wakeup = broken = Broken()
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: broken.runs > 3)
    await writer.say('a')
    assert await take(subscriber) == ['art a']
    assert caplog.text.count('Wakeups of task_events are lost') == 1
    subscriber.close()


@pytest.fixture
async def on_postgresql(postgres_template: Any, request: pytest.FixtureRequest) -> str:
    return str(postgres_template.render_as_string(hide_password=False))


async def test_a_lost_listen_connection_is_rebuilt(on_postgresql: str) -> None:
    async with cluster(on_postgresql, decorate=wrapping(poll_interval=30)) as lab:
        task = await lab.a.turn('ask')
        (watch,) = await lab.watch(task, [lab.c])
        await eventually(lambda: tail_of(lab.c).statistics().wakeups.get('listen', 0) == 1)
        async with lab.b.engine.connect() as connection:
            await connection.execute(
                text(
                    'SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
                    "WHERE query LIKE '%pg_notify%' AND datname = current_database() "
                    'AND pid <> pg_backend_pid()'
                )
            )
        await eventually(lambda: tail_of(lab.c).statistics().wakeups.get('listen', 0) == 2)
        await lab.b.turn('work done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')
        assert tail_of(lab.c).statistics().wakeups.get('notify')


async def test_a_channel_that_carries_nothing_is_left_alone_for_a_while_with_one_warning(
    on_postgresql: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, trials = postgresql_wakeup.PostgresqlWakeup._send, 0

    async def swallow(*how: Any) -> None:
        nonlocal trials
        trials += 1
        if trials > 3:
            await send(*how)

    monkeypatch.setattr(postgresql_wakeup, '_TRIAL', 0.1)
    monkeypatch.setattr(postgresql_wakeup.PostgresqlWakeup, '_send', swallow)
    async with cluster(on_postgresql, decorate=wrapping(**FAST)) as lab:
        task = await lab.b.turn('ask')
        await eventually(lambda: caplog.text.count('did not come back') == 1)
        (watch,) = await lab.watch(task, [lab.c])
        await eventually(lambda: caplog.text.count('did not come back') == 2)
        waiting = tail_of(lab.c)._reader._wakeup_task
        await lab.c.turn('work ret', task)
        assert tail_of(lab.c)._reader._wakeup_task is waiting
        await lab.b.turn('art=x done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline == (
            *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED'),
            'closed',
        )
        assert trials == 2

        # A busy database may lose one; the next trial is heard.
        monkeypatch.setattr(postgresql_wakeup, '_DEAF', 0.05)
        other = await lab.a.turn('ask')
        await lab.watch(other, [lab.a])
        await eventually(lambda: tail_of(lab.a).statistics().wakeups.get('listen'))
        assert trials == 4
        assert caplog.text.count('did not come back') == 3


def test_notifications_are_joined_below_the_limit() -> None:
    ids = [f'{number:036}' for number in range(1000)] + ['x' * 9000]
    payloads = list(postgresql_wakeup._payloads(ids))
    assert all(len(payload.encode()) < 8000 for payload in payloads)
    assert '\n'.join(payloads).split('\n') == ids[:-1]
    assert len(payloads) == 5


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
    assert Cursor.behind(3) > Cursor(3, 10**15)
    assert Cursor.behind(3) < Cursor(4, 1)
    assert Page('t', Cursor.behind(0), 0).after.version == 0


def test_the_cluster_under_test_uses_the_stock_event_stream() -> None:
    assert (
        Cluster('sqlite+aiosqlite:///never-opened.db').a.stock._event_stream.__class__
        is DatabaseTaskEventStream
    )


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
    cursor, versions, pages = Cursor.behind(1), list[int](), list[int]()
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


async def test_a_slow_stream_of_large_events_holds_few_of_them(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, 'PAGE_BYTES', 110_000)
    version = await writer.begin()
    names = [f'{number}-' + 'x' * 25_000 for number in range(12)]
    for name in names:
        await writer.say(name)
    subscriber = tail.open('task', version, 'user')
    await eventually(lambda: subscriber.behind)
    assert len(subscriber._buffer) <= 3
    assert [f'art {name}' for name in names] == await take(subscriber, len(names))
    subscriber.close()


def heard_itself(replica: Any) -> bool:
    return bool(tail_of(replica).statistics().wakeups.get('listen'))


async def test_a_hint_that_no_notification_can_carry_leaves_the_channel_alone(
    on_postgresql: str,
) -> None:
    async with cluster(on_postgresql, decorate=wrapping(poll_interval=1000)) as lab:
        task = await lab.b.turn('ask')
        (watch,) = await lab.watch(task, [lab.c])
        for replica in (lab.b, lab.c):
            tail_of(replica).wake('x', 'publish')
            await eventually(partial(heard_itself, replica))
        for odd in ('a\0b', '\ud800', 'a\nb', 'x' * 9000):
            tail_of(lab.b).wake(odd, 'cancel')
        await lab.b.turn('work done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline[-2:] == ('COMPLETED', 'closed')
        assert tail_of(lab.b).statistics().wakeups['listen'] == 1


async def test_hints_do_not_pile_up_while_none_can_be_sent(
    on_postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_wakeup, '_PENDING', 10)
    engine = create_async_engine(on_postgresql)
    wakeup = postgresql_wakeup.PostgresqlWakeup(engine, 'task_events')
    for number in range(100):
        wakeup.notify(f'task-{number}')
    assert len(wakeup._pending) == 10


@pytest.mark.parametrize('database_url', ['sqlite', 'postgresql'], indirect=True)
async def test_waiting_for_wakeups_takes_no_connection_of_the_pool(database_url: str) -> None:
    """Not even for a moment: the agent may need the last one."""
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    connected = []
    sqlalchemy_event.listen(engine.sync_engine, 'connect', lambda *_: connected.append(1))
    async with engine.connect(), detached(engine) as (beside, _):
        assert (await beside.execute(text('SELECT 1'))).scalar() == 1
    assert len(connected) == 2
    await engine.dispose()


async def test_waiting_for_wakeups_leaves_the_dialect_to_be_set_up_by_the_pool(
    on_postgresql: str,
) -> None:
    """A connection beside the pool's first one met a dialect that was half set up."""

    async def listen(engine: AsyncEngine) -> None:
        async with detached(engine):
            pass

    async def read(engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            switched = await connection.execution_options(isolation_level='AUTOCOMMIT')
            await switched.execute(text('SELECT 1'))

    for _ in range(10):
        engine = create_async_engine(on_postgresql)
        await asyncio.gather(listen(engine), read(engine))
        await engine.dispose()


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
