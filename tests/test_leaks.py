"""Subscriptions that end anywhere, in any way, leave nothing: in process, over SSE, over gRPC.

`CLUSTER_SUBSCRIBE_TEST_SUBSCRIPTIONS=10000 pytest -rP tests/test_leaks.py` is the long run.
"""

import asyncio
import gc
import logging
import os
import random

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn

from a2a.auth.user import User
from a2a.client import ClientConfig, ClientFactory
from a2a.server.request_handlers import GrpcHandler
from a2a.server.request_handlers.grpc_handler import DefaultGrpcServerCallContextBuilder
from a2a.server.routes import DefaultServerCallContextBuilder, create_jsonrpc_routes
from a2a.types import SubscribeToTaskRequest
from a2a.types.a2a_pb2_grpc import A2AServiceStub, add_A2AServiceServicer_to_server
from sqlalchemy import event
from starlette.applications import Starlette
from starlette.requests import Request

from cluster_subscribe import ClusterSubscribeHandler
from cluster_subscribe._testing import Cluster, Replica
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import agent_card, caller
from cluster_subscribe.event_log.subscriber import Subscriber
from cluster_subscribe.subscription.rules import StreamState
from tests.support.replicas import wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer

ASKED = int(os.environ.get('CLUSTER_SUBSCRIBE_TEST_SUBSCRIPTIONS', '0'))
"""Subscriptions of a long run; over HTTP and gRPC a fifth of it."""
AT_ONCE = 25
MOST_GROWTH = 4 * 2**20
"""Bytes of resident memory that a long run may add after its warm-up."""

Open = Callable[[], AsyncIterator[Any]]
"""Subscribes anew."""


class Endings:
    """Reads a few events of a subscription, or none, and then ends it in a way of chance."""

    def __init__(self, seed: int, timeout: float | None) -> None:
        self._chance = random.Random(seed)
        self._timeout = timeout
        self.counted: Counter[str] = Counter()

    async def play(self, subscribe: Open) -> None:
        """Opens one subscription and ends it."""
        how = self._chance.choice([self.close, self.cancel, self.time_out, self.drop])
        self.counted[how.__name__] += 1
        await how(subscribe())

    async def close(self, events: Any) -> None:
        """The generator is closed, by whoever reads from it."""
        await self._read(events)
        await events.aclose()

    async def cancel(self, events: Any) -> None:
        """The reading task is cancelled, after some turns of the loop."""
        await leave(events, self._chance.choice([0, 1, 2, 3, 5, 10, 50]), self._timeout)

    async def time_out(self, events: Any) -> None:
        """The reader's time is up."""
        reading = asyncio.ensure_future(_exhaust(events))
        await asyncio.wait([reading], timeout=self._chance.uniform(0, 0.03))
        await cancelled(reading, self._timeout)

    async def drop(self, events: Any) -> None:
        """Nobody closes the generator: the garbage collector meets it."""
        await self._read(events)

    async def _read(self, events: Any) -> None:
        for _ in range(self._chance.choice([0, 1, 1, 2, 5])):
            await anext(events)


async def leave(events: AsyncIterator[Any], turns: int, timeout: float | None = None) -> None:
    """Reads, and is cancelled after so many turns of the loop."""
    reading = asyncio.ensure_future(_exhaust(events))
    while turns and not reading.done():
        turns -= 1
        await asyncio.sleep(0)
    await cancelled(reading, timeout)


async def cancelled(reading: asyncio.Task[None], timeout: float | None) -> None:
    """Cancels a reader; again whenever its timeout, in seconds, is over."""
    while not reading.done():
        reading.cancel()
        await asyncio.wait([reading], timeout=timeout)
    assert reading.cancelled()


async def _exhaust(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass
    raise AssertionError('A stream ended before it was ended')


class Ledger:
    """What a replica holds of its subscriptions."""

    def __init__(self, replica: Replica) -> None:
        self._handler = replica.handler
        self._pool: Any = replica.engine.pool

    def held(self) -> dict[str, int]:
        """What must be nothing between subscriptions."""
        assert isinstance(self._handler, ClusterSubscribeHandler)
        told = self._handler.statistics()
        assert told.event_log is not None
        return {
            'open subscriptions': told.open_subscriptions,
            'open in the event log': told.event_log.open_subscriptions,
            'watched tasks': told.event_log.watched_tasks,
            'connections': self._pool.checkedout(),
            'active requests': self._handler._ClusterSubscribeHandler__local_tasks.active_requests,
            'tasks': sum(map(_lasts_no_longer_than_a_subscription, asyncio.all_tasks())),
            'subscribers': sum(
                isinstance(one, Subscriber | StreamState) for one in gc.get_objects()
            ),
        }

    async def nothing_held(self) -> None:
        """Waits until nothing is."""
        for _ in range(100):
            gc.collect()
            held = self.held()
            if not any(held.values()):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f'{held} {asyncio.all_tasks()}')


def _lasts_no_longer_than_a_subscription(task: asyncio.Task[Any]) -> bool:
    name = task.get_name()
    # The sweep lasts as long as the handler; a LISTEN connection lingers for half a minute.
    return name.startswith('cluster-subscribe: ') and not name.endswith(
        ('sweep', 'wakeups of task_events')
    )


