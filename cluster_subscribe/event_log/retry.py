"""After a failed read: whether it is tried again, how soon, and with what timeout."""

import random

from typing import Final

from sqlalchemy.exc import DBAPIError, ProgrammingError

from cluster_subscribe.event_log.connection import ROUND_TIMEOUT, prepared_elsewhere

MAX_PAUSE: Final = 5.0
"""Seconds between two attempts, at most."""
_MAX_TIMEOUT_FACTOR: Final = 6
"""The longest timeout of an attempt, in terms of the first."""
_FINAL_SQLSTATES: Final = frozenset({'3F000', '42P01', '42501', '42703'})
"""PostgreSQL: missing schemas, tables and columns, missing permissions."""
_FINAL_MYSQL_CODES: Final = frozenset({1044, 1054, 1142, 1143, 1146})
"""MySQL: missing tables and columns, missing permissions."""


def timeout(failures: int) -> float:
    """Seconds that the next attempt may take.

    Each attempt gets more time, since a slow database may still answer. There is a limit, since
    an outage may leave a half-open connection behind, which never answers.

    Args:
        failures: How many attempts in a row have failed.
    """
    return ROUND_TIMEOUT * min(failures + 1, _MAX_TIMEOUT_FACTOR)


def is_final(error: Exception) -> bool:
    """Whether trying again cannot help: a missing table or column, a missing permission.

    Everything else is retried, including whatever a driver raises while connecting.
    """
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return False
    code = error.orig.args[0] if error.orig and error.orig.args else None
    return (
        getattr(error.orig, 'sqlstate', None) in _FINAL_SQLSTATES
        or code in _FINAL_MYSQL_CODES
        or str(error.orig).startswith(('no such table', 'no such column'))
    )


def is_unexpected(error: Exception) -> bool:
    """Whether an error that is not final may be a bug rather than an outage.

    Such an error is retried a few times only.
    """
    if isinstance(error, ProgrammingError):
        return not (error.connection_invalidated or prepared_elsewhere(error))
    return isinstance(
        error, ArithmeticError | AssertionError | AttributeError | LookupError | TypeError
    )


def pause(failures: int) -> float:
    """Seconds until the next attempt: exponential, capped, and with jitter.

    Args:
        failures: How many attempts in a row have failed.
    """
    most = min(MAX_PAUSE, 0.025 * 2.0 ** min(failures, 10))
    return most * random.uniform(0.5, 1)  # noqa: S311 - no secret


def brief(error: Exception) -> str:
    """An error in one line, without the statement and its parameters."""
    cause = getattr(error, 'orig', None) or error
    return f'{type(cause).__name__}: {cause}'.splitlines()[0]
