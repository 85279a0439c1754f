"""Replicas over one database, and the doors through which clients reach them."""

import asyncio

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from a2a.server.cluster import DatabaseTaskEventStream, TaskVersion, VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.server.tasks import PushNotificationSender
from a2a.types import CancelTaskRequest, Message, SendMessageRequest, SubscribeToTaskRequest, Task
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe._testing.agent import Gates, ScriptedAgent
from cluster_subscribe._testing.messages import (
    agent_card,
    caller,
    label,
    send_request,
    user_message,
)
from cluster_subscribe._testing.parts import Parts
from cluster_subscribe._testing.watching import Watch

Decorate = Callable[[RequestHandler], RequestHandler]


def _note_commits(store: VersionedDatabaseTaskStore, gates: Gates) -> None:
    """Has a scene told what is committed, so that nobody has to sleep."""
    save = store.save

    async def noting(task: Task, *, event: Event | None = None, **how: Any) -> TaskVersion:
        version = await save(task, event=event, **how)
        if event is not None:
            await gates.note_commit(event)
        return version

    # On the instance: the store stays of the type that the app has chosen.
    store.save = noting  # type: ignore[method-assign]


class _Webhook(PushNotificationSender):
    """A push notification target that is slow at one event, until gate `push` opens."""

    def __init__(self, gates: Gates, slow_at: str | None) -> None:
        self._gates = gates
        self._slow_at = slow_at

    async def send_notification(self, task_id: str, event: Event) -> None:
        if label(event) == self._slow_at:
            await self._gates.arrive('push')


class Door(Protocol):
    """What a client can do at a replica; its handler is one, a remote client another."""

    def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext, /
    ) -> AsyncGenerator[Event, None]:
        """Sends a message."""

    def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext, /
    ) -> AsyncGenerator[Event, None]:
        """Subscribes to a task."""

    async def on_cancel_task(
        self, params: CancelTaskRequest, context: ServerCallContext, /
    ) -> Task | None:
        """Cancels a task."""


class Replica:
    """One server of the cluster: its own engine, store, event stream and handler."""

    def __init__(self, name: str, cluster: 'Cluster') -> None:
        self.name = name
        self.gates = cluster.gates
        self.parts = parts = cluster.parts
        make_engine: Callable[[str], AsyncEngine] = parts.engine or partial(
            create_async_engine, **cluster.engine_options
        )
        self.engine = make_engine(cluster.url)
        self._stream_engine = (parts.stream_engine or (lambda _: self.engine))(cluster.url)
        self.store = parts.store(self.engine)
        _note_commits(self.store, self.gates)
        self.stream = (parts.stream or cluster.stream_type)(
            self._stream_engine, poll_interval_s=cluster.poll_interval
        )
        scripted = partial(ScriptedAgent, silent_cancel=cluster.silent_cancel)
        webhook = partial(_Webhook, slow_at=cluster.slow_push)
        self.stock: DefaultRequestHandler = parts.handler(
            agent_executor=(parts.agent or scripted)(self.gates),
            task_store=self.store,
            event_stream=self.stream,
            push_sender=(parts.push or webhook)(self.gates),
            agent_card=agent_card('http://127.0.0.1'),
            **parts.more(),
        )
        self.handler = cluster.decorate(self.stock)
        self.door: Door = self.handler
        """Where its clients come in."""
        self._turns: list[asyncio.Task[None]] = []
        self._watches: list[Watch] = []

    def start(self, script: str, task: Task | None = None, user: str = 'user') -> 'Turn':
        """Sends a message that begins a turn, and does not wait for it."""
        with self.parts.acting(user):
            turn = Turn(self, script, task, user)
        self._turns.append(turn.reader)
        return turn

    def send(self, script: str, task: Task | None = None, user: str = 'user') -> Watch:
        """Sends a message that begins a turn, and watches the message's own stream."""
        request = send_request(script, task)
        return self._watch(self.door.on_message_send_stream(request, caller(user)), user)

    async def turn(self, script: str, task: Task | None = None) -> Task:
        """Sends a message and waits for the end of its turn."""
        return await self.start(script, task).ended()

    async def get(self, task_id: str, user: str = 'user') -> Task:
        """The task as stored."""
        with self.parts.acting(user):
            stored = await self.store.get(task_id, caller(user))
        assert stored is not None
        return stored.task

    async def cancel(self, task: Task, user: str = 'user') -> Task | None:
        """Cancels the task through this replica."""
        with self.parts.acting(user):
            return await self.door.on_cancel_task(CancelTaskRequest(id=task.id), caller(user))

    async def watch(self, task: Task, user: str = 'user') -> Watch:
        """Subscribes and waits for the snapshot."""
        watch = self.subscribe(task, user)
        await watch.first()
        return watch

    def subscribe(self, task: Task, user: str = 'user') -> Watch:
        """Subscribes through this replica."""
        request = SubscribeToTaskRequest(id=task.id)
        return self._watch(self.door.on_subscribe_to_task(request, caller(user)), user)

    def _watch(self, events: AsyncGenerator[Event, None], user: str) -> Watch:
        with self.parts.acting(user):
            watch = Watch(events, self.name)
        self._watches.append(watch)
        return watch

    async def leave(self) -> None:
        """Leaves all streams and turns."""
        readers = [watch.reader for watch in self._watches] + self._turns
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)

    async def aclose(self) -> None:
        """Leaves all streams and turns, closes the handler and the engine."""
        await self.leave()
        await self.handler.aclose()  # type: ignore[attr-defined]
        for engine in {self.engine, self._stream_engine}:
            await engine.dispose()


