"""The rules of a stream, a line each: what it delivers, skips, closes on and compares."""

import pytest

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.types import (
    Message,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from cluster_subscribe._testing import label
from cluster_subscribe.settings import CloseOn
from cluster_subscribe.subscription.rules import Comparison, StreamState

WORKING = TaskState.TASK_STATE_WORKING
COMPLETED = TaskState.TASK_STATE_COMPLETED
INPUT_REQUIRED = TaskState.TASK_STATE_INPUT_REQUIRED
AUTH_REQUIRED = TaskState.TASK_STATE_AUTH_REQUIRED
START = 3
"""The version of the snapshot, at which the task is WORKING."""


def task(state: TaskState, *history: Role, context_id: str = 'context') -> Task:
    messages = [Message(role=role) for role in history]
    return Task(id='task', context_id=context_id, status=TaskStatus(state=state), history=messages)


def status(state: TaskState) -> TaskStatusUpdateEvent:
    return TaskStatusUpdateEvent(task_id='task', status=TaskStatus(state=state))


def at(version: int) -> TaskVersion:
    return TaskVersion(version) if version else TaskVersion.MISSING


def stream(close_on: CloseOn = CloseOn.INTERRUPTED) -> StreamState:
    return StreamState(StoredTask(task(WORKING), at(START)), close_on)


ARTIFACT = TaskArtifactUpdateEvent(task_id='task')
USER, AGENT = Role.ROLE_USER, Role.ROLE_AGENT


@pytest.mark.parametrize(
    ('version', 'event', 'delivered'),
    [
        # Rule 2: what follows the snapshot, and nothing else.
        (START - 1, status(WORKING), False),
        (START, status(WORKING), False),
        (START, ARTIFACT, False),
        (START + 1, status(WORKING), True),
        (START + 1, ARTIFACT, True),
        (START + 9, ARTIFACT, True),
        (START + 1, task(COMPLETED), True),
        # A Message has no version.
        (0, Message(), True),
        # Rule 3: the row that records a user's message.
        (START + 1, task(WORKING, USER), False),
        (START + 1, task(WORKING, AGENT, USER), False),
        (START + 1, task(WORKING, USER, AGENT), True),
        (START + 1, task(WORKING), True),
        (START + 1, task(INPUT_REQUIRED, USER), True),
    ],
)
def test_what_is_delivered(version: int, event: Event, *, delivered: bool) -> None:
    versioned = VersionedEvent(event=event, version=at(version))
    assert (stream().deliver(versioned) is event) is delivered


def test_a_terminal_task_is_delivered_though_its_last_message_is_a_users() -> None:
    state = StreamState(StoredTask(task(COMPLETED), at(START)))
    last = task(COMPLETED, USER)
    assert state.deliver(VersionedEvent(event=last, version=at(START + 1))) is last


def test_two_events_of_one_version_are_both_delivered() -> None:
    state = stream()
    for event in (ARTIFACT, status(TaskState.TASK_STATE_CANCELED)):
        assert state.deliver(VersionedEvent(event=event, version=at(START + 1))) is event


def test_what_records_a_message_counts_as_delivered() -> None:
    state = stream()
    assert not state.deliver(VersionedEvent(event=task(WORKING, USER), version=at(START + 1)))
    assert (
        state.compare(StoredTask(task(WORKING), at(START + 1)), comparable=True) is Comparison.EQUAL
    )


@pytest.mark.parametrize(
    ('event', 'close_on', 'ends', 'pauses'),
    [
        (status(WORKING), CloseOn.INTERRUPTED, False, False),
        (ARTIFACT, CloseOn.INTERRUPTED, False, False),
        (status(INPUT_REQUIRED), CloseOn.INTERRUPTED, False, True),
        (task(INPUT_REQUIRED), CloseOn.INTERRUPTED, False, True),
        (status(INPUT_REQUIRED), CloseOn.TERMINAL, False, False),
        (status(AUTH_REQUIRED), CloseOn.INTERRUPTED, False, False),
        (Message(), CloseOn.INTERRUPTED, True, False),
        *(
            (event, close_on, True, False)
            for close_on in CloseOn
            for terminal in (
                COMPLETED,
                TaskState.TASK_STATE_CANCELED,
                TaskState.TASK_STATE_FAILED,
                TaskState.TASK_STATE_REJECTED,
            )
            for event in (status(terminal), task(terminal))
        ),
    ],
    ids=lambda value: label(value) if hasattr(value, 'DESCRIPTOR') else None,
)
def test_what_ends_a_stream(event: Event, close_on: CloseOn, *, ends: bool, pauses: bool) -> None:
    state = stream(close_on)
    assert (state.ends_with(event), state.paused) == (ends, pauses)


def test_a_pause_is_over_with_the_next_event() -> None:
    state = stream()
    state.ends_with(status(INPUT_REQUIRED))
    state.deliver(VersionedEvent(event=task(INPUT_REQUIRED, USER), version=at(START + 1)))
    assert not state.paused


@pytest.mark.parametrize(
    ('stored', 'version', 'comparable', 'expected'),
    [
        # Rule 5.
        (task(WORKING), START, True, Comparison.EQUAL),
        (task(COMPLETED), START, True, Comparison.AHEAD),
        (task(WORKING), START + 1, True, Comparison.AHEAD),
        (task(COMPLETED), START + 1, True, Comparison.AHEAD),
        (task(WORKING), START - 1, True, Comparison.BEHIND),
        (task(COMPLETED), START - 1, True, Comparison.BEHIND),
        (task(WORKING), 0, True, Comparison.BEHIND),
        # Only the state can be compared.
        (task(WORKING), START + 1, False, Comparison.EQUAL),
        (task(WORKING), START - 1, False, Comparison.EQUAL),
        (task(COMPLETED), START - 1, False, Comparison.AHEAD),
        (task(WORKING, context_id='other'), START, True, Comparison.ANOTHER),
        (task(WORKING, context_id=''), START, False, Comparison.ANOTHER),
    ],
)
def test_how_the_stored_task_compares(
    stored: Task, version: int, expected: Comparison, *, comparable: bool
) -> None:
    compared = stream().compare(StoredTask(stored, at(version)), comparable=comparable)
    assert compared is expected


def test_a_task_without_a_context_is_not_another() -> None:
    state = StreamState(StoredTask(task(WORKING, context_id=''), at(START)))
    stored = StoredTask(task(WORKING, context_id='context'), at(START))
    assert state.compare(stored, comparable=True) is Comparison.EQUAL


@pytest.mark.parametrize('version', [START - 2, START, START + 2])
def test_a_snapshot_in_mid_stream_starts_anew(version: int) -> None:
    state, stored = stream(), StoredTask(task(INPUT_REQUIRED), at(version))
    snapshot = state.restart(stored)
    assert snapshot == stored.task
    assert snapshot is not stored.task
    assert state.compare(stored, comparable=True) is Comparison.EQUAL
    assert not state.deliver(VersionedEvent(event=ARTIFACT, version=at(version)))
    assert state.deliver(VersionedEvent(event=ARTIFACT, version=at(version + 1)))
