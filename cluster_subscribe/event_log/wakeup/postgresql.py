"""PostgreSQL: LISTEN and NOTIFY on one connection of the user's own engine."""

import asyncio
import logging
import random
import uuid

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.background import within
from cluster_subscribe.event_log.wakeup.detached import detached

logger = logging.getLogger(__name__)

_PAYLOAD: Final = 7_900
"""Bytes in one notification; PostgreSQL takes fewer than 8,000."""
_LINGER: Final = 30.0
"""Seconds for which an unused connection is kept."""
_TRIAL: Final = 5.0
"""Seconds within which a notification to oneself must arrive."""
_LONGEST_PAUSE: Final = 5.0
"""Seconds between two attempts to connect, at most."""


class PostgresqlWakeup:
    """Wakes by task id. Notifies are sent outside the agents' transactions, coalesced."""

    notifies = True

    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._engine = engine
        # Identifiers end at 63 bytes; two tables must not share a channel by cutting.
        self._channel = f'cluster_subscribe_{sha256(table.encode()).hexdigest()[:16]}'
        self._pending: dict[str, None] = {}
        self._stir = asyncio.Event()
        self._failures = 0
        self._stopped = False
        """Set by `stop()`, and where notifications cannot arrive."""

    def notify(self, task_id: str) -> None:
        """Hints to the other replicas that a task moved."""
        if not self._stopped:
            self._pending[task_id] = None
            self._stir.set()

    def stop(self) -> None:
        """Makes `run()` close its connection and return."""
        self._stopped = True
        self._stir.set()

    async def run(
        self, wake: Callable[[Iterable[str] | None, str], None], wanted: Callable[[], bool]
    ) -> None:
        """Listens and notifies until stopped, or unused for a while."""
        while not self._stopped:
            try:
                async with detached(self._engine) as (_, raw):
                    if await self._converse(raw, wake, wanted):
                        return
                self._say_lost('closed by the server')
            except Exception as error:  # noqa: BLE001 - whatever it is, the timer serves meanwhile
                self._say_lost(error)
            if not self._stopped:
                self._failures += 1
                pause = min(_LONGEST_PAUSE, 0.05 * 2**self._failures)
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads the replicas

    async def _converse(
        self,
        raw: Any,
        wake: Callable[[Iterable[str] | None, str], None],
        wanted: Callable[[], bool],
    ) -> bool:
        """Uses one connection; `True` when it is no longer wanted, `False` when it died."""
        trial = f'?{uuid.uuid4().hex}'
        arrived = asyncio.Event()
        own = raw.get_server_pid()

        def hear(_connection: object, pid: int, _channel: str, payload: str) -> None:
            if payload == trial:
                arrived.set()
            elif pid != own:
                wake(payload.split('\n'), 'notify')

        raw.add_termination_listener(lambda _connection: self._stir.set())
        await raw.add_listener(self._channel, hear)
        await self._send(raw, trial)
        if not await within(arrived, _TRIAL):
            self._stopped = True
            self._pending.clear()
            logger.warning(
                'A NOTIFY to this connection did not come back; behind a pooler in transaction '
                'mode none can, so other replicas are heard at the poll interval only'
            )
            return True
        # Whatever happened before the channel was open is read now.
        self._failures = 0
        wake(None, 'listen')
        while not raw.is_closed() and not self._stopped:
            if not self._pending and not await within(self._stir, _LINGER) and not wanted():
                return True
            self._stir.clear()
            pending, self._pending = self._pending, {}
            for payload in _payloads(pending):
                await self._send(raw, payload)
        return False

    def _say_lost(self, reason: object) -> None:
        log = logger.debug if self._failures or self._stopped else logger.warning
        log('The LISTEN connection is lost (%s); the timer serves meanwhile', reason)

    async def _send(self, raw: Any, payload: str) -> None:
        await raw.execute('SELECT pg_notify($1, $2)', self._channel, payload)


def _payloads(task_ids: Iterable[str]) -> Iterable[str]:
    """Joins ids into payloads that PostgreSQL takes; one that is too long is left to the timer."""
    part: list[str] = []
    size = 0
    for task_id in task_ids:
        length = len(task_id.encode()) + 1
        if length > _PAYLOAD:
            continue
        if size + length > _PAYLOAD:
            yield '\n'.join(part)
            part, size = [], 0
        part.append(task_id)
        size += length
    if part:
        yield '\n'.join(part)
