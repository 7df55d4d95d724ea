"""A load that ends in every way a queued run can end, while gauges are compared with the table.

Of each ten runs seven succeed, one is cancelled, one is killed (its session is terminated), and one
is queued in a database where no worker can be started: these run once one can. The leader is ended
in the middle of it. A sampler compares, in one snapshot each time, what the gauges say with the
count of rows in _sluice.queue.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster import Cluster, Database, Leader
from runs import configure

ROUND = 500
"""Runs in a round."""
_STEP = ROUND // 10
_COMMANDS = {
    "good": "SELECT 1",
    "cancelled": "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(60)",
    "killed": "SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(60)",
}
_SHARES = {"good": 7, "cancelled": 1, "killed": 1}
_SETTINGS = {
    "lease_ttl": "1 s",
    # No attempt is made again by itself, and nothing is suspended.
    "retry_backoff_base": "1 h",
    "retry_backoff_cap": "24 h",
    "max_consecutive_errors": "100",
}
_DUE = "UPDATE _sluice.node SET next_fire_at = now(), retry_at = NULL, retry_of = NULL"
_GAUGES = """
WITH counted AS (
    SELECT m.db_oid, s.state, count(q.run_id) AS depth
    FROM _sluice.member AS m
    CROSS JOIN (VALUES ('queued'), ('running'), ('ended')) AS s (state)
    LEFT JOIN _sluice.queue AS q ON q.db_oid = m.db_oid AND q.state = s.state
    GROUP BY m.db_oid, s.state
), databases AS (
    SELECT (d ->> 'db_oid')::oid AS db_oid, s.state, (d ->> s.state)::bigint AS depth
    FROM jsonb_array_elements(_sluice.database_rows()) AS d
    CROSS JOIN (VALUES ('queued'), ('running')) AS s (state)
), health AS (
    SELECT m.db_oid, s.state, (_sluice.health_of(m.db_oid) ->> s.state)::bigint AS depth
    FROM _sluice.member AS m
    CROSS JOIN (VALUES ('queued'), ('running')) AS s (state)
), listed AS (
    SELECT (q ->> 'db_oid')::oid AS db_oid, q ->> 'state' AS state, count(*) AS depth
    FROM jsonb_array_elements(_sluice.queue_rows()) AS q GROUP BY 1, 2
), metrics AS (
    SELECT d.oid AS db_oid, q ->> 'state' AS state, (q ->> 'depth')::bigint AS depth
    FROM jsonb_array_elements(_sluice.server_metrics() -> 'queue') AS q
    JOIN pg_database AS d ON d.datname = q ->> 'database'
)
SELECT
    (SELECT count(*) FROM _sluice.queue WHERE state = 'queued') AS queued,
    (
        SELECT jsonb_agg(jsonb_build_object(
            'gauge', x.gauge, 'state', x.state, 'says', x.depth, 'is', c.depth
        ))
        FROM counted AS c
        JOIN (
            SELECT 'databases' AS gauge, d.* FROM databases AS d
            UNION ALL SELECT 'health', h.* FROM health AS h
            UNION ALL SELECT 'queue', c.db_oid, c.state, COALESCE(l.depth, 0)
                FROM counted AS c LEFT JOIN listed AS l USING (db_oid, state)
            UNION ALL SELECT 'metrics', c.db_oid, c.state, COALESCE(m.depth, 0)
                FROM counted AS c LEFT JOIN metrics AS m USING (db_oid, state)
        ) AS x ON x.db_oid = c.db_oid AND x.state = c.state
        WHERE x.depth <> c.depth
    ) AS differences
