"""The check: the stored version against the `ActiveTask` in this replica's memory."""

from enum import Enum

from a2a.server.cluster import TaskVersion

from cluster_subscribe.sdk import LocalTask


class Verdict(str, Enum):
    """How this replica's memory of a task stands to the store."""

    ABSENT = 'absent'
    """This replica holds nothing of the task."""
    LIVE = 'live'
    """A request for the task is in flight here."""
    IDLE = 'idle'
    """Nothing runs here, and the cached copy is as new as the store."""
    STALE = 'stale'
    """Nothing runs here, and another replica is ahead (faults F1, F2, F9)."""


def judge(local: LocalTask | None, stored: TaskVersion, *, in_transit: bool) -> Verdict:
    """Compares a replica's memory with the store.

    In flight is asked before the versions: a running turn drops its cached copy at
    its start and lags the commit at each save, so it may look behind.

    Args:
        local: What this replica's memory holds.
        stored: The version the store holds.
        in_transit: Whether a message for the task is on its way through the decorator.
    """
    if local is None:
        return Verdict.ABSENT
    if local.in_flight or in_transit:
        return Verdict.LIVE
    if not local.version.is_missing and stored.is_after(local.version):
        return Verdict.STALE
    return Verdict.IDLE
