"""A task is its owner's alone, character by character, whatever the database thinks is equal."""

import asyncio
import itertools

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from a2a.server.cluster import (
    DatabaseTaskEventStream,
    StoredTask,
    TaskVersion,
    VersionedDatabaseTaskStore,
    VersionedEvent,
)
from a2a.server.context import ServerCallContext
from a2a.server.owner_resolver import resolve_user_scope
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.server.routes import create_jsonrpc_routes, create_rest_routes
from a2a.types import SubscribeToTaskRequest, Task
from a2a.utils.constants import VERSION_HEADER
from a2a.utils.errors import A2AError, TaskNotFoundError
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

from cluster_subscribe import Settings, SharedTailEventStream, wrap
from cluster_subscribe._testing import Cluster, label
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller, send_request
from tests.support.replicas import OwnStream, stock_handler, wrapping
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer

FOREIGNERS = ['somebody', 'USER', 'User', 'user ', ' user', 'üser', 'user\t', 'user😀', '']
"""Who is not 'user', though MySQL's collations call some of them equal."""
OTHER_IDS = [str.upper, '{} '.format, ' {}'.format, '{}\0'.format]
"""What makes another id of an id, though MySQL calls some of them equal."""


async def answer(
    handler: RequestHandler, task_id: str, context: ServerCallContext
) -> tuple[type[Exception] | None, str]:
    """The error of a subscribe, or the event that came instead."""
    events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task_id), context)
    async with aclosing(events):
        try:
            return None, label(await asyncio.wait_for(anext(events), BACKSTOP))
        except Exception as error:  # noqa: BLE001 - compared with that of an unknown id
            return type(error), str(error)


UNKNOWN = TaskNotFoundError, str(TaskNotFoundError())


async def refused_everywhere(lab: Cluster, task: Task) -> None:
    asked = itertools.product(
        lab.replicas,
        [(task.id, user) for user in FOREIGNERS]
        + [(other(task.id), 'user') for other in OTHER_IDS]
        + [('no-such-task', 'user')],
    )
    answers = [
        (replica.name, task_id, user, await answer(replica.handler, task_id, caller(user)))
        for replica, (task_id, user) in asked
    ]
    assert not [told for told in answers if told[-1] != UNKNOWN]


@pytest.mark.cancels_queries
@pytest.mark.parametrize(
    ('stream_type', 'database_url'),
    [
        *((DatabaseTaskEventStream, backend) for backend in ('sqlite', 'postgresql', 'mysql')),
        # The subscribe itself compares, whatever the stream; MySQL is the one that is loose.
        (OwnStream, 'mysql'),
    ],
    indirect=['database_url'],
)
async def test_a_foreign_subscriber_is_told_what_an_unknown_id_is(
    database_url: str, stream_type: type[DatabaseTaskEventStream]
) -> None:
    """Paused and while events flow, at the replica of the agent and at the others."""
    async with cluster(database_url, decorate=wrapping(), stream_type=stream_type) as lab:
        task = await lab.a.start('work wait=1 emit=40 wait=2 ask').at('1')
        watches = await lab.watch(task)
        await refused_everywhere(lab, task)
        trying = asyncio.ensure_future(refused_everywhere(lab, task))
        lab.gates.open('1')
        await trying
        await lab.gates.reached('2')
        lab.gates.open('2')
        for watch in watches:
            assert await watch.until(lambda w: w.ending, BACKSTOP)
            assert watch.timeline == (
                'Task(WORKING)',
                *(f'chunk {number}' for number in range(40)),
                'INPUT_REQUIRED',
                'closed',
            )
        await refused_everywhere(lab, task)


async def test_a_task_recreated_by_somebody_alike_is_not_the_subscribers(writer: Writer) -> None:
    """The read of rule 5 is as strict as the subscribe."""
    url = writer.engine.url.render_as_string(hide_password=False)
    async with cluster(url, decorate=wrapping(poll_interval=0.05)) as lab:
        await writer.begin()
        await writer.say('a', 'b')
        watch = await lab.c.watch(Task(id='task'))
        await writer.store.delete('task', caller())
        await writer.begin(user='User')
        await writer.say(*'cdefg', user='User')
        assert await watch.until(lambda w: w.ending, BACKSTOP)
        assert watch.timeline == ('Task(WORKING)', 'TaskNotFoundError')


# The owner resolver, and tenants.


def by_tenant(context: ServerCallContext) -> str:
    return f'{context.tenant}/{context.user.user_name}'


def nobody(context: ServerCallContext) -> str:
    return ''


def of(tenant: str, user: str = 'user') -> ServerCallContext:
    context = caller(user)
    context.tenant = tenant
    return context


