"""A throwaway cluster made ready for a figure: member databases, nodes, a leader, a stopwatch."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from cluster import Cluster
from processes import cluster_seconds
from report import rounded

_BULK = 100
_SOURCES = 10
_QUERIES = (
    "SELECT kind, count(*) AS orders, sum(amount) AS total FROM {source} GROUP BY kind",
    "SELECT id, amount FROM {source} WHERE kind = 3",
    "SELECT s.kind, k.title, max(s.amount) AS largest"
    " FROM {source} AS s JOIN kinds AS k ON k.kind = s.kind GROUP BY s.kind, k.title",
)
"""Queries of stream tables over small tables: aggregate, filter, join."""

_LEADER = "bench leader"
_ENDPOINT = "bench endpoint"
FEEDER = "bench feeder"
_SESSIONS = {
    _LEADER: "leader",
    _ENDPOINT: "endpoint",
    FEEDER: FEEDER,
    "pg_sluice leader": "control",
}
"""What sessions are by their application_name; ours of another name are what their name says."""


@dataclass
class Member:
    """A member database."""

    cluster: Cluster
    name: str
    oid: int

    def execute(self, query: str, parameters: Any = None) -> list[Any]:
        return self.cluster.execute(query, parameters, dbname=self.name)


@contextmanager
def members(count: int = 1, **arguments: Any) -> Iterator[list[Member]]:
    """Member databases on a fresh `Cluster` whose pg_cron starts nothing of its own."""
    with Cluster(**arguments) as cluster:
        cluster.create_extensions()
        made = [_member(cluster, f"member{number}") for number in range(1, count + 1)]
        cluster.execute("SELECT cron.unschedule('pg_sluice')")
        yield made


def _member(cluster: Cluster, name: str) -> Member:
    cluster.execute(f"CREATE DATABASE {name}")
    cluster.execute("CREATE EXTENSION pg_sluice CASCADE", dbname=name)
    cluster.execute("SELECT sluice.start()", dbname=name)
    ((oid,),) = cluster.execute("SELECT oid FROM pg_database WHERE datname = %s", [name])
    return Member(cluster, name, oid)


def create_sources(member: Member) -> None:
    """The small tables that `definition` reads: a hundred rows each, for every role to read."""
    member.execute(
        "CREATE TABLE kinds AS SELECT k AS kind, 'kind ' || k AS title"
        " FROM generate_series(0, 9) AS k"
    )
    for number in range(_SOURCES):
        member.execute(
            f"CREATE TABLE source{number} AS"
            " SELECT g AS id, g % 10 AS kind, g * 1.5 AS amount FROM generate_series(1, 100) AS g"
        )
    member.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO public")
    member.execute("ANALYZE")


def admit(member: Member, role: str) -> None:
    """Lets a role own stream tables and jobs in the member, and do no more than that."""
    member.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
    for function in ("bulk_create", "create_stream_table", "schedule"):
        member.execute(f"GRANT EXECUTE ON FUNCTION sluice.{function} TO {role}")


def definition(number: int, schedule: str) -> dict[str, str]:
    """The arguments of one stream table over the small tables."""
    query = _QUERIES[number % len(_QUERIES)].format(source=f"source{number % _SOURCES}")
    return {"name": f"stream{number}", "query": query, "schedule": schedule}


def create_stream_tables(
    member: Member, count: int, schedule: str, user: str = "postgres"
) -> list[int]:
    """Stream tables whose sources never change; gives their pgt_ids."""
    made = [definition(number, schedule) for number in range(count)]
    with member.cluster.connect(member.name, user) as connection:
        return [
            row[0]
            for start in range(0, count, _BULK)
            for row in connection.execute(
                "SELECT pgt_id FROM sluice.bulk_create(%s)", [Jsonb(made[start : start + _BULK])]
            )
        ]


def insert_jobs(member: Member, count: int, schedule: str, due: int = 0) -> None:
    """Jobs written straight into the catalog, since thousands are needed; so many are due."""
    member.execute(
        """
        WITH made AS (
            INSERT INTO _sluice.node (
                kind, job_name, job_owner, job_search_path, command, schedule, anchor, next_fire_at
            )
            SELECT 'job', 'job ' || g, 'postgres', 'public', 'SELECT 1', %s, now(),
                CASE WHEN g <= %s THEN now() - interval '1 s' ELSE now() + interval '1 h' END
            FROM generate_series(1, %s) AS g
            RETURNING pgt_id
        )
        INSERT INTO _sluice.graph (pgt_id, depth, upstream) SELECT pgt_id, 0, '{}' FROM made
        """,
        [schedule, due, count],
    )
    member.execute("VACUUM ANALYZE _sluice.node, _sluice.graph")


@contextmanager
def leader(cluster: Cluster) -> Iterator[int]:
    """A leader on a plain connection, ready once it ticks every member; gives its backend's PID."""
    ready = "SELECT bool_and(m.state = 'scheduled') FROM _sluice.member AS m"
    with _calling(cluster, "run", _LEADER, ready) as pid:
        yield pid


