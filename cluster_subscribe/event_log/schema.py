"""The tables of the event log: the SDK's own, in whatever schema its engine finds them."""

import logging

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, cast

from a2a.server.models import (
    Base,
    create_task_event_model,
    create_task_model,
    create_task_version_model,
)
from sqlalchemy import Connection, Dialect, Index, Table, inspect
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.orm import DeclarativeBase

from cluster_subscribe.engines import qualified_name
from cluster_subscribe.telemetry import Once

logger = logging.getLogger(__name__)

_MAKE: Final = {
    'events': create_task_event_model,
    'versions': create_task_version_model,
    'tasks': create_task_model,
}
_once = Once()


class Schema:
    """The event and version tables as one engine finds them.

    Args:
        engine: The engine of the database.
        connect: Opens a connection to it, with a timeout.
        events: The event table, or its name.
        versions: The version table, or its name.
        create_table: Whether missing tables may be created.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        events: str | Table,
        versions: str | Table,
        *,
        create_table: bool,
    ) -> None:
        self._engine = engine
        self._connect = connect
        self._create_table = create_table
        self._prepared = self._advised = False
        self.events = table_of('events', events)
        self.versions = table_of('versions', versions)
        self.index = _index(self.events)

    async def prepare(self) -> None:
        """Creates the tables, with the index, if they are missing and may be created."""
        if self._prepared:
            return
        if self._create_table and not await self._is_there():
            try:
                await self._create()
            except Exception:
                # Another replica may have been quicker.
                if not await self._is_there():
                    raise
        self._prepared = True

    async def _is_there(self) -> bool:
        def inspect_(sync: Connection) -> bool:
            return inspect(sync).has_table(
                self.events.name, schema=sync.schema_for_object(self.events)
            )

        async with self._connect() as connection:
            return await connection.run_sync(inspect_)

    async def _create(self) -> None:
        async with self._engine.begin() as connection:
            for table in (self.events, self.versions):
                await connection.run_sync(table.metadata.create_all, tables=[table])

    async def advise(self) -> None:
        """Logs the statement that builds a missing index, once. Never raises.

        Building it under a running cluster is for the operator, with a statement that
        does not block writers.
        """
        if self._advised:
            return
        try:
            async with self._connect() as connection:
                indexed = await self.is_indexed(connection)
        except Exception:
            logger.debug('Whether %s has an index is not known', self.events.name, exc_info=True)
        else:
            if not indexed:
                self._warn_of_missing_index()
        self._advised = True

    async def is_indexed(self, connection: AsyncConnection) -> bool:
        """Whether an index begins with the columns that the log is read by."""
        wanted = [column.name for column in self.index.columns][:2]

        def inspect_(sync: Connection) -> bool:
            indexes = inspect(sync).get_indexes(
                self.events.name, schema=sync.schema_for_object(self.events)
            )
            return any(index['column_names'][:2] == wanted for index in indexes)

        return await connection.run_sync(inspect_)

    def _warn_of_missing_index(self) -> None:
        schema, name = qualified_name(self._engine, self.events)
        if _once(str(self._engine.url), schema, name):
            logger.warning(
                'Reading the log of a task with many events is slow without an index on it: %s',
                index_statement(self.index, self._engine.dialect, schema),
            )


def table_of(kind: str, table: str | Table) -> Table:
    """A table of the SDK's: the one that its models have under this name, if there is one.

    Args:
        kind: `events`, `versions` or `tasks`.
        table: Its name, or the table itself.
    """
    if isinstance(table, Table):
        return table
    if table in Base.metadata.tables:
        return Base.metadata.tables[table]

    # With its own base class: the SDK's refuses a second model for one table name.
    class _Base(DeclarativeBase):
        pass

    _MAKE[kind](table, _Base)
    return _Base.metadata.tables[table]


def index_statement(index: Index, dialect: Dialect, schema: str | None) -> str:
    """The statement that builds the index without stopping writers."""
    quote: Any = dialect.identifier_preparer.quote
    name = quote(index.name)
    table = bare = quote(cast('Table', index.table).name)
    if schema is not None:
        table = f'{quote(schema)}.{bare}'
    columns = ', '.join(quote(column.name) for column in index.columns)
    if dialect.name == 'postgresql':
        return f'CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {table} ({columns})'
    if dialect.name in ('mysql', 'mariadb'):
        return f'ALTER TABLE {table} ADD INDEX {name} ({columns}), ALGORITHM=INPLACE, LOCK=NONE'
    if schema is not None:
        # In SQLite the schema stands before the index, and the table is in the same one.
        name = f'{quote(schema)}.{name}'
    return f'CREATE INDEX IF NOT EXISTS {name} ON {bare} ({columns})'


def _index(events: Table) -> Index:
    name = f'ix_{events.name}_cursor'[:63]
    for index in events.indexes:
        if index.name == name:
            return index
    # Whoever creates the SDK's table creates the index with it.
    return Index(name, events.c.task_id, events.c.task_version, events.c.seq)
