"""What an engine is, beyond its URL: which connections it hands out, and to what."""

from typing import Final

from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import AssertionPool, StaticPool

_OWN_CREATOR: Final = 'sqlalchemy.engine.create'
"""The module of what opens connections by the URL."""


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


def _in_memory(url: URL) -> bool:
    database = url.database or ':memory:'
    return ':memory:' in database or url.query.get('mode') == 'memory'
