"""Handlers as an app builds and wraps them, and a look inside those of a cluster."""

from typing import Any

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.events import Event
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.types import Part, Task, TaskArtifactUpdateEvent
from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe import ClusterSubscribeHandler, Settings, SharedTailEventStream, wrap
from cluster_subscribe._testing import Decorate, Replica, ScriptedAgent
from cluster_subscribe._testing.messages import agent_card
from cluster_subscribe.telemetry import TailStatistics


class OwnStream(DatabaseTaskEventStream):
    """A user's own event stream, which the decorator leaves in its place."""


def wrapping(**settings: Any) -> Decorate:
    return lambda handler: wrap(handler, settings=Settings(**settings))


def stock_handler(
    store: Any,
    stream: Any,
    agent: Any = None,
    kind: type[DefaultRequestHandler] = DefaultRequestHandler,
    **how: Any,
) -> DefaultRequestHandler:
    """The SDK's handler, or one of a `kind` of it, over a store and an event stream."""
    return kind(
        agent_executor=agent or ScriptedAgent(),
        task_store=store,
        event_stream=stream,
        agent_card=agent_card('http://127.0.0.1'),
        **how,
    )


def stock_over(
    engine: AsyncEngine, stream_engine: AsyncEngine | None = None, agent: Any = None
) -> DefaultRequestHandler:
    """The SDK's handler over a database."""
    return stock_handler(
        VersionedDatabaseTaskStore(engine),
        DatabaseTaskEventStream(stream_engine or engine),
        agent,
    )


def decorated(replica: Replica) -> ClusterSubscribeHandler:
    assert isinstance(replica.handler, ClusterSubscribeHandler)
    return replica.handler


def active_tasks(stock: DefaultRequestHandler) -> dict[str, Any]:
    """The SDK's own memory of tasks, by their ids."""
    tasks: dict[str, Any] = stock._active_task_registry._active_tasks
    return tasks


def tail_of(replica: Replica) -> SharedTailEventStream:
    stream = replica.stock._event_stream
    assert isinstance(stream, SharedTailEventStream)
    return stream


def log_statistics(replica: Replica) -> TailStatistics:
    statistics = decorated(replica).statistics().event_log
    assert statistics is not None
    return statistics


def wakeups(replica: Replica, source: str) -> int:
    return log_statistics(replica).wakeups.get(source, 0)


def parts(event: Event) -> list[Part]:
    if isinstance(event, Task):
        return [part for artifact in event.artifacts for part in artifact.parts]
    return list(event.artifact.parts) if isinstance(event, TaskArtifactUpdateEvent) else []