@asynccontextmanager
async def resolving(
    url: str,
    resolver: object,
    store_type: type[VersionedDatabaseTaskStore] = VersionedDatabaseTaskStore,
    **settings: Any,
) -> AsyncIterator[DefaultRequestHandler]:
    """A handler whose store asks `resolver` for the owner."""
    engine = create_async_engine(url)
    store = store_type(engine, owner_resolver=resolver)  # type: ignore[arg-type]
    await store.initialize()
    stock = stock_handler(store, DatabaseTaskEventStream(engine))
    handler = wrap(stock, settings=Settings(**{'poll_interval': 0.05, **settings}))
    try:
        yield handler
    finally:
        await handler.aclose()
        await engine.dispose()


async def say(
    handler: RequestHandler, script: str, context: ServerCallContext, task: Task | None = None
) -> Task:
    told = await handler.on_message_send(send_request(script, task), context)
    assert isinstance(told, Task)
    return told


@pytest.mark.parametrize('resolver', [resolve_user_scope, by_tenant, nobody])
async def test_the_owner_is_whom_the_stores_resolver_names(
    database_url: str, resolver: object
) -> None:
    async with resolving(database_url, resolver) as handler:
        task = await say(handler, 'ask', of('one'))
        for context, owns in (
            (of('one'), [resolve_user_scope, by_tenant, nobody]),
            (of('One'), [resolve_user_scope, nobody]),
            (of('two'), [resolve_user_scope, nobody]),
            (of(''), [resolve_user_scope, nobody]),
            (of('one', 'somebody'), [nobody]),
        ):
            right = (None, 'Task(INPUT_REQUIRED)') if resolver in owns else UNKNOWN
            assert await answer(handler, task.id, context) == right, (context, resolver)
        events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), of('one'))
        async with aclosing(events):
            told = [label(await anext(events))]
            await say(handler, 'work done', of('one'), task)
            told += [label(event) async for event in events]
        assert told == ['Task(INPUT_REQUIRED)', 'WORKING', 'COMPLETED']


class SharedStore(VersionedDatabaseTaskStore):
    """Everybody may watch what the team owns, whoever that is by now."""

    team = 'team'

    async def get(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        return await super().get(task_id, caller(self.team))


async def follow_as(handler: RequestHandler, task: Task, user: str) -> list[str]:
    """All that a stream tells, and its error."""
    told = []
    events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller(user))
    async with aclosing(events):
        try:
            async for event in events:
                told.append(label(event))  # noqa: PERF401 - kept where an error follows
        except A2AError as error:
            told.append(type(error).__name__)
    return told


def watched(handler: object, count: int = 1) -> Callable[[], bool]:
    tail: SharedTailEventStream = handler._event_stream  # type: ignore[attr-defined]
    return lambda: tail.statistics().open_subscriptions == count


async def test_a_store_that_shares_tasks_is_followed_with_their_owners_rows(
    database_url: str,
) -> None:
    async with resolving(database_url, resolve_user_scope, SharedStore) as handler:
        task = await say(handler, 'work ask', caller('team'))
        following = asyncio.ensure_future(follow_as(handler, task, 'guest'))
        await eventually(watched(handler))
        await say(handler, 'work art=x done', caller('team'), task)
        assert await asyncio.wait_for(following, BACKSTOP) == [
            *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED')
        ]


