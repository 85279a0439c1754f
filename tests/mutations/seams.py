"""Replacing a function, a method or a constant of the package by its name."""

import importlib
import inspect
import os
import sys

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

VARIABLE: Final = 'CLUSTER_SUBSCRIBE_TEST_MUTATION'
"""The sentence of the mutation that a test process runs with, its child processes included."""
MODEL: Final = 'the model'
"""Stands for the random clusters (`python -m tests.model`) in the place of a test."""

_FOR_GOOD: Final = ExitStack()


@dataclass(frozen=True)
class Patch:
    """What takes the place of one function, method, property or constant."""

    seam: str
    """`module:name` or `module:Class.name`, the module below `cluster_subscribe`."""
    make: Callable[[Any], Any]
    """Takes the original and gives its replacement."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replaces it wherever the package has it by that name.

        Raises:
            LookupError: There is nothing of that name.
        """
        places = [(place, *found) for place, *found in self._places()]
        for place, name, _, new in places:
            setattr(place, name, new)
        try:
            yield
        finally:
            for place, name, old, _ in places:
                setattr(place, name, old)

    def _places(self) -> Iterator[tuple[Any, str, Any, Any]]:
        module_name, _, path = self.seam.partition(':')
        *classes, name = path.split('.')
        try:
            module = importlib.import_module(f'cluster_subscribe.{module_name}')
            owner: Any = getattr(module, classes[0]) if classes else module
            old = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as missing:
            raise LookupError(f'there is no {self.seam}') from missing
        if isinstance(old, property):
            yield owner, name, old, property(self.make(old.fget))
            return
        new = self.make(old)
        yield owner, name, old, new
        if not classes and getattr(old, '__module__', None) == module.__name__:
            # Who has imported it by name has it, too.
            for other in list(sys.modules.values()):
                if other is not module and getattr(other, '__dict__', {}).get(name) is old:
                    yield other, name, old, new


@dataclass(frozen=True)
class Mutation:
    """One part of the package that is replaced, and what has to miss it."""

    what: str
    """The fault that this makes, in a few words."""
    patches: tuple[Patch, ...]
    missed_by: tuple[str, ...]
    """Tests, as node ids or functions of which one case has to fail; or `MODEL`."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Runs the package with the fault in it."""
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch.applied())
            yield


def apply_named() -> None:
    """Applies the mutation that the environment names, for good; called as a process starts."""
    what = os.environ.get(VARIABLE)
    if not what:
        return
    from tests.mutations.catalogue import MUTATIONS

    for mutation in MUTATIONS:
        if mutation.what == what:
            _FOR_GOOD.enter_context(mutation.applied())
