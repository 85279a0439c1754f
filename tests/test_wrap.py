"""`wrap()` in an app factory: what it takes, what it gives back, what it says."""

import asyncio
import functools
import logging
import subprocess
import sys
import textwrap
import threading

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.models import create_task_event_model
from a2a.server.request_handlers import DefaultRequestHandler, LegacyRequestHandler, RequestHandler
from a2a.server.tasks import InMemoryTaskStore
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from cluster_subscribe import (
    ClusterSubscribeHandler,
    Settings,
    SettingsError,
    SharedTailEventStream,
    UnsupportedHandlerError,
    sdk,
    wrap,
)
from cluster_subscribe._testing import ScriptedAgent
from cluster_subscribe._testing.messages import agent_card
from cluster_subscribe.sdk import PRIVATE_ATTRIBUTES, PrivateAttribute
from tests.meet import is_there
from tests.support.replicas import stock_handler, stock_over


def engine_of(url: str) -> AsyncEngine:
    return create_async_engine(url)


@pytest.fixture
def stock(sqlite_url: str) -> DefaultRequestHandler:
    engine = engine_of(sqlite_url)
    return stock_over(engine)


class Foreign(RequestHandler):
    """A handler whose inside nobody knows."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


Foreign.__abstractmethods__ = frozenset()


def test_it_needs_no_loop_and_starts_nothing(stock: DefaultRequestHandler) -> None:
    threads = threading.active_count()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert isinstance(wrap(stock), ClusterSubscribeHandler)
    assert threading.active_count() == threads


def test_wrapping_twice_changes_nothing(stock: DefaultRequestHandler) -> None:
    once = wrap(stock)
    assert wrap(once) is once


def test_off_gives_back_the_handler_and_says_so(
    stock: DefaultRequestHandler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv('CLUSTER_SUBSCRIBE', 'off')
    caplog.set_level(logging.INFO, 'cluster_subscribe')
    stream = stock._event_stream
    assert wrap(stock) is stock
    assert stock._event_stream is stream
    assert len(caplog.records) == 1
    assert 'off' in caplog.text


def test_a_bad_variable_stops_the_start(
    stock: DefaultRequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('CLUSTER_SUBSCRIBE', 'perhaps')
    with pytest.raises(SettingsError, match="CLUSTER_SUBSCRIBE='perhaps'"):
        wrap(stock)


@pytest.mark.parametrize('lacking', ['store', 'stream', 'both'])
@pytest.mark.filterwarnings('ignore:A VersionedTaskStore was configured without')
def test_a_handler_that_is_not_clustered_comes_back_with_one_line_that_says_why(
    lacking: str, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(sqlite_url)
    store = InMemoryTaskStore() if lacking != 'stream' else VersionedDatabaseTaskStore(engine)
    stream = DatabaseTaskEventStream(engine) if lacking == 'store' else None
    handler = stock_handler(store, stream)
    caplog.clear()
    caplog.set_level(logging.INFO, 'cluster_subscribe')
    assert wrap(handler) is handler
    assert len(caplog.records) == 1
    assert ('no event stream' if lacking == 'stream' else 'not versioned') in caplog.text


def test_a_legacy_handler_comes_back() -> None:
    handler = LegacyRequestHandler(
        agent_executor=ScriptedAgent(),
        task_store=InMemoryTaskStore(),
        agent_card=agent_card('http://127.0.0.1'),
    )
    assert wrap(handler) is handler


class Checking(DefaultRequestHandler):
    """Checks access before it subscribes."""

    def on_subscribe_to_task(self, params: Any, context: Any) -> Any:
        raise PermissionError


class Unclear(DefaultRequestHandler):
    """Has a subscribe that is the SDK's, and parts that nobody knows."""

    def __init__(self) -> None: ...


def with_a_method_of_its_own(handler: DefaultRequestHandler) -> DefaultRequestHandler:
    answer = handler.on_subscribe_to_task

    @functools.wraps(answer)
    def checked(params: Any, context: Any) -> Any:
        return answer(params, context)

    handler.on_subscribe_to_task = checked  # type: ignore[method-assign]
    return handler


