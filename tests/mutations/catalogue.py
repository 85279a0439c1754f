"""What is replaced in the package, and who has to miss it."""

import asyncio

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from a2a.server.cluster import TaskVersion
from a2a.server.events import Event
from a2a.types import StreamResponse, TaskState
from sqlalchemy import literal, or_

from cluster_subscribe import sdk
from cluster_subscribe.event_log.rows import MAX_SEQ
from cluster_subscribe.local_state import is_superseded
from cluster_subscribe.settings import CloseOn
from cluster_subscribe.subscription.rules import state_of
from tests.mutations.seams import MODEL, Mutation, Patch

_NO_ECHO: Final = (
    'test_wakeups.py::'
    'test_a_channel_that_carries_nothing_is_left_alone_for_a_while_with_one_warning'
)
_SPOILT: Final = 'test_fuzz.py::test_spoilt_rows_make_their_own_streams_reconcile_and_no_other'


def _always(value: object) -> Callable[[Any], Any]:
    """Whatever it is asked, it answers this."""
    return lambda _: lambda *_args, **_how: value


def _always_async(value: object) -> Callable[[Any], Any]:
    def make(_: Any) -> Any:
        async def answer(*_args: object, **_how: object) -> object:
            return value

        return answer

    return make


def _shifted(by: int) -> Callable[[Any], Any]:
    """Opens a subscription behind another version."""

    def make(opens: Any) -> Any:
        def opened(self: Any, task_id: str, after: TaskVersion, *rest: Any, **how: Any) -> Any:
            version = TaskVersion(sdk.version_number(after) + by)
            return opens(self, task_id, version, *rest, **how)

        return opened

    return make


def _from_the_start(deliver: Any) -> Any:
    def delivered(self: Any, versioned: Any) -> Any:
        self._start = TaskVersion.MISSING
        return deliver(self, versioned)

    return delivered


def _ends_with(changed: Callable[[Any, Event], None]) -> Callable[[Any], Any]:
    """Changes what `StreamState.ends_with()` has concluded of a pause."""

    def make(ends_with: Any) -> Any:
        def ended(self: Any, event: Event) -> bool:
            ends: bool = ends_with(self, event)
            changed(self, event)
            return ends

        return ended

    return make


def _never_pauses(state: Any, _: Event) -> None:
    state.paused = False


def _pauses_at_auth(state: Any, event: Event) -> None:
    if state._close_on is CloseOn.INTERRUPTED:
        state.paused |= state_of(event) == TaskState.TASK_STATE_AUTH_REQUIRED


def _pauses_always(state: Any, event: Event) -> None:
    state.paused = state_of(event) == TaskState.TASK_STATE_INPUT_REQUIRED


def _swallows_cancellation(follow: Any) -> Any:
    async def followed(*args: Any, **how: Any) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(follow(*args, **how)) as events:
                async for event in events:
                    yield event
        except asyncio.CancelledError:
            return

    return followed


def _waits_for_ever(_: Any) -> Any:
    async def wait(self: Any, due: float) -> None:
        await self._wake_event.within(1e9)

    return wait


def _forgets_wakeups(read_round: Any) -> Any:
    async def played(self: Any, dirty: dict[str, None], **how: Any) -> None:
        await read_round(self, dirty, **how)
        self._check_due = False
        self._wake_event.clear()
        self._dirty_tasks = {}

    return played


def _joiners_too(_: Any) -> Any:
    def receivers(self: Any, page: Any, planned: Any) -> Any:
        return [
            subscriber
            for subscriber in list(self._watched.of(page.task_id))
            if subscriber.page == page or subscriber not in planned
        ]

    return receivers


def _never_ahead(compare_versions: Any) -> Any:
    async def compared(self: Any, connection: Any) -> Any:
        return dict.fromkeys(await compare_versions(self, connection), -1)

    return compared


def _forgets_mismatches(compare_states: Any) -> Any:
    async def compared(self: Any, connection: Any) -> None:
        self._mismatches = {}
        await compare_states(self, connection)

    return compared


def _skips_what_has_no_room(feed: Any) -> Any:
    def fed(self: Any, rows: Any, decode: Any, *, more: bool) -> None:
        feed(self, rows, decode, more=more)
        if rows and self.log_has_more:
            self.cursor = rows[-1].cursor

    return fed


def _by_seq(_: Any) -> Any:
    def after(events: Any, version: Any, seq: Any) -> Any:
        c = events.c
        return (or_((seq == MAX_SEQ) & (c.task_version > version), c.seq > seq),)

    return after


def _page_by_seq(page: Any) -> Any:
    return lambda events, *rest: page(events, *rest).order_by(None).order_by(events.c.seq)


