"""`python -m tests.mutations` has something to replace, and tests and a model that miss it."""

import inspect

import pytest

from tests.mutations.__main__ import ROOT, by_the_model
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.seams import MODEL, Mutation, Patch


@pytest.mark.parametrize('mutation', MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_mutation_applies_and_is_undone(mutation: Mutation) -> None:
    places = [place for patch in mutation.patches for place in patch._places()]
    with mutation.applied():
        for owner, name, old, _ in places:
            assert inspect.getattr_static(owner, name) is not old
    for owner, name, old, _ in places:
        assert inspect.getattr_static(owner, name) is old


@pytest.mark.parametrize('mutation', MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_test_that_has_to_miss_one_is_there(mutation: Mutation) -> None:
    assert mutation.missed_by
    for test in mutation.missed_by:
        file, _, name = test.partition('::')
        if test != MODEL:
            assert f'def {name.partition("[")[0]}(' in (ROOT / 'tests' / file).read_text()


def test_a_seam_that_is_gone_is_said() -> None:
    for seam in ('nowhere:name', 'retry:nothing', 'event_log.reader:Reader.nothing'):
        with (
            pytest.raises(LookupError, match=f'there is no {seam}'),
            Patch(seam, lambda old: old).applied(),
        ):
            pass


def test_the_model_misses_one(sqlite_url: str) -> None:
    mutation = next(one for one in MUTATIONS if 'next event left out' in one.what)
    assert by_the_model(mutation, sqlite_url, 100)
