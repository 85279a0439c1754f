"""SQLite: the file says when another connection has committed."""

import asyncio

from collections.abc import Callable
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.event_log.wakeup.detached import Wake, detached

_BUSY: Final = 0.003
"""Seconds between two looks while events flow."""
_IDLE: Final = 0.05
"""Seconds between two looks when nothing has moved for long."""
_PATIENCE: Final = 333
"""Looks without a change until the pace slackens: one second of silence."""


class SqliteWakeup:
    """Looks at `PRAGMA data_version`, often while events flow and seldom while idle."""

    notifies = False

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._stopped = False

    def notify(self, task_id: str) -> None:
        """Does nothing: the commit itself is what the others see."""

    def stop(self) -> None:
        """Makes `run()` return after its next look."""
        self._stopped = True

    async def run(self, wake: Wake, wanted: Callable[[], bool]) -> None:
        """Wakes at every commit of another connection, while somebody wants it."""
        async with detached(self._engine) as (_, raw):
            seen: int | None = None
            unchanged = 0
            while wanted() and not self._stopped:
                # One hop to the driver's thread, where a cursor would take three.
                ((now,),) = await raw.execute_fetchall('PRAGMA data_version')
                unchanged = unchanged + 1 if now == seen else 0
                if now != seen:
                    seen = now
                    wake(None, 'data_version')
                await asyncio.sleep(_BUSY if unchanged < _PATIENCE else _IDLE)
