"""`cluster-subscribe check`, as an operator and a machine meet it."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.request_handlers import RequestHandler
from sqlalchemy import make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Mode, Settings, wrap
from cluster_subscribe._testing import FAULTS, Cluster, Fault, Watch
from cluster_subscribe.cli import main
from cluster_subscribe.cli.check import check as command
from cluster_subscribe.cli.check import play as playing
from cluster_subscribe.cli.check import sandbox
from cluster_subscribe.cli.check.play import Play, Row, Timeouts
from cluster_subscribe.cli.check.words import verdict, wrongs
from cluster_subscribe.cli.ending import Failure

SDK = version('a2a-sdk')
IMPATIENT = Timeouts(stock=0.3, wrapped=0.5)
"""For what is wrong when wrapped, too."""
LIMIT = 50
"""Seconds the command may take here; it is alone on no machine that tests."""


async def check(
    url: str | None, only: str | None = None, *, timeout: Timeouts | None = None, **how: Any
) -> int:
    # What is wrong here stays silent, and what is right is right at once.
    timeout = timeout or Timeouts(stock=0.3, wrapped=2)
    return await command.check(url, only=only, timeout=timeout, **how)


def started(*words: str) -> 'subprocess.Popen[str]':
    env = {name: value for name, value in os.environ.items() if name != 'COLUMNS'}
    return subprocess.Popen(
        [sys.executable, '-m', 'cluster_subscribe', 'check', *words],
        env=env | {'CLUSTER_SUBSCRIBE': 'off', 'CLUSTER_SUBSCRIBE_CLOSE_ON': 'terminal'},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def query(url: str | URL, *statements: str) -> list[Any]:
    """What the last of the statements gives."""
    engine = create_async_engine(url, isolation_level='AUTOCOMMIT')
    found: list[Any] = []
    async with engine.connect() as connection:
        for statement in statements:
            result = await connection.execute(text(statement))
            found = list(result.scalars()) if result.returns_rows else []
    await engine.dispose()
    return found


async def tables_with_a_task_of_the_user(url: str) -> None:
    engine = create_async_engine(url)
    await VersionedDatabaseTaskStore(engine).initialize()
    await engine.dispose()
    await query(
        url, "INSERT INTO tasks (id, context_id, kind, status) VALUES ('t', 'c', 'task', '{}')"
    )


async def tasks_and_what_is_left(url: str, prefix: str) -> list[Any]:
    """The tasks of the user, and whatever a check with this prefix left behind."""
    tasks = await query(url, 'SELECT id FROM tasks')
    if make_url(url).get_backend_name() == 'sqlite':
        return tasks + [one.name for one in Path(str(make_url(url).database)).parent.iterdir()]
    schemata = 'SELECT schema_name FROM information_schema.schemata'
    return tasks + await query(url, f"{schemata} WHERE schema_name LIKE '{prefix}%'")


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the names of a check's schemas and databases begin with, here and nowhere else."""
    prefix = f'cluster_subscribe_check_{uuid.uuid4().hex[:8]}_'
    monkeypatch.setattr(sandbox, '_PREFIX', prefix)
    return prefix


