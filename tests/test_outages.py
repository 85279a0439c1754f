"""Outages: whatever happens on the way to the database, streams are late and stay exact.

An agent writes straight to the database while clients listen at its own replica and, through
a proxy that fails, at two others. Events come before, during and after the fault. At the end
each stream has to hold its snapshot and then the very rows of the log.
"""

import asyncio
import socket
import sqlite3
import time
import uuid

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from a2a.server.cluster import TaskVersion
from a2a.types import StreamResponse, Task
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Settings, SharedTailEventStream
from cluster_subscribe._testing import Cluster, Watch, label
from cluster_subscribe._testing.cluster import Replica, cluster
from cluster_subscribe.event_log import retry
from cluster_subscribe.event_log.schema import Schema
from cluster_subscribe.event_log.wakeup import postgresql as postgresql_wakeup
from cluster_subscribe.settings import WakeupMode
from tests.support.databases import renew_pool, terminate_backends
from tests.support.proxy import Proxy, proxy
from tests.support.replicas import log_statistics, parts, wakeups, wrapping
from tests.support.servers import own_mariadb, own_postgresql, pgbouncer, reachable
from tests.support.waiting import BACKSTOP, eventually

reconciling = partial(wrapping, reconcile_interval=3)
ROUND_TIMEOUT = 1.5
"""Seconds that a round gets here where its connection is half-open; ten by default."""
PART = 10
"""Events before, during and after a fault."""

on_a_network = pytest.mark.parametrize('database_url', ['postgresql', 'mysql'], indirect=True)
on_postgresql = pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)


def chunks(part: int) -> str:
    return ' '.join(f'chunk={number}' for number in range(part * PART, (part + 1) * PART))


SCRIPT = f'work {chunks(0)} wait=before {chunks(1)} wait=during {chunks(2)} done'


def reconnects(replica: Replica) -> int:
    return log_statistics(replica).reconnects


async def told(watch: Watch, number: int) -> None:
    """Waits until a stream has carried a chunk."""
    assert await watch.until(lambda w: f'chunk {number}' in w.told, BACKSTOP), watch.timeline


@dataclass
class Scene:
    """Agents and clients beside the database, clients behind a proxy."""

    near: Cluster
    far: Cluster
    proxy: Proxy
    took: Callable[[float], None]

    async def begin(self) -> None:
        """Lets the agent do its first part, then subscribes."""
        self.task = await self.near.a.start(SCRIPT).at('before')
        self.watches = [
            *await self.near.watch(self.task, [self.near.a]),
            *await self.far.watch(self.task, [self.far.b, self.far.c]),
        ]
        self.late = self.watches[1:]

        # A reader that has not begun would lose its connection while it prepares.
        far = self.far.b, self.far.c
        await eventually(lambda: all(log_statistics(replica).rounds > 1 for replica in far))

    @property
    def failures(self) -> int:
        """Rounds that failed at the far replicas."""
        return reconnects(self.far.b) + reconnects(self.far.c)

    async def go_on(self) -> None:
        """Lets the agent do its second part, which its own replica sees."""
        self.near.gates.open('before')
        await self.near.gates.reached('during')
        await told(self.watches[0], 2 * PART - 1)

    async def recovered(self, since: float) -> None:
        """Waits until the far streams carry what was said, and notes how long they took."""
        for watch in self.late:
            await told(watch, 2 * PART - 1)
        self.took(time.monotonic() - since)

    async def end(self) -> None:
        """Lets the agent finish and compares every stream with the log."""
        self.near.gates.open('before', 'during')
        for watch in self.watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
        await is_exact(self.near, self.task, self.watches)


async def is_exact(lab: Cluster, task: Task, watches: list[Watch]) -> None:
    """Each stream holds its snapshot and then exactly the later rows of the log."""
    async with lab.a.engine.connect() as connection:
        rows = await connection.execute(
            text('SELECT event_data FROM task_events WHERE task_id = :id ORDER BY task_version'),
            {'id': task.id},
        )
        log = [of_row(data) for (data,) in rows]
    for watch in watches:
        assert watch.ending == 'closed', watch.timeline
        snapshot, *later = watch.told
        assert snapshot == 'Task(WORKING)'
        assert later == log[len(log) - len(later) :]
        assert [int(part.text) for event in watch.events for part in parts(event)] == [
            *range(3 * PART)
        ]


def of_row(data: bytes) -> str:
    response = StreamResponse.FromString(data)
    return label(getattr(response, str(response.WhichOneof('payload'))))


@pytest.fixture
def took(record_property: Callable[[str, object], None]) -> Callable[[float], None]:
    """Notes a recovery time in the report of the test run."""

    def note(seconds: float) -> None:
        record_property('recovery', round(seconds, 3))
        print(f'recovered after {seconds:.3f} s')

    return note


