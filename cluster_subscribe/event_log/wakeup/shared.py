"""One LISTEN connection for all handlers that share an engine, a table and an event loop."""

import asyncio

from collections.abc import Callable, Iterable
from typing import Any, Final
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.event_log.wakeup.postgresql import PostgresqlWakeup
from cluster_subscribe.event_log.wakeup.source import WakeCallback
from cluster_subscribe.waiting import Signal

_CHECK_WANTED_AFTER: Final = 30.0
"""Seconds after which one that waits for another's connection checks whether it is wanted."""


class SharedPostgresqlWakeup:
    """One handler's share of a `PostgresqlWakeup`: the first that runs has the connection."""

    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._engine = engine
        self._table = table
        self._connection: _SharedConnection | None = None
        self._holder_changed = Signal()
        self.stopped = False

    def notify(self, task_id: str) -> None:
        """Tells the other replicas, and the other handlers here, that a task changed."""
        self._join().notify(task_id, self)

    def stop(self) -> None:
        """Makes `run()` return soon, for good."""
        self.stopped = True
        self._holder_changed.set()
        if self._connection is not None and self._connection.holder is self:
            self._connection.wakeup.stop()

    def released(self) -> None:
        """Takes note that nobody has the connection any more."""
        self._holder_changed.set()

    async def run(self, wake: WakeCallback, wanted: Callable[[], bool]) -> None:
        """Has the connection, or waits until the one who has it releases it.

        Raises:
            Exception: As `PostgresqlWakeup.run()` does.
        """
        shared = self._join()
        shared.members[self] = wake, wanted
        try:
            while shared.holder is not None and not self.stopped:
                self._holder_changed.clear()
                await self._holder_changed.within(_CHECK_WANTED_AFTER)
                if not wanted():
                    return
            if not self.stopped:
                await shared.hold(self)
        finally:
            del shared.members[self]

    def _join(self) -> '_SharedConnection':
        if self._connection is None:
            key = asyncio.get_running_loop(), self._engine.sync_engine, self._table
            self._connection = _connections.get(key)
            if self._connection is None:
                self._connection = _connections[key] = _SharedConnection(self._engine, self._table)
        return self._connection


class _SharedConnection:
    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._engine, self._table = engine, table
        self.wakeup = PostgresqlWakeup(engine, table)
        self.members: dict[SharedPostgresqlWakeup, tuple[WakeCallback, Callable[[], bool]]] = {}
        self.holder: SharedPostgresqlWakeup | None = None

    async def hold(self, member: SharedPostgresqlWakeup) -> None:
        self.holder = member
        try:
            await self.wakeup.run(self._wake, self._wanted)
        finally:
            self.holder = None
            if member.stopped:
                self.wakeup = PostgresqlWakeup(self._engine, self._table)
            for other in self.members:
                other.released()

    def notify(self, task_id: str, sender: SharedPostgresqlWakeup) -> None:
        # The connection ignores notifications of its own, so these members are woken here.
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


# Weak values: an entry, and the engine in its key, are kept while a handler uses them.
_connections: WeakValueDictionary[tuple[Any, ...], _SharedConnection] = WeakValueDictionary()