@contextmanager
def endpoint(cluster: Cluster) -> Iterator[int]:
    """An endpoint on a plain connection, ready once it listens; gives its port."""
    # The name of a Unix socket has it; on TCP it is free.
    port = cluster.port
    cluster.execute(
        "SELECT sluice.configure('metrics_listen', %s, cluster => true)", [f"127.0.0.1:{port}"]
    )

    cluster.execute("SELECT cron.unschedule('pg_sluice metrics')")

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except ConnectionRefusedError:
            return False
        return True

    with _calling(cluster, "serve_metrics", _ENDPOINT, listens):
        yield port


@contextmanager
def _calling(
    cluster: Cluster, procedure: str, name: str, ready: str | Callable[[], bool]
) -> Iterator[int]:
    """A procedure that runs meanwhile on a connection of that name; gives its backend's PID."""
    ended: list[psycopg.Error | None] = []

    def call() -> None:
        try:
            connection.execute(f"CALL sluice.{procedure}('1 hour')")
            ended.append(None)
        except psycopg.Error as error:
            ended.append(error)

    with cluster.connect(application_name=name) as connection:
        thread = threading.Thread(target=call)
        thread.start()
        try:
            cluster.wait_for(ready, timeout=20)
            yield connection.info.backend_pid
            if ended:
                raise RuntimeError(f"{procedure}() ended early: {ended[0]}")
        finally:
            connection.cancel()
            thread.join(20)


@dataclass
class Window:
    """A stretch of time and the CPU seconds that were spent in it, by who spent them."""

    started_at: float
    ended_at: float
    cpu: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    def cpu_ms_per_run(self, runs: int) -> dict[str, float]:
        """CPU per run, in all and by who spent it."""
        shares = {"all": sum(self.cpu.values())} | self.cpu
        return {who: rounded(1000 * spent / max(1, runs)) for who, spent in shares.items()}

    def cpu_percent(self) -> dict[str, float]:
        """CPU in percent of one core, in all and by who spent it."""
        shares = {"all": sum(self.cpu.values())} | self.cpu
        return {who: rounded(100 * spent / self.seconds) for who, spent in shares.items()}


def observe(cluster: Cluster, seconds: float) -> Window:
    """Waits that long. What the benchmark's own sessions spend is left out."""
    postmaster = cluster.postmaster_pid
    if postmaster is None:
        raise RuntimeError("the server is down")
    who = _sessions(cluster)
    before = cluster_seconds(postmaster)
    started_at = time.time()
    time.sleep(seconds)
    ended_at = time.time()
    after = cluster_seconds(postmaster)
    who |= _sessions(cluster)
    cpu: defaultdict[str, float] = defaultdict(float)
    for pid, spent in after.items():
        cpu[who.get(pid, "server")] += spent - before.get(pid, 0.0)
    # What has ended counts as the postmaster's, with what it had spent before.
    cpu["server"] -= sum(before[pid] for pid in before.keys() - after.keys())
    cpu.pop(FEEDER, None)
    return Window(started_at, ended_at, dict(cpu))


def _sessions(cluster: Cluster) -> dict[int, str]:
    """What the sessions are, by PID."""
    found = cluster.execute("SELECT pid, application_name FROM pg_stat_activity")
    return {
        pid: _SESSIONS.get(name) or name.split()[1]
        for pid, name in found
        if name in _SESSIONS or name.startswith("pg_sluice ")
    }
