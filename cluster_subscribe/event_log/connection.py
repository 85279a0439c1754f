"""Connections of the reader: opened with a timeout, and aborted when that is over."""

import asyncio
import os
import socket

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, Final, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from cluster_subscribe.engines import has_hooks
from cluster_subscribe.waiting import in_time

ROUND_TIMEOUT: Final = 10.0
"""Seconds for which one connection may be used."""
_PREPARED_ELSEWHERE: Final = ('26000', '42P05')
"""PostgreSQL's codes for a statement that is not prepared here, or is prepared already."""


class Connections:
    """Connections from the pool of one engine. The caller owns the engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._behind_pooler = False
        """Whether a pooler was seen to switch server connections between two statements."""

    @asynccontextmanager
    async def connect(self, timeout: float = ROUND_TIMEOUT) -> AsyncIterator[AsyncConnection]:
        """One pooled connection for a few statements.

        After `timeout` seconds it counts as lost and is aborted: any statement, also the
        one that ends a transaction, then raises, and SQLAlchemy renews the pool.
        """
        async with AsyncExitStack() as stack:
            timers = stack.enter_context(ExitStack())
            entering = stack.enter_async_context(self._engine.connect())
            if self._engine.dialect.name == 'sqlite':
                # A file has no network to lose, and waiting for its lock has a timeout already.
                yield await entering
                return
            connection = await in_time(entering, timeout)
            timer = asyncio.get_running_loop().call_later(timeout, abort_connection(connection))
            timers.callback(timer.cancel)
            try:
                if self._may_autocommit(connection):
                    # Single SELECTs need no transaction, nor the round trips of one.
                    connection = await connection.execution_options(isolation_level='AUTOCOMMIT')
                yield connection
            except DBAPIError as error:
                if prepared_elsewhere(error):
                    # In a transaction the pooler keeps to one server connection.
                    self._behind_pooler = True
                raise

    def _may_autocommit(self, connection: AsyncConnection) -> bool:
        return (
            connection.dialect.name == 'postgresql'
            and not self._behind_pooler
            # Not known while another connection, the engine's first, is being set up.
            and hasattr(connection.dialect, 'default_isolation_level')
            # Switching would roll back what the user's hooks have set.
            and not has_hooks(self._engine)
        )


def abort_connection(connection: AsyncConnection) -> Callable[[], object]:
    """Gives a function that ends a connection without an answer from its other end.

    Whoever uses it then gets the error of a lost connection, after which SQLAlchemy renews
    the pool.
    """
    driver: Any = cast('Connection', connection.sync_connection).connection.driver_connection
    if hasattr(driver, 'terminate'):
        abort: Callable[[], object] = driver.terminate
        return abort
    if not hasattr(driver, 'fileno'):
        close: Callable[[], object] = driver.close
        return close

    def shut_down() -> None:
        # psycopg's close() is a coroutine, which waits for the query under way.
        if not driver.closed:
            with socket.socket(fileno=os.dup(driver.fileno())) as shared:
                shared.shutdown(socket.SHUT_RDWR)

    return shut_down


def prepared_elsewhere(error: BaseException) -> bool:
    """Whether a pooler gave a prepared statement to two server connections."""
    return getattr(getattr(error, 'orig', None), 'sqlstate', None) in _PREPARED_ELSEWHERE
