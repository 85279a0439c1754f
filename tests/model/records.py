"""What the bench keeps of its tasks, turns and streams."""

import asyncio

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from a2a.types import Task

from cluster_subscribe._testing import Replica, Watch
from cluster_subscribe._testing.cluster import Turn
from cluster_subscribe.settings import CloseOn, Evict
from tests.model.model import Client, Incarnation, Seen
from tests.support.memory import TERMINAL


@dataclass(frozen=True)
class Config:
    """What distinguishes one random cluster from the next."""

    close_on: CloseOn = CloseOn.INTERRUPTED
    buffered: int = 256
    wakeups: str = 'auto'
    """`auto`, `poll`, or `none`: not even what the replica publishes itself."""
    evict: Evict = Evict.SUPERSEDED
    silent_cancel: bool = False
    scattered: bool = False
    """Whether `seq` is allocated in blocks, as by a sequence with a cache."""


class Brake(asyncio.Event):
    """Stops a reading client, and knows whether it stands."""

    stands = False

    async def wait(self) -> Any:
        self.stands = not self.is_set()
        try:
            return await super().wait()
        finally:
            self.stands = False


@dataclass(eq=False)
class Stream:
    """One subscription: the client's side, and the model's."""

    watch: Watch
    replica: Replica
    task: 'Known'
    brake: Brake
    client: Client | None = None
    """`None` until the snapshot has been compared."""

    blind: bool = False
    """Whether its task was deleted before it read on from the snapshot.

    Nobody looked for it then, so it may take a second incarnation for its own.
    """

    @property
    def lost(self) -> bool:
        """Whether it has read on, blind, in a second incarnation of its task."""
        read_on = len(self.watch.events) > 1 or not self.brake.stands
        return self.blind and read_on and self.task.now.task is not None

    @property
    def seen(self) -> Seen:
        return Seen(self.watch.events, self.watch.ending, self.brake.stands)


@dataclass(eq=False)
class Known:
    """A task as the model knows it."""

    task_id: str
    context_id: str
    past: list[Incarnation] = field(default_factory=list)
    now: Incarnation = field(default_factory=lambda: Incarnation(()))
    chunked: bool = False
    meddled: bool = False
    """Whether it was saved behind the log's back."""
    raced: bool = False
    """Whether the SDK may have lost artifacts: a cancel overwrites what it has not read."""
    ran: set[int] = field(default_factory=set)
    """The replicas that a turn was begun at."""
    saves: list[tuple[int, Task]] = field(default_factory=list)
    """What was saved since the last comparison: versions and tasks."""

    def incarnation(self, number: int) -> Incarnation:
        return self.past[number] if number < len(self.past) else self.now

    @property
    def alive(self) -> bool:
        return self.now.task is not None and self.now.task.status.state not in TERMINAL


@dataclass(eq=False)
class Play:
    """One turn of the scripted agent, with a gate before each word."""

    turn: Turn
    replica: Replica
    task: Known
    gates: Sequence[str]
    passed: int = 0
    incarnation: int = 0

    @property
    def over(self) -> bool:
        return self.turn.reader.done()
