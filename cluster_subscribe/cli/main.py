"""The front door: which command, and how it ends."""

import argparse
import os
import signal
import sys

from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Final, NoReturn

from cluster_subscribe.cli import check, demo
from cluster_subscribe.cli.ending import SIGNALLED, UNUSABLE, Failure

COMMANDS: Final = {'check': check, 'demo': demo}
"""Each offers `add_parser(subparsers)` and `run(args) -> int`, the exit status."""


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(UNUSABLE, f'{self.prog}: {message} (--help says more)\n')


class _Version(argparse.Action):
    """Finds the versions only when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        ours, sdk = version('cluster-subscribe'), version('a2a-sdk')
        print(f'cluster-subscribe {ours} (a2a-sdk {sdk})')
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog='cluster-subscribe',
        description='SubscribeToTask that answers the same on every replica of an A2A server.',
        epilog='Exit status: 0 right, 1 the wrapped run breaks the contract, 2 not usable so.',
    )
    parser.add_argument('--version', action=_Version, nargs=0, help='show the versions and exit')
    subparsers = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def program() -> NoReturn:
    """Runs a command as this process, and ends it.

    At once: the driver's thread of a query that was cancelled (F8) would keep it for ever.
    """
    status = main()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Its words, without the program's name; those of this process by default.

    Returns:
        The exit status: 0 right, 1 the wrapped run breaks the contract, 2 bad usage, an
        unreachable database or a missing package, 130 after Ctrl-C.
    """
    try:
        args = _parser().parse_args(argv)
        status: int = COMMANDS[args.command].run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has read enough; Python must not complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNALLED + signal.SIGPIPE
    except Failure as failure:
        print(f'cluster-subscribe: {failure}', file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else UNUSABLE
    return status
