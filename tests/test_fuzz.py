"""Whatever comes from outside: ids that no task has, rows that no store wrote."""

import asyncio
import logging
import uuid

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

import pytest

from a2a.server.cluster import TaskVersion
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler
from a2a.types import (
    Artifact,
    CancelTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
)
from a2a.utils.errors import A2AError, TaskNotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from cluster_subscribe import SharedTailEventStream
from cluster_subscribe._testing import Cluster, Watch, agent
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import artifact_update, caller
from tests.support.replicas import wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take

fuzz = settings(
    max_examples=40,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
async def lab(writer: Writer) -> AsyncIterator[Cluster]:
    url = writer.engine.url.render_as_string(hide_password=False)
    async with cluster(url, decorate=wrapping(poll_interval=0.02, reconcile_interval=0.2)) as made:
        yield made


# Ids.


async def said(handler: RequestHandler, method: str, task_id: str) -> Exception:
    message = Message(role=Role.ROLE_USER, message_id='m', task_id=task_id, parts=[Part(text='x')])
    try:
        if method == 'subscribe':
            request = SubscribeToTaskRequest(id=task_id)
            async with aclosing(handler.on_subscribe_to_task(request, caller())) as events:
                told: object = await anext(events)
        elif method == 'cancel':
            told = await handler.on_cancel_task(CancelTaskRequest(id=task_id), caller())
        else:
            told = await handler.on_message_send(SendMessageRequest(message=message), caller())
    except Exception as error:  # noqa: BLE001 - compared with the SDK's own
        return error
    raise AssertionError(f'{method} {task_id!r} was answered: {told}')


ODD = ['', ' ', '\n', "'", '"', '`', "' OR 1=1 --", '%', '_', '\\', ':task_0', '%(ids)s', '$1', '?']
ODD += ['\0', 'task\0', '😀', '😁', '\ufeff', '\ufffe', '{}', '../x', 'x' * 37, 'x' * 100_000]
IDS = st.one_of(st.sampled_from(ODD), st.text(max_size=60))


@fuzz
@given(IDS, st.sampled_from(['subscribe', 'cancel', 'send']))
async def test_an_odd_id_is_answered_as_the_sdk_does_or_more_clearly(
    lab: Cluster, task_id: str, method: str
) -> None:
    if method == 'send' and not task_id:
        return  # begins a task
    ours = await said(lab.c.handler, method, task_id)
    theirs = await said(lab.c.stock, method, task_id)
    if method == 'subscribe' and not isinstance(theirs, A2AError):
        # PostgreSQL refuses to look for NUL.
        assert '\0' in task_id
        theirs = TaskNotFoundError()
    assert (type(ours), str(ours)[:80]) == (type(theirs), str(theirs)[:80])


@pytest.mark.parametrize('task_id', ['task\0', '\0', '\ud83d', '😀', "'", 'x' * 100_000], ids=ascii)
@pytest.mark.parametrize('owner', ['user', None])
async def test_an_odd_id_does_not_stop_the_reader(
    task_id: str, owner: str | None, writer: Writer, tail: SharedTailEventStream
) -> None:
    events = tail.subscribe(task_id, after=TaskVersion(1), owner=owner)
    with pytest.raises(TaskNotFoundError):
        await asyncio.wait_for(anext(events), BACKSTOP)
    sound = tail.open('task', await writer.begin(), 'user')
    await writer.say('a')
    assert await take(sound) == ['art a']
    assert not tail.statistics().reconnects
    sound.close()


# Rows.


def artifact(name: str) -> StreamResponse:
    return StreamResponse(
        artifact_update=TaskArtifactUpdateEvent(
            task_id='t',
            context_id='c',
            artifact=Artifact(artifact_id=name, parts=[Part(text=name)]),
        )
    )


WHOLE = artifact('x').SerializeToString()
MESSAGE = StreamResponse(message=Message(role=Role.ROLE_AGENT, message_id='m')).SerializeToString()
LOOK = 'Task(WORKING)'
"""What a stream is given when it reconciles."""


class Row(NamedTuple):
    ahead: int | str
    """Its version, counted from the one stored before; or what is no version."""
    data: bytes | str | int
    owner: str | None = 'user'


class Spoilt(NamedTuple):
    rows: list[Row]
    """What the log is given in one transaction, in which the task's version rises by one."""
    told: list[str]
    """What a stream makes of them."""
    warned: int = 0
    """Rows that are no event."""
    after: str = 'art after'
    """What it makes of the next event."""


SPOILT = {
    'garbage': Spoilt([Row(1, b'\xff\xff no protobuf')], [LOOK], 1),
    'empty': Spoilt([Row(1, b'')], [LOOK], 1),
    'an unknown payload': Spoilt([Row(1, b'\x9a\x06\x03abc')], [LOOK], 1),
    'truncated': Spoilt([Row(1, WHOLE[:-3])], [LOOK], 1),
    'garbage before an event': Spoilt([Row(1, b'\xff'), Row(1, WHOLE)], [LOOK], 1),
    'garbage behind an event': Spoilt([Row(1, WHOLE), Row(1, b'\xff')], ['art x'], 1, LOOK),
    'a doubled version': Spoilt([Row(1, WHOLE), Row(1, WHOLE)], ['art x', 'art x']),
    'an earlier version behind': Spoilt([Row(1, WHOLE), Row(0, WHOLE)], ['art x']),
    'an earlier version before': Spoilt([Row(0, WHOLE), Row(1, WHOLE)], ['art x']),
    'version zero': Spoilt([Row(-1, WHOLE), Row(1, WHOLE)], ['art x']),
    'a negative version': Spoilt([Row(-(2**62), WHOLE), Row(1, WHOLE)], ['art x']),
    'a huge version': Spoilt([Row(2**62, WHOLE)], [LOOK]),
    'a huge version behind': Spoilt([Row(1, WHOLE), Row(2**62, WHOLE)], [LOOK]),
    'a huge version before': Spoilt([Row(2**62, WHOLE), Row(1, WHOLE)], ['art x']),
    'a gap': Spoilt([Row(2, WHOLE)], [LOOK]),
    'no owner': Spoilt([Row(1, WHOLE, None)], [LOOK]),
    'another owner': Spoilt([Row(1, WHOLE, 'User')], [LOOK]),
    'a message': Spoilt([Row(1, MESSAGE)], ['Message', 'closed']),
}
"""What a log may hold that no store writes, by name."""
ANY_TYPE = {
    'text for data': Spoilt([Row(1, 'text')], [LOOK], 1),
    'a number for data': Spoilt([Row(1, 7)], [LOOK], 1),
    'text for a version': Spoilt([Row('x', WHOLE)], [LOOK]),
}
"""What only SQLite keeps."""


async def spoil(writer: Writer, task_id: str, rows: list[Row]) -> None:
    async with writer.engine.begin() as connection:
        where = text('SELECT version FROM task_versions WHERE task_id = :id')
        version = (await connection.execute(where, {'id': task_id})).scalar_one()
        for row in rows:
            ahead = row.ahead if isinstance(row.ahead, str) else version + row.ahead
            await connection.execute(
                text(
                    'INSERT INTO task_events (task_id, owner, task_version, event_data) '
                    'VALUES (:id, :owner, :version, :data)'
                ),
                row._asdict() | {'id': task_id, 'version': ahead},
            )
        await connection.execute(
            text('UPDATE task_versions SET version = version + 1 WHERE task_id = :id'),
            {'id': task_id},
        )


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


async def told(watches: list[Watch], right: tuple[str, ...]) -> None:
    """Waits until each stream was told so much, and compares."""
    right = right if right[-1] == 'closed' else (*right, 'open')
    for watch in watches:
        await watch.until(lambda w: len(w.timeline) >= len(right), BACKSTOP)
        assert watch.timeline == right


async def test_spoilt_rows_make_their_own_streams_reconcile_and_no_other(
    lab: Cluster, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = SPOILT | (ANY_TYPE if lab.url.startswith('sqlite') else {})
    await writer.begin('sound')
    sound = await lab.c.watch(Task(id='sound'))
    watches = {}
    for name in kinds:
        await writer.begin(name)
        await writer.say('before', task_id=name)
        watches[name] = [await lab.c.watch(Task(id=name)) for _ in range(3)]
    for name, spoilt in kinds.items():
        await spoil(writer, name, spoilt.rows)
        await writer.say(name, task_id='sound')
    for name, spoilt in kinds.items():
        right = (LOOK, *spoilt.told)
        await told(watches[name], right)
        if right[-1] != 'closed':
            await writer.say('after', task_id=name)
            await told(watches[name], (*right, spoilt.after))
    assert await sound.until(lambda w: len(w.told) > len(kinds), BACKSTOP)
    assert sound.told == [LOOK, *(f'art {name}' for name in kinds)]
    warned = sum(spoilt.warned for spoilt in kinds.values())
    assert warnings(caplog, 'a row that is no event') == warned
    looked = sum(LOOK in (*spoilt.told, spoilt.after) for spoilt in kinds.values())
    assert warnings(caplog, 'was changed without an entry') == looked
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


@pytest.mark.parametrize('spoilt', [SPOILT['garbage'], SPOILT['empty']], ids=['garbage', 'empty'])
async def test_a_row_that_is_no_event_is_named_once_however_often_it_is_read(
    spoilt: Spoilt, writer: Writer, tail: SharedTailEventStream, caplog: pytest.LogCaptureFixture
) -> None:
    version = await writer.begin()
    await spoil(writer, 'task', spoilt.rows)
    for _ in range(3):
        subscriber = tail.open('task', version, 'user')
        assert await take(subscriber, 2) == ['reconcile', 'reconcile']
        subscriber.close()
    assert warnings(caplog, 'a row that is no event') == 1


async def test_without_a_store_to_look_at_a_row_that_is_no_event_is_passed_over(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    events = tail.subscribe('task', after=await writer.begin())
    await spoil(writer, 'task', SPOILT['garbage'].rows)
    await writer.say('a')
    versioned = await asyncio.wait_for(anext(events), BACKSTOP)
    assert versioned.event.artifact.artifact_id == 'a'  # type: ignore[union-attr]
    await events.aclose()


def mutated(data: bytes, cut: int, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data[:cut])
    for place, bit in flips:
        if changed:
            changed[place % len(changed)] ^= 1 << bit
    return bytes(changed)


DATA = st.one_of(
    st.binary(max_size=80),
    st.builds(
        mutated,
        st.sampled_from([WHOLE, MESSAGE]),
        st.integers(0, len(WHOLE)),
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 7)), max_size=3),
    ),
)
ROWS = st.lists(
    st.builds(
        Row,
        st.one_of(st.just(1), st.integers(-3, 3), st.integers(-(2**62), 2**62)),
        DATA,
        st.sampled_from(['user', 'user', 'User', '', None]),
    ),
    min_size=1,
    max_size=5,
)


