"""The shared tail delivers each event exactly once and in order, however slow or broken the way."""

import asyncio
import logging
import random

from typing import Any

import pytest

from a2a.server.cluster import DatabaseTaskEventStream, TaskVersion, VersionedEvent
from a2a.types import Task
from a2a.utils.errors import TaskNotFoundError
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import EventStreamEndedError, Settings, SharedTailEventStream
from cluster_subscribe._testing import Cluster, Decorate, label
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.event_log import queries as event_log
from tests.support.databases import renew_pool, terminate_backends
from tests.support.replicas import decorated, log_statistics, parts, wakeups, wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take

# Exactly once, in order.


async def test_random_joins_are_exact_at_every_replica(
    database_url: str, wrapped: Decorate, request: pytest.FixtureRequest
) -> None:
    """A stream that joins in the middle of a round gets that round's rows too."""
    events, joins = 100, 150 if 'postgresql' in request.node.name else 75
    async with cluster(database_url, decorate=wrapped) as lab:
        script = ' '.join(f'chunk={number}' for number in range(events))
        task = await lab.a.start(f'wait=1 {script} wait=2 done').task()
        gates, chance = lab.gates, random.Random(7)

        async def join(replica: Any, after: int) -> list[int]:
            await gates.commits(after)
            watch = replica.subscribe(task)
            await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline[-2:] == ('COMPLETED', 'closed'), watch.timeline
            return [int(part.text) for event in watch.events for part in parts(event)]

        joining = [
            asyncio.ensure_future(join(chance.choice(lab.replicas), chance.randrange(1, events)))
            for _ in range(joins)
        ]
        gates.open('1')
        await gates.reached('2')
        await eventually(
            lambda: (
                sum(decorated(replica).statistics().open_subscriptions for replica in lab.replicas)
                == joins
            )
        )
        gates.open('2')
        for numbers in await asyncio.gather(*joining):
            assert numbers == list(range(events))