def resident() -> int:
    """Bytes of memory, where the system says."""
    with suppress(OSError):
        return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    return 0


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test that logs anything above DEBUG."""
    yield
    loud = [
        one.getMessage()
        for one in caplog.get_records('call')
        # The SDK's server is loud about a client that leaves before it was read.
        if one.levelno > logging.DEBUG and not one.name.startswith('a2a.')
    ]
    # Said where another test of this process created the tables before us.
    assert not [said for said in loud if 'slow without an index' not in said]


@asynccontextmanager
async def emitting(writer: Writer) -> AsyncIterator[None]:
    """Task `task` emits, as fast as the database lets it, while the scene lasts."""
    await writer.begin()
    stop = asyncio.Event()

    async def emit() -> None:
        while not stop.is_set():
            await writer.say('x')

    emitter = asyncio.ensure_future(emit())
    try:
        yield
    finally:
        stop.set()
        await emitter


async def leave_nothing(
    subscribe: Open, ledger: Ledger, count: int, *, timeout: float | None = None
) -> str:
    """Opens and ends so many subscriptions, and looks at what is left.

    Args:
        subscribe: Opens one.
        ledger: Looks.
        count: How many.
        timeout: Seconds after which a cancellation counts as swallowed by others than us,
            and is tried again.

    Returns:
        The figures.
    """
    endings = Endings(count, timeout)
    start = 0
    for number in range(0, count, AT_ONCE):
        await asyncio.gather(*(endings.play(subscribe) for _ in range(AT_ONCE)))
        if number == count // 4 // AT_ONCE * AT_ONCE:
            await ledger.nothing_held()
            start = resident()
    await ledger.nothing_held()
    grown = resident() - start
    figures = f'{dict(endings.counted)}, resident memory {grown / 2**20:+.1f} MiB, {ledger.held()}'
    assert len(endings.counted) == 4
    assert not ASKED or grown < MOST_GROWTH, figures
    return figures


@pytest.fixture
async def lab(writer: Writer) -> AsyncIterator[Cluster]:
    url = writer.engine.url.render_as_string(hide_password=False)
    async with cluster(url, decorate=wrapping(poll_interval=0.02)) as made:
        yield made


REQUEST = SubscribeToTaskRequest(id='task')


@pytest.mark.usefixtures('quiet')
@pytest.mark.timeout(max(60, ASKED / 5))
async def test_in_process_nothing_is_left(lab: Cluster, writer: Writer) -> None:
    async with emitting(writer):
        figures = await leave_nothing(
            lambda: lab.c.handler.on_subscribe_to_task(REQUEST, caller()),
            Ledger(lab.c),
            ASKED or 125,
        )
    print(f'\nin process, {writer.engine.dialect.name}: {figures}')


async def test_a_client_that_leaves_in_mid_query_costs_no_connection(
    lab: Cluster, writer: Writer
) -> None:
    """A query that is cancelled takes its connection with it, so none of ours ever is."""
    await writer.begin()
    engine, lost = lab.c.engine, []
    for name in ('invalidate', 'close'):
        event.listen(engine.sync_engine, name, lambda *_: lost.append(1))
    pool: Any = engine.pool
    for turns in range(100):
        await leave(lab.c.handler.on_subscribe_to_task(REQUEST, caller()), turns)
        await eventually(lambda: not pool.checkedout())
    assert not lost


class Known(DefaultServerCallContextBuilder):
    """Lets every caller be the lab's user."""

    def build_user(self, request: Request) -> User:
        return caller().user


class KnownToGrpc(DefaultGrpcServerCallContextBuilder):
    """Lets every caller be the lab's user."""

    def build_user(self, context: 'grpc.aio.ServicerContext[Any, Any]') -> User:
        return caller().user


@asynccontextmanager
async def over_sse(lab: Cluster) -> AsyncIterator[Open]:
    routes = create_jsonrpc_routes(lab.c.handler, '/', context_builder=Known())
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan='off')
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server._serve())
    await eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    timeout, limits = httpx.Timeout(BACKSTOP), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
        factory = ClientFactory(ClientConfig(httpx_client=http))
        client = factory.create(agent_card(f'http://127.0.0.1:{port}/'))
        yield lambda: client.subscribe(REQUEST)
    server.should_exit = True
    await serving


@asynccontextmanager
async def over_grpc(lab: Cluster) -> AsyncIterator[Open]:
    server = grpc.aio.server()
    add_A2AServiceServicer_to_server(  # type: ignore[no-untyped-call]
        GrpcHandler(lab.c.handler, KnownToGrpc()), server
    )
    port = server.add_insecure_port('127.0.0.1:0')
    await server.start()
    channel = grpc.aio.insecure_channel(f'127.0.0.1:{port}')
    stub = A2AServiceStub(channel)  # type: ignore[no-untyped-call]

    async def subscribe() -> AsyncIterator[Any]:
        # A generator of the SDK's client that is closed does not cancel its call.
        call = stub.SubscribeToTask(REQUEST)
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()

    yield subscribe
    await channel.close()
    await server.stop(grace=None)


@pytest.mark.usefixtures('quiet')
@pytest.mark.timeout(max(60, ASKED / 5))
@pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)
@pytest.mark.parametrize('serve', [over_sse, over_grpc])
async def test_nothing_is_left_of_remote_subscriptions(
    serve: Callable[[Cluster], AbstractAsyncContextManager[Open]],
    writer: Writer,
    lab: Cluster,
) -> None:
    async with emitting(writer), serve(lab) as subscribe:
        # On Python 3.10 the HTTP client swallows a cancellation now and then.
        figures = await leave_nothing(subscribe, Ledger(lab.c), ASKED // 5 or 50, timeout=1)
    print(f'\n{serve.__name__}, {writer.engine.dialect.name}: {figures}')
