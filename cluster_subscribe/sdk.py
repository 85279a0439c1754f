"""The private attributes of a2a-sdk that this package reads. No other module touches one.

Each stands in `PRIVATE_ATTRIBUTES`, with the versions that have it. A function that does not
find what it looks for gives `None` and never guesses; its caller then relies on the event log
alone. It is one file, however long, so that a new SDK can be compared with one file.
"""

import asyncio
import logging

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar, cast

from a2a.server.agent_execution import AgentExecutor
from a2a.server.agent_execution.active_task import ActiveTask
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    LegacyTaskStoreAdapter,
    TaskEventStream,
    TaskVersion,
    VersionedDatabaseTaskStore,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import LegacyRequestHandler, RequestHandler
from sqlalchemy import Table, select
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Session

from cluster_subscribe.engines import describe_difference, has_hooks
from cluster_subscribe.errors import UnsupportedHandlerError

logger = logging.getLogger(__name__)

T = TypeVar('T')


@dataclass(frozen=True)
class PrivateAttribute:
    """One private attribute of the SDK that this package relies on."""

    owner: str
    """The dotted name of the class whose instances carry it."""
    name: str
    versions: str
    """The a2a-sdk versions in which it exists, as a specifier."""
    purpose: str


_HANDLER: Final = 'a2a.server.request_handlers.default_request_handler_v2.DefaultRequestHandlerV2'
_ACTIVE_TASK: Final = 'a2a.server.agent_execution.active_task.ActiveTask'
_TASK_MANAGER: Final = 'a2a.server.tasks.task_manager.TaskManager'
_QUEUE: Final = 'a2a.server.events.event_queue_v2.EventQueueSource'
_REGISTRY: Final = 'a2a.server.agent_execution.active_task_registry.ActiveTaskRegistry'
_STORE: Final = 'a2a.server.cluster.database_task_store.VersionedDatabaseTaskStore'
_STREAM: Final = 'a2a.server.cluster.database_event_stream.DatabaseTaskEventStream'
_VERSION: Final = 'a2a.server.cluster.version.TaskVersion'
_TESTED: Final = '>=1.2.0,<1.4'

PRIVATE_ATTRIBUTES: Final = (
    PrivateAttribute(_HANDLER, '_versioned_store', _TESTED, 'the stored tasks'),
    PrivateAttribute(_HANDLER, '_event_stream', _TESTED, 'the event stream that is read'),
    PrivateAttribute(_HANDLER, '_agent_card', _TESTED, 'whether the agent streams'),
    PrivateAttribute(_HANDLER, '_active_task_registry', _TESTED, 'where the local ActiveTask is'),
    PrivateAttribute(_REGISTRY, '_active_tasks', _TESTED, 'the ActiveTasks of this replica'),
    PrivateAttribute(_REGISTRY, '_lock', _TESTED, 'removing one of them'),
    PrivateAttribute(_REGISTRY, '_event_stream', _TESTED, 'what new ActiveTasks publish to'),
    PrivateAttribute(_REGISTRY, '_agent_executor', _TESTED, 'the agent that new ActiveTasks run'),
    PrivateAttribute(_REGISTRY, '_task_store', _TESTED, 'where new ActiveTasks save'),
    PrivateAttribute(_ACTIVE_TASK, '_agent_executor', _TESTED, 'the agent that it runs'),
    PrivateAttribute(_ACTIVE_TASK, '_event_queue_agent', _TESTED, 'the events of its agent'),
    PrivateAttribute(_ACTIVE_TASK, '_producer_task', _TESTED, 'whether its agent still runs'),
    PrivateAttribute(_ACTIVE_TASK, '_consumer_task', _TESTED, 'whether it handles its events'),
    PrivateAttribute(_ACTIVE_TASK, '_task_manager', _TESTED, 'the version of its cached copy'),
    PrivateAttribute(_ACTIVE_TASK, '_is_finished', _TESTED, 'whether it has finished'),
    PrivateAttribute(_ACTIVE_TASK, '_request_lock', _TESTED, 'whether it runs a turn'),
    PrivateAttribute(_ACTIVE_TASK, '_request_queue', _TESTED, 'whether a turn waits in it'),
    PrivateAttribute(_ACTIVE_TASK, '_reference_count', _TESTED, 'whether somebody reads from it'),
    PrivateAttribute(_ACTIVE_TASK, '_on_cleanup', _TESTED, 'its removal from the registry'),
    PrivateAttribute(_QUEUE, '_incoming_queue', _TESTED, 'events that were not dispatched yet'),
    PrivateAttribute(_TASK_MANAGER, '_call_context', _TESTED, 'whose task it is'),
    PrivateAttribute(_STORE, '_db', _TESTED, 'its database and its owner resolver'),
    PrivateAttribute(_STORE, '_event_model', _TESTED, 'its event table'),
    PrivateAttribute(_STORE, '_version_model', _TESTED, 'its version table'),
    PrivateAttribute(_STREAM, '_engine', _TESTED, 'its database'),
    PrivateAttribute(_STREAM, '_event_model', _TESTED, 'its event table'),
    PrivateAttribute(_STREAM, '_create_table', _TESTED, 'whether tables may be created'),
    PrivateAttribute(_STREAM, '_poll_interval_s', _TESTED, 'how late its events may be'),
    PrivateAttribute(_VERSION, '_value', _TESTED, 'the integer behind a database version'),
)


