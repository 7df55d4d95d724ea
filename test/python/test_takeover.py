"""Leaders that are frozen, cut off or crashed: the next one goes on, and nothing is doubled."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from cluster import Leader

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster, Database

EFFECTS = "CREATE TABLE effects (at timestamptz DEFAULT clock_timestamp())"
EFFECT = "INSERT INTO effects DEFAULT VALUES"


def nothing_is_doubled(database: Database) -> None:
    """Each fire succeeded at most once, and what the job did is what history says."""
    assert database.execute(
        "SELECT count(*) = count(DISTINCT (pgt_id, due_at)),"
        " count(*) = (SELECT count(*) FROM effects)"
        " FROM sluice.history WHERE outcome = 'succeeded'"
    ) == [(True, True)]


def successes(database: Database) -> int:
    return int(
        database.execute("SELECT count(*) FROM sluice.history WHERE outcome = 'succeeded'")[0][0]
    )


def test_frozen_leader_starts_nothing_more(
    cluster: Cluster, short_lease: None, member: Database, lead: Callable[..., Leader]
) -> None:
    """1. A leads and has a run in progress. 2. A freezes. 3. B takes over, ends A's worker and runs
    on. 4. A is thawed: it ends with SL001 and has started nothing."""
    member.execute(EFFECTS)
    member.execute(f"SELECT sluice.schedule('job', '1s', '{EFFECT}')")
    member.execute("SELECT sluice.schedule('long', 'manual', 'SELECT pg_sleep(30)')")
    frozen = lead()
    member.wait_for("SELECT count(*) > 0 FROM effects")
    member.execute("SELECT sluice.run_now('long')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE name = 'long' AND epoch > 0")
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        follower = lead()
        before = successes(member)
        member.wait_for(
            f"SELECT count(*) > {before + 1} FROM sluice.history WHERE outcome = 'succeeded'"
        )
        member.wait_for(
            "SELECT count(*) = 1 FROM sluice.history"
            " WHERE name = 'long' AND outcome = 'worker_crashed'"
        )
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    error = frozen.join()
    assert error is not None
    assert error.sqlstate == "SL001"
    assert follower.leads
    nothing_is_doubled(member)


def test_control_connection_is_cut(
    cluster: Cluster, short_lease: None, member: Database, lead: Callable[..., Leader]
) -> None:
    """The leader ends with the error, its lease lapses, and the next one goes on."""
    member.execute(EFFECTS)
    member.execute(f"SELECT sluice.schedule('job', '1s', '{EFFECT}')")
    leader = lead()
    member.wait_for("SELECT count(*) > 0 FROM effects")
    cluster.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'pg_sluice leader'"
    )
    error = leader.join()
    assert error is not None
    assert error.sqlstate in ("57P01", "08006"), error
    assert cluster.execute("SELECT pid = %s FROM _sluice.lease", [leader.pid]) == [(True,)]
    lead()
    before = successes(member)
    member.wait_for(f"SELECT count(*) > {before} FROM effects")
    nothing_is_doubled(member)


def test_two_leaders_at_once(
    cluster: Cluster, short_lease: None, member: Database, lead: Callable[..., Leader]
) -> None:
    leaders = [lead(wait=False) for _ in range(3)]
    cluster.wait_for(lambda: sum(leader.leads for leader in leaders) == 1)
    cluster.wait_for(lambda: sum(leader.alive for leader in leaders) == 1)
    assert [leader.error for leader in leaders] == [None] * 3
    assert sum(leader.leads for leader in leaders) == 1


@pytest.mark.timeout(90)
def test_crash_of_the_server(own_cluster: Callable[..., Cluster]) -> None:
    """kill -9 of a worker's backend: the server restarts, and all state is right afterwards."""
    cluster = own_cluster()
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
    with cluster.database() as member:
        member.execute(EFFECTS)
        member.execute(f"SELECT sluice.schedule('job', '1s', '{EFFECT}')")
        member.execute("SELECT sluice.schedule('long', 'manual', 'SELECT pg_sleep(60)')")
        member.execute("SELECT sluice.start()")
        Leader(cluster)
        member.wait_for("SELECT count(*) > 1 FROM effects")
        member.execute("SELECT sluice.run_now('long')")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE name = 'long' AND epoch > 0")
        ((pid,),) = cluster.execute(
            "SELECT s.pid FROM _sluice.slot AS s JOIN _sluice.queue AS q ON q.slot = s.slot"
            " WHERE q.name = 'long'"
        )
        # A claim is not flushed at once, and one that a crash loses is simply claimed again.
        ((written,),) = cluster.execute("SELECT pg_current_wal_insert_lsn()")
        cluster.wait_for(f"SELECT pg_current_wal_flush_lsn() >= '{written}'")
        cluster.crash(pid)
        leader = Leader(cluster)
        cluster.wait_for(lambda: leader.leads)
        before = successes(member)
        member.wait_for(f"SELECT count(*) > {before + 1} FROM effects")
        member.wait_for(
            "SELECT count(*) = 1 FROM sluice.history"
            " WHERE name = 'long' AND outcome = 'worker_crashed'"
        )
        nothing_is_doubled(member)
        member.execute("SELECT sluice.unschedule('long'), sluice.unschedule('job')")
        leader.terminate()


