"""The findings for people."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster_subscribe.cli.check.play import Play, Row
from cluster_subscribe.cli.check.report import Report
from cluster_subscribe.cli.check.words import verdict, wrongs

_LEGEND: Final = 'Three replicas, A, B and C, share the database; clients subscribe through each.'
_ENDS: Final = 6
"""Entries at either end of a long timeline that are printed."""


def table(report: Report, *, verbose: bool) -> RenderableType:
    """Draws the findings: the versions, a row for each fault, and what it comes to."""
    versions = report.versions
    head = (
        f'cluster-subscribe {versions["cluster-subscribe"]}, a2a-sdk {versions["a2a-sdk"]}, '
        f'{report.place.kind} {report.place.version}, Python {versions["python"]}'
    )
    body = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=True)
    body.add_column('')
    body.add_column('Fault', ratio=1)
    body.add_column('The SDK alone', ratio=1)
    # A column of one word leaves the room to the others.
    body.add_column('Wrapped', ratio=None if report.ok else 1)
    for row in report.rows:
        body.add_row(
            row.fault.number,
            Text(row.fault.title),
            _cell(row, row.stock, 'healed'),
            _cell(row, row.wrapped, 'right'),
        )
    timelines = [Text(line) for line in _timelines(report.rows)] if verbose else []
    said = verdict(report.rows, versions['a2a-sdk'], of_all=report.of_all)
    return Group(
        Text(head), Text(_LEGEND), Text(), body, *timelines, Text(), Text(said, style='bold')
    )


def _cell(row: Row, play: Play, right: str) -> Text:
    if play.right:
        return Text(right, style='green')
    return Text('\n'.join(wrongs(row.fault.right, play)), style='red')


def _timelines(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield f'\n{row.fault.number} expected: {_line(row.fault.right)}'
        for cast, play in (('alone', row.stock), ('wrapped', row.wrapped)):
            groups: dict[str, list[str]] = {}
            for place, timeline in play.timelines.items():
                groups.setdefault(_line(timeline), []).append(place)
            for line, places in groups.items():
                yield f'   {cast} {", ".join(places)}: {line}'


def _line(timeline: Sequence[str]) -> str:
    left_out = len(timeline) - 2 * _ENDS
    if left_out <= 1:
        return ', '.join(timeline)
    head, tail = ', '.join(timeline[:_ENDS]), ', '.join(timeline[-_ENDS:])
    return f'{head}, ({left_out} more), {tail}'
