"""Replicas behind each transport of the SDK, and the SDK's own client."""

import asyncio
import socket

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import grpc
import httpx
import uvicorn

from a2a.auth.user import User
from a2a.client import Client, ClientCallContext, ClientConfig, ClientFactory
from a2a.client.transports.rest import RestTransport
from a2a.compat.v0_3 import a2a_v0_3_pb2_grpc
from a2a.compat.v0_3.grpc_handler import CompatGrpcHandler
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import GrpcHandler, RequestHandler
from a2a.server.request_handlers.grpc_handler import DefaultGrpcServerCallContextBuilder
from a2a.server.routes import (
    DefaultServerCallContextBuilder,
    create_agent_card_routes,
    create_jsonrpc_routes,
    create_rest_routes,
)
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    a2a_pb2_grpc,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp

from cluster_subscribe._testing import Cluster
from cluster_subscribe._testing.cluster import Door, Reach
from cluster_subscribe._testing.messages import agent_card, caller

USER: Final = 'x-user'
"""The header, or key of the metadata, that names the caller."""


@dataclass(frozen=True)
class Transport:
    """One way to reach an agent."""

    binding: str
    version: str = '1.0'
    method: str = 'POST'
    """By which REST subscribes."""


TRANSPORTS: Final = {
    'jsonrpc': Transport('JSONRPC'),
    'rest': Transport('HTTP+JSON'),
    'rest-get': Transport('HTTP+JSON', method='GET'),
    'grpc': Transport('GRPC'),
    'jsonrpc-0.3': Transport('JSONRPC', '0.3'),
    'rest-0.3': Transport('HTTP+JSON', '0.3'),
    'grpc-0.3': Transport('GRPC', '0.3'),
}


# --- Servers


class _WebCaller(DefaultServerCallContextBuilder):
    def build_user(self, request: Request) -> User:
        return caller(request.headers.get(USER, 'user')).user


class _GrpcCaller(DefaultGrpcServerCallContextBuilder):
    def build_user(self, context: Any) -> User:
        return caller(dict(context.invocation_metadata()).get(USER, 'user')).user


def app(handler: RequestHandler, card: AgentCard | None = None) -> ASGIApp:
    """A replica's web app: JSON-RPC and REST, of both protocol versions."""
    how: dict[str, Any] = {'context_builder': _WebCaller(), 'enable_v0_3_compat': True}
    return Starlette(
        routes=[
            *create_agent_card_routes(card or agent_card('http://127.0.0.1')),
            *create_jsonrpc_routes(handler, '/', **how),
            *create_rest_routes(handler, **how),
        ]
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # they are pytest's

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # makes the headers that every answer has
        await self.ended.wait()


@asynccontextmanager
async def web(*apps: ASGIApp) -> AsyncIterator[list[str]]:
    """Serves each app on a free port, in this loop; gives their addresses."""
    ports = [socket.create_server(('127.0.0.1', 0)) for _ in apps]
    servers = [
        _Server(
            uvicorn.Config(
                served, log_config=None, lifespan='off', ws='none', timeout_graceful_shutdown=10
            )
        )
        for served in apps
    ]
    serving = [
        asyncio.create_task(server.serve([port]), name='web server')
        for server, port in zip(servers, ports, strict=True)
    ]
    try:
        for server in servers:
            await server.ready.wait()
        yield [f'http://127.0.0.1:{port.getsockname()[1]}' for port in ports]
    finally:
        for server in servers:
            server.ended.set()
        await asyncio.gather(*serving)
        for port in ports:
            port.close()


@asynccontextmanager
async def grpc_server(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """Serves what `add` adds in this loop; gives the address."""
    server = grpc.aio.server()
    add(server)
    port = server.add_insecure_port('127.0.0.1:0')
    await server.start()
    try:
        yield f'127.0.0.1:{port}'
    finally:
        await server.stop(grace=10)


@asynccontextmanager
async def serve(
    handlers: Iterable[RequestHandler], transport: Transport
) -> AsyncIterator[list[str]]:
    """Serves each handler on a free port; gives their addresses."""
    if transport.binding != 'GRPC':
        async with web(*map(app, handlers)) as addresses:
            yield addresses
        return
    services: Any = (a2a_pb2_grpc, GrpcHandler)
    if transport.version == '0.3':
        services = (a2a_v0_3_pb2_grpc, CompatGrpcHandler)
    generated, kind = services

    def add(server: grpc.aio.Server, handler: RequestHandler) -> None:
        generated.add_A2AServiceServicer_to_server(kind(handler, _GrpcCaller()), server)

    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(grpc_server(partial(add, handler=handler)))
            for handler in handlers
        ]


# --- Clients


def http_client() -> httpx.AsyncClient:
    """A client for plain HTTP on this machine, which needs no certificates read."""
    return httpx.AsyncClient(timeout=60, trust_env=False, verify=False)  # noqa: S501


class _GetTransport(RestTransport):
    """Subscribes by GET, which the SDK's server offers and its client does not use."""

    async def subscribe(
        self, request: SubscribeToTaskRequest, *, context: ClientCallContext | None = None
    ) -> AsyncGenerator[StreamResponse]:
        path = f'/tasks/{request.id}:subscribe'
        stream = self._send_stream_request('GET', path, request.tenant, context=context)
        async for response in stream:
            yield response


@asynccontextmanager
async def connect(address: str, transport: Transport) -> AsyncIterator[Client]:
    """The SDK's own client."""
    card = agent_card(address)
    [interface] = card.supported_interfaces
    interface.protocol_binding, interface.protocol_version = transport.binding, transport.version
    async with http_client() as http:
        config = ClientConfig(
            httpx_client=http,
            grpc_channel_factory=grpc.aio.insecure_channel,
            supported_protocol_bindings=[transport.binding],
        )
        factory = ClientFactory(config)
        if transport.method == 'GET':
            factory.register(
                transport.binding,
                lambda card, url, _: _GetTransport(http, card, url),
            )
        client = factory.create(card)
        try:
            yield client
        finally:
            await client.close()


class Remote:
    """A door that leads through a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext, /
    ) -> AsyncGenerator[Event, None]:
        return _events(self._client.send_message(params, context=_named(context)))

    def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext, /
    ) -> AsyncGenerator[Event, None]:
        return _events(self._client.subscribe(params, context=_named(context)))

    async def on_cancel_task(
        self, params: CancelTaskRequest, context: ServerCallContext, /
    ) -> Task | None:
        return await self._client.cancel_task(params, context=_named(context))


def _named(context: ServerCallContext) -> ClientCallContext:
    return ClientCallContext(service_parameters={USER: context.user.user_name})


async def _events(responses: AsyncIterator[StreamResponse]) -> AsyncGenerator[Event, None]:
    async with aclosing(cast('AsyncGenerator[StreamResponse, None]', responses)) as stream:
        async for response in stream:
            kind = response.WhichOneof('payload')
            assert kind is not None
            yield getattr(response, kind)


# --- Ways into a lab


def direct(transport: Transport) -> Reach:
    """A client of its own for each replica."""

    @asynccontextmanager
    async def reach(lab: Cluster) -> AsyncIterator[Iterable[Door]]:
        handlers = [replica.handler for replica in lab.replicas]
        async with serve(handlers, transport) as addresses, AsyncExitStack() as stack:
            yield [
                Remote(await stack.enter_async_context(connect(address, transport)))
                for address in addresses
            ]

    return reach
