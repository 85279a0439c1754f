"""What is asked of the event log, and what it answers.

Cursor and order are (version, seq). `seq` alone follows allocation, which caching
and distributed sequences separate from commit order; version alone is not unique on
SQLite, where a cancel may share its version with an event (F20).
"""

from typing import Final, NamedTuple

from a2a.types import TaskState

MAX_SEQ: Final = 2**63 - 1
"""The `seq` of a cursor after every row of its version, which no row has."""


class Cursor(NamedTuple):
    """A place in one task's log: everything up to it has been read."""

    version: int
    seq: int

    @classmethod
    def end_of(cls, version: int) -> 'Cursor':
        """The place after every row of a version."""
        return cls(version, MAX_SEQ)


class Page(NamedTuple):
    """A request for the rows after a cursor."""

    task_id: str
    after: Cursor
    min_seq: int
    """Rows up to this `seq` belong to an earlier incarnation of the task."""


class Row(NamedTuple):
    """One event as logged, and the version that was stored when it was read."""

    cursor: Cursor
    owner: str | None
    data: bytes
    stored: int | None
    """The stored version in the same statement; `None` without a stored task."""

    @property
    def size(self) -> int:
        """Bytes of the event; 0 where SQLite's column holds a value of another type."""
        data: object = self.data
        return len(data) if isinstance(data, bytes) else 0

    @property
    def is_of_earlier_incarnation(self) -> bool:
        """Whether the row is ahead of the store, which only a deletion of the task leads to."""
        return self.stored is None or self.cursor.version > self.stored


class Rows(NamedTuple):
    """The rows after a cursor, in log order."""

    rows: list[Row]
    more: bool
    """Whether the log may hold more: a page is limited in rows and in bytes."""


class Stored(NamedTuple):
    """What `task_versions` says of a task."""

    owner: str | None
    version: int


class Current(NamedTuple):
    """The stored owner, version and state of a task, without the task."""

    owner: str | None
    version: int
    state: TaskState | None
    """`None` where it is not known."""
