"""Many streams of one task: what they read when it pauses, and what slow ones hold."""

import asyncio
import logging

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sqlalchemy import event as sqlalchemy_event

from cluster_subscribe import SharedTailEventStream
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe.event_log import buffer as event_log_buffer
from tests.support.replicas import wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take
from tests.test_reconcile import Reading, serving, subscribers

STREAMS = 200


@contextmanager
def statements(replica: Any) -> Iterator[list[str]]:
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        asked.append(statement)

    engine = replica.engine.sync_engine
    sqlalchemy_event.listen(engine, 'before_cursor_execute', note)
    yield asked
    sqlalchemy_event.remove(engine, 'before_cursor_execute', note)


def whole_tasks(asked: list[str]) -> int:
    return sum('artifacts' in statement for statement in asked)


async def test_a_question_closes_many_streams_without_a_read_of_the_task(
    database_url: str,
) -> None:
    async with cluster(database_url, decorate=wrapping(poll_interval=0.2)) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watches = await asyncio.gather(*(lab.b.watch(task) for _ in range(STREAMS)))
        tail: Any = lab.b.handler
        await eventually(lambda: tail.statistics().event_log.open_subscriptions == STREAMS)
        with statements(lab.b) as asked:
            lab.gates.open('1')
            for watch in watches:
                assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
                assert watch.timeline == ('Task(WORKING)', 'INPUT_REQUIRED', 'closed')
        assert whole_tasks(asked) == 0
        assert len(asked) < STREAMS / 2


async def test_a_snapshot_in_mid_stream_is_read_once_for_all(writer: Writer) -> None:
    url = writer.engine.url.render_as_string(hide_password=False)
    async with serving(url) as handler:
        await writer.begin()
        readings = [Reading(handler) for _ in range(20)]
        await eventually(lambda: len(subscribers(handler)) == 20)
        store: Any = handler.task_store
        with statements(store._db) as asked:
            await writer.say('a', logged=False)
            for reading in readings:
                assert await reading.up_to(2) == ['Task(WORKING)'] * 2
        assert 0 < whole_tasks(asked) <= 3


async def test_a_slow_reader_costs_so_many_bytes(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log_buffer, '_MAX_BYTES', 1000)
    subscriber = tail.open('task', await writer.begin(), 'user')
    said = [f'{number}'.ljust(400, '.') for number in range(8)]
    await writer.say(*said)
    await eventually(lambda: subscriber.log_has_more)
    for text in said:
        assert sum(size for _, _, size in subscriber._buffer) < 1000 + 1000
        assert await take(subscriber) == [f'art {text}']
    assert not subscriber._bytes
    subscriber.close()


async def test_streams_that_cannot_reconcile_say_so_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(sqlite_url, decorate=wrapping(poll_interval=0.05)) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watches = await asyncio.gather(*(lab.b.watch(task) for _ in range(5)))
        away, get = True, lab.b.store.get

        async def read(*how: Any) -> Any:
            if away:
                raise OSError('away')
            return await get(*how)

        monkeypatch.setattr(lab.b.store, 'get', read)
        tail: Any = lab.b.stock._event_stream
        await eventually(lambda: tail.statistics().open_subscriptions == 5)
        for subscriber in list(tail._reader._watched):
            subscriber.request_reconcile()
        rounds = tail.statistics().rounds
        await eventually(lambda: tail.statistics().rounds > rounds + 3)
        away = False
        lab.gates.open('1')
        for watch in watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
        said = [r for r in caplog.records if 'could not be read' in r.getMessage()]
        assert [r.levelno for r in said].count(logging.WARNING) == 1
