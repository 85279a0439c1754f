"""A `VersionedTaskStore` around the user's: the end of a task that was written elsewhere stays.

A turn that loses its task to another replica is told so once: the SDK refuses the event at hand
and reads the task again, with its version, on which the agent's next event passes the
compare-and-swap. So an agent that still emits would write over an acknowledged CANCELED (F32).
What an agent says after an end that it reached itself is saved.
"""

import logging

from abc import update_abstractmethods
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

from a2a.server.agent_execution.active_task import TERMINAL_TASK_STATES
from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    StoredTask,
    TaskVersion,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import RequestHandler
from a2a.types import ListTasksRequest, ListTasksResponse, Task

from cluster_subscribe import sdk

logger = logging.getLogger(__name__)

T = TypeVar('T')

_REMEMBERED: Final = 8_192
"""How many ended states are remembered: a turn and its loss are seconds apart."""


def _passes_on_the_rest(cls: type[T]) -> type[T]:
    """Delegates what a later SDK adds to `VersionedTaskStore`, be it abstract or with a default."""
    for name in dir(VersionedTaskStore):
        if not name.startswith('_') and name not in vars(cls):
            setattr(cls, name, property(partial(_read_through, name=name)))
    update_abstractmethods(cls)
    return cls


def _read_through(self: 'StoreSeam', name: str) -> Any:
    return self.__getattr__(name)


@_passes_on_the_rest
class StoreSeam(VersionedTaskStore):
    """Passes every call on to the user's store, and refuses what would undo an end."""

    def __init__(
        self, store: VersionedTaskStore, turn_lost: Callable[[str], Awaitable[None]]
    ) -> None:
        """Wraps `store`.

        Args:
            store: The user's store.
            turn_lost: Told of a task that was read in an end which was not written here.
        """
        self._store = store
        self._turn_lost = turn_lost
        self._ends: OrderedDict[tuple[str, TaskVersion], bool] = OrderedDict()
        """The terminal states seen: by task and version, whether it was written here."""

    def __getattr__(self, name: str) -> Any:
        if name == '_store':  # before __init__, as in a copy
            raise AttributeError(name)
        return getattr(self._store, name)

    async def save(
        self,
        task: Task,
        *,
        event: Event | None = None,
        prev: Task | None = None,
        prev_version: TaskVersion,
        context: ServerCallContext,
    ) -> TaskVersion:
        """Saves, unless the task has ended elsewhere.

        Raises:
            ConcurrentTaskModificationError: `prev_version` is that of a terminal state which
                was read here and not written here.
        """
        if self._written_here(task.id, prev_version) is False:
            raise ConcurrentTaskModificationError(task.id)
        # `task` is the cached copy, which the SDK may change while it is saved.
        ends = task.status.state in TERMINAL_TASK_STATES
        version = await self._store.save(
            task, event=event, prev=prev, prev_version=prev_version, context=context
        )
        self._note(task.id, version, written=ends or None)
        return version

    async def get(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        """Reads, and remembers an end."""
        stored = await self._store.get(task_id, context)
        if stored is None:
            return None
        version = stored.version
        if stored.task.status.state not in TERMINAL_TASK_STATES:
            self._note(task_id, version, written=None)
        elif not self._written_here(task_id, version):
            self._note(task_id, version, written=False)
            await self._turn_lost(task_id)
        return stored

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Lists."""
        return await self._store.list(params, context)

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        """Deletes."""
        await self._store.delete(task_id, context)

    def _written_here(self, task_id: str, version: TaskVersion) -> bool | None:
        """Whether an end was written here; `None` where none was seen at this version."""
        try:
            return self._ends.get((task_id, version))
        except TypeError:  # a store's own kind of version, which cannot be hashed
            return None

    def _note(self, task_id: str, version: TaskVersion, *, written: bool | None) -> None:
        # A version says which state it is of, in whatever order the answers of a store arrive.
        # It may be of two only where the task was deleted and recreated, or by F20: then the
        # task goes on.
        try:
            if written is None or version.is_missing:
                self._ends.pop((task_id, version), None)
                return
            self._ends[task_id, version] = written
        except TypeError:
            return
        if len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)


def install(handler: RequestHandler) -> StoreSeam | None:
    """Puts a seam around the store of the `ActiveTask`s that a handler will make.

    The handler's own attributes stay what the user gave.

    Returns:
        The seam, one and the same for one handler; `None` where its place is not known.
    """
    store = sdk.task_store(handler)
    if store is None or isinstance(store, StoreSeam):
        return store

    async def turn_lost(task_id: str) -> None:
        # Whoever stores the agent's events has lost them all: what is queued goes, and the agent
        # may end in peace, where the SDK would cancel it anew for each event that is refused.
        try:
            await sdk.shut_own_queue(handler, task_id)
        except Exception:
            logger.warning('The event queue of task %s could not be shut', task_id, exc_info=True)

    seam = StoreSeam(store, turn_lost)
    sdk.replace_task_store(handler, seam)
    return seam