class ClusterParts(NamedTuple):
    """What a handler in cluster mode consists of; `None` for a part it lacks."""

    store: VersionedTaskStore | None
    stream: TaskEventStream | None


class LocalTask(NamedTuple):
    """What a replica's memory holds of a task."""

    active: ActiveTask
    version: TaskVersion
    """The version of its cached copy; MISSING while it has none."""
    executor: AgentExecutor
    event_queue: EventQueue
    """What its agent writes to."""
    turn_running: bool
    """Whether a turn runs in it, or waits to run."""
    finished: bool
    """Whether it will never begin another turn. Its last one may still run."""
    ended: bool
    """Whether nothing of it runs any more."""
    closed: bool
    """Whether its event queue accepts no more events."""
    unhandled: bool
    """Whether its event queue holds an event that was not stored and dispatched yet."""
    read: bool
    """Whether somebody reads from it."""
    is_unused: bool
    """Whether nobody uses it: no turn runs, waits or is being taken up, no event, no reader."""


def cluster_parts(handler: RequestHandler) -> ClusterParts:
    """Finds the store and the event stream of an SDK handler.

    Raises:
        UnsupportedHandlerError: The handler's shape is not known.
    """
    if isinstance(handler, LegacyRequestHandler):
        return ClusterParts(None, None)
    try:
        store = handler._versioned_store  # type: ignore[attr-defined]
        stream = handler._event_stream  # type: ignore[attr-defined]
    except AttributeError as missing:
        raise UnsupportedHandlerError(
            f'{type(handler).__qualname__} is not a DefaultRequestHandler this version of '
            f'cluster-subscribe knows ({missing.name} is missing): pass its parts, '
            'wrap(handler, task_store=..., event_stream=...)'
        ) from None
    return ClusterParts(None if isinstance(store, LegacyTaskStoreAdapter) else store, stream)


def streaming(handler: RequestHandler) -> bool | None:
    """Whether the agent's card offers streaming; `None` where the card is not known."""
    return _known(lambda: bool(handler._agent_card.capabilities.streaming))  # type: ignore[attr-defined]


def local_task(handler: RequestHandler, task_id: str) -> LocalTask | None:
    """What this replica's memory holds of a task; `None` if nothing, or not known.

    An `ActiveTask` that has finished may still be in the registry. It counts as
    running no turn.
    """
    active = _known(lambda: handler._active_task_registry._active_tasks.get(task_id))  # type: ignore[attr-defined]
    return None if active is None else _known(lambda: _describe(active))


def local_tasks(handler: RequestHandler) -> list[LocalTask]:
    """What this replica's memory holds of all tasks."""
    return (
        _known(
            lambda: [
                _describe(active)
                for active in handler._active_task_registry._active_tasks.copy().values()  # type: ignore[attr-defined]
            ]
        )
        or []
    )


def _describe(active: ActiveTask) -> LocalTask:
    finished = active._is_finished.is_set()
    tasks = active._producer_task, active._consumer_task
    ended = finished and all(task is not None and task.done() for task in tasks)
    requests: Any = active._request_queue
    events: Any = active._event_queue_agent
    unhandled = _unfinished(events._incoming_queue) + _unfinished(events.queue)
    busy = active._request_lock.locked() or not requests.empty()
    # The consumer holds one reference; each reader holds another.
    read = active._reference_count > (not ended)
    return LocalTask(
        active=active,
        version=active._task_manager.current_version,
        executor=active._agent_executor,
        event_queue=events,
        turn_running=busy and not finished,
        finished=finished,
        ended=ended,
        closed=events.is_closed(),
        unhandled=unhandled > 0,
        read=read,
        is_unused=not (read or busy or _unfinished(requests) or unhandled),
    )


