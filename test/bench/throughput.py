"""Runs per second through the whole path, and what a run costs, when the queue is never empty."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pgcron
from report import line, progress, type_of_line
from rig import (
    FEEDER,
    Member,
    admit,
    create_sources,
    create_stream_tables,
    leader,
    members,
    observe,
)

_NODES = 64
_WORKERS = 4
_ROLES = ("one", "two", "three")
"""No divisor of the number of workers, so that a worker's next run is of another role."""
_WARM_UP_SECONDS = 2.0
_SECONDS = 10.0
_FEED_SECONDS = 0.01

_FEED = """
SELECT cardinality(a.queued) FROM _sluice.add_runs(%(db_oid)s, (
    SELECT jsonb_agg(jsonb_build_object(
        'pgt_id', n, 'name', 'node ' || n, 'priority', 0, 'upstream', '[]'::jsonb,
        'due_at', clock_timestamp(), 'attempt', 1
    ))
    FROM unnest(%(nodes)s::bigint[]) AS n
    WHERE NOT EXISTS (SELECT FROM _sluice.queue AS q WHERE q.db_oid = %(db_oid)s AND q.pgt_id = n)
)) AS a
"""


def noop_runs() -> Iterator[type_of_line]:
    """Runs of stream tables whose sources don't change, on four workers: claim, refresh, history,
    finish. How runs come to be queued is not part of it.

    Then the same owned by a role without privileges, jobs of that role, and jobs of three roles in
    turn: nearly every run of those finds a session that another role has used.
    """
    with members(4) as (tables, role_tables, jobs, mixed_jobs), leader(tables.cluster):
        create_sources(tables)
        nodes = create_stream_tables(tables, _NODES, "manual")
        yield _saturated("noop_runs", tables, nodes, "runs/s >= 500, CPU ms per run <= 3")
        for role in _ROLES:
            tables.execute(f"CREATE ROLE {role} LOGIN")
            for member in (role_tables, jobs, mixed_jobs):
                admit(member, role)
        create_sources(role_tables)
        nodes = create_stream_tables(role_tables, _NODES, "manual", user=_ROLES[0])
        yield _saturated("noop_runs_of_a_role", role_tables, nodes)
        yield _saturated("noop_runs_of_jobs", jobs, _create_jobs(jobs, _ROLES[:1]))
        yield _saturated("noop_runs_of_three_roles", mixed_jobs, _create_jobs(mixed_jobs, _ROLES))


def _create_jobs(member: Member, owners: Sequence[str]) -> list[int]:
    """Jobs of the owners in turn."""
    made = []
    for number in range(_NODES):
        with member.cluster.connect(member.name, owners[number % len(owners)]) as connection:
            row = connection.execute(
                "SELECT sluice.schedule(%s, 'manual', 'SELECT 1')", [f"job {number}"]
            ).fetchone()
            assert row is not None
            made.append(row[0])
    return made


def _saturated(
    figure: str, member: Member, nodes: list[int], target: str | None = None
) -> type_of_line:
    progress(f"  {figure}")
    with fed(member, nodes) as feeder:
        workers = wait_for_workers(member)
        time.sleep(_WARM_UP_SECONDS)
        feeder.fewest_live = len(nodes)
        window = observe(member.cluster, _SECONDS)
    found = member.execute(
        "SELECT outcome, count(*) FROM sluice.history"
        " WHERE ended_at >= to_timestamp(%s) AND ended_at < to_timestamp(%s) GROUP BY outcome",
        [window.started_at, window.ended_at],
    )
    runs = sum(count for outcome, count in found if outcome in ("succeeded", "no_change"))
    return line(
        figure,
        runs / window.seconds,
        "runs/s",
        target=target,
        compared_to=pgcron.throughput(member.cluster),
        cpu_ms_per_run=window.cpu_ms_per_run(runs),
        outcomes=dict(found),
        workers=workers,
        fewest_live_runs=feeder.fewest_live,
    )


def wait_for_workers(member: Member) -> int:
    """Until all workers are there, for a while; gives how many there are."""
    live = f"SELECT count(*) FROM _sluice.slot WHERE state = 'live' AND db_oid = {member.oid}"
    with contextlib.suppress(TimeoutError):
        member.cluster.wait_for(f"SELECT ({live}) = {_WORKERS}")
    return int(member.cluster.execute(live)[0][0])


@dataclass
class Feeder:
    """Who keeps the queue full."""

    fewest_live: int
    """Queued and running ones, when it was least."""


@contextmanager
def fed(member: Member, nodes: list[int]) -> Iterator[Feeder]:
    """Keeps a run of every node queued or running, from a connection of its own."""
    feeder = Feeder(len(nodes))
    over = threading.Event()
    arguments = {"db_oid": member.oid, "nodes": nodes}

    def feed() -> None:
        while not over.wait(_FEED_SECONDS):
            row = connection.execute(_FEED, arguments).fetchone()
            if row:
                feeder.fewest_live = min(feeder.fewest_live, len(nodes) - row[0])

    with member.cluster.connect(application_name=FEEDER) as connection:
        connection.execute(_FEED, arguments)
        connection.execute("NOTIFY sluice_wake")
        thread = threading.Thread(target=feed)
        thread.start()
        try:
            yield feeder
        finally:
            over.set()
            thread.join()
    member.cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue", timeout=20)
