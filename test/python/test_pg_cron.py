"""The real pg_cron keeps a leader alive; and what start() refuses."""

import itertools
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader


def ran_since(cluster: Cluster, at: Any) -> None:
    cluster.wait_for(
        "SELECT count(*) > 1 FROM sluice.history"
        f" WHERE started_at > '{at}' AND outcome = 'succeeded'",
        dbname="app",
    )


def now(cluster: Cluster) -> Any:
    return cluster.execute("SELECT clock_timestamp()")[0][0]


# With pg_cron at work. These depend on each other, in this order.


@pytest.mark.timeout(90)
def test_pg_cron_starts_the_leader(cron_cluster: Cluster) -> None:
    cron_cluster.wait_for("SELECT expires_at > clock_timestamp() FROM _sluice.lease", timeout=75)
    ran_since(cron_cluster, "-infinity")
    # It is the job's own session.
    assert cron_cluster.execute(
        "SELECT d.command, d.status FROM cron.job_run_details AS d"
        " JOIN _sluice.lease AS l ON l.pid = d.job_pid"
    ) == [("CALL sluice.run()", "running")]


@pytest.mark.timeout(150)
def test_other_cron_jobs_run_on_time_beside_the_leader(cron_cluster: Cluster) -> None:
    cron_cluster.wait_for(
        "SELECT count(*) >= 2 FROM cron.job_run_details"
        " WHERE command = 'SELECT 1' AND status = 'succeeded'"
        " AND start_time > (SELECT renewed_at - interval '1 day' FROM _sluice.lease)",
        timeout=140,
    )
    rows = cron_cluster.execute(
        "SELECT start_time - date_trunc('minute', start_time), date_trunc('minute', start_time)"
        " FROM cron.job_run_details WHERE command = 'SELECT 1' ORDER BY start_time"
    )
    assert max(delay.total_seconds() for delay, _ in rows) < 3
    minutes = [minute for _, minute in rows]
    assert [(b - a).total_seconds() for a, b in itertools.pairwise(minutes)] == [60] * (
        len(minutes) - 1
    )


@pytest.mark.timeout(100)
def test_pg_cron_brings_another_leader_after_a_kill(cron_cluster: Cluster) -> None:
    (first,) = cron_cluster.execute("SELECT pid FROM _sluice.lease")[0]
    assert cron_cluster.execute("SELECT pg_terminate_backend(%s)", [first]) == [(True,)]
    at = now(cron_cluster)
    cron_cluster.wait_for(
        f"SELECT pid <> {first} AND expires_at > clock_timestamp() FROM _sluice.lease", timeout=80
    )
    ran_since(cron_cluster, at)
    # No fire was lost or doubled by the change.
    rows = cron_cluster.execute(
        "SELECT due_at, count(*) FROM sluice.history WHERE outcome = 'succeeded'"
        " GROUP BY 1 HAVING count(*) > 1",
        dbname="app",
    )
    assert rows == []
    cron_cluster.wait_for("SELECT count(*) <= 1 FROM _sluice.queue WHERE state = 'running'")


@pytest.mark.timeout(100)
def test_pg_cron_serves_the_metrics(cron_cluster: Cluster) -> None:
    """In a session of its own, beside the leader."""
    address = f"127.0.0.1:{cron_cluster.port}"
    cron_cluster.execute(
        "SELECT sluice.configure('metrics_listen', %s, cluster => true)", [address]
    )

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/healthz", timeout=10) as response:
                return bool(response.status == 200)
        except urllib.error.URLError:
            return False

    cron_cluster.wait_for(healthy, timeout=80)
    cron_cluster.wait_for(
        "SELECT array_agg(d.command ORDER BY d.command) ="
        " '{CALL sluice.run(),CALL sluice.serve_metrics()}'"
        " FROM cron.job_run_details AS d WHERE d.status = 'running' AND d.command <> 'SELECT 1'"
    )


@pytest.mark.timeout(100)
def test_stop_takes_the_entries_along(cron_cluster: Cluster) -> None:
    cron_cluster.execute("SELECT sluice.stop()", dbname="app")
    assert cron_cluster.execute("SELECT command FROM cron.job") == [("SELECT 1",)]
    cron_cluster.wait_for("SELECT pid IS NULL FROM _sluice.lease")
    cron_cluster.wait_for(
        "SELECT count(*) = 0 FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice%' OR query LIKE 'CALL sluice.%'"
    )


