"""A connection for wakeups, beside those of the pool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from cluster_subscribe.waiting import in_time

_CONNECT_TIMEOUT: Final = 30.0
"""Seconds within which the connection must be open."""


@asynccontextmanager
async def detached(engine: AsyncEngine) -> AsyncIterator[tuple[AsyncConnection, Any]]:
    """Opens a connection with all that the engine knows (TLS, passwords, `connect_args`).

    It is opened beside the pool, so that nobody who writes through the pool ever waits
    for it, and closed at the end. Yields it with the driver's own connection.
    """
    if not hasattr(engine.dialect, 'default_isolation_level'):
        # The first connection sets up the dialect, and other connections of its pool wait for that.
        async with engine.connect():
            pass
    # A pool with the same creator, events and arguments, and no connections.
    pool = engine.sync_engine.pool.recreate()

    def connect() -> Connection:
        return Connection(engine.sync_engine, connection=pool.connect())

    connection = AsyncConnection(engine, await in_time(greenlet_spawn(connect), _CONNECT_TIMEOUT))
    try:
        connection = await connection.execution_options(isolation_level='AUTOCOMMIT')
        raw = (await connection.get_raw_connection()).driver_connection
        await connection.run_sync(lambda sync: sync.detach())
        yield connection, raw
    finally:
        await connection.close()
