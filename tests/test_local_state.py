"""How a replica's memory of a task stands to the store, and when it may go: a line each."""

from typing import Any
from unittest.mock import Mock

import pytest

from a2a.server.cluster import TaskVersion

from cluster_subscribe import sdk
from cluster_subscribe.local_state import LocalState, classify, is_superseded, unregister
from cluster_subscribe.sdk import LocalTask

MISSING = TaskVersion.MISSING
OLD, NEW = TaskVersion(3), TaskVersion(4)


def held(version: TaskVersion = OLD, **how: Any) -> LocalTask:
    """An `ActiveTask` between two turns: nothing runs, nobody reads."""
    values = dict.fromkeys(LocalTask._fields, False) | {'is_unused': True} | how
    return LocalTask(**values | {'version': version, 'active': Mock(), 'executor': Mock()})


@pytest.mark.parametrize(
    ('local', 'stored', 'arriving', 'expected'),
    [
        (None, NEW, False, LocalState.ABSENT),
        (None, NEW, True, LocalState.ABSENT),
        (held(OLD), OLD, False, LocalState.IDLE),
        (held(OLD), NEW, False, LocalState.STALE),
        # A lower version is that of a later incarnation.
        (held(NEW), OLD, False, LocalState.STALE),
        (held(OLD), MISSING, False, LocalState.STALE),
        # While it has no copy, the SDK reads the store next.
        (held(MISSING), NEW, False, LocalState.IDLE),
        # A turn lags its own saves.
        (held(OLD, turn_running=True), NEW, False, LocalState.LIVE),
        (held(OLD), NEW, True, LocalState.LIVE),
        # A stream is no turn (F30).
        (held(OLD, read=True, is_unused=False), NEW, False, LocalState.STALE),
    ],
)
def test_classify(
    local: LocalTask | None, stored: TaskVersion, expected: LocalState, *, arriving: bool
) -> None:
    assert classify(local, stored, message_incoming=arriving) is expected


@pytest.mark.parametrize(
    ('version', 'stored', 'expected'),
    [
        (OLD, OLD, False),
        (OLD, NEW, True),
        (NEW, OLD, True),
        (OLD, None, True),
        (OLD, MISSING, True),
        (MISSING, NEW, False),
        (MISSING, None, False),
    ],
)
def test_is_superseded(version: TaskVersion, stored: TaskVersion | None, *, expected: bool) -> None:
    assert is_superseded(held(version), stored) is expected


FINISHED: dict[str, Any] = {'finished': True, 'is_unused': False}
CLOSED: dict[str, Any] = {**FINISHED, 'closed': True}


@pytest.mark.parametrize(
    ('local', 'stored', 'turns', 'goes'),
    [
        # Overtaken: nothing may run, and nobody may still write.
        (held(OLD), NEW, {}, True),
        (held(OLD), None, {}, True),
        (held(OLD), OLD, {}, False),
        (held(OLD, is_unused=False), NEW, {}, False),
        (held(OLD), NEW, {'may_write': True}, False),
        (held(OLD), NEW, None, False),
        # Finished: once nothing of it runs.
        (held(**FINISHED, ended=True), OLD, {}, True),
        (held(**FINISHED, ended=True), OLD, None, True),
        (held(**FINISHED), NEW, {}, False),
        # Up to a2a-sdk 1.2.2 it may never end.
        (held(**CLOSED), OLD, {}, True),
        (held(**CLOSED, unhandled=True), OLD, {}, False),
        (held(**CLOSED, read=True), OLD, {}, False),
        (held(**CLOSED), OLD, {'runs': True}, False),
        (held(**CLOSED), OLD, {'knows': False}, False),
        (held(**CLOSED), OLD, None, False),
    ],
)
def test_what_may_go(
    monkeypatch: pytest.MonkeyPatch,
    local: LocalTask,
    stored: TaskVersion | None,
    turns: dict[str, bool] | None,
    *,
    goes: bool,
) -> None:
    monkeypatch.setattr(sdk, 'unregister', lambda handler, active: True)
    known = {'may_write': False, 'runs': False, 'knows': True} | (turns or {})
    seam = Mock(**{f'{name}.return_value': value for name, value in known.items()})
    assert unregister(Mock(), local, stored, None if turns is None else seam) is goes
