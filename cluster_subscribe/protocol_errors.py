"""What leaves a subscribe is one of the SDK's own error kinds, without a driver's words.

The transports map an error by its very type: a subclass becomes UNKNOWN to a gRPC client.
What a user's own code raises, in a store, a stream or a hook, stays what it is.
"""

from types import TracebackType
from typing import Final

from a2a.utils.errors import A2AError, InternalError

from cluster_subscribe.errors import EventStreamEndedError

_LIBRARIES: Final = frozenset(
    {
        *('sqlalchemy', 'asyncpg', 'psycopg', 'psycopg_pool', 'aiomysql', 'asyncmy', 'pymysql'),
        *('MySQLdb', 'aiosqlite', 'sqlite3', 'aioodbc', 'pyodbc', 'oracledb', 'greenlet'),
        *('asyncio', 'uvloop', 'ssl', 'socket', 'selectors', 'google', 'a2a', 'cluster_subscribe'),
    }
)
"""Between a read and its database: what they raise tells a client nothing."""


def protocol_error(error: Exception) -> Exception:
    """The error that a client is told in the place of another; itself where that is right."""
    if isinstance(error, EventStreamEndedError):
        return InternalError(message=str(error))
    if isinstance(error, A2AError) or not is_library_error(error):
        return error
    return InternalError(message='The task could not be read; try again later')


def is_library_error(error: Exception) -> bool:
    """Whether an error comes from a library between a read and its database."""
    return bool({_package(type(error).__module__), _raised_in(error.__traceback__)} & _LIBRARIES)


def _raised_in(traceback: TracebackType | None) -> str:
    if traceback is None:
        return ''
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return _package(str(traceback.tb_frame.f_globals.get('__name__')))


def _package(module: str) -> str:
    return module.partition('.')[0]