Setting = Callable[..., Any]


@pytest.fixture
def scene(database_url: str, took: Callable[[float], None]) -> Setting:
    """Makes a scene behind a proxy; `settings` are those of the far side."""

    @asynccontextmanager
    async def make(
        settings: dict[str, Any] | None = None, driver: str = 'asyncpg', **engine: Any
    ) -> AsyncIterator[Scene]:
        far_side = partial(
            cluster,
            decorate=reconciling(**(settings or {})),
            engine_options=engine,
        )
        async with (
            proxy(database_url) as relay,
            cluster(database_url, decorate=reconciling()) as near,
            far_side(relay.url.replace('asyncpg', driver)) as far,
        ):
            made = Scene(near, far, relay, took)
            await made.begin()
            try:
                yield made
            finally:
                # An engine says farewell on each connection, and waits for an answer.
                relay.reset()

    return make


# The network.


@on_a_network
async def test_reset_connections(scene: Setting) -> None:
    async with scene() as play:
        play.proxy.reset(down=True)
        await play.go_on()
        await eventually(lambda: reconnects(play.far.b) and reconnects(play.far.c))
        play.proxy.heal()
        await play.recovered(since=time.monotonic())
        await play.end()


@on_a_network
async def test_connections_that_are_reset_in_mid_answer_again_and_again(
    scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A driver whose connection is reset in the middle of its greeting may wait for the rest.
    monkeypatch.setattr(retry, 'ROUND_TIMEOUT', ROUND_TIMEOUT)
    async with scene() as play:
        for words in (1, 20, 200, 2000):
            play.proxy.reset_after(words)
            if words == 20:
                await play.go_on()
            await eventually(lambda: play.proxy.has_reset)
        await play.recovered(since=time.monotonic())
        assert play.failures
        await play.end()


async def test_an_outage_of_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a round has failed, the next one is due as soon as after a few."""
    monkeypatch.setattr(retry, 'MAX_PAUSE', 0.0)
    with socket.create_server(('127.0.0.1', 0)) as nobody:
        port = nobody.getsockname()[1]
    engine = create_async_engine(f'postgresql+asyncpg://nobody@127.0.0.1:{port}/nowhere')
    stream = SharedTailEventStream(engine, settings=Settings(wakeup=WakeupMode.POLL))
    events = stream.subscribe('task', after=TaskVersion(1), owner='user')
    reading = asyncio.ensure_future(anext(events))
    await eventually(lambda: reading.done() or stream.statistics().reconnects > 1100)
    assert not reading.done(), reading.exception()
    reading.cancel()
    await asyncio.wait([reading])
    await stream.aclose()
    await engine.dispose()


@on_a_network
async def test_a_stalled_and_slow_network(scene: Setting) -> None:
    async with scene() as play:
        play.proxy.stall()
        await play.go_on()
        play.proxy.delay = 0.05
        play.proxy.heal()
        await play.recovered(since=time.monotonic())
        await play.end()


@pytest.mark.parametrize(
    ('database_url', 'ping'),
    [('postgresql', False), ('postgresql', True), ('mysql', False), ('mysql', True)],
    indirect=['database_url'],
)
async def test_half_open_connections(
    ping: bool, scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers on the connections of before, and no reset says so."""
    monkeypatch.setattr(retry, 'ROUND_TIMEOUT', ROUND_TIMEOUT)
    async with scene(pool_pre_ping=ping) as play:
        began = time.monotonic()
        play.proxy.swallow()
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


@on_postgresql
async def test_half_open_connections_under_psycopg(
    scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its close() is a coroutine, and waits for the query under way."""
    pytest.importorskip('psycopg')

    async def no_advice(_schema: Schema) -> None: ...

    monkeypatch.setattr(Schema, 'advise', no_advice)
    monkeypatch.setattr(retry, 'ROUND_TIMEOUT', ROUND_TIMEOUT)
    async with scene(driver='psycopg') as play:
        began = time.monotonic()
        play.proxy.swallow()
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


@on_postgresql
async def test_a_listen_connection_that_falls_silent_is_rebuilt(
    scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_wakeup, '_IDLE_AFTER', 0.2)
    monkeypatch.setattr(postgresql_wakeup, '_ANSWER_TIMEOUT', 0.5)
    async with scene({'poll_interval': 1000}) as play:
        far = play.far.b, play.far.c
        await eventually(lambda: all(wakeups(replica, 'listen') for replica in far))
        began = time.monotonic()
        play.proxy.swallow(b'LISTEN')
        await eventually(lambda: all(wakeups(replica, 'listen') > 1 for replica in far))
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


# The database.


@on_postgresql
@pytest.mark.parametrize('wakeup', ['auto', 'poll'])
async def test_terminated_backends(scene: Setting, database_url: str, wakeup: str) -> None:
    """All connections of all replicas, the agent's too, LISTEN included.

    Without LISTEN nobody else meets the dead connections before the reader does.
    """
    async with scene({'wakeup': wakeup}) as play:
        listening = [play.near.a, *([play.far.b, play.far.c] if wakeup == 'auto' else [])]
        await eventually(lambda: all(wakeups(replica, 'listen') for replica in listening))
        began = time.monotonic()
        await terminate_backends(database_url)
        # The SDK's store would fail the turn on a dead connection.
        await renew_pool(play.near.a.engine)
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


@pytest.mark.parametrize(
    'server', [pytest.param(own_postgresql, id='postgresql'), pytest.param(own_mariadb, id='mysql')]
)
async def test_a_restarted_database(
    server: Callable[[Path], AbstractContextManager[tuple[str, Callable[[str], None]]]],
    took: Callable[[float], None],
) -> None:
    """Stopped and started, then killed and started, under open streams."""
    # The SDK's store would fail the turn on a dead connection.
    options = {'pool_pre_ping': True}
    with (
        TemporaryDirectory(prefix='cluster-subscribe-') as folder,
        server(Path(folder)) as (url, restart),
    ):
        async with cluster(url, decorate=reconciling(), engine_options=options) as lab:
            task = await lab.a.start(SCRIPT).at('before')
            watches = await lab.watch(task)
            for how, gate, last in (
                ('fast', 'before', 2 * PART - 1),
                ('immediate', 'during', 3 * PART - 1),
            ):
                await asyncio.to_thread(restart, how)
                began = time.monotonic()
                lab.gates.open(gate)
                for watch in watches:
                    await told(watch, last)
                took(time.monotonic() - began)
            for watch in watches:
                assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
            await is_exact(lab, task, watches)


async def test_a_locked_sqlite_file(sqlite_url: str, took: Callable[[float], None]) -> None:
    options = {'connect_args': {'timeout': 0.1}}
    async with cluster(sqlite_url, decorate=reconciling(), engine_options=options) as lab:
        task = await lab.a.start(SCRIPT).at('before')
        watches = await lab.watch(task)
        file = str(make_url(sqlite_url).database)
        with closing(sqlite3.connect(file, timeout=BACKSTOP, check_same_thread=False)) as holder:
            await asyncio.to_thread(holder.execute, 'BEGIN EXCLUSIVE')
            await eventually(lambda: all(reconnects(replica) > 1 for replica in lab.replicas))
            holder.rollback()
        began = time.monotonic()
        lab.gates.open('before')
        for watch in watches:
            await told(watch, 2 * PART - 1)
        took(time.monotonic() - began)
        lab.gates.open('during')
        for watch in watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
        await is_exact(lab, task, watches)


@on_postgresql
async def test_pgbouncer_in_transaction_mode(
    database_url: str,
    tmp_path: Path,
    took: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No LISTEN gets through, and two statements in a row may meet two backends."""
    monkeypatch.setattr(postgresql_wakeup, '_ANSWER_TIMEOUT', 0.5)
    options = {
        'connect_args': {
            'statement_cache_size': 0,
            'prepared_statement_cache_size': 0,
            'prepared_statement_name_func': lambda: f'__asyncpg_{uuid.uuid4()}__',
        }
    }
    with pgbouncer(make_url(database_url), tmp_path) as url:
        await reachable(url)
        async with cluster(url, decorate=reconciling(), engine_options=options) as lab:
            tasks = [await lab.a.start(SCRIPT).at('before') for _ in range(8)]
            watches = [await lab.watch(task) for task in tasks]
            lab.gates.open('before', 'during')
            began = time.monotonic()
            for task, streams in zip(tasks, watches, strict=True):
                for watch in streams:
                    assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
                await is_exact(lab, task, streams)
            took(time.monotonic() - began)
            # Once is how a reader learns that there is a pooler.
            assert all(reconnects(replica) <= 1 for replica in lab.replicas)


async def test_a_stream_that_failed_to_reconcile_tries_again(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At INPUT_REQUIRED the store says whether the stream may end; here it is away twice."""
    async with cluster(sqlite_url, decorate=reconciling(poll_interval=0.05)) as lab:
        task = await lab.a.start('work wait=before ask').at('before')
        watch = await lab.b.watch(task)
        read, failures = lab.b.store.get, [OSError('away'), OSError('away')]

        async def get(*how: Any) -> Any:
            if failures:
                raise failures.pop()
            return await read(*how)

        monkeypatch.setattr(lab.b.store, 'get', get)
        lab.gates.open('before')
        assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline
        assert watch.timeline == ('Task(WORKING)', 'INPUT_REQUIRED', 'closed')
