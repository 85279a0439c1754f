"""`python -m tests.meet 1.4.0`: what an a2a-sdk release moves, and the suite on it.

Takes a version, a wheel or anything else that pip installs. It is put into a virtual
environment of its own, whatever this package's own bounds say.
"""

import argparse
import importlib
import inspect
import re
import subprocess
import sys
import tempfile
import venv

from importlib.metadata import version
from pathlib import Path

from a2a.server.request_handlers import RequestHandler
from rich.console import Console
from rich.table import Table

from cluster_subscribe import ClusterSubscribeHandler
from cluster_subscribe.sdk import PRIVATE_ATTRIBUTES, PrivateAttribute

ROOT = Path(__file__).parent.parent


def is_there(attribute: PrivateAttribute) -> bool:
    """Whether the installed SDK has a private attribute where this package looks for it."""
    module, _, name = attribute.owner.rpartition('.')
    try:
        owner = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    source = ''.join(
        inspect.getsource(cls) for cls in owner.__mro__[:-1] if cls.__module__[:3] == 'a2a'
    )
    return hasattr(owner, attribute.name) or bool(
        re.search(rf'self\.{attribute.name}\b\s*(:[^=]+)?=', source)
    )


def show_what_moved() -> None:
    """Prints a table of the private attributes, and the handler's methods."""
    table = Table(title=f'Private attributes that are read of a2a-sdk {version("a2a-sdk")}')
    for column in ('class', 'attribute', 'for', ''):
        table.add_column(column)
    for attribute in PRIVATE_ATTRIBUTES:
        table.add_row(
            attribute.owner.rpartition('.')[2],
            attribute.name,
            attribute.purpose,
            'there' if is_there(attribute) else '[bold red]gone',
        )
    console = Console()
    console.print(table)
    own = vars(ClusterSubscribeHandler)
    for name in dir(RequestHandler):
        if not name.startswith('_'):
            served = 'delegated' if isinstance(own[name], property) else 'served by the decorator'
            console.print(f'{name}: {served}')


def main() -> int:
    """Runs the suite on one release."""
    parser = argparse.ArgumentParser(prog='python -m tests.meet', description=__doc__)
    parser.add_argument('release', nargs='?', help='a version, a wheel, or what else pip installs')
    parser.add_argument('pytest', nargs='*', help='arguments of pytest, after --')
    arguments = parser.parse_args()
    if arguments.release is None:
        show_what_moved()
        return 0
    given = arguments.release
    wanted = f'a2a-sdk=={given}' if re.fullmatch(r'[\d.]+\w*', given) else given
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, 'bin', 'python')
        for what in (['-e', f'{ROOT}[test]'], [wanted]):
            print(f'Installing {what[-1]} ...', flush=True)
            subprocess.run([python, '-m', 'pip', 'install', '-q', *what], check=True)
        for module in (['tests.meet'], ['pytest', *arguments.pytest]):
            status = subprocess.run([python, '-m', *module], cwd=ROOT, check=False).returncode
        return status


if __name__ == '__main__':
    sys.exit(main())
