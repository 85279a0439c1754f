"""Wakeups are hints: without one an event is late, never lost."""

import asyncio

from functools import partial
from typing import Any

import pytest

from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import SharedTailEventStream
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe.event_log import retry
from cluster_subscribe.event_log.wakeup import postgresql as postgresql_wakeup
from cluster_subscribe.event_log.wakeup import sqlite as sqlite_wakeup
from cluster_subscribe.event_log.wakeup.detached import detached
from tests.support.databases import terminate_backends
from tests.support.replicas import tail_of, wakeups, wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take

FAST = {'poll_interval': 0.1, 'reconcile_interval': 0.4}


@pytest.mark.parametrize('muted', ['timer only', 'publish', 'others', 'everything'])
async def test_a_muted_wakeup_costs_only_latency(
    muted: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(FAST)
    if muted == 'timer only':
        settings['wakeup'] = 'poll'  # type: ignore[assignment]
    if muted in ('publish', 'everything'):

        async def deaf(*_: object) -> None: ...

        monkeypatch.setattr(SharedTailEventStream, 'publish', deaf)
        monkeypatch.setattr(SharedTailEventStream, 'wake', lambda *_: None)
    if muted in ('others', 'everything'):

        async def broken(*_: object) -> None:
            raise OSError('no wakeups today')

        monkeypatch.setattr(postgresql_wakeup.PostgresqlWakeup, 'run', broken)
        monkeypatch.setattr(sqlite_wakeup.SqliteWakeup, 'run', broken)
    async with cluster(database_url, decorate=wrapping(**settings)) as lab:
        task = await lab.a.turn('ask')
        watches = await lab.watch(task)
        await lab.b.turn('work art=x done', task)
        for watch in watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == (
                *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED'),
                'closed',
            )


class Broken:
    """A wakeup whose connection cannot be had."""

    runs = 0

    async def run(self, *_: object) -> None:
        self.runs += 1
        await asyncio.sleep(0)
        raise TimeoutError('no answer')

    def stop(self) -> None: ...


async def test_wakeups_that_never_work_are_missed_with_one_warning(
    writer: Writer,
    tail: SharedTailEventStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However long each attempt takes."""
    monkeypatch.setattr(retry, 'MAX_PAUSE', 0.0)
    tail._reader._wakeup.source = broken = Broken()
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: broken.runs > 3)
    await writer.say('a')
    assert await take(subscriber) == ['art a']
    assert caplog.text.count('Wakeups of task_events are lost') == 1
    subscriber.close()


@pytest.fixture
async def on_postgresql(postgres_template: Any, request: pytest.FixtureRequest) -> str:
    return str(postgres_template.render_as_string(hide_password=False))


async def test_a_lost_listen_connection_is_rebuilt(on_postgresql: str) -> None:
    async with cluster(on_postgresql, decorate=wrapping(poll_interval=30)) as lab:
        task = await lab.a.turn('ask')
        (watch,) = await lab.watch(task, [lab.c])
        await eventually(lambda: wakeups(lab.c, 'listen') == 1)
        await terminate_backends(on_postgresql, "query LIKE '%pg_notify%'")
        await eventually(lambda: wakeups(lab.c, 'listen') == 2)
        await lab.b.turn('work done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline == ('Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED', 'closed')
        assert wakeups(lab.c, 'notify')


async def test_a_channel_that_carries_nothing_is_left_alone_for_a_while_with_one_warning(
    on_postgresql: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, trials = postgresql_wakeup.PostgresqlWakeup._send, 0

    async def swallow(*how: Any) -> None:
        nonlocal trials
        trials += 1
        if trials > 3:
            await send(*how)

    monkeypatch.setattr(postgresql_wakeup, '_ANSWER_TIMEOUT', 0.1)
    monkeypatch.setattr(postgresql_wakeup.PostgresqlWakeup, '_send', swallow)
    async with cluster(on_postgresql, decorate=wrapping(**FAST)) as lab:
        task = await lab.b.turn('ask')
        await eventually(lambda: caplog.text.count('did not come back') == 1)
        (watch,) = await lab.watch(task, [lab.c])
        await eventually(lambda: caplog.text.count('did not come back') == 2)
        waiting = tail_of(lab.c)._reader._wakeup.task
        await lab.c.turn('work ret', task)
        assert tail_of(lab.c)._reader._wakeup.task is waiting
        await lab.b.turn('art=x done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline == (
            *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED'),
            'closed',
        )
        assert trials == 2

        # A busy database may lose one; the next trial is heard.
        monkeypatch.setattr(postgresql_wakeup, '_RETRY_AFTER', 0.05)
        other = await lab.a.turn('ask')
        await lab.watch(other, [lab.a])
        await eventually(lambda: wakeups(lab.a, 'listen'))
        assert trials == 4
        assert caplog.text.count('did not come back') == 3


def test_notifications_are_joined_below_the_limit() -> None:
    ids = [f'{number:036}' for number in range(1000)] + ['x' * 9000]
    payloads = list(postgresql_wakeup._payloads(ids))
    assert all(len(payload.encode()) < 8000 for payload in payloads)
    assert '\n'.join(payloads).split('\n') == ids[:-1]
    assert len(payloads) == 5


async def test_a_hint_that_no_notification_can_carry_leaves_the_channel_alone(
    on_postgresql: str,
) -> None:
    async with cluster(on_postgresql, decorate=wrapping(poll_interval=1000)) as lab:
        task = await lab.b.turn('ask')
        (watch,) = await lab.watch(task, [lab.c])
        for replica in (lab.b, lab.c):
            tail_of(replica).wake('x', 'publish')
            await eventually(partial(wakeups, replica, 'listen'))
        for odd in ('a\0b', '\ud800', 'a\nb', 'x' * 9000):
            tail_of(lab.b).wake(odd, 'cancel')
        await lab.b.turn('work done', task)
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline[-2:] == ('COMPLETED', 'closed')
        assert wakeups(lab.b, 'listen') == 1


async def test_hints_do_not_pile_up_while_none_can_be_sent(
    on_postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_wakeup, '_MAX_PENDING', 10)
    engine = create_async_engine(on_postgresql)
    wakeup = postgresql_wakeup.PostgresqlWakeup(engine, 'task_events')
    for number in range(100):
        wakeup.notify(f'task-{number}')
    assert len(wakeup._pending) == 10


@pytest.mark.parametrize('database_url', ['sqlite', 'postgresql'], indirect=True)
async def test_waiting_for_wakeups_takes_no_connection_of_the_pool(database_url: str) -> None:
    """Not even for a moment: the agent may need the last one."""
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    connected = []
    sqlalchemy_event.listen(engine.sync_engine, 'connect', lambda *_: connected.append(1))
    async with engine.connect(), detached(engine) as (beside, _):
        assert (await beside.execute(text('SELECT 1'))).scalar() == 1
    assert len(connected) == 2
    await engine.dispose()


async def test_waiting_for_wakeups_leaves_the_dialect_to_be_set_up_by_the_pool(
    on_postgresql: str,
) -> None:
    """A connection beside the pool's first one met a dialect that was half set up."""

    async def listen(engine: AsyncEngine) -> None:
        async with detached(engine):
            pass

    async def read(engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            switched = await connection.execution_options(isolation_level='AUTOCOMMIT')
            await switched.execute(text('SELECT 1'))

    for _ in range(10):
        engine = create_async_engine(on_postgresql)
        await asyncio.gather(listen(engine), read(engine))
        await engine.dispose()
