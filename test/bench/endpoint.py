"""What the endpoint of the metrics costs: idle, for a scrape, and with slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lateness import fires_of
from report import line, rounded, spread, type_of_line
from rig import (
    Member,
    create_sources,
    create_stream_tables,
    endpoint,
    insert_jobs,
    leader,
    members,
    observe,
)

_WARM_UP_SECONDS = 3.0
_IDLE_SECONDS = 60.0
_SLOW_SECONDS = 30.0
_AFTERMATH_SECONDS = 2.0
_SLOW_CLIENTS = 20
_NODES = 100
_SCRAPES = 20
_TIMEOUT_SECONDS = 5.0
"""Of a collection, by default."""


def idle_endpoint() -> Iterator[type_of_line]:
    """A minute with an endpoint and no scrape: its queries, by pg_stat_statements, and its CPU."""
    with members(
        preload=("pg_cron", "pg_stat_statements"), settings={"pg_stat_statements.track": "all"}
    ) as (member,):
        cluster = member.cluster
        cluster.execute("CREATE EXTENSION pg_stat_statements")
        with endpoint(cluster) as port:
            _scrape(port)
            seen = _statements(member)
            assert seen.get("server_metrics"), "a scrape is seen"
            assert seen.get("node_metrics"), "a scrape is seen"
            time.sleep(_WARM_UP_SECONDS)
            cluster.execute("SELECT pg_stat_statements_reset()")
            window = observe(cluster, _IDLE_SECONDS)
            found = _statements(member)
    collections = sum(calls for name, calls in found.items() if name.endswith("_metrics"))
    yield line(
        "idle_endpoint",
        collections,
        "collection queries in a minute",
        target="0",
        cpu_percent=window.cpu_percent(),
        calls_per_second={
            name: rounded(calls / window.seconds) for name, calls in sorted(found.items())
        },
    )


def scrape_cost() -> Iterator[type_of_line]:
    """A scrape with few nodes in one database, and with as many as have series."""
    for nodes, databases in ((10, 1), (10_000, 10)):
        with members(databases) as made:
            for member in made:
                insert_jobs(member, nodes // databases, "@every 1h")
            with endpoint(made[0].cluster) as port:
                _scrape(port)
                taken = [_scrape(port) for _ in range(_SCRAPES)]
        milliseconds = [1000 * seconds for seconds, _ in taken]
        yield line(
            "scrape_cost",
            spread(milliseconds)["p50"],
            "ms",
            nodes=nodes,
            databases=databases,
            milliseconds=spread(milliseconds),
            kilobytes=rounded(taken[-1][1] / 1000),
        )


def slow_clients() -> Iterator[type_of_line]:
    """A hundred stream tables at '1s' without clients, and with twenty slow ones and a good one."""
    with members() as (member,):
        create_sources(member)
        create_stream_tables(member, _NODES, "1s")
        with leader(member.cluster), endpoint(member.cluster) as port:
            time.sleep(_WARM_UP_SECONDS)
            alone = _lateness(member)
            with _slow_clients(port) as connections, _good_client(port) as answers:
                beside = _lateness(member)
    yield line(
        "slow_clients",
        1000 * max(answers),
        "ms to the slowest answer",
        target=f"< {1000 * _TIMEOUT_SECONDS:g}",
        compared_to={"lateness_ms": spread(alone)},
        lateness_ms=spread(beside),
        answer_ms=spread([1000 * seconds for seconds in answers]),
        answers=len(answers),
        slow_connections=connections[0],
    )


def _statements(member: Member) -> dict[str, int]:
    """Calls of statements by the function of ours that they call first."""
    found: dict[str, int] = {}
    for query, calls in member.cluster.execute("SELECT query, calls FROM pg_stat_statements"):
        if name := re.search(r"(?:SELECT|FROM) _sluice\.(\w+)\(", query):
            found[name[1]] = found.get(name[1], 0) + calls
        elif query == "SELECT $1":
            found["interrupts"] = found.get("interrupts", 0) + calls
    return found


def _scrape(port: int) -> tuple[float, int]:
    """Seconds and bytes."""
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"a scrape gave {response.status}: {body.decode()}")
    return time.monotonic() - started, len(body)


def _lateness(member: Member) -> list[float]:
    window = observe(member.cluster, _SLOW_SECONDS)
    time.sleep(_AFTERMATH_SECONDS)
    return [late for late in fires_of(member, window) if late is not None]


@contextmanager
def _good_client(port: int) -> Iterator[list[float]]:
    """Scrapes once a second meanwhile; gives the seconds that the answers took."""
    answers: list[float] = []
    over = threading.Event()

    def work() -> None:
        while not over.wait(1):
            answers.append(_scrape(port)[0])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


@contextmanager
def _slow_clients(port: int) -> Iterator[list[int]]:
    """Clients that send a byte a second, and come again when they are sent away; counts them."""
    connections = [0]

    async def drip() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connections[0] += 1
            for byte in b"GET /metrics HTTP/1.1\r\nHost: " + b"x" * 1000:
                if reader.at_eof() or writer.is_closing():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(1)
            writer.close()

    async def keep_dripping() -> None:
        while True:
            with contextlib.suppress(OSError):
                await drip()

    async def all_of_them() -> None:
        await asyncio.gather(*(keep_dripping() for _ in range(_SLOW_CLIENTS)))

    loop = asyncio.new_event_loop()
    task = loop.create_task(all_of_them())

    def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield connections
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
