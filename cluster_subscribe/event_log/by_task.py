"""Sets of objects by task id."""

from collections.abc import Collection, Iterator, KeysView
from typing import Generic, TypeVar

T = TypeVar('T')


class ByTask(Generic[T]):
    """Objects by the id of the task that they serve; a task without any is not kept."""

    def __init__(self) -> None:
        self._sets: dict[str, set[T]] = {}

    def add(self, task_id: str, member: T) -> None:
        """Adds an object to a task's."""
        self._sets.setdefault(task_id, set()).add(member)

    def remove(self, task_id: str, member: T) -> bool:
        """Removes an object from a task's; `False` where it was none of them."""
        members = self._sets.get(task_id, set())
        if member not in members:
            return False
        members.remove(member)
        if not members:
            del self._sets[task_id]
        return True

    def of(self, task_id: str) -> Collection[T]:
        """The objects of a task."""
        return self._sets.get(task_id, ())

    @property
    def task_ids(self) -> KeysView[str]:
        """The tasks that have any."""
        return self._sets.keys()

    def __iter__(self) -> Iterator[T]:
        for members in self._sets.values():
            yield from members

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))

    def __bool__(self) -> bool:
        return bool(self._sets)
