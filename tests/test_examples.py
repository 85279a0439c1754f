"""The example apps of the documents, in this process and as their first lines say."""

import asyncio
import importlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import httpx
import pytest
import uvicorn

from a2a.client import Client, ClientConfig, create_client
from a2a.types import SendMessageRequest, StreamResponse, SubscribeToTaskRequest, Task

from cluster_subscribe._testing import label
from cluster_subscribe._testing.messages import user_message

EXAMPLES = Path(__file__).parent.parent / 'docs' / 'examples'


# Each as two replicas over one database.


@pytest.fixture
def example(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports an example app by name, as its readers do: from its own folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv('DATABASE_URL', sqlite_url)
    monkeypatch.setenv('BOOKING_SECONDS', '0.2')
    before = set(sys.modules)
    yield importlib.import_module
    for name in [*sys.modules]:
        module: ModuleType = sys.modules[name]
        if name not in before and str(getattr(module, '__file__', '')).startswith(str(EXAMPLES)):
            del sys.modules[name]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def web_server(
    build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """Serves an app on a free port, in a thread; gives its address."""
    listener = socket.create_server(('127.0.0.1', 0))
    address = f'http://127.0.0.1:{listener.getsockname()[1]}/'
    monkeypatch.setenv('PUBLIC_URL', address)
    config = uvicorn.Config(build(), log_level='warning', ws='none', timeout_graceful_shutdown=1)
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={'sockets': [listener]})
    thread.start()
    try:
        assert await asyncio.to_thread(server.ready.wait, 20)
        yield address
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)
        listener.close()


def event(response: StreamResponse) -> Any:
    kind = response.WhichOneof('payload')
    assert kind is not None
    return getattr(response, kind)


async def say(client: Client, text: str, task: Task | None = None) -> list[Any]:
    """Sends a message and gives the events of its turn."""
    message = user_message(text, task)
    request = SendMessageRequest(message=message)
    return [event(response) async for response in client.send_message(request)]


async def assert_a_reply_elsewhere_is_heard(a: Client, b: Client) -> None:
    """Turn 1 at A asks, a client subscribes there, and the answer goes to B."""
    task, *rest = await say(a, 'A table, please')
    assert [label(task), *map(label, rest)] == ['Task(SUBMITTED)', 'INPUT_REQUIRED']
    stream = aiter_of(a.subscribe(SubscribeToTaskRequest(id=task.id)))
    snapshot = event(await stream.__anext__())
    assert label(snapshot) == 'Task(INPUT_REQUIRED)'
    assert snapshot.status.message.parts[0].text == 'For how many people?'
    await say(b, 'For 4', task)
    told = [label(event(response)) async for response in stream]
    assert told == ['WORKING', 'art A table for 4', 'COMPLETED']


def aiter_of(stream: Any) -> AsyncIterator[StreamResponse]:
    iterator: AsyncIterator[StreamResponse] = stream.__aiter__()
    return iterator


@pytest.mark.parametrize(
    ('app', 'binding'),
    [('starlette_app', 'JSONRPC'), ('fastapi_app', 'JSONRPC'), ('fastapi_app', 'HTTP+JSON')],
)
async def test_a_web_app_tells_a_client_at_one_replica_what_happens_at_another(
    example: Callable[[str], Any], app: str, binding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = example(app).app
    async with (
        web_server(build, monkeypatch) as at_a,
        web_server(build, monkeypatch) as at_b,
        httpx.AsyncClient(timeout=20, trust_env=False) as http,
    ):
        config = ClientConfig(
            httpx_client=http, supported_protocol_bindings=[binding], use_client_preference=True
        )
        a, b = [await create_client(address, config) for address in (at_a, at_b)]
        await assert_a_reply_elsewhere_is_heard(a, b)


async def test_a_grpc_server_tells_a_client_at_one_replica_what_happens_at_another(
    example: Callable[[str], Any],
) -> None:
    app, card = example('grpc_app'), example('booking').card
    config = ClientConfig(
        grpc_channel_factory=grpc.aio.insecure_channel,
        supported_protocol_bindings=['GRPC'],
    )
    async with app.replica('127.0.0.1:0') as at_a, app.replica('127.0.0.1:0') as at_b:
        a, b = [
            await create_client(card(f'127.0.0.1:{port}', 'GRPC'), config) for port in (at_a, at_b)
        ]
        await assert_a_reply_elsewhere_is_heard(a, b)
        await a.close()
        await b.close()


# Run as their first lines say.


@asynccontextmanager
async def running(
    app: str, folder: Path, *more: str, **environment: str
) -> AsyncIterator[asyncio.StreamReader]:
    """Runs an app by its own words, in a copy of its folder; gives what it logs."""
    words = (EXAMPLES / f'{app}.py').read_text().partition('From this folder: ')[2]
    setting, command, *arguments = words.partition('\n')[0].split()
    name, _, value = setting.partition('=')
    program = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name(command),
        *arguments,
        *more,
        cwd=folder,
        env={**os.environ, 'BOOKING_SECONDS': '0.2', name: value, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stderr is not None
    try:
        yield program.stderr
    finally:
        program.terminate()
        rest = await program.stderr.read()
        assert await program.wait() in (0, -signal.SIGTERM), rest.decode()


@asynccontextmanager
async def running_web_app(app: str, folder: Path) -> AsyncIterator[str]:
    """Runs a web app on a free port; gives its address."""
    async with running(app, folder, '--port', '0') as log:
        lines = []
        async for line in log:
            lines.append(line.decode())
            if found := re.search(r'running on (http://\S+)', lines[-1]):
                yield f'{found[1]}/'
                return
        raise AssertionError(''.join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLES, tmp_path / 'examples')


@pytest.mark.parametrize(
    ('app', 'binding'), [('starlette_app', 'JSONRPC'), ('fastapi_app', 'HTTP+JSON')]
)
async def test_a_web_app_runs_as_documented(
    example: Callable[[str], Any], app: str, binding: str, folder: Path
) -> None:
    card = example('booking').card
    async with (
        running_web_app(app, folder) as at_a,
        running_web_app(app, folder) as at_b,
        httpx.AsyncClient(timeout=20, trust_env=False) as http,
    ):
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=[binding])
        a, b = [await create_client(card(at, binding), config) for at in (at_a, at_b)]
        await assert_a_reply_elsewhere_is_heard(a, b)


async def test_the_grpc_server_runs_as_documented(
    example: Callable[[str], Any], folder: Path
) -> None:
    card = example('booking').card
    # The path of a socket has to be short.
    with tempfile.TemporaryDirectory() as short:
        at = f'unix:{short}/grpc'
        async with (
            running('grpc_app', folder, ADDRESS=at),
            grpc.aio.insecure_channel(at) as channel,
        ):
            await asyncio.wait_for(channel.channel_ready(), 60)
            config = ClientConfig(
                grpc_channel_factory=lambda _: channel, supported_protocol_bindings=['GRPC']
            )
            client = await create_client(card(at, 'GRPC'), config)
            await assert_a_reply_elsewhere_is_heard(client, client)
