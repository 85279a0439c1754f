"""What makes the reader read before its timer does.

A wakeup is a hint. It may be lost, late, doubled or false, and nothing but latency
depends on it: the timer always runs as well.
"""

from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.event_log.wakeup.postgresql import PostgresqlWakeup
from cluster_subscribe.event_log.wakeup.runner import WakeupRunner
from cluster_subscribe.event_log.wakeup.shared import SharedPostgresqlWakeup
from cluster_subscribe.event_log.wakeup.source import NotifyingSource, WakeCallback, WakeupSource
from cluster_subscribe.event_log.wakeup.sqlite import SqliteWakeup


def wakeup_for(engine: AsyncEngine, events: Table) -> WakeupSource | None:
    """The source that an engine's database offers; `None` where there is only the timer."""
    if engine.dialect.name == 'postgresql' and engine.dialect.driver == 'asyncpg':
        return SharedPostgresqlWakeup(engine, events.name)
    if engine.dialect.name == 'sqlite' and engine.url.database not in (None, '', ':memory:'):
        return SqliteWakeup(engine, events)
    return None


__all__ = [
    'NotifyingSource',
    'PostgresqlWakeup',
    'SharedPostgresqlWakeup',
    'SqliteWakeup',
    'WakeCallback',
    'WakeupRunner',
    'WakeupSource',
    'wakeup_for',
]
