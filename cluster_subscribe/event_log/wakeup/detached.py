"""What every wakeup shares: how it wakes, and a connection that no pool counts."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import greenlet_spawn

from cluster_subscribe.background import in_time

_PATIENCE: Final = 30.0
"""Seconds for a connection."""

Wake = Callable[[Iterable[str] | None, str], None]
"""Takes the ids of tasks that moved, `None` for any, and the name of the source."""


@asynccontextmanager
async def detached(engine: AsyncEngine) -> AsyncIterator[tuple[AsyncConnection, Any]]:
    """Opens a connection with all that the engine knows (TLS, passwords, `connect_args`).

    It is opened beside the pool, so that nobody who writes through the pool ever waits
    for it, and closed at the end. Given with the driver's own connection beneath it.
    """
    if not hasattr(engine.dialect, 'default_isolation_level'):
        # The first connection sets up the dialect, which those of one pool wait for.
        async with engine.connect():
            pass
    # The same creator, events and arguments, and none of the connections.
    pool = engine.sync_engine.pool.recreate()

    def connect() -> Connection:
        return Connection(engine.sync_engine, connection=pool.connect())

    connection = AsyncConnection(engine, await in_time(greenlet_spawn(connect), _PATIENCE))
    try:
        connection = await connection.execution_options(isolation_level='AUTOCOMMIT')
        beneath = (await connection.get_raw_connection()).driver_connection
        await connection.run_sync(lambda sync: sync.detach())
        yield connection, beneath
    finally:
        await connection.close()
