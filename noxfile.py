"""What has to hold before a change lands, a session each.

`bash .ci/run` plays all of them in a clean copy of the tree; `nox -s lint types imports` plays some
of them here.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import nox

nox.needs_version = '>=2025.2.9'
nox.options.default_venv_backend = 'virtualenv'

ROOT = Path(__file__).parent
DIST = ROOT / 'dist'

PYTHONS = ['3.10', '3.11', '3.12', '3.13']
# Each SDK meets each SQLAlchemy, and each end of the Pythons meets both ends of the SDKs.
# Python, a2a-sdk, SQLAlchemy: the newest release that begins like this. SQLite and PostgreSQL are
# played everywhere; MySQL in the first two, where it meets both SQLAlchemys and both ends of the
# SDKs, since nothing that we ask of it depends on more.
MATRIX = [
    ('oldest', '1.2.0', '2.0'),
    ('newest', '1.3', '2.1'),
    ('newest', '1.2.0', '2.1'),
    ('oldest', '1.3', '2.0'),
    ('3.12', '1.2.2', '2.0'),
]
ON_MYSQL = MATRIX[:2]
MEASURED = MATRIX[3]
"""The cell whose branch coverage is measured: one with the newest SDK and without MySQL, which
has few lines of its own and takes a third of the time that measuring makes longer."""
COVERAGE = ['--cov', '--cov-report=term', '--cov-fail-under=90']
TESTS_LIMIT, DEMO_LIMIT = 1200, 300
"""Seconds after which a job is ended with everything that it started."""


# --- Jobs: a process group each, so that it can be ended as a whole


def members(group: int) -> list[str]:
    """The processes of a group, without those that have ended and wait for their parent."""
    table = subprocess.run(
        ['ps', '-A', '-o', 'pgid=,stat=,pid=,args='], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 3) for line in table.splitlines()]
    return [' '.join(row[2:]) for row in rows if row[0] == str(group) and row[1][0] != 'Z']


def empties(group: int, seconds: float) -> bool:
    """Whether the last process of a group ends within that time."""
    deadline = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def end(group: int) -> None:
    """Interrupts a group, so that it can tidy up, and then makes sure."""
    for number, seconds in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        if empties(group, seconds):
            return


def run(
    session: nox.Session,
    seconds: float,
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs a job that fails by its status, by its time, and by a process that it leaves behind."""
    session.log(' '.join(str(word) for word in command if '\n' not in str(word)))
    environment = {**os.environ, **{k: v for k, v in session.env.items() if v}, **(env or {})}
    # A job keeps what it compiles, as its environment came without: it starts many processes.
    environment.pop('PYTHONDONTWRITEBYTECODE', None)
    job = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    left: list[str] = []
    try:
        status = job.wait(seconds)
        left = [] if empties(job.pid, 2) else members(job.pid)
    except subprocess.TimeoutExpired:
        session.error(f'took longer than {seconds} seconds')
    finally:
        end(job.pid)
        job.wait()
    if status:
        session.error(f'exited with {status}')
    if left:
        session.error(f'left behind: {left}')


# --- What the machine has


def answers(port: int) -> bool:
    """Whether something listens on that port of this machine."""
    try:
        socket.create_connection(('127.0.0.1', port), timeout=2).close()
    except OSError:
        return False
    return True


def services(*, mysql: bool) -> dict[str, str]:
    """The database servers that answer; the tests start a PostgreSQL of their own without one."""
    found = {}
    if answers(5432):
        url = 'postgresql+asyncpg://postgres@127.0.0.1:5432/test'
        found['CLUSTER_SUBSCRIBE_TEST_POSTGRES_URL'] = url
    if mysql and answers(3306):
        found['CLUSTER_SUBSCRIBE_TEST_MYSQL_URL'] = 'mysql+aiomysql://root@127.0.0.1:3306/test'
    return found


def find_python(version: str) -> str | None:
    """An interpreter of that version, on the path or in the folder of a version manager."""
    home = Path.home()
    name = f'python{version}'
    found = [Path(folder, name) for folder in os.get_exec_path()]
    for variable, default, pattern in (
        ('PYENV_ROOT', home / '.pyenv', 'versions/*/bin'),
        ('UV_PYTHON_INSTALL_DIR', home / '.local/share/uv/python', '*/bin'),
        ('ASDF_DATA_DIR', home / '.asdf', 'installs/python/*/bin'),
        ('MISE_DATA_DIR', home / '.local/share/mise', 'installs/python/*/bin'),
        ('_', Path('/opt/python'), '*/bin'),
    ):
        folder = Path(default if variable == '_' else os.environ.get(variable, default))
        found += sorted(folder.glob(f'{pattern}/{name}'))
    probe = 'import sys; print(sys.executable, "%d.%d" % sys.version_info[:2])'
    for candidate in found:
        # A shim of a version manager may be there and lead nowhere.
        if candidate.exists():
            asked = subprocess.run([candidate, '-c', probe], capture_output=True, text=True)
            path, _, told = asked.stdout.strip().rpartition(' ')
            if asked.returncode == 0 and told == version:
                return path
    return None


# --- The tree and what its README says


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """A copy of what a fresh clone would have; `.gitignore` says what it would not."""
    ignored = [line.rstrip('/') for line in (ROOT / '.gitignore').read_text().split()]
    with tempfile.TemporaryDirectory(prefix='tree-') as folder:
        copy = Path(folder, 'tree')
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.git', *ignored))
        yield copy


