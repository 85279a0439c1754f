"""One fault of the SDK: a scene, what every stream should carry, and how it is played."""

import time

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster_subscribe._testing.cluster import Cluster, cluster
from cluster_subscribe._testing.watching import Watch, matches, settle


@dataclass(frozen=True)
class Told:
    """What a scene found out by itself, in the words of a timeline."""

    place: str
    timeline: tuple[str, ...]
    intact: bool = True


Scene = Callable[[Cluster], Awaitable[Sequence[Watch | Told]]]


@dataclass(frozen=True)
class Outcome:
    """What the streams of one scene carried."""

    right: bool
    timelines: Mapping[str, tuple[str, ...]]
    """By replica; the last entry is how the stream ended, `open` if it did not."""
    intact: bool
    """Whether no event changed after it was handed out."""
    seconds: float


@dataclass(frozen=True)
class Fault:
    """One fault: its number in the documentation, its words, its scene."""

    number: str
    title: str
    """In words an operator knows."""
    right: tuple[str, ...]
    """What every stream should carry, and how it should end."""
    scene: Scene
    setting: Mapping[str, Any] = field(default_factory=dict)
    """What the cluster needs for the fault to show."""

    async def play(
        self, url: str, *, timeout: float, thoroughly: bool = False, **how: Any
    ) -> Outcome:
        """Plays the scene on a cluster of its own.

        Args:
            url: The database; its task tables are used.
            timeout: Seconds; a stream that is silent for so long counts as hung.
            thoroughly: Watches a stream that is wrong already to its end, too.
            how: Passed to `cluster()`: `decorate`, `reach` and others.
        """
        began = time.monotonic()
        async with cluster(url, **self.setting, **how) as lab:
            found = await self.scene(lab)
            watches = [one for one in found if isinstance(one, Watch)]
            await settle(watches, self.right, timeout, thoroughly=thoroughly)
            timelines = {one.place: one.timeline for one in found}
        return Outcome(
            right=all(matches(self.right, timeline) for timeline in timelines.values()),
            timelines=timelines,
            intact=all(one.intact for one in found),
            seconds=time.monotonic() - began,
        )
