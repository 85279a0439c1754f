"""`wrap()`: what the app factory calls."""

import logging

from typing import Final, TypeVar, cast

from a2a.server.cluster import LegacyTaskStoreAdapter, TaskEventStream, VersionedTaskStore
from a2a.server.request_handlers import (
    DefaultRequestHandler,
    LegacyRequestHandler,
    RequestHandler,
)

from cluster_subscribe import executor_seam, sdk, store_seam
from cluster_subscribe.engines import is_autocommit, shared_connection
from cluster_subscribe.errors import UnsupportedHandlerError
from cluster_subscribe.event_log import SharedTailEventStream
from cluster_subscribe.handler import ClusterSubscribeHandler
from cluster_subscribe.settings import Mode, Settings

logger = logging.getLogger(__name__)

_SDKS_OWN: Final = (DefaultRequestHandler, LegacyRequestHandler)
H = TypeVar('H', bound=RequestHandler)


def wrap(
    handler: H,
    *,
    settings: Settings | None = None,
    task_store: VersionedTaskStore | None = None,
    event_stream: TaskEventStream | None = None,
) -> H:
    """Makes a request handler serve `SubscribeToTask` from the shared event log.

    Meant for an app factory: it needs no event loop, does no I/O and starts nothing.
    Wrapping twice changes nothing.

    Args:
        handler: The handler to wrap; it stays yours, and `aclose()` closes both.
        settings: Read from the environment when not given.
        task_store: The versioned store, where the handler does not reveal it.
        event_stream: The event stream, where the handler does not reveal it.

    Returns:
        The decorator, a drop-in for `handler` and to a type checker the same; or
        `handler` itself when the flag is off or it is not in cluster mode, and a log
        line says which.

    Raises:
        SettingsError: An environment variable has a value that is not allowed.
        UnsupportedHandlerError: The handler has an `on_subscribe_to_task` of its own,
            whose rules would be passed over; or its shape is not known and store or stream
            were not passed. A `TypeError`.
        TypeError: An argument is not what its name says.
    """
    if isinstance(handler, ClusterSubscribeHandler):
        return handler
    for name, value, kind in (
        ('handler', handler, RequestHandler),
        ('task_store', task_store, VersionedTaskStore),
        ('event_stream', event_stream, TaskEventStream),
        ('settings', settings, Settings),
    ):
        if not isinstance(value, kind) and (value is not None or name == 'handler'):
            raise TypeError(f'wrap() got {name}={value!r}; it takes a {kind.__name__}')
    settings = settings or Settings()
    if settings.mode is Mode.OFF:
        logger.info('cluster-subscribe is off (CLUSTER_SUBSCRIBE=off); the handler stays as it is')
        return handler
    if task_store is None or event_stream is None:
        try:
            parts = sdk.cluster_parts(handler)
        except UnsupportedHandlerError:
            _refuse_own_rules(handler, settings)
            raise
        task_store, event_stream = task_store or parts.store, event_stream or parts.stream
    if task_store is None or isinstance(task_store, LegacyTaskStoreAdapter):
        return _not_clustered(
            handler,
            'its task store is not versioned: give it a VersionedDatabaseTaskStore',
            by_mistake=event_stream is not None,
        )
    if event_stream is None:
        return _not_clustered(
            handler,
            'it has no event stream: pass event_stream=DatabaseTaskEventStream(engine)',
            by_mistake=True,
        )
    for engine in sdk.engines(task_store, event_stream):
        if shared := shared_connection(engine):
            logger.warning(
                "cluster-subscribe leaves the handler as it is: an engine's users share one "
                "connection (%s), and a read beside the agent would end the agent's transaction. "
                'Use a database server or an SQLite file',
                shared,
            )
            return handler
    _refuse_own_rules(handler, settings)
    if (engine_of_store := sdk.store_engine(task_store)) and is_autocommit(engine_of_store):
        logger.warning(
            'The task store has an AUTOCOMMIT engine: its saves are no transactions, and a stream '
            'may miss an event that is stored after its version'
        )
    if difference := sdk.describe_mismatch(task_store, event_stream):
        logger.warning('No stream can work across them: %s', difference)
    owned: SharedTailEventStream | None = None
    if (
        settings.mode is not Mode.OBSERVE
        and not difference
        and (tables := sdk.find_log_tables(task_store, event_stream))
    ):
        event_stream = owned = SharedTailEventStream(
            tables.engine,
            tables.create,
            tables.events,
            tables.versions,
            task_table_name=tables.tasks,
            settings=settings,
        )
        sdk.replace_event_stream(handler, owned)
    if not (observing := settings.mode is Mode.OBSERVE):
        store_seam.install(handler)
    decorator = ClusterSubscribeHandler(
        handler,
        settings=settings,
        task_store=task_store,
        event_stream=event_stream,
        owns_stream=owned is not None,
        turns=None if observing else executor_seam.install(handler),
    )
    logger.info(
        'cluster-subscribe is on the handler (mode=%s, close_on=%s, wakeup=%s)',
        settings.mode.value,
        settings.close_on.value,
        settings.wakeup.value,
    )
    return cast('H', decorator)


def _refuse_own_rules(handler: RequestHandler, settings: Settings) -> None:
    """Refuses a handler that answers a subscribe in a way of its own, which would be replaced."""
    method = handler.on_subscribe_to_task
    function = getattr(method, '__func__', None)
    if settings.mode is Mode.OBSERVE or (
        function in [default.on_subscribe_to_task for default in _SDKS_OWN]
        and getattr(method, '__self__', None) is handler
    ):
        return
    raise UnsupportedHandlerError(
        f'{type(handler).__qualname__} has an on_subscribe_to_task of its own, and '
        "cluster-subscribe would serve streams without its rules: wrap the SDK's handler, "
        'wrap(DefaultRequestHandler(...)), and put the rules into a decorator of your own '
        'around it (docs/adoption.md, "Rules of your own")'
    )


def _not_clustered(handler: H, reason: str, *, by_mistake: bool) -> H:
    logger.log(
        logging.WARNING if by_mistake else logging.INFO,
        'The handler is not in cluster mode (%s); cluster-subscribe leaves it as it is',
        reason,
    )
    return handler
