"""PostgreSQL: LISTEN and NOTIFY on one connection of the user's own engine."""

import logging
import uuid

from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe.event_log.wakeup.detached import detached
from cluster_subscribe.event_log.wakeup.source import WakeCallback
from cluster_subscribe.task_ids import is_valid_task_id
from cluster_subscribe.waiting import Signal, in_time

logger = logging.getLogger(__name__)

_MAX_PAYLOAD: Final = 7_900
"""Bytes in one notification; PostgreSQL takes fewer than 8,000."""
_MAX_PENDING: Final = 1_000
"""Task ids kept while they cannot be sent; what is beyond is left to the other replicas' timers."""
_IDLE_AFTER: Final = 30.0
"""Seconds after which an idle connection is closed if it is not wanted, and tested if it is."""
_ANSWER_TIMEOUT: Final = 5.0
"""Seconds within which the server must answer, and a notification to oneself must arrive."""
_RETRY_AFTER: Final = 300.0
"""Seconds until the next attempt where none arrived; the database may just have been busy."""


class PostgresqlWakeup:
    """Listens for task ids, and notifies of many at once, outside the agents' transactions."""

    def __init__(self, engine: AsyncEngine, table: str) -> None:
        self._engine = engine
        # PostgreSQL cuts identifiers at 63 bytes, and two tables must not share a channel.
        self._channel = f'cluster_subscribe_{sha256(table.encode()).hexdigest()[:16]}'
        self._pending: dict[str, None] = {}
        self._wake_event = Signal()
        self._stop = Signal()
        self._unreachable = False
        """Whether the last notification to oneself did not arrive."""

    def notify(self, task_id: str) -> None:
        """Tells the other replicas that a task changed.

        Where no notification can carry the id, or too many wait, the others' timers find it.
        """
        if (
            not (self._unreachable or self._stop.is_set())
            and len(self._pending) < _MAX_PENDING
            and is_valid_task_id(task_id)
            and '\n' not in task_id
        ):
            self._pending[task_id] = None
            self._wake_event.set()

    def stop(self) -> None:
        """Makes `run()` close its connection and return."""
        self._stop.set()
        self._wake_event.set()

    async def run(self, wake: WakeCallback, wanted: Callable[[], bool]) -> None:
        """Listens and notifies until stopped, or not wanted for a while.

        Raises:
            ConnectionError: The connection is lost.
            Exception: It cannot be opened.
        """
        while not await self._listen(wake, wanted):
            if not self._unreachable:
                logger.warning(
                    'A NOTIFY to this connection did not come back; behind a pooler in transaction '
                    'mode none can, so other replicas are heard at the poll interval only'
                )
            self._unreachable = True
            self._pending.clear()
            if await self._stop.within(_RETRY_AFTER) or not wanted():
                return

    async def _listen(self, wake: WakeCallback, wanted: Callable[[], bool]) -> bool:
        """As `run()`, once; `False` where a notification to oneself does not arrive."""
        async with detached(self._engine) as (_, raw):
            arrived = Signal()
            probe = f'?{uuid.uuid4().hex}'
            own = raw.get_server_pid()

            def receive(_connection: object, pid: int, _channel: str, payload: str) -> None:
                if payload == probe:
                    arrived.set()
                elif pid != own:
                    wake(payload.split('\n'), 'notify')

            raw.add_termination_listener(lambda _connection: self._wake_event.set())
            await _answered(raw, raw.add_listener(self._channel, receive))
            if not await self._hears_itself(raw, probe, arrived):
                return False
            self._unreachable = False
            # Whatever was committed before the channel was open is read now.
            wake(None, 'listen')
            await self._serve(raw, wanted)
        return True

    async def _hears_itself(self, raw: Any, probe: str, arrived: Signal) -> bool:
        await self._send(raw, probe)
        return await arrived.within(_ANSWER_TIMEOUT)

    async def _serve(self, raw: Any, wanted: Callable[[], bool]) -> None:
        while not self._stop.is_set():
            if not self._pending and not await self._wake_event.within(_IDLE_AFTER):
                if not wanted():
                    return
                await _test(raw)
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
        await in_time(work, _ANSWER_TIMEOUT)
    except TimeoutError:
        # Closing it in order would wait for an answer as well.
        raw.terminate()
        raise


async def _test(raw: Any) -> None:
    # On a half-open connection no notification would ever arrive, and no error either.
    await _answered(raw, raw.execute('SELECT 1'))


def _payloads(task_ids: Iterable[str]) -> Iterable[str]:
    """Joins ids into payloads that PostgreSQL takes, and leaves out an id that is too long."""
    part: list[str] = []
    size = 0
    for task_id in task_ids:
        length = len(task_id.encode()) + 1
        if length > _MAX_PAYLOAD:
            continue
        if size + length > _MAX_PAYLOAD:
            yield '\n'.join(part)
            part, size = [], 0
        part.append(task_id)
        size += length
    if part:
        yield '\n'.join(part)
