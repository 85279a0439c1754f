"""`python -m tests.benchmarks`: the stock SDK and the decorator, in turn, in one run."""

import argparse
import asyncio
import json
import logging
import sys

from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import FIGURES
from tests.benchmarks.measure import Figure, database


def main() -> int:
    """Runs the chosen figures and prints them."""
    parser = argparse.ArgumentParser(prog='python -m tests.benchmarks', description=__doc__)
    parser.add_argument('figures', nargs='*', help=f'which: {", ".join(FIGURES)} (default: all)')
    parser.add_argument('--database-url', default=None, help='a server (default: an SQLite file)')
    parser.add_argument('--runs', type=int, default=5, help='alternating runs of each (default: 5)')
    parser.add_argument('--json', type=Path, help='where to keep the figures')
    parser.add_argument('--plot', type=Path, help='where to draw the agent beside idle subscribers')
    arguments = parser.parse_args()
    if unknown := set(arguments.figures) - set(FIGURES):
        parser.error(f'no figure {", ".join(unknown)}; there are {", ".join(FIGURES)}')
    logging.disable(logging.CRITICAL)
    figures: list[Figure] = []
    for name in arguments.figures or FIGURES:
        print(f'{name} ...', file=sys.stderr, flush=True)
        figures += asyncio.run(_measured(name, arguments.database_url, arguments.runs))
    _show(figures, arguments.database_url)
    if arguments.json:
        arguments.json.write_text(json.dumps([figure.as_dict() for figure in figures], indent=2))
    if arguments.plot:
        from tests.benchmarks.plot import draw

        draw(figures, arguments.plot)
    return 0


async def _measured(name: str, url: str | None, runs: int) -> list[Figure]:
    async with database(url) as place:
        return await FIGURES[name](place, runs)


def _show(figures: list[Figure], url: str | None) -> None:
    backend = (url or 'sqlite').split('+')[0].split(':')[0]
    table = Table(
        title=f'Stock a2a-sdk and cluster-subscribe on {backend}, median (spread) of runs'
    )
    for column in ('figure', 'unit', 'stock', 'ours', 'ratio'):
        table.add_column(column, justify='left' if column == 'figure' else 'right')
    for figure in figures:
        table.add_row(figure.name, figure.unit, *figure.cells())
    Console(width=120).print(table)


if __name__ == '__main__':
    sys.exit(main())
