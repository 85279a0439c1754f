"""A connection of the user's own engine that no pool counts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


@asynccontextmanager
async def detached(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Opens a connection with all that the engine knows (TLS, passwords, `connect_args`).

    It is taken out of the pool, so that nobody who writes through the pool ever waits
    for it, and closed at the end.
    """
    connection = await engine.connect()
    try:
        connection = await connection.execution_options(isolation_level='AUTOCOMMIT')
        await connection.run_sync(lambda sync: sync.detach())
        yield connection
    finally:
        await connection.close()
