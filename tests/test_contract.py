"""The contract, played by stock and wrapped handlers on every backend and replica."""

from importlib.metadata import version

import pytest

from a2a.server.cluster import DatabaseTaskEventStream
from packaging.version import parse

from cluster_subscribe._testing import FAULTS, Decorate, Fault
from tests.support.replicas import OwnStream

by_number = pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.number)


@pytest.mark.parametrize(
    ('stream_type', 'database_url'),
    [
        *(
            pytest.param(DatabaseTaskEventStream, backend, id=f'shared-tail-{backend}')
            for backend in ('sqlite', 'postgresql', 'mysql')
        ),
        # What is ours over such a stream knows no SQL but the read of the task.
        pytest.param(
            OwnStream, 'sqlite', id='stock-stream-sqlite', marks=pytest.mark.cancels_queries
        ),
    ],
    indirect=['database_url'],
)
@by_number
async def test_every_replica_is_right_when_wrapped(
    fault: Fault,
    stream_type: type[DatabaseTaskEventStream],
    database_url: str,
    wrapped: Decorate,
) -> None:
    if fault.number == 'F7' and not database_url.startswith('sqlite'):
        pytest.skip('slow readers of every database are in test_delivery')
    outcome = await fault.play(database_url, timeout=20, decorate=wrapped, stream_type=stream_type)
    assert outcome.right, outcome.timelines
    assert outcome.intact


def healed(fault: Fault) -> bool:
    """Whether the installed SDK is right by itself."""
    return fault.number == 'F19' and parse(version('a2a-sdk')) >= parse('1.3')


@pytest.mark.cancels_queries
@by_number
async def test_the_sdk_alone_is_wrong(fault: Fault, sqlite_url: str) -> None:
    """Whatever the database: a scene that the SDK alone gets right would show nothing."""
    outcome = await fault.play(sqlite_url, timeout=1)
    assert outcome.right is healed(fault), outcome.timelines
