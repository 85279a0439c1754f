"""An A2A server on gRPC.

From this folder: DATABASE_URL=sqlite+aiosqlite:///tasks.db python grpc_app.py
A second replica needs an address of its own, ADDRESS=127.0.0.1:50052.
"""

import asyncio
import os
import signal

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.request_handlers import DefaultRequestHandler, GrpcHandler
from a2a.types.a2a_pb2_grpc import add_A2AServiceServicer_to_server
from booking import BookingAgent, card
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import wrap


@asynccontextmanager
async def replica(address: str) -> AsyncIterator[int]:
    """Serves at an address until the context is left; gives the port."""
    engine = create_async_engine(os.environ['DATABASE_URL'])
    store = VersionedDatabaseTaskStore(engine)
    handler = wrap(
        DefaultRequestHandler(
            agent_executor=BookingAgent(),
            task_store=store,
            event_stream=DatabaseTaskEventStream(engine),
            agent_card=card(os.environ.get('PUBLIC_URL', '127.0.0.1:50051'), 'GRPC'),
        )
    )
    server = grpc.aio.server()
    add_A2AServiceServicer_to_server(GrpcHandler(handler), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(address)
    await store.initialize()
    await server.start()
    try:
        yield port
    finally:
        # The open streams end first: the server waits for them.
        await handler.aclose()
        await server.stop(grace=5)
        await engine.dispose()


async def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in signal.SIGINT, signal.SIGTERM:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with replica(os.environ.get('ADDRESS', '127.0.0.1:50051')):
        await stop.wait()


if __name__ == '__main__':
    asyncio.run(main())