# What start() refuses


def refused(database: Database | Cluster) -> psycopg.Error:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        database.execute("SELECT sluice.start()")
    assert "Traceback" not in str(caught.value)
    assert caught.value.diag.message_hint
    return caught.value


def failed_checks(database: Database | Cluster) -> list[str]:
    rows = database.execute('SELECT "check", ok, detail, hint FROM sluice.preflight()')
    assert all(detail for _, _, detail, _ in rows)
    assert all(hint for _, ok, _, hint in rows if not ok)
    return [check for check, ok, _, _ in rows if not ok]


def test_preflight_where_all_is_well(database: Database, shared_state: None) -> None:
    assert failed_checks(database) == []
    database.execute("SELECT sluice.start()")


def test_start_without_pg_cron(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(preload=(), fsync=False)
    error = refused(cluster)
    assert "shared_preload_libraries" in error.diag.message_hint
    assert failed_checks(cluster) == ["pg_cron is loaded"]
    # What needs no control database works.
    cluster.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    assert cluster.execute("SELECT sluice.refresh_stream_table('st')") == [("no_change",)]
    for call in ("drain()", "stop()", "run_now('st')", "queue()"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            cluster.execute(f"SELECT sluice.{call}")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        cluster.execute("CALL sluice.run()")


def test_preflight_where_pg_cron_is_configured_and_not_loaded(
    own_cluster: Callable[..., Cluster],
) -> None:
    """A server takes settings of libraries that it has not loaded."""
    cluster = own_cluster(
        preload=(), fsync=False, settings={"cron.database_name": "postgres", "cron.host": "/tmp"}
    )
    assert failed_checks(cluster) == ["pg_cron is loaded"]
    error = refused(cluster)
    assert "shared_preload_libraries" in error.diag.message_hint


def test_start_with_extensions_missing_in_the_control_database(
    own_cluster: Callable[..., Cluster],
) -> None:
    cluster = own_cluster(extensions=False, fsync=False)
    cluster.execute("CREATE DATABASE app")
    app = Database(cluster, "app")
    app.execute("CREATE EXTENSION pg_sluice CASCADE")
    assert "CREATE EXTENSION" in refused(app).diag.message_hint
    assert failed_checks(app) == ["pg_cron is installed", "pg_sluice in the control database"]
    cluster.execute("CREATE EXTENSION pg_cron")
    error = refused(app)
    assert error.diag.message_hint == (
        'Run CREATE EXTENSION pg_sluice CASCADE in database "postgres".'
    )
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        app.execute("SELECT sluice.drain()")
    assert caught.value.diag.message_primary == (
        'pg_sluice is not installed in the control database "postgres"'
    )
    cluster.execute("CREATE EXTENSION pg_sluice CASCADE")
    app.execute("SELECT sluice.start()")


def test_start_with_jobs_in_background_workers(own_cluster: Callable[..., Cluster]) -> None:
    """Before pg_cron 1.5 one long job there stops all others."""
    cluster = own_cluster(background_workers=True, fsync=False)
    (version,) = cluster.execute("SELECT extversion FROM pg_extension WHERE extname = 'pg_cron'")[0]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (1, 5):
        assert failed_checks(cluster) == []
        cluster.execute("SELECT sluice.start()")
        return
    assert failed_checks(cluster) == ["pg_cron runs jobs side by side"]
    assert "cron.use_background_workers = off" in refused(cluster).diag.message_hint
    assert cluster.execute("SELECT count(*) FROM cron.job") == [(0,)]


def test_start_with_an_unreachable_cron_host(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(fsync=False, settings={"cron.host": "/nonexistent"})
    assert failed_checks(cluster) == ["connection of pg_cron"]
    assert "cron.host" in refused(cluster).diag.message_hint


@pytest.mark.parametrize(
    "where", ["ROLE postgres", "DATABASE {control}", "ROLE postgres IN DATABASE {control}"]
)
@pytest.mark.parametrize("name", ["statement_timeout", "idle_session_timeout"])
def test_start_with_a_timeout(
    cluster: Cluster, database: Database, shared_state: None, where: str, name: str
) -> None:
    target = where.format(control=cluster.control_db)
    cluster.execute(f"ALTER {target} SET {name} = '1 h'")
    try:
        assert failed_checks(database) == ["sessions may be long"]
        error = refused(database)
        assert name in error.diag.message_detail
        assert cluster.execute("SELECT count(*) FROM sluice.databases()") == [(0,)]
    finally:
        cluster.execute(f"ALTER {target} RESET {name}")


@pytest.mark.parametrize("change", ["SET active = false", "SET command = 'SELECT 1'"])
def test_entry_that_somebody_changed(own_cluster: Callable[..., Cluster], change: str) -> None:
    """It is found, and start() sets it right instead of refusing."""
    cluster = own_cluster(fsync=False)
    cluster.execute(
        "SELECT sluice.configure('metrics_listen', %s, cluster => true)",
        [f"127.0.0.1:{cluster.port}"],
    )
    entries = "SELECT jobname, command, active FROM cron.job ORDER BY jobname"
    asks = (
        """SELECT "check", hint FROM sluice.health_check() WHERE "check" IN ('leader', 'metrics')"""
    )
    with cluster.database() as database:
        assert failed_checks(database) == []
        database.execute("SELECT sluice.start()")
        assert failed_checks(database) == []
        right = cluster.execute(entries)
        assert [active for _, _, active in right] == [True, True]
        cluster.execute(f"UPDATE cron.job {change}")
        assert failed_checks(database) == ["entry in pg_cron"]
        state = "inactive" if "active" in change else "missing"
        assert all(f"is {state}; sluice.start()" in hint for _, hint in database.execute(asks))
        database.execute("SELECT sluice.start()")
        assert cluster.execute(entries) == right
        assert failed_checks(database) == []


def test_stop_without_pg_cron(own_cluster: Callable[..., Cluster]) -> None:
    """Whoever removes it need not be the one who leaves."""
    cluster = own_cluster(fsync=False)
    with cluster.database() as database:
        database.execute("SELECT sluice.start()")
        cluster.execute("DROP EXTENSION pg_cron")
        database.execute("SELECT sluice.stop()")
        assert database.execute("SELECT count(*) FROM sluice.databases()") == [(0,)]
        assert failed_checks(database) == ["pg_cron is installed"]


# A server that speaks another language


def german() -> str | None:
    """A locale of the operating system for which the server has German messages."""
    found = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=True).stdout
    wanted = re.compile(r"de_DE\.utf-?8", re.IGNORECASE)
    return next(filter(wanted.fullmatch, found.split()), None)


@pytest.fixture
def german_cluster(own_cluster: Callable[..., Cluster]) -> Cluster:
    locale = german()
    if locale is None:
        pytest.skip("no locale de_DE.UTF-8")
    cluster = own_cluster(fsync=False, settings={"lc_messages": locale})
    with cluster.connect() as connection, pytest.raises(psycopg.Error) as caught:
        connection.execute("SELECT 1 / 0")
    if "Division" not in str(caught.value):
        pytest.skip("the server has no German messages")
    return cluster


def test_outcomes_on_a_german_server(german_cluster: Cluster) -> None:
    """They are told from the SQLSTATE, and never from a message."""
    cluster = german_cluster
    with cluster.database() as database:
        database.execute("SELECT sluice.start()")
        database.execute("CREATE TABLE t (x int)")
        for name, command, options in (
            ("zero", "SELECT 1 / 0", ""),
            ("slow", "SELECT pg_sleep(60)", ", refresh_timeout => '200 ms'"),
            ("lock", "INSERT INTO t VALUES (1)", ", lock_timeout => '200 ms'"),
        ):
            database.execute(f"SELECT sluice.schedule(%s, 'manual', %s{options})", [name, command])
        with database.connect(autocommit=False) as holder:
            holder.execute("LOCK TABLE t")
            leader = Leader(cluster)
            for name in ("zero", "slow", "lock"):
                database.execute("SELECT sluice.run_now(%s)", [name])
            database.wait_for("SELECT count(*) >= 3 FROM sluice.history")
        assert database.execute(
            "SELECT name, outcome FROM sluice.history WHERE attempt = 1 ORDER BY name"
        ) == [
            ("lock", "lock_timeout"),
            ("slow", "deadline_exceeded"),
            ("zero", "permanent_error"),
        ]
        leader.terminate()
        leader.join()