async def test_a_task_that_changes_hands_is_followed_on(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with resolving(sqlite_url, resolve_user_scope, SharedStore) as handler:
        task = await say(handler, 'work ask', caller('team'))
        following = asyncio.ensure_future(follow_as(handler, task, 'guest'))
        await eventually(watched(handler))
        writer = Writer(sqlite_url)
        monkeypatch.setattr(SharedStore, 'team', 'other')
        for table in ('tasks', 'task_versions', 'task_events'):
            await writer.execute(f"UPDATE {table} SET owner = 'other'")  # noqa: S608 - a constant
        await writer.engine.dispose()
        await say(handler, 'work art=x done', caller('other'), task)
        assert await asyncio.wait_for(following, BACKSTOP) == [
            *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED')
        ]


@pytest.mark.parametrize(
    ('seen', 'looked'), list(itertools.combinations_with_replacement(range(4), 2))
)
async def test_a_shared_task_that_another_team_recreates_is_gone(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, seen: int, looked: int
) -> None:
    """However far the other team is when the reader sees it, and when the stream reconciles."""
    writer = Writer(sqlite_url)

    async def delete() -> None:
        await writer.store.delete('task', caller('team'))
        monkeypatch.setattr(SharedStore, 'team', 'other')

    steps: list[Callable[[], Awaitable[object]]] = [
        delete,
        partial(writer.begin, user='other'),
        partial(writer.say, 'secret', user='other'),
        partial(writer.say, 'more', user='other'),
    ]
    await writer.store.initialize()
    await writer.begin(user='team')
    await writer.say('a', user='team')
    resting = {'poll_interval': 1000, 'wakeup': 'poll'}
    async with resolving(sqlite_url, resolve_user_scope, SharedStore, **resting) as handler:
        following = asyncio.ensure_future(follow_as(handler, Task(id='task'), 'guest'))
        await eventually(watched(handler))
        looking, may_look, get = asyncio.Event(), asyncio.Event(), SharedStore.get

        async def when_told(*question: Any) -> StoredTask | None:
            looking.set()
            await may_look.wait()
            return await get(*question)

        monkeypatch.setattr(SharedStore, 'get', when_told)
        for step in steps[: seen + 1]:
            await step()
        await handler._event_stream._reader._round({}, check=True, timeout=BACKSTOP)  # type: ignore[union-attr]
        await looking.wait()
        for step in steps[seen + 1 : looked + 1]:
            await step()
        may_look.set()
        assert await asyncio.wait_for(following, BACKSTOP) == [
            *('Task(WORKING)', 'TaskNotFoundError')
        ]
    await writer.engine.dispose()


async def test_an_owner_that_is_no_text_is_stored_as_one(database_url: str) -> None:
    """PostgreSQL refuses to store it."""
    if 'postgresql' in database_url:
        pytest.skip('the SDK alone cannot save such a task there')
    async with resolving(database_url, lambda _: 7) as handler:
        task = await say(handler, 'work ask', caller())
        following = asyncio.ensure_future(follow_as(handler, task, 'user'))
        await eventually(watched(handler))
        await say(handler, 'work art=x done', caller(), task)
        assert await asyncio.wait_for(following, BACKSTOP) == [
            *('Task(INPUT_REQUIRED)', 'WORKING', 'art x', 'COMPLETED')
        ]


async def test_the_tenant_of_a_request_on_the_wire_counts(sqlite_url: str) -> None:
    async with resolving(sqlite_url, lambda context: context.tenant) as handler:
        task = await say(handler, 'ask', of('one'))
        app = Starlette(
            routes=[*create_jsonrpc_routes(handler, '/rpc'), *create_rest_routes(handler)]
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url='http://replica',
            headers={VERSION_HEADER: '1.0'},
        ) as http:
            for tenant in ('two', 'One', 'one ', ''):
                answers = []
                for task_id in (task.id, 'no-such-task'):
                    params = {'id': task_id, 'tenant': tenant}
                    call = {'jsonrpc': '2.0', 'id': 1, 'method': 'SubscribeToTask'}
                    rpc = await http.post('/rpc', json=call | {'params': params})
                    path = f'/{tenant}/tasks' if tenant else '/tasks'
                    rest = await http.get(f'{path}/{task_id}:subscribe')
                    assert rest.status_code == 404
                    answers.append((rpc.json(), rest.text))
                assert answers[0] == answers[1]
                assert answers[0][0]['error']['code'] == -32001


# Without the decorator: the event stream itself.


class Reading:
    """What a subscription to the event stream itself was given."""

    def __init__(
        self, tail: SharedTailEventStream, task_id: str, after: TaskVersion, owner: str
    ) -> None:
        self.told: list[str] = []
        events = tail.subscribe(task_id, after=after, owner=owner)
        self.task = asyncio.ensure_future(self._read(events, task_id))

    async def _read(self, events: AsyncIterator[VersionedEvent], task_id: str) -> None:
        try:
            async for versioned in events:
                self.told.append(label(versioned.event))
        except A2AError as error:
            self.told.append(f'{type(error).__name__}: {error}'.replace(task_id, '<id>'))


async def test_the_event_stream_gives_a_foreigner_no_event_and_no_other_answer(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    others = [Reading(tail, 'task', version, user) for user in FOREIGNERS]
    others += [Reading(tail, task_id, version, 'user') for task_id in ('no-such-task', 'TASK')]
    owner = Reading(tail, 'task', version, 'user')
    said = [str(number) for number in range(20)]
    await writer.say(*said)
    await eventually(lambda: len(owner.told) == len(said))
    assert owner.told == [f'art {text}' for text in said]
    await eventually(lambda: all(other.task.done() for other in others))
    assert [other.told for other in others] == [['TaskNotFoundError: Task <id> was deleted']] * 11


async def test_who_waits_for_a_task_to_appear_is_not_told_of_anothers(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    """From before the first version, an unknown task is waited for; so is a foreign one."""
    await writer.begin()
    waiting = [Reading(tail, 'task', TaskVersion.MISSING, user) for user in FOREIGNERS]
    waiting.append(Reading(tail, 'no-such-task', TaskVersion.MISSING, 'user'))
    owner = Reading(tail, 'task', TaskVersion.MISSING, 'user')
    await writer.say('a')
    await eventually(lambda: len(owner.told) == 2)
    rounds = tail.statistics().rounds
    await eventually(lambda: tail.statistics().rounds > rounds + 2)
    await tail.aclose()
    await eventually(lambda: all(one.task.done() for one in waiting))
    assert [one.told for one in waiting] == [['EventStreamEndedError: The server is stopping']] * 10