async def test_judges_stock_and_wrapped_and_touches_nothing_else(
    database_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await tables_with_a_task_of_the_user(database_url)
    before = await tasks_and_what_is_left(database_url, prefix)

    # The other replicas are stock, too, and must have the time to be right.
    timeout = Timeouts(stock=2, wrapped=2)
    assert await check(database_url, 'f3, F8', timeout=timeout) == 0

    head, *_ = lines = capsys.readouterr().out.splitlines()
    assert f'a2a-sdk {SDK}, ' in head
    assert lines[-1] == f'a2a-sdk {SDK} needs the decorator because of F3 and F8.'
    cells = {line.split()[0]: line for line in lines if line.startswith('F')}
    assert list(cells) == ['F3', 'F8']
    assert 'A: never closed' in cells['F3']
    assert 'A: closed instead of cancelled' in cells['F8']
    assert all(line.split()[-1] == 'right' for line in cells.values())
    assert await tasks_and_what_is_left(database_url, prefix) == before


async def test_tells_machines_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(None, 'F11', as_json=True) == 0

    findings = json.loads(capsys.readouterr().out)
    (fault,) = findings.pop('faults')
    versions, database = findings.pop('versions'), findings.pop('database')
    assert findings == {'needed': True, 'ok': True}
    assert list(versions) == ['cluster-subscribe', 'a2a-sdk', 'sqlalchemy', 'python']
    assert versions['a2a-sdk'] == SDK
    assert database['kind'] == 'SQLite'
    assert fault['number'] == 'F11'
    assert fault['title']
    assert fault['expected'] == ['Task(WORKING)', 'CANCELED|Task(CANCELED)', 'closed']
    assert fault['stock']['right'] is False
    assert fault['stock']['timelines']['A'] == ['Task(WORKING)', 'closed']
    assert fault['wrapped']['right'] is True
    assert set(fault['wrapped']['timelines']) == {'A', 'B', 'C'}
    assert fault['stock']['error'] is fault['wrapped']['error'] is None


async def test_a_decorator_that_does_nothing_is_caught(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forgotten(handler: RequestHandler) -> RequestHandler:
        return handler

    assert await check(None, 'F1,F11', decorate=forgotten, timeout=IMPATIENT, as_json=True) == 1

    findings = json.loads(capsys.readouterr().out)
    assert [fault['wrapped']['right'] for fault in findings['faults']] == [False, False]
    assert not findings['ok']


async def test_only_the_rows_that_are_wrong_are_red(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It redirects where another replica has gone on (F1) and leaves a running turn to the SDK (F3).
    stale = partial(wrap, settings=Settings(mode=Mode.STALE))
    monkeypatch.setenv('FORCE_COLOR', '1')
    monkeypatch.setenv('COLUMNS', '120')

    assert await check(None, 'F1,F3', decorate=stale, timeout=IMPATIENT) == 1

    out = capsys.readouterr().out
    rows = {line[:2]: line for line in out.splitlines() if line.startswith('F')}
    assert '\x1b[32mright' in rows['F1']
    assert rows['F3'].count('\x1b[31mA: never closed') == 2
    assert 'not right about F3 here' in out


async def test_a_scene_that_fails_is_a_row_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def unsupported(handler: RequestHandler) -> RequestHandler:
        raise TypeError(f'no such handler\n{handler}')

    assert await check(None, 'F8', decorate=unsupported, as_json=True) == 1

    out, err = capsys.readouterr()
    (fault,) = json.loads(out)['faults']
    error = 'TypeError: no such handler'
    assert fault['wrapped'] == {'right': False, 'timelines': {}, 'error': error}
    assert err == ''


def faults(*scenes: str) -> list[Fault]:
    """Faults that stock handlers do not have, or that cannot be played."""

    async def healed(lab: Cluster) -> Sequence[Watch]:
        task = await lab.a.start('work wait=1 done').at('1')
        watches = await lab.watch(task)
        lab.gates.open('1')
        return watches

    async def stuck(lab: Cluster) -> Sequence[Watch]:
        await lab.gates.reached('nowhere')
        return []

    scene = {'healed': healed, 'stuck': stuck}
    right = ('Task(WORKING)', 'COMPLETED', 'closed')
    return [Fault(f'F{n}', name, right, scene[name]) for n, name in enumerate(scenes, 1)]


async def test_an_sdk_without_the_faults_is_healed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, 'FAULTS', faults('healed', 'healed'))

    # Here the SDK's own streams are right as well, however busy the machine.
    timeout = Timeouts(stock=20, wrapped=20)
    assert await check(None, timeout=timeout) == 0
    whole = capsys.readouterr().out
    assert await check(None, 'F2', timeout=timeout) == 0
    part = capsys.readouterr().out

    assert whole.splitlines()[-3].split()[-2:] == ['healed', 'right']
    assert f'{SDK} is healed of all known faults: the decorator can go.' in whole
    assert f'{SDK} is healed of F2; whether the decorator can go, only a check of' in part


async def test_a_scene_that_never_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, 'FAULTS', faults('stuck'))
    monkeypatch.setattr(playing, '_LIMIT', 0.2)

    assert await check(None, as_json=True) == 1

    (fault,) = json.loads(capsys.readouterr().out)['faults']
    assert fault['stock']['error'] == fault['wrapped']['error'] == 'not over after 0.2 seconds'


def test_the_command_takes_no_orders_from_the_environment_and_keeps_quiet() -> None:
    with started('--only', 'F10,F11', '--verbose') as process:
        out, err = process.communicate(timeout=LIMIT)

    assert (process.returncode, err) == (0, '')
    assert max(map(len, out.splitlines())) == 100
    assert all(character.isprintable() for line in out.splitlines() for character in line)
    assert 'F11 expected: Task(WORKING), CANCELED|Task(CANCELED), closed' in out
    assert '   alone A: Task(WORKING), closed' in out
    assert '   wrapped A, B, C: Task(WORKING), Task(CANCELED), closed' in out


def test_logging_is_as_before_when_it_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.disable(logging.DEBUG)
    try:
        url = f'sqlite:///{tmp_path / "tasks.db"}'
        assert main(['check', '--database-url', url, '--only', 'F8', '--json']) == 0
        assert logging.root.manager.disable == logging.DEBUG
    finally:
        logging.disable(logging.NOTSET)
    assert json.loads(capsys.readouterr().out)['ok']


@pytest.mark.skipif(sys.platform == 'win32', reason='no signal of a terminal to send')
def test_ctrl_c_tidies_up(tmp_path: Path) -> None:
    with started('--database-url', f'sqlite:///{tmp_path / "tasks.db"}') as process:
        until = time.monotonic() + LIMIT
        while not list(tmp_path.glob('*/*')) and time.monotonic() < until:
            time.sleep(0.05)
        for _ in range(3):  # nobody presses it once only
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        out, err = process.communicate(timeout=LIMIT)

    assert (process.returncode, out, err) == (130, '', '')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--only', 'F1,F99'], "--only knows no 'F99'; there are F1, F2, "),
        (['--database-url', 'nonsense'], 'That is no database URL'),
        (['--database-url', 'postgresql://u:pw@127.0.0.1:1/n'], 'u:***@127.0.0.1:1/n: '),
        (['--database-url', 'sqlite:////no/folder/tasks.db'], 'can be made in /no/folder: '),
        (['--jason'], 'unrecognized arguments: --jason'),
    ],
)
def test_bad_usage_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['check', *words]) == 2

    out, err = capsys.readouterr()
    assert out == ''
    assert said in err
    assert err.count('\n') == 1
    assert 'pw' not in err


