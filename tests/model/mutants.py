"""`python -m tests.model.mutants`: faults put into the package, which the model must see.

Each replaces some text in the source of one or two functions. Where that text is gone the
mutant says so: it then has to be written anew for what took its place.
"""

import argparse
import inspect
import logging
import sys
import textwrap

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from cluster_subscribe import local_state as local_task
from cluster_subscribe import local_tasks as eviction
from cluster_subscribe.event_log import reader, reconcile, statements, stream, subscriber
from cluster_subscribe.subscription import follow as subscription
from cluster_subscribe.subscription import rules
from tests.mechanisms import replaced
from tests.model.__main__ import database
from tests.model.machine import run, world

MOST: Final = 1000
"""Clusters after which a mutant counts as having survived."""
BARE: Final = 250
"""Clusters without a mutant, to see that nothing else is caught."""


@dataclass(frozen=True)
class Change:
    """Another text in the source of one function."""

    module: ModuleType
    name: str
    """`Class.method`, or a function."""
    edits: tuple[tuple[str, str], ...]
    """Old text and new."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Runs the changed function in the place of the true one.

        Raises:
            LookupError: An old text is not there, or more than once.
        """
        *classes, name = self.name.split('.')
        owner: Any = getattr(self.module, classes[0]) if classes else self.module
        mangled = f'_{classes[0]}{name}' if classes and name.startswith('__') else name
        true = inspect.getattr_static(owner, mangled)
        source = textwrap.dedent(inspect.getsource(getattr(true, 'fget', true)))
        for old, new in self.edits:
            source = replaced(self.name, source, old, new)
        room: dict[str, Any] = {}
        if classes:
            # In a class of the same name, for the sake of its private names.
            source = f'class {classes[0]}:\n{textwrap.indent(source, "    ")}'
        exec(compile(source, self.name, 'exec'), vars(self.module), room)  # noqa: S102
        changed = vars(room[classes[0]])[mangled] if classes else room[name]
        places = [owner]
        if not classes:
            places = [
                m for m in map(sys.modules.get, sys.modules) if vars(m or owner).get(name) is true
            ]
        for place in places:
            setattr(place, name if place is not owner else mangled, changed)
        try:
            yield
        finally:
            for place in places:
                setattr(place, name if place is not owner else mangled, true)


