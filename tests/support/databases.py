"""What tests tell a database itself."""

from typing import cast

from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import QueuePool

from tests.support.waiting import eventually


async def execute(url: URL | str, *statements: str) -> None:
    """Executes statements on a connection of their own, each in a transaction of its own."""
    engine = create_async_engine(url, isolation_level='AUTOCOMMIT')
    try:
        async with engine.connect() as connection:
            for statement in statements:
                await connection.execute(text(statement))
    finally:
        await engine.dispose()


async def renew_pool(engine: AsyncEngine) -> None:
    """Has an engine connect anew; a pool that is disposed of forgets connections in use."""
    pool = cast('QueuePool', engine.pool)
    await eventually(lambda: not pool.checkedout())
    await engine.dispose()


async def terminate_backends(url: URL | str, which: str = 'true') -> None:
    """Ends the other connections of a PostgreSQL database, or those of which a condition holds."""
    await execute(
        url,
        'SELECT pg_terminate_backend(pid) FROM pg_stat_activity '  # noqa: S608
        f'WHERE datname = current_database() AND pid <> pg_backend_pid() AND {which}',
    )
