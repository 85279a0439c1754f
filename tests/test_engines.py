"""Engines as other people build them: whose connections they hand out, and what `wrap()` says."""

import asyncio
import logging

from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from a2a.server.agent_execution import RequestContext
from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.events import Event, EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.types import SendMessageRequest, SubscribeToTaskRequest
from sqlalchemy import NullPool, StaticPool, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import (
    ClusterSubscribeHandler,
    SharedTailEventStream,
    UnsupportedHandlerError,
    wrap,
)
from cluster_subscribe.cli.lab import ScriptedAgent, Watch
from cluster_subscribe.cli.lab.cluster import agent_card, caller, user_message


LIMIT = 20.0
"""Seconds after which a stream counts as hung."""


def handler_over(
    store: AsyncEngine, stream: AsyncEngine | None = None, agent: ScriptedAgent | None = None
) -> DefaultRequestHandler:
    return DefaultRequestHandler(
        agent_executor=agent or ScriptedAgent(),
        task_store=VersionedDatabaseTaskStore(store),
        event_stream=DatabaseTaskEventStream(stream or store),
        agent_card=agent_card('http://127.0.0.1'),
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


SHARING: dict[str, Any] = {
    'by default': ('sqlite+aiosqlite://', {}),
    'spelt out': ('sqlite+aiosqlite:///:memory:', {}),
    'a static pool': ('sqlite+aiosqlite:///{file}', {'poolclass': StaticPool}),
    'a shared cache': (
        'sqlite+aiosqlite:///file:{name}?mode=memory&cache=shared&uri=true',
        {'poolclass': StaticPool},
    ),
}


def sharing(how: str, folder: Path) -> AsyncEngine:
    url, options = SHARING[how]
    return create_async_engine(url.format(file=folder / 'a.db', name=folder.name), **options)


class Gated(ScriptedAgent):
    """Goes on once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        await super().execute(context, Until(event_queue, self.may))  # type: ignore[arg-type]


class Until:
    """Lets two events through, and the others once they may."""

    def __init__(self, queue: EventQueue, may: asyncio.Event) -> None:
        self._queue, self._may, self._count = queue, may, 0

    async def enqueue_event(self, event: Event) -> None:
        self._count += 1
        if self._count > 2:
            await self._may.wait()
        await self._queue.enqueue_event(event)


@pytest.mark.parametrize('how', ['by default', 'a static pool'])
@pytest.mark.parametrize('wrapped', [False, True])
async def test_a_shared_connection_keeps_every_event_of_an_agent(
    how: str, wrapped: bool, tmp_path: Path
) -> None:
    """A read of ours would roll back the agent's open transaction."""
    engine, agent = sharing(how, tmp_path), Gated()
    await VersionedDatabaseTaskStore(engine).initialize()
    stock = handler_over(engine, agent=agent)
    handler: Any = wrap(stock) if wrapped else stock
    script = ' '.join(f'chunk={number}' for number in range(200))
    sending = handler.on_message_send_stream(
        SendMessageRequest(message=user_message(f'work {script} done')), caller()
    )
    task = await anext(sending)
    sender = Watch(sending, 'sender')
    assert await sender.until(lambda w: 'WORKING' in w.told, LIMIT)
    events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
    watch = Watch(events, 'A')
    assert await watch.until(lambda w: w.told, LIMIT)
    agent.may.set()
    for one in (watch, sender):
        assert await one.until(lambda w: w.ending, LIMIT), one.timeline
        chunks = [told for told in one.told if told.startswith('chunk')]
        assert chunks == [f'chunk {number}' for number in range(200)]
        assert (one.told[-1], one.ending) == ('COMPLETED', 'closed')
    async with engine.connect() as connection:
        rows = await connection.execute(
            text('SELECT task_version FROM task_events ORDER BY task_version')
        )
        assert rows.scalars().all() == list(range(1, 204))
    await handler.aclose()
    await engine.dispose()


@pytest.mark.parametrize('how', SHARING)
@pytest.mark.parametrize('part', ['store', 'stream'])
async def test_a_handler_over_a_shared_connection_is_left_alone_with_one_warning(
    how: str, part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sharing(how, tmp_path)
    other = create_async_engine(f'sqlite+aiosqlite:///{tmp_path / "b.db"}')
    stock = handler_over(*((engine, other) if part == 'store' else (other, engine)))
    stream = stock._event_stream
    caplog.clear()
    assert wrap(stock) is stock
    assert stock._event_stream is stream
    (warning,) = warnings(caplog)
    assert 'share one connection' in warning
    assert 'SQLite file' in warning
    with pytest.raises(UnsupportedHandlerError, match='share one connection'):
        SharedTailEventStream(engine)


async def test_a_database_in_memory_with_a_cache_shared_by_connections_is_left_alone(
    tmp_path: Path,
) -> None:
    """Nobody waits for the locks of a shared cache: a read would fail the agent's save."""
    engine = create_async_engine('sqlite+aiosqlite:///file::memory:?cache=shared&uri=true')
    stock = handler_over(engine)
    assert wrap(stock) is stock


async def test_the_pool_is_what_counts_where_a_creator_opens_the_connections(
    tmp_path: Path,
) -> None:
    async def connect() -> aiosqlite.Connection:
        return await aiosqlite.connect(tmp_path / 'a.db')

    for pool, left_alone in ((NullPool, False), (StaticPool, True)):
        engine = create_async_engine('sqlite+aiosqlite://', async_creator=connect, poolclass=pool)
        assert isinstance(wrap(handler_over(engine)), ClusterSubscribeHandler) is not left_alone
