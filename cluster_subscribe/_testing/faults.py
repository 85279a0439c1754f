"""The faults of the SDK alone, each as one scene that stock and wrapped handlers play.

A scene drives agents from gate to gate, subscribes where the fault shows, and gives
back the streams; what every one of them should have carried is `right`.
"""

import asyncio
import gc

from collections.abc import Callable, Sequence
from typing import Any, Final

from a2a.types import Task, TaskState

from cluster_subscribe import ClusterSubscribeHandler, sdk
from cluster_subscribe._testing.cluster import Cluster
from cluster_subscribe._testing.fault import Fault, Scene, Told
from cluster_subscribe._testing.messages import caller
from cluster_subscribe._testing.watching import Watch

FAULTS: Final[list[Fault]] = []


def _fault(number: str, title: str, right: str, **setting: Any) -> Callable[[Scene], Scene]:
    def add(scene: Scene) -> Scene:
        FAULTS.append(Fault(number, title, tuple(right.split(', ')), scene, setting))
        return scene

    return add


@_fault(
    'F1',
    'Subscribing where an earlier turn ran: an old question, then silence',
    'Task(WORKING), WORKING, WORKING, COMPLETED, closed',
)
async def _stale_local_subscription(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    turn = lab.b.start('work wait=1 work work done', task)
    await turn.at('1')
    watches = await lab.watch(task)
    lab.gates.open('1')
    return watches


@_fault(
    'F2',
    'Subscribed while the task waits for input: the reply closes or hangs the stream',
    'Task(INPUT_REQUIRED), WORKING, WORKING, COMPLETED, closed',
)
async def _reply_while_paused(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    watches = await lab.watch(task)
    lab.b.start('work work done', task)
    return watches


@_fault(
    'F3',
    'The agent asks for input: the stream at its replica never ends',
    'Task(WORKING), INPUT_REQUIRED, closed',
)
async def _question_at_the_holder(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=1 ask').at('1')
    watches = await lab.watch(task)
    lab.gates.open('1')
    return watches


@_fault(
    'F4',
    'A turn that returns while WORKING, the next runs elsewhere: silence',
    'Task(WORKING), WORKING, art x, COMPLETED, closed',
)
async def _early_return(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('work ret')
    watches = await lab.watch(task)
    lab.b.start('work art=x done', task)
    return watches


@_fault(
    'F5',
    "Two replicas run turns of one task: the other's events are not seen",
    'Task(WORKING), art a1, art b1, art a2, art b2, COMPLETED, closed',
)
async def _two_runners(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=1 art=a1 wait=2 art=a2 wait=3 done').at('1')
    watches = await lab.watch(task)
    lab.gates.open('1')
    await lab.gates.reached('2')
    lab.b.start('art=b1 wait=4 art=b2 wait=5 ret', task)
    await lab.gates.reached('4')
    lab.gates.open('2')
    await lab.gates.reached('3')
    lab.gates.open('4')
    await lab.gates.reached('5')
    lab.gates.open('3', '5')
    return watches


@_fault(
    'F6',
    'A slow push notification: a part of the answer is delivered twice',
    'Task(SUBMITTED), chunk 2, chunk 3, COMPLETED, closed',
    slow_push='chunk 1',
)
async def _snapshot_and_events_overlap(lab: Cluster) -> Sequence[Watch]:
    turn = lab.a.start('chunk=0 chunk=1 chunk=2 chunk=3 done')
    task = await turn.at('push')
    watches = await lab.watch(task)
    lab.gates.open('push')
    return watches


_MANY: Final = 1_040
"""More events than the SDK queues for one subscriber."""


@_fault(
    'F7',
    'A slow reader is dropped in silence',
    f'Task(WORKING), {", ".join(f"chunk {n}" for n in range(_MANY))}, COMPLETED, closed',
)
async def _slow_reader(lab: Cluster) -> Sequence[Watch]:
    turn = lab.a.start(f'work wait=1 emit={_MANY} done')
    task = await turn.at('1')
    watches = [lab.a.subscribe(task), lab.c.subscribe(task)]
    for watch in watches:
        watch.hold()
        await watch.first()
    lab.gates.open('1')
    await turn.ended()
    for watch in watches:
        watch.resume()
    return watches


@_fault(
    'F8',
    'A cancelled reader looks like a finished stream',
    'Task(INPUT_REQUIRED), cancelled',
)
async def _swallowed_cancellation(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    watches = await lab.watch(task)
    for watch in watches:
        watch.reader.cancel()
    await asyncio.wait([watch.reader for watch in watches])
    return watches


@_fault(
    'F9',
    "A cancel where an earlier turn ran: the running turn's work is gone",
    'CANCELED, art one, art two, 2 messages',
)
async def _cancel_at_the_stale_replica(lab: Cluster) -> Sequence[Told]:
    task = await lab.a.turn('ask')
    await lab.b.start('work art=one art=two wait=1 done', task).at('1')
    await lab.a.cancel(task)
    stored = await lab.c.get(task.id)
    state = TaskState.Name(stored.status.state).removeprefix('TASK_STATE_')
    artifacts = (f'art {artifact.artifact_id}' for artifact in stored.artifacts)
    return [Told('the store', (state, *artifacts, f'{len(stored.history)} messages'))]


@_fault(
    'F10',
    'The agent fails: its raw exception comes out of the stream',
    'Task(WORKING), FAILED|Task(FAILED), closed',
)
async def _failing_agent(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=1 raise').at('1')
    watches = await lab.watch(task)
    lab.gates.open('1')
    return watches


@_fault(
    'F11',
    'A cancel that the agent does not answer: the stream ends without CANCELED',
    'Task(WORKING), CANCELED|Task(CANCELED), closed',
    silent_cancel=True,
)
async def _silent_cancel(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=1').at('1')
    watches = await lab.watch(task)
    await lab.a.cancel(task)
    return watches


@_fault(
    'F12',
    'Cancelled at another replica: no word of it until the agent speaks',
    'Task(WORKING), CANCELED, closed',
)
async def _remote_cancel(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.start('work wait=1 chunk=0').at('1')
    watches = await lab.watch(task)
    await lab.b.cancel(task)
    return watches


@_fault(
    'F13',
    'A state saved without an event: every subscriber waits for ever',
    'Task(WORKING), Task(FAILED), closed',
)
async def _unlogged_state(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('work ret')
    watches = await lab.watch(task)
    stored = await lab.b.store.get(task.id, caller())
    assert stored is not None
    stored.task.status.state = TaskState.TASK_STATE_FAILED
    await lab.b.store.save(
        stored.task, event=None, prev=None, prev_version=stored.version, context=caller()
    )
    return watches


@_fault(
    'F14',
    'A deleted task: its subscribers wait for ever',
    'Task(INPUT_REQUIRED), TaskNotFoundError',
)
async def _deleted(lab: Cluster) -> Sequence[Watch]:
    task = await lab.a.turn('ask')
    watches = await lab.watch(task)
    await lab.b.store.delete(task.id, caller())
    return watches


@_fault(
    'F15',
    'Tasks that went on elsewhere: the replica of an earlier turn keeps them for ever',
    '0 of 5 tasks kept',
)
async def _zombies(lab: Cluster) -> Sequence[Told]:
    for task in [await lab.a.turn('ask') for _ in range(5)]:
        await lab.b.turn('done', task)
    gc.collect()
    if isinstance(lab.a.handler, ClusterSubscribeHandler):
        await lab.a.handler.sweep()
    kept = len(sdk.local_tasks(lab.a.stock))
    return [Told('A', (f'{kept} of 5 tasks kept',))]


@_fault(
    'F18',
    'A follow-up that names its task and no context: the task fails',
    'COMPLETED',
)
async def _follow_up_without_context(lab: Cluster) -> Sequence[Told]:
    task = await lab.a.turn('ask')
    lean = Task(id=task.id)
    stored = await lab.b.turn('work done', lean)
    return [Told('B', (TaskState.Name(stored.status.state).removeprefix('TASK_STATE_'),))]


@_fault(
    'F19',
    'An agent that speaks and fails at once: its failure is not logged',
    'Task(WORKING), WORKING?, FAILED|Task(FAILED), closed',
)
async def _failure_under_an_old_version(lab: Cluster) -> Sequence[Watch]:
    turns = {name: lab.a.start(f'work wait={name} work raise') for name in map(str, range(12))}
    watches = {}
    for name, turn in turns.items():
        watches[name] = await lab.c.watch(await turn.at(name))
        watches[name].place = f'task {name} at C'
    lab.gates.open(*turns)
    # Where the SDK leaves the task WORKING for ever there is nothing to be told.
    return [
        watches[name]
        for name, turn in turns.items()
        if (await turn.ended()).status.state == TaskState.TASK_STATE_FAILED
    ]
