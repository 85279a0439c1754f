"""Streams that are read one by one.

What an engine's hooks let a connection see may depend on context variables. The shared reader
has none; where it cannot see a stream's task, or a hook may be why it fails, the stream gets a
reader of its own, which runs with the context variables of whoever subscribed.
"""

import logging

from collections.abc import Callable, Iterable
from typing import Protocol

from cluster_subscribe.event_log.by_task import ByTask
from cluster_subscribe.event_log.log_reader import LogReader
from cluster_subscribe.event_log.subscriber import Subscriber
from cluster_subscribe.telemetry import Once

logger = logging.getLogger(__name__)


class SingleReader(LogReader, Protocol):
    """The reader of a single stream."""

    def join(self, subscriber: Subscriber) -> None:
        """Begins to feed the stream."""

    def fail(self, message: str) -> None:
        """Ends the stream with an error."""


class IsolatedReaders:
    """The readers of single streams, by task.

    Args:
        new_reader: Makes a reader that runs with the variables of a `context`.
        once: Has it logged once that there are such streams.
    """

    def __init__(self, new_reader: Callable[..., SingleReader], once: Once) -> None:
        self._new_reader = new_reader
        self._once = once
        self._readers: ByTask[SingleReader] = ByTask()

    @property
    def task_ids(self) -> Iterable[str]:
        """The tasks whose streams are read here."""
        return self._readers.task_ids

    def __len__(self) -> int:
        return len(self._readers)

    def __bool__(self) -> bool:
        return bool(self._readers)

    def add(self, subscriber: Subscriber, reason: str) -> None:
        """Moves a stream from its reader to one of its own.

        Args:
            subscriber: The stream.
            reason: Why the shared reader cannot read for it.
        """
        if self._once('isolated'):
            logger.warning(
                'Streams are read one by one, as the shared reader cannot read for them: %s',
                reason,
            )
        subscriber.close()
        reader = self._new_reader(context=subscriber.variables)
        subscriber.move_to(reader)
        self._readers.add(subscriber.task_id, reader)
        reader.join(subscriber)

    def remove(self, task_id: str, reader: SingleReader) -> None:
        """Forgets a reader, whose stream has left."""
        self._readers.remove(task_id, reader)

    def schedule_read(self, task_ids: Iterable[str] | None) -> None:
        """Has tasks read by the readers of their streams; `None` for all."""
        for task_id in list(self._readers.task_ids) if task_ids is None else task_ids:
            for reader in self._readers.of(task_id):
                reader.schedule_read(task_id)

    def fail(self, message: str) -> None:
        """Ends every stream with an error."""
        for reader in list(self._readers):
            reader.fail(message)
