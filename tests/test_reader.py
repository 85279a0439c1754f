"""The shared reader goes on, and rests, whatever its streams and its wakeups do."""

import asyncio

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from a2a.server.cluster import TaskVersion
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Settings, SharedTailEventStream
from cluster_subscribe._testing import label
from cluster_subscribe.background import Background, SharedReads
from cluster_subscribe.event_log.queries import EventLog
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take


async def test_a_stream_that_does_not_reconcile_keeps_the_reader_at_rest(sqlite_url: str) -> None:
    """A full page behind a gap was read again and again until the stream had looked."""
    writer, engine = Writer(sqlite_url), create_async_engine(sqlite_url)
    await writer.store.initialize()
    version = await writer.begin()
    await writer.say('unlogged', logged=False)
    await writer.say('a', 'b', 'c', 'd')
    settings = Settings(max_buffered_events=2, poll_interval=1000, wakeup='poll')
    tail = SharedTailEventStream(engine, settings=settings)
    subscriber = tail.open('task', version, 'user')
    await eventually(lambda: tail.statistics().rounds)
    for _ in range(10):
        # A read of its own is as long as a round: it would have had time for ten.
        await tail.stored(['task'])
    assert tail.statistics().rounds <= 2
    assert await take(subscriber) == ['reconcile']
    subscriber.close()
    await tail.aclose()
    for one in (writer.engine, engine):
        await one.dispose()


async def test_a_stream_that_begins_before_its_task_gets_the_events_of_whoever_creates_it(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    events = tail.subscribe('task', after=TaskVersion.MISSING)
    first = asyncio.ensure_future(anext(events))
    await eventually(lambda: tail.statistics().open_subscriptions)
    await writer.begin(user='alice')
    await writer.say('a', user='alice')
    assert label((await asyncio.wait_for(first, BACKSTOP)).event) == 'Task(WORKING)'
    assert label((await asyncio.wait_for(anext(events), BACKSTOP)).event) == 'art a'
    await events.aclose()


class ClosingWakeup:
    """Takes its time to close its connection once it is not wanted."""

    def __init__(self) -> None:
        self.runs = 0
        self.closing, self.closed = asyncio.Event(), asyncio.Event()
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    async def run(self, wake: Any, wanted: Callable[[], bool]) -> None:
        self.runs += 1
        while wanted() and not self.stopped:  # noqa: ASYNC110 - a function of the reader's
            await asyncio.sleep(0)
        self.closing.set()
        await self.closed.wait()


async def test_a_stream_that_joins_while_the_wakeup_closes_is_woken(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    """It was heard at the poll interval only, as long as it lasted."""
    wakeup: Any = ClosingWakeup()
    tail._reader._wakeup.source = wakeup
    version = await writer.begin()
    tail.open('task', version, 'user').close()
    await asyncio.wait_for(wakeup.closing.wait(), BACKSTOP)
    subscriber = tail.open('task', version, 'user')
    wakeup.closed.set()
    await eventually(lambda: wakeup.runs == 2)
    subscriber.close()


async def test_a_read_that_began_before_a_question_does_not_answer_it(
    writer: Writer, tail: SharedTailEventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under REPEATABLE READ it sees what was stored before, and the log as it was then."""
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: tail.statistics().rounds)
    asked, rounds, stored = asyncio.Event(), [], EventLog.stored

    async def during_a_round(log: EventLog, *how: Any) -> Any:
        found = await stored(log, *how)
        if not asked.is_set():
            subscriber.awaits_read = True
            tail._reader.schedule_read('task')
            rounds.append(tail.statistics().rounds)
            asked.set()
        return found

    def confirm() -> None:
        subscriber.awaits_read = False
        rounds.append(tail.statistics().rounds)

    monkeypatch.setattr(EventLog, 'stored', during_a_round)
    monkeypatch.setattr(type(subscriber), 'confirm_read', lambda _: confirm())
    tail._reader._check_due = True
    tail.wake('task', 'publish')
    await eventually(lambda: len(rounds) == 2)
    assert rounds[1] > rounds[0]
    subscriber.close()


async def test_nothing_is_read_for_those_who_have_left() -> None:
    reads: list[Sequence[str]] = []

    async def read(keys: Sequence[str]) -> Mapping[str, str]:
        reads.append(keys)
        return {}

    background = Background()
    shared: SharedReads[str, str] = SharedReads(background, read, 'read')
    asking = asyncio.ensure_future(shared.get('a'))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    await eventually(lambda: not shared._reading)
    assert not reads
    assert await shared.get('b') is None
    assert reads == [['b']]
    await background.aclose()
