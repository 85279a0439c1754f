"""Reads of the stored task: how many, how often, and what a client is told when they fail."""

import asyncio
import logging

from typing import Any

import pytest

from a2a.server.cluster import StoredTask, TaskVersion
from a2a.server.context import ServerCallContext
from a2a.types import (
    CancelTaskRequest,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
    TaskStatus,
)
from a2a.utils.errors import InternalError, TaskNotFoundError
from sqlalchemy.exc import OperationalError, ProgrammingError

from cluster_subscribe import Settings, background, waiting, wrap
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller, user_message
from cluster_subscribe.task_reader import reads_at_once
from tests.support.databases import terminate_backends
from tests.support.memory import Memory, MemoryStore, MemoryStream
from tests.support.replicas import stock_handler, wakeups, wrapping


class Store(MemoryStore):
    """Waits at a gate, or fails; counts its reads."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.go = asyncio.Event()
        self.go.set()
        self.reads = 0
        self.failures: list[Exception] = []

    async def get(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        self.reads += 1
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        return await super().get(task_id, context)


async def handler_over(
    store: Store, memory: Memory, *, wrapped: bool = True, settings: Settings | None = None
) -> Any:
    task = Task(id='t', status=TaskStatus(state=TaskState.TASK_STATE_WORKING))
    await store.save(task, prev_version=TaskVersion.MISSING, context=caller())
    stock = stock_handler(store, MemoryStream(memory))
    return wrap(stock, settings=settings or Settings()) if wrapped else stock


async def snapshot(handler: Any, task_id: str = 't') -> Any:
    events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task_id), caller())
    try:
        return await anext(events)
    finally:
        await events.aclose()


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_leaves_before_its_read_began_costs_none() -> None:
    """3,000 that subscribed and left kept the next read waiting for 2.5 s."""
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory)
    store.go.clear()
    clients = [asyncio.ensure_future(snapshot(handler)) for _ in range(100)]
    await turns_of_the_loop()
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    assert all(client.cancelled() for client in clients)
    late = asyncio.ensure_future(snapshot(handler))
    await turns_of_the_loop()
    # A query that has begun is not cancelled, and the late one waits for the first to end.
    assert store.reads == reads_at_once(store)
    store.go.set()
    assert (await late).id == 't'
    assert store.reads == reads_at_once(store) + 1
    many = await asyncio.gather(*(snapshot(handler) for _ in range(100)))
    assert len(many) == 100
    await handler.aclose()


async def test_a_cancel_that_is_refused_wakes_nobody(sqlite_url: str) -> None:
    """Each hint goes to the whole cluster."""
    async with cluster(sqlite_url, decorate=wrapping()) as lab:
        task = await lab.a.turn('ask')
        for task_id, user in (
            ('no-such-task', 'user'),
            ('x' * 7000, 'user'),
            ('nul\0', 'user'),
            (task.id, 'somebody else'),
        ):
            with pytest.raises(TaskNotFoundError):
                await lab.a.handler.on_cancel_task(CancelTaskRequest(id=task_id), caller(user))
        await asyncio.sleep(0)
        assert wakeups(lab.a, 'cancel') == 0
        await lab.a.cancel(task)
        await asyncio.sleep(0)
        assert wakeups(lab.a, 'cancel') == 1


STATEMENT = 'SELECT owner FROM tasks'


@pytest.mark.parametrize(
    ('failures', 'reads'),
    [
        ([ProgrammingError(STATEMENT, {}, Exception(1142, 'denied'))], 1),
        ([OperationalError(STATEMENT, {}, Exception('gone')) for _ in range(9)], 4),
        ([], 1),
    ],
    ids=['final', 'again and again', 'no answer'],
)
async def test_a_client_is_told_an_error_of_the_sdk_without_the_drivers_words(
    failures: list[Exception], reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('cluster_subscribe.task_reader._PAUSES', (0, 0, 0))
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory)
    store.failures = failures
    if not failures:
        store.go.clear()
        monkeypatch.setattr(waiting, 'ANSWER_TIMEOUT', 0.01)
    with pytest.raises(InternalError) as told:
        await snapshot(handler)
    assert type(told.value) is InternalError
    assert 'SELECT' not in repr(told.value)
    assert 'seconds' not in repr(told.value)
    assert told.value.__cause__ is None
    assert store.reads == reads
    await handler.aclose()


@pytest.mark.parametrize('wrapped', [False, True], ids=['bare', 'wrapped'])
async def test_what_a_users_own_store_raises_comes_out(wrapped: bool) -> None:
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory, wrapped=wrapped)
    store.failures = [PermissionError('not you')]
    with pytest.raises(PermissionError, match='not you'):
        await snapshot(handler)
    assert store.reads == 1
    await handler.aclose()


async def test_who_waits_when_the_handler_is_closed_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It got a CancelledError that nobody had sent."""
    monkeypatch.setattr(background, '_GRACE', 0.01)
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory)
    store.go.clear()
    clients = [asyncio.ensure_future(snapshot(handler)) for _ in range(reads_at_once(store) * 3)]
    await turns_of_the_loop()
    await handler.aclose()
    for error in await asyncio.gather(*clients, return_exceptions=True):
        assert type(error) is InternalError
        assert str(error) == 'The server is stopping'


@pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)
async def test_lost_pooled_connections_fail_no_subscribe(database_url: str) -> None:
    async with cluster(database_url, decorate=wrapping(wakeup='poll')) as lab:
        task = await lab.a.turn('ask')
        await asyncio.gather(*(lab.c.get(task.id) for _ in range(5)))
        await terminate_backends(database_url)
        watches = [lab.c.subscribe(task) for _ in range(20)]
        for watch in watches:
            await watch.until(lambda w: w.events or w.ending, 10)
        assert [watch.timeline for watch in watches] == [('Task(INPUT_REQUIRED)', 'open')] * 20
        # The SDK's own store fails on dead connections. A pool forgets those that are in use when
        # it is disposed of, so nobody may read by then.
        for replica in lab.replicas:
            await replica.leave()
            await replica.handler.aclose()  # type: ignore[attr-defined]
            await replica.engine.dispose()


async def test_an_observation_that_fails_logs_no_words_of_the_database(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its traceback held the statement with its parameters, the owner among them."""
    caplog.set_level(logging.INFO, 'cluster_subscribe')
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory, settings=Settings(mode='observe'))
    store.failures = [OperationalError(STATEMENT, {'owner': 'alice'}, Exception('gone'))]
    assert (await snapshot(handler)).id == 't'
    assert 'could not be observed (OperationalError)' in caplog.text
    assert 'alice' not in caplog.text
    await handler.aclose()


@pytest.mark.parametrize('leaves', [True, False])
async def test_reads_that_are_never_answered_make_room_for_the_next(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on half-open connections: their slots were never given back."""
    monkeypatch.setattr(waiting, 'ANSWER_TIMEOUT', 0.05)
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory)
    store.go.clear()
    clients = [asyncio.ensure_future(snapshot(handler)) for _ in range(reads_at_once(store))]
    await turns_of_the_loop()
    if leaves:
        for client in clients:
            client.cancel()
    ends = await asyncio.gather(*clients, return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError if leaves else InternalError}
    # Those that began before go on waiting.
    store.go = asyncio.Event()
    store.go.set()
    assert (await asyncio.wait_for(snapshot(handler), 20)).id == 't'
    await handler.aclose()


async def test_a_message_does_not_wait_for_the_reads_of_streams() -> None:
    memory = Memory()
    store = Store(memory)
    handler = await handler_over(store, memory)
    store.go.clear()
    clients = [asyncio.ensure_future(snapshot(handler)) for _ in range(reads_at_once(store) * 2)]
    await turns_of_the_loop()
    began = store.reads
    message = user_message('done', Task(id='t'))
    sent = asyncio.ensure_future(
        handler.on_message_send(SendMessageRequest(message=message), caller())
    )
    await turns_of_the_loop()
    assert store.reads == began + 1
    sent.cancel()
    store.go.set()
    await asyncio.gather(*clients)
    await handler.aclose()
