"""The statements: what is asked of the SDK's `task_events` and `task_versions` tables.

Cursor and order are (version, seq). `seq` alone follows allocation, which caching
and distributed sequences separate from commit order; version alone is not unique on
SQLite, where a cancel may share its version with an event (F20).
"""

import asyncio
import json
import logging

from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from a2a.types import TaskState
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    String,
    Table,
    and_,
    any_,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from cluster_subscribe.background import in_time
from cluster_subscribe.engines import has_hooks
from cluster_subscribe.event_log.connection import abort_connection, prepared_elsewhere
from cluster_subscribe.event_log.schema import Schema, table_of

logger = logging.getLogger(__name__)

ROUND_TIMEOUT: Final = 10.0
"""Seconds that a round may take."""
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
_BEHIND_ALL_ROWS: Final = 2**63 - 1


class Cursor(NamedTuple):
    """A place in one task's log: everything up to it has been read."""

    version: int
    seq: int

    @classmethod
    def behind(cls, version: int) -> 'Cursor':
        """The place behind every row of a version."""
        return cls(version, _BEHIND_ALL_ROWS)


class Page(NamedTuple):
    """A request for the rows behind a cursor."""

    task_id: str
    after: Cursor
    min_seq: int
    """Rows up to this `seq` belong to an earlier incarnation of the task."""


class Stored(NamedTuple):
    """What `task_versions` says of a task."""

    owner: str | None
    version: int


class Row(NamedTuple):
    """One event as logged, beside what was stored when it was read."""

    cursor: Cursor
    owner: str | None
    data: bytes
    stored: int | None
    """The stored version in the same statement; `None` without a stored task."""

    @property
    def is_of_earlier_incarnation(self) -> bool:
        """Whether the log is ahead of the store here, as only a deleted task leaves it."""
        return self.stored is None or self.cursor.version > self.stored


class Rows(NamedTuple):
    """What was read behind a cursor, in log order."""

    rows: list[Row]
    more: bool
    """Whether the log may hold more: the page is limited in rows and in bytes."""


