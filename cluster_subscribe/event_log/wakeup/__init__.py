"""What makes the reader look before its timer does.

A wakeup is a hint. It may be lost, late, doubled or false, and nothing but speed
depends on it: the timer always runs as the net.
"""

from collections.abc import Callable
from typing import Protocol

from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.event_log.wakeup.detached import Wake
from cluster_subscribe.event_log.wakeup.postgresql import PostgresqlWakeup
from cluster_subscribe.event_log.wakeup.shared import SharedPostgresqlWakeup
from cluster_subscribe.event_log.wakeup.sqlite import SqliteWakeup


class WakeupSource(Protocol):
    """A source of wakeups that other processes feed."""

    notifies: bool
    """Whether the others learn of a commit from `notify()` only."""

    async def run(self, wake: Wake, wanted: Callable[[], bool]) -> None:
        """Wakes until stopped, or until nobody has wanted it for a while.

        Whatever it raises, it is run again after a pause.
        """

    def stop(self) -> None:
        """Makes `run()` return soon, for good."""

    def notify(self, task_id: str) -> None:
        """Hints to the other replicas that a task moved. Never waits, never raises."""


def wakeup_for(engine: AsyncEngine, events: Table) -> WakeupSource | None:
    """The wakeup that an engine's database offers; `None` where there is only the timer."""
    if engine.dialect.name == 'postgresql' and engine.dialect.driver == 'asyncpg':
        return SharedPostgresqlWakeup(engine, events.name)
    if engine.dialect.name == 'sqlite' and engine.url.database not in (None, '', ':memory:'):
        return SqliteWakeup(engine, events)
    return None


__all__ = [
    'PostgresqlWakeup',
    'SharedPostgresqlWakeup',
    'SqliteWakeup',
    'Wake',
    'WakeupSource',
    'wakeup_for',
]
