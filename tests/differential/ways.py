"""Ways of building an app: one line each, and a small function where that is not enough."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.types import SubscribeToTaskRequest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from cluster_subscribe import wrap
from cluster_subscribe.cli.lab import Parts
from tests.differential import scenes
from tests.differential.scenes import CORE, Scene

SQLITE, POSTGRESQL, MYSQL = 'sqlite', 'postgresql', 'mysql'
ALL = (SQLITE, POSTGRESQL, MYSQL)
USUAL = Parts()


@dataclass(frozen=True)
class Way:
    """One way of building an app."""

    name: str
    parts: Parts = USUAL
    databases: tuple[str, ...] = (SQLITE,)
    scenes: tuple[Scene, ...] = CORE
    around: Callable[[RequestHandler], RequestHandler] = lambda handler: handler
    """A decorator of the user's own, around the wrapped handler and around the bare one."""
    wrap: Callable[..., Any] = wrap
    """Wraps a handler, with `settings`."""
    refused: bool = False
    """Whether `wrap()` has to refuse the handler."""
    warns: str = ''
    """What the warnings have to match, all of them."""
    broken: str = ''
    """The line of issue 12 that says what is wrong with it."""


def engine(**options: Any) -> Parts:
    return Parts(engine=partial(create_async_engine, **options))


# Handlers


class Untouched(DefaultRequestHandler):
    """A subclass that overrides nothing."""


class Checking(DefaultRequestHandler):
    """A subclass with an access check of its own, which a wrapped one would pass over."""

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(super().on_subscribe_to_task(params, context)) as events:
            async for event in events:
                yield event


class Outer(RequestHandler):
    """A handler that delegates to another."""

    def __init__(self, inner: RequestHandler) -> None:
        self.inner = inner

    async def on_message_send_stream(
        self, params: Any, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self.inner.on_message_send_stream(params, context)) as events:
            async for event in events:
                yield event

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self.inner.on_subscribe_to_task(params, context)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        await self.inner.aclose()  # type: ignore[attr-defined]


def _delegated(name: str) -> Any:
    async def method(self: Outer, params: Any, context: ServerCallContext) -> Any:
        return await getattr(self.inner, name)(params, context)

    return method


for _name in RequestHandler.__abstractmethods__ - vars(Outer).keys():
    setattr(Outer, _name, _delegated(_name))
Outer.__abstractmethods__ = frozenset()


WAYS = [
    Way('plain', databases=ALL, scenes=(*CORE, scenes.answer, scenes.blocking, scenes.many_chunks)),
    Way('a subclass that overrides nothing', Parts(handler=Untouched)),
    Way('a subclass with an access check', Parts(handler=Checking), refused=True),
    Way("the user's own decorator around", around=Outer),
    Way('NullPool', engine(poolclass=NullPool), databases=(SQLITE, POSTGRESQL)),
    Way('pre-ping', engine(pool_pre_ping=True), databases=(POSTGRESQL, MYSQL)),
    Way('a pool of one', engine(pool_size=1, max_overflow=0), databases=(SQLITE, POSTGRESQL)),
]