def test_a_handler_with_rules_of_its_own_is_refused_with_the_way_out(
    stock: DefaultRequestHandler, sqlite_url: str
) -> None:
    """It was served from the log, and its access check passed over."""
    engine = engine_of(sqlite_url)
    store, stream = VersionedDatabaseTaskStore(engine), DatabaseTaskEventStream(engine)
    own = stock_handler(store, stream, kind=Checking)
    for handler, parts in (
        (own, {}),
        (with_a_method_of_its_own(stock), {}),
        (Foreign(), {}),  # type: ignore[abstract]
        (Foreign(), {'task_store': store, 'event_stream': stream}),  # type: ignore[abstract]
    ):
        for mode in ('on', 'stale'):
            with pytest.raises(UnsupportedHandlerError) as refused:
                wrap(handler, settings=Settings(mode=mode), **parts)  # type: ignore[arg-type]
            for word in (type(handler).__name__, 'on_subscribe_to_task', 'docs/adoption.md'):
                assert word in str(refused.value)
            assert '\n' not in str(refused.value)
    assert own._event_stream is stream
    assert issubclass(UnsupportedHandlerError, TypeError)


def test_rules_of_its_own_may_be_observed(sqlite_url: str) -> None:
    engine = engine_of(sqlite_url)
    store, stream = VersionedDatabaseTaskStore(engine), DatabaseTaskEventStream(engine)
    own = stock_handler(store, stream, kind=Checking)
    assert wrap(own, settings=Settings(mode='off')) is own
    observed: Any = wrap(own, settings=Settings(mode='observe'))
    assert isinstance(observed, ClusterSubscribeHandler)


def test_parts_that_are_not_found_are_asked_for_and_taken(sqlite_url: str) -> None:
    with pytest.raises(UnsupportedHandlerError, match=r'task_store=\.\.\., event_stream=\.\.\.'):
        wrap(Unclear())
    engine = engine_of(sqlite_url)
    handler = wrap(
        Unclear(),
        task_store=VersionedDatabaseTaskStore(engine),
        event_stream=DatabaseTaskEventStream(engine),
    )
    assert isinstance(handler, ClusterSubscribeHandler)


@pytest.mark.parametrize('name', ['task_store', 'event_stream', 'settings'])
def test_an_argument_of_the_wrong_kind_is_named(stock: DefaultRequestHandler, name: str) -> None:
    wrong: dict[str, Any] = {name: 'something'}
    with pytest.raises(TypeError, match=f"{name}='something'"):
        wrap(stock, **wrong)
    with pytest.raises(TypeError, match='handler=None'):
        wrap(None)  # type: ignore[type-var]


def test_the_stock_event_stream_makes_room_for_one_reader(stock: DefaultRequestHandler) -> None:
    wrap(stock)
    assert isinstance(stock._event_stream, SharedTailEventStream)
    assert stock._active_task_registry._event_stream is stock._event_stream


def test_observing_leaves_the_event_stream_alone(stock: DefaultRequestHandler) -> None:
    stream = stock._event_stream
    wrap(stock, settings=Settings(mode='observe'))
    assert stock._event_stream is stream


def test_a_subclass_of_the_event_stream_stays(sqlite_url: str) -> None:
    class Own(DatabaseTaskEventStream):
        pass

    engine = engine_of(sqlite_url)
    own = Own(engine)
    handler = stock_handler(VersionedDatabaseTaskStore(engine), own)
    wrap(handler)
    assert handler._event_stream is own


