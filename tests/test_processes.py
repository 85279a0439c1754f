"""Real processes over HTTP: replicas are killed, stopped and restarted under open streams.

The replicas are the demo's, the clients the SDK's own. A client whose stream breaks subscribes
again through another replica and folds what it gets: a snapshot replaces what it holds, a
later event is added. At the end its fold has to be the task as stored.

`CLUSTER_SUBSCRIBE_TEST_CLIENTS` is the number of clients, 10 by default; where it is set, each
test is played on every database.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time

from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from a2a.client import A2AClientError, Client, ClientConfig, create_client
from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.types import GetTaskRequest, StreamResponse, SubscribeToTaskRequest, Task, TaskState
from a2a.utils.errors import A2AError, UnsupportedOperationError
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe._testing.messages import send_request

GIVEN = os.environ.get('CLUSTER_SUBSCRIBE_TEST_CLIENTS')
CLIENTS = int(GIVEN or '10')
EVERYWHERE = ['postgresql', 'sqlite', 'mysql'] if GIVEN else []
LIMIT = 60.0
"""Seconds after which something counts as hung; nothing waits for them to pass."""
NOISE = 'Task was destroyed', 'never awaited', 'Traceback', 'unclosed'
COMPLETED = TaskState.TASK_STATE_COMPLETED


class Server:
    """One replica: a process that may be stopped, killed and started again."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        self.name = name
        self.at = ''
        self._url = url
        self._log = folder / f'{name}.log'
        self._process: Process | None = None
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(LIMIT), trust_env=False)
        self.client: Client | None = None

    async def start(self) -> None:
        """Starts it and waits until it is ready."""
        with self._log.open('ab') as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, '-W', 'default', '-m', 'cluster_subscribe.cli.demo.replica'),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f'{self._url}\n'.encode())
        said = await asyncio.wait_for(self._process.stdout.readline(), LIMIT)
        self.at = f'http://127.0.0.1:{json.loads(said)["port"]}'
        self.client = await create_client(self.at, ClientConfig(httpx_client=self._http))

    async def end(self, how: signal.Signals = signal.SIGTERM) -> float:
        """Ends it and gives the seconds that it took."""
        self.client = None
        began = time.monotonic()
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(how)
            await asyncio.wait_for(process.wait(), LIMIT)
        return time.monotonic() - began

    async def aclose(self) -> None:
        """Ends it by force, and its client."""
        await self.end(signal.SIGKILL)
        await self._http.aclose()

    @property
    def complaints(self) -> list[str]:
        """What it wrote on stderr that no server should."""
        return [
            line
            for line in self._log.read_text().splitlines()
            if any(word in line for word in NOISE)
        ]


Replicas = list[Server]


@asynccontextmanager
async def replicas(url: str, folder: Path, names: str = 'ABC') -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        servers = [Server(name, url, folder) for name in names]
        for server in servers:
            stack.push_async_callback(server.aclose)
        engine = create_async_engine(url)
        await VersionedDatabaseTaskStore(engine).initialize()
        await engine.dispose()
        await asyncio.gather(*(server.start() for server in servers))
        yield servers


async def turn(server: Server, script: str, task: Task | None = None) -> Task:
    """Has a replica run a turn to its end; the task as stored."""
    assert server.client is not None
    task_id = task.id if task else ''
    async for response in server.client.send_message(send_request(script, task)):
        task_id = task_id or response.task.id or response.status_update.task_id
    return await server.client.get_task(GetTaskRequest(id=task_id))


class Follower:
    """A client that holds on to a task, through whichever replica answers."""

    def __init__(self, task: Task, servers: Replicas, seed: int) -> None:
        self._task = task
        self._servers = servers
        self._chance = random.Random(seed)
        self.parts: list[str] = []
        self.state = TaskState.TASK_STATE_UNSPECIFIED
        self.snapshots = 0
        self.server: Server | None = None
        self.broke: list[float] = []
        """When a stream broke, and was taken up again, in turn."""
        self._changed = asyncio.Condition()
        self.running = asyncio.create_task(self._follow())

    async def until(self, happened: Callable[['Follower'], object]) -> None:
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: happened(self)), LIMIT)

    @property
    def recoveries(self) -> list[float]:
        """Seconds without a stream, for each time that one broke."""
        return [end - begin for begin, end in zip(self.broke[::2], self.broke[1::2], strict=False)]

    async def _follow(self) -> None:
        while self.state != COMPLETED:
            self.server = self._chance.choice(
                [s for s in self._servers if s.client and s is not self.server]
                or [s for s in self._servers if s.client]
            )
            assert self.server.client is not None
            try:
                request = SubscribeToTaskRequest(id=self._task.id)
                async for response in self.server.client.subscribe(request):
                    await self._take(response)
            except UnsupportedOperationError:
                # It has ended meanwhile: the client asks for it.
                task = await self.server.client.get_task(GetTaskRequest(id=self._task.id))
                await self._take(StreamResponse(task=task))
            except (A2AClientError, A2AError, httpx.HTTPError):
                pass
            if self.state != COMPLETED and len(self.broke) % 2 == 0:
                self.broke.append(time.monotonic())

    async def _take(self, response: StreamResponse) -> None:
        kind = response.WhichOneof('payload')
        if kind == 'task':
            self.snapshots += 1
            self.parts = [part.text for one in response.task.artifacts for part in one.parts]
            self.state = response.task.status.state
            if len(self.broke) % 2:
                self.broke.append(time.monotonic())
        elif kind == 'artifact_update':
            self.parts += [part.text for part in response.artifact_update.artifact.parts]
        elif kind == 'status_update':
            self.state = response.status_update.status.state
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def followers(tasks: list[Task], servers: Replicas, count: int) -> AsyncIterator[Any]:
    """Clients that have all got their first snapshot."""
    made = [Follower(tasks[number % len(tasks)], servers, number) for number in range(count)]
    try:
        for follower in made:
            await follower.until(lambda f: f.snapshots)
        yield made
    finally:
        for follower in made:
            follower.running.cancel()
        await asyncio.gather(*(f.running for f in made), return_exceptions=True)


