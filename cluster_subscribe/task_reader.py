"""One authoritative read of the stored task: its id, its tables, its owner, its exact match."""

import asyncio
import logging

from collections.abc import Sequence
from contextvars import Context, copy_context
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from a2a.server.cluster import StoredTask, VersionedDatabaseTaskStore, VersionedTaskStore
from a2a.server.context import ServerCallContext
from a2a.utils.errors import A2AError
from sqlalchemy.pool import QueuePool

from cluster_subscribe import sdk
from cluster_subscribe.background import Background, SharedReads
from cluster_subscribe.event_log.retry import is_final
from cluster_subscribe.protocol_errors import is_library_error
from cluster_subscribe.subscription.feed import OwnedTask
from cluster_subscribe.task_ids import is_valid_task_id
from cluster_subscribe.waiting import Slots, in_time

logger = logging.getLogger(__name__)

_POOLED_READS: Final = 8
"""Reads under way at once over a pool of the default size: it has 15 connections at most."""
_OTHER_READS: Final = 64
"""Reads under way at once over a store that is not known to have a pool."""
_PAUSES: Final = (0.05, 0.25, 1.0)
"""Seconds before a read that failed is tried again."""


class TaskReader:
    """Reads tasks with the rights of who asks. Lives as long as the app."""

    def __init__(self, store: VersionedTaskStore, background: Background) -> None:
        self._store = store
        self._background = background
        self._shared: WeakValueDictionary[
            tuple[str, str, asyncio.AbstractEventLoop], SharedReads[str, OwnedTask]
        ] = WeakValueDictionary()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, Slots] = WeakKeyDictionary()

    async def read(
        self, task_id: str, context: ServerCallContext, variables: Context | None = None
    ) -> OwnedTask | None:
        """The task as stored; `None` where the caller has none of this very id.

        Args:
            task_id: The task.
            context: Who asks.
            variables: The context variables to read with; the caller's when not given.

        Raises:
            Exception: Whatever the store raised; a `TimeoutError` if it did not answer.
        """
        # No database has a task of such an id.
        if not is_valid_task_id(task_id):
            return None
        slots = self._slots.setdefault(
            asyncio.get_running_loop(), Slots(reads_at_once(self._store))
        )
        await slots.acquire()
        try:
            task = self._begin(task_id, context, variables)
        except BaseException:
            slots.release()
            raise
        # The query goes on when its client leaves, and so does its slot.
        task.add_done_callback(lambda _: slots.release())
        return await self._background.answer(task)

    def _begin(
        self, task_id: str, context: ServerCallContext, variables: Context | None = None
    ) -> asyncio.Task[OwnedTask | None]:
        return self._background.start(
            self._read_in_time(task_id, context),
            f'read {task_id}',
            copy_context() if variables is None else variables,
        )

    async def _read_in_time(self, task_id: str, context: ServerCallContext) -> OwnedTask | None:
        # Whoever waits for it may leave before a database that does not answer is given up.
        return await in_time(self._read(task_id, context))

    async def read_shared(
        self, task_id: str, context: ServerCallContext, variables: Context | None = None
    ) -> OwnedTask | None:
        """As `read()`; once for all callers with the same owner, where that makes no difference.

        A read is shared by those who asked before it started.
        """
        store = self._store
        owner = sdk.owner(store, context)
        if (
            owner is None
            or not isinstance(store, VersionedDatabaseTaskStore)
            or sdk.reads_with_hooks(store)
        ):
            return await self.read(task_id, context, variables)

        async def read(asked: Sequence[str]) -> dict[str, OwnedTask]:
            owned = await self.read(task_id, context, Context())
            return dict.fromkeys(asked, owned) if owned else {}

        key = task_id, owner, asyncio.get_running_loop()
        shared = self._shared.get(key)
        if shared is None:
            shared = SharedReads(self._background, read, f'read {task_id} for all')
            self._shared[key] = shared
        return await shared.get(task_id)

    async def read_first(
        self, task_id: str, context: ServerCallContext, variables: Context
    ) -> OwnedTask | None:
        """Reads, and tries again where a pooled connection was lost or the database restarts.

        Raises:
            Exception: As `read()` does.
        """
        for pause in _PAUSES:
            try:
                return await self.read(task_id, context, variables)
            except A2AError:
                raise
            except Exception as error:
                if is_final(error) or not is_library_error(error) or _was_slow(error):
                    raise
            await asyncio.sleep(pause)
        return await self.read(task_id, context, variables)

    async def read_at_once(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        """The task as stored, for a message or a cancel: it does not wait for streams' reads.

        Raises:
            Exception: Whatever the store raised; a `TimeoutError` if it did not answer.
        """
        if not is_valid_task_id(task_id):
            return None
        owned = await self._background.answer(self._begin(task_id, context))
        return owned.stored if owned else None

    async def try_to_read(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        """As `read_at_once()`; `None` also where the task cannot be read."""
        try:
            return await self.read_at_once(task_id, context)
        except Exception:
            logger.debug('Task %s could not be read in advance', task_id, exc_info=True)
            return None

    async def _read(self, task_id: str, context: ServerCallContext) -> OwnedTask | None:
        store = self._store
        owner = sdk.owner(store, context)
        if isinstance(store, VersionedDatabaseTaskStore):
            await _create_tables(store)
            if owner is None:
                # Before the task: what is recreated in between by somebody else has another.
                owner = await sdk.stored_owner(store, task_id)
        stored = await store.get(task_id, context)
        if stored is None or not await sdk.is_exact_match(store, task_id, context, owner):
            return None
        return OwnedTask(stored, owner)


def _was_slow(error: Exception) -> bool:
    # The caller has waited long enough.
    return isinstance(error, TimeoutError | asyncio.TimeoutError)


async def _create_tables(store: VersionedDatabaseTaskStore) -> None:
    """Makes a first read possible: the store's `get()` creates one table of three."""
    for attempts_left in reversed(range(5)):
        try:
            await store.initialize()
        except Exception:
            # Another replica that creates them at the same time is quicker at one or other.
            if not attempts_left:
                raise
        else:
            return


def reads_at_once(store: VersionedTaskStore) -> int:
    """How many reads of a store may be under way in one event loop.

    A client that leaves before its own began costs nothing, and the agents find room in a pool.
    """
    engine = sdk.store_engine(store)
    if engine is None:
        return _OTHER_READS
    pool = engine.sync_engine.pool
    return max(_POOLED_READS, pool.size() if isinstance(pool, QueuePool) else 0)
