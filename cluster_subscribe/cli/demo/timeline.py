"""What one client was told by its stream, when, and whether it was right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from a2a.types import StreamResponse, Task, TaskState, TaskStatus

STEPS: Final = {
    'work=1': 'WORKING 1',
    'work=2': 'WORKING 2',
    'art=x': 'artifact x',
    'work=3': 'WORKING 3',
    'art=y': 'artifact y',
    'done': 'COMPLETED',
}
"""Turn 2: the agent's words, and the event that each makes. No two events are alike, so
that a snapshot tells which of them it holds."""

COMPLETED: Final = STEPS['done']
CLOSED: Final = 'closed'
OPEN: Final = 'still open, silent'


@dataclass(frozen=True)
class Told:
    """One thing a client was told."""

    seconds: float
    """Since the reply was sent."""
    text: str
    """The event, or how the stream ended."""
    snapshot: bool = False
    """Whether it was the whole task."""
    held: int = 0
    """The events of turn 2 that a snapshot holds."""


@dataclass
class Timeline:
    """One subscription, through one replica."""

    replica: str
    events: list[Told] = field(default_factory=list)
    ending: Told | None = None
    """`None` while it is watched."""

    @property
    def right(self) -> bool:
        """Whether it kept the contract: a true snapshot, each later event once, closed."""
        if not self.events or self.ending is None or self.ending.text != CLOSED:
            return False
        first, *rest = self.events
        return (
            # The clients subscribe when turn 2 has begun: an earlier snapshot is wrong.
            first.snapshot
            and first.held > 0
            and [(told.text, told.snapshot) for told in rest]
            == [(text, False) for text in list(STEPS.values())[first.held :]]
        )

    @property
    def rows(self) -> Sequence[Told]:
        """The events, and the ending."""
        return self.events + ([self.ending] if self.ending else [])


def told(seconds: float, response: StreamResponse) -> Told:
    """Puts an event in a word or two."""
    kind = response.WhichOneof('payload')
    if kind == 'task':
        task = response.task
        return Told(seconds, status(task.status), snapshot=True, held=_held(task))
    if kind == 'artifact_update':
        return Told(seconds, _artifact(response.artifact_update.artifact.artifact_id))
    if kind == 'status_update':
        return Told(seconds, status(response.status_update.status))
    return Told(seconds, 'Message')


def status(status: TaskStatus) -> str:
    """A state, with the agent's word on it: `WORKING 2`."""
    state = TaskState.Name(status.state).removeprefix('TASK_STATE_')
    return ' '.join([state, *(part.text for part in status.message.parts)])


def _artifact(artifact_id: str) -> str:
    return f'artifact {artifact_id}'


def _held(task: Task) -> int:
    seen = {status(task.status), *(_artifact(one.artifact_id) for one in task.artifacts)}
    return max((at for at, text in enumerate(STEPS.values(), 1) if text in seen), default=0)
