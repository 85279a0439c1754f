"""What an engine is, beyond its URL: which connections it hands out, and to what."""

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import Table
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import AssertionPool, StaticPool

_OWN_CREATOR: Final = 'sqlalchemy.engine.create'
"""The module of what opens connections by the URL."""
_HARMLESS: Final = ('sqlalchemy.', 'opentelemetry.')
"""Packages whose listeners set nothing on a connection."""


def shared_connection(engine: AsyncEngine) -> str | None:
    """Why all users of an engine share one connection; `None` where each has its own.

    Where they do, whoever ends a transaction ends everybody's. Connections to one SQLite
    database in memory count too: they share a cache, whose locks nobody waits for.
    """
    pool = engine.sync_engine.pool
    if isinstance(pool, StaticPool | AssertionPool):
        return type(pool).__name__
    if engine.dialect.name == 'sqlite' and not has_creator(engine) and _in_memory(engine.url):
        return 'an SQLite database in memory'
    return None


def has_creator(engine: AsyncEngine) -> bool:
    """Whether the user's own function opens the connections, so that the URL names nothing."""
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
    """Whether the URL says which database it is, and nothing of the user's opens another."""
    url, dialect = engine.url, engine.sync_engine.dialect.dispatch
    return not (has_creator(engine) or dialect.do_connect) and (
        engine.dialect.name == 'sqlite' or bool(url.host or url.database or url.query)
    )


def has_hooks(engine: AsyncEngine) -> bool:
    """Whether functions of the user's set up connections or transactions.

    What they set, such as a search path or a tenant, may depend on the context they run in,
    and lasts as long as the transaction that they began.
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
        not str(getattr(listener, '__module__', None)).startswith(_HARMLESS)
        for listener in listeners
    )


def qualified_name(engine: AsyncEngine, table: Table) -> tuple[str | None, str]:
    """The schema and the name under which an engine finds a table."""
    schemas = engine.get_execution_options().get('schema_translate_map') or {}
    return schemas.get(table.schema, table.schema), table.name


def _in_memory(url: URL) -> bool:
    database = url.database or ':memory:'
    return ':memory:' in database or url.query.get('mode') == 'memory'
