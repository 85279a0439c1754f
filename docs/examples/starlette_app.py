"""An A2A server on Starlette, JSON-RPC.

From this folder: DATABASE_URL=sqlite+aiosqlite:///tasks.db uvicorn --factory starlette_app:app
"""

import os

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from booking import BookingAgent, card
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

from cluster_subscribe import wrap


def app() -> Starlette:
    """Builds one replica."""
    engine = create_async_engine(os.environ['DATABASE_URL'])
    store = VersionedDatabaseTaskStore(engine)
    agent_card = card(os.environ.get('PUBLIC_URL', 'http://127.0.0.1:8000/'), 'JSONRPC')
    handler = wrap(
        DefaultRequestHandler(
            agent_executor=BookingAgent(),
            task_store=store,
            event_stream=DatabaseTaskEventStream(engine),
            agent_card=agent_card,
        )
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await store.initialize()
        try:
            yield
        finally:
            await handler.aclose()
            await engine.dispose()

    return Starlette(
        routes=[*create_agent_card_routes(agent_card), *create_jsonrpc_routes(handler, '/')],
        lifespan=lifespan,
    )