def _pages_by_seq(pages: Any) -> Any:
    def ordered(events: Any, versions: Any, dialect: str, count: int) -> Any:
        statement = pages(events, versions, dialect, count)
        return statement.order_by(None).order_by('page', 'seq') if count > 1 else statement

    return ordered


def _overtaken_though_used(_: Any) -> Any:
    def overtaken(local: Any, stored: Any, turns: Any) -> bool:
        return is_superseded(local, stored) and turns is not None and not turns.may_write(local)

    return overtaken


def _requests_not_counted(evict: Any) -> Any:
    def evicted(self: Any, local: Any, stored: Any) -> bool:
        counted, self._active_requests = self._active_requests, Counter()
        try:
            done: bool = evict(self, local, stored)
            return done
        finally:
            self._active_requests = counted

    return evicted


def _cancels_once(_: Any) -> Any:
    async def in_time(work: Awaitable[Any], seconds: float | None = None) -> Any:
        task = asyncio.current_task()
        assert task is not None
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(30 if seconds is None else seconds, give_up)
        try:
            return await work
        except asyncio.CancelledError:
            if not late:
                raise
            raise TimeoutError from None
        finally:
            timer.cancel()

    return in_time


def _without_timeout(_: Any) -> Any:
    async def in_time(work: Awaitable[Any], seconds: float | None = None) -> Any:
        return await work

    return in_time


def _answers_whenever(_: Any) -> Any:
    async def answer(self: Any, task: asyncio.Task[Any]) -> Any:
        await asyncio.wait({task})
        return task.result()

    return answer


def _runs_once(_: Any) -> Any:
    async def run(self: Any, source: Any) -> None:
        try:
            await source.run(self._wake, self._wanted)
        except OSError:
            return

    return run


def _sends_and_believes(_: Any) -> Any:
    async def hears(self: Any, raw: Any, probe: str, arrived: Any) -> bool:
        await self._send(raw, probe)
        return True

    return hears


def _tries_at_once(_: Any) -> Any:
    async def run(self: Any, wake: Any, wanted: Any) -> None:
        if not await self._listen(wake, wanted):
            self._unreachable = True
            self._pending.clear()

    return run


def _sees_no_pooler(may_autocommit: Any) -> Any:
    def may(self: Any, connection: Any) -> bool:
        self._behind_pooler = False
        allowed: bool = may_autocommit(self, connection)
        return allowed

    return may


def _reads_here(_: Any) -> Any:
    async def read(self: Any, task_id: str, context: Any, variables: Any = None) -> Any:
        return await self._read(task_id, context)

    return read


def _decodes_blindly(_: Any) -> Any:
    def event(self: Any, row: Any) -> Any:
        response = StreamResponse.FromString(row.data)
        kind = response.WhichOneof('payload')
        return getattr(response, kind) if kind else None

    return event


def _says_it_each_time(init: Any) -> Any:
    def made(self: Any, once: Any) -> None:
        init(self, lambda *_: True)

    return made


def _mutation(what: str, patches: dict[str, Callable[[Any], Any]], *missed_by: str) -> Mutation:
    return Mutation(what, tuple(Patch(*patch) for patch in patches.items()), missed_by)


_OPEN: Final = 'event_log.stream:SharedTailEventStream.open'

