"""The contract over every transport of the SDK, with the SDK's own client.

By default its core is played, on SQLite. With `CLUSTER_SUBSCRIBE_TEST_EVERY_TRANSPORT` set
every fault is, over every transport, on every database.
"""

import os
import re

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import grpc
import pytest

from a2a.server.cluster import StoredTask, VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.types import SubscribeToTaskRequest, Task, a2a_pb2_grpc
from a2a.utils.constants import VERSION_HEADER
from sqlalchemy.exc import ProgrammingError
from sse_starlette import EventSourceResponse

from cluster_subscribe import Settings, wrap
from cluster_subscribe._testing import FAULTS, Cluster, Decorate, Watch
from cluster_subscribe._testing.cluster import Reach, cluster
from cluster_subscribe._testing.watching import settle
from tests.support.balancer import balanced
from tests.support.transports import TRANSPORTS, USER, Transport, direct, http_client, serve
from tests.test_contract import healed

EVERYTHING = bool(os.environ.get('CLUSTER_SUBSCRIBE_TEST_EVERY_TRANSPORT'))
CORE = ['jsonrpc', 'rest', 'rest-get', 'grpc', 'jsonrpc-0.3']
DATABASES = ['sqlite', 'postgresql', 'mysql'] if EVERYTHING else ['sqlite']
FAULT = {fault.number: fault for fault in FAULTS}
PLAYED = list(FAULT) if EVERYTHING else ['F1', 'F2', 'F3', 'F4', 'F5', 'F12']

over = pytest.mark.parametrize('name', TRANSPORTS if EVERYTHING else CORE)
on = pytest.mark.parametrize('database_url', DATABASES, indirect=True)


# --- The faults, a client at each replica


@on
@over
@pytest.mark.parametrize('number', PLAYED)
async def test_every_replica_is_right_over_the_wire(
    number: str, name: str, database_url: str, wrapped: Decorate
) -> None:
    fault = FAULT[number]
    if (number, name) == ('F14', 'rest-0.3'):
        # The SDK's older REST has no words for an error after the first event.
        fault = replace(fault, right=('Task(INPUT_REQUIRED)', 'A2AClientError'))
    outcome = await fault.play(
        database_url, timeout=20, decorate=wrapped, reach=direct(TRANSPORTS[name])
    )
    assert outcome.right, outcome.timelines


@pytest.mark.cancels_queries
@on
@over
@pytest.mark.parametrize('number', PLAYED if EVERYTHING else ['F1'])
async def test_the_sdk_alone_is_wrong_over_the_wire(
    number: str, name: str, database_url: str
) -> None:
    if number in ('F7', 'F8'):
        pytest.skip("the wire hides it: the system's buffers, a client that is not the server")
    outcome = await FAULT[number].play(database_url, timeout=0.5, reach=direct(TRANSPORTS[name]))
    assert outcome.right is healed(FAULT[number]), outcome.timelines


# --- What the SDK puts around a stream stays as it is


def raw(address: str, transport: Transport, task_id: str) -> dict[str, Any]:
    """A subscribe as httpx sends it."""
    how: dict[str, Any] = {'method': transport.method, 'url': address}
    how['headers'] = {VERSION_HEADER: transport.version, USER: 'user'}
    if transport.binding == 'HTTP+JSON':
        how['url'] += f'/tasks/{task_id}:subscribe'
    else:
        method = 'SubscribeToTask' if transport.version == '1.0' else 'tasks/resubscribe'
        how['json'] = {'jsonrpc': '2.0', 'id': 1, 'method': method, 'params': {'id': task_id}}
    return how


