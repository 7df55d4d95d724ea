"""The endpoint: from `CALL sluice.serve_metrics()` to its end.

A session of its own, so that no client can delay the leader. Nothing is collected but for a
request, over connections that are opened for it and closed with it; requests at the same time share
one collection. What goes on in between is the check for interrupts, and once a second a look at the
settings, both in this session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from .. import __version__, connection
from ..backend import server
from ..backend.plpy_types import Plpy, rows, value
from ..connection import Name
from ..core import errors, metrics
from . import procedure
from .http_server import HttpServer, Reply, Shared
from .procedure import Home
from .session import Session

_LOOK_SECONDS = 1.0
_CONNECTIONS = 4
"""Databases that are asked at a time."""
_SHARE = 0.5
"""What one database may take of the time for a collection, so that a few don't use up all of it."""
_ENOUGH = 0.9
"""Of that time after which databases are no longer waited for: the answer takes time too."""

_SQLSTATES = {errno.EADDRINUSE: "55006", errno.EACCES: "42501"}


def serve(plpy: Plpy, seconds: float | None) -> str:
    """Serves for that many seconds. Gives the JSON that `_sluice.unwrap` takes."""
    return procedure.run(plpy, seconds, _serve)


async def _serve(plpy: Plpy, home: Home, seconds: float) -> None:
    if not _answer(plpy, home, "SELECT _sluice.begin_serving($1, $2)"):
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            interrupts = tasks.create_task(procedure.interrupts(plpy))
            await Endpoint(plpy, home).run(seconds)
            interrupts.cancel()
    finally:
        _answer(plpy, home, "SELECT _sluice.end_serving($1, $2)")


def _answer(plpy: Plpy, home: Home, query: str) -> Any:
    """What one of the functions gives that let one session serve at a time, told which this is."""
    types = ["pg_catalog.int4", "pg_catalog.timestamptz"]
    result = value(plpy, query, types, [home.pid, home.backend_start])
    plpy.commit()
    return result


@dataclass(frozen=True)
class Address:
    """Where to listen, and how that was given."""

    host: str
    port: int
    given: str


class Endpoint:
    """Listens where it is configured, until it is turned off or the extension is updated."""

    def __init__(self, plpy: Plpy, home: Home) -> None:
        self._plpy = plpy
        self._collector = Collector(home)
        self._server = HttpServer(
            {
                "/metrics": Shared(self._collector.metrics),
                "/healthz": Shared(self._collector.health),
            }
        )

    async def run(self, seconds: float) -> None:
        """Serves for that many seconds at the most."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        wanted = self._look()
        while wanted is not None:
            address = wanted
            async with self._listening(address):
                while wanted == address:
                    await asyncio.sleep(min(_LOOK_SECONDS, max(0, end - loop.time())))
                    wanted = self._look() if loop.time() < end else None

    def _look(self) -> Address | None:
        """Where to listen now, if anywhere; on the way tells what has failed."""
        if (failure := self._collector.failure) is not None:
            self._collector.failure = None
            server.warn(self._plpy, f"could not collect metrics: {failure}")
        (row,) = rows(self._plpy, "SELECT * FROM _sluice.endpoint_settings()")
        self._plpy.commit()
        self._collector.seconds = row["timeout_seconds"]
        # After an update of the extension the next endpoint loads the package of that version.
        if row["host"] is None or row["version"] != __version__:
            return None
        return Address(row["host"], row["port"], row["address"])

    @contextlib.asynccontextmanager
    async def _listening(self, address: Address) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._server.listening(address.host, address.port))
            except OSError as error:
                number = error.errno or 0
                refused = errors.cannot_listen(
                    _SQLSTATES.get(number, "58030"),
                    address.given,
                    # asyncio's own text has a tuple of Python's in it.
                    os.strerror(number) if number in errno.errorcode else str(error),
                )
                self._record(refused.message)
                raise refused from error
            self._record(None)
            yield

    def _record(self, error: str | None) -> None:
        value(self._plpy, "SELECT _sluice.record_endpoint($1)", ["pg_catalog.text"], [error])
        self._plpy.commit()


class Collector:
    """Makes the answers, from connections that it opens for each."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.seconds = 0.0
        """How long a collection may take, in all."""
        self.failure: str | None = None
        """Why the last one failed that did, until it is told."""

    async def metrics(self) -> Reply:
        """The exposition, or 503."""
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(started + self.seconds):
                async with self._connected(self._home.database) as control:
                    shared = await control.value("server_metrics")
                found = await self._ask_members(shared, started)
            spent = asyncio.get_running_loop().time() - started
            return Reply(200, metrics.exposition(shared, found, spent), metrics.CONTENT_TYPE)
        except Exception as error:  # noqa: BLE001 - it costs this answer, not the endpoint
            return self._failed(error)

    async def health(self) -> Reply:
        """200 while a leader holds the lease."""
        try:
            async with (
                asyncio.timeout(self.seconds),
                self._connected(self._home.database) as control,
            ):
                leads = await control.value("leader_lives")
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(error)
        return Reply(200, "ok\n") if leads else Reply(503, "no leader holds the lease\n")

    async def _ask_members(
        self, shared: Mapping[str, Any], started: float
    ) -> dict[str, Mapping[str, Any] | None]:
        members = metrics.reported(shared)
        limit = metrics.node_limit(len(members))
        turn = asyncio.Semaphore(_CONNECTIONS)

        async def ask(member: Mapping[str, Any]) -> Mapping[str, Any] | None:
            name = Name(member["database"], bytes.fromhex(member["dbname"]))
            try:
                async with (
                    asyncio.timeout_at(started + self.seconds * _ENOUGH),
                    turn,
                    asyncio.timeout(self.seconds * _SHARE),
                    self._connected(name) as session,
                ):
                    found: Mapping[str, Any] = await session.value("node_metrics", limit=limit)
            except (psycopg.Error, TimeoutError, OSError, UnicodeError):
                return None
            # Another one can have its name by now.
            return found if found["db_oid"] == member["db_oid"] else None

        found = await asyncio.gather(*map(ask, members))
        return {member["database"]: one for member, one in zip(members, found, strict=True)}

    @contextlib.asynccontextmanager
    async def _connected(self, database: Name) -> AsyncIterator[Session]:
        milliseconds = max(1, round(self.seconds * 1000))
        opened = await self._home.server.connect(
            database,
            "pg_sluice metrics",
            options=f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
        )
        async with opened as session:
            yield session

    def _failed(self, error: Exception) -> Reply:
        """The client learns that it failed, the server's log why."""
        timed_out = isinstance(error, TimeoutError)
        self.failure = "time is up" if timed_out else connection.reason(error)
        return Reply(503, "metrics could not be collected\n")
