"""An `AgentExecutor` around the user's: which turns run here, and who may still write.

An `ActiveTask` does not tell whether its agent has something left to do: "finished" is set
at the terminal save, while `execute()` still runs, and an `execute()` that returned may have
left a job behind that emits later. Each agent is therefore handed an alias of its event
queue, of the same class and state. As long as the alias is referenced, somebody may write.
"""

import asyncio

from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import RequestHandler

from cluster_subscribe import sdk
from cluster_subscribe.sdk import LocalTask

_CLOSING: Final = 5.0
"""Seconds that an `ActiveTask` may take to close its queues until it is cancelled after all."""


class Turn:
    """An `execute()` that has not returned yet."""

    def __init__(self) -> None:
        self.canceled: float | None = None
        """The loop's time at which the agent's `cancel()` has returned."""


class ExecutorSeam(AgentExecutor):
    """Passes every call on to the user's executor, and raises nothing of its own."""

    def __init__(
        self,
        executor: AgentExecutor,
        closing: Callable[[str], 'asyncio.Task[None] | None'] = lambda _: None,
    ) -> None:
        """Wraps `executor`.

        Args:
            executor: The user's executor.
            closing: The asyncio task that closes the queues of a task's `ActiveTask`.
        """
        self._executor = executor
        self._closing = closing
        self._running: dict[str | None, list[Turn]] = {}
        self._aliases: WeakValueDictionary[int, EventQueue] = WeakValueDictionary()
        self._every_alias_made = True

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Runs one turn of the user's agent."""
        task_id, turn = context.task_id, Turn()
        self._running.setdefault(task_id, []).append(turn)
        try:
            # The alias is in no variable here: the traceback of an error would keep it.
            await self._executor.execute(context, self._alias(event_queue))
        finally:
            turns = self._running[task_id]
            turns.remove(turn)
            if not turns:
                del self._running[task_id]

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Has the user's agent cancel a turn.

        The SDK cancels its producer next. One that closes its queues would never end (F33).
        """
        task_id = context.task_id
        try:
            await self._executor.cancel(context, self._alias(event_queue))
        finally:
            for turn in self._running.get(task_id, ()):
                turn.canceled = asyncio.get_running_loop().time()
            if task_id and not self.runs(task_id) and (closing := self._closing(task_id)):
                await asyncio.wait({closing}, timeout=_CLOSING)

    def runs(self, task_id: str) -> bool:
        """Whether an `execute()` of the task has not returned yet."""
        return task_id in self._running

    def ignores_cancel(self, task_id: str, seconds: float) -> bool:
        """Whether an `execute()` has gone on for so long after the agent's `cancel()`."""
        now = asyncio.get_running_loop().time()
        return any(
            turn.canceled is not None and now - turn.canceled >= seconds
            for turn in self._running.get(task_id, ())
        )

    def knows(self, local: LocalTask) -> bool:
        """Whether all that the agent was ever handed of an `ActiveTask` came from here."""
        return local.executor is self and self._every_alias_made

    def may_write(self, local: LocalTask) -> bool:
        """Whether somebody may still put an event in the queue of an `ActiveTask`."""
        return not self.knows(local) or id(local.event_queue) in self._aliases

    def _alias(self, queue: EventQueue) -> EventQueue:
        # One at a time, so that an agent may tell queues apart by identity.
        alias = self._aliases.get(id(queue))
        if alias is None or alias.__dict__ is not queue.__dict__:
            try:
                alias = object.__new__(type(queue))
                alias.__dict__ = queue.__dict__
                self._aliases[id(queue)] = alias
            except (AttributeError, TypeError):
                self._every_alias_made = False
                return queue
        return alias


def install(handler: RequestHandler) -> ExecutorSeam | None:
    """Puts a seam around the executor of the `ActiveTask`s that a handler will make.

    The handler's own attribute stays what the user gave.

    Returns:
        The seam, one and the same for one handler; `None` where its place is not known.
    """
    executor = sdk.agent_executor(handler)
    if executor is None or isinstance(executor, ExecutorSeam):
        return executor
    seam = ExecutorSeam(executor, partial(sdk.closing_producer, handler))
    sdk.replace_agent_executor(handler, seam)
    return seam
