"""`cluster-subscribe demo`: one task over three replica processes, flag off, then on."""

import argparse

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cluster_subscribe.cli.ending import Failure

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_PACKAGES: Final = ('rich', 'uvicorn', 'starlette', 'sse_starlette')


def add_parser(subparsers: 'Subparsers') -> None:
    """Adds the command's options to the command line."""
    parser = subparsers.add_parser(
        'demo',
        help='see what a resubscribed client is told, with the flag off and on',
        description='Three replica processes serve one task of two turns: the first runs on A '
        'and pauses for input, the reply goes to B, and clients resubscribe through A, B and C. '
        'It is played with CLUSTER_SUBSCRIBE=off, then with =on.',
    )
    parser.add_argument(
        '--database-url',
        metavar='URL',
        help='the database the replicas share, such as postgresql+asyncpg://user@host/name; its '
        "demo task is taken out again (default: an SQLite file that doesn't outlive the demo)",
    )
    parser.add_argument(
        '--save', metavar='FILE.svg', type=Path, help='keep the picture as an SVG file'
    )


def run(args: argparse.Namespace) -> int:
    """Plays the demo.

    Returns:
        The exit status: 0 if the wrapped run keeps the contract, 1 if it does not.

    Raises:
        Failure: A package is missing, the database or a file cannot be used, or a
            replica does not start.
    """
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise Failure(f"{missing[0]} is not installed: pip install 'cluster-subscribe[demo]'")
    if args.save and (args.save.is_dir() or not args.save.absolute().parent.is_dir()):
        raise Failure(f'{args.save} cannot be written: there is no such folder')

    from cluster_subscribe.cli.demo.show import show  # noqa: PLC0415 - needs these packages

    return show(args.database_url, args.save)
