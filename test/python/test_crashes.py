"""The server is killed again and again while runs fail: what is counted stays what has happened."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from cluster import Cluster, Leader
from runs import configure

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

ROUNDS = 50
LIMIT = 8
"""Failures in a row after which a node is suspended."""
LEAST_HITS = 10
"""Rounds that must have cut off a failing run, or the test tests nothing."""

# An attempt tells of itself in the server's log, which no crash takes back.
ATTEMPT = "RAISE LOG 'attempt of {name}'; "
FAIL = "RAISE 'no' USING ERRCODE = '40001';"
COMMANDS = {
    **{f"fails_{n}": FAIL for n in range(4)},
    **{f"flaky_{n}": f"IF random() < 0.7 THEN {FAIL} END IF;" for n in range(2)},
    **{f"succeeds_{n}": "INSERT INTO effects VALUES ('{name}');" for n in range(2)},
    "top_level": FAIL,
    "broken": "PERFORM 1 / 0;",
}
NEVER_RESET = "broken"

# The time between the failure of a run and its accounting, made long enough to be hit.
SLOW_ACCOUNTING = """
ALTER FUNCTION _sluice.failure_state(bigint) RENAME TO failure_state_at_once;
CREATE FUNCTION _sluice.failure_state(
    _pgt_id bigint, OUT consecutive_errors integer, OUT work_mem bigint, OUT policy jsonb
)
RETURNS SETOF record LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.01);
    RETURN QUERY SELECT * FROM _sluice.failure_state_at_once(_pgt_id);
    PERFORM pg_sleep(0.01);
END $$;
"""


@dataclass(frozen=True)
class State:
    """A node and its history, as one snapshot has them."""

    status: str
    errors: int
    """What the node counts."""
    failed: int
    """What history has since the last success or reset."""
    attempts: int
    crashed: int


def states(connection: psycopg.Connection[Any]) -> dict[str, State]:
    rows = connection.execute(
        """
        WITH since AS (
            SELECT n.pgt_id, greatest(
                (SELECT max(h.ended_at) FROM sluice.history AS h
                 WHERE h.pgt_id = n.pgt_id AND h.outcome IN ('succeeded', 'no_change')),
                (SELECT max(r.at) FROM resets AS r WHERE r.name = n.name),
                '-infinity'
            ) AS at
            FROM sluice.nodes AS n
        )
        SELECT n.name, n.status, n.consecutive_errors,
            count(*) FILTER (
                WHERE h.ended_at > s.at AND h.outcome NOT IN ('succeeded', 'no_change', 'skipped')
            ),
            count(*) FILTER (WHERE h.outcome <> 'skipped'),
            count(*) FILTER (WHERE h.outcome = 'worker_crashed')
        FROM sluice.nodes AS n
        JOIN since AS s USING (pgt_id)
        LEFT JOIN sluice.history AS h USING (pgt_id)
        GROUP BY 1, 2, 3
        """
    )
    return {name: State(*row) for name, *row in rows}


class Crashes:
    """The rounds, and what they have seen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = random.Random(20240229)  # noqa: S311 - chaos, no secret
        self._log = 0
        self._started: Counter[str] = Counter()
        self._fewer: Counter[str] = Counter()
        """Attempts that have started and are not in history, by node."""
        self._suspended: dict[str, State] = {}
        self.hits = 0

    def attempts_told(self) -> list[str]:
        """The attempts that the log tells of since the last call."""
        with self._cluster.log_file.open("rb") as log:
            log.seek(self._log)
            text = log.read()
        # A line that is being written is for the next time.
        end = text.rfind(b"\n") + 1
        self._log += end
        told = re.findall(
            r"LOG:  attempt of (\w+)$", text[:end].decode(errors="replace"), re.MULTILINE
        )
        self._started.update(told)
        return told

    def kill(self) -> None:
        """Some time after a failing run has started, which may be at any point of its end."""
        self._cluster.wait_for(
            lambda: any(name.startswith(("fails", "top")) for name in self.attempts_told()),
            timeout=60,
        )
        time.sleep(self._random.uniform(0, 0.06))
        pid = self._cluster.postmaster_pid
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)
        self._cluster.wait_for(lambda: self._cluster.postmaster_pid is None, timeout=60)
        self.attempts_told()

    def verify(self, connection: psycopg.Connection[Any]) -> dict[str, State]:
        """What holds at every instant."""
        found = states(connection)
        for name, state in found.items():
            assert state.errors == state.failed, (name, state)
            assert state.status == ("suspended" if state.errors >= LIMIT else "active"), (
                name,
                state,
            )
        for name, state in self._suspended.items():
            assert found[name] == state, name
        assert connection.execute(
            "SELECT count(*) = count(DISTINCT (pgt_id, due_at)),"
            " count(*) FILTER (WHERE name LIKE 'succeeds%') = (SELECT count(*) FROM effects)"
            " FROM sluice.history WHERE outcome = 'succeeded'"
        ).fetchone() == (True, True)
        # One row an attempt. A tick that a kill has cut off is made again, so the fire of a node
        # whose failures are not retried can have its first attempt anew.
        assert (
            connection.execute(
                "SELECT name, due_at, attempt FROM sluice.history"
                " WHERE outcome <> 'skipped' AND name <> %s GROUP BY 1, 2, 3 HAVING count(*) > 1",
                [NEVER_RESET],
            ).fetchall()
            == []
        )
        return found

    def verify_after_kill(self, connection: psycopg.Connection[Any]) -> None:
        """Before anybody leads: each node has lost one attempt at the most."""
        hit = False
        for name, state in self.verify(connection).items():
            fewer = self._started[name] - state.attempts
            assert fewer <= self._fewer[name] + 1, (name, state, self._started[name])
            assert state.attempts - state.crashed <= self._started[name], (name, state)
            hit = hit or (fewer > self._fewer[name] and not name.startswith("succeeds"))
            self._fewer[name] = fewer
        self.hits += hit

    def reset_some(self, connection: psycopg.Connection[Any]) -> None:
        """Of the suspended nodes; the others stay suspended from here on."""
        for name, state in states(connection).items():
            if state.status != "suspended":
                continue
            if name != NEVER_RESET and self._random.random() < 0.7:
                self._suspended.pop(name, None)
                with connection.transaction():
                    connection.execute("SELECT sluice.reset(%s)", [name])
                    connection.execute("INSERT INTO resets VALUES (%s, clock_timestamp())", [name])
            else:
                self._suspended[name] = state

    def lead(self, connection: psycopg.Connection[Any], workers: int) -> Leader:
        """Leads again; what the kill left behind is settled."""
        connection.execute(
            "SELECT _sluice.store_setting('cluster', 'max_workers', %s)", [str(workers)]
        )
        # Its holder is gone: nobody has to wait for it to lapse.
        connection.execute(
            "UPDATE _sluice.lease SET expires_at = clock_timestamp() WHERE pid IS NOT NULL"
        )
        leader = Leader(self._cluster)
        self._cluster.wait_for(lambda: leader.leads, timeout=60)
        self._cluster.wait_for(
            """
            SELECT NOT EXISTS (
                SELECT FROM _sluice.queue AS q, _sluice.lease AS l
                WHERE q.state <> 'queued' AND q.epoch < l.epoch
            ) AND NOT EXISTS (
                SELECT FROM _sluice.slot AS s, _sluice.lease AS l WHERE s.epoch < l.epoch
            )
            """,
            timeout=60,
        )
        return leader