def test_saturating_job_starves_nobody(member: Database, lead: Callable[..., Leader]) -> None:
    """A job that is always due and runs longer than its interval, on the only worker."""
    member.execute("SELECT sluice.configure('max_workers', '1', cluster => true)")
    member.execute("SELECT sluice.schedule('greedy', '1s', 'SELECT pg_sleep(1.2)', priority => 0)")
    member.execute("SELECT sluice.schedule('modest', '3s', 'SELECT 1')")
    lead()
    member.wait_for("SELECT count(*) >= 3 FROM sluice.history WHERE name = 'modest'")
    assert member.execute(
        "SELECT max(started_at - due_at) < interval '3 s' FROM sluice.history WHERE name = 'modest'"
    ) == [(True,)]


def test_worker_that_is_refused_is_announced_once(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    member.wait_for("SELECT state = 'scheduled' FROM sluice.databases()")
    cluster.execute(f"ALTER DATABASE {member.name} ALLOW_CONNECTIONS false")
    try:
        cluster.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pg_sluice worker%'"
        )
        cluster.wait_for("SELECT spawn_failures >= 2 FROM _sluice.member")
        assert cluster.execute(
            "SELECT node, closed_at IS NULL FROM sluice.alerts WHERE event = 'spawn_failed'"
        ) == [(member.name, True)]
        assert cluster.execute("SELECT count(*) FROM _sluice.slot") == [(0,)]
    finally:
        cluster.execute(f"ALTER DATABASE {member.name} ALLOW_CONNECTIONS true")
    cluster.wait_for(
        "SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE event = 'spawn_failed'", timeout=20
    )
    assert cluster.execute("SELECT spawn_failures, spawn_error FROM _sluice.member") == [(0, None)]


@pytest.mark.timeout(120)
def test_many_databases_have_few_connections(
    cluster: Cluster, shared_state: None, lead: Callable[..., Leader]
) -> None:
    """More members than may keep a connection of the scheduler: all run, within the bound."""
    cluster.execute("SELECT sluice.configure('max_scheduler_connections', '2', cluster => true)")
    cluster.execute("SELECT sluice.configure('max_workers', '2', cluster => true)")
    names = [f"many{number}" for number in range(12)]
    try:
        for name in names:
            cluster.execute(f"CREATE DATABASE {name} TEMPLATE sluice_template")
            cluster.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')", dbname=name)
            cluster.execute("SELECT sluice.start()", dbname=name)
        lead()
        most = 0

        def all_ran() -> bool:
            nonlocal most
            ((sessions,),) = cluster.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE application_name ~ '^pg_sluice (scheduler|worker)'"
            )
            most = max(most, sessions)
            return cluster.execute(
                "SELECT bool_and(last_tick_at IS NOT NULL) FROM sluice.databases()"
            ) == [(True,)] and all(
                cluster.execute("SELECT count(*) > 1 FROM sluice.history", dbname=name) == [(True,)]
                for name in names
            )

        cluster.wait_for(all_ran, timeout=60)
        assert 3 <= most <= 2 + 4 + 2
    finally:
        for name in names:
            cluster.execute("SELECT sluice.stop()", dbname=name)
        for name in names:
            cluster.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
