"""What the two runs come to, in a sentence each."""

from collections.abc import Sequence

from cluster_subscribe.cli.demo.timeline import CLOSED, COMPLETED, OPEN, Timeline


def off_in_words(run: Sequence[Timeline], sdk_version: str) -> str:
    """What the SDK alone did."""
    if all(timeline.right for timeline in run):
        return (
            f'all three are right as well: a2a-sdk {sdk_version} does not need the decorator here.'
        )
    return _faults(run)


def on_in_words(run: Sequence[Timeline]) -> str:
    """What the wrapped handlers did."""
    if not all(timeline.right for timeline in run):
        return f'the contract is broken: {_faults(run)}'
    counts = {len(timeline.events) for timeline in run}
    carry = (
        f'the same {counts.pop()} events'
        if len(counts) == 1
        else 'the task as stored and then each later event once'
    )
    return f'A, B and C carry {carry}, and close at {COMPLETED}.'


def _faults(run: Sequence[Timeline]) -> str:
    return '; '.join(_fault(timeline) for timeline in run if not timeline.right) + '.'


def _fault(timeline: Timeline) -> str:
    who = f'the client at {timeline.replica}'
    ending = timeline.ending.text if timeline.ending else OPEN
    last = timeline.events[-1].text if timeline.events else None
    if ending == OPEN:
        reads = f'still reads {last} and ' if last not in (None, COMPLETED) else ''
        return f'{who} {reads}hears nothing while the task completes on B'
    if ending != CLOSED:
        return f'{who} was told {last or "nothing"} and then {ending}'
    if last != COMPLETED:
        return f'{who} was told {last or "nothing"}, and that this was all'
    return f'{who} was not told each event once and in order'