@dataclass(frozen=True)
class Mutant:
    """One fault, in a few words, and the changes that make it."""

    fault: str
    changes: tuple[Change, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Runs the package with the fault in it."""
        if not self.changes:
            yield
            return
        with self.changes[0].applied(), Mutant(self.fault, self.changes[1:]).applied():
            yield

    def caught(self, url: str, most: int = MOST) -> tuple[int, str] | None:
        """After how many clusters the model sees the fault, and as what; `None` if never."""
        with self.applied(), world(url) as here:
            try:
                run(here, most, number=7, shrink=False)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                brief = here.stories[0].splitlines()[0] if here.stories else _brief(error)
                return here.tally['first broken'] or here.tally['clusters'], brief
        return None


def _brief(error: BaseException) -> str:
    while isinstance(inner := getattr(error, 'exceptions', [None])[0], BaseException):
        error = inner
    return (str(error).splitlines() or [type(error).__name__])[0]


def _mutant(fault: str, *changes: tuple[ModuleType, str, str, str]) -> Mutant:
    edits: dict[tuple[ModuleType, str], list[tuple[str, str]]] = {}
    for module, name, old, new in changes:
        edits.setdefault((module, name), []).append((old, new))
    return Mutant(fault, tuple(Change(*place, tuple(pairs)) for place, pairs in edits.items()))


_FEED: Final = """\
        for subscriber in planned[page]:
            if subscriber.page == page:
                subscriber.feed("""
_TAKE: Final = """\
            self._check_due = False
            self._wake_event.clear()
            dirty, self._dirty_tasks = self._dirty_tasks, {}
"""
_PAUSED: Final = """\
                    if current:
                        return
                    # Where the store does not answer, the next comparison says.
                    state.paused = current is None
"""

_BEHIND: Final = """\
            c.task_version >= version,
            or_(
                c.task_version > version,
"""
_BEHIND_BY_SEQ: Final = """\
            or_(
                (bindparam(f'seq_{number}') == 2**63 - 1) & (c.task_version > version),
"""

MUTANTS: Final = (
    _mutant(
        'the version filter is off by one: the last event again',
        (
            stream,
            'SharedTailEventStream.open',
            'version_number(after)',
            'version_number(after) - 1',
        ),
        (rules, 'StreamState.deliver', 'if not version.is_after(self._start)', 'if False'),
    ),
    _mutant(
        'the version filter is off by one: the next event left out',
        (
            stream,
            'SharedTailEventStream.open',
            'version_number(after)',
            'version_number(after) + 1',
        ),
    ),
    _mutant(
        'the cursor is `seq`',
        (
            statements,
            '_page',
            _BEHIND,
            _BEHIND_BY_SEQ,
        ),
        (statements, '_page', '.order_by(c.task_version, c.seq)', '.order_by(c.seq)'),
        (statements, 'pages', "'page', 'task_version', 'seq'", "'page', 'seq'"),
    ),
    _mutant(
        'a joiner is fed in the middle of a round',
        (
            reader,
            'Reader._read',
            _FEED,
            _FEED.replace('planned[page]', 'list(self._watched.of(page.task_id))').replace(
                'subscriber.page == page',
                'subscriber.page == page or not any(subscriber in p for p in planned.values())',
            ),
        ),
    ),
    _mutant(
        'there is no timer',
        (reader, 'Reader._run', 'due - loop.time())', '1e9)'),
    ),
    _mutant(
        'a wakeup in mid-round is dropped, and only the timer is left',
        (reader, 'Reader._run', _TAKE, '            dirty = self._dirty_tasks\n'),
        (
            reader,
            'Reader._run',
            '            if failures:\n',
            _TAKE.replace(
                'dirty, self._dirty_tasks = self._dirty_tasks, {}', 'self._dirty_tasks = {}'
            )
            + '            if failures:\n',
        ),
    ),
    _mutant(
        'a cancellation is swallowed',
        (
            subscription,
            'follow',
            '    finally:\n        telemetry',
            '    except BaseException as error:\n'
            "        if type(error).__name__ != 'CancelledError':\n            raise\n"
            '    finally:\n        telemetry',
        ),
    ),
    _mutant(
        'a live task is evicted',
        (local_task, '_is_overtaken', 'local.is_unused\n        and ', ''),
        (
            eviction,
            'LocalTasks.evict',
            'local.active.task_id in self._active_requests',
            'False',
        ),
    ),
    _mutant(
        'the record of an appended message is delivered, or closes',
        (rules, 'StreamState.deliver', 'self._records_a_message(event)', 'False'),
    ),
    _mutant(
        'a gap in the versions is passed over',
        (subscriber, 'Subscriber.feed', '(gap or event is None)', 'event is None'),
    ),
    _mutant(
        'a store that is ahead of its log goes unnoticed',
        (reader, 'Reader._round', 'subscriber.cursor.version < ahead[subscriber]', 'False'),
    ),
    _mutant(
        'a state that was changed under its version goes unnoticed',
        (reconcile, 'Reconciler.compare_states', 'before.get(subscriber) == state', 'False'),
    ),
    _mutant(
        'a deletion goes unnoticed',
        (reconcile, 'Reconciler.compare_versions', 'elif cursor.version and', 'elif False and'),
    ),
    _mutant(
        'the rows of an earlier incarnation are delivered',
        (statements, '_page', 'c.seq >= incarnation_start.scalar_subquery(),', ''),
        (reader, 'Reader._read', 'any(row.is_of_earlier_incarnation for row in rows)', 'False'),
    ),
    _mutant(
        'a stream ends at a question that has been answered',
        (
            subscription,
            'follow',
            _PAUSED,
            ' ' * 20 + 'return\n',
        ),
    ),
    _mutant(
        'a stream never ends at a question',
        (rules, 'StreamState.ends_with', 'self.paused = (', 'self.paused = False and ('),
    ),
    _mutant(
        'a stream ends at AUTH_REQUIRED',
        (
            rules,
            'StreamState.ends_with',
            'state == TaskState.TASK_STATE_INPUT_REQUIRED',
            'state in (TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED)',
        ),
    ),
    _mutant(
        'close_on=terminal is ignored',
        (rules, 'StreamState.ends_with', 'self._close_on is CloseOn.INTERRUPTED and ', ''),
    ),
    _mutant(
        'what a slow reader has no room for is lost',
        (
            subscriber,
            'Subscriber.feed',
            '            self.log_has_more = True\n            break',
            '            self.cursor = row.cursor\n            continue',
        ),
    ),
    _mutant(
        'a cancel writes an old copy of the task',
        (
            eviction,
            'LocalTasks.drop_stale_copy',
            'not is_superseded(local, stored.version) or',
            'True or',
        ),
    ),
    _mutant(
        'a stream that has ended is still read for',
        (subscriber, 'Subscriber.close', 'self._reader.leave(self)', 'pass'),
    ),
)


def main() -> int:
    """Tries every mutant; 1 if one survives or does not apply."""
    parser = argparse.ArgumentParser(prog='python -m tests.model.mutants', description=__doc__)
    parser.add_argument('--database-url', help='a database of its own (default: an SQLite file)')
    parser.add_argument('--only', default='', help='those with these words in their name')
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    survived = 0
    with database(arguments.database_url) as url:
        if false := Mutant('', ()).caught(url, BARE):
            print(f'the package itself, without a mutant: {false}')
            return 1
    for mutant in MUTANTS:
        if arguments.only not in mutant.fault:
            continue
        with database(arguments.database_url) as url:
            try:
                found = mutant.caught(url)
            except LookupError as error:
                found = None
                print(f'does not apply: {error}')
        survived += found is None
        after, what = found or (0, '')
        verdict = f'caught after {after:3} clusters' if found else 'SURVIVED'
        print(f'{mutant.fault:60} {verdict}  {what[:100]}', flush=True)
    return 1 if survived else 0


if __name__ == '__main__':
    sys.exit(main())
