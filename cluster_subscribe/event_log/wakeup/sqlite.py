"""SQLite: `PRAGMA data_version` changes when another connection has committed."""

import asyncio

from collections.abc import Callable
from typing import Final

from sqlalchemy import Table, bindparam, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from cluster_subscribe.event_log.wakeup.detached import detached
from cluster_subscribe.event_log.wakeup.source import WakeCallback

_BUSY_INTERVAL: Final = 0.003
"""Seconds between two polls while events flow."""
_IDLE_INTERVAL: Final = 0.05
"""Seconds between two polls when nothing has changed for a second."""
_IDLE_AFTER: Final = 333
"""Polls without a change until the longer interval applies: a second of the shorter one."""
_MAX_ROWS: Final = 1_000
"""New rows that are read; where there are more, any task counts as changed."""


class SqliteWakeup:
    """Polls `PRAGMA data_version`, often while events flow and seldom while idle."""

    def __init__(self, engine: AsyncEngine, events: Table) -> None:
        self._engine = engine
        self._stopped = False
        self._newest: tuple[int, str] | None = None
        """The last row that was seen."""
        self._rows = (
            select(events.c.seq, events.c.task_id)
            .where(events.c.seq >= bindparam('seq'))
            .order_by(events.c.seq)
            .limit(_MAX_ROWS)
        )
        self._last = select(events.c.seq, events.c.task_id).order_by(events.c.seq.desc()).limit(1)

    def stop(self) -> None:
        """Makes `run()` return after its next poll."""
        self._stopped = True

    async def run(self, wake: WakeCallback, wanted: Callable[[], bool]) -> None:
        """Wakes after each commit of another connection, while it is wanted."""
        async with detached(self._engine) as (connection, raw):
            seen: int | None = None
            unchanged = 0
            while wanted() and not self._stopped:
                # One call into the driver's thread, where a cursor would take three.
                ((now,),) = await raw.execute_fetchall('PRAGMA data_version')
                unchanged = unchanged + 1 if now == seen else 0
                if now != seen:
                    seen = now
                    changed = await self._changed_tasks(connection)
                    if changed is None or changed:
                        wake(changed, 'data_version')
                await asyncio.sleep(_BUSY_INTERVAL if unchanged < _IDLE_AFTER else _IDLE_INTERVAL)

    async def _changed_tasks(self, connection: AsyncConnection) -> set[str] | None:
        """The tasks with new rows; `None` where they cannot be told, as after a deletion.

        Not every commit adds a row. What is missed here the timer finds.
        """
        try:
            if self._newest is not None:
                rows = [
                    (seq, task_id)
                    for seq, task_id in await connection.execute(
                        self._rows, {'seq': self._newest[0]}
                    )
                ]
                # After the deletion of the last row SQLite gives its number to the next one.
                if rows and rows[0] == self._newest and len(rows) < _MAX_ROWS:
                    self._newest = rows[-1]
                    return {task_id for _, task_id in rows[1:]}
            last = (await connection.execute(self._last)).one_or_none()
        except DBAPIError:
            # The table may not be there yet.
            last = None
        self._newest = (last.seq, last.task_id) if last else None
        return None