@pytest.mark.parametrize(
    ('store_url', 'stream_url', 'differs'),
    [
        ('sqlite+aiosqlite:///a.db', 'sqlite+aiosqlite:///b.db', True),
        ('sqlite+aiosqlite:///a.db', 'sqlite+aiosqlite:///./a.db', False),
        ('sqlite+aiosqlite://', 'sqlite+aiosqlite://', True),
        (
            'postgresql+asyncpg://u:secret@localhost/x',
            'postgresql+asyncpg://v@127.0.0.1:5432/x',
            False,
        ),
        ('postgresql+asyncpg://u:secret@h1/x', 'postgresql+asyncpg://u:secret@h2/x', True),
        ('mysql+aiomysql://u:secret@h/x', 'mariadb+aiomysql://u@h/x', False),
        ('mysql+aiomysql://u:secret@h/x', 'postgresql+asyncpg://u@h/x', True),
    ],
)
def test_a_store_and_a_stream_over_different_databases_get_one_warning(
    store_url: str, stream_url: str, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    handler = stock_over(engine_of(store_url), engine_of(stream_url))
    caplog.clear()
    wrap(handler)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == differs
    assert 'secret' not in caplog.text


def test_a_store_and_a_stream_over_different_event_tables_get_one_warning(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(sqlite_url)
    stream = DatabaseTaskEventStream(engine)
    stream._event_model = create_task_event_model('elsewhere', _base())
    wrap(stock_handler(VersionedDatabaseTaskStore(engine), stream))
    assert 'task_events' in caplog.text
    assert 'elsewhere' in caplog.text


def _base() -> Any:
    from sqlalchemy.orm import DeclarativeBase

    class Base(DeclarativeBase):
        pass

    return Base


def test_attributes_read_and_write_through(stock: DefaultRequestHandler) -> None:
    handler: Any = wrap(stock)
    assert handler.agent_executor is stock.agent_executor
    assert handler.task_store is stock.task_store
    handler.extended_agent_card = card = agent_card('http://other')
    assert stock.extended_agent_card is card
    handler._agent_card = card
    assert stock._agent_card is card
    del handler.extended_agent_card
    assert not hasattr(stock, 'extended_agent_card')
    with pytest.raises(AttributeError):
        handler.no_such_thing  # noqa: B018


def test_every_other_method_is_the_wrapped_handlers_own(stock: DefaultRequestHandler) -> None:
    handler: Any = wrap(stock)
    own = {'on_subscribe_to_task', 'on_cancel_task', 'on_message_send', 'on_message_send_stream'}
    for name in RequestHandler.__abstractmethods__ - own:
        assert getattr(handler, name) == getattr(stock, name)


def test_a_method_that_a_later_sdk_adds_is_delegated() -> None:
    script = """
        import abc
        from a2a.server.request_handlers import DefaultRequestHandler, RequestHandler

        async def default(self): raise AssertionError('not delegated')
        async def real(self): return 'the wrapped one'
        RequestHandler.on_made_up = default
        RequestHandler.on_made_up_too = abc.abstractmethod(default)
        abc.update_abstractmethods(RequestHandler)
        DefaultRequestHandler.on_made_up = DefaultRequestHandler.on_made_up_too = real
        abc.update_abstractmethods(DefaultRequestHandler)

        import asyncio
        from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
        from sqlalchemy.ext.asyncio import create_async_engine
        from cluster_subscribe import wrap
        from cluster_subscribe._testing import ScriptedAgent
        from cluster_subscribe._testing.messages import agent_card

        engine = create_async_engine('sqlite+aiosqlite:///never-opened.db')
        stock = DefaultRequestHandler(
            agent_executor=ScriptedAgent(), task_store=VersionedDatabaseTaskStore(engine),
            event_stream=DatabaseTaskEventStream(engine), agent_card=agent_card('http://x'),
        )
        handler = wrap(stock)
        assert handler is not stock
        assert asyncio.run(handler.on_made_up()) == 'the wrapped one'
        assert asyncio.run(handler.on_made_up_too()) == 'the wrapped one'
    """
    run = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize('attribute', PRIVATE_ATTRIBUTES, ids=lambda one: one.name)
def test_a_private_attribute_is_there_and_is_used(attribute: PrivateAttribute) -> None:
    assert is_there(attribute)
    assert f'.{attribute.name}' in Path(sdk.__file__).read_text()


def test_a_private_attribute_that_is_gone_shows() -> None:
    for attribute in PRIVATE_ATTRIBUTES:
        assert not is_there(replace(attribute, name=f'{attribute.name}_of_old'))
        assert not is_there(replace(attribute, owner=f'{attribute.owner}OfOld'))
    assert not is_there(replace(PRIVATE_ATTRIBUTES[0], owner='a2a.nowhere.Handler'))
