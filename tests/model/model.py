"""The oracle: what a stream has to carry, from the rows of the log and the stored task.

It knows nothing of how the package works. A stream stands at a version; the log and the
store say what comes next, and whether it may end where it stands.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

from a2a.server.events import Event
from a2a.types import Role, Task, TaskArtifactUpdateEvent, TaskState, TaskStatusUpdateEvent

from cluster_subscribe._testing import label
from tests.support.memory import TERMINAL

QUESTION: Final = TaskState.TASK_STATE_INPUT_REQUIRED
_BEHIND_ALL: Final = 2**63


@dataclass(frozen=True)
class Row:
    """One row of the log."""

    version: int
    seq: int
    event: Event


@dataclass(frozen=True)
class Incarnation:
    """What the database holds of a task, from its first save to its deletion."""

    rows: Sequence[Row]
    """In log order."""
    version: int = 0
    """As stored, or as it was when the task was deleted."""
    task: Task | None = None
    """As stored; `None` before the first save and after the deletion."""
    foundling: bool = False
    """Whether it is a later incarnation that began without a row.

    So nothing tells where the rows of the earlier one end: a published limit.
    """

    @property
    def spoilt(self) -> bool:
        """Whether its log cannot be followed exactly."""
        return self.torn or self.foundling

    @property
    def torn(self) -> bool:
        """Whether two writes share a version, or the log has one that the store has not (F20)."""
        versions = [row.version for row in self.rows]
        return len(set(versions)) < len(versions) or versions[-1:] > [self.version]

    def __str__(self) -> str:
        rows = [f'{row.version}/{row.seq} {label(row.event)}' for row in self.rows]
        return ', '.join([*rows, f'stored {self.version} {self.task and label(self.task)}'])


class Course:
    """Where a stream stands, and what comes next (rules 2 to 5)."""

    def __init__(self, snapshot: Task, version: int, *, ends_at_questions: bool) -> None:
        self._version, self._seq = version, _BEHIND_ALL
        self._state = snapshot.status.state
        self._announced = False
        """Whether the last thing in the log was an event that announced the state."""
        self._ends_at_questions = ends_at_questions

    def next(self, incarnation: Incarnation) -> Event | None:
        """Takes the next event; `None` where there is nothing more."""
        while row := self._next_row(incarnation):
            if row.version > self._version + 1:
                break
            self._version, self._seq = row.version, row.seq
            state = _state(row.event)
            self._announced = state is not None and not self._records_a_message(row.event)
            if state is not None and not self._announced:
                continue
            self._state = state or self._state
            return row.event
        if incarnation.task is None or self.agrees(incarnation):
            return None
        self._version, self._seq = incarnation.version, _BEHIND_ALL
        self._state, self._announced = incarnation.task.status.state, True
        return incarnation.task

    def must_end(self, incarnation: Incarnation) -> bool:
        """Whether the stream ends here (rule 4)."""
        return self._announced and (
            self._state in TERMINAL or (self.may_end() and self.agrees(incarnation))
        )

    def may_end(self) -> bool:
        """Whether the stream ends here if nothing newer was in the log when it looked."""
        return self._announced and (
            self._state in TERMINAL or (self._ends_at_questions and self._state == QUESTION)
        )

    def agrees(self, incarnation: Incarnation) -> bool:
        """Whether neither log nor store know anything newer."""
        return (
            incarnation.task is not None
            and incarnation.version <= self._version
            and incarnation.task.status.state == self._state
            and self._next_row(incarnation) is None
        )

    def _next_row(self, incarnation: Incarnation) -> Row | None:
        here = (self._version, self._seq)
        return next((row for row in incarnation.rows if (row.version, row.seq) > here), None)

    def _records_a_message(self, event: Event) -> bool:
        return (
            isinstance(event, Task)
            and event.status.state == self._state
            and event.status.state not in TERMINAL
            and len(event.history) > 0
            and event.history[-1].role == Role.ROLE_USER
        )


@dataclass
class Seen:
    """What a client has been given, and how its stream stands."""

    events: Sequence[Event]
    ending: str | None
    """`closed`, `cancelled`, the name of an error, or `None` while the stream is open."""
    pausing: bool
    """Whether the client has stopped to read."""


class Client:
    """One stream as it should be: compared with what its client was given."""

    def __init__(
        self, snapshot: Task, version: int, incarnation: int, *, ends_at_questions: bool
    ) -> None:
        self.incarnation = incarnation
        self._course = Course(snapshot, version, ends_at_questions=ends_at_questions)
        self._task = deepcopy(snapshot)
        self._compared = 1

    def fault(self, seen: Seen, incarnation: Incarnation, *, racing: bool) -> str | None:
        """What is wrong with a stream now that everything has been delivered.

        Args:
            seen: What the client was given.
            incarnation: The incarnation of the task that the stream belongs to.
            racing: Whether events were committed while others were delivered; a stream may
                then have ended at a question that was the newest at that time.
        """
        if incarnation.spoilt:
            return self._torn_fault(seen, incarnation)
        course = deepcopy(self._course)
        for event in seen.events[self._compared :]:
            if (right := course.next(incarnation)) != event:
                return f'got {label(event)} instead of {right and label(right)}'
        if seen.ending is not None:
            return self._ending_fault(course, seen, incarnation, racing=racing)
        if seen.pausing:
            return None
        if incarnation.task is None or course.must_end(incarnation):
            return f'is open after {label(seen.events[-1])}'
        return f'lacks {label(lacking)}' if (lacking := course.next(incarnation)) else None

    def _ending_fault(
        self, course: Course, seen: Seen, incarnation: Incarnation, *, racing: bool
    ) -> str | None:
        if seen.ending == 'TaskNotFoundError':
            right = incarnation.task is None
        else:
            place = (
                course.may_end()
                if racing or incarnation.task is None
                else course.must_end(incarnation)
            )
            right = seen.ending == 'closed' and place
        return None if right else f'ended ({seen.ending}) after {label(seen.events[-1])}'

    def _torn_fault(self, seen: Seen, incarnation: Incarnation) -> str | None:
        """All that can be asked of a stream whose log the SDK has spoilt."""
        # Two saves of one state without an event give two snapshots alike, and what an earlier
        # incarnation has said may be said again.
        events = [event for event in seen.events if not isinstance(event, Task)]
        twice = any(event in events[:place] for place, event in enumerate(events))
        if twice and not incarnation.foundling:
            return 'got an event twice'
        over = incarnation.task is None or incarnation.task.status.state in TERMINAL
        return 'hangs' if over and not (seen.ending or seen.pausing) else None

    def accept(self, seen: Seen, incarnation: Incarnation) -> int:
        """Takes what was compared for good, as a client does that keeps the task itself.

        Returns:
            How many events that were.
        """
        new = seen.events[self._compared :]
        for event in new if not incarnation.spoilt else ():
            self._course.next(incarnation)
            self._task = _folded(self._task, event)
        self._compared += len(new)
        return len(new)

    def abreast(self, incarnation: Incarnation) -> bool:
        """Whether the client knows all that is stored."""
        return not incarnation.spoilt and self._course.agrees(incarnation)

    def keeps(self, stored: Task) -> bool:
        """Whether the task that the client has put together is the one stored."""
        return self._task.status.state == stored.status.state and list(
            self._task.artifacts
        ) == list(stored.artifacts)


def _state(event: Event) -> TaskState | None:
    return event.status.state if isinstance(event, Task | TaskStatusUpdateEvent) else None


def _folded(task: Task, event: Event) -> Task:
    if isinstance(event, Task):
        return deepcopy(event)
    if isinstance(event, TaskStatusUpdateEvent):
        task.status.CopyFrom(event.status)
    elif isinstance(event, TaskArtifactUpdateEvent):
        found = [a for a in task.artifacts if a.artifact_id == event.artifact.artifact_id]
        if event.append:
            found[0].parts.extend(event.artifact.parts)
        elif found:
            found[0].CopyFrom(event.artifact)
        else:
            task.artifacts.append(event.artifact)
    return task
