"""The check from beginning to end."""

from collections.abc import Sequence
from importlib.util import find_spec
from shutil import get_terminal_size
from typing import Final

from cluster_subscribe._testing import FAULTS, Decorate, Fault
from cluster_subscribe.cli.check.play import WRAP, Timeouts, play
from cluster_subscribe.cli.check.report import Report
from cluster_subscribe.cli.check.sandbox import sandbox
from cluster_subscribe.cli.database import find
from cluster_subscribe.cli.ending import BROKEN, RIGHT, Failure
from cluster_subscribe.cli.progress import progress

_PIPED: Final = 100
"""Columns where nobody says how many there are."""
_WIDEST: Final = 120
"""Columns that the table takes at most."""


async def check(  # noqa: PLR0913
    database_url: str | None,
    *,
    only: str | None = None,
    as_json: bool = False,
    verbose: bool = False,
    decorate: Decorate = WRAP,
    timeout: Timeouts = Timeouts(),  # noqa: B008 - frozen
) -> int:
    """Plays the faults, stock and wrapped, and prints how they went.

    Args:
        database_url: The database to play in; a temporary SQLite file when not given.
        only: The numbers of the faults to play, separated by commas; all when not given.
        as_json: Whether to print JSON, not a table.
        verbose: Whether the table is followed by what every stream carried.
        decorate: What wraps the handlers.
        timeout: When a silent stream counts as hung.

    Returns:
        The exit status: 0 if everything wrapped is right, 1 if something is not.

    Raises:
        Failure: A package is missing, a fault is not known, or the database cannot be
            used.
    """
    faults = _chosen(only)
    if not as_json and find_spec('rich') is None:
        raise Failure("rich is not installed: pip install 'cluster-subscribe[demo]', or use --json")
    url = find(database_url or 'sqlite:///tasks.db')
    async with sandbox(url if database_url else None) as place:
        with progress('The check begins') as tell:
            rows = await play(faults, place, decorate, timeout, tell)
        report = Report(rows, place, of_all=len(faults) == len(FAULTS))
        if as_json:
            print(report.as_json())
        else:
            _print_table(report, verbose=verbose)
    return RIGHT if report.ok else BROKEN


def _chosen(only: str | None) -> Sequence[Fault]:
    if only is None:
        return FAULTS
    numbers = {number.strip().upper() for number in only.split(',')}
    known = [fault.number for fault in FAULTS]
    if unknown := sorted(numbers.difference(known)):
        raise Failure(f'--only knows no {unknown[0]!r}; there are {", ".join(known)}')
    return [fault for fault in FAULTS if fault.number in numbers]


def _print_table(report: Report, *, verbose: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - not needed for JSON

    from cluster_subscribe.cli.check.table import table  # noqa: PLC0415 - likewise

    # A pipe has no width of its own.
    width = min(get_terminal_size((_PIPED, 24)).columns, _WIDEST)
    Console(width=width).print(table(report, verbose=verbose))
