"""Plays scenes on one cluster and notes what clients saw, what is stored and what is said."""

import logging

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from a2a.server.request_handlers import RequestHandler
from a2a.types import ListTasksRequest
from sqlalchemy import func, select

from cluster_subscribe._testing import Cluster, Parts, Watch
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe._testing.watching import matches, settle
from tests.differential.scenes import Scene, described


@dataclass(frozen=True)
class Line:
    """What one client of a scene saw."""

    scene: str
    place: str
    right: tuple[str, ...]
    timeline: tuple[str, ...]
    healed: bool

    @property
    def is_right(self) -> bool:
        return matches(self.right, self.timeline)


@dataclass
class Played:
    """What came of the scenes."""

    lines: list[Line] = field(default_factory=list)
    tasks: list[tuple[str, ...]] = field(default_factory=list)
    """The stored tasks in words, sorted."""
    events: int = 0
    """The number of logged events."""
    warnings: list[str] = field(default_factory=list)
    """What this package has warned of."""
    errors: set[str] = field(default_factory=set)
    """The templates of the errors that the SDK and asyncio have logged."""


async def play(
    url: str,
    parts: Parts,
    scenes: Sequence[Scene],
    decorate: Callable[[RequestHandler], RequestHandler],
    timeout: float,
    *,
    alone: bool,
) -> Played:
    """Plays scenes on a cluster of their own.

    Args:
        url: The database.
        parts: How the replicas are built.
        scenes: What clients do, one after the other.
        decorate: Wraps a handler, or leaves it bare.
        timeout: Seconds of silence after which a stream counts as hung.
        alone: Whether the handlers are bare.
    """
    played = Played()
    with _listening(played):
        async with cluster(url, parts=parts, decorate=decorate) as lab:
            for scene in scenes:
                for seen in await scene(lab):
                    # Alone, what only the wrapper heals is no reference.
                    if isinstance(seen.by, Watch) and not (alone and seen.healed):
                        await settle([seen.by], seen.right, timeout)
                    place, timeline = seen.by.place, seen.by.timeline
                    line = Line(scene.__name__, place, seen.right, timeline, healed=seen.healed)
                    played.lines.append(line)
            await _note_rows(lab, played)
    return played


async def _note_rows(lab: Cluster, played: Played) -> None:
    store = lab.a.store
    with lab.parts.acting('user'):
        listed = await store.list(ListTasksRequest(include_artifacts=True), caller())
        played.tasks = sorted(map(described, listed.tasks))
        async with store._db.async_session_maker() as session:
            count = select(func.count()).select_from(store._event_model)
            played.events = (await session.execute(count)).scalar_one()


class _Listener(logging.Handler):
    def __init__(self, played: Played) -> None:
        super().__init__(logging.WARNING)
        self._played = played

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith('cluster_subscribe'):
            self._played.warnings.append(record.getMessage())
        elif record.levelno >= logging.ERROR:
            self._played.errors.add(f'{record.name}: {record.msg}')


@contextmanager
def _listening(played: Played) -> Iterator[None]:
    listener = _Listener(played)
    loggers = [logging.getLogger(name) for name in ('cluster_subscribe', 'a2a', 'asyncio')]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(listener)


def side_by_side(bare: Played, wrapped: Played) -> str:
    """Both runs, event by event."""
    rows = []
    for one, other in zip_longest(bare.lines, wrapped.lines):
        line = one or other
        if one and other and one.is_right and other.is_right:
            continue
        rows.append(f'{line.scene}, {line.place}')
        columns = zip_longest(
            ('RIGHT', *line.right),
            (_head('BARE', one), *(one.timeline if one else ())),
            (_head('WRAPPED', other), *(other.timeline if other else ())),
            fillvalue='',
        )
        rows += [f'    {a:28} {b:28} {c}'.rstrip() for a, b, c in columns]
    rows.append(f'events: {bare.events} {wrapped.events}')
    rows.append(f'tasks: {bare.tasks}\n       {wrapped.tasks}')
    rows.append(f'warnings: {wrapped.warnings}')
    rows.append(f'errors: {bare.errors} {wrapped.errors}')
    return '\n'.join(rows)


def _head(name: str, line: Line | None) -> str:
    return f'{name} {"(right)" if line and line.is_right else "(WRONG)"}'
