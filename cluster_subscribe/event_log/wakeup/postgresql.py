"""PostgreSQL: LISTEN and NOTIFY on one connection of the user's own engine."""

import logging
import uuid

from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.background import Signal, in_time
from cluster_subscribe.event_log.wakeup.detached import Wake, detached
from cluster_subscribe.task_ids import is_valid_task_id

logger = logging.getLogger(__name__)

_PAYLOAD: Final = 7_900
"""Bytes in one notification; PostgreSQL takes fewer than 8,000."""
_PENDING: Final = 1_000
"""Hints kept while they cannot be sent; the timer finds what the others are for."""
_LINGER: Final = 30.0
"""Seconds for which an unused connection is kept, and a silent one is trusted."""
_TRIAL: Final = 5.0
"""Seconds within which a notification to oneself, and each answer, must arrive."""
_DEAF: Final = 300.0
"""Seconds until another trial where none arrived; a database may just have been busy."""


class PostgresqlWakeup:
    """Wakes by task id. Notifies are sent outside the agents' transactions, coalesced."""

    notifies = True

    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._engine = engine
        # Identifiers end at 63 bytes; two tables must not share a channel by cutting.
        self._channel = f'cluster_subscribe_{sha256(table.encode()).hexdigest()[:16]}'
        self._pending: dict[str, None] = {}
        self._wake_event = Signal()
        self._stop = Signal()
        self._deaf = False
        """Whether the last trial did not come back."""

    def notify(self, task_id: str) -> None:
        """Hints to the other replicas that a task moved.

        Leaves to the timer what no notification can carry, and what is too much.
        """
        if (
            not (self._deaf or self._stop.is_set())
            and len(self._pending) < _PENDING
            and is_valid_task_id(task_id)
            and '\n' not in task_id
        ):
            self._pending[task_id] = None
            self._wake_event.set()

    def stop(self) -> None:
        """Makes `run()` close its connection and return."""
        self._stop.set()
        self._wake_event.set()

    async def run(self, wake: Wake, wanted: Callable[[], bool]) -> None:
        """Listens and notifies until stopped, or unused for a while.

        Raises:
            ConnectionError: The connection is lost.
            Exception: It cannot be had.
        """
        while not await self._listen(wake, wanted):
            if not self._deaf:
                logger.warning(
                    'A NOTIFY to this connection did not come back; behind a pooler in transaction '
                    'mode none can, so other replicas are heard at the poll interval only'
                )
            self._deaf = True
            self._pending.clear()
            if await self._stop.within(_DEAF) or not wanted():
                return

    async def _listen(self, wake: Wake, wanted: Callable[[], bool]) -> bool:
        """As `run()`; `False` where a notification to oneself does not arrive."""
        async with detached(self._engine) as (_, raw):
            heard = Signal()
            trial = f'?{uuid.uuid4().hex}'
            own = raw.get_server_pid()

            def hear(_connection: object, pid: int, _channel: str, payload: str) -> None:
                if payload == trial:
                    heard.set()
                elif pid != own:
                    wake(payload.split('\n'), 'notify')

            raw.add_termination_listener(lambda _connection: self._wake_event.set())
            await _answered(raw, raw.add_listener(self._channel, hear))
            await self._send(raw, trial)
            if not await heard.within(_TRIAL):
                return False
            self._deaf = False
            # Whatever happened before the channel was open is read now.
            wake(None, 'listen')
            await self._serve(raw, wanted)
        return True

    async def _serve(self, raw: Any, wanted: Callable[[], bool]) -> None:
        while not self._stop.is_set():
            if not self._pending and not await self._wake_event.within(_LINGER):
                if not wanted():
                    return
                # A connection that died without a word would never be missed.
                await _answered(raw, raw.execute('SELECT 1'))
            self._wake_event.clear()
            if raw.is_closed():
                raise ConnectionError('closed by the server')
            pending, self._pending = self._pending, {}
            for payload in _payloads(pending):
                await self._send(raw, payload)

    async def _send(self, raw: Any, payload: str) -> None:
        await _answered(raw, raw.execute('SELECT pg_notify($1, $2)', self._channel, payload))


async def _answered(raw: Any, work: Awaitable[object]) -> None:
    try:
        await in_time(work, _TRIAL)
    except TimeoutError:
        # A farewell would wait for an answer, too.
        raw.terminate()
        raise


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