async def refusal(address: str, transport: Transport, task_id: str) -> tuple[Any, Any, Any]:
    """Status, kind and words of the answer, as they come over the wire."""
    if transport.binding != 'GRPC':
        async with http_client() as http:
            answer = await http.request(**raw(address, transport, task_id))
        # An older SDK gives the number of the state.
        words = answer.text.replace('state: 3', 'state: TASK_STATE_COMPLETED')
        return answer.status_code, answer.headers['content-type'], words
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = a2a_pb2_grpc.A2AServiceStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.SubscribeToTask(
            SubscribeToTaskRequest(id=task_id), metadata=[(VERSION_HEADER.lower(), '1.0')]
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        words = str(refused.value.details()).replace('state: 3', 'state: TASK_STATE_COMPLETED')
        return refused.value.code(), None, words


@pytest.mark.parametrize(
    ('name', 'unknown', 'ended'),
    [
        ('jsonrpc', 200, 200),
        ('rest', 404, 400),
        ('rest-get', 404, 400),
        ('grpc', grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION),
        ('jsonrpc-0.3', 200, 200),
    ],
)
async def test_an_error_before_the_first_event_is_the_very_answer_of_the_sdk_alone(
    name: str, unknown: object, ended: object, sqlite_url: str, wrapped: Decorate
) -> None:
    transport = TRANSPORTS[name]
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('done')
        async with serve([lab.c.stock, lab.c.handler], transport) as addresses:
            for task_id, status in ('no-such-task', unknown), (task.id, ended):
                alone, ours = [await refusal(at, transport, task_id) for at in addresses]
                assert ours == alone
                assert ours[0] == status
                if name in ('jsonrpc', 'rest', 'rest-get'):
                    assert ours[1] == 'application/json'


async def idle_stream(url: str, transport: Transport, decorate: Decorate) -> tuple[Any, Any]:
    """The headers and the lines of a stream that is idle for two pings, then ends."""
    lines: list[str] = []
    async with cluster(url, decorate=decorate) as lab:
        task = await lab.a.start('work wait=1 done').at('1')
        async with serve([lab.c.handler], transport) as [address], http_client() as http:
            request = http.build_request(**raw(address, transport, task.id))
            response = await http.send(request, stream=True)
            async for line in response.aiter_lines():
                lines.append(line)
                if ''.join(lines).count(': ping') == 2:
                    lab.gates.open('1')
    return {**response.headers, 'date': ''}, lines


@pytest.mark.parametrize('name', [name for name in CORE if TRANSPORTS[name].binding != 'GRPC'])
async def test_headers_and_pings_are_those_of_the_sdk_alone(
    name: str, sqlite_url: str, wrapped: Decorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventSourceResponse, 'DEFAULT_PING_INTERVAL', 0.02)
    (alone, lines_alone), (ours, lines) = [
        await idle_stream(sqlite_url, TRANSPORTS[name], decorate)
        for decorate in (lambda handler: handler, wrapped)
    ]
    assert ours == alone
    assert ours['cache-control'] == 'no-store'
    assert ours['x-accel-buffering'] == 'no'
    told, told_alone = [
        re.findall('WORKING|COMPLETED', '\n'.join(one).upper()) for one in (lines, lines_alone)
    ]
    assert told == told_alone == ['WORKING', 'COMPLETED']


# --- What A2A asks of a subscribe, by one client that knows a balancer

Scene = Callable[[Cluster], Awaitable[Sequence[Watch]]]
REQUIREMENTS: Final[dict[str, tuple[Scene, tuple[str, ...]]]] = {}


def requirement(right: str) -> Callable[[Scene], Scene]:
    def add(scene: Scene) -> Scene:
        name = getattr(scene, '__name__', '')
        REQUIREMENTS[name] = scene, tuple(right.split(', '))
        return scene

    return add


@requirement('Task(WORKING), art x, COMPLETED, closed')
async def the_first_event_is_the_task_and_the_last_its_end(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=first art=x done').at('first')
    watches = await lab.watch(task)
    lab.gates.open('first')
    return watches


@requirement('Task(WORKING), WORKING, art x, COMPLETED, closed')
async def a_later_turn_is_followed(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    await lab.b.start('work wait=later work art=x done', task).at('later')
    watches = await lab.watch(task)
    lab.gates.open('later')
    return watches


@requirement('Task(INPUT_REQUIRED), WORKING, COMPLETED, closed')
async def a_later_message_completes_what_waited_for_input(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    watches = await lab.watch(task)
    await lab.b.turn('work done', task)
    return watches


@requirement('Task(INPUT_REQUIRED), WORKING, COMPLETED, closed')
async def the_context_is_inferred_from_the_task(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    watches = await lab.watch(task)
    await lab.b.turn('work done', Task(id=task.id))
    return watches


@requirement('Task(WORKING), CANCELED, closed')
async def a_cancel_ends_it(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=never').at('never')
    watches = await lab.watch(task)
    await lab.b.cancel(task)
    return watches


@requirement('Task(WORKING), INPUT_REQUIRED, WORKING, COMPLETED, closed')
async def a_question_does_not_end_it(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=question ask').at('question')
    watches = await lab.watch(task)
    lab.gates.open('question')
    for watch in watches:
        await watch.until(lambda w: len(w.told) == 2, 10)
    await lab.b.turn('work done', task)
    return watches


def refused(lab: Cluster, task: Task, user: str = 'user') -> Sequence[Watch]:
    return [replica.subscribe(task, user) for replica in lab.replicas]


@requirement('UnsupportedOperationError')
async def a_terminal_task_is_refused(lab: Cluster) -> Sequence[Watch]:
    ended = [await lab.a.turn(script) for script in ('done', 'fail', 'reject')]
    canceled = await lab.a.turn('ask')
    await lab.b.cancel(canceled)
    return [watch for task in (*ended, canceled) for watch in refused(lab, task)]


@requirement('TaskNotFoundError')
async def an_unknown_task_is_refused(lab: Cluster) -> Sequence[Watch]:
    return refused(lab, Task(id='no-such-task'))


@requirement('TaskNotFoundError')
async def the_task_of_another_user_is_refused(lab: Cluster) -> Sequence[Watch]:
    return refused(lab, await lab.a.turn('ask'), 'somebody else')


async def results(
    url: str, reach: Reach, decorate: Decorate, timeout: float
) -> dict[str, set[tuple[str, ...]]]:
    """What the streams of each requirement carried, all requirements on one cluster."""
    told = {}
    async with cluster(url, reach=reach, decorate=decorate) as lab:
        for name, (scene, right) in REQUIREMENTS.items():
            streams = await scene(lab)
            await settle(streams, right, timeout)
            told[name] = {stream.timeline for stream in streams}
    return told


RIGHT: Final = {name: {right} for name, (_, right) in REQUIREMENTS.items()}


@pytest.mark.parametrize('name', TRANSPORTS if EVERYTHING else ['jsonrpc', 'rest', 'grpc'])
async def test_three_replicas_behind_a_balancer_are_like_one_process(
    name: str, sqlite_url: str
) -> None:
    transport = TRANSPORTS[name]
    decorate = partial(wrap, settings=Settings(close_on='terminal'))
    alone = await results(sqlite_url, balanced(transport, 1), lambda handler: handler, 10)
    ours = await results(sqlite_url, balanced(transport), decorate, 10)
    assert ours == alone == RIGHT


async def test_by_default_a_question_ends_the_stream_behind_a_balancer_too(
    sqlite_url: str, wrapped: Decorate
) -> None:
    ours = await results(sqlite_url, balanced(TRANSPORTS['jsonrpc']), wrapped, 10)
    question = a_question_does_not_end_it.__name__
    assert ours == {**RIGHT, question: {('Task(WORKING)', 'INPUT_REQUIRED', 'closed')}}


@pytest.mark.cancels_queries
async def test_three_replicas_of_the_sdk_alone_are_not(sqlite_url: str) -> None:
    told = await results(sqlite_url, balanced(TRANSPORTS['jsonrpc']), lambda handler: handler, 0.3)
    wrong = {name for name in told if told[name] != RIGHT[name]}
    # A slow machine may add to them.
    assert wrong >= {
        scene.__name__
        for scene in (
            a_later_turn_is_followed,
            a_later_message_completes_what_waited_for_input,
            the_context_is_inferred_from_the_task,
            a_cancel_ends_it,
            a_question_does_not_end_it,
        )
    }


# --- Errors of ours, to a client


class Denied(VersionedDatabaseTaskStore):
    """May not read."""

    async def get(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        raise ProgrammingError('SELECT owner FROM tasks', {}, Exception('permission denied'))


@pytest.mark.parametrize(
    ('name', 'status'),
    [('jsonrpc', 200), ('rest', 500), ('grpc', grpc.StatusCode.INTERNAL), ('jsonrpc-0.3', 200)],
)
async def test_a_database_that_fails_is_an_internal_error_in_plain_words(
    name: str, status: object, sqlite_url: str, wrapped: Decorate
) -> None:
    transport = TRANSPORTS[name]
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        lab.c.store.__class__ = Denied
        async with serve([lab.c.handler], transport) as [address]:
            told, _, words = await refusal(address, transport, task.id)
    assert told == status
    assert 'The task could not be read' in words
    assert 'SELECT' not in words
    if name.startswith('jsonrpc'):
        assert '-32603' in words


@pytest.mark.parametrize('name', ['jsonrpc', 'rest', 'grpc'])
async def test_a_server_that_stops_says_so_as_an_internal_error(
    name: str, sqlite_url: str, wrapped: Decorate
) -> None:
    transport = TRANSPORTS[name]
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        stop = lab.c.handler.aclose  # type: ignore[attr-defined]
        async with serve([lab.c.handler], transport) as [address]:
            if transport.binding == 'GRPC':
                async with grpc.aio.insecure_channel(address) as channel:
                    stub: Any = a2a_pb2_grpc.A2AServiceStub(channel)  # type: ignore[no-untyped-call]
                    stream = stub.SubscribeToTask(
                        SubscribeToTaskRequest(id=task.id),
                        metadata=[(VERSION_HEADER.lower(), '1.0'), (USER.lower(), 'user')],
                    )
                    await stream.read()
                    await stop()
                    with pytest.raises(grpc.aio.AioRpcError) as ended:
                        await stream.read()
                assert ended.value.code() == grpc.StatusCode.INTERNAL
                words = str(ended.value.details())
            else:
                async with http_client() as http:
                    request = http.build_request(**raw(address, transport, task.id))
                    response = await http.send(request, stream=True)
                    lines = response.aiter_lines()
                    words = await anext(lines)
                    await stop()
                    words += ''.join([line async for line in lines])
                assert '-32603' in words or 'INTERNAL' in words
    assert 'The server is stopping' in words
    assert 'UNKNOWN' not in words
