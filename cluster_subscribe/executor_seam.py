"""An `AgentExecutor` around the user's: which turns run here, and who may still write.

An `ActiveTask` does not tell whether its agent has something left to do: "finished" is set
at the terminal save, while `execute()` still runs, and an `execute()` that returned may have
left a job behind that emits later. Each agent is therefore handed an alias of its event
queue, of the same class and state. As long as the alias is referenced, somebody may write.
"""

from collections import Counter
from weakref import WeakValueDictionary

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import RequestHandler

from cluster_subscribe import sdk
from cluster_subscribe.sdk import LocalTask


class ExecutorSeam(AgentExecutor):
    """Passes every call on to the user's executor, and raises nothing of its own."""

    def __init__(self, executor: AgentExecutor) -> None:
        self._executor = executor
        self._running: Counter[str | None] = Counter()
        self._aliases: WeakValueDictionary[int, EventQueue] = WeakValueDictionary()
        self._every_alias_made = True

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Runs one turn of the user's agent."""
        task_id = context.task_id
        self._running[task_id] += 1
        try:
            # The alias is in no variable here: the traceback of an error would keep it.
            await self._executor.execute(context, self._alias(event_queue))
        finally:
            self._running[task_id] -= 1
            if not self._running[task_id]:
                del self._running[task_id]

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Has the user's agent cancel a turn."""
        await self._executor.cancel(context, self._alias(event_queue))

    def runs(self, task_id: str) -> bool:
        """Whether an `execute()` of the task has not returned yet."""
        return task_id in self._running

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
    seam = ExecutorSeam(executor)
    sdk.replace_agent_executor(handler, seam)
    return seam
