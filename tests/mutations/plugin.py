"""A pytest plugin that runs the tests with one mutation, in their child processes too."""

import os

from typing import Final

from tests.mutations.seams import VARIABLE, apply_named

CHOSEN: Final = f'{VARIABLE}_OF_TESTS'
"""What the tests should run with. Not `VARIABLE` itself: pytest has to start without it."""


def pytest_configure() -> None:
    """Applies the mutation once pytest and its plugins are there."""
    os.environ[VARIABLE] = os.environ[CHOSEN]
    apply_named()
