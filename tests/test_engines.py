"""Engines as other people build them: whose connections they hand out, and what `wrap()` says."""

import asyncio
import logging

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from a2a.server.agent_execution import RequestContext
from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.events import Event, EventQueue
from a2a.server.models import create_task_event_model, create_task_model, create_task_version_model
from a2a.server.request_handlers import RequestHandler
from a2a.types import SendMessageRequest, SubscribeToTaskRequest
from sqlalchemy import Engine, Index, MetaData, NullPool, Pool, StaticPool, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from cluster_subscribe import (
    ClusterSubscribeHandler,
    Settings,
    SharedTailEventStream,
    UnsupportedHandlerError,
    wrap,
)
from cluster_subscribe._testing import ScriptedAgent, Watch
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller, user_message
from cluster_subscribe.engines import has_hooks
from cluster_subscribe.event_log.queries import EventLog
from tests.support.replicas import stock_over, wrapping
from tests.support.waiting import eventually
from tests.support.writer import Writer, take

LIMIT = 20.0
"""Seconds after which a stream counts as hung."""


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


SHARING: dict[str, Any] = {
    'by default': ('sqlite+aiosqlite://', {}),
    'spelt out': ('sqlite+aiosqlite:///:memory:', {}),
    'a static pool': ('sqlite+aiosqlite:///{file}', {'poolclass': StaticPool}),
    'a shared cache': (
        'sqlite+aiosqlite:///file:{name}?mode=memory&cache=shared&uri=true',
        {'poolclass': StaticPool},
    ),
}


def sharing(how: str, folder: Path) -> AsyncEngine:
    url, options = SHARING[how]
    return create_async_engine(url.format(file=folder / 'a.db', name=folder.name), **options)


class Gated(ScriptedAgent):
    """Goes on once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        await super().execute(context, Until(event_queue, self.may))  # type: ignore[arg-type]


class Until:
    """Lets two events through, and the others once they may."""

    def __init__(self, queue: EventQueue, may: asyncio.Event) -> None:
        self._queue, self._may, self._count = queue, may, 0

    async def enqueue_event(self, said: Event) -> None:
        self._count += 1
        if self._count > 2:
            await self._may.wait()
        await self._queue.enqueue_event(said)


@pytest.mark.parametrize('how', ['by default', 'a static pool'])
@pytest.mark.parametrize('wrapped', [False, True])
async def test_a_shared_connection_keeps_every_event_of_an_agent(
    how: str, wrapped: bool, tmp_path: Path
) -> None:
    """A read of ours would roll back the agent's open transaction."""
    engine, agent = sharing(how, tmp_path), Gated()
    await VersionedDatabaseTaskStore(engine).initialize()
    stock = stock_over(engine, agent=agent)
    handler: Any = wrap(stock) if wrapped else stock
    script = ' '.join(f'chunk={number}' for number in range(60))
    sending = handler.on_message_send_stream(
        SendMessageRequest(message=user_message(f'work {script} done')), caller()
    )
    task = await anext(sending)
    sender = Watch(sending, 'sender')
    assert await sender.until(lambda w: 'WORKING' in w.told, LIMIT)
    events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
    watch = Watch(events, 'A')
    assert await watch.until(lambda w: w.told, LIMIT)
    agent.may.set()
    for one in (watch, sender):
        assert await one.until(lambda w: w.ending, LIMIT), one.timeline
        chunks = [told for told in one.told if told.startswith('chunk')]
        assert chunks == [f'chunk {number}' for number in range(60)]
        assert (one.told[-1], one.ending) == ('COMPLETED', 'closed')
    async with engine.connect() as connection:
        rows = await connection.execute(
            text('SELECT task_version FROM task_events ORDER BY task_version')
        )
        assert rows.scalars().all() == list(range(1, 64))
    await handler.aclose()
    await engine.dispose()


