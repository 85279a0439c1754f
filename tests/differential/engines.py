"""Engines, schemas, stores and loops that somebody sets up."""

import asyncio
import importlib
import uuid
import warnings

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from a2a.server.cluster import DatabaseTaskEventStream, StoredTask, VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.models import create_task_event_model, create_task_model, create_task_version_model
from sqlalchemy import event, make_url, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, StaticPool

from cluster_subscribe._testing import Parts
from cluster_subscribe._testing.messages import caller
from tests.support.databases import execute


def engine(**options: Any) -> Parts:
    return Parts(engine=partial(create_async_engine, **options))


def driver(name: str) -> Parts:
    """Another driver of the same database."""
    return Parts(engine=lambda url: create_async_engine(make_url(url).set(drivername=name)))


def in_memory(_: str) -> AsyncEngine:
    return create_async_engine('sqlite+aiosqlite://', poolclass=StaticPool)


def shared_cache(_: str) -> AsyncEngine:
    url = f'sqlite+aiosqlite:///file:{uuid.uuid4().hex}?mode=memory&cache=shared&uri=true'
    return create_async_engine(url, poolclass=AsyncAdaptedQueuePool)


def connector(url: str) -> AsyncEngine:
    """An engine whose URL names nothing, as cloud connectors have it."""
    asyncpg: Any = importlib.import_module('asyncpg')
    dsn = make_url(url).set(drivername='postgresql').render_as_string(hide_password=False)
    return create_async_engine('postgresql+asyncpg://', async_creator=partial(asyncpg.connect, dsn))


# Tables in places of their own


_TABLES = 'task_events', 'task_versions', 'tasks'


@asynccontextmanager
async def in_schema(url: str) -> AsyncIterator[str]:
    """A database with a schema `agents`, and none of the tables."""
    await execute(url, f'DROP TABLE {", ".join(_TABLES)}', 'CREATE SCHEMA agents')
    yield url


@asynccontextmanager
async def beside_another_app(url: str) -> AsyncIterator[str]:
    """The same, with a table of another app's in `public` under the name of one of ours."""
    async with in_schema(url):
        await execute(url, 'CREATE TABLE public.task_events (id int primary key, note text)')
        yield url


def translated(url: str) -> AsyncEngine:
    return create_async_engine(url).execution_options(schema_translate_map={None: 'agents'})


def _on_checkout(made: AsyncEngine, statement: Callable[[], str], *, committed: bool) -> None:
    def set_up(connection: Any, *_: object) -> None:
        if committed:
            connection.run_async(lambda raw: raw.execute(statement()))
            return
        cursor = connection.cursor()
        cursor.execute(statement())
        cursor.close()

    event.listen(made.sync_engine, 'checkout', set_up)


def with_search_path(url: str) -> AsyncEngine:
    made = create_async_engine(url)
    _on_checkout(made, lambda: 'SET search_path TO agents', committed=False)
    return made


@cache
def _models(prefix: str, schema: str | None) -> tuple[Any, Any, Any]:
    # The SDK takes a name once in a process.
    models: tuple[Any, Any, Any]
    with warnings.catch_warnings():
        # So does SQLAlchemy with the names of classes, and says so.
        warnings.simplefilter('ignore')
        models = (
            create_task_model(f'{prefix}tasks'),
            create_task_event_model(f'{prefix}task_events'),
            create_task_version_model(f'{prefix}task_versions'),
        )
    model: Any
    for model in models:
        model.__table__.schema = schema
    return models


def named(prefix: str, schema: str | None = None) -> Parts:
    """Tables with names, or a schema, of their own."""

    def store(engine: AsyncEngine) -> VersionedDatabaseTaskStore:
        made = VersionedDatabaseTaskStore(engine)
        made._db.task_model, made._event_model, made._version_model = _models(prefix, schema)
        return made

    def stream(engine: AsyncEngine, **options: Any) -> DatabaseTaskEventStream:
        made = DatabaseTaskEventStream(engine, **options)
        made._event_model = _models(prefix, schema)[1]
        return made

    return Parts(store=store, stream=stream)


