"""Random clusters: what may happen to one, as a state machine of hypothesis."""

import asyncio

from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.types import TaskState
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe.settings import CloseOn, Evict
from tests.model import cluster
from tests.model.clock import Clock
from tests.model.cluster import Bench
from tests.model.records import Config, Known, Play, Stream
from tests.support.memory import TERMINAL

STEPS: Final = 14
"""Steps of one cluster."""

_replicas: Final = st.integers(0, 2)
_any: Final = st.integers(0, 11)
"""Chooses one of what there is."""
_words: Final = st.lists(
    st.sampled_from(['work', 'art', 'chunk', 'ask', 'auth']), min_size=0, max_size=4
)
_endings: Final = st.sampled_from(['ret', 'ret', 'done', 'fail', 'reject', 'raise'])
_states: Final = st.sampled_from(
    [
        TaskState.TASK_STATE_WORKING,
        TaskState.TASK_STATE_INPUT_REQUIRED,
        TaskState.TASK_STATE_AUTH_REQUIRED,
        TaskState.TASK_STATE_FAILED,
    ]
)
_configs: Final = st.builds(
    Config,
    close_on=st.sampled_from([CloseOn.INTERRUPTED, CloseOn.INTERRUPTED, CloseOn.TERMINAL]),
    buffered=st.sampled_from([1, 2, 3, 256]),
    wakeups=st.sampled_from(['auto', 'auto', 'poll', 'none']),
    evict=st.sampled_from([Evict.SUPERSEDED, Evict.SUPERSEDED, Evict.OFF]),
    silent_cancel=st.sampled_from([False, False, True]),
    scattered=st.booleans(),
)


class World(NamedTuple):
    """What all clusters of a run share: a loop, a database, and what was counted."""

    clock: Clock
    url: str
    eyes: AsyncEngine
    unhandled: list[dict[str, Any]]
    tally: Counter[str]
    stories: list[str]
    """What went before each counterexample: one that does not come again is one, too."""


@contextmanager
def world(url: str) -> Iterator[World]:
    """A loop of its own over a database whose tables exist."""
    clock = Clock()
    unhandled: list[dict[str, Any]] = []
    clock.set_exception_handler(lambda _, context: unhandled.append(context))
    eyes = create_async_engine(url)

    async def prepare() -> None:
        await VersionedDatabaseTaskStore(eyes).initialize()
        async with eyes.connect() as connection:
            last = (await connection.execute(text('SELECT max(seq) FROM task_events'))).scalar()
        cluster.number_rows_from(last or 0)

    try:
        clock.run_until_complete(prepare())
        yield World(clock, url, eyes, unhandled, Counter(), [])
    finally:
        clock.run_until_complete(eyes.dispose())
        clock.run_until_complete(clock.shutdown_default_executor())
        clock.close()


