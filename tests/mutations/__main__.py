"""`python -m tests.mutations`: replaces parts of the package, and sees that tests miss them.

Each test that a mutation names has to fail with it, in a process of its own whose child processes
have it too. The model has to find a counterexample in random clusters. First all of them have to
pass without one.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.table import Table

from tests.model.__main__ import database
from tests.model.machine import run, world
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.plugin import CHOSEN
from tests.mutations.seams import MODEL, Mutation

ROOT: Final = Path(__file__).resolve().parents[2]
HANGS: Final = 90
"""Seconds after which a test counts as hung; most give up by themselves sooner."""
STUCK: Final = 900
"""Seconds after which the whole run of one mutation is ended."""
MOST: Final = 1000
"""Clusters after which the model counts as blind for a mutation."""
PLAIN: Final = 250
"""Clusters without a mutation, to see that nothing else is found."""
# Runs as each Python process starts. That of pytest itself has no mutation yet (`plugin`).
_SITE: Final = 'from tests.mutations.seams import apply_named\napply_named()\n'


def cases(tests: Sequence[str], mutation: Mutation | None = None) -> dict[str, str]:
    """Runs tests, and gives what became of each case by node id.

    Returns:
        `passed`, `failed` or `skipped`. A run that hangs has failed.
    """
    with tempfile.TemporaryDirectory(prefix='cluster-subscribe-') as folder:
        report = Path(folder, 'report.xml')
        if mutation:
            Path(folder, 'sitecustomize.py').write_text(_SITE)
        environment = os.environ | {'PYTHONPATH': os.pathsep.join([folder, str(ROOT)])}
        command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
        if mutation:
            environment[CHOSEN] = mutation.what
            command += ['-p', 'tests.mutations.plugin']
        command += [
            *(f'--timeout={HANGS}', f'--junit-xml={report}', '-o', 'junit_family=xunit1'),
            *(f'tests/{test}' for test in tests),
        ]
        try:
            done = subprocess.run(
                command, check=False, cwd=ROOT, env=environment, capture_output=True, timeout=STUCK
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(tests, 'failed')
        if not report.exists():
            raise RuntimeError(f'pytest did not run: {done.stderr.decode()[-2000:]}')
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


def by_tests(mutation: Mutation) -> tuple[bool, str]:
    """Whether every test that a mutation names misses what it replaces, and that in words."""
    tests = [one for one in mutation.missed_by if one != MODEL]
    found = cases(tests, mutation)
    blind = [
        test
        for test in tests
        if not (told := of(test, found)) or ('passed' in told and 'failed' not in told)
    ]
    if blind:
        return False, f'NOT SEEN by {", ".join(blind)}'
    seen = [told for test in tests for told in of(test, found)]
    missed = seen.count('failed')
    if not missed:
        return True, 'skipped: it needs a database or a program that is not here'
    return True, f'{missed} of {len(seen) - seen.count("skipped")} cases fail'


def by_the_model(mutation: Mutation | None, url: str, most: int) -> tuple[int, str] | None:
    """After how many clusters the model finds a counterexample, and which; `None` if never."""
    with (mutation or Mutation('', (), ())).applied(), world(url) as here:
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


def try_out(mutation: Mutation, url: str | None, *, model: bool) -> tuple[bool, list[str]]:
    """Whether all that should miss a mutation do, and what each said."""
    seen, told = True, []
    if MODEL in mutation.missed_by and model:
        with database(url) as place:
            found = by_the_model(mutation, place, MOST)
        seen = found is not None
        told.append(f'model: after {found[0]} clusters, {found[1][:60]}' if found else 'NO MODEL')
    if any(one != MODEL for one in mutation.missed_by):
        missed, words = by_tests(mutation)
        seen = seen and missed
        told.append(words)
    return seen, told


def main() -> int:
    """Tries the chosen mutations; 1 if one is not missed, or something fails without any."""
    parser = argparse.ArgumentParser(prog='python -m tests.mutations', description=__doc__)
    parser.add_argument('--only', default='', help='those with these words in their name')
    parser.add_argument('--list', action='store_true', help='names them and what has to miss each')
    parser.add_argument('--no-model', action='store_true', help='asks the tests alone')
    parser.add_argument('--database-url', help="the model's database (default: an SQLite file)")
    arguments = parser.parse_args()
    chosen = [one for one in MUTATIONS if arguments.only in one.what]
    console = Console()
    if arguments.list:
        table = Table('mutation', 'missed by', title=f'{len(chosen)} mutations')
        for one in chosen:
            table.add_row(one.what, '\n'.join(one.missed_by))
        console.print(table)
        return 0
    logging.disable(logging.CRITICAL)
    tests = [*dict.fromkeys(t for one in chosen for t in one.missed_by if t != MODEL)]
    plain = cases(tests) if tests else {}
    if failed := [node for node, told in plain.items() if told == 'failed']:
        console.print(f'Without a mutation: {", ".join(failed)} failed')
        return 1
    if not arguments.no_model and any(MODEL in one.missed_by for one in chosen):
        with database(arguments.database_url) as url:
            if found := by_the_model(None, url, PLAIN):
                console.print(f'Without a mutation: {found}')
                return 1
    survived = 0
    for number, one in enumerate(chosen, 1):
        seen, told = try_out(one, arguments.database_url, model=not arguments.no_model)
        survived += not seen
        mark = '[green]missed[/]' if seen else '[red]SURVIVES[/]'
        console.print(f'{number:2}/{len(chosen)} {mark} {one.what}: {"; ".join(told)}')
    console.print(f'{len(chosen) - survived} of {len(chosen)} are missed')
    return 1 if survived else 0


if __name__ == '__main__':
    sys.exit(main())
