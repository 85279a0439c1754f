"""The database a command works on: found, reached, and left as it was."""

import asyncio
import sqlite3

from collections.abc import AsyncIterator, Awaitable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.models import Base, TaskEventModel, TaskModel, TaskVersionModel
from sqlalchemy import Table, delete, inspect, make_url, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe.cli.ending import Failure, reason

T = TypeVar('T')

_TIMEOUT: Final = 5.0
"""Seconds a database may take to answer before it counts as unreachable."""
TIDYING: Final = 20.0
"""Seconds for the tidying: nothing indexes the contexts of a large table of tasks."""

_DRIVERS: Final = {
    'sqlite': ('aiosqlite', 'sqlite'),
    'postgresql': ('asyncpg', 'postgresql'),
    'mysql': ('aiomysql', 'mysql'),
    'mariadb': ('aiomysql', 'mysql'),
}
"""The driver of each kind of database, and the extra of this package that brings it."""

_TABLES: Final = tuple(
    Base.metadata.tables[model.__tablename__]
    for model in (TaskEventModel, TaskVersionModel, TaskModel)
)


def find(database: str | URL) -> URL:
    """Reads a database URL; one without a driver gets the one this package knows.

    Raises:
        Failure: It is no URL of a database that replicas can share, or its driver is
            not installed.
    """
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        # What was written may hold a password, so it is not repeated.
        raise Failure(
            'That is no database URL; one reads postgresql+asyncpg://user@host/name'
        ) from None
    kind, _, chosen = url.drivername.partition('+')
    if kind not in _DRIVERS:
        raise Failure(f'{kind!r} is no database known here; those are {", ".join(_DRIVERS)}')
    driver, extra = _DRIVERS[kind]
    install = f"pip install 'cluster-subscribe[{extra}]'"
    url = url.set(drivername=f'{kind}+{chosen or driver}')
    try:
        create_async_engine(url)
    except (ImportError, ArgumentError, InvalidRequestError):
        if chosen in ('', driver):
            raise Failure(f'The driver {driver} is not installed: {install}') from None
        raise Failure(
            f'{chosen!r} is no asynchronous driver that is installed here; '
            f'write {kind}+{driver}:// ({install})'
        ) from None
    if kind == 'sqlite' and url.database in (None, '', ':memory:'):
        raise Failure('An SQLite database in memory is not shared; name a file, sqlite:///tasks.db')
    return url


def _open_file(url: URL) -> None:
    try:
        # The driver's thread would print a traceback if it failed to open the file.
        sqlite3.connect(str(url.database), uri='uri' in url.query).close()
    except sqlite3.Error as error:
        raise Failure(f'Cannot use {url.render_as_string()}: {reason(error)}') from error


@asynccontextmanager
async def lent(url: URL, contexts: Collection[str]) -> AsyncIterator[None]:
    """Makes a database ready for the tasks of some contexts; afterwards it is as before.

    Tables that are missing are made, and dropped at the end if nothing is left in them;
    the tasks of the contexts are taken out. Nothing else is touched.

    Raises:
        Failure: The database does not answer, or refuses.
    """
    shown = url.render_as_string()
    if url.get_backend_name() == 'sqlite':
        _open_file(url)
    engine = create_async_engine(url)
    try:
        made = await answered(_make_tables(engine), f'Cannot use {shown}')
        try:
            yield
        finally:
            await answered(_tidy(engine, made, contexts), f'Could not tidy up in {shown}', TIDYING)
    finally:
        await engine.dispose()


async def answered(work: Awaitable[T], otherwise: str, limit: float | None = None) -> T:
    """Waits for a database's answer.

    Raises:
        Failure: It refused or kept silent; the line begins with `otherwise`.
    """
    limit = limit or _TIMEOUT
    try:
        return await asyncio.wait_for(work, limit)
    except asyncio.TimeoutError:
        raise Failure(f'{otherwise}: no answer within {limit:g} seconds') from None
    except Exception as error:
        raise Failure(f'{otherwise}: {reason(error)}') from error


async def _make_tables(engine: AsyncEngine) -> list[Table]:
    """Creates the tables that are missing, and says which."""
    async with engine.connect() as connection:
        before = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    await VersionedDatabaseTaskStore(engine).initialize()
    return [table for table in _TABLES if table.name not in before]


async def _tidy(engine: AsyncEngine, made: Iterable[Table], contexts: Collection[str]) -> None:
    async with engine.begin() as connection:
        tasks = select(TaskModel.id).where(TaskModel.context_id.in_(contexts))
        ids = (await connection.scalars(tasks)).all()
        for table in _TABLES:
            key = table.c.id if table is TaskModel.__table__ else table.c.task_id
            await connection.execute(delete(table).where(key.in_(ids)))
        for table in made:
            if (await connection.execute(select(table).limit(1))).first() is None:
                await connection.run_sync(table.drop)
