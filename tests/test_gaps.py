"""What the log does not tell: gaps, deleted and recreated tasks, other owners."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from a2a.server.cluster import TaskVersion
from a2a.utils.errors import TaskNotFoundError
from sqlalchemy.ext.asyncio import create_async_engine

from cluster_subscribe import Settings, SharedTailEventStream, sdk
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.event_log.rows import Cursor, Stored
from cluster_subscribe.event_log.subscriber import Subscriber
from tests.support.waiting import BACKSTOP, eventually
from tests.support.writer import Writer, take


async def test_a_write_that_was_not_logged_makes_the_stream_reconcile(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    subscriber = tail.open('task', version, 'user')
    version = await writer.say('a', logged=False)
    assert await take(subscriber) == ['reconcile']
    stored = await writer.store.get('task', caller())
    assert stored is not None
    assert stored.version == version
    subscriber.restart(stored)
    await writer.say('b')
    assert await take(subscriber) == ['art b']
    subscriber.close()


async def test_rows_behind_a_gap_wait_until_the_stream_has_reconciled(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    await writer.say('a')
    await writer.say('b', logged=False)
    await writer.say('c')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber, 2) == ['art a', 'reconcile']
    subscriber.close()


async def test_a_log_pruned_behind_a_stream_makes_it_reconcile(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    version = await writer.begin()
    await writer.say('a', 'b', 'c')
    await writer.execute('DELETE FROM task_events WHERE task_version < 4')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber) == ['reconcile']
    subscriber.close()


async def reconcile(writer: Writer, subscriber: Subscriber, user: str = 'user') -> None:
    """Reconciles as a stream does."""
    assert await take(subscriber) == ['reconcile']
    stored = await writer.store.get('task', caller(user))
    if stored is None or not await sdk.is_exact_match(writer.store, 'task', caller(user), user):
        raise TaskNotFoundError
    await subscriber.compare(stored.version, user)


async def test_a_deleted_task_ends_its_stream(writer: Writer, tail: SharedTailEventStream) -> None:
    await writer.begin()
    subscriber = tail.open('task', await writer.say('a'), 'user')
    await writer.store.delete('task', caller())
    with pytest.raises(TaskNotFoundError):
        await reconcile(writer, subscriber)
    subscriber.close()


@pytest.mark.parametrize('seen', [{0}, {1}, {0, 1}, {0, 1, 2, 3}])
async def test_a_slow_stream_of_a_deleted_task_does_not_take_the_next_for_its_own(
    writer: Writer, seen: set[int]
) -> None:
    """Wherever the reader saw it: deleted, recreated, or as far as the stream was."""
    engine = create_async_engine(writer.engine.url)
    tail = SharedTailEventStream(engine, settings=Settings(poll_interval=1000, wakeup='poll'))
    subscriber = tail.open('task', await writer.begin(), 'user')
    await writer.say('a')
    tail.wake('task', 'publish')
    await eventually(lambda: subscriber.cursor.version == 2)
    steps: list[Callable[[], Awaitable[object]]] = [
        partial(writer.store.delete, 'task', caller()),
        writer.begin,
        *(partial(writer.say, text) for text in 'bcd'),
    ]
    try:
        for number, step in enumerate(steps):
            await step()
            if number in seen:
                await tail._reader._round({}, check=True, timeout=BACKSTOP)
        assert subscriber.suspended
        assert await take(subscriber) == ['art a']
        with pytest.raises(TaskNotFoundError):
            await reconcile(writer, subscriber)
    finally:
        subscriber.close()
        await tail.aclose()
        await engine.dispose()


class StillReader:
    """What a subscriber asks of its reader, without a database."""

    page_size = 1

    def __init__(self) -> None:
        self.isolated = False

    def schedule_read(self, task_id: str) -> None: ...

    def leave(self, subscriber: Subscriber) -> None: ...

    def isolate(self, subscriber: Subscriber, reason: str) -> None:
        self.isolated = True

    async def current(self, task_id: str) -> None:
        return None

    async def recreated(self, task_id: str, after: Cursor) -> bool:
        return False


@pytest.mark.parametrize('restarts', [False, True])
async def test_what_is_seen_while_a_stream_reconciles_makes_it_reconcile_once_more(
    restarts: bool,
) -> None:
    """The read that has begun may have been answered before."""
    reader = StillReader()
    subscriber = Subscriber('task', 'user', Cursor.end_of(2), reader, strict=True)
    subscriber.suspend(Stored('user', 1))
    assert await take(subscriber) == ['reconcile']
    subscriber.suspend(None)
    await subscriber.compare(TaskVersion(2), 'user')
    if restarts:
        subscriber.continue_after(2)
    assert subscriber.suspended
    assert not reader.isolated
    # The same once more says nothing new, and a slow read would never be the last.
    assert await take(subscriber) == ['reconcile']
    subscriber.suspend(None)
    await subscriber.compare(TaskVersion(2), 'user')
    assert not subscriber.suspended
    assert reader.isolated


async def test_a_slow_stream_reads_on_before_it_reconciles(writer: Writer) -> None:
    engine = create_async_engine(writer.engine.url)
    tail = SharedTailEventStream(
        engine, settings=Settings(poll_interval=0.05, max_buffered_events=1)
    )
    subscriber = tail.open('task', await writer.begin(), 'user')
    await writer.say('a')
    await eventually(lambda: subscriber.log_has_more)
    subscriber.request_reconcile()
    await writer.say('b')
    assert await take(subscriber, 2) == ['art a', 'art b']
    subscriber.close()
    await tail.aclose()
    await engine.dispose()


async def test_a_stream_of_the_first_incarnation_sees_the_second(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    subscriber = tail.open('task', await writer.say('a', 'b', 'c'), 'user')
    await writer.store.delete('task', caller())
    await writer.begin()
    with pytest.raises(TaskNotFoundError):
        await reconcile(writer, subscriber)
    subscriber.close()


async def test_an_earlier_incarnation_that_the_new_one_has_overtaken_is_not_delivered(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    await writer.say('a', 'b')
    await writer.store.delete('task', caller())
    version = await writer.begin()
    await writer.say('c', 'd', 'e')
    subscriber = tail.open('task', version, 'user')
    assert await take(subscriber, 3) == ['art c', 'art d', 'art e']
    subscriber.close()


async def test_an_earlier_incarnation_without_a_first_row_is_not_delivered(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin()
    await writer.say('old 2', 'old 3', 'old 4')
    # An incarnation whose first row is missing is known by its versions alone.
    await writer.execute('DELETE FROM task_events WHERE task_version = 1')
    await writer.store.delete('task', caller())
    subscriber = tail.open('task', await writer.begin(), 'user')
    await eventually(lambda: subscriber.min_seq)
    for number in range(2, 7):
        await writer.say(f'new {number}')
        assert await take(subscriber) == [f'art new {number}']
    subscriber.close()


async def test_rows_of_another_owner_are_never_delivered(
    writer: Writer, tail: SharedTailEventStream
) -> None:
    await writer.begin(user='one')
    await writer.say('secret', user='one')
    await writer.store.delete('task', caller('one'))
    version = await writer.begin(user='Other')
    thief = tail.open('task', version, 'other')
    owner = tail.open('task', version, 'Other')
    await writer.say('mine', user='Other')
    assert await take(owner) == ['art mine']
    with pytest.raises(TaskNotFoundError):
        await reconcile(writer, thief, 'other')
    owner.close()
    thief.close()
