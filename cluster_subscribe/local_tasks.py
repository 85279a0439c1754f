"""What this replica holds of tasks in memory: who uses it, and when it is evicted.

An `ActiveTask` is used while a request for its task is under way. Only a turn makes the
replica the one where the task runs; an open stream does not (F30).
"""

import asyncio
import logging

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from a2a.server.cluster import StoredTask, TaskEventStream, TaskVersion, VersionedTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers import RequestHandler
from a2a.utils.errors import A2AError, TaskNotFoundError

from cluster_subscribe import sdk
from cluster_subscribe.background import Background
from cluster_subscribe.event_log import SharedTailEventStream
from cluster_subscribe.executor_seam import ExecutorSeam
from cluster_subscribe.local_state import LocalState, classify, is_superseded, unregister
from cluster_subscribe.sdk import LocalTask
from cluster_subscribe.settings import Evict, Mode, Settings
from cluster_subscribe.subscription.rules import TERMINAL_STATES
from cluster_subscribe.telemetry import Telemetry
from cluster_subscribe.waiting import Signal

logger = logging.getLogger(__name__)


class LocalTasks:
    """Guards the `ActiveTask`s of one wrapped handler. Lives as long as the app."""

    def __init__(  # noqa: PLR0913
        self,
        handler: RequestHandler,
        *,
        settings: Settings,
        store: VersionedTaskStore,
        stream: TaskEventStream,
        read: Callable[[str, ServerCallContext], Awaitable[StoredTask | None]],
        background: Background,
        telemetry: Telemetry,
        turns: ExecutorSeam | None,
    ) -> None:
        self._handler = handler
        self._settings = settings
        self._store = store
        self._stream = stream
        self._read = read
        self._background = background
        self._telemetry = telemetry
        self._turns = turns
        self._active_requests: Counter[str] = Counter()
        self._incoming_messages: Counter[str] = Counter()
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def active_requests(self) -> int:
        """How many tasks have a request under way."""
        return len(self._active_requests)

    @contextmanager
    def request(self, task_id: str) -> Iterator[None]:
        """Keeps the task's `ActiveTask` during a request that may use it."""
        self._start_sweeping()
        with _counted(self._active_requests, task_id):
            yield

    @contextmanager
    def message(self, task_id: str) -> Iterator[None]:
        """Counts a message until it is in the queue of the task's `ActiveTask`."""
        with _counted(self._incoming_messages, task_id):
            yield

    def turn_running(self, task_id: str) -> bool:
        """Whether a turn of the task runs here, or is about to."""
        local = sdk.local_task(self._handler, task_id)
        return task_id in self._incoming_messages or (local is not None and local.turn_running)

    def check(self, stored: StoredTask) -> LocalState:
        """Compares this replica's memory with the stored task, and evicts what is superseded."""
        task_id = stored.task.id
        local = sdk.local_task(self._handler, task_id)
        local_state = classify(
            local, stored.version, message_incoming=task_id in self._incoming_messages
        )
        self._telemetry.checked(task_id, local_state, stored.version)
        if local is not None:
            self.evict(local, stored.version)
        return local_state

    def evict(self, local: LocalTask, stored: TaskVersion | None) -> bool:
        """Unregisters and closes an `ActiveTask`, if nothing uses it; `False` if it stays.

        Nothing here waits, so no request can begin to use it meanwhile.
        """
        if (
            self._settings.mode is Mode.OBSERVE
            or self._settings.evict is Evict.OFF
            or self._background.closed
            or local.active.task_id in self._active_requests
            or not unregister(self._handler, local, stored, self._turns)
        ):
            return False
        self._telemetry.evicted(local.active.task_id)
        if not local.ended:
            _ = self._background.start(local.active.aclose(), f'evict {local.active.task_id}')
        return True

    async def overtaken(
        self, task_id: str, read: Callable[[], Awaitable[StoredTask | None]]
    ) -> StoredTask | None:
        """The task as stored, if the store has gone on without a turn here.

        Raises:
            TaskNotFoundError: The task was deleted.
        """
        version = self._settled_version(task_id)
        if version is None:
            return None
        try:
            stored = await read()
        except A2AError:
            raise
        except Exception as error:  # noqa: BLE001 - the next comparison says
            self._telemetry.reconcile_failed(task_id, error)
            return None
        if version != self._settled_version(task_id):
            return None
        if stored is None:
            raise TaskNotFoundError
        return None if stored.version == version else stored

    def _settled_version(self, task_id: str) -> TaskVersion | None:
        """The version of the copy held here; `None` while it may change."""
        local = sdk.local_task(self._handler, task_id)
        if local is None:
            return TaskVersion.MISSING
        return None if self.turn_running(task_id) or local.unhandled else local.version

    async def drop_stale_copy(self, task_id: str, context: ServerCallContext) -> None:
        """Has the SDK read the store before it writes CANCELED, which it does unchecked (F9).

        A running turn lags its own saves: its copy is old if it has not changed when the store is
        read once more.
        """
        seen: TaskVersion | None = None
        for _ in range(2):
            if sdk.local_task(self._handler, task_id) is None:
                return
            stored = await self._read(task_id, context)
            local = sdk.local_task(self._handler, task_id)
            if stored is None or local is None:
                return
            if stored.task.status.state in TERMINAL_STATES:
                # The SDK refuses the cancel, and by its old copy what the agent emits late.
                return
            if not is_superseded(local, stored.version) or self.evict(local, stored.version):
                return
            if local.version == seen or not local.turn_running:
                sdk.forget_copy(local.active)
                return
            seen = local.version

    def _start_sweeping(self) -> None:
        if (
            self._settings.evict is Evict.SUPERSEDED
            and self._settings.mode is not Mode.OBSERVE
            and self._background.can_run(self._sweeping)
        ):
            stop = Signal()
            self._sweeping = self._background.spawn(self._sweep(stop), 'sweep', stop=stop.set)

    async def _sweep(self, stop: Signal) -> None:
        while not await stop.within(self._settings.sweep_interval):
            try:
                await self.sweep()
            except Exception:
                logger.warning('Superseded tasks could not be swept; trying again', exc_info=True)

    async def sweep(self) -> int:
        """Closes the superseded and finished `ActiveTask`s of this replica.

        Runs by itself every `sweep_interval` seconds; the stored versions of all that
        are at rest come from one read.

        Returns:
            How many were closed.
        """
        held = sdk.local_tasks(self._handler)
        finished = [local for local in held if local.finished]
        idle = [
            local
            for local in held
            if local.is_unused and not local.finished and not local.version.is_missing
        ]
        stored = await self._stored_versions(idle)
        closed = 0
        for task_id in {local.active.task_id for local in finished + idle}:
            # Looked at again: it may have been used while the store was read.
            local = sdk.local_task(self._handler, task_id)
            if local is not None and (local.finished or task_id in stored):
                closed += self.evict(local, stored.get(task_id))
        return closed

    async def _stored_versions(self, idle: Collection[LocalTask]) -> dict[str, TaskVersion | None]:
        task_ids = [local.active.task_id for local in idle]
        if task_ids and isinstance(self._stream, SharedTailEventStream):
            found = await self._stream.stored(task_ids)
            return {
                task_id: TaskVersion(found[task_id].version) if task_id in found else None
                for task_id in task_ids
            }
        versions: dict[str, TaskVersion | None] = {}
        for local in idle:
            if (context := sdk.call_context(local.active)) is not None:
                stored = await self._store.get(local.active.task_id, context)
                versions[local.active.task_id] = stored.version if stored else None
        return versions


@contextmanager
def _counted(counter: Counter[str], task_id: str) -> Iterator[None]:
    counter[task_id] += 1
    try:
        yield
    finally:
        counter[task_id] -= 1
        if not counter[task_id]:
            del counter[task_id]
