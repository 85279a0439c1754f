"""Every way of building an app plays its scenes bare and wrapped."""

import re

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from a2a.server.request_handlers import RequestHandler
from sqlalchemy.pool import NullPool

from cluster_subscribe import Settings, UnsupportedHandlerError, wrap
from cluster_subscribe._testing import FAULTS, Fault, Parts
from tests.differential.engines import engine
from tests.differential.handlers import Untouched
from tests.differential.play import play, side_by_side
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

    timeout = 1 if way.broken else 20
    with way.loop():
        async with fresh_database(backend) as url, way.database(url) as url:
            alone = await play(url, way.parts, way.scenes, bare, timeout, alone=True)
        assert all(line.is_right or line.healed for line in alone.lines), side_by_side(alone, alone)
        async with fresh_database(backend) as url, way.database(url) as url:
            if way.refused:
                with pytest.raises(UnsupportedHandlerError):
                    await play(url, way.parts, way.scenes, wrapped, timeout, alone=False)
                return
            ours = await play(url, way.parts, way.scenes, wrapped, timeout, alone=False)
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
        timeout=20,
        parts=ELABORATE,
        decorate=lambda handler: wrap(handler, settings=SETTINGS),
    )
    assert outcome.right, outcome.timelines
