"""`python -m tests.mechanisms` has something to take out, and tests to run."""

import pytest

from tests.mechanisms import MECHANISMS, ROOT, Mechanism


@pytest.mark.parametrize('mechanism', MECHANISMS, ids=lambda mechanism: mechanism.what)
def test_every_mechanism_is_there_and_so_are_its_tests(mechanism: Mechanism) -> None:
    # What does not compile would be missed by any test.
    compile(mechanism.source(), mechanism.file, 'exec')
    for test in mechanism.tests:
        file, _, name = test.partition('::')
        assert f'def {name.partition("[")[0]}(' in (ROOT / 'tests' / file).read_text()
