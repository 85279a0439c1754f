"""Three replica processes, started together and always reaped."""

import asyncio
import json
import os
import signal
import sys
import tempfile

from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import IO, Final

from sqlalchemy.engine import URL

from cluster_subscribe.cli.ending import Failure

REPLICAS: Final = 'ABC'

_START: Final = 60.0
"""Seconds a replica may take to start on a busy machine."""
_GRACE: Final = 3.0
"""Seconds a replica may take to end before it is killed."""


@asynccontextmanager
async def trio(flag: str, database: URL) -> AsyncIterator['Trio']:
    """Three replica processes that have ended when the context is left, however it is left.

    Args:
        flag: The value of `CLUSTER_SUBSCRIBE` in their environment.
        database: The database they share.
    """
    made = Trio(flag, database)
    try:
        yield made
    finally:
        await made.end()


class Trio:
    """Replicas A, B and C over one database, with one value of the flag."""

    def __init__(self, flag: str, database: URL) -> None:
        self._flag = flag
        self._database = database.render_as_string(hide_password=False)
        self._processes: list[Process] = []
        self._starting: list[asyncio.Task[str]] = []

    def begin(self) -> None:
        """Starts the processes without waiting for them; a second call does nothing."""
        if not self._starting:
            self._starting = [asyncio.create_task(self._start(name)) for name in REPLICAS]

    async def ready(self) -> dict[str, str]:
        """Waits until all are ready, and gives their addresses by name.

        Raises:
            Failure: One did not start.
        """
        self.begin()
        return dict(zip(REPLICAS, await asyncio.gather(*self._starting), strict=True))

    async def end(self) -> None:
        """Ends the processes, by force if need be; the database stays yours."""
        try:
            for starting in self._starting:
                starting.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)
            self._signal(signal.SIGTERM)
            await self._ended(_GRACE)
        finally:
            # Windows has none, and ends a process by force at once.
            self._signal(getattr(signal, 'SIGKILL', signal.SIGTERM))
            await self._ended(_GRACE)

    async def _start(self, name: str) -> str:
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, '-m', 'cluster_subscribe.cli.demo.replica'),
                env=os.environ | {'CLUSTER_SUBSCRIBE': self._flag},
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
            )
            self._processes.append(process)
            assert process.stdin is not None  # noqa: S101 - for the type checker
            assert process.stdout is not None  # noqa: S101 - likewise
            process.stdin.write(f'{self._database}\n'.encode())
            try:
                said = await asyncio.wait_for(process.stdout.readline(), _START)
            except asyncio.TimeoutError:
                raise Failure(f'Replica {name} took more than {_START:g} seconds') from None
            if not said:
                await process.wait()
                raise Failure(f'Replica {name} did not start: {_last_line(log)}')
        return f'http://127.0.0.1:{json.loads(said)["port"]}'

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.returncode is None:
                # Its own methods may take the exit status away from the event loop, which
                # then complains on stderr.
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    async def _ended(self, limit: float) -> None:
        if waiting := [asyncio.ensure_future(process.wait()) for process in self._processes]:
            await asyncio.wait(waiting, timeout=limit)


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    return (log.read().decode(errors='replace').strip().splitlines() or ['it said nothing'])[-1]
