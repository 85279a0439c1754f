"""One stream: the task as stored at version V, then the event log after V.

`rules` decides what is delivered and when the stream ends; here it is waited for. Versions of an
event stream that is not the SDK's are opaque: it is trusted to keep its order, and its events are
only filtered by whether they follow the snapshot.
"""

from collections.abc import AsyncGenerator

from a2a.server.cluster import StoredTask, TaskVersion, VersionedEvent
from a2a.server.events import Event
from a2a.utils.errors import A2AError, TaskNotFoundError

from cluster_subscribe.errors import EventStreamEndedError
from cluster_subscribe.settings import CloseOn
from cluster_subscribe.subscription.feed import Feed, Source
from cluster_subscribe.subscription.rules import Comparison, StreamState, copy_of
from cluster_subscribe.telemetry import Telemetry


async def follow(
    snapshot: StoredTask,
    source: Source,
    close_on: CloseOn,
    telemetry: Telemetry,
) -> AsyncGenerator[Event, None]:
    """Yields the snapshot, then each later event exactly once.

    Args:
        snapshot: The task as stored at the moment of subscribing; not terminal.
        source: The event log and the store.
        close_on: Which events end the stream.
        telemetry: Told of every disagreement between the log and the store.

    Raises:
        TaskNotFoundError: The task was deleted, or deleted and recreated.
        EventStreamEndedError: The event stream ended before the task did.
    """
    state = StreamState(snapshot, close_on)
    event: Event | None
    versioned: VersionedEvent | None
    stored: StoredTask | None

    telemetry.opened()
    try:
        event = copy_of(snapshot.task)
        del snapshot
        telemetry.delivered(event)
        yield event
        feed = source.variables.run(source.open, state.position, state.state)
        try:
            while True:
                # Nothing that was delivered or read is held while waiting.
                event = versioned = stored = None
                if versioned := await feed.next():
                    event = state.deliver(versioned)
                elif stored := await _read_stored(source, feed, state, telemetry):
                    compared = state.compare(stored, comparable=feed.versions_comparable)
                    if compared is Comparison.EQUAL:
                        if state.paused:
                            return
                    elif compared is Comparison.BEHIND or await feed.is_exhausted(stored):
                        telemetry.reconciled(state.task_id, stored.version)
                        event = state.restart(stored)
                        feed.restart(stored)
                if event is None:
                    if feed.ended:
                        raise EventStreamEndedError(
                            f'The event stream of task {state.task_id} ended before the task did'
                        )
                    continue

                telemetry.delivered(event)
                yield event

                if state.ends_with(event):
                    return
                if state.paused and feed.drained:
                    current = await _is_current(source, feed, state, telemetry)
                    if current:
                        return
                    # Where the store does not answer, the next comparison says.
                    state.paused = current is None
        finally:
            feed.close()
    finally:
        telemetry.closed()


async def _read_stored(
    source: Source, feed: Feed, state: StreamState, telemetry: Telemetry
) -> StoredTask | None:
    """The task as stored; `None` if the store does not answer.

    Raises:
        TaskNotFoundError: The task was deleted, or deleted and recreated.
    """
    try:
        owned = await source.read()
        telemetry.reconcile_succeeded()
        if owned and (
            state.compare(owned.stored, comparable=feed.versions_comparable)
            is not Comparison.ANOTHER
        ):
            await feed.compare(owned.stored.version, owned.owner, state.position)
            return owned.stored
    except A2AError:
        raise
    except Exception as error:  # noqa: BLE001 - delays the comparison, loses nothing
        telemetry.reconcile_failed(state.task_id, error)
        feed.reconcile_failed()
        return None
    raise TaskNotFoundError(f'Task {state.task_id} was deleted')


async def _is_current(
    source: Source, feed: Feed, state: StreamState, telemetry: Telemetry
) -> bool | None:
    """Whether the stream has delivered all that is stored; `None` if the store does not answer."""
    try:
        current = await feed.current()
    except A2AError:
        raise
    except Exception:  # noqa: BLE001 - reading the store says so if it fails as well
        current = None
    if current is not None:
        return state.is_at(TaskVersion(current.version), current.state)
    stored = await _read_stored(source, feed, state, telemetry)
    if stored is None:
        return None
    compared = state.compare(stored, comparable=feed.versions_comparable)
    return compared is Comparison.EQUAL
