"""What a replica is built of."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from a2a.server.agent_execution import AgentExecutor
from a2a.server.cluster import TaskEventStream, VersionedDatabaseTaskStore
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.tasks import PushNotificationSender
from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe._testing.agent import Gates


def _anybody(user: str) -> AbstractContextManager[object]:
    return nullcontext(user)


@dataclass(frozen=True)
class Parts:
    """How an app builds its replicas; what is not given is the usual."""

    engine: Callable[[str], AsyncEngine] | None = None
    """Makes the engine of a replica out of the database's URL."""
    stream_engine: Callable[[str], AsyncEngine] | None = None
    """Makes another one for the event stream, if it has one of its own."""
    store: Callable[[AsyncEngine], VersionedDatabaseTaskStore] = VersionedDatabaseTaskStore
    stream: Callable[..., TaskEventStream] | None = None
    """Takes what the SDK's event stream takes."""
    agent: Callable[[Gates], AgentExecutor] | None = None
    push: Callable[[Gates], PushNotificationSender] | None = None
    handler: Callable[..., Any] = DefaultRequestHandler
    """Takes what the SDK's handler takes, and gives one."""
    more: Callable[[], dict[str, Any]] = dict
    """Further arguments of the handler."""
    acting: Callable[[str], AbstractContextManager[object]] = _anybody
    """The context that an app gives the requests of a user, as its middleware would."""
    replicas: int = 3
