"""`python -m tests.mechanisms`: takes mechanisms out of the package, and sees their tests fail.

Each is taken out of a copy of the source, which the servers that a test starts run as well.
Where its text is gone it says so: it then has to be written anew for what took its place.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import cluster_subscribe

PACKAGE: Final = Path(cluster_subscribe.__file__).parent
ROOT: Final = Path(__file__).resolve().parents[1]
HANGS: Final = 90
"""Seconds after which a test counts as hung; most give up by themselves sooner."""
STUCK: Final = 900
"""Seconds after which the whole run of one mechanism is ended."""


@dataclass(frozen=True)
class Mechanism:
    """Some text of the package, what to put in its place, and the tests that need it."""

    what: str
    file: str
    """Within the package."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Each has to fail: node ids, or functions of which one case has to."""

    def source(self) -> str:
        """The file without the mechanism.

        Raises:
            LookupError: The text is not there, or more than once.
        """
        return replaced(self.file, (PACKAGE / self.file).read_text(), self.old, self.new)


def replaced(name: str, source: str, old: str, new: str) -> str:
    """Source with another text in the place of one that it has once.

    Raises:
        LookupError: The text is not there, or more than once.
    """
    if source.count(old) != 1:
        raise LookupError(f'{name} has {source.count(old)} times: {old}')
    return source.replace(old, new)


def _mechanism(what: str, file: str, old: str, new: str, *tests: str) -> Mechanism:
    return Mechanism(what, file, old, new, tests)


_LOG: Final = 'event_log/queries.py'
_CONNECTION: Final = 'event_log/connection.py'
_READER: Final = 'event_log/reader.py'
_RECONCILE: Final = 'event_log/reconcile.py'
_DECODING: Final = 'event_log/decoding.py'
_RETRY: Final = 'event_log/retry.py'
_RUNNER: Final = 'event_log/wakeup/runner.py'
_SUBSCRIBER: Final = 'event_log/subscriber.py'
_LISTEN: Final = 'event_log/wakeup/postgresql.py'
_CARRIES_NOTHING: Final = (
    'test_wakeups.py::'
    'test_a_channel_that_carries_nothing_is_left_alone_for_a_while_with_one_warning'
)

