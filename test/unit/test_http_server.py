"""The HTTP server: what it answers, and that slow clients keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pg_sluice.leader.http_server import REQUEST_BYTES, HttpServer, Reply, Shared

LIMIT_SECONDS = 20
LONG = 600.0


class Client:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> bytes:
        """All that comes until the server hangs up; what it resets counts as its end."""
        try:
            return await self._reader.read()
        except ConnectionError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        self._writer.close()


class Served:
    """A server under test; its resource /slow answers once it is let."""

    def __init__(self, **options: Any) -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self.port = 0
        self.server = HttpServer(
            {"/metrics": self._metrics, "/slow": Shared(self._slow)},
            **{"client_seconds": LONG} | options,
        )
        self._clients: list[Client] = []

    async def _metrics(self) -> Reply:
        return Reply(200, "sluice 1\n", "text/x-metrics")

    async def _slow(self) -> Reply:
        self.asked += 1
        await self.go.wait()
        return Reply(200, f"{self.asked}\n")

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Served]:
        async with self.server.listening("127.0.0.1", 0) as self.port:
            yield self
            self.close_clients()

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()

    async def client(self, data: bytes = b"") -> Client:
        made = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(made)
        made.send(data)
        return made

    async def get(self, target: str = "/metrics", *, method: str = "GET") -> bytes:
        client = await self.client(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return await client.answer()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_SECONDS), Served(**options).listening() as served:
            await test(served)

    asyncio.run(main())


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def test_get_and_head() -> None:
    async def test(served: Served) -> None:
        answer = await served.get()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/x-metrics" in head
        assert b"Content-Length: 9" in head
        assert b"Connection: close" in head
        assert body == b"sluice 1\n"
        assert await served.get(method="HEAD") == head + b"\r\n\r\n"
        assert status(await served.get("/metrics?x=1")) == 200
        assert await served.get("http://[::1]:9188/metrics?x=1") == answer

    run(test)


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.0\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx", 413),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET http://[::1/metrics HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 300 + b"\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: " + b"a" * REQUEST_BYTES, 431),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: " + b"a" * REQUEST_BYTES + b"\r\n\r\n", 431),
        (b"G" * REQUEST_BYTES * 100, 431),
    ],
)
def test_what_is_no_request_for_a_resource(request_bytes: bytes, expected: int) -> None:
    async def test(served: Served) -> None:
        client = await served.client(request_bytes)
        answer = await client.answer()
        assert status(answer) == expected
        assert (b"\r\nAllow: GET, HEAD\r\n" in answer) == (expected == 405)
        assert status(await served.get()) == 200

    run(test)


def test_a_request_in_single_bytes() -> None:
    async def test(served: Served) -> None:
        client = await served.client()
        for byte in b"GET /metrics HTTP/1.0\r\n\r\n":
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert status(await client.answer()) == 200

    run(test)


def test_a_request_has_a_deadline_in_sum() -> None:
    async def test(served: Served) -> None:
        client = await served.client(b"GET /metrics HTTP/1.0\r\n")

        async def drip() -> None:
            while True:
                client.send(b"A: a\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert status(await client.answer()) == 408
        dripping.cancel()

    run(test, client_seconds=0.3)


def test_one_that_says_nothing_is_told_and_gone() -> None:
    async def test(served: Served) -> None:
        client = await served.client()
        assert status(await client.answer()) == 408
        await served.until(lambda: not served.server._tasks)

    run(test, client_seconds=0.1)


def test_one_that_never_reads_is_gone() -> None:
    async def test(served: Served) -> None:
        served.server._resources = {"/metrics": large}
        await served.client(b"GET /metrics HTTP/1.0\r\n\r\n")
        await served.until(lambda: bool(served.server._tasks))
        await served.until(lambda: not served.server._tasks)

    async def large() -> Reply:
        return Reply(200, "x" * 50_000_000)

    run(test, client_seconds=0.3)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HT"])
def test_slow_clients_make_room(sent: bytes) -> None:
    """Ten times as many as there is room for, and each good one is answered."""

    async def test(served: Served) -> None:
        for _ in range(40):
            await served.client(sent)
            assert status(await served.get()) == 200
            assert len(served.server._tasks) <= 4

    run(test, clients=4)


def test_the_slowest_makes_room_first() -> None:
    async def test(served: Served) -> None:
        first = await served.client(b"G")
        await served.until(lambda: len(served.server._awaited) == 1)
        second = await served.client(b"G")
        await served.until(lambda: len(served.server._awaited) == 2)
        third = await served.client(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert status(await third.answer()) == 200
        assert await first.answer() == b""
        second.send(b"ET /metrics HTTP/1.0\r\n\r\n")
        assert status(await second.answer()) == 200

    run(test, clients=2)


def test_one_that_waits_for_us_keeps_its_place() -> None:
    async def test(served: Served) -> None:
        waiting = [asyncio.create_task(served.get("/slow")) for _ in range(2)]
        await served.until(lambda: len(served.server._tasks) == 2 and not served.server._awaited)
        assert await served.get() == b"", "it is turned away"
        served.go.set()
        assert [status(answer) for answer in await asyncio.gather(*waiting)] == [200, 200]

    run(test, clients=2)


def test_requests_at_the_same_time_share_an_answer() -> None:
    async def test(served: Served) -> None:
        leaving = await served.client(b"GET /slow HTTP/1.0\r\n\r\n")
        await served.until(lambda: served.asked == 1)
        waiting = [asyncio.create_task(served.get("/slow")) for _ in range(5)]
        await served.until(lambda: len(served.server._tasks) == 6 and not served.server._awaited)
        leaving.close()
        served.go.set()
        answers = await asyncio.gather(*waiting)
        assert {answer.rpartition(b"\r\n\r\n")[2] for answer in answers} == {b"1\n"}
        assert (await served.get("/slow")).endswith(b"\r\n\r\n2\n"), "and the next is anew"

    run(test)


def test_the_end_answers_complete_requests_and_no_others() -> None:
    async def main() -> None:
        served = Served()
        async with asyncio.timeout(LIMIT_SECONDS):
            async with served.server.listening("127.0.0.1", 0) as served.port:
                slow = await served.client(b"G")
                complete = asyncio.create_task(served.get("/slow"))
                await served.until(lambda: served.asked == 1)
                asyncio.get_running_loop().call_later(0.05, served.go.set)
            assert status(await complete) == 200
            assert await slow.answer() == b""
            with pytest.raises(ConnectionRefusedError):
                await served.client()
            served.close_clients()

    asyncio.run(main())


def test_an_error_ends_it_at_once() -> None:
    async def fail(served: Served) -> None:
        async with served.server.listening("127.0.0.1", 0) as served.port:
            await served.client(b"GET /slow HTTP/1.0\r\n\r\n")
            await served.until(lambda: served.asked == 1)
            raise KeyError

    async def main() -> None:
        served = Served()
        async with asyncio.timeout(LIMIT_SECONDS):
            with pytest.raises(KeyError):
                await fail(served)
            served.close_clients()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    asyncio.run(main())


def test_an_address_in_use() -> None:
    async def test(served: Served) -> None:
        with pytest.raises(OSError, match=r"(?i)address already in use"):
            async with HttpServer({}).listening("127.0.0.1", served.port):
                pass

    run(test)


def test_an_address_is_free_again_at_once() -> None:
    """Though connections of the former server are not forgotten yet."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            port = 0
            for _ in range(3):
                served = Served()
                async with served.server.listening("127.0.0.1", port) as port:
                    served.port = port
                    assert status(await served.get()) == 200
                    served.close_clients()

    asyncio.run(main())


def test_ipv6() -> None:
    async def main() -> None:
        async with HttpServer({}).listening("::1", 0) as port:
            reader, writer = await asyncio.open_connection("::1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert status(await reader.read()) == 404
            writer.close()

    asyncio.run(main())
