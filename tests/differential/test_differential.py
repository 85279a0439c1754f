"""Every way of building an app plays its scenes bare and wrapped."""

import re

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from a2a.server.request_handlers import RequestHandler

from cluster_subscribe import Settings, UnsupportedHandlerError
from tests.differential.play import play, side_by_side
from tests.differential.ways import WAYS, Way

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
    expected = [said for said in ours.warnings if way.warns and re.search(way.warns, said)]
    assert ours.warnings == expected, report
    assert bool(expected) == bool(way.warns), report
