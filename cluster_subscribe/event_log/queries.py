"""The event log of one pair of tables: what is asked of it, and how much at once."""

import json

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, Final, cast

from a2a.types import TaskState
from sqlalchemy import CompoundSelect, Select, Table
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from cluster_subscribe.event_log import statements
from cluster_subscribe.event_log.connection import Connections
from cluster_subscribe.event_log.rows import MAX_SEQ, Cursor, Page, Row, Rows, Stored
from cluster_subscribe.event_log.schema import Schema, table_of

PAGES_PER_STATEMENT: Final = 32
"""Pages asked for in one statement: far below what any database refuses."""
TASKS_PER_STATEMENT: Final = 10_000
"""Tasks whose versions are asked for in one statement: some 400 KB of ids."""
PAGE_BYTES: Final = 2**20
"""Bytes of large events in one page; one event may be larger."""
_INLINE_BYTES: Final = 2**14
"""Bytes up to which an event is read with its row; larger ones are read by themselves."""
_INLINE_PAGE_BYTES: Final = 2**22
"""Bytes of events that a page reads with its rows, at most."""
_STATES: Final = {name: cast('TaskState', value) for name, value in TaskState.items()}


class EventLog:
    """Reads one pair of event and version tables. The caller owns the engine.

    Args:
        engine: The engine of the database that holds the tables.
        events: The event table, or its name.
        versions: The version table, or its name.
        tasks: The task table, where states can be read from it.
        create_table: Whether `schema.prepare()` may create missing tables.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        events: str | Table,
        versions: str | Table,
        *,
        tasks: str | Table | None = None,
        create_table: bool = True,
    ) -> None:
        self.engine = engine
        self.connect = Connections(engine).connect
        self.schema = Schema(engine, self.connect, events, versions, create_table=create_table)
        tables = self.schema.events, self.schema.versions
        dialect = engine.dialect.name
        self._versions_of = statements.stored_versions(self.schema.versions, dialect)
        self._states_of = (
            None
            if tasks is None
            else statements.stored_states(table_of('tasks', tasks), self.schema.versions, dialect)
        )
        self._end_of_earlier_incarnation = statements.end_of_earlier_incarnation(*tables)
        self._incarnations = statements.incarnations(*tables)
        self._large_events = statements.large_events(self.schema.events)
        self._pages: dict[int, CompoundSelect[Any] | Select[Any]] = {}

    @property
    def table(self) -> str:
        """The name of the event table."""
        return self.schema.events.name

    async def stored(
        self, connection: AsyncConnection, task_ids: Collection[str]
    ) -> dict[str, Stored]:
        """The stored owner and version of each task that is there.

        One statement for `TASKS_PER_STATEMENT` tasks.
        """
        return {
            task_id: Stored(owner, version)
            for task_id, owner, version in await _of(self._versions_of, connection, task_ids)
        }

    async def states(
        self, connection: AsyncConnection, task_ids: Collection[str]
    ) -> dict[str, tuple[TaskState | None, int]] | None:
        """The stored state and version of each task that has a row, versioned or not.

        `None` where no task table is known. A state is `None` in rows of the protocol's
        older versions, which name states otherwise.
        """
        if self._states_of is None:
            return None
        return {
            task_id: (_STATES.get(state), version or 0)
            for task_id, state, version in await _of(self._states_of, connection, task_ids)
        }

    async def pages(
        self, connection: AsyncConnection, wanted: Sequence[Page], limit: int
    ) -> list[Rows]:
        """At most `limit` rows and some MiB after each cursor, but at least one row.

        Several pages are read in one statement.
        """
        answer: list[Rows] = []
        for pages in _chunks(wanted, PAGES_PER_STATEMENT):
            answer += await self._read_pages(connection, pages, limit)
        return answer

    async def _read_pages(
        self, connection: AsyncConnection, pages: list[Page], limit: int
    ) -> list[Rows]:
        inline = min(_INLINE_BYTES, _INLINE_PAGE_BYTES // limit)
        values: dict[str, object] = {'limit': limit, 'inline': inline}
        for number, page in enumerate(pages):
            values[f'task_{number}'] = page.task_id
            values[f'version_{number}'], values[f'seq_{number}'] = page.after
            values[f'min_seq_{number}'] = page.min_seq
        found: list[list[Row]] = [[] for _ in pages]
        counts, more = [0] * len(pages), [False] * len(pages)
        left = [PAGE_BYTES // len(pages)] * len(pages)
        large: list[int] = []
        for number, task_id, version, seq, owner, data, size, stored in await connection.execute(
            self._statement(len(pages)), values
        ):
            counts[number] += 1
            if data is None:
                left[number] -= size
            if left[number] < 0 and found[number]:
                more[number] = True
            # MySQL compares loosely: letter case and trailing blanks. SQLite's columns hold
            # values of any type; a row whose version is no integer has no place in the order.
            elif task_id == pages[number].task_id and _is_version(version):
                found[number].append(Row(Cursor(version, seq), owner, data, stored))
                if data is None:
                    large.append(seq)
        if large:
            read = await connection.execute(self._large_events, {'large': large})
            events: dict[int, bytes] = dict(read.all())
            found = [_with_data(rows, events) for rows in found]
        return [
            Rows(rows, more=cut or count == limit)
            for rows, cut, count in zip(found, more, counts, strict=True)
        ]

    def _statement(self, count: int) -> CompoundSelect[Any] | Select[Any]:
        if count not in self._pages:
            self._pages[count] = statements.pages(
                self.schema.events, self.schema.versions, self.engine.dialect.name, count
            )
        return self._pages[count]

    async def end_of_earlier_incarnation(self, connection: AsyncConnection, task_id: str) -> int:
        """The highest `seq` that an earlier incarnation of the task left above the stored version.

        0 where it left none.
        """
        found = await connection.execute(self._end_of_earlier_incarnation, {'task_id': task_id})
        return found.scalar() or 0

    async def recreated(self, connection: AsyncConnection, task_id: str, after: Cursor) -> bool:
        """Whether the log proves that a task was recreated since a cursor.

        It does if it has a row of version 1 after the cursor, or if the cursor's own row is
        there and the stored version is below it. Where the cursor stands after a snapshot, the
        row is not known: any second row of version 1, or version above the stored one, counts.
        """
        version, seq = after
        firsts, last_first, highest, own, stored = (
            await connection.execute(
                self._incarnations, {'task_id': task_id, 'version': version, 'seq': seq}
            )
        ).one()
        if seq == MAX_SEQ:
            return firsts > 1 or (highest or 0) > (stored or version)
        return (last_first or 0) > seq or bool(own and stored and stored < version)


def _is_version(version: object) -> bool:
    return isinstance(version, int)


async def _of(
    statement: Select[Any], connection: AsyncConnection, task_ids: Collection[str]
) -> list[Any]:
    rows: list[Any] = []
    for ids in _chunks(task_ids, TASKS_PER_STATEMENT):
        value = json.dumps(ids) if connection.dialect.name == 'sqlite' else ids
        rows += await connection.execute(statement, {'ids': value})
    return rows


def _with_data(rows: list[Row], events: dict[int, bytes]) -> list[Row]:
    """The rows with the events that were read by themselves, up to the first that is gone."""
    complete: list[Row] = []
    for row in rows:
        data: bytes | None = events.get(row.cursor.seq, row.data)
        if data is None:
            break
        complete.append(row._replace(data=data))
    return complete


def _chunks(items: Collection[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