async def is_exact(made: list[Follower], total: int) -> None:
    for follower in made:
        await asyncio.wait_for(follower.running, LIMIT)
        assert follower.parts == [str(number) for number in range(total)]


def report(made: list[Follower], record: Callable[[str, object], None]) -> None:
    times = sorted(one for follower in made for one in follower.recoveries)
    if times:
        middle = times[len(times) // 2]
        record('recovery', f'{len(times)} breaks, median {middle:.3f} s, worst {times[-1]:.3f} s')
        print(f'{len(times)} breaks, median {middle:.3f} s, worst {times[-1]:.3f} s')


def chunks(first: int, count: int) -> str:
    return ' '.join(f'chunk={number}' for number in range(first, first + count))


@pytest.mark.parametrize('database_url', EVERYWHERE or ['postgresql'], indirect=True)
async def test_a_rolling_restart(
    database_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each replica in turn is stopped and started while the others run turns."""
    async with replicas(database_url, tmp_path) as servers:
        tasks = [await turn(server, 'work ret') for server in servers]
        async with followers(tasks, servers, CLIENTS) as made:
            said = 0
            for server in servers:
                others = [other for other in servers if other is not server]
                stopping = asyncio.create_task(server.end())
                for other in others * 2:
                    script = f'{chunks(said, 5)} ret'
                    await asyncio.gather(*(turn(other, script, task) for task in tasks))
                    said += 5
                assert await stopping < 5
                await server.start()
                for follower in made:
                    await follower.until(lambda f, said=said: len(f.parts) == said)
            await asyncio.gather(*(turn(servers[0], f'{chunks(said, 5)} done', t) for t in tasks))
            await is_exact(made, said + 5)
            assert any(follower.recoveries for follower in made)
            report(made, record_property)
        for server in servers:
            assert await server.end() < 5
            assert not server.complaints


@pytest.mark.parametrize('database_url', EVERYWHERE or ['postgresql'], indirect=True)
async def test_a_killed_replica(
    database_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Killed in mid-turn: the task stays as it was, and goes on at another replica."""
    async with replicas(database_url, tmp_path, 'AB') as servers:
        a, b = servers
        task = await turn(b, 'work ret')
        async with followers([task], servers, CLIENTS) as made:
            running = asyncio.create_task(turn(a, f'{chunks(0, 5)} sleep=600', task))
            for follower in made:
                await follower.until(lambda f: len(f.parts) == 5)
            await a.end(signal.SIGKILL)
            with pytest.raises((A2AClientError, A2AError, httpx.HTTPError)):
                await running
            task = await turn(b, f'{chunks(5, 5)} ret', task)
            await turn(b, f'{chunks(10, 5)} done', task)
            await is_exact(made, 15)
            assert any(follower.recoveries for follower in made)
            report(made, record_property)
        assert not a.complaints + b.complaints


@pytest.mark.parametrize('database_url', EVERYWHERE or ['sqlite'], indirect=True)
async def test_a_server_with_open_streams_stops_soon_and_without_noise(
    database_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Also while a turn runs there, and with a wakeup connection open."""
    async with replicas(database_url, tmp_path, 'AB') as servers:
        task = await turn(servers[1], 'work ret')
        async with followers([task], servers, CLIENTS) as made:
            running = asyncio.create_task(turn(servers[0], 'chunk=0 sleep=600', task))
            for follower in made:
                await follower.until(lambda f: f.parts)
            stops = await asyncio.gather(*(server.end() for server in servers))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for follower in made:
                follower.running.cancel()
        print(f'stopped after {max(stops):.3f} s')
        record_property('stopped', round(max(stops), 3))
        assert max(stops) < 5
        assert not [line for server in servers for line in server.complaints]
