"""Streams that are looked at, never cancelled, and what they should carry."""

import asyncio

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial

from a2a.server.events import Event

from cluster_subscribe._testing.messages import label


class Watch:
    """One subscriber: what it was given, and whether its stream has ended."""

    def __init__(self, events: AsyncGenerator[Event, None], place: str) -> None:
        self.place = place
        self.events: list[Event] = []
        self.told: list[str] = []
        """The label of each event as it arrived."""
        self.ending: str | None = None
        """`closed`, the name of an error, or `None` while the stream is open."""
        self._changed = asyncio.Condition()
        self._go = asyncio.Event()
        self._go.set()
        self.reader = asyncio.create_task(self._read(events), name=f'watch at {place}')

    @property
    def timeline(self) -> tuple[str, ...]:
        """The labels of all events as they arrived, then how the stream ended."""
        return *self.told, self.ending or 'open'

    @property
    def intact(self) -> bool:
        """Whether every event still is what it was when it arrived."""
        return [*map(label, self.events)] == self.told

    def hold(self) -> None:
        """Reads no further after the next event: a slow subscriber."""
        self._go.clear()

    def resume(self) -> None:
        """Reads on."""
        self._go.set()

    async def until(self, happened: Callable[['Watch'], object], limit: float) -> bool:
        """Waits until something is true of the stream; `False` after `limit` seconds."""
        async with self._changed:
            waiting = self._changed.wait_for(lambda: happened(self) or self.ending)
            try:
                await asyncio.wait_for(waiting, limit)
            except asyncio.TimeoutError:
                pass
        return bool(happened(self))

    async def first(self) -> None:
        """Waits for the snapshot.

        Raises:
            TimeoutError: None came within ten seconds.
        """
        if not await self.until(lambda w: w.events, 10):
            raise TimeoutError(f'No snapshot at {self.place}: {self.timeline}')

    async def _read(self, events: AsyncGenerator[Event, None]) -> None:
        ending = 'cancelled'
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    await self._note(event)
                    await self._go.wait()
            ending = 'closed'
        except Exception as error:  # noqa: BLE001 - how a stream ends is what is watched
            ending = type(error).__name__
        finally:
            self.ending = ending
            await self._note()

    async def _note(self, event: Event | None = None) -> None:
        async with self._changed:
            if event is not None:
                self.events.append(event)
                self.told.append(label(event))
            self._changed.notify_all()


async def settle(
    watches: Iterable[Watch], right: Sequence[str], timeout: float, *, thoroughly: bool = False
) -> None:
    """Waits until every stream is right, or can no longer become so, or timeout ends.

    Args:
        watches: The streams.
        right: What each should carry.
        timeout: Seconds of silence after which a stream counts as hung.
        thoroughly: Waits for the end of a stream that is wrong already, too.
    """

    def decided(watch: Watch) -> bool:
        return watch.ending is not None or not (thoroughly or _begins(right, watch.told))

    async def settled(watch: Watch) -> None:
        heard = -1
        while not decided(watch) and len(watch.told) > heard:
            heard = len(watch.told)
            await watch.until(partial(_says_more, heard), timeout)

    await asyncio.gather(*map(settled, watches))


def _says_more(heard: int, watch: Watch) -> bool:
    return len(watch.told) > heard


def matches(right: Sequence[str], timeline: Sequence[str]) -> bool:
    """Whether a timeline is the right one.

    In the right one `a|b` allows either, and `a?` may be left out.
    """
    rest = _rest(right, timeline)
    return rest is not None and all(entry.endswith('?') for entry in rest)


def _begins(right: Sequence[str], part: Sequence[str]) -> bool:
    return _rest(right, part) is not None


def _rest(right: Sequence[str], part: Sequence[str]) -> Sequence[str] | None:
    """What has to follow a part of the right timeline; `None` if it is no part of it."""
    for told in part:
        while right and told not in right[0].removesuffix('?').split('|'):
            if not right[0].endswith('?'):
                return None
            right = right[1:]
        if not right:
            return None
        right = right[1:]
    return right
