"""What is known of an engine: which database it names, and what its connections are like."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import Table, make_url
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import AssertionPool, StaticPool

_OWN_CREATOR: Final = 'sqlalchemy.engine.create'
"""The module of SQLAlchemy's own creator, which connects as the URL says."""
_IGNORED_LISTENERS: Final = ('sqlalchemy.', 'opentelemetry.')
"""Packages whose event listeners set nothing on a connection."""


def shared_connection(engine: AsyncEngine) -> str | None:
    """Why all users of an engine share one connection; `None` where each has its own.

    On a shared connection, one user's commit or rollback ends the transactions of all.
    Connections to one SQLite database in memory count too: they share a cache, whose locks
    fail at once instead of being waited for.
    """
    pool = engine.sync_engine.pool
    if isinstance(pool, StaticPool | AssertionPool):
        return type(pool).__name__
    if engine.dialect.name == 'sqlite' and not has_creator(engine) and _in_memory(engine.url):
        return 'an SQLite database in memory'
    return None


def has_creator(engine: AsyncEngine) -> bool:
    """Whether the user's own function opens the connections, whatever the URL says."""
    creator = getattr(engine.sync_engine.pool, '_creator', None)
    return getattr(creator, '__module__', _OWN_CREATOR) != _OWN_CREATOR


def is_autocommit(engine: AsyncEngine) -> bool:
    """Whether an engine commits each statement by itself."""
    levels = (
        getattr(engine.dialect, '_on_connect_isolation_level', None),
        engine.get_execution_options().get('isolation_level'),
    )
    return str(levels[1] or levels[0]).upper() == 'AUTOCOMMIT'


def names_database(engine: AsyncEngine) -> bool:
    """Whether the URL says which database it is, and no function of the user's opens another."""
    url, dialect = engine.url, engine.sync_engine.dialect.dispatch
    return not (has_creator(engine) or dialect.do_connect) and (
        engine.dialect.name == 'sqlite' or bool(url.host or url.database or url.query)
    )


def has_hooks(engine: AsyncEngine) -> bool:
    """Whether event listeners of the user's set up connections or transactions.

    What they set, such as a search path or a tenant, may depend on the context variables they
    run with, and lasts as long as the transaction that they began.
    """
    pool: Any = engine.sync_engine.pool.dispatch
    dispatch: Any = engine.sync_engine.dispatch
    return (
        _users(pool.checkout)
        or _users(dispatch.begin)
        or _users(dispatch.engine_connect)
        or _users(pool.connect)
    )


def _users(listeners: Iterable[object]) -> bool:
    return any(
        not str(getattr(listener, '__module__', None)).startswith(_IGNORED_LISTENERS)
        for listener in listeners
    )


def qualified_name(engine: AsyncEngine, table: Table) -> tuple[str | None, str]:
    """The schema and the name under which an engine finds a table."""
    schemas = engine.get_execution_options().get('schema_translate_map') or {}
    return schemas.get(table.schema, table.schema), table.name


def _in_memory(url: URL) -> bool:
    database = url.database or ':memory:'
    return ':memory:' in database or url.query.get('mode') == 'memory'


class _Database(NamedTuple):
    """The database that a URL names, whatever driver, user and spelling it uses."""

    backend: str
    host: str
    port: int | None
    name: str

    def __str__(self) -> str:
        return f'{self.backend} {self.name}' + (f' on {self.host}:{self.port}' if self.host else '')


def _database(url: URL) -> _Database:
    url = make_url(url)
    backend = 'mysql' if url.get_backend_name() == 'mariadb' else url.get_backend_name()
    name = url.database or ':memory:'
    if backend == 'sqlite':
        if name != ':memory:' and not name.startswith('file:'):
            name = str(Path(name).resolve())
        return _Database(backend, '', None, name)
    host = str(url.host or url.query.get('host') or 'localhost')
    port = url.port or {'postgresql': 5432, 'mysql': 3306}.get(backend)
    return _Database(backend, 'localhost' if host in ('127.0.0.1', '::1') else host, port, name)


def describe_difference(
    written: tuple[AsyncEngine, Table], read: tuple[AsyncEngine, Table]
) -> str | None:
    """Says how a store's event table is not the one that a stream reads; `None` if it is.

    Credentials are never shown.
    """
    (store_engine, store_table), (stream_engine, stream_table) = written, read
    ours, theirs = _database(store_engine.url), _database(stream_engine.url)
    if (
        store_engine is not stream_engine
        # What cannot be known is not different.
        and names_database(store_engine)
        and names_database(stream_engine)
        and (ours != theirs or ours.name == ':memory:')
    ):
        return f'the store writes to {ours}, the event stream reads {theirs}'
    to, of = qualified_name(store_engine, store_table), qualified_name(stream_engine, stream_table)
    if to != of:
        return f'the store writes to table {_dotted(*to)}, the event stream reads {_dotted(*of)}'
    return None


def _dotted(schema: str | None, name: str) -> str:
    return f'{schema}.{name}' if schema else name