MECHANISMS: Final = (
    # Real processes.
    _mechanism(
        'streams come from the shared log, not from the local tap',
        'wrapping.py',
        'if settings.mode is Mode.OFF:',
        'if True:',
        'test_processes.py::test_a_rolling_restart',
        'test_processes.py::test_a_killed_replica',
        'test_fuzz.py::test_an_event_that_mysql_has_no_room_for_fails_its_task_on_every_replica',
    ),
    _mechanism(
        'a reader ends when it is asked to',
        _READER,
        'while self._watched and not self._background.closed:',
        'while True:',
        'test_processes.py::test_a_server_with_open_streams_stops_soon_and_without_noise',
    ),
    _mechanism(
        'closing ends every open stream',
        _READER,
        'subscriber.fail(EventStreamEndedError(message))',
        'pass',
        'test_delivery.py::test_closing_ends_every_stream_with_an_error',
    ),
    # Cut wires.
    _mechanism(
        'a round that failed is tried again',
        _READER,
        'if final:\n                        raise',
        'if True:\n                        raise',
        'test_outages.py::test_reset_connections',
        'test_outages.py::test_connections_that_are_reset_in_mid_answer_again_and_again',
        'test_outages.py::test_an_outage_of_hours',
        'test_outages.py::test_half_open_connections',
        'test_outages.py::test_terminated_backends[poll-postgresql]',
        'test_outages.py::test_a_restarted_database',
        'test_outages.py::test_a_locked_sqlite_file',
        'test_delivery.py::test_an_exhausted_pool_delays_and_loses_nothing',
    ),
    _mechanism(
        'the pause between two attempts has a limit',
        _RETRY,
        'min(failures, 10)',
        'failures',
        'test_outages.py::test_an_outage_of_hours',
    ),
    _mechanism(
        'a slow database gets time',
        _CONNECTION,
        'ROUND_TIMEOUT: Final = 10.0',
        'ROUND_TIMEOUT: Final = 0.02',
        'test_outages.py::test_a_stalled_and_slow_network',
    ),
    _mechanism(
        'a silent wire is cut',
        _CONNECTION,
        'call_later(timeout, abort_connection(connection))',
        'call_later(timeout, lambda: None)',
        'test_outages.py::test_half_open_connections[postgresql-False]',
        'test_outages.py::test_half_open_connections[mysql-False]',
        'test_outages.py::test_half_open_connections_under_psycopg',
        'test_connections.py::test_a_connection_that_falls_silent_at_the_end_of_a_round[mysql]',
    ),
    _mechanism(
        'connecting takes its time, too',
        _CONNECTION,
        'connection = await in_time(entering, timeout)',
        'connection = await entering',
        'test_outages.py::test_half_open_connections[postgresql-True]',
        'test_outages.py::test_half_open_connections[mysql-True]',
    ),
    _mechanism(
        'what tidies up after a cancelled query is cancelled, too',
        'waiting.py',
        '        timer = loop.call_later(seconds, give_up)\n\n',
        '\n',
        'test_connections.py::test_what_tidies_up_after_a_cancelled_query_is_cancelled_too',
    ),
    _mechanism(
        'nobody waits for ever for an answer',
        'background.py',
        'await asyncio.wait({task}, timeout=waiting.ANSWER_TIMEOUT)',
        'await asyncio.wait({task})',
        'test_connections.py::test_nobody_waits_for_ever_for_a_half_open_connection',
    ),
    _mechanism(
        'a silent LISTEN connection is asked whether it lives',
        _LISTEN,
        "await _answered(raw, raw.execute('SELECT 1'))",
        'pass',
        'test_outages.py::test_a_listen_connection_that_falls_silent_is_rebuilt',
    ),
    _mechanism(
        'a lost LISTEN connection is replaced',
        _RUNNER,
        '            failures += 1\n            await self._stopping',
        '            return\n            await self._stopping',
        'test_wakeups.py::test_a_lost_listen_connection_is_rebuilt',
        'test_outages.py::test_a_listen_connection_that_falls_silent_is_rebuilt',
        'test_delivery.py::test_the_stream_survives_its_connections',
    ),
    _mechanism(
        'the timer looks where nothing wakes',
        _READER,
        'within(due - loop.time())',
        'within(1e9)',
        'test_wakeups.py::test_a_muted_wakeup_costs_only_latency',
        'test_outages.py::test_pgbouncer_in_transaction_mode',
    ),
    _mechanism(
        'a NOTIFY that does not come back is no wakeup',
        _LISTEN,
        'if not await arrived.within(_ANSWER_TIMEOUT):',
        'if False:',
        _CARRIES_NOTHING,
    ),
    _mechanism(
        'a trial of NOTIFY that failed is repeated, seldom',
        _LISTEN,
        'await self._stop.within(_RETRY_AFTER)',
        'True',
        _CARRIES_NOTHING,
    ),
    _mechanism(
        'behind a pooler, reads stay in one transaction',
        _CONNECTION,
        'self._behind_pooler = True',
        'pass',
        'test_outages.py::test_pgbouncer_in_transaction_mode',
    ),
    _mechanism(
        'a look at the store that failed is made up for',
        _SUBSCRIBER,
        'self._retry_reconcile = True',
        'pass',
        'test_outages.py::test_a_stream_that_failed_to_reconcile_tries_again',
    ),
    # Subscriptions that leave.
    _mechanism(
        'who leaves is forgotten',
        'subscription/follow.py',
        '            feed.close()',
        '            pass',
        'test_leaks.py::test_in_process_nothing_is_left',
        'test_leaks.py::test_nothing_is_left_of_remote_subscriptions[over_sse-postgresql]',
        'test_leaks.py::test_nothing_is_left_of_remote_subscriptions[over_grpc-postgresql]',
    ),
    _mechanism(
        'no query is cancelled with its client',
        'task_reader.py',
        '        await slots.acquire()\n',
        '        return await self._read(task_id, context)\n        await slots.acquire()\n',
        'test_leaks.py::test_a_client_that_leaves_in_mid_query_costs_no_connection',
    ),
    # Owners.
    _mechanism(
        'the reader suspects tasks that another owns',
        _RECONCILE,
        'subscriber.owner in (None, task.owner) and ',
        '',
        'test_owners.py::test_the_event_stream_gives_a_foreigner_no_event_and_no_other_answer',
    ),
    _mechanism(
        'rows of another owner are left out',
        _SUBSCRIBER,
        'row.owner != self.owner or ',
        '',
        'test_owners.py::test_who_waits_for_a_task_to_appear_is_not_told_of_anothers',
    ),
    _mechanism(
        'ids and owners are compared exactly',
        'sdk.py',
        "if db is None or db.engine.dialect.name in ('sqlite', 'postgresql'):",
        'if True:',
        'test_owners.py::test_a_foreign_subscriber_is_told_what_an_unknown_id_is',
    ),
    # Odd ids, spoilt rows.
    _mechanism(
        'an id that no database can look for is refused',
        'task_ids.py',
        "return '\\0' not in task_id and",
        'return True or',
        'test_fuzz.py::test_an_odd_id_does_not_stop_the_reader',
    ),
    _mechanism(
        'a row that is no event is passed over',
        _DECODING,
        'except (DecodeError, TypeError):',
        'except ZeroDivisionError:',
        'test_fuzz.py::test_spoilt_rows_make_their_own_streams_reconcile_and_no_other',
        'test_fuzz.py::test_no_row_hangs_a_stream_or_disturbs_another',
    ),
    _mechanism(
        'a row that is no event is named once',
        _DECODING,
        'if self._once(row.cursor.seq):',
        'if True:',
        'test_fuzz.py::test_a_row_that_is_no_event_is_named_once_however_often_it_is_read',
    ),
    _mechanism(
        'a row without a place in the order is no row',
        _LOG,
        ' and isinstance(version, int)',
        '',
        'test_fuzz.py::test_spoilt_rows_make_their_own_streams_reconcile_and_no_other',
    ),
    _mechanism(
        'where the log cannot be right the store is looked at',
        _SUBSCRIBER,
        'if self._strict and (gap or event is None):',
        'if False:',
        'test_fuzz.py::test_spoilt_rows_make_their_own_streams_reconcile_and_no_other',
    ),
)


