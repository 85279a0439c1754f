"""Metrics, span attributes and log lines, as a dashboard gets them."""

import logging

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from a2a.types import TaskState, TaskStatus, TaskStatusUpdateEvent
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster_subscribe import LocalState, telemetry
from cluster_subscribe._testing import Decorate
from cluster_subscribe._testing.cluster import cluster
from cluster_subscribe._testing.messages import caller
from cluster_subscribe.telemetry import METRICS, Telemetry

Measured = dict[tuple[str, str], Any]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Measured]]:
    """Gives the value of each metric by name and attribute; the count of a histogram."""
    reader = InMemoryMetricReader()
    # In the place of the global one, of which a process has one for good.
    monkeypatch.setattr(metrics, 'get_meter', MeterProvider([reader]).get_meter)
    telemetry._instrument.cache_clear()
    yield partial(values, reader)
    telemetry._instrument.cache_clear()


def values(reader: InMemoryMetricReader) -> Measured:
    found: Measured = {}
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    value = getattr(point, 'value', getattr(point, 'count', None))
                    (attribute,) = (point.attributes or {'': ''}).values()
                    found[metric.name.removeprefix('cluster_subscribe.'), str(attribute)] = value
    return found


async def test_what_a_replica_does_shows_in_the_metrics(
    sqlite_url: str, wrapped: Decorate, measured: Callable[[], Measured]
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
    assert during['subscriptions.open', ''] == 1
    assert after['subscriptions.open', ''] == 0
    assert after['subscribes', 'stale'] == after['redirects', ''] == after['evictions', ''] == 1
    assert after['events.delivered', ''] == len(watch.events) == 2
    assert after['delivery.lag', ''] == 1
    assert after['reader.rounds', ''] > 0
    assert after['reader.rows', ''] > 0
    assert after['wakeups', 'publish'] > 0
    assert {name for name, _ in after} <= METRICS.keys()


async def test_the_delivery_of_a_timed_status_is_measured(
    measured: Callable[[], Measured],
) -> None:
    timed = TaskStatus(state=TaskState.TASK_STATE_WORKING)
    timed.timestamp.GetCurrentTime()
    for status in (timed, TaskStatus(state=TaskState.TASK_STATE_WORKING)):
        Telemetry().delivered(TaskStatusUpdateEvent(task_id='t', context_id='c', status=status))
    assert measured()['delivery.lag', ''] == 1


async def test_the_local_state_is_on_the_span_of_the_request(
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
        'cluster_subscribe.local_state': 'absent',
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
            counted.redirected(task_id, LocalState.STALE)
        now = 1200.0
        counted.redirected('c', LocalState.STALE)
    told = [
        (record.__dict__['task_id'], record.__dict__['local_state']) for record in caplog.records
    ]
    assert told == [(task_id, 'stale') for task_id in 'ababc']
    assert counted.statistics(None).redirects == 7
