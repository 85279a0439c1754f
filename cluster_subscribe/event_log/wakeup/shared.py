"""One connection for the wakeups of all handlers that share an engine, a table and a loop."""

import asyncio

from collections.abc import Callable, Iterable
from typing import Any, Final
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.background import Signal
from cluster_subscribe.event_log.wakeup.detached import Wake
from cluster_subscribe.event_log.wakeup.postgresql import PostgresqlWakeup

_CHECK: Final = 30.0
"""Seconds after which one that waits for another's connection asks whether it is wanted."""


class SharedPostgresqlWakeup:
    """The part of one handler in a `PostgresqlWakeup`: the first that runs has the connection."""

    notifies = True

    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._engine = engine
        self._table = table
        self._hub: _Hub | None = None
        self._turn = Signal()
        self.stopped = False

    def notify(self, task_id: str) -> None:
        """Hints to the other replicas, and to the other handlers here, that a task moved."""
        self._join().notify(task_id, self)

    def stop(self) -> None:
        """Makes `run()` return soon, for good."""
        self.stopped = True
        self._turn.set()
        if self._hub is not None and self._hub.holder is self:
            self._hub.wakeup.stop()

    def changed(self) -> None:
        """Takes the word that nobody has the connection any more."""
        self._turn.set()

    async def run(self, wake: Wake, wanted: Callable[[], bool]) -> None:
        """Has the connection, or waits until whoever has it gives it up.

        Raises:
            Exception: As `PostgresqlWakeup.run()` does.
        """
        hub = self._join()
        hub.members[self] = wake, wanted
        try:
            while hub.holder is not None and not self.stopped:
                self._turn.clear()
                await self._turn.within(_CHECK)
                if not wanted():
                    return
            if not self.stopped:
                await hub.hold(self)
        finally:
            del hub.members[self]

    def _join(self) -> '_Hub':
        if self._hub is None:
            key = asyncio.get_running_loop(), self._engine.sync_engine, self._table
            self._hub = _hubs.get(key)
            if self._hub is None:
                self._hub = _hubs[key] = _Hub(self._engine, self._table)
        return self._hub


class _Hub:
    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._of = engine, table
        self.wakeup = PostgresqlWakeup(engine, table)
        self.members: dict[SharedPostgresqlWakeup, tuple[Wake, Callable[[], bool]]] = {}
        self.holder: SharedPostgresqlWakeup | None = None

    async def hold(self, member: SharedPostgresqlWakeup) -> None:
        self.holder = member
        try:
            await self.wakeup.run(self._wake, self._wanted)
        finally:
            self.holder = None
            if member.stopped:
                self.wakeup = PostgresqlWakeup(*self._of)
            for other in self.members:
                other.changed()

    def notify(self, task_id: str, sender: SharedPostgresqlWakeup) -> None:
        # PostgreSQL gives it to this connection, too, which cannot tell its own from these.
        for member, (wake, _) in list(self.members.items()):
            if member is not sender:
                wake((task_id,), 'notify')
        self.wakeup.notify(task_id)

    def _wake(self, task_ids: Iterable[str] | None, source: str) -> None:
        task_ids = None if task_ids is None else list(task_ids)
        for wake, _ in list(self.members.values()):
            wake(task_ids, source)

    def _wanted(self) -> bool:
        return any(wanted() for _, wanted in self.members.values())


# While a handler uses it: its key is not weak.
_hubs: WeakValueDictionary[tuple[Any, ...], _Hub] = WeakValueDictionary()