class EventLog:
    """Reads one pair of event and version tables. The engine stays its giver's."""

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
        self._create_table = create_table
        self._prepared = self._advised = self._pooled = False
        self.schema = Schema(engine, events, versions)
        self._events, self._versions = self.schema.events, self.schema.versions
        v = self._versions.c
        self._stored = select(v.task_id, v.owner, v.version).where(
            _among(v.task_id, engine.dialect.name)
        )
        self._states = None
        if tasks is not None:
            known = table_of('tasks', tasks)
            t = known.c
            self._states = (
                select(t.id, t.status['state'].as_string(), v.version)
                .select_from(known.outerjoin(self._versions, v.task_id == t.id))
                .where(_among(t.id, engine.dialect.name))
            )
        e = self._events.c
        stored_version = select(v.version).where(v.task_id == bindparam('task_id'))
        self._earlier_life = select(func.max(e.seq)).where(
            e.task_id == bindparam('task_id'),
            e.task_version > func.coalesce(stored_version.scalar_subquery(), 0),
        )
        first = e.task_version == 1
        own = and_(e.task_version == bindparam('version'), e.seq == bindparam('seq'))
        self._recreated = select(
            func.count(case((first, 1))),
            func.max(case((first, e.seq))),
            func.max(e.task_version),
            func.count(case((own, 1))),
            stored_version.scalar_subquery(),
        ).where(e.task_id == bindparam('task_id'))
        self._large = select(e.seq, e.event_data).where(
            e.seq.in_(bindparam('large', expanding=True))
        )
        self._statements: dict[int, CompoundSelect[Any] | Select[Any]] = {}

    @property
    def table(self) -> str:
        """The name of the event table."""
        return self._events.name

    @asynccontextmanager
    async def connect(self, timeout: float = ROUND_TIMEOUT) -> AsyncIterator[AsyncConnection]:
        """One pooled connection for one round.

        After `timeout` seconds it counts as lost and is aborted: any statement, also the
        one that ends a transaction, then raises, and SQLAlchemy renews the pool.
        """
        async with AsyncExitStack() as stack:
            timers = stack.enter_context(ExitStack())
            entering = stack.enter_async_context(self.engine.connect())
            if self.engine.dialect.name == 'sqlite':
                # A file has no wire, and a lock on it has a limit of its own.
                yield await entering
                return
            connection = await in_time(entering, timeout)
            timer = asyncio.get_running_loop().call_later(timeout, abort_connection(connection))
            timers.callback(timer.cancel)
            try:
                if (
                    connection.dialect.name == 'postgresql'
                    and not self._pooled
                    # Not known while another connection, the engine's first, is being set up.
                    and hasattr(connection.dialect, 'default_isolation_level')
                    # Switching would roll back what the user's hooks have set.
                    and not has_hooks(self.engine)
                ):
                    # Reads of single statements need no transaction, nor its round trips.
                    connection = await connection.execution_options(isolation_level='AUTOCOMMIT')
                yield connection
            except DBAPIError as error:
                if prepared_elsewhere(error):
                    # In a transaction it stays with one server connection.
                    self._pooled = True
                raise

    async def prepare(self) -> None:
        """Creates the tables if they are missing and it may, the index with them."""
        if self._prepared:
            return
        if self._create_table and not await self._is_there():
            try:
                await self.schema.create()
            except Exception:
                # Another replica may have been quicker.
                if not await self._is_there():
                    raise
        self._prepared = True

    async def _is_there(self) -> bool:
        async with self.connect() as connection:
            return await self.schema.is_there(connection)

    async def advise(self) -> None:
        """Names a missing index, once. Never raises: it is only advice."""
        if self._advised:
            return
        try:
            async with self.connect() as connection:
                indexed = await self.schema.is_indexed(connection)
        except Exception:
            logger.debug('Whether %s has an index is not known', self.table, exc_info=True)
        else:
            if not indexed:
                self.schema.advise()
        self._advised = True

    async def stored(
        self, connection: AsyncConnection, task_ids: Collection[str]
    ) -> dict[str, Stored]:
        """The stored owner and version of each task that is there.

        One statement for `TASKS_PER_STATEMENT` tasks.
        """
        return {
            task_id: Stored(owner, version)
            for task_id, owner, version in await self._of(self._stored, connection, task_ids)
        }

    async def states(
        self, connection: AsyncConnection, task_ids: Collection[str]
    ) -> dict[str, tuple[TaskState | None, int]] | None:
        """The stored state and version of each task that has a row, versioned or not.

        `None` where no task table is known. A state is `None` in rows of the protocol's
        older versions, which name states otherwise.
        """
        if self._states is None:
            return None
        return {
            task_id: (_STATES.get(state), version or 0)
            for task_id, state, version in await self._of(self._states, connection, task_ids)
        }

    async def _of(
        self, statement: Select[Any], connection: AsyncConnection, task_ids: Collection[str]
    ) -> list[Any]:
        rows: list[Any] = []
        for ids in _chunks(task_ids, TASKS_PER_STATEMENT):
            value = json.dumps(ids) if connection.dialect.name == 'sqlite' else ids
            rows += await connection.execute(statement, {'ids': value})
        return rows

    async def pages(
        self, connection: AsyncConnection, wanted: Sequence[Page], limit: int
    ) -> list[Rows]:
        """At most `limit` rows and some MiB behind each cursor, but at least one row.

        One seek in the index for each page, whatever lies before its cursor.
        """
        answer: list[Rows] = []
        inline = min(_INLINE_BYTES, _INLINE_PAGE_BYTES // limit)
        for pages in _chunks(wanted, PAGES_PER_STATEMENT):
            values: dict[str, object] = {'limit': limit, 'inline': inline}
            for number, page in enumerate(pages):
                values[f'task_{number}'] = page.task_id
                values[f'version_{number}'], values[f'seq_{number}'] = page.after
                values[f'min_seq_{number}'] = page.min_seq
            found: list[list[Row]] = [[] for _ in pages]
            counts, more = [0] * len(pages), [False] * len(pages)
            left = [PAGE_BYTES // len(pages)] * len(pages)
            large: list[int] = []
            for (
                number,
                task_id,
                version,
                seq,
                owner,
                data,
                size,
                stored,
            ) in await connection.execute(self._pages(len(pages)), values):
                counts[number] += 1
                if data is None:
                    left[number] -= size
                if left[number] < 0 and found[number]:
                    more[number] = True
                # MySQL compares loosely: letter case and trailing blanks. SQLite's columns hold
                # values of any type; a row without a place in the order is no row.
                elif task_id == pages[number].task_id and isinstance(version, int):
                    found[number].append(Row(Cursor(version, seq), owner, data, stored))
                    if data is None:
                        large.append(seq)
            if large:
                read = await connection.execute(self._large, {'large': large})
                events: dict[int, bytes] = dict(read.all())
                found = [_with_data(rows, events) for rows in found]
            answer += [
                Rows(rows, more=cut or count == limit)
                for rows, cut, count in zip(found, more, counts, strict=True)
            ]
        return answer

    async def end_of_earlier_incarnation(self, connection: AsyncConnection, task_id: str) -> int:
        """The highest `seq` that an earlier incarnation of the task left behind the stored version.

        Log and store are compared in one statement: between two, an event of this life
        could slip in.
        """
        return (await connection.execute(self._earlier_life, {'task_id': task_id})).scalar() or 0

    async def recreated(self, connection: AsyncConnection, task_id: str, after: Cursor) -> bool:
        """Whether the log proves that a task was recreated since a cursor.

        The first row of a later incarnation, or a row that the store would have lost with
        the versions it lost. Behind a snapshot, whose row is not known, any such row.
        """
        version, seq = after
        firsts, last_first, highest, own, stored = (
            await connection.execute(
                self._recreated, {'task_id': task_id, 'version': version, 'seq': seq}
            )
        ).one()
        if seq == _BEHIND_ALL_ROWS:
            return firsts > 1 or (highest or 0) > (stored or version)
        return (last_first or 0) > seq or bool(own and stored and stored < version)

    def _pages(self, count: int) -> CompoundSelect[Any] | Select[Any]:
        if count not in self._statements:
            pages = [select(self._page(number).subquery()) for number in range(count)]
            self._statements[count] = (
                union_all(*pages).order_by('page', 'task_version', 'seq')
                if count > 1
                else self._page(0)
            )
        return self._statements[count]

    def _page(self, number: int) -> Select[Any]:
        c, v = self._events.c, self._versions.c
        task_id = bindparam(f'task_{number}', type_=String)
        version = bindparam(f'version_{number}', type_=BigInteger)
        stored = select(v.version).where(v.task_id == task_id).scalar_subquery()
        # A task that was recreated has a first row again; what was logged before it is another's.
        first = self._events.alias('first').c
        lives = select(
            case((func.min(first.seq) < func.max(first.seq), func.max(first.seq)), else_=0)
        ).where(first.task_id == task_id, first.task_version == 1)
        octets = func.length if self.engine.dialect.name == 'sqlite' else func.octet_length
        size = octets(c.event_data)
        return (
            select(
                literal(number, literal_execute=True).label('page'),
                c.task_id,
                c.task_version,
                c.seq,
                c.owner,
                case((size <= bindparam('inline', type_=Integer), c.event_data)).label(
                    'event_data'
                ),
                size.label('size'),
                stored.label('stored'),
            )
            .where(
                c.task_id == task_id,
                c.seq > bindparam(f'min_seq_{number}', type_=BigInteger),
                c.seq >= lives.scalar_subquery(),
                # The first term is what the index seeks; the second leaves out what was read.
                c.task_version >= version,
                or_(
                    c.task_version > version,
                    c.seq > bindparam(f'seq_{number}', type_=BigInteger),
                ),
            )
            .order_by(c.task_version, c.seq)
            .limit(bindparam('limit', type_=Integer))
        )


def is_valid_task_id(task_id: str) -> bool:
    """Whether a database can look for an id: none takes half a surrogate, PostgreSQL no NUL."""
    return '\0' not in task_id and task_id.encode(errors='ignore').decode() == task_id


def _with_data(rows: list[Row], events: dict[int, bytes]) -> list[Row]:
    """The rows with the events that were read by themselves; one that is gone ends them."""
    complete: list[Row] = []
    for row in rows:
        data: bytes | None = events.get(row.cursor.seq, row.data)
        if data is None:
            break
        complete.append(row._replace(data=data))
    return complete


def _among(task_id: ColumnElement[str], dialect: str) -> ColumnElement[bool]:
    """Membership in the parameter `ids`, one parameter where the database can."""
    if dialect == 'postgresql':
        return task_id == any_(bindparam('ids', type_=postgresql.ARRAY(String)))
    if dialect == 'sqlite':
        return task_id.in_(select(func.json_each(bindparam('ids')).table_valued('value').c.value))
    return task_id.in_(bindparam('ids', expanding=True))


def _chunks(items: Collection[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