def readme_command(name: str) -> str:
    """The code block after `<!-- command: NAME -->`, which has to be one line."""
    pattern = rf'<!-- command: {name} -->\n```sh\n(.+)\n```\n'
    [command] = re.findall(pattern, (ROOT / 'README.md').read_text())
    return str(command)


# --- The package as it is installed


@nox.session
def build(session: nox.Session) -> None:
    """Builds the sdist, and the wheel from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install('--no-compile', 'build')
    session.run('python', '-m', 'build', '--outdir', str(DIST), str(ROOT), silent=True)
    session.log(' '.join(path.name for path in DIST.iterdir()))


def wheel(extra: str = '') -> str:
    """What pip installs: the wheel, with an extra."""
    [path] = DIST.glob('*.whl')
    return f'{path}{extra}'


@nox.session(requires=['build'])
def bare(session: nox.Session) -> None:
    """Installs the wheel alone, and then its demo."""
    session.install('--no-compile', wheel())
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.run('cluster-subscribe', '--version')
        session.run('cluster-subscribe', '--help')
        session.install('--no-compile', wheel('[demo]'))
        run(session, DEMO_LIMIT, program(session, 'cluster-subscribe'), 'demo', cwd=Path(elsewhere))


def program(session: nox.Session, name: str) -> Path:
    """A program of the session's environment."""
    return Path(session.bin, name).absolute()


@nox.session(python=False)
@nox.parametrize(
    ('name', 'limit'),
    [nox.param('demo', DEMO_LIMIT, id='demo'), nox.param('tests', TESTS_LIMIT, id='tests')],
)
def readme(session: nox.Session, name: str, limit: float) -> None:
    """Runs a command of the README as its reader would."""
    with copy_of_the_tree() as tree:
        command = ['bash', '-c', readme_command(name)]
        run(session, limit, *command, cwd=tree)


# --- The source


def requirement(name: str) -> str:
    """What the extra `lint` asks for under that name."""
    extras = nox.project.load_toml(ROOT / 'pyproject.toml')['project']['optional-dependencies']
    [found] = [asked for asked in extras['lint'] if asked.startswith(name)]
    return str(found)


@nox.session
def lint(session: nox.Session) -> None:
    """Lints and compares the format."""
    session.install('--no-compile', requirement('ruff'))
    session.run('ruff', 'check')
    session.run('ruff', 'format', '--check')


@nox.session
def types(session: nox.Session) -> None:
    """Checks the types, strictly."""
    session.install('--no-compile', '-e', '.[lint]')
    session.run('mypy')


@nox.session
def imports(session: nox.Session) -> None:
    """Checks that nothing imports upward."""
    session.install('--no-compile', '-e', '.', requirement('import-linter'))
    session.run('lint-imports', '--no-logo')


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the site; a link that leads nowhere fails it."""
    session.install('--no-compile', '-e', '.[docs]')
    session.run('mkdocs', 'build', '--strict', '--site-dir', str(ROOT / 'site'))


# --- The matrix: the wheel, not the tree, on each cell's Python, SDK and SQLAlchemy

SHOW_VERSIONS = """
import sys
from importlib.metadata import version
from pathlib import Path
import cluster_subscribe
where = Path(cluster_subscribe.__file__)
assert where.is_relative_to(sys.prefix) and 'site-packages' in where.parts, where
names = 'a2a-sdk', 'sqlalchemy'
print('Python', sys.version.split()[0], *(f'{name} {version(name)}' for name in names))
"""


def test_cell(
    session: nox.Session, sdk: str, sqlalchemy: str, more: Sequence[str], *, mysql: bool
) -> None:
    """Runs the tests on the wheel."""
    # Without --no-compile half the time goes into files that nobody imports.
    session.install(
        '--no-compile', wheel('[test]'), f'a2a-sdk=={sdk}.*', f'sqlalchemy=={sqlalchemy}.*'
    )
    with copy_of_the_tree() as tree:
        shutil.rmtree(tree / 'cluster_subscribe')
        python = program(session, 'python')
        run(session, 60, python, '-c', SHOW_VERSIONS, cwd=tree)
        command = [
            python,
            '-m',
            'pytest',
            '-q',
            '-n',
            '3',
            '--dist',
            'worksteal',
            *more,
            *session.posargs,
        ]
        run(session, TESTS_LIMIT, *command, cwd=tree, env=services(mysql=mysql))


def add_cell(python: str, sdk: str, sqlalchemy: str, more: Sequence[str], *, mysql: bool) -> None:
    """Makes a cell of the matrix a session of its own."""

    @nox.session(
        python=FOUND[python],
        name=f'tests-{python}-sdk{sdk}-sqlalchemy{sqlalchemy}',
        requires=['build'],
        tags=['tests'],
    )
    def tests(session: nox.Session) -> None:
        test_cell(session, sdk, sqlalchemy, more, mysql=mysql)


def add_missing(python: str) -> None:
    """Lets the summary say which interpreter the machine does not have."""

    @nox.session(python=False, name=f'tests-{python}', tags=['tests'])
    def tests(session: nox.Session) -> None:
        session.skip(f'Python {python} is not on this machine')


FOUND = {version: path for version in PYTHONS if (path := find_python(version))}
if not FOUND:
    raise LookupError(f'none of Python {PYTHONS} is on this machine')
for version in PYTHONS:
    if version not in FOUND:
        add_missing(version)
for cell in MATRIX:
    named = {'oldest': next(iter(FOUND)), 'newest': next(reversed(FOUND))}
    version = named.get(cell[0], cell[0])
    if version in FOUND:
        more = COVERAGE if cell == MEASURED else []
        add_cell(version, *cell[1:], more, mysql=cell in ON_MYSQL)
