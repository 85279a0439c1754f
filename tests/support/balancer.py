"""A round-robin balancer in front of replicas, over each transport."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from typing import Any

import grpc
import httpx

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster_subscribe._testing import Cluster
from cluster_subscribe._testing.cluster import Door, Reach
from tests.support.transports import (
    Remote,
    Transport,
    connect,
    grpc_server,
    http_client,
    serve,
    web,
)


class WebBalancer:
    """A reverse proxy that hands each request to the next replica."""

    def __init__(self, addresses: Iterable[str], http: httpx.AsyncClient) -> None:
        self._next = cycle(addresses)
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await self._forward(request)
        await response(scope, receive, send)

    async def _forward(self, request: Request) -> Response:
        there = httpx.URL(next(self._next)).copy_with(
            path=request.url.path, query=request.url.query.encode() or None
        )
        forwarded = self._http.build_request(
            request.method, there, headers=request.headers.raw, content=await request.body()
        )
        answer = await self._http.send(forwarded, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            dict(answer.headers),
            background=BackgroundTask(answer.aclose),
        )


class GrpcBalancer(grpc.GenericRpcHandler):
    """A proxy that hands each call to the next replica, whatever its method."""

    def __init__(self, channels: Iterable[grpc.aio.Channel]) -> None:
        self._next = cycle(channels)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        forward: Any = next(self._next).stream_stream(handler_call_details.method)

        async def relay(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            try:
                async for answer in forward(requests, metadata=context.invocation_metadata()):
                    yield answer
            except grpc.aio.AioRpcError as error:
                context.set_trailing_metadata(tuple(error.trailing_metadata()))
                await context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(relay)


@asynccontextmanager
async def balancer(addresses: Iterable[str], transport: Transport) -> AsyncIterator[str]:
    """A round-robin balancer in front of replicas; gives its address."""
    async with AsyncExitStack() as stack:
        if transport.binding == 'GRPC':
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(address))
                for address in addresses
            ]
            handlers = (GrpcBalancer(channels),)
            yield await stack.enter_async_context(
                grpc_server(lambda server: server.add_generic_rpc_handlers(handlers))
            )
        else:
            http = await stack.enter_async_context(http_client())
            [address] = await stack.enter_async_context(web(WebBalancer(addresses, http)))
            yield address


def balanced(transport: Transport, replicas: int = 3) -> Reach:
    """One client, which knows a balancer in front of the first replicas and nothing else."""

    @asynccontextmanager
    async def reach(lab: Cluster) -> AsyncIterator[Iterable[Door]]:
        handlers = [replica.handler for replica in lab.replicas[:replicas]]
        async with (
            serve(handlers, transport) as addresses,
            balancer(addresses, transport) as address,
            connect(address, transport) as client,
        ):
            yield [Remote(client)] * len(lab.replicas)

    return reach
