"""Ways of building an app: one line each, and a small function where that is not enough."""

import inspect
import sys

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from a2a.server.agent_execution import SimpleRequestContextBuilder
from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler
from a2a.server.tasks import InMemoryPushNotificationConfigStore
from sqlalchemy.pool import NullPool

from cluster_subscribe import wrap
from cluster_subscribe._testing import Parts
from tests.differential import scenes
from tests.differential.engines import (
    SharedVisibility,
    beside_another_app,
    connector,
    debugged,
    driver,
    eager,
    engine,
    in_memory,
    in_schema,
    named,
    reading_role,
    row_security,
    shared_cache,
    translated,
    with_a_reading_role,
    with_row_security,
    with_search_path,
)
from tests.differential.handlers import (
    GuardedInside,
    GuardedRest,
    GuardedSubscribe,
    Inside,
    Lively,
    Outer,
    Recorder,
    Untouched,
)
from tests.differential.scenes import CORE, Scene

SQLITE, POSTGRESQL, MYSQL = 'sqlite', 'postgresql', 'mysql'
ALL = (SQLITE, POSTGRESQL, MYSQL)
USUAL = Parts()


def as_it_is(url: str) -> AbstractAsyncContextManager[str]:
    return nullcontext(url)


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
    database: Callable[[str], AbstractAsyncContextManager[str]] = as_it_is
    """Sets a fresh database up."""
    loop: Callable[[], AbstractContextManager[None]] = nullcontext
    """Sets the loop up."""
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    refused: bool = False
    """Whether `wrap()` has to refuse the handler."""
    warns: str = ''
    """What a warning has to say, and all that is warned of may."""
    broken: str = ''
    """The line of issue 12 that says what is wrong with it."""


def with_its_parts(handler: Any, **how: Any) -> RequestHandler:
    made: RequestHandler = wrap(
        handler, task_store=handler.task_store, event_stream=handler.event_stream, **how
    )
    return made


async def _any_url(url: str) -> bool:
    return True


def pass_through() -> dict[str, Any]:
    """Arguments that no other way has."""
    more: dict[str, Any] = {
        'request_context_builder': SimpleRequestContextBuilder(),
        'push_config_store': InMemoryPushNotificationConfigStore(),
        'push_url_validator': _any_url,
        'interrupted_task_timeout': 60,
    }
    known = inspect.signature(DefaultRequestHandler).parameters
    return {name: value for name, value in more.items() if name in known}


def owned(resolver: Callable[..., Any]) -> Parts:
    return Parts(store=partial(VersionedDatabaseTaskStore, owner_resolver=resolver))


SINCE_1_3 = 'interrupted_task_timeout' in inspect.signature(DefaultRequestHandler).parameters
IN_MEMORY = (*CORE, scenes.many_chunks)
SHARED = 'share one connection'