@pytest.fixture
def crashing() -> Iterator[Cluster]:
    with Cluster(fsync=False) as cluster:
        cluster.create_extensions()
        cluster.silence_cron()
        configure(
            cluster,
            max_consecutive_errors=str(LIMIT),
            retry_backoff_base="100 ms",
            retry_backoff_cap="100 ms",
            scheduler_interval="100 ms",
            worker_idle_timeout="0 s",
        )
        cluster.execute("CREATE TABLE effects (name text)")
        cluster.execute("CREATE TABLE resets (name text, at timestamptz)")
        cluster.execute(SLOW_ACCOUNTING)
        with cluster.connect() as connection:
            for name, command in COMMANDS.items():
                body = (ATTEMPT + command).format(name=name)
                connection.execute(
                    "SELECT sluice.schedule(%s, '1s', %s, %s)",
                    [name, f"DO $do$BEGIN {body} END$do$", name != "top_level"],
                )
            connection.execute("SELECT sluice.start()")
        yield cluster


@pytest.mark.timeout(600)
def test_kills_between_a_failure_and_its_accounting(crashing: Cluster) -> None:
    """Each node counts exactly the failures that are in its history, after any kill."""
    crashes = Crashes(crashing)
    for number in range(ROUNDS):
        with crashing.connect() as connection:
            leader = crashes.lead(connection, workers=4 if number % 2 else 0)
            crashes.verify(connection)
        crashes.kill()
        leader.join(timeout=60)
        crashing.start()
        with crashing.connect() as connection:
            crashes.verify_after_kill(connection)
            crashes.reset_some(connection)
    with crashing.connect() as connection:
        leader = crashes.lead(connection, workers=4)
        assert connection.execute("SELECT sluice.drain('60 s')").fetchone() == ("drained",)
        crashes.attempts_told()
        crashes.verify_after_kill(connection)
        crashing.wait_for("SELECT count(*) = 0 FROM _sluice.slot", timeout=60)
        assert connection.execute(
            "SELECT count(*) FROM _sluice.queue WHERE state = 'running'"
        ).fetchone() == (0,)
        assert connection.execute(
            "SELECT count(*) > 0 FROM sluice.history WHERE outcome = 'worker_crashed'"
        ).fetchone() == (True,)
    leader.terminate()
    leader.join()
    assert crashes.hits >= LEAST_HITS, "too few kills cut off a failing run"
