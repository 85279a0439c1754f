"""How what this replica holds of a task stands to the stored task, and when it may go.

An `ActiveTask` outlives its turn: only a terminal state cleans it up, and only where
that state was reached. One that another replica has overtaken is taken out of the
registry and closed, so that the SDK's next use of the task reads the store (F9, F15); but
never while its agent, its consumer or its webhook has something left to do (F31).
"""

from enum import Enum

from a2a.server.cluster import TaskVersion
from a2a.server.request_handlers import RequestHandler

from cluster_subscribe import sdk
from cluster_subscribe.executor_seam import ExecutorSeam
from cluster_subscribe.sdk import LocalTask


class LocalState(str, Enum):
    """How this replica's memory of a task stands to the store."""

    ABSENT = 'absent'
    """This replica holds nothing of the task."""
    LIVE = 'live'
    """A turn of the task runs here, or is about to."""
    IDLE = 'idle'
    """Nothing runs here, and the cached copy is as new as the store."""
    STALE = 'stale'
    """Nothing runs here, and the store has gone on without this replica (faults F1, F2, F9)."""


def classify(local: LocalTask | None, stored: TaskVersion, *, message_incoming: bool) -> LocalState:
    """Compares a replica's memory with the store.

    A running turn comes before the versions: it drops its cached copy at its start and
    lags the commit at each save, so its copy may be older than the store.

    Args:
        local: What this replica's memory holds.
        stored: The version the store holds.
        message_incoming: Whether a message for the task is not in its queue yet.
    """
    if local is None:
        return LocalState.ABSENT
    if local.turn_running or message_incoming:
        return LocalState.LIVE
    return LocalState.STALE if is_superseded(local, stored) else LocalState.IDLE


def is_superseded(local: LocalTask, stored: TaskVersion | None) -> bool:
    """Whether the store has gone on from what a replica's memory holds, or lost the task.

    A lower version is one of a later incarnation: the task was deleted and recreated.

    Args:
        local: What this replica's memory holds.
        stored: The version the store holds; `None` if the task is gone.
    """
    if local.version.is_missing:
        return False
    return stored != local.version


def unregister(
    handler: RequestHandler,
    local: LocalTask,
    stored: TaskVersion | None,
    turns: ExecutorSeam | None,
) -> bool:
    """Unregisters an `ActiveTask` that has ended, or that is superseded and unused.

    The caller has made sure that no request for the task is under way, and closes the
    `ActiveTask` afterwards, unless it has ended. Nothing here waits, so no request
    can begin to use it meanwhile.

    Returns:
        Whether it was unregistered.
    """
    if not (_is_left(local, turns) if local.finished else _is_overtaken(local, stored, turns)):
        return False
    return sdk.unregister(handler, local.active)


def _is_left(local: LocalTask, turns: ExecutorSeam | None) -> bool:
    """Whether a finished one has nothing left to do.

    Up to a2a-sdk 1.2.2 its producer may wait for ever for a reader that has left, and its
    consumer for the producer.
    """
    return local.ended or (
        local.closed
        and not local.unhandled
        and not local.read
        and turns is not None
        and turns.knows(local)
        and not turns.runs(local.active.task_id)
    )


def _is_overtaken(local: LocalTask, stored: TaskVersion | None, turns: ExecutorSeam | None) -> bool:
    return (
        local.is_unused
        and is_superseded(local, stored)
        and turns is not None
        # Its copy stays as well: by the old version the SDK refuses what the writer emits next,
        # and does not write it over the end of the task.
        and not turns.may_write(local)
    )
