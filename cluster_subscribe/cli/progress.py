"""How far a command is, said on stderr where a person is there to read it."""

import sys

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that takes what the command does now; `first` is what it begins with."""
    if not sys.stderr.isatty() or find_spec('rich') is None:
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - an extra brings it

    with Console(stderr=True).status(first) as status:
        yield status.update
