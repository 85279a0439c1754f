"""A connection of the reader whose statement fails, or is never answered."""

import asyncio

import pytest

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import background, waiting
from cluster_subscribe.event_log.queries import EventLog
from cluster_subscribe.event_log.retry import is_final
from tests.support.proxy import proxy

on_a_network = pytest.mark.parametrize('database_url', ['postgresql', 'mysql'], indirect=True)
on_postgresql = pytest.mark.parametrize('database_url', ['postgresql'], indirect=True)


@on_postgresql
@pytest.mark.parametrize('code', ['26000', '42P05'])
async def test_a_statement_that_was_prepared_elsewhere_is_asked_again_in_a_transaction(
    database_url: str, code: str
) -> None:
    """A pooler in transaction mode gave it to another server connection."""
    raised = ProgrammingError('SELECT 1', {}, CodedError(code))
    assert not is_final(raised)
    engine = create_async_engine(database_url)
    log = EventLog(engine, 'task_events', 'task_versions')
    with pytest.raises(ProgrammingError):
        async with log.connect():
            raise raised
    async with log.connect() as connection:
        assert await connection.get_isolation_level() != 'AUTOCOMMIT'
    await engine.dispose()


class CodedError(Exception):
    """What a driver raises."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


@on_a_network
async def test_a_connection_that_falls_silent_at_the_end_of_a_round(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that ends a transaction cannot be cancelled: its connection is aborted."""
    async with proxy(database_url) as relay:
        engine = create_async_engine(relay.url)
        log = EventLog(engine, 'task_events', 'task_versions')
        for _ in range(2):
            # The time is for the round, not for connecting on a busy machine.
            await (await engine.connect()).close()
            try:
                async with log.connect(0.2) as connection:
                    await connection.execute(text('SELECT 1'))
                    relay.swallow()
            except DBAPIError as error:
                assert not is_final(error)  # noqa: PT017 - PostgreSQL has nothing to end
        await engine.dispose()


async def stubborn(end: asyncio.Event) -> None:
    """Cannot be cancelled, as a transaction that ends on a half-open connection."""
    while not end.is_set():
        try:
            await end.wait()
        except asyncio.CancelledError:
            pass


async def test_nobody_waits_for_ever_for_a_half_open_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, '_GRACE', 0.01)
    monkeypatch.setattr(waiting, 'ANSWER_TIMEOUT', 0.01)
    tasks, end = background.Background(), asyncio.Event()
    with pytest.raises(TimeoutError):
        await tasks.run(stubborn(end), 'read')
    await tasks.aclose()
    end.set()


async def test_what_tidies_up_after_a_cancelled_query_is_cancelled_too() -> None:
    never = asyncio.Event()

    async def ask() -> None:
        try:
            await never.wait()
        finally:
            await never.wait()

    with pytest.raises(TimeoutError):
        await waiting.in_time(ask(), 0.01)
