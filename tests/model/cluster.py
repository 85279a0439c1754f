"""The system under test: real replicas over a real database, moved step by step.

Nothing waits for a guessed time. The loop's clock is moved on by hand, and what a step
waits for is asked after each turn of the loop that leaves nothing to do. After every step
all readers have looked at the database and every stream is compared with the model.
"""

import asyncio
import itertools

from collections import Counter
from collections.abc import Awaitable, Collection, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Final

from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    TaskVersion,
    VersionedDatabaseTaskStore,
)
from a2a.types import StreamResponse, Task, TaskState, TaskStatus
from a2a.utils.errors import A2AError
from sqlalchemy import Insert, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from cluster_subscribe import Settings, wrap
from cluster_subscribe._testing import Cluster, Replica
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.settings import CloseOn, WakeupMode
from tests.model.clock import Clock
from tests.model.model import Client, Incarnation, Row
from tests.model.reading import POLL, Reading
from tests.model.records import Brake, Config, Known, Play, Stream
from tests.support.memory import TERMINAL
from tests.support.replicas import decorated

LOOKS: Final = 4
"""Looks of a reader within which a stream is right: two for a state, each with one to spare."""
OWNER: Final = 'user'
_seqs = itertools.count(1)


def number_rows_from(last: int) -> None:
    """Gives the rows to come numbers above those that a database holds already."""
    global _seqs  # noqa: PLW0603 - clusters share a database, and so its numbers
    _seqs = itertools.count(last // 8 + 1)


class Bench:
    """One cluster, its tasks, turns and streams, and the steps that move them."""

    def __init__(self, clock: Clock, url: str, eyes: AsyncEngine, config: Config) -> None:
        self.clock = clock
        self.config = config
        self._eyes = eyes
        self._store = VersionedDatabaseTaskStore(eyes)
        self._words = itertools.count(1)
        self._events: dict[int, Any] = {}
        settings = Settings(
            close_on=config.close_on,
            wakeup=WakeupMode.AUTO if config.wakeups == 'auto' else WakeupMode.POLL,
            evict=config.evict,
            poll_interval=POLL,
            reconcile_interval=2 * POLL,
            max_buffered_events=config.buffered,
        )
        self.lab = Cluster(
            url,
            decorate=partial(wrap, settings=settings),
            silent_cancel=config.silent_cancel,
        )
        self.replicas = self.lab.replicas
        self.readings = {replica: Reading(replica, clock) for replica in self.replicas}
        for replica in self.replicas:
            self._prepare(replica)
        self.tasks: list[Known] = []
        self.plays: list[Play] = []
        self.streams: list[Stream] = []
        self.tally: Counter[str] = Counter()

    def _prepare(self, replica: Replica) -> None:
        save = replica.store.save

        async def noted(task: Task, **how: Any) -> TaskVersion:
            copy = deepcopy(task)
            version = await save(task, **how)
            for known in self.tasks:
                if known.task_id == task.id:
                    known.saves.append((version._value, copy))  # type: ignore[arg-type]
            return version

        replica.store.save = noted  # type: ignore[method-assign]
        if self.config.wakeups == 'none':
            self.readings[replica].stream.wake = lambda task_id, source: None  # type: ignore[method-assign]
        block = 8 if self.config.scattered else 1
        seqs: Iterator[int] = iter(())

        def allocate(_: object, statement: Any, many: Any, one: Any, __: object) -> Any:
            nonlocal seqs
            if isinstance(statement, Insert) and statement.table.name == 'task_events':
                if (seq := next(seqs, None)) is None:
                    start = next(_seqs) * 8
                    seqs = iter(range(start + 1, start + block))
                    seq = start
                statement = statement.values(seq=seq)
            return statement, many, one

        event.listen(replica.engine.sync_engine, 'before_execute', allocate, retval=True)
        if replica.engine.dialect.name == 'sqlite':
            # A power cut is not what is tested, and being safe from one costs half of the time.
            event.listen(
                replica.engine.sync_engine,
                'connect',
                lambda connection, _: connection.execute('PRAGMA synchronous = OFF'),
            )

    # Steps.

    async def begin(self, at: int, words: Sequence[str], ending: str) -> None:
        """A message that begins a task."""
        replica, gates = self.replicas[at], self._gates(words)
        known = Known('', '', ran={at})
        turn = replica.start(self._script(known, words, gates, ending))
        play = Play(turn, replica, known, gates)
        self.plays.append(play)
        await self._at_gate(play)
        task = await turn.task()
        known.task_id, known.context_id = task.id, task.context_id
        self.tasks.append(known)

    async def follow_up(self, at: int, known: Known, words: Sequence[str], ending: str) -> None:
        """A message that begins another turn."""
        replica, gates = self.replicas[at], self._gates(words)
        known.ran.add(at)
        task = Task(id=known.task_id, context_id=known.context_id)
        turn = replica.start(self._script(known, words, gates, ending), task)
        play = Play(turn, replica, known, gates, incarnation=len(known.past))
        self.plays.append(play)
        await self._at_gate(play)

    async def advance(self, play: Play, count: int) -> None:
        """Lets an agent say its next words."""
        if play.incarnation < len(play.task.past):
            # The SDK may write what it remembers of an earlier incarnation over a later one.
            play.task.raced = True
        gates = play.gates[play.passed : play.passed + count]
        play.passed += len(gates)
        self.lab.gates.open(*gates)
        await self._at_gate(play)

    async def cancel(self, at: int, known: Known, *, alone: bool = True) -> None:
        """A cancel at any replica."""
        before = known.now.task
        known.raced = known.raced or not alone
        try:
            await self.replicas[at].cancel(Task(id=known.task_id))
        except (A2AError, ConcurrentTaskModificationError):
            assert not alone or not known.alive, 'A running task was not cancelled'
            return
        if alone and before is not None and not known.raced:
            stored = await self.replicas[at].get(known.task_id)
            assert stored.status.state == TaskState.TASK_STATE_CANCELED
            assert list(stored.artifacts) == list(before.artifacts), 'The cancel lost artifacts'

    async def subscribe(self, at: int, known: Known, *, slow: bool, user: str = OWNER) -> None:
        """A client that subscribes, and waits for the snapshot."""
        replica, brake = self.replicas[at], Brake()
        watch = replica.subscribe(Task(id=known.task_id), user)
        watch._go = brake
        if not slow:
            brake.set()
        if user != OWNER:
            await self.clock.until(lambda: watch.ending, 'an answer to a stranger')
            assert watch.timeline == ('TaskNotFoundError',), watch.timeline
            return
        self.streams.append(Stream(watch, replica, known, brake))
        await self.clock.until(lambda: watch.events or watch.ending, 'a snapshot')

    async def pause(self, stream: Stream) -> None:
        """A client that reads no further after the next event."""
        stream.brake.clear()

    async def resume(self, stream: Stream) -> None:
        """A client that reads on."""
        stream.brake.set()

    async def sip(self, stream: Stream) -> None:
        """A slow client that takes one event."""
        stream.brake.set()
        stream.brake.clear()

    async def disconnect(self, stream: Stream) -> None:
        """A client that goes away."""
        reader = stream.watch.reader
        reader.cancel()
        await self.clock.until(reader.done, 'the end of a stream whose client left')
        assert stream.watch.ending == 'cancelled', 'A cancellation was swallowed'
        self._count_open()
        self.streams.remove(stream)

    async def delete(self, known: Known) -> None:
        """The task is deleted; its rows in the log stay."""
        await self.replicas[0].store.delete(known.task_id, caller(OWNER))
        known.past.append(Incarnation(known.now.rows, known.now.version))
        for stream in self.streams:
            if stream.task is known and stream.brake.stands and len(stream.watch.events) == 1:
                stream.blind = True
        known.chunked = False

    async def make_anew(self, known: Known) -> None:
        """A task under the id of one that was deleted."""
        task = Task(
            id=known.task_id,
            context_id=known.context_id,
            status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
        )
        await self.replicas[0].store.save(
            task, event=task, prev_version=TaskVersion.MISSING, context=caller(OWNER)
        )

    async def save(self, at: int, known: Known, state: TaskState, *, silently: bool) -> None:
        """A state that is saved without an event; silently: under the old version too."""
        store, known.meddled = self.replicas[at].store, True
        stored = await store.get(known.task_id, caller(OWNER))
        assert stored is not None
        stored.task.status.CopyFrom(TaskStatus(state=state))
        if silently:
            await store.as_task_store.save(stored.task, caller(OWNER))
        else:
            await store.save(
                stored.task, event=None, prev_version=stored.version, context=caller(OWNER)
            )

    async def sweep(self, at: int) -> None:
        """A sweep for what other replicas have superseded."""
        await decorated(self.replicas[at]).sweep()

    async def at_once(self, *steps: Awaitable[None]) -> None:
        """Several steps together."""
        await asyncio.gather(*steps)

    async def in_order(self, *steps: Awaitable[None]) -> None:
        """Several steps, one after the other, with no look at the database in between."""
        for step in steps:
            await step

    async def in_mid_round(
        self, at: int, query: str, first: Awaitable[None], then: Sequence[Awaitable[None]]
    ) -> None:
        """One step, then others while a reader has its answer and has not fed it."""
        reading = self.readings[self.replicas[at]]
        reading.stop_at = query
        try:
            await first
            self.clock.move_on(POLL)
            await self.clock.until(lambda: reading.stopped or not reading.running, 'a round')
            for step in then:
                await step
        finally:
            reading.go()

    # The comparison.

    async def settle(self, *, racing: bool = False, prompt: Play | None = None) -> None:
        """Lets everybody read to the end, and compares every stream with the model.

        Args:
            racing: Whether events were committed while others were delivered.
            prompt: A turn whose words reach the streams of its own replica by wakeups alone.
        """
        for play in self.plays:
            await self._at_gate(play)
        await self._look()
        faults: dict[Stream, str] = {}
        for look in range(LOOKS + 1):
            await self._all_idle()
            faults = {
                one: fault
                for one in list(self.streams)
                if (fault := self._fault(one, racing=racing))
            }
            if not faults and look:
                break
            if not look and prompt and self._announces(prompt):
                late = [
                    fault
                    for one, fault in faults.items()
                    if (one.task, one.replica) == (prompt.task, prompt.replica) and 'lacks' in fault
                ]
                assert not late, f'No wakeup: {late}'
            await self._let_time_pass()
        assert not faults, '; '.join(faults.values())
        if self._eyes.dialect.name != 'sqlite':
            assert not any(known.now.task and known.now.torn for known in self.tasks)
        self._count_open()
        for stream in list(self.streams):
            self._accept(stream)
        for play in list(self.plays):
            self._account(play, racing=racing)
        for known in self.tasks:
            known.saves.clear()

    def _announces(self, play: Play) -> bool:
        """Whether everything that the task's log holds was published where the turn runs."""
        known = play.task
        failed = play.over and play.turn.reader.exception() is not None
        spoilt = failed or known.meddled or known.raced or known.past
        return self.config.wakeups != 'none' and not spoilt

    def _fault(self, stream: Stream, *, racing: bool) -> str | None:
        known, watch = stream.task, stream.watch
        if stream.client is None:
            fault = self._snapshot_fault(stream)
            if fault or stream.client is None:
                return fault and f'{self._name(stream)}: {fault}'
        incarnation = known.incarnation(stream.client.incarnation)
        if stream.lost:
            return None
        # After a silent save, the record of a message announces the state that it undoes: a
        # question that is the newest until the turn goes on.
        fault = stream.client.fault(stream.seen, incarnation, racing=racing or known.meddled)
        return (
            fault and f'{self._name(stream)}: {fault} {watch.timeline}; the database: {incarnation}'
        )

    def _snapshot_fault(self, stream: Stream) -> str | None:
        known, watch = stream.task, stream.watch
        stored = [
            *known.saves,
            *(
                (incarnation.version, incarnation.task)
                for incarnation in (self._before[known], known.now)
            ),
        ]
        if not watch.events:
            states = [task.status.state if task else None for _, task in stored]
            right = {
                'TaskNotFoundError': None in states,
                'UnsupportedOperationError': any(state in TERMINAL for state in states),
            }
            if not right.get(str(watch.ending)):
                return f'no snapshot but {watch.ending}'
            self.streams.remove(stream)
            return None
        snapshot = watch.events[0]
        versions = [version for version, task in stored if task == snapshot]
        if not isinstance(snapshot, Task) or not versions:
            return 'a snapshot that was never stored'
        stream.client = Client(
            snapshot,
            max(versions),
            len(known.past),
            ends_at_questions=self.config.close_on is CloseOn.INTERRUPTED,
        )
        return None

    def _accept(self, stream: Stream) -> None:
        client, seen = stream.client, stream.seen
        assert client is not None
        incarnation = stream.task.incarnation(client.incarnation)
        if stream.lost:
            self.tally['blind'] += 1
            stream.watch.reader.cancel()
            self.streams.remove(stream)
            return
        self.tally['events'] += client.accept(seen, incarnation)
        if incarnation.task is not None and client.abreast(incarnation) and not stream.task.raced:
            self.tally['folds'] += 1
            assert client.keeps(incarnation.task), (
                f'{self._name(stream)}: not the task that is stored'
            )
        if seen.ending is not None:
            self.tally[f'ended: {seen.ending}'] += 1
            self.streams.remove(stream)

    def _account(self, play: Play, *, racing: bool) -> None:
        if not play.over:
            return
        self.plays.remove(play)
        # One that failed says so: words that do not fit what another turn has made of the task.
        failed = play.turn.reader.exception() is not None
        raced = racing or play.task.raced or failed or play.incarnation < len(play.task.past)
        lost = play.passed < len(play.gates) and play.task.alive
        assert raced or not lost, f'A turn at {play.replica.name} was lost'

    def _name(self, stream: Stream) -> str:
        return f'stream {self.streams.index(stream)} at {stream.replica.name}'

    async def _look(self) -> None:
        """Reads what the database holds of every task."""
        self._before = {known: known.now for known in self.tasks}
        for known in self.tasks:
            stored = await self._store.get(known.task_id, caller(OWNER))
            async with self._eyes.connect() as connection:
                found = await connection.execute(
                    text(
                        'SELECT task_version, seq, event_data FROM task_events'
                        ' WHERE task_id = :task_id ORDER BY task_version, seq'
                    ),
                    {'task_id': known.task_id},
                )
                rows = [Row(version, seq, self._event(seq, data)) for version, seq, data in found]
            earlier = {row.seq for incarnation in known.past for row in incarnation.rows}
            rows = [row for row in rows if row.seq not in earlier]
            if stored is None:
                known.now = Incarnation(rows)
            else:
                foundling = bool(known.past) and [row.version for row in rows[:1]] != [1]
                version = int(str(stored.version._value))
                known.now = Incarnation(rows, version, stored.task, foundling)

    def _event(self, seq: int, data: bytes) -> Any:
        if seq not in self._events:
            response = StreamResponse.FromString(data)
            self._events[seq] = getattr(response, str(response.WhichOneof('payload')))
        return self._events[seq]

    async def _let_time_pass(self) -> None:
        """Lets the poll interval pass, and every reader look at the database once."""
        self.clock.move_on(POLL)
        for reading in self.readings.values():
            reading.now += 1
        await self.clock.until(
            lambda: all(
                reading.looked == reading.now or not reading.running
                for reading in self.readings.values()
            ),
            'a look at the database when the poll interval had passed',
        )

    async def _all_idle(self) -> None:
        await self.clock.until(self._idle, 'that all streams wait')

    def _idle(self) -> bool:
        reading = Counter(
            stream.replica
            for stream in self.streams
            if stream.watch.ending is None and not stream.brake.stands
        )
        return all(
            one.idle and one.waiting() == reading[replica] for replica, one in self.readings.items()
        )

    def _count_open(self) -> None:
        reading = Counter(s.replica for s in self.streams if s.watch.ending is None)
        for replica in self.replicas:
            assert decorated(replica).statistics().open_subscriptions == reading[replica]
            # A stream whose client has only taken the snapshot is not read for yet.
            assert len(self.readings[replica].reader._watched) <= reading[replica]

    async def _at_gate(self, play: Play) -> None:
        if play.passed < len(play.gates):
            reached = self.lab.gates._reached[play.gates[play.passed]]
            await self.clock.until(lambda: play.over or reached.is_set(), 'the end of a word')
        else:
            await self.clock.until(lambda: play.over, 'the end of a turn')

    def _gates(self, words: Collection[str]) -> list[str]:
        number = next(self._words)
        return [f'{number}.{position}' for position in range(len(words) + 1)]

    def _script(self, known: Known, words: Sequence[str], gates: Sequence[str], ending: str) -> str:
        script = []
        for gate, word in zip(gates, [*words, ending], strict=True):
            value = next(self._words)
            script.append(f'wait={gate}')
            if word in ('ret', 'raise'):
                script.append(word)
            elif word == 'chunk' and not known.chunked:
                known.chunked = True
                script.append('chunk=0')
            else:
                script.append(f'{word}={value}')
        return ' '.join(script)

    async def aclose(self) -> None:
        """Closes everything; nothing of it is left in the loop."""
        for reading in self.readings.values():
            reading.go()
        await self.lab.aclose()
