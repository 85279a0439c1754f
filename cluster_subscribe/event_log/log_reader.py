"""What a subscriber asks of the reader that feeds it."""

from typing import TYPE_CHECKING, Protocol

from cluster_subscribe.event_log.rows import Current, Cursor

if TYPE_CHECKING:
    from cluster_subscribe.event_log.subscriber import Subscriber


class LogReader(Protocol):
    """The reader of a stream: the shared one, or one of its own."""

    page_size: int
    """How many events a subscriber may hold."""

    def schedule_read(self, task_id: str) -> None:
        """Has a task's log read in the next round."""

    def leave(self, subscriber: 'Subscriber') -> None:
        """Forgets a stream, at once."""

    def isolate(self, subscriber: 'Subscriber', reason: str) -> None:
        """Has a stream read by a reader of its own, with its own context variables."""

    async def current(self, task_id: str) -> Current | None:
        """The task's stored version and state, from a read that starts now or later."""

    async def recreated(self, task_id: str, after: Cursor) -> bool:
        """Whether the log proves that the task was recreated since a place in it."""
