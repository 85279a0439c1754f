"""Replicas to measure, an agent that keeps a pace, and figures with their spread."""

import asyncio
import gc
import os
import tempfile
import time
import uuid

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.events import EventQueue
from a2a.server.request_handlers import RequestHandler
from a2a.types import (
    SendMessageConfiguration,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
)
from sqlalchemy import event, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Settings, wrap
from cluster_subscribe._testing.messages import (
    artifact_update,
    caller,
    new_task,
    status_update,
    user_message,
)
from tests.support.databases import execute
from tests.support.replicas import stock_over

T = TypeVar('T')
CONTEXT = caller()


@dataclass
class Figure:
    """One measured quantity, stock and ours, over several alternating runs."""

    name: str
    unit: str
    stock: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def cells(self) -> tuple[str, str, str]:
        """Median and spread of both, and their ratio."""
        both = bool(self.stock and self.ours and median(self.stock))
        ratio = f'{median(self.ours) / median(self.stock):.2f}' if both else ''
        return _spread(self.stock), _spread(self.ours), ratio

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {'name': self.name, 'unit': self.unit, 'stock': self.stock, 'ours': self.ours}


def _spread(values: list[float]) -> str:
    if not values:
        return ''
    return f'{median(values):.3g} ({min(values):.3g} to {max(values):.3g})'


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Pace(AgentExecutor):
    """Asks for input at first; then emits `count` events at `rate` a second and completes.

    Each event is an artifact that carries the moment it was enqueued.
    """

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Runs one turn."""
        rate, count = map(float, context.get_user_input().split())
        if context.current_task is None:
            await event_queue.enqueue_event(new_task(context))
        else:
            await event_queue.enqueue_event(status_update(context, TaskState.TASK_STATE_WORKING))
        began = time.perf_counter()
        for number in range(int(count)):
            await asyncio.sleep(max(0, began + (number + 1) / rate - time.perf_counter()))
            await event_queue.enqueue_event(
                artifact_update(context, 'tick', repr(time.perf_counter()))
            )
        state = TaskState.TASK_STATE_COMPLETED if count else TaskState.TASK_STATE_INPUT_REQUIRED
        await event_queue.enqueue_event(status_update(context, state))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Announces CANCELED, as agents should."""
        await event_queue.enqueue_event(status_update(context, TaskState.TASK_STATE_CANCELED))


class Server:
    """One replica with an engine of its own, stock or wrapped."""

    def __init__(self, url: str, *, ours: bool, **engine: Any) -> None:
        self.engine = create_async_engine(url, **engine)
        self.store = VersionedDatabaseTaskStore(self.engine)
        self.stock = stock_over(self.engine, agent=Pace())
        self.handler: RequestHandler = wrap(self.stock, settings=Settings()) if ours else self.stock

    async def send(self, script: str, task: Task | None = None, *, wait: bool = False) -> Task:
        """Begins a turn and returns its task as first told, or as it pauses."""
        message = user_message(script, task)
        answer = await self.handler.on_message_send(
            SendMessageRequest(
                message=message,
                configuration=SendMessageConfiguration(return_immediately=not wait),
            ),
            CONTEXT,
        )
        assert isinstance(answer, Task)
        return answer

    def subscribe(self, task: Task) -> Any:
        """Opens a stream."""
        return self.handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), CONTEXT)

    async def aclose(self) -> None:
        """Closes the handler and the engine."""
        await self.handler.aclose()  # type: ignore[attr-defined]
        await self.engine.dispose()


@asynccontextmanager
async def servers(
    url: str, count: int, *, ours: bool, **engine: Any
) -> AsyncIterator[list[Server]]:
    """Replicas over one database."""
    made = [Server(url, ours=ours, **engine) for _ in range(count)]
    await made[0].store.initialize()
    try:
        yield made
    finally:
        for server in made:
            await server.aclose()


async def lags(streams: Sequence[Any]) -> list[list[float]]:
    """Reads streams to their ends and tells how old each event was, in milliseconds.

    Only events that were enqueued after the last stream had its snapshot count.
    """
    await asyncio.gather(*(anext(stream) for stream in streams))
    joined = time.perf_counter()

    async def read(stream: Any) -> list[float]:
        ages = []
        async for one in stream:
            if isinstance(one, TaskArtifactUpdateEvent):
                enqueued = float(one.artifact.parts[0].text)
                if enqueued > joined:
                    ages.append((time.perf_counter() - enqueued) * 1000)
        return ages

    return list(await asyncio.gather(*map(read, streams)))


@asynccontextmanager
async def idle(
    server: Server,
    count: int,
    tasks: int = 1,
    *,
    holder: Server | None = None,
    size: int = 0,
) -> AsyncIterator[list[Task]]:
    """Subscribers that wait for paused tasks of some size, whose turns ran at the holder."""
    script = '1 0' + ' ' * size
    paused = [await (holder or server).send(script, wait=True) for _ in range(tasks)]
    readers = []

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    # By the handful: where the pool starves, one after the other takes minutes.
    for start in range(0, count, 10):
        numbers = range(start, min(start + 10, count))
        streams = [server.subscribe(paused[number % tasks]) for number in numbers]
        await asyncio.gather(*map(anext, streams))
        readers += [asyncio.ensure_future(read(stream)) for stream in streams]
    try:
        yield paused
    finally:
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)


class Counted:
    """Counts the statements of an engine."""

    def __init__(self, server: Server) -> None:
        self.statements = 0
        event.listen(server.engine.sync_engine, 'before_cursor_execute', self._count)

    def _count(self, *_: object) -> None:
        self.statements += 1


@asynccontextmanager
async def database(server: str | None) -> AsyncIterator[str]:
    """A database of the benchmark's own: a file, or one made on a server and dropped."""
    if server is None:
        with tempfile.TemporaryDirectory() as folder:
            url = f'sqlite+aiosqlite:///{folder}/tasks.db'
            await execute(url, 'PRAGMA journal_mode=WAL')
            yield url
        return
    name = f'cluster_subscribe_{uuid.uuid4().hex}'
    await execute(server, f'CREATE DATABASE {name}')
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        force = ' WITH (FORCE)' if make_url(server).get_backend_name() == 'postgresql' else ''
        await execute(server, f'DROP DATABASE {name}{force}')


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE')


async def timed(work: Awaitable[object]) -> float:
    """Microseconds that an awaitable takes."""
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1e6
