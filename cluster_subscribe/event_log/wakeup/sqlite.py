"""SQLite: the file says when another connection has committed."""

import asyncio

from collections.abc import Callable
from typing import Final

from sqlalchemy import Table, bindparam, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from cluster_subscribe.event_log.wakeup.detached import Wake, detached

_BUSY: Final = 0.003
"""Seconds between two looks while events flow."""
_IDLE: Final = 0.05
"""Seconds between two looks when nothing has moved for long."""
_ROWS: Final = 1_000
"""New rows that are asked for; beyond them any task may have moved."""
_PATIENCE: Final = 333
"""Looks without a change until the pace slackens: one second of silence."""


class SqliteWakeup:
    """Looks at `PRAGMA data_version`, often while events flow and seldom while idle."""

    notifies = False

    def __init__(self, engine: AsyncEngine, events: Table) -> None:
        self._engine = engine
        self._stopped = False
        self._newest: tuple[int, str] | None = None
        """The last row that was seen."""
        self._rows = (
            select(events.c.seq, events.c.task_id)
            .where(events.c.seq >= bindparam('seq'))
            .order_by(events.c.seq)
            .limit(_ROWS)
        )
        self._last = select(events.c.seq, events.c.task_id).order_by(events.c.seq.desc()).limit(1)

    def notify(self, task_id: str) -> None:
        """Does nothing: the commit itself is what the others see."""

    def stop(self) -> None:
        """Makes `run()` return after its next look."""
        self._stopped = True

    async def run(self, wake: Wake, wanted: Callable[[], bool]) -> None:
        """Wakes at every commit of another connection, while somebody wants it."""
        async with detached(self._engine) as (connection, raw):
            seen: int | None = None
            unchanged = 0
            while wanted() and not self._stopped:
                # One hop to the driver's thread, where a cursor would take three.
                ((now,),) = await raw.execute_fetchall('PRAGMA data_version')
                unchanged = unchanged + 1 if now == seen else 0
                if now != seen:
                    seen = now
                    moved = await self._task_changed(connection)
                    if moved is None or moved:
                        wake(moved, 'data_version')
                await asyncio.sleep(_BUSY if unchanged < _PATIENCE else _IDLE)

    async def _task_changed(self, connection: AsyncConnection) -> set[str] | None:
        """The tasks with new rows; `None` where they cannot be told, as after a deletion.

        A hint, and what it misses the timer finds: not every commit adds a row.
        """
        try:
            if self._newest is not None:
                rows = [
                    (seq, task_id)
                    for seq, task_id in await connection.execute(
                        self._rows, {'seq': self._newest[0]}
                    )
                ]
                # SQLite gives the number of a last row that was deleted to the next.
                if rows and rows[0] == self._newest and len(rows) < _ROWS:
                    self._newest = rows[-1]
                    return {task_id for _, task_id in rows[1:]}
            last = (await connection.execute(self._last)).one_or_none()
        except DBAPIError:
            # The table may not be there yet.
            last = None
        self._newest = (last.seq, last.task_id) if last else None
        return None
