"""Limits and single runs under fire: samples from outside while sessions are killed.

Four databases with equal pgt_ids; sessions that start late (post_auth_delay); workers and leaders
terminated, killed and frozen at random; the worker limit changed all the while. A sampler looks
every 20 ms and collects violations:

  slots       reserved + live never exceed the effective limit; where it was lowered under them,
              they only become fewer
  sessions    every worker's backend holds a slot
  single run  no two runs of a node overlap, by history and by what the jobs themselves wrote
  exactly once   what a job wrote is what history says, fire by fire

At the end slots, queue and history agree with pg_stat_activity, the queue is empty, and the whole
limit is used again. It fails too when it made no kill or took too few samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from cluster import Cluster

DATABASES = ("stress_a", "stress_b", "stress_c", "stress_d")
NODES = 12
MOST_WORKERS = 6
LEASE_TTL = 2
SAMPLE_SECONDS = 0.02
FEWEST_SAMPLES_A_SECOND = 15
WORKER = "pg_sluice worker %"

DEFINE = """
CREATE TABLE effects (node int, due_at text, started_at timestamptz, ended_at timestamptz);
CREATE FUNCTION work(node int, seconds float) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    started_at CONSTANT timestamptz := clock_timestamp();
BEGIN
    PERFORM pg_sleep(seconds);
    INSERT INTO effects VALUES (node, NULL, started_at, clock_timestamp());
