"""From rows of the event log to events."""

import logging

from a2a.server.events import Event
from a2a.types import StreamResponse
from google.protobuf.message import DecodeError

from cluster_subscribe.event_log.rows import Row
from cluster_subscribe.telemetry import Once

logger = logging.getLogger(__name__)


class Decoder:
    """Decodes each row once, for all streams that one round gives it to.

    Args:
        once: Has a row that cannot be decoded logged once, however often it is read.
    """

    def __init__(self, once: Once) -> None:
        self._once = once
        self._events: dict[int, Event | None] = {}

    def __call__(self, row: Row) -> Event | None:
        """The event of a row; `None` if it cannot be decoded."""
        if row.cursor.seq not in self._events:
            self._events[row.cursor.seq] = self._event(row)
        return self._events[row.cursor.seq]

    def _event(self, row: Row) -> Event | None:
        try:
            response = StreamResponse.FromString(row.data)
            if kind := response.WhichOneof('payload'):
                event: Event = getattr(response, kind)
                return event
        # SQLite's columns hold values of any type.
        except (DecodeError, TypeError):
            pass
        if self._once(row.cursor.seq):
            logger.warning('The event log has a row that is no event (seq %d)', row.cursor.seq)
        return None
