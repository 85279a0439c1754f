"""A versioned store and an event stream in memory, where no database is quick enough."""

import asyncio
import random

from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    StoredTask,
    TaskEventStream,
    TaskVersion,
    VersionedEvent,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.types import ListTasksRequest, ListTasksResponse, Task, TaskState

TERMINAL = {
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_REJECTED,
}


class Memory:
    """What several replicas share: tasks, versions and the log."""

    def __init__(self, seed: int = 0) -> None:
        self.tasks: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.log: defaultdict[str, list[VersionedEvent]] = defaultdict(list)
        self.committed = asyncio.Condition()
        self.chance = random.Random(seed)

    async def breathe(self) -> None:
        """Lets others run for a few turns of the loop, as I/O does."""
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)


class MemoryStore(VersionedTaskStore):
    """Compares and swaps as the database store does, a cancel unchecked."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    async def save(
        self,
        task: Task,
        *,
        event: Event | None = None,
        prev: Task | None = None,
        prev_version: TaskVersion,
        context: ServerCallContext,
    ) -> TaskVersion:
        del prev
        key = (task.id, context.user.user_name)
        data = task.SerializeToString()
        copy = None if event is None else type(event).FromString(event.SerializeToString())
        await self._memory.breathe()
        stored, version = self._memory.tasks.get(key, (None, 0))
        if task.status.state == TaskState.TASK_STATE_CANCELED:
            if stored is None or Task.FromString(stored).status.state in TERMINAL:
                raise ConcurrentTaskModificationError(task.id)
        elif TaskVersion(version) != prev_version:
            raise ConcurrentTaskModificationError(task.id)
        new = TaskVersion(version + 1)
        self._memory.tasks[key] = (data, version + 1)
        async with self._memory.committed:
            if copy is not None:
                self._memory.log[task.id].append(VersionedEvent(event=copy, version=new))
            self._memory.committed.notify_all()
        await self._memory.breathe()
        return new

    async def get(self, task_id: str, context: ServerCallContext) -> StoredTask | None:
        await self._memory.breathe()
        found = self._memory.tasks.get((task_id, context.user.user_name))
        await self._memory.breathe()
        if found is None:
            return None
        return StoredTask(Task.FromString(found[0]), TaskVersion(found[1]))

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        raise NotImplementedError

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        self._memory.tasks.pop((task_id, context.user.user_name), None)


class MemoryStream(TaskEventStream):
    """Follows the log in memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    async def publish(self, task_id: str, event: VersionedEvent) -> None:
        await self._memory.breathe()

    async def destroy(self, task_id: str) -> None: ...

    async def subscribe(
        self, task_id: str, *, after: TaskVersion
    ) -> AsyncGenerator[VersionedEvent, Any]:
        log, read = self._memory.log[task_id], 0
        while True:
            async with self._memory.committed:
                while len(log) == read:
                    await self._memory.committed.wait()
            while read < len(log):
                if log[read].version.is_after(after):
                    yield log[read]
                read += 1
