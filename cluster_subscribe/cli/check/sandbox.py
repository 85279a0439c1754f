"""A place of the check's own in a database, gone at the end."""

import sqlite3
import tempfile
import uuid

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from a2a.server.cluster import VersionedDatabaseTaskStore
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe.cli.database import TIDYING, answered
from cluster_subscribe.cli.ending import Failure

_KINDS: Final = {'sqlite': 'SQLite', 'postgresql': 'PostgreSQL', 'mysql': 'MySQL'}
_PREFIX: Final = 'cluster_subscribe_check_'


@dataclass(frozen=True)
class Sandbox:
    """Where the faults are played."""

    url: URL
    engine_options: Mapping[str, Any]
    """What an engine needs to stay inside."""
    kind: str
    """`PostgreSQL`, for example."""
    version: str

    def fresh_url(self) -> str:
        """Where the next scene is played, undisturbed by what the last one left open."""
        url = self.url
        if url.get_backend_name() == 'sqlite':
            # A query that the SDK alone breaks off keeps its lock on the file for a while.
            url = url.set(database=f'{url.database}{uuid.uuid4().hex}')
        return url.render_as_string(hide_password=False)


@asynccontextmanager
async def sandbox(url: URL | None) -> AsyncIterator[Sandbox]:
    """Makes a place in which nothing else is, and takes it away at the end.

    PostgreSQL: a schema. MySQL, MariaDB: a database. SQLite: files next to the one that
    `url` names, or temporary ones.

    Raises:
        Failure: The database does not answer, or refuses.
    """
    if url is None or url.get_backend_name() == 'sqlite':
        with _folder(url) as folder:
            driver = url.drivername if url else 'sqlite+aiosqlite'
            place = URL.create(driver, database=str(Path(folder) / 'check-'))
            yield await _entered(place, {'connect_args': {'factory': _Unsynced}})
    elif url.get_backend_name() == 'postgresql':
        name = _PREFIX + uuid.uuid4().hex[:12]
        async with _made(url, f'SCHEMA {name}', f'SCHEMA {name} CASCADE', 'CREATE on its database'):
            yield await _entered(url, {'connect_args': _search_path(url, name)}, name)
    else:
        name = _PREFIX + uuid.uuid4().hex[:12]
        async with _made(url, f'DATABASE {name}', f'DATABASE {name}', f'ALL ON `{_PREFIX}%`.*'):
            yield await _entered(url.set(database=name), {})


def _folder(url: URL | None) -> tempfile.TemporaryDirectory[str]:
    where = Path(str(url.database).removeprefix('file:')).parent if url else tempfile.gettempdir()
    try:
        return tempfile.TemporaryDirectory(
            prefix='cluster-subscribe-', dir=where, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise Failure(f'No folder can be made in {where}: {error.strerror}') from error


class _Unsynced(sqlite3.Connection):
    """Does not wait for the disk: what is stored here need not outlive the machine."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.execute('PRAGMA synchronous = OFF')


def _search_path(url: URL, schema: str) -> Mapping[str, Any]:
    if url.get_driver_name() == 'asyncpg':
        return {'server_settings': {'search_path': schema}}
    return {'options': f'-c search_path={schema}'}


@asynccontextmanager
async def _made(url: URL, create: str, drop: str, right: str) -> AsyncIterator[None]:
    shown, (what, name) = url.render_as_string(), create.split(' ')
    engine = create_async_engine(url, isolation_level='AUTOCOMMIT')
    refused = f'{shown} refuses CREATE {what}, which takes the right {right}'
    try:
        await answered(_execute(engine, 'SELECT 1'), f'Cannot use {shown}')
        try:
            await answered(_execute(engine, f'CREATE {create}'), refused)
        except BaseException:
            # It may be there all the same if nobody waited for the answer.
            with suppress(Exception):
                await _execute(engine, f'DROP {drop}')
            raise
        try:
            yield
        finally:
            left = f'{what.capitalize()} {name} is left behind in {shown}'
            await answered(_execute(engine, f'DROP {drop}'), left, TIDYING)
    finally:
        await engine.dispose()


async def _execute(engine: AsyncEngine, statement: str) -> None:
    async with engine.connect() as connection:
        await connection.execute(text(statement))


async def _entered(place: URL, options: Mapping[str, Any], schema: str | None = None) -> Sandbox:
    """Connects and makes the tables, which two scenes at once could not do."""
    shown = place.render_as_string()
    engine = create_async_engine(place, **options)
    try:
        kind, version, default = await answered(_seen(engine), f'Cannot use {shown}')
        if schema not in (None, default):
            # Then a pooler in between ignores the search path, and this is someone's schema.
            raise Failure(f'{shown} ignores the search_path; leave out the pooler in between')
        await answered(VersionedDatabaseTaskStore(engine).initialize(), f'Cannot use {shown}')
    finally:
        await engine.dispose()
    return Sandbox(place, options, kind, version)


async def _seen(engine: AsyncEngine) -> tuple[str, str, str | None]:
    async with engine.connect() as connection:
        dialect = connection.dialect
        kind = 'MariaDB' if getattr(dialect, 'is_mariadb', False) else _KINDS[dialect.name]
        numbers = getattr(dialect, 'server_version_info', None) or ()
        version = '.'.join(str(number) for number in numbers[:3])
        return kind, version, dialect.default_schema_name
