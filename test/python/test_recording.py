"""Failures of nodes that somebody's open transaction holds: on record in the end, and once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from cluster import Database
from runs import configure, ended, node, run_now, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster, Leader
    from faults import Fault

HELD = {
    # Its run fails by itself, while its definition is being changed: its retry can't be written
    # before that is over.
    "altered": "SELECT sluice.alter_stream_table('altered', priority => 1)",
    # These fail since they wait for the transaction too long.
    "refreshed": "SELECT sluice.refresh_stream_table('refreshed')",
    "gone": "SELECT sluice.drop_stream_table('gone')",
    "kept": "SAVEPOINT before; SELECT sluice.drop_stream_table('kept')",
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("max_workers", ["0", "1"], ids=["serial", "parallel"])
def test_failures_of_nodes_in_open_transactions(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], max_workers: str
) -> None:
    """With one slot, which each of these runs has to give back for the next one to start."""
    configure(member, max_workers=max_workers, retry_backoff_base="1 h", retry_backoff_cap="1 h")
    member.execute("CREATE TABLE t AS SELECT 1 AS x")
    for name in HELD:
        member.execute(
            "SELECT sluice.create_stream_table(%s, 'SELECT 1 / x AS y FROM t', 'manual',"
            " lock_timeout => '300 ms')",
            [name],
        )
    schedule(member, "SELECT 1")
    leader = lead()

    with member.connect(autocommit=False) as user:
        for statement in HELD.values():
            user.execute(statement)
        member.execute("UPDATE t SET x = 0")
        run_ids = {name: run_now(member, name) for name in HELD}
        # It stands in line behind them.
        assert ended(member, run_now(member), timeout=30)["outcome"] == "succeeded"
        # Nothing is held for those that are not on record yet.
        cluster.wait_for("SELECT count(*) <= 1 FROM _sluice.slot")
        cluster.wait_for(
            "SELECT array_agg(name ORDER BY name) ="
            " '{public.altered,public.gone,public.kept,public.refreshed}'"
            " FROM _sluice.queue WHERE state = 'ended'"
        )
        assert member.execute("SELECT count(*) FROM sluice.history WHERE kind <> 'job'") == [(0,)]
        user.execute("ROLLBACK TO before")

    # Then they are recorded, each of them once, except for one that nobody knows any more.
    row = ended(member, run_ids["altered"])
    assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "22012")
    for name in ("refreshed", "kept"):
        row = ended(member, run_ids[name])
        assert (row["outcome"], row["sqlstate"]) == ("lock_timeout", "55P03")
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
    assert member.execute(
        "SELECT name, count(*) FROM sluice.history"
        " WHERE outcome IN ('lock_timeout', 'permanent_error') GROUP BY name ORDER BY name"
    ) == [("public.altered", 1), ("public.kept", 1), ("public.refreshed", 1)]
    assert member.execute(
        "SELECT name, consecutive_errors FROM sluice.nodes WHERE kind <> 'job' ORDER BY name"
    ) == [("public.altered", 1), ("public.kept", 1), ("public.refreshed", 1)]
    assert member.execute("SELECT sluice.drain('10 s')") == [("drained",)]
    member.execute("SELECT sluice.resume()")
    member.execute("UPDATE t SET x = 1")
    for name in ("altered", "refreshed", "kept"):
        assert ended(member, run_now(member, name))["outcome"] == "no_change"
    assert cluster.execute("SELECT event, message FROM sluice.alerts") == []
    assert leader.alive


@pytest.mark.parametrize("max_workers", ["0", "1"], ids=["serial", "parallel"])
def test_run_that_waits_to_be_recorded_is_no_obstacle(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], max_workers: str
) -> None:
    """1. It runs. 2. A user's open transaction has the node. 3. It fails. 4. Nothing runs any more,
    whatever the transaction waits for."""
    configure(member, max_workers=max_workers, retry_backoff_base="1 h", retry_backoff_cap="1 h")
    schedule(member, "DO $$BEGIN PERFORM pg_advisory_xact_lock(7); RAISE 'x'; END$$", "bad")
    with member.connect() as holder, member.connect(autocommit=False) as user:
        # So that there is a row for the transaction to have.
        lead()
        ended(member, run_now(member, "bad"))
        holder.execute("SELECT pg_advisory_lock(7)")
        run_id = run_now(member, "bad")
        cluster.wait_for("SELECT count(*) = 1 FROM pg_locks WHERE NOT granted")
        user.execute("SELECT sluice.reset('bad')")
        holder.execute("SELECT pg_advisory_unlock(7)")

        assert member.execute("SELECT sluice.pause('{bad}', '20 s')") == [("paused",)]
        assert member.execute("SELECT sluice.drain('20 s')") == [("drained",)]
        assert member.execute("SELECT active, waiting_for FROM sluice.drain_status()") == [
            (0, None)
        ]
        assert member.execute("SELECT run_id, state FROM sluice.queue()") == [(run_id, "ended")]
        assert member.execute("SELECT queued, running FROM sluice.databases()") == [(0, 0)]
        member.execute("SELECT sluice.unpause('{bad}'), sluice.resume()")
        # It is the node's one live run until it is recorded.
        with pytest.raises(psycopg.errors.ObjectInUse, match="recorded in history"):
            run_now(member, "bad")
        assert member.execute("SELECT sluice.drain('20 s')") == [("drained",)]
        user.rollback()
        # Which no drain holds up.
        assert ended(member, run_id)["message"] == "x"
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
        assert member.execute("SELECT sluice.is_drained()") == [(True,)]


def test_retry_outlives_a_change_that_is_rolled_back(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """1. It runs. 2. A user's open transaction alters it. 3. It fails. 4. Nothing was altered."""
    configure(member, retry_backoff_base="1 h", retry_backoff_cap="1 h")
    command = "DO $$BEGIN PERFORM pg_advisory_xact_lock(7); RAISE SQLSTATE '40001'; END$$"
    schedule(member, command, "bad")
    with member.connect() as holder, member.connect(autocommit=False) as user:
        lead()
        holder.execute("SELECT pg_advisory_lock(7)")
        run_id = run_now(member, "bad")
        cluster.wait_for("SELECT count(*) = 1 FROM pg_locks WHERE NOT granted")
        user.execute("SELECT sluice.schedule('bad', 'manual', 'SELECT 1')")
        holder.execute("SELECT pg_advisory_unlock(7)")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'ended'")
        user.rollback()
    assert ended(member, run_id)["outcome"] == "serialization_failure"
    assert node(member, "bad")["remedy"].startswith("backoff until")


