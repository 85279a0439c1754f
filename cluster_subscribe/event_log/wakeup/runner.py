"""Runs a source of wakeups while a reader has streams."""

import asyncio
import logging

from collections.abc import Callable, Iterable

from cluster_subscribe.background import Background
from cluster_subscribe.event_log import retry
from cluster_subscribe.event_log.wakeup.source import NotifyingSource, WakeCallback, WakeupSource
from cluster_subscribe.waiting import Signal

logger = logging.getLogger(__name__)


class WakeupRunner:
    """Runs a source in a task of its own, and again after a pause when it fails.

    Args:
        source: What to run; `None` where the reader has its timer only.
        background: Where the task is started.
        table: The name of the event table, for log lines.
        wake: What the source calls.
        wanted: Whether the reader has streams.
    """

    def __init__(
        self,
        source: WakeupSource | None,
        background: Background,
        table: str,
        wake: WakeCallback,
        wanted: Callable[[], bool],
    ) -> None:
        self.source = source
        # Once, since checking a protocol costs more than a call.
        self._notifying = source if isinstance(source, NotifyingSource) else None
        self.task: asyncio.Task[None] | None = None
        self._background = background
        self._table = table
        self._wake = wake
        self._wanted = wanted
        self._stopping = Signal()

    def start(self) -> None:
        """Starts the task, unless it runs."""
        if self.source is not None and (self.task is None or self.task.done()):
            self.task = self._background.spawn(
                self._run(self.source), f'wakeups of {self._table}', stop=self._stop
            )

    def notify(self, task_id: str) -> None:
        """Tells the other replicas that a task changed, where they would not see it otherwise."""
        if self._notifying is not None and not self._background.closed:
            self._notifying.notify(task_id)
            self.start()

    def _stop(self) -> None:
        self._stopping.set()
        if self.source is not None:
            self.source.stop()

    async def _run(self, source: WakeupSource) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        first_wakeup: float | None = None

        def wake(task_ids: Iterable[str] | None, name: str) -> None:
            nonlocal first_wakeup
            first_wakeup = first_wakeup or loop.time()
            self._wake(task_ids, name)

        while not self._background.closed:
            first_wakeup = None
            try:
                await source.run(wake, self._wanted)
            except Exception as error:  # noqa: BLE001 - without wakeups the timer still reads
                # One warning per outage: another only after it has worked for a while.
                if first_wakeup is not None and loop.time() - first_wakeup > retry.MAX_PAUSE:
                    failures = 0
                log = logger.debug if failures else logger.warning
                log(
                    'Wakeups of %s are lost (%s); the timer serves', self._table, retry.brief(error)
                )
            else:
                if not self._wanted():
                    return
                # A stream has come while the source closed its connection.
                continue
            failures += 1
            await self._stopping.within(retry.pause(failures))