# Contexts

OWNER: ContextVar[str] = ContextVar('OWNER')


@contextmanager
def as_owner(user: str) -> Iterator[None]:
    token = OWNER.set(user)
    try:
        yield
    finally:
        OWNER.reset(token)


@asynccontextmanager
async def with_row_security(url: str) -> AsyncIterator[str]:
    """A database whose rows are their owner's alone, told by `app.owner`."""
    role = f'cluster_subscribe_{uuid.uuid4().hex}'
    own = "owner = current_setting('app.owner', true)"
    await execute(
        url,
        f'CREATE ROLE {role}',
        f'GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}',
        f'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}',
        *(f'ALTER TABLE {table} ENABLE ROW LEVEL SECURITY' for table in _TABLES),
        *(f'CREATE POLICY own ON {t} USING ({own}) WITH CHECK ({own})' for t in _TABLES),
    )
    try:
        yield f'{url}#{role}' if '#' not in url else url
    finally:
        await execute(url, f'DROP OWNED BY {role}', f'DROP ROLE {role}')


def _take_role(made: AsyncEngine, role: str) -> None:
    def take(connection: Any, _: object) -> None:
        connection.run_async(lambda raw: raw.execute(f'SET ROLE {role}'))

    event.listen(made.sync_engine, 'connect', take)


@asynccontextmanager
async def with_a_reading_role(url: str) -> AsyncIterator[str]:
    """A database with a role that may read the event table alone."""
    role = f'cluster_subscribe_{uuid.uuid4().hex}'
    await execute(url, f'CREATE ROLE {role}', f'GRANT SELECT ON task_events TO {role}')
    try:
        yield f'{url}#{role}'
    finally:
        await execute(url, f'DROP OWNED BY {role}', f'DROP ROLE {role}')


def reading_role() -> Parts:
    """An event stream on an engine of its own, with the least rights that the SDK's needs."""

    def make(url: str) -> AsyncEngine:
        url, _, role = url.partition('#')
        made = create_async_engine(url)
        _take_role(made, role)
        return made

    return Parts(
        engine=lambda url: create_async_engine(url.partition('#')[0]),
        stream_engine=make,
        stream=partial(DatabaseTaskEventStream, create_table=False),
    )


def row_security(hook: str, *, strict: bool = False) -> Parts:
    """Tells the database in a hook of the engine whose rows may be seen.

    Args:
        hook: `begin`, `checkout` or `committed` at the checkout.
        strict: Whether the hook raises where it runs for nobody's request.
    """

    def owner() -> str:
        return OWNER.get() if strict else OWNER.get('')

    def make(url: str) -> AsyncEngine:
        url, _, role = url.partition('#')
        made = create_async_engine(url)
        _take_role(made, role)
        if hook == 'begin':

            @event.listens_for(made.sync_engine, 'begin')
            def set_owner(connection: Any) -> None:
                connection.exec_driver_sql(f"SELECT set_config('app.owner', '{owner()}', true)")
        else:
            _on_checkout(made, lambda: f"SET app.owner = '{owner()}'", committed=hook != 'checkout')
        return made

    return Parts(engine=make, acting=as_owner)


class SharedVisibility(VersionedDatabaseTaskStore):
    """Finds the tasks of all users."""

    async def get(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        model = self._db.task_model
        async with self._db.async_session_maker() as session:
            owner = (
                await session.execute(select(model.owner).where(model.id == task_id))
            ).scalar_one_or_none()
        return None if owner is None else await super().get(task_id, caller(owner))


# Loops


@contextmanager
def eager() -> Iterator[None]:
    """The loop starts tasks at once, as Python 3.12 can."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    try:
        yield
    finally:
        loop.set_task_factory(None)


@contextmanager
def debugged() -> Iterator[None]:
    """The loop in debug mode."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        yield
    finally:
        loop.set_debug(False)