"""


@dataclass
class Report:
    """What a load did."""

    runs: int = 0
    samples: int = 0
    deepest: int = 0
    spawn_failures: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    differences: list[Any] = field(default_factory=list)
    left: int = 0


class QueueLoad:
    """A load of that many rounds on two databases that are members of nothing yet."""

    def __init__(self, cluster: Cluster, served: Database, refused: Database, rounds: int) -> None:
        self._cluster = cluster
        self._served = served
        self._refused = refused
        self._rounds = rounds
        self._over = threading.Event()
        self.report = Report()

    def run(self) -> Report:
        """All of it; the leaders that it makes end with it."""
        configure(self._cluster, **_SETTINGS)
        jobs = [
            (f"{kind}{number}", _COMMANDS[kind])
            for kind, share in _SHARES.items()
            for number in range(share * _STEP)
        ]
        _define(self._served, jobs)
        _define(
            self._refused, [(f"late{n}", _COMMANDS["good"]) for n in range(_STEP * self._rounds)]
        )
        with self._sampled(), self._led() as lead:
            lead()
            self._cluster.wait_for("SELECT bool_and(state = 'scheduled') FROM _sluice.member")
            with self._connections_refused():
                for number in range(1, self._rounds + 1):
                    self._served.execute(_DUE)
                    if number == (self._rounds + 1) // 2:
                        self._end_leader(lead)
                    self._served.wait_for(
                        f"SELECT count(*) >= {number * len(jobs)} FROM sluice.history", timeout=60
                    )
            self._refused.wait_for(
                f"SELECT count(*) >= {_STEP * self._rounds} FROM sluice.history", timeout=60
            )
            self._cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
        self._count()
        return self.report

    @contextmanager
    def _connections_refused(self) -> Iterator[None]:
        """Queues the runs of the other database, where no worker can be started meanwhile."""
        with self._refused.connect() as connection:
            allow = f"ALTER DATABASE {self._refused.name} ALLOW_CONNECTIONS"
            self._cluster.execute(f"{allow} false")
            try:
                connection.execute(_DUE)
                self._cluster.wait_for(
                    "SELECT spawn_failures > 0 FROM _sluice.member AS m"
                    f" JOIN pg_database AS d ON d.oid = m.db_oid"
                    f" WHERE d.datname = '{self._refused.name}'"
                )
                yield
                # Before a worker comes about, which counts anew.
                ((self.report.spawn_failures,),) = self._cluster.execute(
                    "SELECT max(spawn_failures) FROM _sluice.member"
                )
            finally:
                self._cluster.execute(f"{allow} true")

    @contextmanager
    def _led(self) -> Iterator[Any]:
        leaders: list[Leader] = []

        def lead() -> Leader:
            leaders.append(Leader(self._cluster))
            self._cluster.wait_for(lambda: leaders[-1].leads)
            return leaders[-1]

        try:
            yield lead
        finally:
            for leader in leaders:
                if leader.alive:
                    leader.terminate()
                leader.join()

    def _end_leader(self, lead: Any) -> None:
        """Ends the leader while runs are in progress; another takes over."""
        self._cluster.wait_for("SELECT count(*) > 0 FROM _sluice.queue WHERE state = 'running'")
        self._cluster.execute("SELECT pg_terminate_backend(pid) FROM _sluice.lease")
        lead()

    @contextmanager
    def _sampled(self) -> Iterator[None]:
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        try:
            yield
        finally:
            self._over.set()
            sampler.join()

    def _sample(self) -> None:
        with self._cluster.connect() as connection:
            while not self._over.wait(0.02):
                row = connection.execute(_GAUGES).fetchone()
                assert row is not None
                queued, differences = row
                self.report.samples += 1
                self.report.deepest = max(self.report.deepest, queued)
                self.report.differences += differences or []

    def _count(self) -> None:
        for database in (self._served, self._refused):
            for outcome, count in database.execute(
                "SELECT outcome, count(*) FROM sluice.history GROUP BY 1"
            ):
                self.report.outcomes[outcome] += count
        self.report.runs = self.report.outcomes.total()
        ((self.report.left,),) = self._cluster.execute("SELECT count(*) FROM _sluice.queue")


def _define(database: Database, jobs: list[tuple[str, str]]) -> None:
    with database.connect() as connection, connection.transaction():
        for name, command in jobs:
            connection.execute("SELECT sluice.schedule(%s, 'manual', %s)", [name, command])
        connection.execute("SELECT sluice.start()")


def failures(report: Report, rounds: int) -> list[str]:
    """What is not as it must be."""
    served, late = rounds * sum(_SHARES.values()) * _STEP, rounds * _STEP
    killed = report.outcomes["connection_lost"] + report.outcomes["worker_crashed"]
    must = {
        "every run is on record once": report.runs == served + late,
        "the queue is empty": report.left == 0,
        "every gauge is the count, in every sample": not report.differences,
        "there were samples": report.samples > 20,
        "it was a queue": report.deepest > _STEP,
        "workers could not be started": report.spawn_failures > 0,
        # What ran when the leader was ended was killed too.
        "a tenth was cancelled": rounds * _STEP - 8
        <= report.outcomes["cancelled"]
        <= rounds * _STEP,
        "a tenth was killed": rounds * _STEP <= killed <= rounds * _STEP + 8,
    }
    return [what for what, holds in must.items() if not holds]
