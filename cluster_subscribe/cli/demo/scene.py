"""The client's side: two turns of one task, and three resubscriptions."""

import asyncio
import time

from collections.abc import Callable, Mapping
from typing import Final

import httpx

from a2a.client import A2AClientError, Client, ClientConfig, create_client
from a2a.types import GetTaskRequest, SubscribeToTaskRequest, Task
from a2a.utils.errors import A2AError, UnsupportedOperationError

from cluster_subscribe._testing.messages import send_request
from cluster_subscribe.cli.demo.timeline import (
    CLOSED,
    COMPLETED,
    OPEN,
    STEPS,
    Timeline,
    Told,
    status,
    told,
)
from cluster_subscribe.cli.ending import Failure, reason

_PAUSE: Final = 0.4
"""Seconds between two steps of the agent: enough to subscribe between the first two."""
_LIMIT: Final = 60.0
"""Seconds for the whole scene, on a busy machine."""


async def play(
    addresses: Mapping[str, str], context_id: str, timeout: float, tell: Callable[[str], None]
) -> list[Timeline]:
    """Plays the task: turn 1 on A, the reply to B, resubscriptions through A, B and C.

    Args:
        addresses: Where the replicas are, by name.
        context_id: The context of the task.
        timeout: Seconds of silence after the end of the task until a stream that is
            still open counts as hung.
        tell: Is told in words how far it is.

    Returns:
        What each subscription was told, in the order of the addresses.

    Raises:
        Failure: The turns themselves did not work.
    """
    # No proxy stands between, and a stream may be silent for as long as it likes.
    limits = httpx.Timeout(_LIMIT, read=None)
    try:
        async with httpx.AsyncClient(timeout=limits, trust_env=False) as http:
            config = ClientConfig(httpx_client=http)
            clients = {name: await create_client(at, config) for name, at in addresses.items()}
            return await asyncio.wait_for(_Scene(clients, timeout, tell).play(context_id), _LIMIT)
    except asyncio.TimeoutError:
        raise Failure(f'The task took more than {_LIMIT:g} seconds') from None
    except (A2AClientError, A2AError) as error:
        raise Failure(f'The replicas did not serve the task: {reason(error)}') from error


class _Scene:
    def __init__(
        self, clients: Mapping[str, Client], timeout: float, tell: Callable[[str], None]
    ) -> None:
        self._clients = clients
        self._timeout = timeout
        self._tell = tell
        self._timelines = [Timeline(name) for name in clients]
        self._watchers: list[asyncio.Task[None]] = []
        self._sent = self._heard = 0.0

    async def play(self, context_id: str) -> list[Timeline]:
        a, b, c = self._clients.values()
        try:
            task_id = await self._first_turn(a, context_id)
            await self._second_turn(b, context_id, task_id)
            completed = self._now()
            stored = status((await c.get_task(GetTaskRequest(id=task_id))).status)
            if stored != COMPLETED:
                raise Failure(f'The task did not complete, it is {stored}')
            await self._settle()
        finally:
            for watcher in self._watchers:
                watcher.cancel()
            await asyncio.gather(*self._watchers, return_exceptions=True)
        if any(_came_late(timeline, completed) for timeline in self._timelines):
            raise Failure('This machine is too busy: the task was over before a client subscribed')
        return self._timelines

    async def _first_turn(self, client: Client, context_id: str) -> str:
        self._tell('turn 1 runs on A')
        task_id = said = ''
        async for response in client.send_message(send_request('ask', Task(context_id=context_id))):
            task_id = response.task.id or response.status_update.task_id
            said = told(0, response).text
        if said != 'INPUT_REQUIRED':
            raise Failure(f'Turn 1 did not pause for input, it said {said or "nothing"}')
        return task_id

    async def _second_turn(self, client: Client, context_id: str, task_id: str) -> None:
        self._tell('turn 2 runs on B, three clients listen through A, B and C')
        script = f' sleep={_PAUSE} '.join(STEPS)
        self._sent = time.monotonic()
        async for response in client.send_message(
            send_request(script, Task(id=task_id, context_id=context_id))
        ):
            self._heard = time.monotonic()
            if told(0, response).text in STEPS.values() and not self._watchers:
                self._watchers = [
                    asyncio.create_task(self._watch(each, timeline, task_id))
                    for each, timeline in zip(self._clients.values(), self._timelines, strict=True)
                ]

    async def _watch(self, client: Client, timeline: Timeline, task_id: str) -> None:
        ending = CLOSED
        try:
            async for response in client.subscribe(SubscribeToTaskRequest(id=task_id)):
                self._heard = time.monotonic()
                timeline.events.append(told(self._now(), response))
        except (A2AClientError, A2AError) as error:
            ending = type(error).__name__
        timeline.ending = Told(self._now(), ending)

    async def _settle(self) -> None:
        """Waits until every stream has ended, or none says anything any more."""
        self._tell('the task is over, is every client told?')
        while running := [watcher for watcher in self._watchers if not watcher.done()]:
            left = self._heard + self._timeout - time.monotonic()
            if left <= 0:
                break
            await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for timeline in self._timelines:
            timeline.ending = timeline.ending or Told(self._now(), OPEN)

    def _now(self) -> float:
        return time.monotonic() - self._sent


def _came_late(timeline: Timeline, completed: float) -> bool:
    """Whether a subscription was refused, rightly, because the task had ended."""
    refused = timeline.ending and timeline.ending.text == UnsupportedOperationError.__name__
    return bool(refused) and timeline.rows[0].seconds > completed
