"""`cluster-subscribe check`: the SDK's known faults, played on the SDK that is installed."""

import argparse
import gc
import logging

from typing import TYPE_CHECKING

from cluster_subscribe.cli.ending import run_until_signalled

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


def add_parser(subparsers: 'Subparsers') -> None:
    """Adds the command's options to the command line."""
    parser = subparsers.add_parser(
        'check',
        help='find out whether the SDK that is installed needs the decorator',
        description='Plays every known fault of the SDK in this process, on three replicas over '
        'one database: first as the SDK alone handles it, then wrapped. Each stream is watched '
        'until it ends or stays silent. The wrapped handlers run in mode "on" with the default '
        'settings: CLUSTER_SUBSCRIBE and its relatives in the environment play no part.',
        epilog='Exit status: 0 if everything wrapped is right, 1 if something is not, 2 if the '
        'command cannot be used as called or the database cannot be reached. Whether the SDK '
        'needs the decorator is said in the last line, and in "needed" of --json.',
    )
    parser.add_argument(
        '--database-url',
        metavar='URL',
        help='a database to check on, such as postgresql+asyncpg://user@host/name; it is played '
        'in a schema (PostgreSQL), a database (MySQL, MariaDB) or a file (SQLite, next to the '
        'one named) of its own, which is dropped in the end (default: a temporary SQLite file)',
    )
    parser.add_argument(
        '--only', metavar='F1,F9', help='play these faults only; docs/faults.md describes them'
    )
    parser.add_argument('--json', action='store_true', help='print JSON, for machines')
    parser.add_argument(
        '-v', '--verbose', action='store_true', help='print what every stream carried, too'
    )


def run(args: argparse.Namespace) -> int:
    """Checks the installed SDK.

    Returns:
        The exit status: 0 if everything wrapped is right, 1 if something is not.

    Raises:
        Failure: A package is missing, a fault is not known, or the database cannot be
            used.
    """
    from cluster_subscribe.cli.check.check import check  # noqa: PLC0415 - costly

    disabled = logging.root.manager.disable
    # Agents fail on purpose here, and SDK and database drivers log it.
    logging.disable()
    try:
        return run_until_signalled(
            check(args.database_url, only=args.only, as_json=args.json, verbose=args.verbose)
        )
    finally:
        # A scene that failed may leave tasks whose last words come when they are collected.
        gc.collect()
        logging.disable(disabled)
