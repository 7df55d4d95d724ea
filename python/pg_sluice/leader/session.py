"""A connection of the leader to the server it runs in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, generators, pq

from .. import connection
from ..connection import Name
from .queries import statements
from .retry import retrying

_STATEMENTS = statements()
_OPTIONS = "-c client_connection_check_interval=500ms"
"""A session of the leader's ends within a second of a leader that dies."""


async def woken(wake: asyncio.Event, seconds: float) -> None:
    """Waits until `wake` is set, at most that long, and clears it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()


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


def _drained(opened: AsyncConnection[Any]) -> Generator[Any, Any, None]:
    """Takes what a query gives, a row at a time, and keeps only its error, which it raises."""
    failed: psycopg.Error | None = None
    while True:
        try:
            result = yield from generators.fetch(opened.pgconn)
        except psycopg.Error as lost:
            # What the server said at last tells more.
            raise failed or lost from None
        if result is None:
            break
        if result.status == pq.ExecStatus.FATAL_ERROR:
            failed = psycopg.errors.error_from_result(result, opened.info.encoding)
        elif result.status in (pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT):
            raise psycopg.errors.FeatureNotSupported("cannot COPY to or from a client in a job")
    if failed is not None:
        raise failed


class Server:
    """How to connect, and as whom."""

    def __init__(self, sockets: str, port: str, role: bytes, version: int) -> None:
        self._where = (sockets, port, role)
        self._version = version

    async def connect(
        self,
        database: Name,
        application_name: str,
        *,
        role: bytes | None = None,
        seconds: float = connection.CONNECT_SECONDS,
        options: str = "",
    ) -> Session:
        """A new session within that many seconds; raises psycopg.OperationalError."""
        given = connection.parameters(*self._where, database.raw, self._version)
        given["options"] += f" {_OPTIONS} {options}"
        if role is not None:
            given["user"] = role
        pgconn = pq.PGconn.connect_start(
            connection.conninfo(given | {"application_name": application_name})
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
        connection.send_acceptable(opened)
        await opened.set_autocommit(True)
        return Session(opened)


class Session:
    """One open session; statements of concurrent tasks follow each other."""

    def __init__(self, opened: AsyncConnection[Any]) -> None:
        self.connection = opened
        self.listens = False
        """Whether it is woken by notification, as far as we know."""
        self._notified = False
        opened.add_notify_handler(self._notice)

    async def listen(self) -> None:
        """Be woken by notification, unless that would take long to begin."""
        self.listens = False
        if await self.value("may_listen"):
            await self.row("listen")
            self.listens = True

    def _notice(self, _: object) -> None:
        self._notified = True

    def take_notified(self) -> bool:
        """Whether a notification has come since; what is in it doesn't matter."""
        notified, self._notified = self._has_come(), False
        return notified

    def _has_come(self) -> bool:
        """Whether there is a notification that nobody has taken, be it unread."""
        # What has failed here, the next statement will tell.
        with contextlib.suppress(psycopg.Error):
            self.connection.pgconn.consume_input()
            while self.connection.pgconn.notifies():
                self._notified = True
        return self._notified

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def row(self, name: str, **arguments: Any) -> tuple[Any, ...] | None:
        """The first row of a statement of queries.sql."""
        cursor = await self._execute(name, arguments)
        return None if cursor.description is None else await cursor.fetchone()

    async def rows(self, name: str, **arguments: Any) -> list[tuple[Any, ...]]:
        """All rows of a statement of queries.sql."""
        cursor = await self._execute(name, arguments)
        return await cursor.fetchall()

    async def _execute(self, name: str, arguments: dict[str, Any]) -> AsyncCursor[Any]:
        return await self.connection.execute(_STATEMENTS[name], arguments or None)

    async def command(self, command: bytes) -> None:
        """Executes SQL as it is, whatever there is in it, and drops what it gives: that can be more
        than memory holds. After a COPY from or to us, which is an error, it is of no further use.
        """
        pgconn = self.connection.pgconn
        pgconn.send_query(command)
        pgconn.set_single_row_mode()
        await self.connection.wait(generators.send(pgconn))
        await self.connection.wait(_drained(self.connection))

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
        """Waits until there is a notification that nobody has taken, until the server sends its
        end, until `wake` is set, or that long; clears `wake`. Another task must not use the session
        meanwhile, or what the server sends is noticed only afterwards.
        """
        if self._has_come():
            wake.clear()
            return
        with self.watched(wake.set):
            await woken(wake, seconds)

    @contextlib.contextmanager
    def watched(self, notice: Callable[[], object]) -> Iterator[None]:
        """Meanwhile calls `notice` when the server sends something, or if the session is lost."""
        if self.lost:
            notice()
            yield
            return
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


class ControlSession(Session):
    """The leader's session in the control database.

    Each statement is a transaction, so one that the server refused did nothing and is tried again
    when the reason may pass. A session that is lost is not made anew: the leader ends with it.
    """

    epoch = 0
    """Of the lease that is checked before anything is tried again; 0 while there is none."""

    async def _execute(self, name: str, arguments: dict[str, Any]) -> AsyncCursor[Any]:
        async def attempt() -> AsyncCursor[Any]:
            return await super(ControlSession, self)._execute(name, arguments)

        async def check_lease() -> None:
            if self.epoch:
                await super(ControlSession, self)._execute("check_lease", {"epoch": self.epoch})

        return await retrying(attempt, check_lease, may_retry=lambda: not self.lost)
