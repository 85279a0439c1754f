"""A TCP proxy between an engine and its database, whose connections can be reset."""

import asyncio

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import make_url
from sqlalchemy.engine import URL

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def proxy(database: str) -> AsyncIterator['Proxy']:
    """A proxy in front of a database, all of whose connections have gone at the end."""
    made = Proxy(make_url(database))
    server = await asyncio.start_server(made.carry, '127.0.0.1', 0)
    port = server.sockets[0].getsockname()[1]
    query = {name: value for name, value in made.database.query.items() if name != 'host'}
    url = made.database.set(host='127.0.0.1', port=port, query=query)
    made.url = url.render_as_string(hide_password=False)
    try:
        yield made
    finally:
        server.close()
        made.reset(down=True)
        await asyncio.gather(*made.carrying)


class Proxy:
    """Carries bytes both ways until it is told to do worse."""

    def __init__(self, database: URL) -> None:
        self.database = database
        self.url = ''
        self.delay = 0.0
        """Seconds that each packet takes longer."""
        self.carrying: set[asyncio.Task[None]] = set()
        """One for each connection."""
        self._mute: set[asyncio.Task[None]] = set()
        self._asked: dict[asyncio.Task[None], bytes] = {}
        self._words: int | None = None
        self._down = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    def reset(self, *, down: bool = False) -> None:
        """Resets every connection; with `down` new ones too, until `heal()`."""
        self._down = down
        for one in self.carrying:
            one.cancel()

    def reset_after(self, words: int) -> None:
        """Resets every connection in mid-answer, when the database has said so many bytes."""
        self._words = words

    @property
    def has_reset(self) -> bool:
        """Whether it has done so."""
        return self._words is None

    def stall(self) -> None:
        """Holds every packet back until `heal()`, and new connections too."""
        self._flowing.clear()

    def swallow(self, asked: bytes = b'') -> None:
        """Makes connections fall silent for good, as a lost route does; new ones work.

        Args:
            asked: Only connections on which this was asked.
        """
        self._mute |= {one for one in self.carrying if asked in self._asked.get(one, b'')}

    def heal(self) -> None:
        """Takes back what can be taken back."""
        self._down = False
        self._flowing.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries one connection to its end."""
        this = asyncio.current_task()
        assert this is not None
        self.carrying.add(this)
        pumps: list[asyncio.Task[None]] = []
        ends = [writer]
        try:
            if not self._down:
                there, away = await self._dial()
                ends.append(away)
                pumps = [
                    asyncio.create_task(self._pump(reader, away, this)),
                    asyncio.create_task(self._pump(there, writer, this, answers=True)),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass
        finally:
            self.carrying.discard(this)
            self._mute.discard(this)
            self._asked.pop(this, None)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                end.transport.abort()

    async def _dial(self) -> Pipe:
        folder = self.database.query.get('host')
        port = self.database.port or 5432
        if folder:
            return await asyncio.open_unix_connection(f'{folder}/.s.PGSQL.{port}')
        return await asyncio.open_connection(self.database.host, port)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        connection: 'asyncio.Task[None]',
        *,
        answers: bool = False,
    ) -> None:
        while data := await source.read(65536):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._flowing.wait()
            if connection in self._mute:
                continue
            if not answers:
                self._asked[connection] = self._asked.get(connection, b'') + data
            elif self._words is not None:
                if len(data) >= self._words:
                    sink.write(data[: self._words])
                    self._words = None
                    self.reset()
                    return
                self._words -= len(data)
            sink.write(data)
            await sink.drain()
