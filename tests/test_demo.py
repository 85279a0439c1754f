"""`cluster-subscribe demo` and the front door, as a user meets them."""

import asyncio
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from a2a.server.cluster import VersionedDatabaseTaskStore
from rich.console import Console
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe.cli import database, main
from cluster_subscribe.cli.demo.picture import picture
from cluster_subscribe.cli.demo.timeline import CLOSED, OPEN, STEPS, Timeline, Told
from cluster_subscribe.cli.demo.verdict import off_in_words, on_in_words

COMMAND = sys.executable, '-m', 'cluster_subscribe', 'demo'
LIMIT = 150
"""Seconds the command may take here; it is alone on no machine that tests."""


@contextmanager
def started(*words: str, sitecustomize: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command as a terminal starts it: in a process group of its own."""
    env = os.environ | ({'PYTHONPATH': str(sitecustomize)} if sitecustomize else {})
    env.pop('COLUMNS', None)
    process = subprocess.Popen(
        [*COMMAND, *words],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def played(*words: str, sitecustomize: Path | None = None) -> tuple[int, str, str]:
    """Runs the command to its end: exit status, stdout, stderr."""
    with started(*words, sitecustomize=sitecustomize) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert_nothing_runs(process)
    return process.returncode, out, err


def assert_nothing_runs(process: 'subprocess.Popen[str]') -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def rows(file: Path) -> dict[str, int]:
    """How many rows each table of an SQLite file has."""
    with closing(sqlite3.connect(file)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            name: connection.execute(f'SELECT count(*) FROM {name}').fetchone()[0]  # noqa: S608
            for (name,) in tables.fetchall()
        }


def patched(folder: Path, code: str) -> Path:
    """A folder whose code runs first in every Python process that is given it."""
    folder.mkdir()
    (folder / 'sitecustomize.py').write_text(code)
    return folder


def tables_with_a_task_of_the_user(file: Path) -> None:
    async def create() -> None:
        engine = create_async_engine(f'sqlite+aiosqlite:///{file}')
        await VersionedDatabaseTaskStore(engine).initialize()
        await engine.dispose()

    asyncio.run(create())
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(
            "INSERT INTO tasks (id, context_id, kind, status) VALUES ('t', 'c', 'task', '{}')"
        )
        connection.execute("INSERT INTO task_versions (task_id, version) VALUES ('t', 1)")
        connection.execute(
            "INSERT INTO task_events (task_id, task_version, event_data) VALUES ('t', 1, x'00')"
        )


def test_shows_both_runs_saves_the_picture_and_leaves_nothing(tmp_path: Path) -> None:
    file, svg = tmp_path / 'tasks.db', tmp_path / 'demo.svg'
    tables_with_a_task_of_the_user(file)

    status, out, err = played('--database-url', f'sqlite:///{file}', '--save', str(svg))

    assert (status, err) == (0, '')
    assert 'CLUSTER_SUBSCRIBE=off' in out
    assert 'CLUSTER_SUBSCRIBE=on' in out
    assert OPEN in out
    assert 'the client at A still reads INPUT_REQUIRED and hears nothing while' in out
    assert re.search('On: A, B and C carry .*, and close at COMPLETED', out)
    assert max(map(len, out.splitlines())) == 100
    assert all(character.isprintable() for line in out.splitlines() for character in line)
    assert 'COMPLETED' in svg.read_text(encoding='utf-8')
    assert '@font-face' not in svg.read_text(encoding='utf-8')
    assert rows(file) == {'tasks': 1, 'task_versions': 1, 'task_events': 1}


def test_ctrl_c_ends_every_process_and_tidies_up(tmp_path: Path) -> None:
    file = tmp_path / 'tasks.db'
    with started('--database-url', f'sqlite:///{file}') as process:
        until = time.monotonic() + LIMIT
        # From its first row on the task is under way, on processes that are all up.
        while not (file.exists() and rows(file).get('tasks')) and time.monotonic() < until:
            time.sleep(0.05)
        for _ in range(3):  # nobody presses it once only
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        out, err = process.communicate(timeout=LIMIT)

    assert (process.returncode, out, err) == (130, '', '')
    assert_nothing_runs(process)
    assert rows(file) == {}


def test_a_broken_decorator_fails_the_demo(tmp_path: Path) -> None:
    broken = patched(
        tmp_path / 'broken',
        """
from cluster_subscribe import ClusterSubscribeHandler

right = ClusterSubscribeHandler.on_subscribe_to_task

async def everything_twice(self, params, context):
    async for event in right(self, params, context):
        yield event
        yield event

ClusterSubscribeHandler.on_subscribe_to_task = everything_twice
""",
    )

    status, out, err = played(sitecustomize=broken)

    assert (status, err) == (1, '')
    assert 'On: the contract is broken: the client at A was not told each event once' in out


def test_a_replica_that_does_not_start_is_named_and_the_others_are_reaped(tmp_path: Path) -> None:
    ill = patched(
        tmp_path / 'ill',
        f"""
import os, sys

if 'cluster_subscribe.cli.demo.replica' in sys.orig_argv:
    try:
        os.mkdir({str(tmp_path / 'the first of them')!r})
    except FileExistsError:
        pass
    else:
        os.write(2, b'a traceback\\nMemoryError: no room\\n')
        os._exit(1)
""",
    )

    status, out, err = played(sitecustomize=ill)

    assert (status, out) == (2, '')
    assert re.fullmatch(r'cluster-subscribe: Replica . did not start: MemoryError: no room\n', err)


def test_a_replica_does_not_outlive_its_parent(sqlite_url: str) -> None:
    replica = subprocess.Popen(
        [sys.executable, '-m', 'cluster_subscribe.cli.demo.replica'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with replica:
        assert replica.stdin is not None
        assert replica.stdout is not None
        replica.stdin.write(f'{sqlite_url}\n')
        replica.stdin.flush()
        assert '"port"' in replica.stdout.readline()

        replica.stdin.close()

        replica.wait(timeout=LIMIT)


def test_a_bad_url_is_one_line_and_no_traceback() -> None:
    status, out, err = played('--database-url', 'nonsense')

    assert (status, out) == (2, '')
    assert re.fullmatch(r'cluster-subscribe: That is no database URL; .*\n', err)


@pytest.mark.parametrize(
    ('words', 'complaint'),
    [
        ([], 'COMMAND'),
        (['tell-fortunes'], 'invalid choice'),
        (['demo', '--loud'], 'unrecognized arguments: --loud'),
        (['demo', '--database-url', 'oracle://u:secret@h/n'], 'postgresql, mysql'),
        (['demo', '--database-url', 'mysql://u:secret@h:x/n'], 'no database URL'),
        (['demo', '--database-url', 'postgresql+pg8000://u:secret@h/n'], 'postgresql+asyncpg://'),
        (['demo', '--database-url', 'sqlite://'], 'in memory'),
        (['demo', '--database-url', 'sqlite:////nowhere/x.db'], 'unable to open'),
        (['demo', '--database-url', 'postgresql://u:secret@127.0.0.1:1/n'], ':***@127.0.0.1:1/n'),
        (['demo', '--database-url', 'mysql://u:secret@127.0.0.1:1/n'], "Can't connect"),
        (['demo', '--save', '/nowhere/demo.svg'], 'no such folder'),
    ],
)
def test_what_cannot_be_used_is_one_line(
    words: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    out, err = capsys.readouterr()
    assert out == ''
    assert err.count('\n') == 1
    assert complaint in err
    assert 'secret' not in err


def test_a_database_that_does_not_answer_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, '_TIMEOUT', 0.2)
    with socket.create_server(('127.0.0.1', 0)) as silent:
        url = f'postgresql://u@127.0.0.1:{silent.getsockname()[1]}/n'
        assert main(['demo', '--database-url', url]) == 2

    assert 'no answer within 0.2 seconds' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('package', 'url', 'extra'),
    [
        ('asyncpg', 'postgresql://u@h/n', 'postgresql'),
        ('asyncpg', 'postgresql+asyncpg://u@h/n', 'postgresql'),
        ('aiomysql', 'mysql+aiomysql://u@h/n', 'mysql'),
        ('aiosqlite', 'sqlite:///tasks.db', 'sqlite'),
        ('rich', 'sqlite:///tasks.db', 'demo'),
        ('uvicorn', 'sqlite:///tasks.db', 'demo'),
    ],
)
def test_a_missing_package_names_the_extra(
    package: str,
    url: str,
    extra: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    assert main(['demo', '--database-url', url]) == 2

    err = capsys.readouterr().err
    assert err.count('\n') == 1
    assert package in err
    assert f"pip install 'cluster-subscribe[{extra}]'" in err


def test_a_setting_that_is_not_allowed_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('CLUSTER_SUBSCRIBE_POLL_INTERVAL', 'soon')

    assert main(['demo']) == 2

    err = capsys.readouterr().err
    assert err.count('\n') == 1
    assert "CLUSTER_SUBSCRIBE_POLL_INTERVAL='soon'" in err


def test_the_version_and_the_help_are_no_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['--version']) == 0
    assert re.match(r'cluster-subscribe \S+ \(a2a-sdk \S+\)', capsys.readouterr().out)
    assert main(['demo', '--help']) == 0
    assert '--database-url' in capsys.readouterr().out


EVENTS = list(STEPS.values())


def stream(replica: str, held: int, events: Sequence[str], ending: str = CLOSED) -> Timeline:
    """A timeline whose snapshot holds some events of the turn."""
    first = Told(0.1, EVENTS[held - 1] if held else 'INPUT_REQUIRED', snapshot=True, held=held)
    rest = [Told(0.5 * at, text) for at, text in enumerate(events, 1)]
    return Timeline(replica, [first, *rest], Told(4.0, ending))


def right(replica: str) -> Timeline:
    return stream(replica, 1, EVENTS[1:])


STALE = stream('A', 0, [], OPEN)


@pytest.mark.parametrize('held', range(1, len(EVENTS)))
def test_a_stream_is_right_from_whatever_its_snapshot_holds(held: int) -> None:
    assert stream('A', held, EVENTS[held:]).right


@pytest.mark.parametrize(
    'wrong',
    [
        pytest.param(STALE, id='stale and silent'),
        pytest.param(stream('A', 0, EVENTS), id='a snapshot from before the turn'),
        pytest.param(stream('A', 1, EVENTS[2:]), id='lost'),
        pytest.param(stream('A', 1, EVENTS), id='doubled'),
        pytest.param(stream('A', 1, [*EVENTS[2:0:-1], *EVENTS[3:]]), id='out of order'),
        pytest.param(stream('A', 1, EVENTS[1:-1]), id='closed early'),
        pytest.param(stream('A', 1, EVENTS[1:], OPEN), id='not closed'),
        pytest.param(stream('A', 1, EVENTS[1:], 'InternalError'), id='ended by an error'),
        pytest.param(Timeline('A', [], Told(0.1, CLOSED)), id='empty'),
    ],
)
def test_a_stream_that_lies_is_wrong_and_put_in_words(wrong: Timeline) -> None:
    assert not wrong.right
    words = on_in_words([wrong, right('B'), right('C')])
    assert words.startswith('the contract is broken: the client at A ')


def test_an_sdk_that_is_healed_is_said_to_be() -> None:
    run = [right(name) for name in 'ABC']
    assert 'a2a-sdk 9.9 does not need the decorator here' in off_in_words(run, '9.9')


@pytest.mark.parametrize(('width', 'lines_with_both'), [(120, 1), (100, 1), (99, 0), (60, 0)])
def test_the_runs_stand_side_by_side_where_there_is_room(width: int, lines_with_both: int) -> None:
    runs = {'off': [STALE, right('B'), right('C')], 'on': [right(name) for name in 'ABC']}
    console = Console(width=width)
    with console.capture() as capture:
        console.print(picture('A story.', runs, ('Off: so.', 'On: so.'), width))

    lines = capture.get().splitlines()
    assert all(len(line) <= width for line in lines)
    both = [line for line in lines if 'SUBSCRIBE=off' in line and 'SUBSCRIBE=on' in line]
    assert len(both) == lines_with_both
    assert any('INPUT_REQUIRED' in line for line in lines)
    assert 'still open, silent' in ' '.join(capture.get().split())
