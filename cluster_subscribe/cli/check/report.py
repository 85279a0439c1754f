"""The findings, and their shape for machines."""

import json
import platform

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from cluster_subscribe.cli.check.play import Play, Row
from cluster_subscribe.cli.check.sandbox import Sandbox

_PACKAGES: Final = ('cluster-subscribe', 'a2a-sdk', 'sqlalchemy')


@dataclass(frozen=True)
class Report:
    """What was played where, and how it went."""

    rows: Sequence[Row]
    place: Sandbox
    of_all: bool
    """Whether all known faults were played."""

    @property
    def needed(self) -> bool:
        """Whether the SDK alone is wrong about a fault, or could not be seen to be right."""
        return not all(row.stock.right for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether everything wrapped is right."""
        return all(row.wrapped.right for row in self.rows)

    @property
    def versions(self) -> dict[str, str]:
        """The packages that decide, and Python."""
        return {name: version(name) for name in _PACKAGES} | {'python': platform.python_version()}

    def as_json(self) -> str:
        """The findings as a JSON object; keys may be added to it, and none change.

        `versions` by package, `database` with `kind` and `version`, `needed` and `ok` as
        above, and `faults`: the `number` and `title` of each, the timeline that is `expected`
        of each stream, and how `stock` and `wrapped` went: `right`, `timelines` by replica
        and, where the fault could not be played, an `error` that is otherwise `null`. A
        timeline is the events of a stream and how it ended, `open` if it stayed silent; of
        `a|b` either is right, and `a?` may be missing.
        """
        findings = {
            'versions': self.versions,
            'database': {'kind': self.place.kind, 'version': self.place.version},
            'faults': [
                {
                    'number': row.fault.number,
                    'title': row.fault.title,
                    'expected': row.fault.right,
                    'stock': _played(row.stock),
                    'wrapped': _played(row.wrapped),
                }
                for row in self.rows
            ],
            'needed': self.needed,
            'ok': self.ok,
        }
        return json.dumps(findings)


def _played(play: Play) -> dict[str, Any]:
    return {'right': play.right, 'timelines': dict(play.timelines), 'error': play.error}
