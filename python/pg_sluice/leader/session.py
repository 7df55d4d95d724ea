"""A connection of the leader to the server it runs in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, pq
from psycopg.conninfo import make_conninfo

from .. import connection
from .queries import statements

_STATEMENTS = statements()
_OPTIONS = "-c client_connection_check_interval=500ms"
"""A session of the leader's ends within a second of a leader that dies."""


class StartTimeout(psycopg.errors.ConnectionTimeout):
    """A session that did not start in time; its backend may still be starting."""

    def __init__(self, seconds: float, left: socket.socket) -> None:
        super().__init__(f"no connection within {seconds:g} seconds")
        self._left = left

    async def gone(self) -> None:
        """Waits until the backend has ended: it reads our end of the connection as closed, and its
        own end closes with it."""
        loop = asyncio.get_running_loop()
        with self._left, contextlib.suppress(OSError):
            while await loop.sock_recv(self._left, 4096):
                pass


async def _establish(pgconn: pq.abc.PGconn) -> None:
    """What psycopg's connect does, but with the socket in our hands when time is up."""
    while True:
        status = pgconn.connect_poll()
        if status == pq.PollingStatus.OK:
            pgconn.nonblocking = 1
            return
        if status == pq.PollingStatus.FAILED:
            raise psycopg.OperationalError(
                f"connection failed: {pgconn.get_error_message()}", pgconn=pgconn
            )
        await _ready(pgconn.socket, reading=status == pq.PollingStatus.READING)


async def _ready(descriptor: int, *, reading: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    if reading:
        loop.add_reader(descriptor, ready.set)
    else:
        loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        loop.remove_writer(descriptor)


def _half_close(pgconn: pq.abc.PGconn) -> socket.socket | None:
    """A second handle on the connection, closed for writing; None when there is no connection."""
    try:
        left = socket.socket(fileno=os.dup(pgconn.socket))
    except (psycopg.Error, OSError):
        return None
    left.setblocking(False)
    with contextlib.suppress(OSError):
        left.shutdown(socket.SHUT_WR)
    return left


class Server:
    """How to connect, and as whom."""

    def __init__(self, sockets: str, port: str, role: str, version: int) -> None:
        self._where = (sockets, port, role)
        self._version = version

    async def connect(
        self,
        database: str,
        application_name: str,
        *,
        role: str | None = None,
        seconds: float = connection.CONNECT_SECONDS,
        options: str = "",
    ) -> Session:
        """A new session within that many seconds; raises psycopg.OperationalError."""
        given = connection.parameters(*self._where, database, self._version)
        given["options"] += f" {_OPTIONS} {options}"
        if role is not None:
            given["user"] = role
        del given["connect_timeout"]
        pgconn = pq.PGconn.connect_start(
            make_conninfo("", **given, application_name=application_name).encode()
        )
        try:
            async with asyncio.timeout(seconds):
                await _establish(pgconn)
        except BaseException as error:
            left = _half_close(pgconn)
            pgconn.finish()
            if isinstance(error, TimeoutError) and left is not None:
                raise StartTimeout(seconds, left) from None
            if left is not None:
                left.close()
            raise
        opened = AsyncConnection(pgconn)
        await opened.set_autocommit(True)
        return Session(opened)


class Session:
    """One open session; statements of concurrent tasks follow each other."""

    def __init__(self, opened: AsyncConnection[Any]) -> None:
        self.connection = opened
        self._notified = False
        opened.add_notify_handler(self._notice)

    def _notice(self, _: object) -> None:
        self._notified = True

    def take_notified(self) -> bool:
        """Whether a notification has come since; what is in it doesn't matter."""
        notified, self._notified = self._notified, False
        return notified

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def row(self, name: str, **arguments: Any) -> tuple[Any, ...] | None:
        """The first row of a statement of queries.sql."""
        cursor = await self.connection.execute(_STATEMENTS[name], arguments or None)
        return None if cursor.description is None else await cursor.fetchone()

    async def rows(self, name: str, **arguments: Any) -> list[tuple[Any, ...]]:
        """All rows of a statement of queries.sql."""
        cursor = await self.connection.execute(_STATEMENTS[name], arguments or None)
        return await cursor.fetchall()

    async def one(self, name: str, **arguments: Any) -> tuple[Any, ...]:
        """The row of a statement that always gives one."""
        row = await self.row(name, **arguments)
        if row is None:
            raise psycopg.DataError(f"no row from {name}")
        return row

    async def value(self, name: str, **arguments: Any) -> Any:
        """The first column of the first row."""
        row = await self.row(name, **arguments)
        return None if row is None else row[0]

    async def rest(self, wake: asyncio.Event, seconds: float) -> None:
        """Waits until the server sends something (a notification, or its end), until `wake` is set,
        or that long; clears `wake`. Another task must not use the session meanwhile, or what the
        server sends is noticed only afterwards.
        """
        with self.watched(wake.set), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
        wake.clear()

    @contextlib.contextmanager
    def watched(self, notice: Callable[[], object]) -> Iterator[None]:
        """Meanwhile calls `notice` when the server sends something."""
        loop = asyncio.get_running_loop()
        descriptor = self.connection.fileno()

        def once() -> None:
            loop.remove_reader(descriptor)
            notice()

        loop.add_reader(descriptor, once)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return self.connection.closed

    def close(self) -> None:
        """Ends the connection, and with it what it executes; never waits for long."""
        pgconn = self.connection.pgconn
        if not self.connection.closed:
            if pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                # Where the cancel doesn't get through, client_connection_check_interval ends it.
                with contextlib.suppress(psycopg.Error):
                    pgconn.get_cancel().cancel()
            pgconn.finish()
