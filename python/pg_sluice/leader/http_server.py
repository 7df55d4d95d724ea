"""A small HTTP server: GET and HEAD of a few resources, and nothing that a client can hold up.

A client has some seconds to send its request, and again to take the answer; what it sends is
bounded. When as many are connected as may be, the one that keeps us waiting longest makes room for
the next: so slow clients, however many, don't keep out one that is not. Where all wait for us, the
next is turned away.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11

CLIENTS = 16
CLIENT_SECONDS = 5.0
"""For the whole request, and again for the answer."""
REQUEST_BYTES = 8192
_TEXT = "text/plain; charset=utf-8"
_READ_BYTES = 4096


@dataclass(frozen=True)
class Reply:
    """An answer; an empty body is the phrase of the status."""

    status: int
    body: str = ""
    content_type: str = _TEXT


Resource = Callable[[], Awaitable[Reply]]


class _Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.http = h11.Connection(h11.SERVER)

    def abort(self) -> None:
        self.writer.transport.abort()

    async def request(self) -> h11.Request | Reply | None:
        """What it asks for, or the answer to what is no request, or None when it has left."""
        received = 0
        request: h11.Request | None = None
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError as error:
                return Reply(error.error_status_hint)
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request
            elif isinstance(event, h11.ConnectionClosed):
                return None
            elif request is not None:
                return Reply(413)
            else:
                data = await self.reader.read(_READ_BYTES)
                received += len(data)
                if received > REQUEST_BYTES:
                    return Reply(431)
                self.http.receive_data(data)

    def write(self, reply: Reply, *, with_body: bool = True) -> None:
        """Hands the answer over, to be sent."""
        phrase = HTTPStatus(reply.status).phrase
        body = (reply.body or f"{phrase}\n").encode()
        headers = [
            ("Content-Type", reply.content_type),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
        ]
        if reply.status == 405:
            headers.append(("Allow", "GET, HEAD"))
        events: list[h11.Event] = [
            h11.Response(status_code=reply.status, headers=headers, reason=phrase),
            *([h11.Data(data=body)] if with_body else []),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.writer.write(self.http.send(event) or b"")

    async def hang_up(self) -> None:
        """Waits until the client has the answer and hangs up."""
        await self.writer.drain()
        # Closed at once, with something unread, the answer could be lost on its way.
        self.writer.write_eof()
        while await self.reader.read(_READ_BYTES):
            pass


class HttpServer:
    """Serves resources, by their paths, until it is closed."""

    def __init__(
        self,
        resources: Mapping[str, Resource],
        *,
        clients: int = CLIENTS,
        client_seconds: float = CLIENT_SECONDS,
    ) -> None:
        self._resources = resources
        self._most = clients
        self._seconds = client_seconds
        self._tasks: dict[_Client, asyncio.Task[Any] | None] = {}
        self._awaited: dict[_Client, None] = {}
        """Those that keep us waiting, the longest first."""

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Listens on an IP address meanwhile; gives the port. Raises OSError.

        At the end those whose request is complete get their answer, unless an error is the end.
        """
        # Not by name: asyncio would look up even a number in another thread.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        server = await asyncio.start_server(self._serve, sock=listener, limit=REQUEST_BYTES)
        try:
            yield listener.getsockname()[1]
        finally:
            server.close()
        for client in list(self._awaited):
            client.abort()
        await asyncio.gather(*filter(None, self._tasks.values()), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(reader, writer)
        try:
            if self._has_room():
                self._tasks[client] = asyncio.current_task()
                await self._answer(client)
        except (OSError, TimeoutError):
            # It left, or made room, or had its time.
            pass
        finally:
            client.abort()
            self._forget(client)

    def _has_room(self) -> bool:
        """Whether another client has a place, which the slowest one may have to give up."""
        if len(self._tasks) < self._most:
            return True
        if not self._awaited:
            return False
        slowest = next(iter(self._awaited))
        slowest.abort()
        self._forget(slowest)
        return True

    def _forget(self, client: _Client) -> None:
        self._tasks.pop(client, None)
        self._awaited.pop(client, None)

    @contextlib.asynccontextmanager
    async def _awaiting(self, client: _Client) -> AsyncIterator[None]:
        """What is up to the client: it has its time, and may have to make room."""
        if client not in self._tasks:
            raise ConnectionAbortedError
        self._awaited[client] = None
        try:
            async with asyncio.timeout(self._seconds):
                yield
        finally:
            self._awaited.pop(client, None)

    async def _answer(self, client: _Client) -> None:
        try:
            async with self._awaiting(client):
                request = await client.request()
        except TimeoutError:
            request = Reply(408)
        if request is None:
            return
        if isinstance(request, Reply):
            reply, with_body = request, True
        else:
            reply, with_body = await self._reply(request), request.method != b"HEAD"
        async with self._awaiting(client):
            client.write(reply, with_body=with_body)
            await client.hang_up()

    async def _reply(self, request: h11.Request) -> Reply:
        try:
            # It may be a whole URL, which every server is to take (RFC 9112, 3.2.2).
            path = urlsplit(request.target.decode("latin-1")).path
        except ValueError:
            return Reply(400)
        resource = self._resources.get(path)
        if resource is None:
            return Reply(404)
        if request.method not in (b"GET", b"HEAD"):
            return Reply(405)
        return await resource()


class Shared:
    """A resource that is made once for all that ask for it at the same time."""

    def __init__(self, make: Resource) -> None:
        self._make = make
        self._task: asyncio.Task[Reply] | None = None

    async def __call__(self) -> Reply:
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._make())
        return await self._task
