"""An agent that does what its user's message says, word by word."""

import asyncio

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import Event, EventQueue
from a2a.types import TaskState

from cluster_subscribe._testing.messages import CHUNKS, artifact_update, new_task, status_update

STATES: Final = {
    'work': TaskState.TASK_STATE_WORKING,
    'ask': TaskState.TASK_STATE_INPUT_REQUIRED,
    'auth': TaskState.TASK_STATE_AUTH_REQUIRED,
    'done': TaskState.TASK_STATE_COMPLETED,
    'fail': TaskState.TASK_STATE_FAILED,
    'reject': TaskState.TASK_STATE_REJECTED,
}


class Gates:
    """Where agents wait, and where a scene waits for them."""

    def __init__(self) -> None:
        self._reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._opened: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._commits: list[Event] = []
        self._commit = asyncio.Condition()

    async def arrive(self, gate: str) -> None:
        """Says that a gate is reached and waits until it is opened."""
        self._reached[gate].set()
        await self._opened[gate].wait()

    async def reached(self, *gates: str) -> None:
        """Waits until agents stand at the gates, their events committed."""
        for gate in gates:
            await self._reached[gate].wait()

    def open(self, *gates: str) -> None:
        """Lets agents pass."""
        for gate in gates:
            self._opened[gate].set()

    async def committed(self, event: Event) -> None:
        """Waits until the store has committed the event."""
        async with self._commit:
            await self._commit.wait_for(lambda: any(one is event for one in self._commits))

    async def commits(self, count: int) -> None:
        """Waits until so many events have been committed in all."""
        async with self._commit:
            await self._commit.wait_for(lambda: len(self._commits) >= count)

    async def note_commit(self, event: Event) -> None:
        """Tells that the store has committed the event."""
        async with self._commit:
            self._commits.append(event)
            self._commit.notify_all()


class ScriptedAgent(AgentExecutor):
    """Follows a script of words, separated by spaces.

    `work`, `ask`, `auth`, `done`, `fail`, `reject` announce a state, `work=x` one with the
    message x. `art=x` adds an artifact, `chunk=n` one more part of one artifact, `emit=n`
    replaces that n times. `wait=g` waits at a gate until all before it is committed and the
    gate is open, `sleep=s` for some seconds. `raise` fails, `ret` returns. A new task starts
    as SUBMITTED.
    """

    def __init__(self, gates: Gates | None = None, *, silent_cancel: bool = False) -> None:
        self._gates = gates or Gates()
        self._silent_cancel = silent_cancel

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Runs one turn."""
        last: Event | None = None
        async for event in self._act(context):
            if isinstance(event, str):
                if last is not None:
                    await self._gates.committed(last)
                await self._gates.arrive(event)
            else:
                await event_queue.enqueue_event(last := event)

    async def _act(self, context: RequestContext) -> AsyncIterator[Event | str]:
        """Yields events to emit and the names of gates to wait at."""
        if context.current_task is None:
            yield new_task(context)
        for word in context.get_user_input().split():
            name, _, value = word.partition('=')
            if name in STATES:
                yield status_update(context, STATES[name], value)
            elif name == 'art':
                yield artifact_update(context, value, value)
            elif name == 'chunk':
                yield artifact_update(context, CHUNKS, value, append=value != '0')
            elif name == 'emit':
                for number in range(int(value)):
                    yield artifact_update(context, CHUNKS, str(number))
            elif name == 'wait':
                yield value
            elif name == 'sleep':
                await asyncio.sleep(float(value))
            elif name == 'raise':
                raise RuntimeError('the agent failed; this text is for its operator only')
            elif name == 'ret':
                return
            else:
                raise ValueError(f'The script has an unknown word: {word!r}')

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Announces CANCELED, or leaves that to the SDK."""
        # The SDK waits for ever for a producer that it cancels before its first step.
        await asyncio.sleep(0)
        if not self._silent_cancel:
            await event_queue.enqueue_event(status_update(context, TaskState.TASK_STATE_CANCELED))