async def test_a_table_needs_rich_and_json_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, 'rich', None)

    with pytest.raises(Failure, match=r'rich is not installed: .*cluster-subscribe\[demo\]'):
        await check(None, 'F8')
    assert await check(None, 'F8', as_json=True) == 0


@asynccontextmanager
async def user_without_rights(server: URL) -> AsyncIterator[str]:
    name = f'cluster_subscribe_{uuid.uuid4().hex[:8]}'
    await query(server, f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
    try:
        yield server.set(username=name, password=name).render_as_string(hide_password=False)
    finally:
        await query(server, f'DROP ROLE {name}')


async def test_names_the_right_that_a_user_lacks(postgres_server: URL) -> None:
    async with user_without_rights(postgres_server) as url:
        with pytest.raises(Failure, match='which takes the right CREATE on its database: perm'):
            await check(url, 'F8')


async def test_plays_in_no_schema_but_faults(
    postgres_server: URL, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As behind a pooler that drops what it does not know.
    monkeypatch.setattr(sandbox, '_search_path', lambda url, schema: {})

    with pytest.raises(Failure, match='ignores the search_path'):
        await check(postgres_server.render_as_string(hide_password=False), 'F8')

    schemata = 'SELECT schema_name FROM information_schema.schemata'
    assert not await query(postgres_server, f"{schemata} WHERE schema_name LIKE '{prefix}%'")


RIGHT = 'Task(WORKING)', 'art a', 'art b|art c', 'note?', 'DONE|Task(DONE)', 'closed'


@pytest.mark.parametrize(
    ('timeline', 'said'),
    [
        ('Task(WORKING), art a, art c, Task(DONE), closed', None),
        ('Task(WORKING), art a, art b, note, DONE, closed', None),
        ('open', 'silent'),
        ('closed', 'closed without DONE'),
        ('TaskNotFoundError', 'ends in TaskNotFoundError'),
        ('Task(WORKING), open', 'silent after the snapshot'),
        ('Task(WORKING), art a, open', 'silent after art a'),
        ('Task(ASKED), open', 'begins with Task(ASKED), then silent'),
        ('Task(WORKING), art a, art b, DONE, open', 'never closed'),
        ('Task(WORKING), art a, closed', 'closed without DONE'),
        ('Task(WORKING), art a, art a, art b, DONE, closed', 'art a again'),
        ('Task(WORKING), art x, art a, art b, DONE, closed', 'extra art x'),
        ('Task(WORKING), art b, DONE, closed', 'without art a'),
        ('Task(WORKING), DONE, closed', 'without art a, art b'),
        ('Task(WORKING), art b, art a, DONE, closed', 'art a too late'),
        ('Task(WORKING), art a, art b, DONE, RuntimeError', 'ends in RuntimeError'),
        (
            'Task(WORKING), x, y, y, x, z, art b, DONE, open',
            'extra x, extra y, extra y, 3 more, never closed',
        ),
    ],
)
def test_says_what_is_wrong_with_a_stream(timeline: str, said: str | None) -> None:
    play = Play(right=said is None, timelines={'A': tuple(timeline.split(', '))})

    assert wrongs(RIGHT, play) == ([f'A: {said}'] if said else [])


def test_groups_the_replicas_that_go_wrong_alike() -> None:
    timelines = {
        'A': ('Task(X)', 'open'),
        'B': ('Task(X)', 'cancelled'),
        'C': ('Task(X)', 'open'),
        'D': ('Task(X)', 'closed'),
        'the store': ('gone',),
    }

    assert wrongs(('Task(X)', 'cancelled'), Play(right=False, timelines=timelines)) == [
        'A, C: silent instead of cancelled',
        'D: closed instead of cancelled',
        'the store: without Task(X), gone instead of cancelled',
    ]


def test_a_verdict_on_what_could_not_be_seen_does_not_say_healed() -> None:
    right, wrong = Play(right=True), Play(right=False)
    failed = Play(right=False, error='gone')
    rows = [Row(FAULTS[0], right, right), Row(FAULTS[1], failed, right)]

    assert wrongs(RIGHT, failed) == ['error: gone']
    assert verdict(rows, '9.9', of_all=True) == 'F2 could not be played to the end.'
    assert verdict([*rows, Row(FAULTS[2], wrong, wrong)], '9.9', of_all=True) == (
        'a2a-sdk 9.9 needs the decorator because of F3. F2 could not be played to the end. The '
        'decorator is not right about F3 here: please report it, with the output of --json.'
    )
