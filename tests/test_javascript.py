"""A client that is not Python: the JavaScript SDK's, at the replica that was overtaken."""

import asyncio
import json
import re
import shutil
import subprocess

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from a2a.types import Task

from cluster_subscribe._testing import Cluster, Decorate
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import agent_card
from tests.support.transports import app, web

PROGRAM = Path(__file__).parent / 'javascript'
BINDINGS = pytest.mark.parametrize('binding', ['JSONRPC', 'HTTP+JSON'])


@pytest.fixture(scope='session')
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program and the SDK that it needs."""
    node, npm = shutil.which('node'), shutil.which('npm')
    if not node or not npm:
        pytest.skip('no node and npm on this machine')
    version = subprocess.run([node, '--version'], capture_output=True, text=True, check=True)
    if int(re.findall(r'\d+', version.stdout)[0]) < 20:
        pytest.skip(f'the SDK needs node 20, here is {version.stdout.strip()}')
    folder = tmp_path_factory.mktemp('javascript')
    shutil.copytree(PROGRAM, folder, dirs_exist_ok=True)
    install = [npm, 'install', '--no-package-lock', '--ignore-scripts', '--omit=peer']
    try:
        subprocess.run(
            [*install, '--no-audit', '--no-fund', '--prefer-offline'],
            cwd=folder,
            capture_output=True,
            timeout=60,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f'npm cannot install the SDK here: {error}')
    return folder


@asynccontextmanager
async def subscribed(
    folder: Path, lab: Cluster, binding: str, task: Task
) -> AsyncIterator[AsyncIterator[list[str]]]:
    """A JavaScript client of replica A; gives what it is told."""
    card = agent_card('')
    async with web(app(lab.a.handler, card)) as [address]:
        [interface] = card.supported_interfaces
        interface.url, interface.protocol_binding = address, binding
        program = await asyncio.create_subprocess_exec(
            *('node', 'subscribe.mjs', address, binding, task.id),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
        )
        assert program.stdout is not None
        try:
            yield (json.loads(line) async for line in program.stdout)
        finally:
            if program.returncode is None:
                program.kill()
            await program.wait()


@BINDINGS
async def test_a_javascript_client_follows_the_task_where_an_earlier_turn_ran(
    javascript: Path, binding: str, sqlite_url: str, wrapped: Decorate
) -> None:
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        await lab.b.start('work wait=1 art=x done', task).at('1')
        async with subscribed(javascript, lab, binding, task) as told:
            assert await told.__anext__() == ['task', 'TASK_STATE_WORKING']
            lab.gates.open('1')
            assert [one async for one in told] == [
                ['artifactUpdate', 'x'],
                ['statusUpdate', 'TASK_STATE_COMPLETED'],
                ['closed', ''],
            ]
        async with subscribed(javascript, lab, binding, task) as told:
            assert [one async for one in told] == [['error', 'UnsupportedOperationError']]


async def test_the_sdk_alone_tells_it_of_an_old_question(javascript: Path, sqlite_url: str) -> None:
    async with cluster(sqlite_url) as lab:
        task = await lab.a.turn('ask')
        await lab.b.start('work wait=1 done', task).at('1')
        async with subscribed(javascript, lab, 'JSONRPC', task) as told:
            assert await told.__anext__() == ['task', 'TASK_STATE_INPUT_REQUIRED']
