"""The two runs in one picture."""

import io
import re

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Final

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster_subscribe.cli.demo.timeline import CLOSED, COMPLETED, OPEN, Timeline, Told

SIDE_BY_SIDE: Final = 100
"""Columns from which the two runs stand next to each other."""
WIDEST: Final = 120
"""Columns that the picture takes at most."""
_ONE_RUN: Final = 64
"""Columns of a run that has the width to itself."""
_LINE: Final = 0.1
"""Seconds that share a line."""
_ROLES: Final = {'A': 'ran turn 1', 'B': 'runs turn 2', 'C': 'never saw it'}
_STYLES: Final = {COMPLETED: 'green', CLOSED: 'dim', OPEN: 'bold red'}


def picture(
    story: str, runs: Mapping[str, Sequence[Timeline]], verdicts: Sequence[str], width: int
) -> RenderableType:
    """Draws the runs.

    Args:
        story: What was played.
        runs: What the clients were told, by the value of the flag.
        verdicts: What it comes to, a sentence each.
        width: Columns there are.
    """
    across = width >= SIDE_BY_SIDE
    frames = [runs] if across else [{flag: run} for flag, run in runs.items()]
    return Group(
        _wrapped(story, width),
        *(_frame(each, width if across else min(width, _ONE_RUN)) for each in frames),
        *(_wrapped(verdict, width, 'bold') for verdict in verdicts),
    )


def _wrapped(words: str, width: int, style: str = '') -> Text:
    return Text(fill(words, width), style)


def svg(drawing: RenderableType) -> str:
    """Draws, `SIDE_BY_SIDE` columns wide, as an SVG that fetches nothing."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=SIDE_BY_SIDE,
        force_terminal=True,
        color_system='truecolor',
    )
    console.print(drawing)
    drawn = console.export_svg(title='cluster-subscribe demo', unique_id='demo')
    # rich names a font on a web server; the monospace that is there will do.
    return re.sub(r'@font-face \{.*?\}\s*', '', drawn, flags=re.DOTALL)


def _frame(runs: Mapping[str, Sequence[Timeline]], width: int) -> Table:
    frame = Table(box=ROUNDED, width=width)
    for flag in runs:
        frame.add_column(f'CLUSTER_SUBSCRIBE={flag}', ratio=1)
    frame.add_row(*map(_table, runs.values()))
    return frame


def _table(run: Sequence[Timeline]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, expand=True)
    table.add_column('\ns', justify='right')
    for timeline in run:
        role = _ROLES[timeline.replica]
        table.add_column(Text.assemble((timeline.replica, 'bold'), '\n', (role, 'dim')))
    for seconds, cells in _lines(run):
        table.add_row(Text(f'{seconds:.1f}', style='dim'), *map(_cell, cells))
    return table


def _lines(run: Sequence[Timeline]) -> Iterator[tuple[float, list[list[Told]]]]:
    """What was told at about the same time, one cell per client."""
    all_told = sorted(
        ((told, at) for at, timeline in enumerate(run) for told in timeline.rows),
        key=lambda one: one[0].seconds,
    )
    while all_told:
        began = all_told[0][0].seconds
        cells: list[list[Told]] = [[] for _ in run]
        while all_told and all_told[0][0].seconds <= began + _LINE:
            told, at = all_told.pop(0)
            cells[at].append(told)
        yield began, cells


def _cell(line: Sequence[Told]) -> Text:
    return Text('\n').join(_words(told) for told in line)


def _words(told: Told) -> Text:
    if told.snapshot:
        return Text.assemble(('Task', 'dim'), '\n', (told.text, '' if told.held else 'bold red'))
    return Text(told.text, style=_STYLES.get(told.text, ''))
