"""Plays faults, stock and wrapped, and never fails itself."""

import asyncio

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from cluster_subscribe import Settings, wrap
from cluster_subscribe._testing import Decorate, Fault, Outcome
from cluster_subscribe.cli.check.sandbox import Sandbox
from cluster_subscribe.cli.ending import reason

WRAP: Final[Decorate] = partial(wrap, settings=Settings.model_construct(reconcile_interval=1.0))
"""The decorator as it is by default, whatever the environment says."""
_LIMIT: Final = 60.0
"""Seconds that a scene may take, on a busy machine."""
_GRACE: Final = 5.0
"""Seconds that a scene may take to leave the stage."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds of silence after which a stream counts as hung."""

    stock: float = 1.5
    wrapped: float = 10.0


@dataclass(frozen=True)
class Play:
    """How one scene went."""

    right: bool
    timelines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By replica; the last entry is how the stream ended, `open` if it stayed silent."""
    error: str | None = None
    """Why the scene could not be played to its end."""


@dataclass(frozen=True)
class Row:
    """One fault, played twice."""

    fault: Fault
    stock: Play
    wrapped: Play


async def play(
    faults: Sequence[Fault],
    place: Sandbox,
    decorate: Decorate,
    timeout: Timeouts,
    tell: Callable[[str], None],
) -> list[Row]:
    """Plays each fault as the SDK alone handles it, and wrapped.

    Both at once: most of the time is spent on making sure that a stream is silent.
    """
    played = 0

    async def column(**how: Any) -> list[Play]:
        nonlocal played
        plays = []
        for fault in faults:
            tell(f'{played} of {2 * len(faults)} scenes played')
            scene = fault.play(
                place.fresh_url(), thoroughly=True, engine_options=place.engine_options, **how
            )
            plays.append(await _guarded(scene))
            played += 1
        return plays

    stock, wrapped = await asyncio.gather(
        column(timeout=timeout.stock), column(timeout=timeout.wrapped, decorate=decorate)
    )
    return [Row(*row) for row in zip(faults, stock, wrapped, strict=True)]


async def _guarded(scene: Coroutine[Any, Any, Outcome]) -> Play:
    # In a task of its own: what a scene does with a cancellation is not to be relied on.
    task = asyncio.create_task(scene)
    try:
        done, _ = await asyncio.wait({task}, timeout=_LIMIT)
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE)
    if not done:
        return Play(right=False, error=f'not over after {_LIMIT:g} seconds')
    try:
        outcome = task.result()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - a row says so
        kind, said = type(error).__name__, reason(error)
        return Play(right=False, error=said if said == kind else f'{kind}: {said}')
    return Play(outcome.right, outcome.timelines)
