"""One replica: a process of its own, with an A2A server as an operator would build it.

It reads the database's URL from its first line of input (other users of the machine see
a command line, and the URL may hold a password), serves on a free port, prints that port
as JSON when it is ready, and ends on SIGTERM or when its input ends: a parent that was
killed leaves no orphan.
"""

import json
import os
import signal
import socket
import sys
import threading

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

from cluster_subscribe import wrap
from cluster_subscribe._testing import ScriptedAgent
from cluster_subscribe._testing.messages import agent_card


def application(database_url: str, port: int) -> Starlette:
    """The server of the scripted agent; `CLUSTER_SUBSCRIBE` decides on the decorator."""
    engine = create_async_engine(database_url)
    card = agent_card(f'http://127.0.0.1:{port}/')
    handler = wrap(
        DefaultRequestHandler(
            agent_executor=ScriptedAgent(),
            task_store=VersionedDatabaseTaskStore(engine),
            event_stream=DatabaseTaskEventStream(engine),
            agent_card=card,
        )
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        print(json.dumps({'port': port}), flush=True)
        try:
            yield
        finally:
            await handler.aclose()
            await engine.dispose()

    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, '/')]
    return Starlette(routes=routes, lifespan=lifespan)


def _end_with_the_parent() -> None:
    # Unbuffered: a thread inside sys.stdin's lock would break the interpreter's shutdown.
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Serves until told to end."""
    database_url = sys.stdin.readline().strip()
    if not database_url:
        return
    listener = socket.create_server(('127.0.0.1', 0))
    config = uvicorn.Config(
        application(database_url, listener.getsockname()[1]),
        log_level='warning',
        timeout_graceful_shutdown=1,
    )
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == '__main__':
    main()
