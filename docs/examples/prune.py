"""Removes rows of the event log that no stream will read again. Run it from cron.

    DATABASE_URL=postgresql+asyncpg://... python prune.py

It deletes a few thousand rows at a time, each batch in a transaction of its own, so
that no agent waits for it.
"""

import asyncio
import os

from datetime import datetime, timedelta, timezone

from a2a.server.models import TaskEventModel, TaskModel, TaskVersionModel
from sqlalchemy import and_, delete, or_, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

ENDED = [f'TASK_STATE_{name}' for name in ('COMPLETED', 'CANCELED', 'FAILED', 'REJECTED')]


async def prune(
    engine: AsyncEngine,
    *,
    ended_for: timedelta = timedelta(days=1),
    keep: int = 10_000,
    batch: int = 5_000,
) -> int:
    """Removes what is old.

    Args:
        engine: The database of the task store.
        ended_for: How long ago a task must have ended for its rows to go. Rows of deleted
            tasks go at once.
        keep: How many versions of a task that has not ended keep their rows. A client
            that has fallen further behind gets the task as stored instead.
        batch: Rows in one transaction.

    Returns:
        How many rows are gone.
    """
    event, task, version = TaskEventModel, TaskModel, TaskVersionModel
    long_ago = datetime.now(timezone.utc).replace(tzinfo=None) - ended_for
    old = (
        select(event.seq)
        .outerjoin(task, task.id == event.task_id)
        .outerjoin(version, version.task_id == event.task_id)
        .where(
            or_(
                task.id.is_(None),
                and_(
                    task.status['state'].as_string().in_(ENDED),
                    task.last_updated < long_ago,
                ),
                event.task_version <= version.version - keep,
            )
        )
        .limit(batch)
    )
    removed = 0
    while True:
        async with engine.begin() as connection:
            rows = (await connection.scalars(old)).all()
            if not rows:
                return removed
            await connection.execute(delete(event).where(event.seq.in_(rows)))
            removed += len(rows)


async def main() -> None:
    """Prunes the log of one database."""
    engine = create_async_engine(os.environ['DATABASE_URL'])
    print(f'{await prune(engine)} rows removed')  # noqa: T201 - a program
    await engine.dispose()


if __name__ == '__main__':
    asyncio.run(main())
