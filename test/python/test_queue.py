"""The queue: bounded whoever adds to it, and rid of what no longer exists."""

from __future__ import annotations

import re
from collections.abc import Callable

import psycopg
import pytest

from calls import Call
from cluster import Cluster, Database, Leader
from faults import Fault
from queue_load import QueueLoad, failures
from runs import configure, idle, run_now, schedule

RUN = (
    "SELECT _sluice.enqueue_now(%s, jsonb_build_object('pgt_id', %s, 'name', 'n', 'priority', 0,"
    " 'upstream', '[]'::jsonb, 'due_at', now(), 'attempt', 1))"
)


def oid(database: Database) -> int:
    ((found,),) = database.execute("SELECT _sluice.database_oid()")
    return int(found)


def queued(cluster: Cluster, state: str = "queued") -> int:
    ((count,),) = cluster.execute("SELECT count(*) FROM _sluice.queue WHERE state = %s", [state])
    return int(count)


def blocked(cluster: Cluster, pid: int) -> None:
    """Wait until a session waits for another."""
    cluster.wait_for(f"SELECT cardinality(pg_blocking_pids({pid})) > 0")


def test_overflow_stays_due_and_runs_later(
    member: Database, cluster: Cluster, leader: Leader
) -> None:
    """A full queue: what is due waits for room in it, with one alert, and nothing is lost."""
    configure(member, max_queue_depth="5")
    member.execute("SELECT sluice.drain()")
    with member.connect() as connection, connection.transaction():
        for number in range(12):
            connection.execute(
                "SELECT sluice.schedule(%s, '@every 1h', 'SELECT 1')", [f"job{number:02}"]
            )
        connection.execute("UPDATE _sluice.node SET next_fire_at = now()")
    member.wait_for(
        "SELECT count(*) = 1 FROM sluice.alerts"
        " WHERE event = 'queue_full' AND severity = 'warning' AND closed_at IS NULL"
    )
    # Looks come and go meanwhile.
    cluster.wait_for("SELECT count(*) = 5 FROM _sluice.queue")
    ((tick,),) = member.execute("SELECT max(last_tick_at) FROM sluice.databases()")
    member.wait_for(
        f"SELECT last_tick_at > '{tick}'::timestamptz + interval '2 s' FROM sluice.databases()"
        " WHERE database = current_database()"
    )
    assert queued(cluster) == 5
    assert member.execute("SELECT count(*) FROM _sluice.node WHERE due_at <= now()") == [(7,)]
    ((waiting,),) = member.execute(
        "SELECT job_name FROM _sluice.node WHERE due_at <= now() LIMIT 1"
    )
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        run_now(member, waiting)
    assert member.execute("SELECT count(*) FROM sluice.alerts") == [(1,)]

    member.execute("SELECT sluice.resume()")
    most = 0

    def all_ran() -> bool:
        nonlocal most
        most = max(most, queued(cluster))
        return member.execute(
            "SELECT count(*) = 12 AND count(DISTINCT pgt_id) = 12 FROM sluice.history"
            " WHERE outcome = 'succeeded'"
        ) == [(True,)]

    member.wait_for(all_ran)
    assert most <= 5
    member.wait_for("SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE event = 'queue_full'")
    assert member.execute("SELECT count(*) FROM sluice.alerts") == [(1,)]
    idle(cluster)


def test_two_who_enqueue_at_once_keep_the_bound(member: Database, cluster: Cluster) -> None:
    """1. One takes the last place. 2. Another comes. 3. The first commits. 4. The other can't."""
    configure(member, max_queue_depth="1")
    db_oid = oid(member)
    with cluster.connect() as first:
        with first.transaction():
            first.execute(RUN % (db_oid, 1))
            call = Call(cluster, RUN % (db_oid, 2))
            blocked(cluster, call.pid)
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
            call.value()
    assert queued(cluster) == 1


def test_stop_leaves_nothing_of_a_run_that_comes_at_once(
    member: Database, cluster: Cluster
) -> None:
    """1. A run is queued. 2. The database leaves. 3. The first commits. 4. Nothing is queued."""
    with cluster.connect() as first:
        db_oid = oid(member)
        with first.transaction():
            first.execute(RUN % (db_oid, 1))
            call = Call(member, "SELECT sluice.stop()")
            cluster.wait_for(
                "SELECT count(*) > 0 FROM pg_stat_activity AS a"
                " WHERE a.application_name = 'pg_sluice control'"
                f" AND {first.info.backend_pid} = ANY (pg_blocking_pids(a.pid))"
            )
        call.value()
    assert queued(cluster) == 0


def test_what_is_queued_and_paused_of_a_dropped_node_is_forgotten(
    member: Database, cluster: Cluster, leader: Leader
) -> None:
    for name in ("gone", "stays"):
        schedule(member, "SELECT 1", name)
    member.execute("SELECT sluice.pause('{gone, stays}')")
    for name in ("gone", "stays"):
        run_now(member, name)
    member.execute("SELECT sluice.unschedule('gone')")
    left = (
        "SELECT (SELECT string_agg(name, ',') FROM _sluice.queue) = 'stays'"
        " AND (SELECT string_agg(name, ',') FROM _sluice.pause) = 'stays'"
    )
    cluster.wait_for(left)
    member.execute("SELECT sluice.unpause('{stays}')")
    idle(cluster)
    assert member.execute("SELECT name FROM sluice.history") == [("stays",)]


@pytest.mark.parametrize("tracks", ["on", "off"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_node_that_is_not_committed_yet_is_not_gone(
    member: Database,
    cluster: Cluster,
    control: Database,
    leader: Leader,
    fault: Callable[[Database, str], Fault],
    commits: bool,
    tracks: str,
) -> None:
    """1. A transaction makes a node and pauses it. 2. The leader reconciles. 3. It still stands,
    also where the server does not keep when a transaction began."""
    asked = fault(control, "known_nodes")

    def reconciled() -> None:
        asked.arm(0)
        for count in (1, 2):
            member.execute("NOTIFY sluice_wake")
            member.wait_for(lambda count=count: asked.calls >= count)

    paused = "SELECT array_agg(name) FROM _sluice.pause"
    with member.connect(autocommit=False, options=f"-c track_activities={tracks}") as maker:
        maker.execute("SELECT sluice.schedule('young', '1s', 'SELECT 1')")
        maker.execute("SELECT sluice.pause('{young}', wait => false)")
        reconciled()
        assert cluster.execute(paused) == [(["young"],)]
        if commits:
            maker.commit()
        else:
            maker.rollback()
    reconciled()
    if commits:
        assert cluster.execute(paused) == [(["young"],)]
        assert member.execute("SELECT count(*) FROM sluice.history") == [(0,)]
    else:
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.pause")


@pytest.mark.timeout(120)
def test_depth_is_zero_after_a_load(
    cluster: Cluster, database: Database, shared_state: None
) -> None:
    """Of runs that succeed, are cancelled, killed, or find no worker; 5,000 in `make stress`."""
    with cluster.database() as refused:
        report = QueueLoad(cluster, database, refused, rounds=1).run()
        assert failures(report, rounds=1) == [], report
        for gauge in ("databases()", "queue()"):
            rows = cluster.execute(f"SELECT to_jsonb(g) FROM sluice.{gauge} AS g")
            assert all(row["queued"] == row["running"] == 0 for (row,) in rows)
        ((metrics,),) = cluster.execute("SELECT sluice.metrics()")
        depths = re.findall(r"^sluice_queue_depth{.*} (.*)$", metrics, re.MULTILINE)
        assert len(depths) == 6
        assert set(map(float, depths)) == {0}
