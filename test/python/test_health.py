"""health_check() where what it asks is not there: it tells, and never fails."""

from __future__ import annotations

from collections.abc import Callable

from cluster import Cluster, Database, Leader

ROW = "SELECT status, detail, hint FROM sluice.health_check() WHERE \"check\" = 'control'"
ROWS = 'SELECT "check" FROM sluice.health_check()'
OWN = [
    "control", "pauses", "nodes", "freshness", "clock", "alerts", "notifications", "transactions",
    "upkeep",
]  # fmt: skip
"""What a database knows without the control database."""


def test_a_control_database_without_the_extension_is_told(
    own_cluster: Callable[..., Cluster],
) -> None:
    cluster = own_cluster(fsync=False)
    with cluster.database() as member:
        cluster.execute("DROP EXTENSION pg_sluice")
        ((status, detail, hint),) = member.execute(ROW)
        assert (status, detail) == (
            "critical",
            'pg_sluice is not installed in the control database "postgres"',
        )
        assert "CREATE EXTENSION" in hint
        assert [check for (check,) in member.execute(ROWS)] == OWN


def test_a_server_without_pg_cron_is_told(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(fsync=False, preload=())
    with cluster.database() as member:
        ((status, detail, hint),) = member.execute(ROW)
        assert status == "critical"
        assert "pg_cron" in detail
        assert "shared_preload_libraries" in hint
        assert [check for (check,) in member.execute(ROWS)] == OWN


def test_a_node_that_no_run_reaches_is_late(
    member: Database, cluster: Cluster, leader: Leader
) -> None:
    """1. It is fresh. 2. Nothing lets it run. 3. It is late. 4. It runs, and is fresh again."""
    freshness = "SELECT status = '{}' FROM sluice.health_check() WHERE \"check\" = 'freshness'"
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1', max_lag => '3 s')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    member.wait_for(freshness.format("ok"))
    member.execute("SELECT sluice.drain()")
    member.wait_for(freshness.format("critical"))
    member.execute("SELECT sluice.resume()")
    member.wait_for(freshness.format("ok"))


def test_a_hot_standby_shows_the_state_of_its_primary(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(fsync=False)
    # No leader comes between the two looks.
    cluster.silence_cron()
    with cluster.database() as member:
        member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
        member.execute("SELECT sluice.start()")
        checks = 'SELECT "check", status FROM sluice.health_check() ORDER BY 1'
        there = member.execute(checks)
        with cluster.standby() as standby:
            assert standby.execute(checks, dbname=member.name) == there