def test_run_of_a_former_leader_that_can_not_be_recorded(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    fault: Callable[[Database, str], Fault],
) -> None:
    """The server's log names its node."""
    schedule(member, "SELECT 1", "left")
    ((pgt_id, db_oid),) = member.execute("SELECT pgt_id, _sluice.database_oid() FROM sluice.nodes")
    cluster.execute(
        "INSERT INTO _sluice.queue"
        " (db_oid, pgt_id, name, state, rank, due_at, epoch, started_at)"
        " VALUES (%s, %s, 'left', 'ended', now(), now(), 0, now())",
        [db_oid, pgt_id],
    )
    refusal = fault(member, "record_failure")
    refusal.arm(2, "22P05")
    lead()
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
    assert f'WARNING:  run of "left" is not recorded: {refusal.message}' in cluster.log_text()


def test_node_that_goes_while_its_failure_is_recorded(member: Database) -> None:
    """1. Its owner removes it. 2. The failure waits for that. 3. The owner commits."""
    schedule(member, "SELECT 1")
    ((pgt_id,),) = member.execute("SELECT pgt_id FROM sluice.nodes")
    member.execute("INSERT INTO _sluice.node_state (pgt_id) VALUES (%s)", [pgt_id])
    with ThreadPoolExecutor() as threads, member.connect(autocommit=False) as user:
        user.execute("SELECT sluice.unschedule('job')")
        found = threads.submit(
            Database(member.cluster, member.name).execute,
            "SELECT * FROM _sluice.failure_state(%s)",
            [pgt_id],
        )
        member.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND query LIKE '%failure_state%'"
        )
        user.commit()
        assert found.result(10) == []