MUTATIONS: Final = (
    # What a stream delivers.
    _mutation(
        'the version filter is off by one: the last event again',
        {_OPEN: _shifted(-1), 'subscription.rules:StreamState.deliver': _from_the_start},
        MODEL,
        'test_rules.py::test_what_is_delivered',
    ),
    _mutation(
        'the version filter is off by one: the next event left out', {_OPEN: _shifted(1)}, MODEL
    ),
    _mutation(
        'the cursor is `seq`',
        {
            'event_log.statements:_after': _by_seq,
            'event_log.statements:_page': _page_by_seq,
            'event_log.statements:pages': _pages_by_seq,
        },
        MODEL,
    ),
    _mutation(
        'the record of an appended message is delivered, or closes',
        {'subscription.rules:StreamState._records_a_message': _always(False)},
        MODEL,
        'test_rules.py::test_what_is_delivered',
    ),
    _mutation(
        'a gap in the versions is passed over',
        {'event_log.subscriber:Subscriber._misses_before': _always(False)},
        MODEL,
    ),
    _mutation(
        'the rows of an earlier incarnation are delivered',
        {
            'event_log.statements:_incarnation_start': lambda _: lambda *_: literal(0),
            'event_log.rows:Row.is_of_earlier_incarnation': _always(False),
        },
        MODEL,
    ),
    _mutation(
        'what a slow reader has no room for is lost',
        {'event_log.subscriber:Subscriber.feed': _skips_what_has_no_room},
        MODEL,
    ),
    _mutation(
        'a joiner is fed in the middle of a round',
        {'event_log.reader:Reader._receivers': _joiners_too},
        MODEL,
    ),
    # When it ends.
    _mutation(
        'a stream ends at a question that has been answered',
        {'subscription.follow:_is_current': _always_async(True)},
        MODEL,
    ),
    _mutation(
        'a stream never ends at a question',
        {'subscription.rules:StreamState.ends_with': _ends_with(_never_pauses)},
        MODEL,
        'test_rules.py::test_what_ends_a_stream',
    ),
    _mutation(
        'a stream ends at AUTH_REQUIRED',
        {'subscription.rules:StreamState.ends_with': _ends_with(_pauses_at_auth)},
        MODEL,
        'test_rules.py::test_what_ends_a_stream',
    ),
    _mutation(
        'close_on=terminal is ignored',
        {'subscription.rules:StreamState.ends_with': _ends_with(_pauses_always)},
        MODEL,
        'test_rules.py::test_what_ends_a_stream',
    ),
    _mutation(
        'a cancellation is swallowed', {'subscription.follow:follow': _swallows_cancellation}, MODEL
    ),
    _mutation(
        'closing ends no stream',
        {'event_log.reader:Reader.fail': _always(None)},
        'test_delivery.py::test_closing_ends_every_stream_with_an_error',
    ),
    _mutation(
        'a reader does not end when it is asked to',
        {'event_log.reader:Reader._wanted': _always(True)},
        'test_processes.py::test_a_server_with_open_streams_stops_soon_and_without_noise',
    ),
    # Comparing with the store.
    _mutation(
        'a store that is ahead of its log goes unnoticed',
        {'event_log.reconcile:Reconciler.compare_versions': _never_ahead},
        MODEL,
    ),
    _mutation(
        'a state that was changed under its version goes unnoticed',
        {'event_log.reconcile:Reconciler.compare_states': _forgets_mismatches},
        MODEL,
    ),
    _mutation(
        'a deletion goes unnoticed',
        {'event_log.subscriber:Subscriber.suspend': _always(None)},
        MODEL,
    ),
    _mutation(
        'a comparison that failed is not made up for',
        {'event_log.subscriber:Subscriber.reconcile_failed': _always(None)},
        'test_outages.py::test_a_stream_that_failed_to_reconcile_tries_again',
    ),
    _mutation(
        'where the log cannot be right the store is not read',
        {'event_log.subscriber:Subscriber.request_reconcile': _always(None)},
        _SPOILT,
    ),
    # What a replica holds in memory.
    _mutation(
        'streams come from the SDK, not from the shared log',
        {'wrapping:wrap': lambda _: lambda handler, **_: handler},
        'test_processes.py::test_a_rolling_restart',
        'test_processes.py::test_a_killed_replica',
        'test_fuzz.py::test_an_event_that_mysql_has_no_room_for_fails_its_task_on_every_replica',
    ),
    _mutation(
        'a live task is evicted',
        {
            'local_state:_is_overtaken': _overtaken_though_used,
            'local_tasks:LocalTasks.evict': _requests_not_counted,
        },
        MODEL,
        'test_local_state.py::test_what_may_go',
    ),
    _mutation(
        'a cancel writes an old copy of the task',
        {'local_tasks:LocalTasks.drop_stale_copy': _always_async(None)},
        MODEL,
    ),
    # Wakeups and the timer.
    _mutation(
        'there is no timer',
        {'event_log.reader:Reader._wait_until': _waits_for_ever},
        MODEL,
        'test_wakeups.py::test_a_muted_wakeup_costs_only_latency',
        'test_outages.py::test_pgbouncer_in_transaction_mode',
    ),
    _mutation(
        'a wakeup in mid-round is dropped, and only the timer is left',
        {'event_log.reader:Reader._round': _forgets_wakeups},
        MODEL,
    ),
    _mutation(
        'a half-open LISTEN connection is not tested',
        {'event_log.wakeup.postgresql:_test': _always_async(None)},
        'test_outages.py::test_a_listen_connection_that_falls_silent_is_rebuilt',
    ),
    _mutation(
        'a lost LISTEN connection is not replaced',
        {'event_log.wakeup.runner:WakeupRunner._run': _runs_once},
        'test_wakeups.py::test_a_lost_listen_connection_is_rebuilt',
        'test_outages.py::test_a_listen_connection_that_falls_silent_is_rebuilt',
        'test_delivery.py::test_the_stream_survives_its_connections',
    ),
    _mutation(
        'a NOTIFY that does not come back is taken for one that does',
        {'event_log.wakeup.postgresql:PostgresqlWakeup._hears_itself': _sends_and_believes},
        _NO_ECHO,
    ),
    _mutation(
        'a NOTIFY that did not come back is tried again at once',
        {'event_log.wakeup.postgresql:PostgresqlWakeup.run': _tries_at_once},
        _NO_ECHO,
    ),
    # Outages.
    _mutation(
        'a round that failed is not tried again',
        {'event_log.retry:is_final': _always(True)},
        'test_outages.py::test_reset_connections',
        'test_outages.py::test_connections_that_are_reset_in_mid_answer_again_and_again',
        'test_outages.py::test_an_outage_of_hours',
        'test_outages.py::test_half_open_connections',
        'test_outages.py::test_terminated_backends[poll-postgresql]',
        'test_outages.py::test_a_restarted_database',
        'test_outages.py::test_a_locked_sqlite_file',
        'test_delivery.py::test_an_exhausted_pool_delays_and_loses_nothing',
    ),
    _mutation(
        'the pause between two attempts has no limit',
        {'event_log.retry:pause': lambda _: lambda failures: 0.025 * 2.0**failures},
        'test_outages.py::test_an_outage_of_hours',
    ),
    _mutation(
        'a slow database gets no time',
        {'event_log.retry:timeout': _always(0.02)},
        'test_outages.py::test_a_stalled_and_slow_network',
    ),
    _mutation(
        'a half-open connection is not aborted',
        {'event_log.connection:abort_connection': lambda _: lambda _: lambda: None},
        'test_outages.py::test_half_open_connections[postgresql-False]',
        'test_outages.py::test_half_open_connections[mysql-False]',
        'test_outages.py::test_half_open_connections_under_psycopg',
        'test_connections.py::test_a_connection_that_falls_silent_at_the_end_of_a_round[mysql]',
    ),
    _mutation(
        'connecting has no timeout',
        {'event_log.connection:in_time': _without_timeout},
        'test_outages.py::test_half_open_connections[postgresql-True]',
        'test_outages.py::test_half_open_connections[mysql-True]',
    ),
    _mutation(
        'what tidies up after a cancelled query is not cancelled',
        {'waiting:in_time': _cancels_once},
        'test_connections.py::test_what_tidies_up_after_a_cancelled_query_is_cancelled_too',
    ),
    _mutation(
        'whoever waits for an answer waits for ever',
        {'background:Background.answer': _answers_whenever},
        'test_connections.py::test_nobody_waits_for_ever_for_a_half_open_connection',
    ),
    _mutation(
        'behind a pooler, reads do not stay in one transaction',
        {'event_log.connection:Connections._may_autocommit': _sees_no_pooler},
        'test_outages.py::test_pgbouncer_in_transaction_mode',
    ),
    # Subscriptions that leave.
    _mutation(
        'a stream that has ended is still read for',
        {'event_log.subscriber:Subscriber.close': _always(None)},
        MODEL,
        'test_leaks.py::test_in_process_nothing_is_left',
        'test_leaks.py::test_nothing_is_left_of_remote_subscriptions[over_sse-postgresql]',
        'test_leaks.py::test_nothing_is_left_of_remote_subscriptions[over_grpc-postgresql]',
    ),
    _mutation(
        'a query is cancelled with its client',
        {'task_reader:TaskReader.read': _reads_here},
        'test_leaks.py::test_a_client_that_leaves_in_mid_query_costs_no_connection',
    ),
    # Owners.
    _mutation(
        'a task that another owns is taken for the same',
        {'event_log.reconcile:_is_owned': _always(True)},
        'test_owners.py::test_the_event_stream_gives_a_foreigner_no_event_and_no_other_answer',
    ),
    _mutation(
        'rows of another owner are delivered',
        {'event_log.subscriber:Subscriber._is_anothers': _always(False)},
        'test_owners.py::test_who_waits_for_a_task_to_appear_is_not_told_of_anothers',
    ),
    _mutation(
        'ids and owners are compared as the database does',
        {'sdk:is_exact_match': _always_async(True)},
        'test_owners.py::test_a_foreign_subscriber_is_told_what_an_unknown_id_is',
    ),
    # Odd ids, spoilt rows.
    _mutation(
        'an id that no database can look for is looked for',
        {'task_ids:is_valid_task_id': _always(True)},
        'test_fuzz.py::test_an_odd_id_does_not_stop_the_reader',
    ),
    _mutation(
        'a row that is no event stops the reader',
        {'event_log.decoding:Decoder._event': _decodes_blindly},
        _SPOILT,
        'test_fuzz.py::test_no_row_hangs_a_stream_or_disturbs_another',
    ),
    _mutation(
        'a row that is no event is named each time',
        {'event_log.decoding:Decoder.__init__': _says_it_each_time},
        'test_fuzz.py::test_a_row_that_is_no_event_is_named_once_however_often_it_is_read',
    ),
    _mutation(
        'a row without a version is a row',
        {'event_log.queries:_is_version': _always(True)},
        _SPOILT,
    ),
)
