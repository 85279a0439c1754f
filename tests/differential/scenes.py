"""What clients do: each scene drives a cluster's agents from gate to gate.

A scene gives back what it saw, each with what is right. Its gates have names of their
own, since scenes are played one after the other on one cluster.
"""

import asyncio

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from a2a.types import (
    DeleteTaskPushNotificationConfigRequest,
    GetTaskPushNotificationConfigRequest,
    GetTaskRequest,
    ListTaskPushNotificationConfigsRequest,
    ListTasksRequest,
    SendMessageConfiguration,
    SendMessageRequest,
    Task,
    TaskPushNotificationConfig,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import A2AError

from cluster_subscribe import ClusterSubscribeHandler
from cluster_subscribe._testing import Cluster, Replica, Watch
from cluster_subscribe._testing.fault import Told
from cluster_subscribe._testing.messages import caller, user_message
from tests.differential.handlers import Lively, Recorder

BACKSTOP = 30
_WORKING = TaskState.TASK_STATE_WORKING


class Seen(NamedTuple):
    """What a client saw, and what it should have seen."""

    right: tuple[str, ...]
    by: Watch | Told
    healed: bool
    """Whether it is right of the wrapped handler alone."""


Scene = Callable[[Cluster], Awaitable[Sequence[Seen]]]


def saw(right: str, *watches: Watch | Told, healed: bool = False) -> list[Seen]:
    return [Seen(tuple(right.split(', ')), watch, healed) for watch in watches]


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


async def refused(lab: Cluster) -> list[Seen]:
    """A guest subscribes to a task of its own, which an access rule of the app forbids."""
    sent = lab.a.send('work wait=refused done', user='guest')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('refused')
    watches = [replica.subscribe(task, 'guest') for replica in lab.replicas]
    for watch in watches:
        assert await watch.until(lambda w: w.events or w.ending, BACKSTOP)
    lab.gates.open('refused')
    await over(sent)
    return saw('UnsupportedOperationError', *watches)


async def refused_rest(lab: Cluster) -> list[Seen]:
    """A guest cancels a task of its own and sends a message, both forbidden."""
    sent = lab.a.send('work wait=refused_rest done', user='guest')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('refused_rest')
    request = SendMessageRequest(message=user_message('work done'))
    found = []
    for place, call in (
        ('cancel here', lab.a.cancel(task, 'guest')),
        ('cancel elsewhere', lab.b.cancel(task, 'guest')),
        ('message', lab.a.handler.on_message_send(request, caller('guest'))),
    ):
        try:
            answer = type(await call).__name__
        except A2AError as error:
            answer = type(error).__name__
        found += saw('UnsupportedOperationError', Told(place, (answer,)))
    lab.gates.open('refused_rest')
    await over(sent)
    return found


async def webhooks(lab: Cluster) -> list[Seen]:
    """What a webhook is sent, and in which order, over two turns at two replicas."""
    task = await lab.a.turn('work art=a ask')
    await lab.b.turn('art=b done', task)
    notified = [
        Told(f'webhook of {replica.name}', tuple(replica.stock._push_sender.sent[task.id]))  # type: ignore[union-attr]
        for replica in (lab.a, lab.b)
    ]
    return [
        *saw('Task(SUBMITTED), WORKING, art a, INPUT_REQUIRED', notified[0]),
        *saw('art b, COMPLETED', notified[1]),
    ]


async def push_configs(lab: Cluster) -> list[Seen]:
    """The methods for the configurations of webhooks."""
    task = await lab.a.turn('work ask')
    handler, user = lab.a.handler, caller()
    config = TaskPushNotificationConfig(task_id=task.id, id='one', url='https://example.org')
    made = await handler.on_create_task_push_notification_config(config, user)
    got = await handler.on_get_task_push_notification_config(
        GetTaskPushNotificationConfigRequest(task_id=task.id, id='one'), user
    )
    await handler.on_delete_task_push_notification_config(
        DeleteTaskPushNotificationConfigRequest(task_id=task.id, id='one'), user
    )
    left = await handler.on_list_task_push_notification_configs(
        ListTaskPushNotificationConfigsRequest(task_id=task.id), user
    )
    return saw('one, one, 0', Told('configs', (made.id, got.id, str(len(left.configs)))))


async def two_tenants(lab: Cluster) -> list[Seen]:
    """Two users' tasks at once, watched by their owners everywhere."""
    users = 'alice', 'bob'
    sent = {user: lab.a.send(f'work wait={user} art={user} done', user=user) for user in users}
    tasks = {user: await begun(sent[user], 'WORKING') for user in users}
    await lab.gates.reached(*users)
    found = [
        seen
        for user in users
        for replica in lab.replicas
        for seen in saw(
            f'Task(WORKING), art {user}, COMPLETED, closed', await replica.watch(tasks[user], user)
        )
    ]
    lab.gates.open(*users)
    for user in users:
        await over(sent[user])
    return found


async def colleague(lab: Cluster) -> list[Seen]:
    """Another user than the owner subscribes, which the app's store allows."""
    sent = lab.a.send('work wait=colleague art=x done')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('colleague')
    watches = [await replica.watch(task, 'colleague') for replica in lab.replicas]
    lab.gates.open('colleague')
    return saw('Task(WORKING), art x, COMPLETED, closed', *watches)


async def sweep(lab: Cluster) -> None:
    """Sweeps where there is something to sweep, and waits for what that has begun."""
    for replica in lab.replicas:
        inner = getattr(replica.handler, 'inner', replica.handler)
        if isinstance(inner, ClusterSubscribeHandler):
            await inner.sweep()
    evicting = {
        t for t in asyncio.all_tasks() if t.get_name().startswith('cluster-subscribe: evict')
    }
    if evicting:
        await asyncio.wait(evicting, timeout=BACKSTOP)


async def _send(lab: Cluster, script: str, *, at_once: bool = False) -> Task:
    how = SendMessageConfiguration(return_immediately=at_once)
    request = SendMessageRequest(message=user_message(script), configuration=how)
    answer = await lab.a.handler.on_message_send(request, caller())
    assert isinstance(answer, Task)
    return answer


async def tail(lab: Cluster) -> list[Seen]:
    """An agent completes its task, then tidies up; a sweep meanwhile."""
    script = 'work done wait=tail'
    task = await _send(lab, script)
    await lab.gates.reached('tail')
    await sweep(lab)
    lab.gates.open('tail')
    agent: Lively = lab.a.stock.agent_executor  # type: ignore[assignment]
    await asyncio.wait_for(agent.over[script].wait(), BACKSTOP)
    return [
        *saw('done', Told('the agent', (agent.ended[script],))),
        *saw('COMPLETED, 1 messages', await stored(lab.b, task)),
    ]


async def late_webhook(lab: Cluster) -> list[Seen]:
    """The webhook of the last event is slow, and nobody waits for the turn; a sweep meanwhile."""
    task = await _send(lab, 'work done', at_once=True)
    await lab.gates.reached('webhook')
    await sweep(lab)
    lab.gates.open('webhook')
    webhook: Recorder = lab.a.stock._push_sender  # type: ignore[assignment]
    await asyncio.wait_for(webhook.over.wait(), BACKSTOP)
    return saw('Task(SUBMITTED), WORKING, COMPLETED', Told('webhook', tuple(webhook.sent[task.id])))


async def job(lab: Cluster) -> list[Seen]:
    """A job that `execute()` has left behind goes on, though another replica has written since."""
    sent = lab.a.send('work then wait=job art=late done wait=job_over')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('job')
    await over(sent)
    await lab.b.turn('art=b ret', await lab.b.get(task.id))
    watch = await lab.a.watch(task)
    await sweep(lab)
    lab.gates.open('job')
    # What is lost without an error never gets there.
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(lab.gates.reached('job_over'), 5)
    lab.gates.open('job_over')
    agent: Lively = lab.a.stock.agent_executor  # type: ignore[assignment]
    for left in tuple(agent.jobs):
        left.cancel()
    return [
        *saw('COMPLETED, art b, art late, 2 messages', await stored(lab.c, task)),
        *saw('Task(WORKING), art late, COMPLETED, closed', watch, healed=True),
    ]


async def message_only(lab: Cluster) -> list[Seen]:
    """An agent that answers with a bare message, streamed and waited for."""
    sent = lab.a.send('say 1')
    await over(sent)
    with lab.parts.acting('user'):
        answer = await lab.b.handler.on_message_send(
            SendMessageRequest(message=user_message('say 2')), caller()
        )
    return [
        *saw('Message, closed', sent),
        *saw('Message', Told('answer', (type(answer).__name__,))),
    ]


async def silent_return(lab: Cluster) -> list[Seen]:
    """Agents that return without an end, and that fail."""
    sent = lab.a.send('work ret')
    task = await begun(sent)
    await over(sent)
    failing = lab.a.send('work wait=silent raise')
    failed = await begun(failing, 'WORKING')
    await lab.gates.reached('silent')
    watch = await lab.c.watch(failed)
    lab.gates.open('silent')
    await over(failing)
    return [
        *saw('Task(SUBMITTED), WORKING, closed', sent),
        *saw('WORKING, 1 messages', await stored(lab.c, task)),
        *saw('Task(SUBMITTED), WORKING, FAILED?, RuntimeError', failing),
        *saw('Task(WORKING), FAILED|Task(FAILED), closed', watch),
    ]


async def unversioned(lab: Cluster) -> list[Seen]:
    """Tasks from before the cluster mode, which have no version, go on in it."""
    old = lab.a.store.as_task_store
    tasks = [
        Task(id=f'old-{n}', context_id='c', status=TaskStatus(state=_WORKING)) for n in range(2)
    ]
    for task in tasks:
        await old.save(task, caller())
    watches = await lab.watch(tasks[0])
    followed = lab.b.send('work wait=unversioned done', tasks[1])
    assert await followed.until(lambda w: 'WORKING' in w.told, BACKSTOP), followed.timeline
    await lab.gates.reached('unversioned')
    here, there = await lab.watch(tasks[1], [lab.b, lab.c])
    lab.gates.open('unversioned')
    tasks[0].status.state = TaskState.TASK_STATE_COMPLETED
    await old.save(tasks[0], caller())
    return [
        *saw('WORKING, COMPLETED, closed', followed),
        *saw('Task(WORKING), COMPLETED, closed', here, there),
        *saw('Task(WORKING), Task(COMPLETED), closed', *watches, healed=True),
    ]


async def unversioned_deleted(lab: Cluster) -> list[Seen]:
    """A task from before the cluster mode is deleted by an old replica."""
    old = lab.a.store.as_task_store
    task = Task(id='old', context_id='c', status=TaskStatus(state=_WORKING))
    await old.save(task, caller())
    watches = await lab.watch(task)
    await old.delete(task.id, caller())
    return saw('Task(WORKING), TaskNotFoundError', *watches, healed=True)


async def retention(lab: Cluster) -> list[Seen]:
    """A job from before the cluster mode deletes rows of `tasks` alone."""
    task = await lab.a.turn('work ask')
    watches = await lab.watch(task)
    await lab.b.store.as_task_store.delete(task.id, caller())
    return saw('Task(INPUT_REQUIRED), TaskNotFoundError', *watches, healed=True)


async def outside_writer(lab: Cluster) -> list[Seen]:
    """Something that is no agent completes the task, with an event of its own."""
    task = await lab.a.turn('work ret')
    watches = await lab.watch(task, [lab.c])
    found = await lab.b.store.get(task.id, caller())
    assert found is not None
    found.task.status.state = TaskState.TASK_STATE_COMPLETED
    event = TaskStatusUpdateEvent(task_id=task.id, context_id=task.context_id)
    event.status.CopyFrom(found.task.status)
    await lab.b.store.save(found.task, event=event, prev_version=found.version, context=caller())
    return saw('Task(WORKING), COMPLETED, closed', *watches)


async def crowd(lab: Cluster) -> list[Seen]:
    """Many subscribers at each replica, some of which leave."""
    sent = lab.a.send('work wait=crowd art=x done')
    task = await begun(sent, 'WORKING')
    await lab.gates.reached('crowd')
    watches = [watch for _ in range(8) for watch in await lab.watch(task)]
    for watch in watches[::2]:
        watch.reader.cancel()
    await asyncio.wait([watch.reader for watch in watches[::2]])
    lab.gates.open('crowd')
    return saw('Task(WORKING), art x, COMPLETED, closed', *watches[1::2])


async def herd(lab: Cluster) -> list[Seen]:
    """A large task with many subscribers elsewhere asks for input."""
    big = 'x' * 200_000
    sent = lab.a.send(f'work art={big} wait=herd ask')
    task = await begun(sent, f'art {big}')
    await lab.gates.reached('herd')
    watches = [await lab.c.watch(task) for _ in range(20)]
    lab.gates.open('herd')
    return saw('Task(WORKING), INPUT_REQUIRED, closed', *watches)


CORE = (midway, follow_up, cancel_here, cancel_elsewhere)
