"""Handlers of one engine, table and loop share the connection that their wakeups need."""

import asyncio

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import Settings, SharedTailEventStream
from cluster_subscribe.event_log.wakeup import postgresql
from cluster_subscribe.event_log.wakeup.detached import detached
from tests.support.waiting import eventually
from tests.support.writer import Writer, take

pytestmark = pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)


def heard(tail: SharedTailEventStream, source: str) -> int:
    return tail.statistics().wakeups.get(source, 0)


@asynccontextmanager
async def tails(
    engine: AsyncEngine, count: int
) -> AsyncIterator[tuple[SharedTailEventStream, ...]]:
    # No event is found by the timer.
    settings = Settings(poll_interval=1000)
    made = tuple(SharedTailEventStream(engine, settings=settings) for _ in range(count))
    try:
        yield made
    finally:
        await asyncio.gather(*(tail.aclose() for tail in made))


async def publish(tail: SharedTailEventStream, writer: Writer, said: str) -> None:
    await writer.say(said)
    tail.wake('task', 'publish')


async def test_handlers_of_one_engine_share_a_connection_and_hear_each_other(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, engine = Writer(database_url), create_async_engine(database_url)
    version = await writer.begin()
    opened: list[AsyncEngine] = []

    def open_(engine: AsyncEngine) -> AbstractAsyncContextManager[Any]:
        opened.append(engine)
        return detached(engine)

    monkeypatch.setattr(postgresql, 'detached', open_)
    async with tails(engine, 3) as made:
        streams = [tail.open('task', version, 'user') for tail in made]
        await eventually(lambda: all(heard(tail, 'listen') for tail in made))
        await publish(made[1], writer, 'a')
        assert [await take(stream) for stream in streams] == [['art a']] * 3
        assert [heard(tail, 'notify') for tail in made] == [1, 0, 1]
        assert opened == [engine]
        for stream in streams:
            stream.close()
    await writer.engine.dispose()
    await engine.dispose()


async def test_another_handler_listens_when_the_one_that_does_is_closed(database_url: str) -> None:
    writer, engine = Writer(database_url), create_async_engine(database_url)
    elsewhere = create_async_engine(database_url)
    version = await writer.begin()
    async with tails(engine, 2) as (first, second), tails(elsewhere, 1) as (other,):
        first.open('task', version, 'user')
        await eventually(lambda: heard(first, 'listen'))
        stream = second.open('task', version, 'user')
        await publish(other, writer, 'a')
        await eventually(lambda: heard(second, 'notify'))
        assert await take(stream) == ['art a']
        await first.aclose()
        await eventually(lambda: heard(second, 'listen'))
        before = heard(second, 'notify')
        await publish(other, writer, 'b')
        await eventually(lambda: heard(second, 'notify') > before)
        assert await take(stream) == ['art b']
        stream.close()
    for one in (writer.engine, engine, elsewhere):
        await one.dispose()


async def test_a_handler_that_is_closed_leaves_the_others_their_connection(
    database_url: str,
) -> None:
    writer, engine = Writer(database_url), create_async_engine(database_url)
    version = await writer.begin()
    async with tails(engine, 2) as (first, second):
        stream = first.open('task', version, 'user')
        await eventually(lambda: heard(first, 'listen'))
        second.open('task', version, 'user')
        await publish(second, writer, 'a')
        assert await take(stream) == ['art a']
        await second.aclose()
        assert heard(first, 'listen') == 1
        await publish(first, writer, 'b')
        assert await take(stream) == ['art b']
        stream.close()
    await writer.engine.dispose()
    await engine.dispose()
