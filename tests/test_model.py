"""The contract against a model of it. `python -m tests.model` tries many more clusters."""

import pytest

from tests.model.machine import run, world
from tests.model.mutants import MUTANTS, Mutant

CLUSTERS = {'sqlite': 12, 'postgresql': 3, 'mysql': 3}


def test_every_stream_of_random_clusters_is_what_the_model_says(database_url: str) -> None:
    with world(database_url) as here:
        run(here, CLUSTERS[here.eyes.dialect.name])
    assert here.tally['events'] > here.tally['clusters']


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda mutant: mutant.fault)
def test_every_mutant_still_applies(mutant: Mutant) -> None:
    with mutant.applied():
        pass


def test_the_model_sees_a_mutant(sqlite_url: str) -> None:
    mutant = next(one for one in MUTANTS if 'next event left out' in one.fault)
    assert mutant.caught(sqlite_url)