async def test_a_subscriber_gets_what_follows_its_version(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    version = await writer.say('a', 'b')
    subscriber = tail.open('task', version, 'user')
    await writer.say('c', 'd')
    assert await take(subscriber, 2) == ['art c', 'art d']
    subscriber.close()
    assert tail.statistics().open_subscriptions == tail.statistics().watched_tasks == 0


async def test_an_event_is_decoded_once_and_never_shared(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    one, other = (tail.open('task', version, 'user') for _ in range(2))
    await writer.say('a')
    first = await asyncio.wait_for(one.next(), BACKSTOP)
    second = await asyncio.wait_for(other.next(), BACKSTOP)
    assert first is not None
    assert second is not None
    assert first.event == second.event
    first.event.artifact.artifact_id = 'changed'  # type: ignore[union-attr]
    assert label(second.event) == 'art a'
    for subscriber in (one, other):
        subscriber.close()


async def test_the_cursor_is_version_then_seq(writer: Writer, tail: SharedTailEventStream) -> None:
    """A sequence that hands out numbers in blocks allocates out of commit order."""
    version = await writer.begin()
    await writer.say('a', 'b')
    await writer.execute('UPDATE task_events SET seq = seq + 1000 WHERE task_version = 2')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber, 2) == ['art a', 'art b']
    subscriber.close()


async def test_a_slow_reader_costs_a_bounded_buffer_and_misses_nothing(
    writer: Writer, database_url: str
) -> None:
    engine = create_async_engine(database_url)
    settings = Settings(poll_interval=0.05, max_buffered_events=4)
    tail = SharedTailEventStream(engine, settings=settings)
    version = await writer.begin()
    slow, quick = (tail.open('task', version, 'user') for _ in range(2))
    for number in range(30):
        await writer.say(str(number))
        assert await take(quick) == [f'art {number}']
        assert len(slow._buffer) <= 4
    assert await take(slow, 30) == [f'art {number}' for number in range(30)]
    slow.close()
    quick.close()
    await tail.aclose()
    await engine.dispose()


async def test_more_tasks_than_one_statement_asks_for(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, 'PAGES_PER_STATEMENT', 3)
    monkeypatch.setattr(event_log, 'TASKS_PER_STATEMENT', 4)
    names = [f'task-{number}' for number in range(11)]
    subscribers = [tail.open(name, await writer.begin(name), 'user') for name in names]
    for name in names:
        await writer.say(name, task_id=name)
    for name, subscriber in zip(names, subscribers, strict=True):
        assert await take(subscriber) == [f'art {name}']
        subscriber.close()


# Without the decorator: a drop-in for the SDK's own event stream.


async def test_it_serves_the_sdk_as_an_event_stream(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    events = tail.subscribe('task', after=version)
    reading = asyncio.ensure_future(anext(events))
    await writer.say('a')
    await writer.say('b', logged=False)
    await writer.say('c')
    assert label((await asyncio.wait_for(reading, BACKSTOP)).event) == 'art a'
    assert label((await asyncio.wait_for(anext(events), BACKSTOP)).event) == 'art c'
    await writer.store.delete('task', caller())
    with pytest.raises(TaskNotFoundError):
        await asyncio.wait_for(anext(events), BACKSTOP)
    await events.aclose()


async def test_publish_never_waits_and_never_raises(tail: SharedTailEventStream) -> None:
    publishing = tail.publish(
        'no such task', VersionedEvent(event=Task(id='x'), version=TaskVersion.MISSING)
    )
    with pytest.raises(StopIteration):
        publishing.send(None)
    await tail.aclose()
    await tail.publish('x', VersionedEvent(event=Task(id='x'), version=TaskVersion.MISSING))


async def test_closing_ends_every_stream_with_an_error(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    subscriber = tail.open('task', await writer.begin(), 'user')
    reading = asyncio.ensure_future(subscriber.next())
    await asyncio.sleep(0)
    await tail.aclose()
    with pytest.raises(EventStreamEndedError):
        await reading
    with pytest.raises(EventStreamEndedError):
        tail.open('task', TaskVersion(1), 'user')
    assert tail.statistics().open_subscriptions == 0


# Outages.


@pytest.mark.cancels_queries
async def test_the_stream_survives_its_connections(
    database_url: str, request: pytest.FixtureRequest
) -> None:
    """F16: every connection of the replica's pool dies under a live subscription."""
    if 'postgresql' not in request.node.name:
        pytest.skip('only PostgreSQL lets a test kill another connection by name')
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        options = {'connect_args': {'server_settings': {'application_name': 'replica'}}}
        async with cluster(database_url, decorate=decorate, engine_options=options) as lab:
            task = await lab.a.turn('ask')
            (watch,) = await lab.watch(task, [lab.c])
            if name == 'ours':
                await eventually(lambda: wakeups(lab.c, 'listen'))
            await terminate_backends(database_url, "application_name = 'replica'")
            if name == 'stock':
                assert await watch.until(lambda w: w.ending, BACKSTOP)
                assert watch.ending not in ('closed', None)
                continue
            for replica in lab.replicas:
                await renew_pool(replica.engine)
            await lab.b.turn('work done', task)
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')
            await eventually(lambda: wakeups(lab.c, 'listen') == 2)


@pytest.mark.cancels_queries
async def test_an_exhausted_pool_delays_and_loses_nothing(database_url: str) -> None:
    """F17: a pool held for longer than its timeout ends a stock stream."""
    options = {'pool_size': 1, 'max_overflow': 0, 'pool_timeout': 0.2}
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        async with cluster(database_url, decorate=decorate, engine_options=options) as lab:
            task = await lab.a.turn('ask')
            (watch,) = await lab.watch(task, [lab.c])
            async with lab.c.engine.connect():
                if name == 'stock':
                    assert await watch.until(lambda w: w.ending, BACKSTOP)
                    assert watch.ending == 'TimeoutError'
                    continue
                await lab.b.turn('work done', task)
                await eventually(lambda: log_statistics(lab.c).reconnects)
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')


async def test_a_missing_table_ends_the_streams_with_one_clear_error(
    writer: Writer, tail: SharedTailEventStream, caplog: pytest.LogCaptureFixture
) -> None:
    version = await writer.begin()
    one, other = (tail.open('task', version, 'user') for _ in range(2))
    await writer.say('a')
    assert await take(one) == ['art a']
    await writer.execute('DROP TABLE task_versions')
    assert await take(other) == ['art a']
    for subscriber in (one, other):
        with pytest.raises(EventStreamEndedError, match='cannot be read'):
            await take(subscriber)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_the_cluster_under_test_uses_the_stock_event_stream() -> None:
    assert (
        Cluster('sqlite+aiosqlite:///never-opened.db').a.stock._event_stream.__class__
        is DatabaseTaskEventStream
    )


async def test_a_slow_stream_of_large_events_holds_few_of_them(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, 'PAGE_BYTES', 110_000)
    version = await writer.begin()
    names = [f'{number}-' + 'x' * 25_000 for number in range(12)]
    for name in names:
        await writer.say(name)
    subscriber = tail.open('task', version, 'user')
    await eventually(lambda: subscriber.log_has_more)
    assert len(subscriber._buffer) <= 3
    assert [f'art {name}' for name in names] == await take(subscriber, len(names))
    subscriber.close()
