"""One subscribe: its local state, its mode, its errors, its end."""

import asyncio

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from a2a.server.cluster import DatabaseTaskEventStream, TaskEventStream, TaskVersion, VersionedEvent
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.types import (
    AgentCapabilities,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InvalidParamsError, TaskNotFoundError, UnsupportedOperationError

from cluster_subscribe import EventStreamEndedError, LocalState, Settings, Statistics, wrap
from cluster_subscribe._testing import Cluster, Decorate, Replica
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from tests.support.replicas import OwnStream, decorated, wrapping


@pytest.fixture
async def lab(sqlite_url: str) -> AsyncIterator[Cluster]:
    async with cluster(sqlite_url, decorate=wrapping()) as made:
        yield made


def statistics(replica: Replica) -> Statistics:
    return decorated(replica).statistics()


async def first_of(handler: RequestHandler, task_id: str, user: str = 'user') -> object:
    events = handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task_id), caller(user))
    try:
        return await anext(events)
    finally:
        await events.aclose()


async def error_of(handler: RequestHandler, task_id: str, user: str = 'user') -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - compared with the SDK's own
        await first_of(handler, task_id, user)
    return caught.value


# Errors, before the first event.


async def test_unknown_and_foreign_tasks_are_not_found_as_the_sdk_says_it(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    for task_id, user in (('no-such-task', 'user'), (task.id, 'somebody else')):
        for replica in lab.replicas:
            ours = await error_of(replica.handler, task_id, user)
            assert type(ours) is TaskNotFoundError
            assert str(ours) == str(await error_of(replica.stock, task_id, user))


async def test_a_terminal_task_is_refused_as_the_sdk_says_it(lab: Cluster) -> None:
    task = await lab.a.turn('done')
    for replica in lab.replicas:
        ours = await error_of(replica.handler, task.id)
        assert type(ours) is UnsupportedOperationError
        assert 'is in terminal state' in str(ours)


async def test_a_request_without_an_id_is_refused_as_the_sdk_says_it(lab: Cluster) -> None:
    ours, theirs = await error_of(lab.a.handler, ''), await error_of(lab.a.stock, '')
    assert type(ours) is type(theirs) is InvalidParamsError
    assert str(ours) == str(theirs)


async def test_an_agent_that_does_not_stream_answers_as_the_sdk_does(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    lab.a.stock._agent_card.capabilities.CopyFrom(AgentCapabilities(streaming=False))
    ours, theirs = await error_of(lab.a.handler, task.id), await error_of(lab.a.stock, task.id)
    assert type(ours) is type(theirs) is UnsupportedOperationError
    assert str(ours) == str(theirs)


async def test_nothing_saved_yet_is_a_task_not_found(database_url: str) -> None:
    lab = Cluster(database_url, decorate=wrapping())
    try:
        errors = await asyncio.gather(*(error_of(r.handler, 'x') for r in lab.replicas))
        assert {type(error) for error in errors} == {TaskNotFoundError}
    finally:
        await lab.aclose()


# The check.


async def test_the_local_states(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    await lab.watch(task)
    assert statistics(lab.a).subscribes[LocalState.IDLE] == 1
    assert statistics(lab.b).subscribes[LocalState.ABSENT] == 1
    await lab.b.start('work wait=1 done', task).at('1')
    await lab.watch(task)
    assert statistics(lab.a).subscribes[LocalState.STALE] == 1
    assert statistics(lab.b).subscribes[LocalState.LIVE] == 1
    assert statistics(lab.c).subscribes[LocalState.ABSENT] == 2
    assert [statistics(replica).redirects for replica in lab.replicas] == [2, 1, 0]
    assert [statistics(replica).open_subscriptions for replica in lab.replicas] == [2, 2, 2]


async def test_a_request_in_flight_makes_it_live_whatever_the_versions_say(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    await lab.b.turn('work ask', task)
    await lab.a.start('wait=1 done', task).at('1')
    local = await lab.a.stock._active_task_registry.get(task.id)
    assert local is not None
    local._task_manager._current_version = TaskVersion(1)
    await lab.a.watch(task)
    assert statistics(lab.a).subscribes[LocalState.LIVE] == 1


# The modes.


class Spy:
    """Counts the subscribes that reach the wrapped handler."""

    def __init__(self, handler: DefaultRequestHandler) -> None:
        self.asked = 0
        answer = handler.on_subscribe_to_task

        def count(params: Any, context: Any) -> Any:
            self.asked += 1
            return answer(params, context)

        handler.on_subscribe_to_task = count  # type: ignore[method-assign]


@pytest.mark.cancels_queries
async def test_mode_stale_redirects_exactly_the_local_subscriptions_that_are_not_live(
    sqlite_url: str,
) -> None:
    async with cluster(sqlite_url, decorate=wrapping(mode='stale')) as lab:
        spies = [Spy(replica.stock) for replica in lab.replicas]
        task = await lab.a.turn('ask')
        await lab.watch(task)
        assert [spy.asked for spy in spies] == [0, 0, 0]
        await lab.b.start('work wait=1 work done', task).at('1')
        watches = await lab.watch(task)
        assert [spy.asked for spy in spies] == [0, 1, 0]
        lab.gates.open('1')
        for watch in (watches[0], watches[2]):
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline == ('Task(WORKING)', 'WORKING', 'COMPLETED', 'closed')


@pytest.mark.cancels_queries
async def test_mode_observe_leaves_the_answer_to_the_sdk_and_counts(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(mode='observe')) as lab:
        spies = [Spy(replica.stock) for replica in lab.replicas]
        task = await lab.a.turn('ask')
        await lab.b.start('work wait=1 done', task).at('1')
        watches = await lab.watch(task)
        assert [spy.asked for spy in spies] == [1, 1, 1]
        assert watches[0].timeline[0] == 'Task(INPUT_REQUIRED)'
        assert statistics(lab.a).subscribes[LocalState.STALE] == 1
        assert statistics(lab.a).redirects == 1
        assert type(await error_of(lab.a.handler, 'no-such-task')) is TaskNotFoundError


# How streams go on and end.


async def test_closing_on_terminal_follows_the_task_over_its_questions(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(close_on='terminal')) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watches = await lab.watch(task)
        lab.gates.open('1')
        for watch in watches:
            assert await watch.until(lambda w: 'INPUT_REQUIRED' in w.timeline, 10)
        await lab.b.turn('work done', task)
        for watch in watches:
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline == (
                *('Task(WORKING)', 'INPUT_REQUIRED', 'WORKING', 'COMPLETED'),
                'closed',
            )


@pytest.mark.cancels_queries
async def test_a_question_that_was_answered_already_does_not_close(sqlite_url: str) -> None:
    async with cluster(sqlite_url, decorate=wrapping(), stream_type=OwnStream) as lab:
        task = await lab.a.start('work wait=1 ask').at('1')
        watches = await lab.watch(task)
        for watch in watches:
            watch.hold()
        lab.gates.open('1')
        for watch in watches:
            assert await watch.until(lambda w: len(w.events) == 2, 10)
        await lab.b.turn('work done', task)
        for watch in watches:
            watch.resume()
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline[-4:] == ('INPUT_REQUIRED', 'WORKING', 'COMPLETED', 'closed')


async def test_auth_required_never_ends_a_stream(database_url: str, wrapped: Decorate) -> None:
    async with cluster(database_url, decorate=wrapped) as lab:
        task = await lab.a.start('work wait=1 auth wait=2 work done').at('1')
        watches = await lab.watch(task)
        lab.gates.open('1')
        for watch in watches:
            assert await watch.until(lambda w: 'AUTH_REQUIRED' in w.timeline, 10)
        lab.gates.open('2')
        for watch in watches:
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline == (
                *('Task(WORKING)', 'AUTH_REQUIRED', 'WORKING', 'COMPLETED'),
                'closed',
            )


async def test_the_snapshot_is_a_copy(lab: Cluster) -> None:
    task = await lab.a.start('work wait=1 art=x wait=2 done').at('1')
    watch = await lab.a.watch(task)
    (snapshot,) = watch.events
    lab.gates.open('1')
    await lab.gates.reached('2')
    assert isinstance(snapshot, Task)
    assert not snapshot.artifacts
    assert snapshot.status.state == TaskState.TASK_STATE_WORKING


async def test_a_closed_stream_is_gone_in_the_same_turn_of_the_loop(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    events = lab.a.handler.on_subscribe_to_task(SubscribeToTaskRequest(id=task.id), caller())
    await anext(events)
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert statistics(lab.a).open_subscriptions == 1
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert statistics(lab.a).open_subscriptions == 0
    await events.aclose()


@pytest.mark.cancels_queries
async def test_closing_the_handler_ends_its_streams_with_an_error(sqlite_url: str) -> None:
    for stream_type in (DatabaseTaskEventStream, OwnStream):
        async with cluster(sqlite_url, decorate=wrapping(), stream_type=stream_type) as lab:
            task = await lab.a.turn('ask')
            watch = await lab.a.watch(task)
            await asyncio.sleep(0)
            await lab.a.handler.aclose()  # type: ignore[attr-defined]
            assert await watch.until(lambda w: w.ending, 5)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'InternalError')


# Event streams that are not the database's.


class Told(TaskEventStream):
    """Says what a test told it to, then ends or fails."""

    def __init__(self, *said: VersionedEvent | Exception) -> None:
        self.said = said

    async def publish(self, task_id: str, event: VersionedEvent) -> None: ...

    async def destroy(self, task_id: str) -> None: ...

    async def subscribe(
        self, task_id: str, *, after: TaskVersion
    ) -> AsyncGenerator[VersionedEvent, None]:
        for one in self.said:
            if isinstance(one, Exception):
                raise one
            yield one


def told(task: Task, state: TaskState, version: int) -> VersionedEvent:
    event = TaskStatusUpdateEvent(
        task_id=task.id, context_id=task.context_id, status=TaskStatus(state=state)
    )
    return VersionedEvent(event=event, version=TaskVersion(version))


async def timeline_over(lab: Cluster, task: Task, stream: TaskEventStream) -> tuple[str, ...]:
    decorated, lab.a.door = (
        lab.a.door,
        wrap(lab.a.stock, settings=Settings(), event_stream=stream),
    )
    watch = lab.a.subscribe(task)
    assert await watch.until(lambda w: w.ending, 10), watch.timeline
    lab.a.door = decorated
    return watch.timeline


async def test_a_message_is_delivered_and_ends_the_stream(lab: Cluster) -> None:
    task = await lab.a.turn('work ret')
    message = Message(role=Role.ROLE_AGENT, message_id='m')
    stream = Told(VersionedEvent(event=message, version=TaskVersion.MISSING))
    assert await timeline_over(lab, task, stream) == ('Task(WORKING)', 'Message', 'closed')


async def test_events_up_to_the_snapshot_are_left_out(lab: Cluster) -> None:
    task = await lab.a.turn('work ret')
    stored = await lab.a.store.get(task.id, caller())
    assert stored is not None
    version = stored.version._value
    assert isinstance(version, int)
    stream = Told(
        told(task, TaskState.TASK_STATE_SUBMITTED, version - 1),
        told(task, TaskState.TASK_STATE_WORKING, version),
        told(task, TaskState.TASK_STATE_COMPLETED, version + 1),
    )
    assert await timeline_over(lab, task, stream) == ('Task(WORKING)', 'COMPLETED', 'closed')


async def test_a_stream_that_ends_before_its_task_is_an_error(lab: Cluster) -> None:
    task = await lab.a.turn('work ret')
    assert await timeline_over(lab, task, Told()) == ('Task(WORKING)', 'InternalError')
    assert issubclass(EventStreamEndedError, Exception)


async def test_a_stream_that_ends_with_its_task_gives_the_end_as_stored(lab: Cluster) -> None:
    task = await lab.a.start('work wait=1 done').at('1')

    class Late(Told):
        async def subscribe(self, *args: Any, **how: Any) -> AsyncGenerator[VersionedEvent, None]:
            lab.gates.open('1')
            await lab.a._turns[0]
            return
            yield

    timeline = await timeline_over(lab, task, Late())
    assert timeline == ('Task(WORKING)', 'Task(COMPLETED)', 'closed')


async def test_what_a_stream_raises_comes_out(lab: Cluster) -> None:
    task = await lab.a.turn('work ret')
    stream = Told(told(task, TaskState.TASK_STATE_WORKING, 99), LookupError('lost'))
    assert await timeline_over(lab, task, stream) == ('Task(WORKING)', 'WORKING', 'LookupError')


# Rule 5: the stored task decides.


@pytest.mark.cancels_queries
@pytest.mark.parametrize('stream_type', [DatabaseTaskEventStream, OwnStream])
async def test_a_state_that_was_never_logged_is_told_within_the_reconcile_interval(
    sqlite_url: str, stream_type: type[DatabaseTaskEventStream]
) -> None:
    decorate = wrapping(reconcile_interval=0.4, poll_interval=0.1)
    async with cluster(sqlite_url, decorate=decorate, stream_type=stream_type) as lab:
        task = await lab.a.turn('work ret')
        watches = await lab.watch(task)
        stored = await lab.c.store.get(task.id, caller())
        assert stored is not None
        stored.task.status.state = TaskState.TASK_STATE_FAILED
        await lab.c.store.save(
            stored.task, event=None, prev=None, prev_version=stored.version, context=caller()
        )
        for watch in watches:
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline == ('Task(WORKING)', 'Task(FAILED)', 'closed')
        assert statistics(lab.a).reconciled == 1


@pytest.mark.cancels_queries
@pytest.mark.parametrize('stream_type', [DatabaseTaskEventStream, OwnStream])
async def test_a_deleted_task_ends_its_streams(
    sqlite_url: str, stream_type: type[DatabaseTaskEventStream]
) -> None:
    decorate = wrapping(reconcile_interval=0.4, poll_interval=0.1)
    async with cluster(sqlite_url, decorate=decorate, stream_type=stream_type) as lab:
        task = await lab.a.turn('ask')
        watches = await lab.watch(task)
        await lab.c.store.delete(task.id, caller())
        for watch in watches:
            assert await watch.until(lambda w: w.ending, 10)
            assert watch.timeline == ('Task(INPUT_REQUIRED)', 'TaskNotFoundError')


# Follow-ups that name only their task (F18).


async def test_the_context_is_filled_in_only_where_it_is_missing(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    asked: list[SendMessageRequest] = []
    answer = lab.b.stock.on_message_send

    async def note(params: SendMessageRequest, context: Any) -> Any:
        asked.append(params)
        return await answer(params, context)

    lab.b.stock.on_message_send = note  # type: ignore[method-assign]
    for context_id in ('', task.context_id):
        message = Message(
            role=Role.ROLE_USER,
            message_id=f'm{context_id}',
            task_id=task.id,
            context_id=context_id,
            parts=[Part(text='work ask')],
        )
        request = SendMessageRequest(message=message)
        told = await lab.b.handler.on_message_send(request, caller())
        assert isinstance(told, Task)
        assert told.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
        assert asked[-1].message.context_id == task.context_id
        assert (asked[-1] is request) == bool(context_id)
        assert request.message.context_id == context_id
    message.context_id = ''
    with pytest.raises(TaskNotFoundError):
        await lab.b.handler.on_message_send(
            SendMessageRequest(message=message), caller('somebody else')
        )