END $$;
"""


@dataclass
class Report:
    """What happened, for the closing line."""

    samples: int = 0
    most_workers: int = 0
    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Stress:
    """One stress run on a cluster of its own."""

    def __init__(self, cluster: Cluster, seconds: float, seed: int) -> None:
        self.cluster = cluster
        self.seconds = seconds
        self.random = random.Random(seed)  # noqa: S311 - chaos, no secret
        self.report = Report()
        self.over = threading.Event()
        self.frozen: int | None = None

    def run(self) -> Report:
        """Prepares, shakes, and verifies."""
        self._prepare()
        leaders = [threading.Thread(target=self._lead, daemon=True) for _ in range(2)]
        sampler = threading.Thread(target=self._sample, daemon=True)
        for thread in (*leaders, sampler):
            thread.start()
        self._shake()
        self._calm()
        self._verify()
        self.over.set()
        self._control("SELECT pg_terminate_backend(pid) FROM _sluice.lease WHERE pid IS NOT NULL")
        for thread in (*leaders, sampler):
            thread.join(30)
        return self.report

    def _prepare(self) -> None:
        self._control(f"SELECT sluice.configure('lease_ttl', '{LEASE_TTL} s', cluster => true)")
        self._control("SELECT sluice.configure('worker_start_timeout', '700 ms', cluster => true)")
        self._control("SELECT sluice.configure('worker_idle_timeout', '2 s', cluster => true)")
        for database in DATABASES:
            self._control(f"CREATE DATABASE {database}")
            with self.cluster.connect(database) as connection:
                connection.execute("CREATE EXTENSION pg_sluice CASCADE")
                connection.execute(DEFINE)
                connection.execute("SELECT sluice.configure('max_consecutive_errors', '100')")
                connection.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
                connection.execute("SELECT sluice.configure('retry_backoff_cap', '500 ms')")
                for node in range(1, NODES + 1):
                    pause = 0.01 * node
                    connection.execute(
                        f"SELECT sluice.schedule('job{node}', '1s', 'SELECT work({node}, {pause})')"
                    )
                connection.execute("SELECT sluice.start()")

    def _control(self, statement: str) -> list[tuple[Any, ...]]:
        """A statement in the control database, repeated while the server restarts."""
        for _ in range(200):
            with suppress(psycopg.OperationalError), self.cluster.connect("postgres") as connection:
                cursor = connection.execute(statement)
                return cursor.fetchall() if cursor.description else []
            time.sleep(0.1)
        raise SystemExit(f"the server does not answer: {statement}")

    def _lead(self) -> None:
        """A leader, and the next one when it ends, as pg_cron would start it."""
        while not self.over.is_set():
            with suppress(psycopg.Error), self.cluster.connect("postgres") as connection:
                connection.execute("CALL sluice.run('1 hour')")
            self.over.wait(0.2)

    def _shake(self) -> None:
        end = time.monotonic() + self.seconds
        crash = time.monotonic() + self.seconds / 3
        while time.monotonic() < end:
            time.sleep(self.random.uniform(0.1, 0.6))
            if time.monotonic() > crash:
                crash += self.seconds / 3
                self._crash_server()
                continue
            action = self.random.choices(
                [
                    self._terminate_worker,
                    self._terminate_leader,
                    self._change_limit,
                    self._delay_starts,
                    self._freeze_leader,
                ],
                weights=[8, 2, 4, 3, 1],
            )[0]
            with suppress(psycopg.Error):
                action()

    def _count(self, event: str, number: int = 1) -> None:
        self.report.events[event] += number

    def _terminate_worker(self) -> None:
        self._count(
            "workers_terminated",
            len(
                self._control(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    f" WHERE application_name LIKE '{WORKER}' ORDER BY random() LIMIT 1"
                )
            ),
        )

    def _terminate_leader(self) -> None:
        self._count(
            "leaders_terminated",
            len(
                self._control(
                    "SELECT pg_terminate_backend(pid) FROM _sluice.lease WHERE pid IS NOT NULL"
                )
            ),
        )

    def _change_limit(self) -> None:
        limit = self.random.randint(0, MOST_WORKERS)
        self._control(f"SELECT sluice.configure('max_workers', '{limit}', cluster => true)")
        self._count("limit_changes")

    def _delay_starts(self) -> None:
        seconds = self.random.choice([0, 0, 1])
        self._control(f"ALTER SYSTEM SET post_auth_delay = {seconds}")
        self.cluster.reload()
        self._count("delay_changes")

    def _freeze_leader(self) -> None:
        rows = self._control(
            "SELECT a.pid FROM _sluice.lease AS l JOIN pg_stat_activity AS a"
            " ON a.pid = l.pid AND a.backend_start = l.backend_start"
        )
        if rows:
            os.kill(rows[0][0], signal.SIGSTOP)
            self._count("leaders_frozen")
            time.sleep(LEASE_TTL + 1.5)
            with suppress(ProcessLookupError):
                os.kill(rows[0][0], signal.SIGCONT)

    def _crash_server(self) -> None:
        """kill -9 of a backend: the server ends all sessions and recovers."""
        rows = self._control(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pg_sluice %'"
            f" ORDER BY application_name LIKE '{WORKER}' DESC LIMIT 1"
        )
        if rows:
            os.kill(rows[0][0], signal.SIGKILL)
            self._count("backends_killed")
            time.sleep(1)

    def _calm(self) -> None:
        """No more faults; everything may settle."""
        self._control("ALTER SYSTEM RESET post_auth_delay")
        self.cluster.reload()
        self._control(f"SELECT sluice.configure('max_workers', '{MOST_WORKERS}', cluster => true)")

    def _sample(self) -> None:
        connection = None
        previous: tuple[int, int] | None = None
        for _ in itertools.takewhile(lambda _: not self.over.is_set(), itertools.count()):
            started = time.monotonic()
            try:
                if connection is None:
                    connection = self.cluster.connect("postgres")
                previous = self._look(connection, previous)
            except psycopg.Error:
                if connection is not None:
                    connection.close()
                connection, previous = None, None
            time.sleep(max(0.0, started + SAMPLE_SECONDS - time.monotonic()))

    def _look(
        self, connection: psycopg.Connection[Any], previous: tuple[int, int] | None
    ) -> tuple[int, int]:
        slots = "SELECT 'pg_sluice worker ' || nonce, _sluice.worker_limit() FROM _sluice.slot"
        limit_before = connection.execute("SELECT _sluice.worker_limit()").fetchone()
        before = connection.execute(slots).fetchall()
        sessions = connection.execute(
            f"SELECT application_name FROM pg_stat_activity WHERE application_name LIKE '{WORKER}'"
        ).fetchall()
        after = connection.execute(slots).fetchall()
        assert limit_before is not None
        limit = max([limit_before[0], *(row[1] for row in before)])
        # A slot that came since the last look came under the limit of now or of then. The first
        # look at a server that has restarted knows no then.
        allowed = max(limit, *(previous or (64,)))
        taken = len(before)
        self.report.samples += 1
        self.report.most_workers = max(self.report.most_workers, len(sessions))
        if taken > allowed:
            self._violate(f"{taken} slots are taken under a limit of {limit}, before: {previous}")
        known = {row[0] for row in (*before, *after)}
        for (session,) in sessions:
            if session not in known:
                self._violate(f"{session} has no slot")
        return limit, taken

    def _violate(self, violation: str) -> None:
        self.report.violations.append(violation)

    def _verify(self) -> None:
        self._full_capacity()
        deadline = time.monotonic() + 60
        while self._control("SELECT sluice.drain('20 s', cluster => true)") != [("drained",)]:
            if time.monotonic() > deadline:
                self._violate("not drained after a minute")
                return
        for row in self._control("SELECT name FROM _sluice.queue WHERE state = 'running'"):
            self._violate(f"{row[0]} is still running by the queue")
        self._wait_until_empty("SELECT * FROM _sluice.slot", "slots are still taken")
        self._wait_until_empty(
            f"SELECT pid FROM pg_stat_activity WHERE application_name LIKE '{WORKER}'",
            "workers are still there",
        )
        for database in DATABASES:
            self._verify_database(database)
        self._control("SELECT sluice.resume(cluster => true)")
        for database in DATABASES:
            with self.cluster.connect(database) as connection:
                for node in range(1, NODES + 1):
                    connection.execute(f"SELECT sluice.unschedule('job{node}')")
        self._wait_until_empty("SELECT * FROM _sluice.queue", "runs are still queued")

    def _full_capacity(self) -> None:
        """The whole limit is in use at some moment again."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = self._control("SELECT count(*) FROM _sluice.slot WHERE state = 'live'")
            if rows == [(MOST_WORKERS,)]:
                return
            time.sleep(0.02)
        self._violate(f"never {MOST_WORKERS} live workers at the end")

    def _wait_until_empty(self, statement: str, what: str) -> None:
        deadline = time.monotonic() + 30
        while rows := self._control(statement):
            if time.monotonic() > deadline:
                self._violate(f"{what}: {len(rows)}, the first {rows[0]}")
                return
            time.sleep(0.1)

    def _verify_database(self, database: str) -> None:
        overlap = """
            SELECT count(*) FROM (
                SELECT started_at,
                    lag(ended_at) OVER (PARTITION BY {key} ORDER BY started_at) AS before
                FROM {table} WHERE {where}
            ) AS o WHERE o.started_at < o.before
        """
        with self.cluster.connect(database) as connection:

            def value(statement: str) -> Any:
                row = connection.execute(statement).fetchone()
                return row and row[0]

            ran = value("SELECT count(*) FROM sluice.history WHERE outcome = 'succeeded'")
            effects = value("SELECT count(*) FROM effects")
            if ran != effects:
                self._violate(f"{database}: {ran} successes in history, {effects} effects")
            for table, key, where in (
                ("sluice.history", "pgt_id", "outcome = 'succeeded'"),
                ("effects", "node", "true"),
            ):
                if overlaps := value(overlap.format(table=table, key=key, where=where)):
                    self._violate(f"{database}: {overlaps} runs overlap in {table}")
            doubled = value(
                "SELECT count(*) FROM (SELECT FROM sluice.history WHERE outcome = 'succeeded'"
                " GROUP BY pgt_id, due_at HAVING count(*) > 1) AS d"
            )
            if doubled:
                self._violate(f"{database}: {doubled} fires ran twice")
            self._count("runs", ran)
            for outcome, count in connection.execute(
                "SELECT outcome, count(*) FROM sluice.history GROUP BY 1"
            ):
                self._count(f"outcome_{outcome}", count)


def main() -> None:
    """Runs once and prints one JSON line; exits 1 on any violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    settings = {"max_connections": 60, "autovacuum_naptime": 5}
    with Cluster(settings=settings) as cluster:
        cluster.create_extensions()
        report = Stress(cluster, arguments.seconds, arguments.seed).run()
    kills = sum(
        report.events[event]
        for event in (
            "workers_terminated",
            "leaders_terminated",
            "backends_killed",
            "leaders_frozen",
        )
    )
    if kills == 0:
        report.violations.append("nothing was killed")
    if report.samples < FEWEST_SAMPLES_A_SECOND * arguments.seconds:
        report.violations.append(f"only {report.samples} samples were taken")
    print(
        json.dumps(
            {
                "seed": arguments.seed,
                "samples": report.samples,
                "kills": kills,
                "most_workers": report.most_workers,
                **report.events,
                "violations": len(report.violations),
            }
        )
    )
    for violation in report.violations[:20]:
        print(violation, file=sys.stderr)
    raise SystemExit(bool(report.violations))


if __name__ == "__main__":
    main()
