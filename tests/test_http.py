"""Over HTTP, an error before the first event is a direct answer and not an event stream."""

import asyncio

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from a2a.auth.user import User
from a2a.server.routes import (
    DefaultServerCallContextBuilder,
    create_jsonrpc_routes,
    create_rest_routes,
)
from a2a.utils.constants import VERSION_HEADER
from starlette.applications import Starlette
from starlette.requests import Request

from cluster_subscribe._testing import Cluster
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from tests.support.replicas import decorated, wrapping
from tests.support.waiting import eventually


@pytest.fixture
async def lab(sqlite_url: str) -> AsyncIterator[Cluster]:
    async with cluster(sqlite_url, decorate=wrapping()) as made:
        yield made


class Known(DefaultServerCallContextBuilder):
    """Lets every caller be the lab's user."""

    def build_user(self, request: Request) -> User:
        return caller().user


def client(lab: Cluster) -> httpx.AsyncClient:
    app = Starlette(
        routes=[
            *create_jsonrpc_routes(
                lab.c.handler, '/', context_builder=Known(), enable_v0_3_compat=True
            ),
            *create_rest_routes(lab.c.handler, context_builder=Known()),
        ]
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url='http://replica', timeout=10
    )


def call(method: str, task_id: str) -> dict[str, Any]:
    return {'jsonrpc': '2.0', 'id': 1, 'method': method, 'params': {'id': task_id}}


@pytest.mark.parametrize(
    ('which', 'code', 'status'), [('unknown', -32001, 404), ('terminal', -32004, 400)]
)
async def test_an_error_before_the_first_event_is_a_direct_answer(
    lab: Cluster, which: str, code: int, status: int
) -> None:
    task_id = 'no-such-task' if which == 'unknown' else (await lab.a.turn('done')).id
    async with client(lab) as http:
        headers = {VERSION_HEADER: '1.0'}
        answer = await http.post('/', json=call('SubscribeToTask', task_id), headers=headers)
        assert answer.headers['content-type'].startswith('application/json')
        assert answer.json()['error']['code'] == code
        for method in ('GET', 'POST'):
            answer = await http.request(method, f'/tasks/{task_id}:subscribe', headers=headers)
            assert answer.status_code == status
            assert 'event-stream' not in answer.headers['content-type']


async def test_the_older_protocol_is_served_from_the_log_too(lab: Cluster) -> None:
    task = await lab.a.turn('ask')
    turn = lab.b.start('work wait=1 work done', task)
    await turn.at('1')
    async with client(lab) as http:
        asking = asyncio.ensure_future(http.post('/', json=call('tasks/resubscribe', task.id)))
        await eventually(lambda: decorated(lab.c).statistics().open_subscriptions)
        lab.gates.open('1')
        answer = await asking
        assert 'event-stream' in answer.headers['content-type']
        assert answer.text.count('data:') >= 2
        assert '"completed"' in answer.text