def cases(tests: Sequence[str], mechanism: Mechanism | None = None) -> dict[str, str]:
    """Runs tests against a copy of the source, and gives what became of each case.

    Args:
        tests: What to run: node ids, or functions.
        mechanism: What to take out of the copy.

    Returns:
        `passed`, `failed` or `skipped` for each case, by node id; a run that hangs has failed.
    """
    with tempfile.TemporaryDirectory(prefix='cluster-subscribe-') as folder:
        copy = Path(folder)
        for part in (PACKAGE, ROOT / 'tests'):
            shutil.copytree(part, copy / part.name)
        shutil.copy(ROOT / 'pyproject.toml', copy)
        if mechanism:
            (copy / PACKAGE.name / mechanism.file).write_text(mechanism.source())
        report = copy / 'report.xml'
        command = [
            *(sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider'),
            *(f'--timeout={HANGS}', f'--junit-xml={report}', '-o', 'junit_family=xunit1'),
            *(f'tests/{test}' for test in tests),
        ]
        environment = os.environ | {'PYTHONPATH': folder, 'PYTHONDONTWRITEBYTECODE': '1'}
        try:
            subprocess.run(
                command,
                check=False,
                cwd=copy,
                env=environment,
                stdout=subprocess.DEVNULL,
                timeout=STUCK,
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(tests, 'failed')
        found: dict[str, str] = {}
        for case in ET.parse(report).iter('testcase'):  # noqa: S314 - our own
            told = {child.tag for child in case}
            failed = told & {'failure', 'error'}
            fate = 'failed' if failed else 'skipped' if 'skipped' in told else 'passed'
            module = case.get('classname', '').rpartition('.')[2]
            node = f'{module}.py::{case.get("name")}'
            # A test that fails and leaves something behind is two cases of one name.
            if found.get(node) != 'failed':
                found[node] = fate
        return found


def of(test: str, found: dict[str, str]) -> list[str]:
    """What became of the cases of one test."""
    return [told for node, told in found.items() if node == test or node.startswith(f'{test}[')]


def verdict(mechanism: Mechanism) -> tuple[bool, str]:
    """Whether every test of a mechanism fails without it, and that in words."""
    try:
        found = cases(mechanism.tests, mechanism)
    except LookupError as error:
        return False, f'does not apply: {error}'
    seen = [told for test in mechanism.tests for told in of(test, found)]
    blind = [
        test
        for test in mechanism.tests
        if not (told := of(test, found)) or ('passed' in told and 'failed' not in told)
    ]
    if blind:
        return False, f'NOT SEEN by {", ".join(blind)}'
    missed = seen.count('failed')
    if not missed:
        return True, 'skipped: it needs a database or a program that is not here'
    return True, f'missed by {missed} of {len(seen) - seen.count("skipped")} cases'


def main() -> int:
    """Tries every mechanism; 1 if a test does not miss it, or fails with all of them in place."""
    parser = argparse.ArgumentParser(prog='python -m tests.mechanisms', description=__doc__)
    parser.add_argument('--only', default='', help='those with these words in their name')
    parser.add_argument('--jobs', type=int, default=os.cpu_count() or 1, help='how many at once')
    arguments = parser.parse_args()
    chosen = [one for one in MECHANISMS if arguments.only in one.what]
    whole = cases([*dict.fromkeys(test for one in chosen for test in one.tests)])
    if failed := [node for node, told in whole.items() if told == 'failed']:
        print(f'With every mechanism in its place: {", ".join(failed)} failed')
        return 1
    survived = 0
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for one, (seen, told) in zip(chosen, threads.map(verdict, chosen), strict=True):
            survived += not seen
            print(f'{one.what:60} {told}', flush=True)
    return 1 if survived else 0


if __name__ == '__main__':
    sys.exit(main())