WAYS = [
    Way('plain', databases=ALL, scenes=(*CORE, scenes.answer, scenes.blocking)),
    Way('plain, many', scenes=(scenes.many_chunks, scenes.herd)),
    # On SQLite the query of a bare stream that is left keeps its lock, and the agent's save waits.
    Way('plain, many that leave', databases=(POSTGRESQL,), scenes=(scenes.crowd,)),
    Way('plain, old tasks', scenes=(scenes.outside_writer, scenes.two_tenants)),
    Way(
        'old tasks',
        scenes=(scenes.unversioned,),
        warns='without an entry in the event log',
    ),
    Way(
        'old tasks deleted',
        scenes=(scenes.unversioned_deleted,),
    ),
    Way(
        'retention',
        scenes=(scenes.retention,),
    ),
    # Handlers
    Way('a subclass that overrides nothing', Parts(handler=Untouched)),
    Way('a decorator around it', around=Outer),
    Way(
        'a handler inside',
        Parts(handler=Inside),
        wrap=with_its_parts,
        refused=True,
    ),
    Way(
        'rules for streams',
        Parts(handler=GuardedSubscribe),
        scenes=(scenes.refused,),
        refused=True,
    ),
    Way(
        'rules for streams, own handler',
        Parts(handler=GuardedInside),
        scenes=(scenes.refused,),
        wrap=with_its_parts,
        refused=True,
    ),
    Way('rules for the rest', Parts(handler=GuardedRest), scenes=(scenes.refused_rest, *CORE)),
    Way('all arguments', Parts(more=pass_through), scenes=(*CORE, scenes.push_configs)),
    # Webhooks
    Way('webhook', Parts(push=Recorder), scenes=(scenes.webhooks,)),
    # Up to a2a-sdk 1.2 a sender that fails fails the task.
    *(
        [
            Way(
                'webhook fails',
                Parts(push=partial(Recorder, fails=True)),
                scenes=(scenes.webhooks, scenes.midway),
            )
        ]
        if SINCE_1_3
        else []
    ),
    # Agents
    Way('agent with a tail', Parts(agent=Lively), scenes=(scenes.tail,)),
    Way('slow webhook', Parts(push=partial(Recorder, slow=True)), scenes=(scenes.late_webhook,)),
    Way('agent with a job', Parts(agent=Lively), scenes=(scenes.job,)),
    Way('agent', Parts(agent=Lively), scenes=(scenes.message_only, scenes.silent_return)),
    # Owners
    Way('owner of a tenant', owned(lambda c: f'{c.tenant}/{c.user.user_name}')),
    Way(
        'owner is a number',
        owned(lambda c: 7),
        databases=(SQLITE, MYSQL),
    ),
    Way(
        'shared visibility',
        Parts(store=SharedVisibility),
        ALL,
        (scenes.colleague, scenes.midway),
    ),
    # Tables
    Way('tables with a prefix', named('x_')),
    Way('tables with hyphens', named('Agent-1_'), databases=ALL),
    Way('model in a schema', named('moved_', 'agents'), (POSTGRESQL,), database=in_schema),
    Way('translated', Parts(engine=translated), (POSTGRESQL,), database=in_schema),
    Way('translated 2', Parts(engine=translated), (POSTGRESQL,), database=beside_another_app),
    Way('search_path', Parts(engine=with_search_path), (POSTGRESQL,), database=in_schema),
    # Row-level security
    *(
        Way(
            f'row security, {hook}',
            row_security(hook),
            (POSTGRESQL,),
            (scenes.two_tenants, scenes.midway),
            database=with_row_security,
            warns='read one by one|slow without an index',
        )
        for hook in ('begin', 'checkout', 'committed')
    ),
    Way(
        'row security, strict',
        row_security('begin', strict=True),
        (POSTGRESQL,),
        (scenes.two_tenants, scenes.midway),
        database=with_row_security,
        warns='read one by one|slow without an index',
    ),
    Way(
        'a role that reads events',
        reading_role(),
        (POSTGRESQL,),
        (scenes.midway,),
        database=with_a_reading_role,
        broken='a limit: the event stream has to be able to read all three tables',
    ),
    # Engines, pools and drivers
    Way(
        'autocommit',
        engine(isolation_level='AUTOCOMMIT'),
        (POSTGRESQL,),
        # A save is no transaction there: which events a stream misses is chance (docs/limits.md).
        (),
        warns='AUTOCOMMIT',
    ),
    Way('async_creator', Parts(engine=connector), (POSTGRESQL,)),
    Way(
        'two async_creators',
        Parts(engine=connector, stream_engine=connector),
        (POSTGRESQL,),
    ),
    Way('NullPool', engine(poolclass=NullPool), (SQLITE, POSTGRESQL)),
    Way('pre-ping', engine(pool_pre_ping=True), (POSTGRESQL, MYSQL)),
    Way('a pool of one', engine(pool_size=1, max_overflow=0), (SQLITE, POSTGRESQL)),
    Way('in memory', Parts(engine=in_memory, replicas=1), scenes=IN_MEMORY, warns=SHARED),
    Way(
        'in memory, shared', Parts(engine=shared_cache, replicas=1), scenes=IN_MEMORY, warns=SHARED
    ),
    Way('psycopg', driver('postgresql+psycopg'), (POSTGRESQL,), needs=('psycopg',)),
    Way('asyncmy', driver('mysql+asyncmy'), (MYSQL,), needs=('asyncmy',)),
    # Loops
    *([Way('eager tasks', loop=eager)] if sys.version_info >= (3, 12) else []),
    Way('loop in debug mode', loop=debugged),
]
