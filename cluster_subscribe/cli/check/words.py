"""What went wrong on a stream, and what it all comes to, in words."""

from collections.abc import Sequence
from typing import Final

from cluster_subscribe._testing.watching import matches
from cluster_subscribe.cli.check.play import Play, Row

_NAMED: Final = 3
"""Replicas, events and remarks that are named before the rest are counted."""


def wrongs(right: Sequence[str], play: Play) -> list[str]:
    """What went wrong, a line for each group of replicas: `A, B: silent after WORKING`."""
    if play.error is not None:
        return [f'error: {play.error}']
    groups: dict[str, list[str]] = {}
    for place, timeline in play.timelines.items():
        if not matches(right, timeline):
            groups.setdefault(', '.join(_wrong(right, timeline)), []).append(place)
    return [f'{_few(places)}: {words}' for words, places in groups.items()]


def _wrong(right: Sequence[str], timeline: Sequence[str]) -> list[str]:
    """Walks along the right stream and notes where this one leaves it."""
    *due, end = [entry.removesuffix('?').split('|') for entry in right]
    *events, ending = timeline
    required = [n for n in range(len(due)) if not right[n].endswith('?')]
    at, missed, notes = 0, list[int](), list[str]()
    for event in events:
        ahead = next((n for n in range(at, len(due)) if event in due[n]), None)
        late = next((n for n in missed if event in due[n]), None)
        if ahead is not None:
            missed += [n for n in required if at <= n < ahead]
            at = ahead + 1
        elif at == 0:
            notes.append(f'begins with {event}')
            at = 1
        elif late is not None:
            missed.remove(late)
            notes.append(f'{event} too late')
        else:
            known = any(event in allowed for allowed in due[:at])
            notes.append(f'{event} again' if known else f'extra {event}')
    awaited = [n for n in required if n >= at]
    if ending != 'open' and 'closed' not in end:
        missed, awaited = missed + awaited, []
    if missed:
        notes.append(f'without {_few([due[n][0] for n in missed])}')
    notes = notes if len(notes) <= _NAMED else [*notes[:_NAMED], f'{len(notes) - _NAMED} more']
    if ending == 'open' and not awaited:
        notes.append('never closed' if 'closed' in end else f'silent instead of {end[0]}')
    elif ending == 'open':
        last = events[-1] if len(events) > 1 else 'the snapshot'
        notes.append('then silent' if notes else f'silent after {last}' if events else 'silent')
    elif ending not in end:
        notes.append(f'ends in {ending}' if 'closed' in end else f'{ending} instead of {end[0]}')
    elif awaited:
        notes.append(f'{ending} without {due[awaited[-1]][0]}')
    return notes


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ', '.join(names[:_NAMED]) + (f' and {more} more' if more > 0 else '')


def verdict(rows: Sequence[Row], sdk: str, *, of_all: bool) -> str:
    """What the table comes to.

    Args:
        rows: The faults that were played.
        sdk: The version of the SDK.
        of_all: Whether all known faults were played.
    """
    unplayed = [row.fault.number for row in rows if row.stock.error or row.wrapped.error]
    shown = [row.fault.number for row in rows if not (row.stock.right or row.stock.error)]
    broken = [row.fault.number for row in rows if not (row.wrapped.right or row.wrapped.error)]
    sentences = []
    if shown:
        sentences.append(f'a2a-sdk {sdk} needs the decorator because of {_and(shown)}.')
    elif of_all and not unplayed:
        sentences.append(f'a2a-sdk {sdk} is healed of all known faults: the decorator can go.')
    elif not unplayed:
        sentences.append(
            f'a2a-sdk {sdk} is healed of {_and([row.fault.number for row in rows])}; whether the '
            'decorator can go, only a check of all faults can tell.'
        )
    if unplayed:
        sentences.append(f'{_and(unplayed)} could not be played to the end.')
    if broken:
        sentences.append(
            f'The decorator is not right about {_and(broken)} here: please report it, with the '
            'output of --json.'
        )
    return ' '.join(sentences)


def _and(names: Sequence[str]) -> str:
    *first, last = names
    return f'{", ".join(first)} and {last}' if first else last
