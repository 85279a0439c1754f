"""What a subscription reads from: a feed of events, and the stored task."""

from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.types import TaskState

from cluster_subscribe.event_log.rows import Current


class Feed(Protocol):
    """What a stream takes its events from."""

    versions_comparable: bool
    """Whether the versions of the events are the store's."""

    @property
    def drained(self) -> bool:
        """Whether nothing is buffered."""

    @property
    def ended(self) -> bool:
        """Whether the event stream is over and everything it gave was taken."""

    async def next(self) -> VersionedEvent | None:
        """Takes the next event, or `None` when the store should be read.

        Raises:
            Exception: Whatever ended the event stream.
        """

    async def compare(self, version: TaskVersion, owner: str | None, position: TaskVersion) -> None:
        """Takes the stored version and owner, as the stream has read them, and its position.

        Raises:
            TaskNotFoundError: The task was deleted and another is stored under its id.
            Exception: That cannot be told at the moment.
        """

    async def current(self) -> Current | None:
        """The stored version and state, where they are cheaper to have than the task."""

    async def is_exhausted(self, stored: StoredTask) -> bool:
        """Whether the events hold nothing more, though more is stored than they hold."""

    def restart(self, stored: StoredTask) -> None:
        """Goes on behind a task that the stream got as a snapshot."""

    def reconcile_failed(self) -> None:
        """Has `next()` give `None` again in a while: the store could not be read."""

    def close(self) -> None:
        """Ends the reading, without waiting."""


class OwnedTask(NamedTuple):
    """A task as stored, and whose it is."""

    stored: StoredTask
    owner: str | None
    """The owner of its rows, read before the task; `None` where that is not known."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stream gets its events, and what it compares itself with."""

    open: Callable[[TaskVersion, TaskState], Feed]
    """Begins to read behind a version, at which the task had a state."""
    read: Callable[[], Awaitable[OwnedTask | None]]
    """Reads the task as stored, with the subscriber's own call context."""
    variables: Context
    """The context variables of the subscriber's request."""
