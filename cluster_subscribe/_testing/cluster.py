"""Replicas over one database, and streams that are looked at, never cancelled."""

import asyncio
import uuid

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from a2a.auth.user import User
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    TaskVersion,
    VersionedDatabaseTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.server.tasks import PushNotificationSender
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    CancelTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
)
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe._testing.agent import CHUNKS, Gates, ScriptedAgent
from cluster_subscribe._testing.parts import Parts

Decorate = Callable[[RequestHandler], RequestHandler]


def label(event: Event) -> str:
    """An event in a word or two: `Task(WORKING)`, `COMPLETED`, `art x`, `chunk 3`."""
    if isinstance(event, Message):
        return 'Message'
    if isinstance(event, TaskArtifactUpdateEvent):
        text = ''.join(part.text for part in event.artifact.parts)
        return f'{"chunk" if event.artifact.artifact_id == CHUNKS else "art"} {text}'
    state = TaskState.Name(event.status.state).removeprefix('TASK_STATE_')
    return f'Task({state})' if isinstance(event, Task) else state


class _Named(User):
    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def user_name(self) -> str:
        return self._name


def caller(name: str = 'user') -> ServerCallContext:
    """The call context of a named user."""
    return ServerCallContext(user=_Named(name))


def user_message(text: str, task: Task | None = None) -> Message:
    """A message that begins a task, or a turn of one."""
    return Message(
        role=Role.ROLE_USER,
        message_id=uuid.uuid4().hex,
        task_id=task.id if task else '',
        context_id=task.context_id if task else '',
        parts=[Part(text=text)],
    )


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


class Watch:
    """One subscriber: what it was given, and whether its stream has ended."""

    def __init__(self, events: AsyncGenerator[Event, None], place: str) -> None:
        self.place = place
        self.events: list[Event] = []
        self.told: list[str] = []
        """The label of each event as it arrived."""
        self.ending: str | None = None
        """`closed`, the name of an error, or `None` while the stream is open."""
        self._changed = asyncio.Condition()
        self._go = asyncio.Event()
        self._go.set()
        self.reader = asyncio.create_task(self._read(events), name=f'watch at {place}')

    @property
    def timeline(self) -> tuple[str, ...]:
        """The labels of all events as they arrived, then how the stream ended."""
        return *self.told, self.ending or 'open'

    @property
    def intact(self) -> bool:
        """Whether every event still is what it was when it arrived."""
        return [*map(label, self.events)] == self.told

    def hold(self) -> None:
        """Reads no further after the next event: a slow subscriber."""
        self._go.clear()

    def resume(self) -> None:
        """Reads on."""
        self._go.set()

    async def until(self, happened: Callable[['Watch'], object], limit: float) -> bool:
        """Waits until something is true of the stream; `False` after `limit` seconds."""
        async with self._changed:
            waiting = self._changed.wait_for(lambda: happened(self) or self.ending)
            try:
                await asyncio.wait_for(waiting, limit)
            except asyncio.TimeoutError:
                pass
        return bool(happened(self))

    async def first(self) -> None:
        """Waits for the snapshot.

        Raises:
            TimeoutError: None came within ten seconds.
        """
        if not await self.until(lambda w: w.events, 10):
            raise TimeoutError(f'No snapshot at {self.place}: {self.timeline}')

    async def _read(self, events: AsyncGenerator[Event, None]) -> None:
        ending = 'cancelled'
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    await self._note(event)
                    await self._go.wait()
            ending = 'closed'
        except Exception as error:  # noqa: BLE001 - how a stream ends is what is watched
            ending = type(error).__name__
        finally:
            self.ending = ending
            await self._note()

    async def _note(self, event: Event | None = None) -> None:
        async with self._changed:
            if event is not None:
                self.events.append(event)
                self.told.append(label(event))
            self._changed.notify_all()


class Door(Protocol):
    """What a client can do at a replica; its handler is one, a client over a wire another."""

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
        request = SendMessageRequest(message=user_message(script, task))
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


async def settle(
    watches: Iterable[Watch], right: Sequence[str], timeout: float, *, thoroughly: bool = False
) -> None:
    """Waits until every stream is right, or can no longer become so, or timeout ends.

    Args:
        watches: The streams.
        right: What each should carry.
        timeout: Seconds of silence after which a stream counts as hung.
        thoroughly: Waits for the end of a stream that is wrong already, too.
    """

    def decided(watch: Watch) -> bool:
        return watch.ending is not None or not (thoroughly or _begins(right, watch.told))

    async def settled(watch: Watch) -> None:
        heard = -1
        while not decided(watch) and len(watch.told) > heard:
            heard = len(watch.told)
            await watch.until(partial(_says_more, heard), timeout)

    await asyncio.gather(*map(settled, watches))


def _says_more(heard: int, watch: Watch) -> bool:
    return len(watch.told) > heard


def matches(right: Sequence[str], timeline: Sequence[str]) -> bool:
    """Whether a timeline is the right one.

    In the right one `a|b` allows either, and `a?` may be left out.
    """
    rest = _rest(right, timeline)
    return rest is not None and all(entry.endswith('?') for entry in rest)


def _begins(right: Sequence[str], part: Sequence[str]) -> bool:
    return _rest(right, part) is not None


def _rest(right: Sequence[str], part: Sequence[str]) -> Sequence[str] | None:
    """What has to follow a part of the right timeline; `None` if it is no part of it."""
    for told in part:
        while right and told not in right[0].removesuffix('?').split('|'):
            if not right[0].endswith('?'):
                return None
            right = right[1:]
        if not right:
            return None
        right = right[1:]
    return right


def agent_card(url: str) -> AgentCard:
    """The card of the scripted agent."""
    return AgentCard(
        name='Scripted agent',
        description='Does what its user says, word by word',
        version='1',
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding='JSONRPC', protocol_version='1.0')
        ],
        default_input_modes=['text/plain'],
        default_output_modes=['text/plain'],
        skills=[AgentSkill(id='script', name='Script', description='Words', tags=['test'])],
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
    )
