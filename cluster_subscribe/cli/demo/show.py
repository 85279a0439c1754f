"""The demo from beginning to end."""

import os
import sys
import tempfile
import uuid

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console
from sqlalchemy.engine import URL

from cluster_subscribe import Mode, Settings, SettingsError
from cluster_subscribe.cli.database import find, lent
from cluster_subscribe.cli.demo.picture import SIDE_BY_SIDE, WIDEST, picture, svg
from cluster_subscribe.cli.demo.processes import trio
from cluster_subscribe.cli.demo.scene import play
from cluster_subscribe.cli.demo.timeline import Timeline
from cluster_subscribe.cli.demo.verdict import off_in_words, on_in_words
from cluster_subscribe.cli.ending import BROKEN, RIGHT, Failure, run_until_signalled
from cluster_subscribe.cli.progress import progress

_OFF_TIMEOUT: Final = 1.5
"""Seconds; three polls of the SDK's event stream."""
_ON_TIMEOUT: Final = 10.0
"""Seconds; only a broken contract takes them."""
_DATABASES: Final = {
    'sqlite': 'an SQLite file',
    'postgresql': 'a PostgreSQL database',
    'mysql': 'a MySQL database',
    'mariadb': 'a MariaDB database',
}
_STORY: Final = (
    'One task, three replicas over {}, a2a-sdk {}. Turn 1 ran on A and paused for input '
    '(INPUT_REQUIRED). The reply went to B at 0.0 s; then three clients resubscribed, through A, '
    'B and C. Each stream begins with the Task as a snapshot.'
)


def show(database_url: str | None, save: Path | None) -> int:
    """Plays the task with the flag off, then on, and draws what the clients were told.

    Args:
        database_url: The database the replicas share; an SQLite file of the demo's own
            when not given.
        save: Where the picture is kept as an SVG file.

    Returns:
        The exit status: 0 if the wrapped run keeps the contract, 1 if it does not.

    Raises:
        Failure: The demo could not be played, or its picture not be saved.
    """
    try:
        Settings(mode=Mode.ON)
    except SettingsError as error:
        raise Failure(str(error)) from error
    with tempfile.TemporaryDirectory(prefix='cluster-subscribe-') as folder:
        own = URL.create('sqlite', database=str(Path(folder) / 'tasks.db'))
        url = find(database_url or own)
        runs = run_until_signalled(_play_both(url))
    sdk_version = version('a2a-sdk')
    drawing = partial(
        picture,
        story=_STORY.format(_DATABASES[url.get_backend_name()], sdk_version),
        runs=runs,
        verdicts=(
            f'Off: {off_in_words(runs["off"], sdk_version)}',
            f'On: {on_in_words(runs["on"])}',
        ),
    )
    # A pipe has no width of its own: there the runs stand side by side.
    piped = not sys.stdout.isatty() and 'COLUMNS' not in os.environ
    console = Console(width=SIDE_BY_SIDE if piped else None)
    width = min(console.width, WIDEST)
    console.print(drawing(width=width), width=width)
    if save:
        try:
            save.write_text(svg(drawing(width=SIDE_BY_SIDE)), encoding='utf-8')
        except OSError as error:
            raise Failure(f'The picture could not be saved: {error}') from error
    return RIGHT if all(timeline.right for timeline in runs['on']) else BROKEN


async def _play_both(url: URL) -> dict[str, list[Timeline]]:
    contexts = {'off': str(uuid.uuid4()), 'on': str(uuid.uuid4())}
    with progress('The database is made ready') as tell:
        async with lent(url, contexts.values()), trio('on', url) as on:
            async with trio('off', url) as off:
                tell('flag off: three replicas start')
                addresses = await off.ready()
                # These start while the others play, which is mostly waiting.
                on.begin()
                off_run = await play(
                    addresses, contexts['off'], _OFF_TIMEOUT, lambda so: tell(f'flag off: {so}')
                )
            tell('flag on: three replicas start')
            addresses = await on.ready()
            on_run = await play(
                addresses, contexts['on'], _ON_TIMEOUT, lambda so: tell(f'flag on: {so}')
            )
    return {'off': off_run, 'on': on_run}
