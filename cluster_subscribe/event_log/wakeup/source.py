"""What a source of wakeups is."""

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

WakeCallback = Callable[[Iterable[str] | None, str], None]
"""Takes the ids of the tasks that changed, `None` for any task, and the name of the source."""


class WakeupSource(Protocol):
    """Learns of commits by other processes."""

    async def run(self, wake: WakeCallback, wanted: Callable[[], bool]) -> None:
        """Calls `wake` until stopped, or until `wanted()` has been false for a while.

        Whatever it raises, it is run again after a pause.
        """

    def stop(self) -> None:
        """Makes `run()` return soon, for good."""


@runtime_checkable
class NotifyingSource(WakeupSource, Protocol):
    """A source that other replicas have to be told through, as a commit alone is not seen."""

    def notify(self, task_id: str) -> None:
        """Tells the other replicas that a task changed. Never waits, never raises."""