def _unfinished(queue: Any) -> int:
    # asyncio's own queue, under Python 3.13, and the SDK's stand-in for older ones.
    count: int | None = getattr(queue, '_unfinished_tasks', None)
    return queue.unfinished_tasks if count is None else count


def agent_executor(handler: RequestHandler) -> AgentExecutor | None:
    """The executor that a handler's future `ActiveTask`s will run; `None` if not known."""
    if not hasattr(handler, '_active_task_registry'):
        return None
    return _known(lambda: handler._active_task_registry._agent_executor)


def replace_agent_executor(handler: RequestHandler, executor: AgentExecutor) -> None:
    """Makes a handler's future `ActiveTask`s run another executor."""
    handler._active_task_registry._agent_executor = executor  # type: ignore[attr-defined]


def task_store(handler: RequestHandler) -> VersionedTaskStore | None:
    """The store of the `ActiveTask`s that a handler will make; `None` if not known."""
    if not hasattr(handler, '_active_task_registry'):
        return None
    store = _known(lambda: handler._active_task_registry._task_store)
    return store if isinstance(store, VersionedTaskStore) else None


def replace_task_store(handler: RequestHandler, store: VersionedTaskStore) -> None:
    """Makes a handler's future `ActiveTask`s save in another store."""
    handler._active_task_registry._task_store = store  # type: ignore[attr-defined]


async def shut_own_queue(handler: RequestHandler, task_id: str) -> None:
    """Drops the events that the running asyncio task was to store, and those to come.

    For the consumer of an `ActiveTask`; nothing happens in any other asyncio task.
    """
    active = _known(lambda: handler._active_task_registry._active_tasks.get(task_id))  # type: ignore[attr-defined]
    if active is not None and active._consumer_task is asyncio.current_task():
        await active._event_queue_agent.close(immediate=True)


def closing_producer(handler: RequestHandler, task_id: str) -> 'asyncio.Task[None] | None':
    """The asyncio task that closes the queues of an `ActiveTask`; `None` if none does."""
    active = _known(lambda: handler._active_task_registry._active_tasks.get(task_id))  # type: ignore[attr-defined]
    if active is None or not active._event_queue_agent.is_closed():
        return None
    producer: asyncio.Task[None] | None = active._producer_task
    return None if producer is None or producer.done() else producer


def call_context(active: ActiveTask) -> ServerCallContext | None:
    """The context of the request that an `ActiveTask` served last."""
    return _known(lambda: active._task_manager._call_context)


def unregister(handler: RequestHandler, active: ActiveTask) -> bool:
    """Removes this instance, and no other, from the registry; `False` where that cannot be done.

    Its cleanup callback is removed as well: up to a2a-sdk 1.2.3 that removes by task id, and
    would remove a later instance.
    """
    registry = _known(lambda: handler._active_task_registry)  # type: ignore[attr-defined]
    if registry is None or not hasattr(active, '_on_cleanup'):
        return False
    with registry._lock:
        if registry._active_tasks.get(active.task_id) is not active:
            return False
        del registry._active_tasks[active.task_id]
    active._on_cleanup = None
    return True


def forget_copy(active: ActiveTask) -> None:
    """Makes an `ActiveTask` read the store when it needs the task next."""
    _known(lambda: active._task_manager.invalidate())


def version_number(version: TaskVersion) -> int:
    """The integer that a database version wraps; 0 for MISSING.

    Raises:
        TypeError: It wraps something else.
    """
    number = version._value
    if not isinstance(number, int):
        raise TypeError(f'{version!r} is no version of a database task store')
    return number


def owner(store: VersionedTaskStore, context: ServerCallContext) -> str | None:
    """Whose rows a store finds for a call context; `None` where only the rows can tell.

    A subclass with its own `get()` may find tasks of other owners. What an owner resolver
    gives may be stored as something else (an integer as its digits).
    """
    if (
        not isinstance(store, VersionedDatabaseTaskStore)
        or type(store).get is not VersionedDatabaseTaskStore.get
        or 'get' in vars(store)
    ):
        return None
    resolve: Callable[[ServerCallContext], object] = store._db.owner_resolver
    resolved = resolve(context)
    return resolved if isinstance(resolved, str) else None


def reads_with_hooks(store: VersionedDatabaseTaskStore) -> bool:
    """Whether what a store finds may depend on more than the owner.

    The user's event listeners may take a user or a tenant from a context variable.
    """
    engine = _known(lambda: store._db.engine)
    session: Any = Session().dispatch
    return engine is None or bool(
        has_hooks(engine) or session.after_begin or session.do_orm_execute
    )


