"""`python -m tests.model`: many random clusters, each compared with the model after each step."""

import argparse
import logging
import tempfile
import time

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.model.machine import run, world

CHUNK = 250
"""Clusters of one seed; hypothesis remembers what it has tried, and slows down with it."""


@contextmanager
def database(url: str | None) -> Iterator[str]:
    """The database that is named, or an SQLite file of its own."""
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix='cluster-subscribe-model-') as folder:
        yield f'sqlite+aiosqlite:///{Path(folder) / "tasks.db"}'


def main() -> None:
    """Runs the clusters and says how many, and what happened in them."""
    parser = argparse.ArgumentParser(prog='python -m tests.model', description=__doc__)
    parser.add_argument('--clusters', type=int, default=5000, help='how many (default: 5000)')
    parser.add_argument('--database-url', help='a database of its own (default: an SQLite file)')
    parser.add_argument('--seed', type=int, default=1, help='other clusters (default: 1)')
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    tally: Counter[str] = Counter()
    with database(arguments.database_url) as url:
        seed = arguments.seed * 1_000_000
        while tally['clusters'] < arguments.clusters:
            with world(url) as here:
                left = arguments.clusters - tally['clusters']
                run(here, min(CHUNK, left), number=seed)
            tally += here.tally
            seed += 1
            seconds = time.monotonic() - began
            print(
                f'{tally["clusters"]} clusters, {tally["steps"]} steps, {tally["events"]} events '
                f'in {seconds:.0f} s: no counterexample',
                flush=True,
            )
    print(', '.join(f'{count} {what}' for what, count in tally.most_common()))


if __name__ == '__main__':
    main()