class Turn:
    """One turn under way: the message's own stream, read to its end."""

    def __init__(self, replica: Replica, script: str, task: Task | None, user: str) -> None:
        self._replica = replica
        self._user = user
        self._task_id = task.id if task else ''
        self._began = asyncio.Event()
        message = user_message(script, task)
        self.reader = asyncio.create_task(self._read(message), name=f'turn at {replica.name}')

    async def _read(self, message: Message) -> None:
        request = SendMessageRequest(message=message)
        events = self._replica.door.on_message_send_stream(request, caller(self._user))
        try:
            async for event in events:
                self._task_id = event.id if isinstance(event, Task) else event.task_id
                self._began.set()
        finally:
            self._began.set()

    async def task(self) -> Task:
        """The task as stored, once the turn's task is known."""
        if not self._task_id:
            await self._began.wait()
        return await self._replica.get(self._task_id, self._user)

    async def at(self, *gates: str) -> Task:
        """The task as stored, once the agent stands at the gates."""
        await self._replica.gates.reached(*gates)
        return await self.task()

    async def ended(self) -> Task:
        """The task as stored at the end of the turn, however it ended."""
        await asyncio.wait({self.reader})
        if not self.reader.cancelled():
            self.reader.exception()
        return await self.task()


class Cluster:
    """Three replicas, A, B and C, over one database; with fewer one plays several roles."""

    def __init__(  # noqa: PLR0913
        self,
        url: str,
        *,
        decorate: Decorate = lambda handler: handler,
        poll_interval: float = 0.05,
        silent_cancel: bool = False,
        slow_push: str | None = None,
        stream_type: type[DatabaseTaskEventStream] = DatabaseTaskEventStream,
        engine_options: Mapping[str, Any] | None = None,
        parts: Parts = Parts(),  # noqa: B008 - it is frozen
    ) -> None:
        self.url = url
        self.decorate = decorate
        self.poll_interval = poll_interval
        self.silent_cancel = silent_cancel
        self.slow_push = slow_push
        self.stream_type = stream_type
        self.engine_options = engine_options or {}
        self.parts = parts
        self.gates = Gates()
        self.replicas = tuple(Replica(name, self) for name in 'ABC'[: parts.replicas])
        # One replica alone plays all roles of a scene.
        self.a, self.b, self.c = (self.replicas * 3)[:3]

    async def watch(self, task: Task, at: Sequence[Replica] | None = None) -> list[Watch]:
        """Subscribes at several replicas and waits for every snapshot."""
        return list(await asyncio.gather(*(r.watch(task) for r in at or self.replicas)))

    async def aclose(self) -> None:
        """Closes every replica."""
        await asyncio.gather(*(replica.aclose() for replica in self.replicas))


Reach = Callable[[Cluster], AbstractAsyncContextManager[Iterable[Door]]]
"""Opens a door at each replica, for as long as its context lasts."""


@asynccontextmanager
async def in_process(lab: Cluster) -> AsyncIterator[Iterable[Door]]:
    """Clients call the handlers themselves."""
    yield [replica.handler for replica in lab.replicas]


@asynccontextmanager
async def cluster(url: str, *, reach: Reach = in_process, **how: Any) -> AsyncIterator[Cluster]:
    """A cluster whose tables exist and whose doors are open, closed at the end."""
    made = Cluster(url, **how)
    try:
        with made.parts.acting('user'):
            await made.a.store.initialize()
        async with reach(made) as doors:
            for replica, door in zip(made.replicas, doors, strict=True):
                replica.door = door
            try:
                yield made
            finally:
                await asyncio.gather(*(replica.leave() for replica in made.replicas))
    finally:
        await made.aclose()