async def stored_owner(store: VersionedTaskStore, task_id: str) -> str | None:
    """The owner of the task with this very id; `None` where none is stored, or not known."""
    db = _known(lambda: store._db) if isinstance(store, VersionedDatabaseTaskStore) else None
    if db is None:
        return None
    model = db.task_model
    async with db.async_session_maker() as session:
        found = await session.execute(select(model.id, model.owner).where(model.id == task_id))
        return next((owner for found_id, owner in found if found_id == task_id), None)


async def is_exact_match(
    store: VersionedTaskStore, task_id: str, context: ServerCallContext, owner: str | None
) -> bool:
    """Whether the task that a store finds has this very id, and this very owner.

    MySQL compares loosely (letter case, accents, trailing blanks), and so does the SDK's
    store there.
    """
    db = _known(lambda: store._db) if isinstance(store, VersionedDatabaseTaskStore) else None
    if db is None or db.engine.dialect.name in ('sqlite', 'postgresql'):
        return True
    resolve: Callable[[ServerCallContext], object] = db.owner_resolver
    model, resolved = db.task_model, resolve(context)
    found = select(model.id, model.owner, model.owner == resolved).where(model.id == task_id)
    async with db.async_session_maker() as session:
        return any(
            (found_id, found_owner) == (task_id, owner)
            # Equal to the caller's owner for the database only is another owner.
            and not (alike and isinstance(resolved, str) and found_owner != resolved)
            for found_id, found_owner, alike in await session.execute(found)
        )


def store_engine(store: VersionedTaskStore) -> AsyncEngine | None:
    """The engine beneath the SDK's own store; `None` for any other."""
    if not isinstance(store, VersionedDatabaseTaskStore):
        return None
    return _known(lambda: store._db.engine)


def engines(store: VersionedTaskStore, stream: TaskEventStream) -> list[AsyncEngine]:
    """The engines beneath the SDK's own store and stream, as far as they are known."""
    found = [store_engine(store)]
    if isinstance(stream, DatabaseTaskEventStream):
        found.append(_known(lambda: stream._engine))
    return [engine for engine in found if engine is not None]


class LogTables(NamedTuple):
    """Where an event stream and its store keep the log."""

    engine: AsyncEngine
    events: Table
    versions: Table
    tasks: Table | None
    """`None` where the store converts its task rows, so that states cannot be read from them."""
    create: bool


def find_log_tables(store: VersionedTaskStore, stream: TaskEventStream) -> LogTables | None:
    """The tables behind the SDK's own store and stream; `None` for any other pair.

    A subclass of the stream may do more than the SDK's, so it is not replaced.
    """
    if type(stream) is not DatabaseTaskEventStream or not isinstance(
        store, VersionedDatabaseTaskStore
    ):
        return None
    return _known(
        lambda: LogTables(
            stream._engine,
            _table(stream._event_model),
            _table(store._version_model),
            None if store._db.core_to_model_conversion else _table(store._db.task_model),
            stream._create_table,
        )
    )


def _table(model: type[DeclarativeBase]) -> Table:
    return cast('Table', model.__table__)


def replace_event_stream(handler: RequestHandler, stream: TaskEventStream) -> None:
    """Makes a handler, and the tasks that it will run, publish to another event stream."""
    if hasattr(handler, '_event_stream'):
        handler._event_stream = stream
        registry = _known(lambda: handler._active_task_registry)  # type: ignore[attr-defined]
        if registry is not None:
            registry._event_stream = stream


def poll_interval(stream: TaskEventStream) -> float:
    """Seconds by which an event may reach `stream` late; 0 where it does not poll."""
    if not isinstance(stream, DatabaseTaskEventStream):
        return 0.0
    return _known(lambda: float(stream._poll_interval_s)) or 0.0


def describe_mismatch(store: VersionedTaskStore, stream: TaskEventStream) -> str | None:
    """Says how store and stream use different event logs; `None` if they do not.

    Only the SDK's own database classes are compared. Credentials are never shown.
    """
    if not isinstance(store, VersionedDatabaseTaskStore) or not isinstance(
        stream, DatabaseTaskEventStream
    ):
        return None
    places = _known(
        lambda: (
            (store._db.engine, _table(store._event_model)),
            (stream._engine, _table(stream._event_model)),
        )
    )
    if places is None:
        return None
    return describe_difference(*places)


def _known(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except AttributeError as missing:
        _warn_of_missing(missing.name or str(missing))
        return None


@cache
def _warn_of_missing(name: str) -> None:
    logger.warning(
        'This a2a-sdk has no %s where cluster-subscribe looks for it; '
        'streams are served from the event log without it',
        name,
    )