async def read_all(events: AsyncGenerator[Event, None], into: list[Event]) -> None:
    async with aclosing(events):
        async for event in events:
            into.append(event)  # noqa: PERF401 - read while it grows


@settings(fuzz, max_examples=6)
@given(st.lists(ROWS, min_size=1, max_size=4))
async def test_no_row_hangs_a_stream_or_disturbs_another(
    lab: Cluster, writer: Writer, spoilings: list[list[Row]]
) -> None:
    names = [f'{kind}-{uuid.uuid4().hex[:8]}' for kind in ('spoilt', 'sound')]
    read: dict[str, list[Event]] = {name: [] for name in names}
    for name in names:
        await writer.begin(name)
    reading = []
    for name in names:
        events = lab.c.handler.on_subscribe_to_task(SubscribeToTaskRequest(id=name), caller())
        reading.append(asyncio.ensure_future(read_all(events, read[name])))
    await eventually(lambda: all(read.values()))
    for number, rows in enumerate(spoilings):
        await spoil(writer, names[0], rows)
        await writer.say(str(number), task_id=names[1])
    for name in names:
        stored = await writer.store.get(name, caller())
        assert stored is not None
        stored.task.status.state = TaskState.TASK_STATE_COMPLETED
        await writer.store.save(
            stored.task, event=stored.task, prev_version=stored.version, context=caller()
        )
    await asyncio.wait_for(asyncio.gather(*reading), BACKSTOP)
    assert [type(event) for event in read[names[1]]] == [
        Task,
        *([TaskArtifactUpdateEvent] * len(spoilings)),
        Task,
    ]


# What a column has no room for.


async def test_an_event_that_mysql_has_no_room_for_fails_its_task_on_every_replica(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK fails the task; the streams say so and end. A local subscription shows the error."""
    if writer.engine.dialect.name != 'mysql':
        pytest.skip('only MySQL has 64 KiB for an event')
    small = artifact_update
    monkeypatch.setattr(
        agent,
        'artifact_update',
        lambda context, name, said, **how: small(
            context, name, 'x' * 70_000 if said == 'large' else said, **how
        ),
    )
    url = writer.engine.url.render_as_string(hide_password=False)
    for name, decorate in (('stock', lambda handler: handler), ('ours', wrapping())):
        async with cluster(url, decorate=decorate) as lab:
            task = await lab.a.start('work wait=1 art=small art=large work done').at('1')
            watches = await lab.watch(task)
            lab.gates.open('1')
            for watch in watches:
                assert await watch.until(lambda w: w.ending, BACKSTOP)
                if name == 'stock':
                    assert watches[0].timeline == (LOOK, 'art small', 'DataError')
                    break
                assert [one.replace('Task(FAILED)', 'FAILED') for one in watch.timeline] == [
                    *(LOOK, 'art small', 'FAILED'),
                    'closed',
                ]
