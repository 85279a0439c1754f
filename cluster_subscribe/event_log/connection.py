"""Connections that fail: how one is ended, and what an error says of it."""

import os
import socket

from collections.abc import Callable
from typing import Any, Final, cast

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

_PREPARED_ELSEWHERE: Final = ('26000', '42P05')
"""PostgreSQL's codes for a statement that is not prepared here, or is prepared already."""


def abort_connection(connection: AsyncConnection) -> Callable[[], object]:
    """How to end a connection without an answer from its other end.

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
