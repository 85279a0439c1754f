"""What clients do: each scene drives a cluster's agents from gate to gate.

A scene gives back what it saw, each with what is right. Its gates have names of their
own, since scenes are played one after the other on one cluster.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from a2a.types import (
    GetTaskRequest,
    ListTasksRequest,
    SendMessageRequest,
    Task,
    TaskState,
)

from cluster_subscribe.cli.lab import Cluster, Replica, Watch
from cluster_subscribe.cli.lab.cluster import caller, user_message
from cluster_subscribe.cli.lab.faults import Told

BACKSTOP = 30


class Seen(NamedTuple):
    """What a client saw, and what it should have seen."""

    right: tuple[str, ...]
    by: Watch | Told


Scene = Callable[[Cluster], Awaitable[Sequence[Seen]]]


def saw(right: str, *watches: Watch | Told) -> list[Seen]:
    return [Seen(tuple(right.split(', ')), watch) for watch in watches]


def described(task: Task) -> tuple[str, ...]:
    """A stored task in the words of a timeline."""
    state = TaskState.Name(task.status.state).removeprefix('TASK_STATE_')
    parts = [f'art {part.text}' for artifact in task.artifacts for part in artifact.parts]
    return state, *parts, f'{len(task.history)} messages'


async def stored(replica: Replica, task: Task, user: str = 'user') -> Told:
    return Told(f'GetTask at {replica.name}', described(await replica.get(task.id, user)))


async def begun(sent: Watch, *told: str) -> Task:
    """The task of a message, once its own stream has carried these events."""
    said = await sent.until(lambda w: set(told) <= set(w.told) and w.events, BACKSTOP)
    assert said, sent.timeline
    first = sent.events[0]
    assert isinstance(first, Task)
    return first


async def over(watch: Watch) -> None:
    assert await watch.until(lambda w: w.ending, BACKSTOP), watch.timeline


async def answer(lab: Cluster) -> list[Seen]:
    """A turn, streamed to its sender."""
    sent = lab.a.send('work art=x done')
    task = await begun(sent)
    await over(sent)
    return saw('Task(SUBMITTED), WORKING, art x, COMPLETED, closed', sent) + saw(
        'COMPLETED, art x, 1 messages', await stored(lab.c, task)
    )


async def midway(lab: Cluster) -> list[Seen]:
    """Subscribed in mid-turn, where it runs and elsewhere."""
    sent = lab.a.send('work wait=midway chunk=0 chunk=1 art=x done')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('midway')
    watches = await lab.watch(task)
    lab.gates.open('midway')
    return [
        *saw('Task(SUBMITTED), WORKING, chunk 0, chunk 1, art x, COMPLETED, closed', sent),
        *saw('Task(WORKING), chunk 0, chunk 1, art x, COMPLETED, closed', *watches),
    ]


async def follow_up(lab: Cluster) -> list[Seen]:
    """A question at one replica, its answer at another."""
    asked = lab.a.send('work ask')
    task = await begun(asked)
    await over(asked)
    sent = lab.b.send('work wait=follow_up art=y done', await lab.b.get(task.id))
    assert await sent.until(lambda w: 'WORKING' in w.told, BACKSTOP), sent.timeline
    await lab.gates.reached('follow_up')
    watches = await lab.watch(task, [lab.b, lab.c])
    lab.gates.open('follow_up')
    await over(sent)
    return [
        *saw('Task(SUBMITTED), WORKING, INPUT_REQUIRED, closed', asked),
        *saw('WORKING, art y, COMPLETED, closed', sent),
        *saw('Task(WORKING), art y, COMPLETED, closed', *watches),
        *saw('COMPLETED, art y, 2 messages', await stored(lab.a, task)),
    ]


async def cancel_here(lab: Cluster) -> list[Seen]:
    """Cancelled at the replica that runs the turn."""
    sent = lab.a.send('work wait=cancel_here done')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('cancel_here')
    watches = await lab.watch(task, [lab.a, lab.c])
    await lab.a.cancel(task)
    return [
        *saw('Task(SUBMITTED), WORKING, CANCELED, closed', sent),
        *saw('Task(WORKING), CANCELED, closed', *watches),
        *saw('CANCELED, 1 messages', await stored(lab.b, task)),
    ]


async def cancel_elsewhere(lab: Cluster) -> list[Seen]:
    """Cancelled at a replica that does not run the turn."""
    sent = lab.a.send('work wait=cancel_elsewhere done')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('cancel_elsewhere')
    watches = await lab.watch(task, [lab.c])
    await lab.b.cancel(task)
    return [
        *saw('Task(WORKING), CANCELED, closed', *watches),
        *saw('CANCELED, 1 messages', await stored(lab.c, task)),
    ]


async def blocking(lab: Cluster) -> list[Seen]:
    """A message whose sender waits for the answer; then GetTask and ListTasks."""
    context = caller()
    with lab.parts.acting('user'):
        answer = await lab.a.handler.on_message_send(
            SendMessageRequest(message=user_message('work art=x done')), context
        )
        assert isinstance(answer, Task)
        found = await lab.b.handler.on_get_task(GetTaskRequest(id=answer.id), context)
        listed = await lab.c.handler.on_list_tasks(
            ListTasksRequest(context_id=answer.context_id, include_artifacts=True), context
        )
    assert found is not None
    tasks = [answer, found, *listed.tasks]
    return saw(
        'COMPLETED, art x, 1 messages',
        *(Told(f'answer {number}', described(task)) for number, task in enumerate(tasks)),
    )


async def many_chunks(lab: Cluster) -> list[Seen]:
    """A long answer, watched from its beginning."""
    sent = lab.a.send('work wait=many_chunks emit=60 done')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('many_chunks')
    watches = await lab.watch(task)
    lab.gates.open('many_chunks')
    chunks = ', '.join(f'chunk {number}' for number in range(60))
    return [
        *saw(f'Task(SUBMITTED), WORKING, {chunks}, COMPLETED, closed', sent),
        *saw(f'Task(WORKING), {chunks}, COMPLETED, closed', *watches),
    ]


CORE = (midway, follow_up, cancel_here, cancel_elsewhere)
