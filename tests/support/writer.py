"""Writes tasks and their log without an agent, and takes what one stream is fed."""

import asyncio

from a2a.server.cluster import TaskVersion, VersionedDatabaseTaskStore
from a2a.types import Artifact, Part, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe._testing import label
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.event_log.subscriber import Subscriber
from tests.support.waiting import BACKSTOP


class Writer:
    """Writes tasks and their log as the SDK's store does, without an agent."""

    def __init__(self, url: str) -> None:
        self.engine = create_async_engine(url)
        self.store = VersionedDatabaseTaskStore(self.engine)

    async def begin(self, task_id: str = 'task', user: str = 'user') -> TaskVersion:
        task = Task(
            id=task_id, context_id='c', status=TaskStatus(state=TaskState.TASK_STATE_WORKING)
        )
        return await self.store.save(
            task, event=task, prev_version=TaskVersion.MISSING, context=caller(user)
        )

    async def say(
        self, *texts: str, task_id: str = 'task', user: str = 'user', logged: bool = True
    ) -> TaskVersion:
        version = TaskVersion.MISSING
        for said in texts:
            stored = await self.store.get(task_id, caller(user))
            assert stored is not None
            event = TaskArtifactUpdateEvent(
                task_id=task_id,
                context_id='c',
                artifact=Artifact(artifact_id=said, parts=[Part(text=said)]),
            )
            version = await self.store.save(
                stored.task,
                event=event if logged else None,
                prev_version=stored.version,
                context=caller(user),
            )
        return version

    async def execute(self, statement: str, **values: object) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(text(statement), values)


async def take(subscriber: Subscriber, count: int = 1) -> list[str]:
    taken = []
    for _ in range(count):
        versioned = await asyncio.wait_for(subscriber.next(), BACKSTOP)
        taken.append('reconcile' if versioned is None else label(versioned.event))
    return taken
