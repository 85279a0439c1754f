"""Metrics, span attributes and log lines, as a dashboard gets them."""

import logging

from functools import cache
from typing import Any

import pytest

from a2a.types import TaskState, TaskStatus, TaskStatusUpdateEvent
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster_subscribe import Verdict, telemetry
from cluster_subscribe.cli.lab import Decorate
from cluster_subscribe.cli.lab.cluster import caller, cluster
from cluster_subscribe.telemetry import METRICS, Telemetry


@cache
def dashboard() -> InMemoryMetricReader:
    # A process has one meter provider, for good.
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    return reader


def measured() -> dict[tuple[str, str], Any]:
    """The value of each metric by name and attribute; the count of a histogram."""
    found: dict[tuple[str, str], Any] = {}
    data = dashboard().get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    value = getattr(point, 'value', getattr(point, 'count', None))
                    (attribute,) = (point.attributes or {'': ''}).values()
                    found[metric.name.removeprefix('cluster_subscribe.'), str(attribute)] = value
    return found


@pytest.fixture
def before() -> dict[tuple[str, str], Any]:
    telemetry._instrument.cache_clear()
    return measured()


async def test_what_a_replica_does_shows_in_the_metrics(
    sqlite_url: str, wrapped: Decorate, before: dict[tuple[str, str], Any]
) -> None:
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        turn = lab.b.start('work wait=1 done', task)
        await turn.at('1')
        watch = await lab.a.watch(task)
        during = measured()
        lab.gates.open('1')
        await watch.until(lambda w: w.ending, 10)
        await turn.ended()
    after = measured()

    def more(name: str, attribute: str = '') -> Any:
        return after.get((name, attribute), 0) - before.get((name, attribute), 0)

    assert during['subscriptions.open', ''] == before.get(('subscriptions.open', ''), 0) + 1
    assert not more('subscriptions.open')
    assert more('subscribes', 'stale') == more('redirects') == more('evictions') == 1
    assert more('events.delivered') == len(watch.events) == 2
    assert more('reader.rounds') > 0
    assert more('reader.rows') > 0
    assert more('wakeups', 'publish') > 0
    assert {name for name, _ in after} <= METRICS.keys()


async def test_the_delivery_of_a_timed_status_is_measured(
    before: dict[tuple[str, str], Any],
) -> None:
    timed = TaskStatus(state=TaskState.TASK_STATE_WORKING)
    timed.timestamp.GetCurrentTime()
    for status in (timed, TaskStatus(state=TaskState.TASK_STATE_WORKING)):
        Telemetry().delivered(TaskStatusUpdateEvent(task_id='t', context_id='c', status=status))
    assert measured()['delivery.lag', ''] == before.get(('delivery.lag', ''), 0) + 1


async def test_the_verdict_is_on_the_span_of_the_request(
    sqlite_url: str, wrapped: Decorate
) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        with provider.get_tracer('test').start_as_current_span('request'):
            await lab.b.watch(task)
        stored = await lab.b.store.get(task.id, caller())
    (span,) = spans.get_finished_spans()
    assert stored is not None
    assert span.attributes == {
        'cluster_subscribe.verdict': 'absent',
        'cluster_subscribe.snapshot.version': str(stored.version),
    }


async def test_nothing_is_needed_of_opentelemetry(
    sqlite_url: str, wrapped: Decorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, 'metrics', None)
    monkeypatch.setattr(telemetry, 'trace', None)
    telemetry._instrument.cache_clear()
    async with cluster(sqlite_url, decorate=wrapped) as lab:
        task = await lab.a.turn('ask')
        watch = await lab.b.watch(task)
        await lab.c.turn('done', task)
        assert await watch.until(lambda w: w.ending == 'closed', 10)
    telemetry._instrument.cache_clear()


def test_redirects_of_a_task_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1020.0
    monkeypatch.setattr('cluster_subscribe.telemetry.time.monotonic', lambda: now)
    counted = Telemetry()
    with caplog.at_level(logging.INFO, 'cluster_subscribe'):
        for at, task_id in ((0, 'a'), (1, 'a'), (30, 'b'), (59, 'a'), (60, 'a'), (61, 'b')):
            now = 1020.0 + at
            counted.redirected(task_id, Verdict.STALE)
        now = 1200.0
        counted.redirected('c', Verdict.STALE)
    told = [(record.__dict__['task_id'], record.__dict__['verdict']) for record in caplog.records]
    assert told == [(task_id, 'stale') for task_id in 'ababc']
    assert counted.statistics(None).redirects == 7