class Machine(RuleBasedStateMachine):
    """One random cluster. After each step every stream is what the model says."""

    world: World
    tells: bool
    """Whether the first counterexample is told at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench | None = None
        self.story: list[str] = []
        self.broken = False

    @property
    def _bench(self) -> Bench:
        assert self.bench is not None
        return self.bench

    def _do(
        self, *steps: Awaitable[None], told: str, racing: bool = False, prompt: Play | None = None
    ) -> None:
        bench, clock = self._bench, self.world.clock
        self.story.append(told)
        self.world.tally[told.partition(' ')[0]] += 1
        self.world.tally['steps'] += 1

        async def step() -> None:
            step = asyncio.ensure_future(bench.at_once(*steps))
            await clock.until(step.done, 'the end of the step')
            step.result()
            await bench.settle(racing=racing, prompt=prompt)

        try:
            clock.run_until_complete(step())
        except Exception as error:
            self.broken = True
            self.world.tally.setdefault('first broken', self.world.tally['clusters'])
            story = '\n'.join([f'{error!r}', *self.story])
            if self.tells and not self.world.stories:
                # Making it small may take minutes, and may find that it does not come again.
                print(f'A counterexample: {story}', flush=True)
            self.world.stories.append(story)
            raise AssertionError(story) from error

    @initialize(
        config=_configs,
        at=_replicas,
        words=_words,
        ending=_endings,
        joins=st.lists(st.tuples(_replicas, st.booleans()), min_size=1, max_size=4),
    )
    def _open(
        self,
        config: Config,
        at: int,
        words: list[str],
        ending: str,
        joins: list[tuple[int, bool]],
    ) -> None:
        world = self.world
        world.tally['clusters'] += 1
        self.story.append(str(config))

        async def open_bench() -> Bench:
            return Bench(world.clock, world.url, world.eyes, config)

        self.bench = world.clock.run_until_complete(open_bench())
        self._do(self.bench.begin(at, words, ending), told=f'begin {at} {words} {ending}')
        if self._alive():
            self.subscribe([(replica, 1, slow) for replica, slow in joins])

    def _task(self, number: int) -> Known:
        """A task, and mostly one that is under way."""
        tasks = self._bench.tasks
        if number % 6 and (alive := self._alive()):
            tasks = alive
        return tasks[number % len(tasks)]

    def _alive(self) -> list[Known]:
        return [task for task in self._bench.tasks if task.alive]

    def _play(self, number: int) -> Play:
        return self._bench.plays[number % len(self._bench.plays)]

    def _stream(self, number: int) -> Stream:
        return self._bench.streams[number % len(self._bench.streams)]

    def _busy(self, at: int, known: Known) -> bool:
        replica = self._bench.replicas[at]
        return any(p.task is known and p.replica is replica for p in self._bench.plays)

    @rule(at=_replicas, words=_words, ending=_endings)
    def begin(self, at: int, words: list[str], ending: str) -> None:
        """A message that begins a task, where few are under way."""
        if len(self._alive()) > 1:
            self.follow_up(at, 1, words, ending)
        else:
            self._do(self._bench.begin(at, words, ending), told=f'begin {at} {words} {ending}')

    def _go_on(self, number: int) -> None:
        """What is done where there is no turn to move.

        What is drawn must not depend on what happened: that is not the same each time.
        """
        words = ['work', 'chunk', 'ask', 'art', 'auth', 'chunk', 'work'][number % 4 :][:3]
        self.follow_up(number % 3, number, words, ['ret', 'done', 'ret', 'raise'][number % 4])

    @rule(at=_replicas, task=_any, words=_words, ending=_endings)
    def follow_up(self, at: int, task: int, words: list[str], ending: str) -> None:
        """A message to any replica where no turn of the task runs."""
        known = self._task(task)
        free = [one % 3 for one in (at, at + 1, at + 2) if not self._busy(one % 3, known)]
        if not known.alive:
            self.begin(at, words, ending)
        elif not free:
            self.advance(task)
        else:
            self._do(
                self._bench.follow_up(free[0], known, words, ending),
                told=f'follow_up {free[0]} task {task} {words} {ending}',
            )

    @rule(
        at=_replicas,
        task=_any,
        words=_words,
        then=st.sampled_from(['cancel', 'cancel', 'subscribe']),
    )
    def hand_over(self, at: int, task: int, words: list[str], then: str) -> None:
        """A question, its answer at the next replica, and a request at the first."""
        known, bench = self._task(task), self._bench
        other = (at + 1) % 3
        if known not in self._alive() or self._busy(at, known) or self._busy(other, known):
            return self.follow_up(at, task, words, 'ret')
        for replica, script in ((at, ['ask']), (other, ['art', *words])):
            # Where a third turn runs, one of them fails, perhaps at once and with the task.
            if known in self._alive():
                self._do(
                    bench.follow_up(replica, known, script, 'ret'),
                    told=f'follow_up {replica} task {task} {script}',
                )
            if bench.plays:
                step = bench.advance(bench.plays[-1], 2)
                self._do(step, told='advance the last by 2', racing=True)
        if then == 'subscribe':
            self._do(bench.subscribe(at, known, slow=False), told=f'subscribe {at}')
        elif known.alive and not known.raced:
            self._do(bench.cancel(at, known), told=f'cancel {at} task {task}')
        return None

    @rule(play=_any)
    def advance(self, play: int) -> None:
        """One word of an agent."""
        if not self._bench.plays:
            return self._go_on(play)
        moved = self._play(play)
        return self._do(self._bench.advance(moved, 1), told=f'advance {play}', prompt=moved)

    @rule(play=_any)
    def advance_again(self, play: int) -> None:
        """As often as all else together."""
        self.advance(play)

    @rule(play=_any, count=st.integers(2, 5), lagging=st.none() | _any)
    def rush(self, play: int, count: int, lagging: int | None) -> None:
        """Several words of an agent at once, perhaps while a client reads no further."""
        bench = self._bench
        if not bench.plays:
            return self._go_on(play)
        moved = self._play(play)
        steps: list[Awaitable[None]] = [bench.advance(moved, count)]
        streams = [stream for stream in bench.streams if stream.task is moved.task]
        if streams and lagging is not None:
            steps.insert(0, bench.pause(streams[lagging % len(streams)]))
        return self._do(*steps, told=f'rush {play} by {count} {lagging=}', racing=True)

    @rule(joins=st.lists(st.tuples(_replicas, _any, st.booleans()), min_size=1, max_size=3))
    def subscribe(self, joins: list[tuple[int, int, bool]]) -> None:
        """Clients that subscribe anywhere, be it to a task that is over or gone."""
        steps = [self._bench.subscribe(at, self._task(t), slow=slow) for at, t, slow in joins]
        self._do(*steps, told=f'subscribe {joins}')

    @rule(stream=_any, what=st.sampled_from(['pause', 'resume', 'sip', 'resume', 'disconnect']))
    def read(self, stream: int, what: str) -> None:
        """A client that stops to read, goes on, takes one event, or leaves."""
        if not self._bench.streams:
            return self.subscribe([(stream % 3, stream, stream % 2 == 0)])
        step = getattr(self._bench, what)
        return self._do(step(self._stream(stream)), told=f'{what} {stream}')

    @rule(
        what=st.sampled_from(
            [
                *('save', 'save silently', 'save and go on', 'save and go on'),
                *('delete', 'delete', 'sweep', 'stranger'),
                *('cancel', 'cancel where a turn ran'),
            ]
        ),
        at=_replicas,
        task=_any,
        state=_states,
    )
    def meddle(self, what: str, at: int, task: int, state: TaskState) -> None:
        """What others do to a task: tools, administrators, strangers, the sweep."""
        bench, known = self._bench, self._task(task)
        told = f'{what} {at} task {task}'
        if what == 'sweep':
            self._do(bench.sweep(at), told=told)
        elif what == 'stranger':
            self._do(bench.subscribe(at, known, slow=False, user='stranger'), told=told)
        elif what.startswith('cancel') and known.alive and not known.raced:
            ran = sorted(one for one in known.ran if not self._busy(one, known))
            if ran and what != 'cancel':
                at = ran[at % len(ran)]
            self._do(bench.cancel(at, known), told=f'{what} {at} task {task}')
        elif what.startswith('save') and known.alive:
            steps = [bench.save(at, known, state, silently=what.endswith('silently'))]
            if what.endswith('go on') and state not in TERMINAL and not self._busy(at, known):
                # Nobody looks in between: a log with a gap is read.
                steps.append(bench.follow_up(at, known, ['work', 'chunk'], 'ret'))
            told = f'{told} {TaskState.Name(state)}'
            self._do(bench.in_order(*steps), told=told, racing=len(steps) > 1)
        elif what == 'delete' and not bench.config.scattered:
            if known.now.task is not None:
                self._do(bench.delete(known), told=told)
            if known.now.task is None and task % 2:
                self._do(bench.make_anew(known), told=f'make_anew {at} task {task}')
                self._do(bench.subscribe(at, known, slow=False), told=f'subscribe {at} anew')

    @rule(
        plays=st.dictionaries(_any, st.integers(1, 4), max_size=2),
        joins=st.lists(st.tuples(_replicas, _any, st.booleans()), max_size=4),
        cancels=st.lists(st.tuples(_replicas, _any), max_size=1),
        message=st.none() | st.tuples(_replicas, _any, _words, _endings),
    )
    def storm(
        self,
        plays: dict[int, int],
        joins: list[tuple[int, int, bool]],
        cancels: list[tuple[int, int]],
        message: tuple[int, int, list[str], str] | None,
    ) -> None:
        """Words, subscribes, a message and a cancel at once."""
        bench = self._bench
        moved = {id(self._play(p)): (self._play(p), n) for p, n in plays.items() if bench.plays}
        steps = [bench.advance(play, count) for play, count in moved.values()]
        steps += [bench.subscribe(at, self._task(t), slow=slow) for at, t, slow in joins]
        # A second cancel of what a first has cut off may never return: the SDK's.
        steps += [
            bench.cancel(at, self._task(t), alone=False)
            for at, t in cancels
            if not self._task(t).raced
        ]
        if message and self._task(message[1]).alive:
            at, task, words, ending = message
            if not self._busy(at, self._task(task)) and not cancels:
                steps.append(bench.follow_up(at, self._task(task), words, ending))
        self._do(*steps, told=f'storm {plays=} {joins=} {cancels=} {message=}', racing=True)

    @rule(
        query=st.sampled_from(['pages', 'stored']),
        play=_any,
        count=st.integers(1, 2),
        resumed=_any,
        joins=st.lists(st.booleans(), max_size=2),
    )
    def mid_round(self, query: str, play: int, count: int, resumed: int, joins: list[bool]) -> None:
        """What is said, resumed and joined while a reader is in the middle of a round."""
        bench = self._bench
        if not (bench.plays and bench.streams):
            return self.advance(play)
        slow = [one for one in bench.streams if one.brake.stands] or bench.streams
        stream = slow[resumed % len(slow)]
        at = bench.replicas.index(stream.replica)
        moved = self._play(play)
        then: list[Awaitable[None]] = [bench.resume(stream)]
        if not (moved.task.meddled or moved.task.past):
            # Else a stream may look at the store in between, at a state nobody can foresee.
            then.append(bench.advance(moved, 1))
        then += [bench.subscribe(at, stream.task, slow=slow) for slow in joins]
        return self._do(
            bench.in_mid_round(at, query, bench.advance(moved, count), then),
            told=f'mid_round {query} play {play} by {count} resume {resumed} join {joins}',
            racing=True,
            prompt=moved,
        )

    def teardown(self) -> None:
        """Everybody reads to the end; then nothing is left."""
        if (bench := self.bench) is None:
            return
        world = self.world
        try:
            for stream in bench.streams:
                stream.brake.set()
            if not self.broken:
                self._do(told='end')
        finally:
            world.clock.run_until_complete(bench.aclose())
            # Turns that a cancel or a conflict has cut off leave tasks of the SDK.
            left = asyncio.all_tasks(world.clock)
            for one in left:
                one.cancel()
            if left:
                world.clock.run_until_complete(asyncio.wait(left))
        world.tally.update(bench.tally)
        if self.broken:
            return
        ours = [one for one in left if one.get_name().startswith('cluster-subscribe')]
        assert not ours, ours
        assert not world.unhandled, world.unhandled


def run(
    world: World,
    clusters: int,
    *,
    number: int | None = None,
    shrink: bool = True,
    steps: int = STEPS,
) -> None:
    """Compares so many random clusters with the model.

    Args:
        world: Where they live.
        clusters: How many.
        number: A seed; always the same clusters without one.
        shrink: Whether a counterexample is made small.
        steps: Steps of each cluster.

    Raises:
        AssertionError: A stream was not what the model says; tells the story.
    """
    machine = type('Machine', (Machine,), {'world': world, 'tells': shrink})
    if number is not None:
        machine = seed(number)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=clusters,
            stateful_step_count=steps,
            derandomize=number is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.normal if shrink else Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        ),
    )
