"""The event log, tailed by one reader per replica, woken and fanned out.

A stream gets every row after its cursor, in (version, seq) order, exactly once. Only
the reader queries the database and moves cursors; a stream only empties its buffer.
Wakeups reduce latency and nothing else: what they miss, the timer finds.
"""

from cluster_subscribe.event_log.stream import SharedTailEventStream

__all__ = ['SharedTailEventStream']
