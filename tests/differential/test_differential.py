"""Every way of building an app plays its scenes bare and wrapped."""

import asyncio
import re

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from a2a.server.request_handlers import RequestHandler
from sqlalchemy.pool import NullPool

from cluster_subscribe import Settings, UnsupportedHandlerError, wrap
from cluster_subscribe.cli.lab import FAULTS, Cluster, Fault, Parts, Watch
from cluster_subscribe.cli.lab.cluster import settle
from tests.differential.engines import engine
from tests.differential.handlers import Untouched
from tests.differential.play import play, side_by_side
from tests.differential.scenes import outside_writer
from tests.differential.ways import WAYS, Way, pass_through

SETTINGS = Settings(poll_interval=0.05, reconcile_interval=0.5)


def _cases() -> list[object]:
    return [
        pytest.param(
            way,
            backend,
            id=f'{way.name}, {backend}',
            marks=[pytest.mark.xfail(reason=way.broken, strict=True)] if way.broken else [],
        )
        for way in WAYS
        for backend in way.databases
    ]


@pytest.mark.cancels_queries
@pytest.mark.parametrize(('way', 'backend'), _cases())
async def test_what_is_right_bare_is_right_wrapped(
    way: Way, backend: str, fresh_database: Callable[[str], AbstractAsyncContextManager[str]]
) -> None:
    for module in way.needs:
        pytest.importorskip(module)

    def bare(handler: RequestHandler) -> RequestHandler:
        return way.around(handler)

    def wrapped(handler: RequestHandler) -> RequestHandler:
        made: RequestHandler = way.wrap(handler, settings=SETTINGS)
        return way.around(made)

    patience = 1 if way.broken else 20
    with way.loop():
        async with fresh_database(backend) as url, way.database(url) as url:
            alone = await play(url, way.parts, way.scenes, bare, patience, alone=True)
        assert all(line.is_right or line.healed for line in alone.lines), side_by_side(alone, alone)
        async with fresh_database(backend) as url, way.database(url) as url:
            if way.refused:
                with pytest.raises(UnsupportedHandlerError):
                    await play(url, way.parts, way.scenes, wrapped, patience, alone=False)
                return
            ours = await play(url, way.parts, way.scenes, wrapped, patience, alone=False)
    report = side_by_side(alone, ours)
    assert all(line.is_right for line in ours.lines), report
    assert ours.tasks == alone.tasks or any(line.healed for line in alone.lines), report
    assert ours.events >= alone.events, report
    assert ours.errors <= alone.errors, report
    # A bare handler's process makes the tables without it.
    warnings = [said for said in ours.warnings if 'slow without an index' not in said]
    expected = [said for said in warnings if way.warns and re.search(way.warns, said)]
    assert warnings == expected, report
    assert bool(expected) == bool(way.warns), report


ELABORATE = Parts(engine=engine(poolclass=NullPool).engine, handler=Untouched, more=pass_through)


@pytest.mark.parametrize(
    # F7 takes long by its nature; F19 is of a2a-sdk 1.2 and no matter of how an app is built.
    'fault',
    [fault for fault in FAULTS if fault.number not in ('F7', 'F19')],
    ids=lambda fault: fault.number,
)
async def test_what_is_healed_is_healed_in_an_elaborate_app(fault: Fault, sqlite_url: str) -> None:
    outcome = await fault.play(
        sqlite_url,
        patience=20,
        parts=ELABORATE,
        decorate=lambda handler: wrap(handler, settings=SETTINGS),
    )
    assert outcome.right, outcome.timelines


@pytest.mark.cancels_queries
# A loop that is closed in mid-query leaves the thread of aiosqlite without one.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
@pytest.mark.parametrize('wrapped', [False, True])
def test_one_handler_serves_one_loop_after_another(wrapped: bool, sqlite_url: str) -> None:
    """As a program does that calls `asyncio.run()` again; a stream is open when a loop ends."""
    lab = Cluster(
        sqlite_url,
        parts=ELABORATE,
        decorate=lambda handler: wrap(handler, settings=SETTINGS) if wrapped else handler,
    )
    timelines = []

    async def serve() -> None:
        await lab.a.store.initialize()
        (seen,) = await outside_writer(lab)
        assert isinstance(seen.by, Watch)
        await settle([seen.by], seen.right, 20)
        timelines.append(seen.by.timeline)
        await lab.c.watch(await lab.a.turn('work ret'))

    async def close() -> None:
        await lab.aclose()

    for _ in range(2):
        asyncio.run(serve())
        for replica in lab.replicas:
            replica._watches.clear()
            replica._turns.clear()
    asyncio.run(close())
    assert timelines == [('Task(WORKING)', 'COMPLETED', 'closed')] * 2