@pytest.mark.parametrize('how', SHARING)
@pytest.mark.parametrize('part', ['store', 'stream'])
async def test_a_handler_over_a_shared_connection_is_left_alone_with_one_warning(
    how: str, part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sharing(how, tmp_path)
    other = create_async_engine(f'sqlite+aiosqlite:///{tmp_path / "b.db"}')
    stock = stock_over(*((engine, other) if part == 'store' else (other, engine)))
    stream = stock._event_stream
    caplog.clear()
    assert wrap(stock) is stock
    assert stock._event_stream is stream
    (warning,) = warnings(caplog)
    assert 'share one connection' in warning
    assert 'SQLite file' in warning
    with pytest.raises(UnsupportedHandlerError, match='share one connection'):
        SharedTailEventStream(engine)


async def test_a_database_in_memory_with_a_cache_shared_by_connections_is_left_alone(
    tmp_path: Path,
) -> None:
    """Nobody waits for the locks of a shared cache: a read would fail the agent's save."""
    engine = create_async_engine('sqlite+aiosqlite:///file::memory:?cache=shared&uri=true')
    stock = stock_over(engine)
    assert wrap(stock) is stock


async def test_the_pool_is_what_counts_where_a_creator_opens_the_connections(
    tmp_path: Path,
) -> None:
    async def connect() -> aiosqlite.Connection:
        return await aiosqlite.connect(tmp_path / 'a.db')

    for pool, left_alone in ((NullPool, False), (StaticPool, True)):
        engine = create_async_engine('sqlite+aiosqlite://', async_creator=connect, poolclass=pool)
        assert isinstance(wrap(stock_over(engine)), ClusterSubscribeHandler) is not left_alone


def by_map(_handler: Any) -> None: ...


def by_search_path(handler: Any) -> None:
    engine = handler._versioned_store._db.engine.sync_engine

    @event.listens_for(engine, 'checkout')
    def set_path(connection: Any, *_: object) -> None:
        cursor = connection.cursor()
        cursor.execute('SET search_path TO agents')
        cursor.close()


class InSchema(DeclarativeBase):
    metadata = MetaData(schema='agents')


IN_SCHEMA = (
    create_task_model('tasks', InSchema),
    create_task_version_model('task_versions', InSchema),
    create_task_event_model('task_events', InSchema),
)


def by_model(handler: Any) -> None:
    store, stream = handler._versioned_store, handler._event_stream
    store._db.task_model, store._version_model, store._event_model = IN_SCHEMA
    stream._event_model = store._event_model


@pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)
@pytest.mark.parametrize('how', [by_map, by_search_path, by_model])
@pytest.mark.parametrize('wrapped', [False, True])
async def test_tables_are_found_in_the_schema_where_the_sdk_finds_them(
    how: Callable[[Any], None],
    wrapped: bool,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decorate(handler: RequestHandler) -> RequestHandler:
        how(handler)
        return wrapping(poll_interval=0.1)(handler) if wrapped else handler

    schemas = {'schema_translate_map': {None: 'agents'}} if how is by_map else {}
    admin = create_async_engine(database_url)
    async with admin.begin() as connection:
        for name in ('task_events', 'task_versions', 'tasks'):
            await connection.execute(text(f'DROP TABLE {name}'))
        await connection.execute(text('CREATE SCHEMA agents'))
    # A search path that was committed once would stay with a pooled connection.
    options = {'execution_options': schemas, 'poolclass': NullPool}
    async with cluster(database_url, decorate=decorate, engine_options=options) as lab:
        task = await lab.a.start('work wait=go art=x done').at('go')
        watch = await lab.b.watch(task)
        lab.gates.open('go')
        assert await watch.until(lambda w: w.ending, LIMIT), watch.timeline
        assert watch.timeline == ('Task(WORKING)', 'art x', 'COMPLETED', 'closed')
    async with admin.connect() as connection:
        rows = await connection.execute(
            text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        )
        assert not rows.all()
    await admin.dispose()
    assert not warnings(caplog)


@pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)
async def test_a_stream_built_by_hand_reads_through_the_engines_schemas(
    writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    """The advice about the index, too: it used to fail each round."""
    await writer.execute('CREATE SCHEMA agents')
    for name in ('task_events', 'task_versions', 'tasks'):
        await writer.execute(f'ALTER TABLE {name} SET SCHEMA agents')
    await writer.execute('DROP INDEX IF EXISTS agents.ix_task_events_cursor')
    options = {'schema_translate_map': {None: 'agents'}}
    writer.store._db.async_session_maker.configure(bind=writer.engine.execution_options(**options))
    engine = create_async_engine(writer.engine.url, execution_options=options)
    tail = SharedTailEventStream(engine, settings=Settings(poll_interval=0.05))
    writer.store._cluster_tables_ready = writer.store._db._initialized = True
    subscriber = tail.open('task', await writer.begin(), 'user')
    await writer.say('a')
    assert await take(subscriber) == ['art a']
    await eventually(lambda: tail._reader._log.schema._advised)
    assert not tail.statistics().reconnects
    (warning,) = warnings(caplog)
    assert 'ON agents.task_events' in warning
    subscriber.close()
    await tail.aclose()
    await engine.dispose()


async def test_advice_that_cannot_be_given_fails_no_round(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> bool:
        raise LookupError('no such catalogue')

    log = tail._reader._log
    monkeypatch.setattr(log.schema, 'is_indexed', fails)
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: log.schema._advised)
    await writer.say('a')
    assert await take(subscriber) == ['art a']
    assert not tail.statistics().reconnects
    subscriber.close()


@pytest.mark.parametrize('name', ['agent-x_events', 'AgentEvents', 'order'])
async def test_the_statement_for_the_index_runs_as_printed(
    name: str, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_async_engine(database_url, isolation_level='AUTOCOMMIT')
    log = EventLog(engine, name, 'task_versions')
    async with engine.connect() as connection:
        for table in (log.schema.events, log.schema.versions):
            await connection.run_sync(table.create, checkfirst=True)
        on_table = Index(str(log.schema.index.name), log.schema.events.c.task_id)
        await connection.run_sync(on_table.drop)
        await log.schema.advise()
        await EventLog(engine, name, 'task_versions').schema.advise()
        (warning,) = warnings(caplog)
        await connection.execute(text(warning.partition('on it: ')[2]))
        assert await log.schema.is_indexed(connection)
    await engine.dispose()


def test_hooks_of_the_user_are_known_and_no_others() -> None:
    def hook(*_: object) -> None: ...

    url = 'postgresql+asyncpg://u@h/x'
    assert not has_hooks(create_async_engine(url))
    for kind in ('connect', 'checkout', 'begin', 'engine_connect'):
        engine = create_async_engine(url)
        derived = engine.execution_options(schema_translate_map={None: 'agents'})
        event.listen(engine.sync_engine, kind, hook)
        assert has_hooks(engine)
        assert has_hooks(derived)
    for target, kind in ((Engine, 'begin'), (Pool, 'checkout')):
        event.listen(target, kind, hook)
        assert has_hooks(create_async_engine(url))
        event.remove(target, kind, hook)
    assert not has_hooks(create_async_engine(url))


@pytest.mark.parametrize(
    ('options', 'warned'),
    [
        ({'isolation_level': 'AUTOCOMMIT'}, True),
        ({'execution_options': {'isolation_level': 'AUTOCOMMIT'}}, True),
        ({'isolation_level': 'SERIALIZABLE'}, False),
        ({}, False),
    ],
)
def test_an_autocommit_engine_of_the_store_gets_one_warning(
    options: dict[str, Any], warned: bool, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK's save is no transaction there."""
    handler = wrap(stock_over(create_async_engine(sqlite_url, **options)))
    assert isinstance(handler, ClusterSubscribeHandler)
    assert [('AUTOCOMMIT' in warning) for warning in warnings(caplog)] == [True] * warned


@pytest.mark.parametrize('unnamed', ['async_creator', 'do_connect', 'environment'])
def test_databases_that_no_url_names_are_not_called_different(
    unnamed: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def connect() -> None: ...

    engines = []
    for host in ('a', 'b'):
        url = 'postgresql+asyncpg://' + ('' if unnamed == 'environment' else f'{host}/x')
        creator = {'async_creator': connect} if unnamed == 'async_creator' else {}
        engines.append(create_async_engine(url, **creator))
        if unnamed == 'do_connect':
            event.listen(engines[-1].sync_engine, 'do_connect', lambda *_: None)
    stock = stock_over(engines[0], engines[1])
    caplog.clear()
    assert isinstance(wrap(stock), ClusterSubscribeHandler)
    assert isinstance(stock._event_stream, SharedTailEventStream)
    assert not warnings(caplog)
