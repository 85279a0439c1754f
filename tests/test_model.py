"""The contract against a model of it. `python -m tests.model` tries many more clusters."""

from tests.model.machine import run, world

CLUSTERS = {'sqlite': 12, 'postgresql': 3, 'mysql': 3}


def test_every_stream_of_random_clusters_is_what_the_model_says(database_url: str) -> None:
    with world(database_url) as here:
        run(here, CLUSTERS[here.eyes.dialect.name])
    assert here.tally['events'] > here.tally['clusters']
