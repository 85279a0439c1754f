"""The rules of a stream: what it delivers, what it skips, when it ends. Nothing here waits.

The numbers are those of the contract (docs/contract.md). `follow` does the waiting and asks here.
"""

from enum import Enum, auto
from typing import Final

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.types import Message, Role, Task, TaskState, TaskStatusUpdateEvent

from cluster_subscribe.settings import CloseOn

TERMINAL_STATES: Final = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_REJECTED,
    }
)


class Comparison(Enum):
    """How the stored task stands to what a stream has delivered."""

    EQUAL = auto()
    """All that is stored was delivered."""
    AHEAD = auto()
    """More is stored than was delivered: the log may still bring it."""
    BEHIND = auto()
    """Less is stored than was delivered: the log cannot bring that."""
    ANOTHER = auto()
    """The stored task is not the one that was followed."""


class StreamState:
    """What one stream has delivered, and so what it may deliver next."""

    __slots__ = ('_close_on', '_context_id', '_start', 'paused', 'position', 'state', 'task_id')

    def __init__(self, snapshot: StoredTask, close_on: CloseOn = CloseOn.TERMINAL) -> None:
        self.task_id = snapshot.task.id
        self.position = self._start = snapshot.version
        """The version that was delivered last."""
        self.state = snapshot.task.status.state
        """The task's state as it was delivered last."""
        self.paused = False
        """Whether the stream ends if nothing more is stored (rule 4)."""
        self._context_id = snapshot.task.context_id
        self._close_on = close_on

    def deliver(self, versioned: VersionedEvent) -> Event | None:
        """Takes the next event of the log; `None` if it is not for this stream (rules 2 and 3).

        Left out are events that do not follow the snapshot, and the row with which the SDK
        records a user's message at the start of a turn.
        """
        self.paused = False
        event, version = versioned.event, versioned.version
        if isinstance(event, Message):
            return event
        if not version.is_after(self._start):
            return None
        if version.is_after(self.position):
            self.position = version
        if self._records_a_message(event):
            return None
        self.state = state_of(event) or self.state
        return event

    def _records_a_message(self, event: Event) -> bool:
        return (
            isinstance(event, Task)
            and event.status.state == self.state
            and event.status.state not in TERMINAL_STATES
            and len(event.history) > 0
            and event.history[-1].role == Role.ROLE_USER
        )

    def ends_with(self, event: Event) -> bool:
        """Whether a stream is over once this event was delivered (rule 4).

        INPUT_REQUIRED only pauses it, as a later turn may have begun. AUTH_REQUIRED does not even
        that: the agent may go on by itself (A2A 7.6.1).
        """
        state = state_of(event)
        self.paused = (
            self._close_on is CloseOn.INTERRUPTED and state == TaskState.TASK_STATE_INPUT_REQUIRED
        )
        return isinstance(event, Message) or state in TERMINAL_STATES

    def compare(self, stored: StoredTask, *, comparable: bool) -> Comparison:
        """Compares the stored task with what was delivered (rule 5).

        Args:
            stored: The task as stored.
            comparable: Whether the versions of the events are the store's.
        """
        if stored.task.context_id != self._context_id != '':
            return Comparison.ANOTHER
        version = stored.version if comparable else self.position
        if self.is_at(version, stored.task.status.state):
            return Comparison.EQUAL
        if version == self.position or is_newer(version, self.position):
            return Comparison.AHEAD
        return Comparison.BEHIND

    def is_at(self, version: TaskVersion, state: TaskState | None) -> bool:
        """Whether a version and a state were delivered last; `None` for any state."""
        return version == self.position and state in (None, self.state)

    def restart(self, stored: StoredTask) -> Task:
        """Goes on behind the task as stored, which is delivered as a snapshot (rule 5)."""
        self._start = self.position = stored.version
        self.state = stored.task.status.state
        return copy_of(stored.task)


def state_of(event: Event) -> TaskState | None:
    """The state that an event announces."""
    return event.status.state if isinstance(event, Task | TaskStatusUpdateEvent) else None


def is_newer(one: TaskVersion, other: TaskVersion) -> bool:
    """Whether a version follows another. The SDK has MISSING follow itself."""
    return one != other and one.is_after(other)


def copy_of(task: Task) -> Task:
    """A copy, as a stored task may be cached by its store."""
    copy = Task()
    copy.CopyFrom(task)
    return copy
