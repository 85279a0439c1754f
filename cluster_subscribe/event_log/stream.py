"""`SharedTailEventStream`: the SDK's event log, read once per replica."""

import asyncio
import logging

from collections.abc import AsyncGenerator, Collection
from contextlib import suppress

from a2a.server.cluster import TaskEventStream, TaskVersion, VersionedEvent
from a2a.types import TaskState
from a2a.utils.errors import A2AError, TaskNotFoundError
from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe import sdk
from cluster_subscribe.background import Background
from cluster_subscribe.engines import shared_connection
from cluster_subscribe.errors import EventStreamEndedError, UnsupportedHandlerError
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.reader import Reader
from cluster_subscribe.event_log.reconcile import read_stored
from cluster_subscribe.event_log.rows import Cursor, Stored
from cluster_subscribe.event_log.subscriber import Subscriber
from cluster_subscribe.event_log.wakeup import wakeup_for
from cluster_subscribe.settings import Settings, WakeupMode
from cluster_subscribe.task_ids import is_valid_task_id
from cluster_subscribe.telemetry import TailStatistics, TailTelemetry

logger = logging.getLogger(__name__)


class SharedTailEventStream(TaskEventStream):
    """A `TaskEventStream` over the SDK's own `task_events` and `task_versions` tables.

    One reader serves every subscription of the process; the tables stay the SDK's,
    so replicas with the stock stream may run beside it. The caller owns the engine. The
    reader takes one pooled connection while it reads; waiting for wakeups takes one
    more, outside the pool, on PostgreSQL and SQLite.

    Args:
        engine: The engine of the database that the task store writes to.
        create_table: Whether to create the tables where they are missing.
        table_name: The event table, as given to the store as `event_table_name`; or the
            `__table__` of a model, in whatever schema it is.
        version_table_name: The version table, as given to the store; or a table.
        task_table_name: The task table, where its states are to be compared with the
            log (F19); or a table.
        settings: `poll_interval`, `reconcile_interval`, `wakeup` and
            `max_buffered_events` apply; read from the environment when not given.

    Raises:
        UnsupportedHandlerError: All users of the engine share one connection. A `TypeError`.
    """

    def __init__(  # noqa: PLR0913 - as the SDK's own stream has it
        self,
        engine: AsyncEngine,
        create_table: bool = True,  # noqa: FBT001, FBT002 - as the SDK's own stream has it
        table_name: str | Table = 'task_events',
        version_table_name: str | Table = 'task_versions',
        *,
        task_table_name: str | Table | None = None,
        settings: Settings | None = None,
    ) -> None:
        if shared := shared_connection(engine):
            raise UnsupportedHandlerError(
                f'The users of this engine share one connection ({shared}), and a read beside '
                "the agent would end the agent's transaction: use a server or an SQLite file"
            )
        settings = settings or Settings()
        self._background = Background()
        self._telemetry = TailTelemetry()
        self._log = log = EventLog(
            engine, table_name, version_table_name, tasks=task_table_name, create_table=create_table
        )

        def new_reader() -> Reader:
            wakeup = (
                wakeup_for(engine, log.schema.events)
                if settings.wakeup is WakeupMode.AUTO
                else None
            )
            return Reader(log, wakeup, self._background, settings, self._telemetry)

        self._new_reader = new_reader
        self._reader = new_reader()

    def _reader_here(self) -> Reader:
        """The reader of the running event loop.

        Raises:
            EventStreamEndedError: Another loop is served, which still runs.
        """
        if self._background.enter():
            self._reader = self._new_reader()
        return self._reader

    async def publish(self, task_id: str, event: VersionedEvent) -> None:
        """Wakes the readers; the event itself is in the log already.

        Never waits and never raises: an exception out of it would fail the task.
        """
        del event
        self.wake(task_id, 'publish')

    def wake(self, task_id: str, source: str) -> None:
        """Hints that a task has changed, to the streams here and on the other replicas."""
        running, served = asyncio.get_running_loop(), self._background.loop
        if served is None or served is running or not served.is_running():
            # In the loop's next iteration, since the agent waits for `publish()`.
            running.call_soon(self._task_changed, task_id, source)
            return
        with suppress(RuntimeError):  # closed meanwhile
            served.call_soon_threadsafe(self._task_changed, task_id, source)

    def _task_changed(self, task_id: str, source: str) -> None:
        # Another loop may be served by now.
        with suppress(EventStreamEndedError):
            self._reader_here().task_changed(task_id, source)

    def open(
        self,
        task_id: str,
        after: TaskVersion,
        owner: str | None,
        *,
        state: TaskState | None = None,
        strict: bool = True,
    ) -> Subscriber:
        """Begins to read a task's log for one stream.

        Args:
            task_id: The task.
            after: The version of the snapshot that the stream begins with.
            owner: The task's owner; rows of another are never delivered.
            state: The task's state at that version, to be compared with the stored one.
            strict: Whether the stream can read the store when the log has a gap. One that
                cannot passes over gaps, as the SDK's own stream does.

        Raises:
            EventStreamEndedError: After `aclose()`, or on another event loop than the one
                that is served and still runs.
            TaskNotFoundError: No database can look for the id.
            TypeError: The version is not an integer.
        """
        # A query for an id that the database refuses would fail for all streams.
        if not is_valid_task_id(task_id):
            raise TaskNotFoundError
        cursor = Cursor.end_of(sdk.version_number(after))
        reader = self._reader_here()
        subscriber = Subscriber(task_id, owner, cursor, reader, state=state, strict=strict)
        reader.join(subscriber)
        return subscriber

    async def subscribe(
        self, task_id: str, *, after: TaskVersion, owner: str | None = None
    ) -> AsyncGenerator[VersionedEvent, None]:
        """Yields the events of a task that follow a version, in log order.

        Args:
            task_id: The task.
            after: The version to start after.
            owner: Rows of another owner are left out; whoever owns the stored task
                when not given.

        Raises:
            TaskNotFoundError: The task was deleted, or deleted and recreated; or no
                database can look for its id.
            EventStreamEndedError: The log cannot be read, or the server is stopping.
        """
        if owner is None and is_valid_task_id(task_id):
            stored = await self.stored([task_id])
            owner = stored[task_id].owner if task_id in stored else None
        subscriber = self.open(task_id, after, owner, strict=False)
        try:
            while True:
                if versioned := await subscriber.next():
                    yield versioned
                else:
                    await self._reconcile(subscriber)
        finally:
            subscriber.close()

    async def _reconcile(self, subscriber: Subscriber) -> None:
        """Compares a stream with `task_versions` (rule 5), as it has no store to read."""
        try:
            found = await self.stored([subscriber.task_id])
            stored = found.get(subscriber.task_id)
            if stored is not None and stored.owner == subscriber.owner:
                store_is_behind = stored.version < subscriber.position
                await subscriber.compare(TaskVersion(stored.version), stored.owner)
                if store_is_behind:
                    subscriber.continue_after(stored.version)
                return
        except A2AError:
            raise
        except Exception:
            logger.debug('Task %s could not be compared', subscriber.task_id, exc_info=True)
            subscriber.reconcile_failed()
            return
        raise TaskNotFoundError(f'Task {subscriber.task_id} was deleted')

    async def stored(self, task_ids: Collection[str]) -> dict[str, Stored]:
        """The stored owner and version of each task that is there, in one read."""
        self._reader_here()
        return await self._background.run(read_stored(self._log, task_ids), 'read versions')

    async def destroy(self, task_id: str) -> None:
        """Does nothing: the log is kept, and streams end on their own."""

    def statistics(self) -> TailStatistics:
        """The counters of this event stream."""
        return self._reader.statistics()

    async def aclose(self) -> None:
        """Ends every open stream with an error, and every task and connection of its own."""
        self._reader_here().close()
        await self._background.aclose()
