"""The contract, played by stock and wrapped handlers on every backend and replica."""

from importlib.metadata import version

import pytest

from a2a.server.cluster import DatabaseTaskEventStream
from packaging.version import parse

from cluster_subscribe._testing import FAULTS, Decorate, Fault
from tests.support.replicas import OwnStream

by_number = pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.number)


@pytest.mark.parametrize(
    'stream_type',
    [
        pytest.param(DatabaseTaskEventStream, id='shared-tail'),
        pytest.param(OwnStream, id='stock-stream', marks=pytest.mark.cancels_queries),
    ],
)
@by_number
async def test_every_replica_is_right_when_wrapped(
    fault: Fault,
    stream_type: type[DatabaseTaskEventStream],
    database_url: str,
    wrapped: Decorate,
) -> None:
    outcome = await fault.play(database_url, timeout=20, decorate=wrapped, stream_type=stream_type)
    assert outcome.right, outcome.timelines
    assert outcome.intact


def healed(fault: Fault) -> bool:
    """Whether the installed SDK is right by itself."""
    return fault.number == 'F19' and parse(version('a2a-sdk')) >= parse('1.3')


@pytest.mark.cancels_queries
@by_number
async def test_the_sdk_alone_is_wrong(fault: Fault, database_url: str) -> None:
    if fault.number == 'F7' and not database_url.startswith('sqlite'):
        pytest.skip('the SDK drops a slow reader whatever the database')
    outcome = await fault.play(database_url, timeout=1)
    assert outcome.right is healed(fault), outcome.timelines
