"""An A2A server on FastAPI, JSON-RPC and REST.

From this folder: DATABASE_URL=sqlite+aiosqlite:///tasks.db uvicorn --factory fastapi_app:app
"""

import os

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import (
    add_a2a_routes_to_fastapi,
    create_agent_card_routes,
    create_jsonrpc_routes,
    create_rest_routes,
)
from booking import BookingAgent, card
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import wrap


def app() -> FastAPI:
    """Builds one replica."""
    engine = create_async_engine(os.environ['DATABASE_URL'])
    store = VersionedDatabaseTaskStore(engine)
    agent_card = card(
        os.environ.get('PUBLIC_URL', 'http://127.0.0.1:8000/'), 'HTTP+JSON', 'JSONRPC'
    )
    handler = wrap(
        DefaultRequestHandler(
            agent_executor=BookingAgent(),
            task_store=store,
            event_stream=DatabaseTaskEventStream(engine),
            agent_card=agent_card,
        )
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await store.initialize()
        try:
            yield
        finally:
            await handler.aclose()
            await engine.dispose()

    server = FastAPI(lifespan=lifespan)
    add_a2a_routes_to_fastapi(
        server,
        agent_card_routes=create_agent_card_routes(agent_card),
        jsonrpc_routes=create_jsonrpc_routes(handler, '/'),
        rest_routes=create_rest_routes(handler),
    )
    return server
