"""SQL jobs: with whose rights and in what session they run, and how often."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader
from runs import ended, run_now


def schedule(
    database: Database, user: str, command: str, name: str = "job", **options: Any
) -> None:
    given = "".join(f", {option} => %s" for option in options)
    with database.connect(user) as connection:
        connection.execute(
            f"SELECT sluice.schedule(%s, 'manual', %s{given})", [name, command, *options.values()]
        )


def run(database: Database, name: str = "job") -> dict[str, Any]:
    return ended(database, run_now(database, name))


# Rights


def test_job_has_its_owners_rights(shared: Database, leader: Leader) -> None:
    shared.execute("CREATE TABLE bob.secret AS SELECT 42 AS x")
    shared.execute("ALTER TABLE bob.secret OWNER TO bob")
    schedule(shared, "alice", "CREATE TABLE alice.loot AS SELECT * FROM bob.secret")
    row = run(shared)
    assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "42501")
    shared.execute("GRANT USAGE ON SCHEMA bob TO alice")
    shared.execute("GRANT SELECT ON bob.secret TO alice")
    assert run(shared)["outcome"] == "succeeded"
    assert shared.execute(
        "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'alice.loot'::regclass"
    ) == [("alice",)]


def test_stream_table_has_its_owners_rights(shared: Database, leader: Leader) -> None:
    shared.execute("CREATE TABLE bob.t AS SELECT 42 AS x")
    shared.execute("GRANT USAGE ON SCHEMA bob TO alice; GRANT SELECT ON bob.t TO alice")
    with shared.connect("alice") as connection:
        connection.execute(
            "SELECT sluice.create_stream_table('alice.st', 'SELECT x FROM bob.t', 'manual')"
        )
    shared.execute("REVOKE SELECT ON bob.t FROM alice")
    row = run(shared, "alice.st")
    assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "42501")


@pytest.mark.parametrize("max_workers", ["1", "0"])
def test_nodes_of_a_role_that_is_no_superuser_run(
    shared: Database, lead: Callable[..., Leader], max_workers: str
) -> None:
    """Each kind, as the first of its owner on a session."""
    shared.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [max_workers])
    lead()
    for owner in ("alice", "bob"):
        with shared.connect(owner) as connection:
            connection.execute(f"CREATE MATERIALIZED VIEW {owner}.mv AS SELECT current_user AS x")
            connection.execute(f"SELECT sluice.schedule_refresh('{owner}.mv', 'manual')")
            connection.execute(
                f"SELECT sluice.create_stream_table('{owner}.st', 'SELECT 1 AS x', 'manual')"
            )
        schedule(shared, owner, "SELECT 1", f"job_{owner}")
    for name in ("alice.mv", "bob.mv", "alice.st", "bob.st", "job_alice", "job_bob", "alice.mv"):
        row = run(shared, name)
        assert row["outcome"] in ("succeeded", "no_change"), f"{name}: {row['message']}"


def test_only_the_owner_handles_a_job(shared: Database) -> None:
    schedule(shared, "alice", "SELECT 1")
    with shared.connect("bob") as connection:
        for call in ("run_now('job')", "reset('job')", "unschedule('job')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"SELECT sluice.{call}")
        with pytest.raises(psycopg.errors.DuplicateObject):
            connection.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")


def test_job_resolves_names_in_its_callers_search_path(shared: Database, leader: Leader) -> None:
    for role in ("alice", "bob"):
        shared.execute(f"CREATE TABLE {role}.t (x text)")
        shared.execute(f"GRANT ALL ON {role}.t TO alice; GRANT USAGE ON SCHEMA {role} TO alice")
    with shared.connect("alice") as connection:
        connection.execute("SET search_path = bob, alice")
        connection.execute(
            "SELECT sluice.schedule('job', 'manual', 'INSERT INTO t VALUES (''x'')')"
        )
    assert run(shared)["outcome"] == "succeeded"
    assert shared.execute("SELECT count(*) FROM bob.t") == [(1,)]
    # The default path means the owner's own schema, not the scheduler's.
    schedule(shared, "alice", "INSERT INTO t VALUES ('y')")
    assert run(shared)["outcome"] == "succeeded"
    assert shared.execute("SELECT x FROM alice.t") == [("y",)]


def test_deferred_trigger_has_the_owners_rights(shared: Database, leader: Leader) -> None:
    """It would run at commit, as whoever commits."""
    with shared.connect("alice") as connection:
        connection.execute(
            "CREATE TABLE alice.t (x int); CREATE TABLE alice.log (who text);"
            "CREATE FUNCTION alice.f() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN INSERT INTO alice.log VALUES (current_user); RETURN NULL; END$$;"
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON alice.t DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION alice.f()"
        )
    schedule(shared, "alice", "INSERT INTO alice.t VALUES (1)")
    assert run(shared)["outcome"] == "succeeded"
    assert shared.execute("SELECT who FROM alice.log") == [("alice",)]


@pytest.mark.parametrize("transactional", [True, False])
def test_job_whose_owner_is_gone_says_so(
    cluster: Cluster, shared: Database, leader: Leader, transactional: bool
) -> None:
    cluster.execute("CREATE ROLE gone LOGIN")
    shared.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO gone")
    schedule(shared, "gone", "SELECT 1", transactional=transactional)
    shared.execute("DROP OWNED BY gone")
    cluster.execute("DROP ROLE gone")
    row = run(shared)
    assert row["outcome"] == "permanent_error"
    assert "role" in row["message"]
    assert row["sqlstate"] == "42704"
    assert shared.execute("SELECT sluice.unschedule('job')") == [(True,)]


# At top level


def test_vacuum_runs_at_top_level(shared: Database, leader: Leader) -> None:
    shared.execute("CREATE TABLE t AS SELECT 1 AS x")
    schedule(shared, "postgres", "VACUUM t")
    row = run(shared)
    assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "25001")
    shared.execute("SELECT pg_stat_reset()")
    schedule(shared, "postgres", "VACUUM t", transactional=False)
    row = run(shared)
    assert (row["outcome"], row["mode"]) == ("succeeded", "top_level"), row["message"]
    shared.wait_for("SELECT last_vacuum IS NOT NULL FROM pg_stat_user_tables WHERE relname = 't'")


def test_procedure_that_commits_runs_at_top_level(shared: Database, leader: Leader) -> None:
    shared.execute("CREATE TABLE t (x int)")
    shared.execute(
        "CREATE PROCEDURE p() LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO t VALUES (1); COMMIT; INSERT INTO t VALUES (2); RAISE 'halt'; END$$"
    )
    schedule(shared, "postgres", "CALL p()", transactional=False)
    assert run(shared)["message"] == "halt"
    assert shared.execute("SELECT x FROM t") == [(1,)]


def test_rows_that_a_job_at_top_level_gives_take_no_memory_of_the_leaders(
    shared: Database, leader: Leader
) -> None:
    """Nobody asks for them. Each of two statements gives more than the leader may grow by."""

    def peak() -> int:
        status = Path(f"/proc/{leader.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    schedule(shared, "postgres", "SELECT 1; SELECT 2", "warm", transactional=False)
    assert run(shared, "warm")["outcome"] == "succeeded"
    before = peak()
    rows = "SELECT repeat('x', 1000000) FROM generate_series(1, 60)"
    schedule(shared, "postgres", f"{rows}; {rows}", transactional=False)
    assert run(shared)["outcome"] == "succeeded"
    assert peak() - before < 40_000, "kB"


def test_error_after_rows_at_top_level_is_the_runs(shared: Database, leader: Leader) -> None:
    schedule(
        shared,
        "postgres",
        "SELECT 1 / (3 - x) FROM generate_series(1, 3) AS x",
        transactional=False,
    )
    row = run(shared)
    assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "22012")
    schedule(
        shared,
        "postgres",
        "SELECT 1; SELECT pg_terminate_backend(pg_backend_pid())",
        transactional=False,
    )
    row = run(shared)
    assert (row["outcome"], row["sqlstate"]) == ("worker_crashed", "57P01")


@pytest.mark.parametrize("command", ["COPY t FROM STDIN", "SELECT 1; COPY t TO STDOUT"])
def test_copy_from_or_to_a_client_is_refused_for_good(
    shared: Database, leader: Leader, command: str
) -> None:
    """There is no client, and never will be: it is no connection that was lost."""
    shared.execute("CREATE TABLE t AS SELECT 1 AS x")
    for transactional in (True, False):
        schedule(shared, "postgres", command, transactional=transactional)
        row = run(shared)
        assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "0A000")
    assert shared.execute("SELECT count(*) FROM t") == [(1,)]


def test_failure_at_top_level_leaves_nothing_in_the_servers_log_but_itself(
    cluster: Cluster, shared: Database, leader: Leader
) -> None:
    before = len(cluster.log_text())
    schedule(shared, "postgres", "SELECT 1/0", transactional=False)
    assert run(shared)["sqlstate"] == "22012"
    log = cluster.log_text()[before:]
    assert "ERROR:  division by zero" in log
    assert "WARNING" not in log


def test_text_of_a_command_is_taken_as_it_is(shared: Database, leader: Leader) -> None:
    shared.execute("CREATE TABLE t (x text)")
    command = "INSERT INTO t VALUES ('100 %s %% {} :a \\ $1 é', E'\\n')".replace(", E'\\n'", "")
    for transactional in (True, False):
        schedule(shared, "postgres", command, transactional=transactional)
        assert run(shared)["outcome"] == "succeeded"
    assert shared.execute("SELECT DISTINCT x, count(*) FROM t GROUP BY x") == [
        ("100 %s %% {} :a \\ $1 é", 2)
    ]


def test_job_at_top_level_is_its_owner(shared: Database, leader: Leader) -> None:
    """In a session of its own, so that nothing leads back to the scheduler's role."""
    with shared.connect("alice") as connection:
        connection.execute("CREATE TABLE alice.who (session text, now text, path text)")
    schedule(
        shared,
        "alice",
        "RESET ROLE; RESET SESSION AUTHORIZATION; INSERT INTO alice.who"
        " SELECT session_user, current_user, current_setting('search_path')",
        transactional=False,
    )
    row = run(shared)
    assert row["outcome"] == "succeeded", row["message"]
    assert shared.execute("SELECT * FROM alice.who") == [("alice", "alice", '"$user", public')]


@pytest.mark.timeout(60)
def test_role_that_may_not_log_in(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(fsync=False)
    cluster.execute("CREATE ROLE alice LOGIN")
    hba = cluster.data / "pg_hba.conf"
    open_to_all = hba.read_text()
    with cluster.database() as database:
        database.execute("SELECT sluice.start()")
        cluster.execute("SELECT cron.unschedule(jobid) FROM cron.job")
        database.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO alice")
        schedule(database, "alice", "SELECT 1", transactional=False)
        connection = database.connect("alice")
        hba.write_text("local all alice reject\n" + open_to_all)
        cluster.reload()

        def refused() -> bool:
            try:
                database.connect("alice").close()
            except psycopg.OperationalError:
                return True
            return False

        cluster.wait_for(refused)
        with connection, pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            connection.execute(
                "SELECT sluice.schedule('new', 'manual', 'SELECT 1', transactional => false)"
            )
        assert 'role "alice"' in caught.value.diag.message_primary
        assert "pg_hba.conf" in caught.value.diag.message_hint
        # A job that was accepted before fails in a way that tells why.
        leader = Leader(cluster)
        row = run(database)
        assert row["outcome"] in ("connection_lost", "permanent_error")
        assert 'role "alice"' in row["message"] or 'user "alice"' in row["message"]
        assert database.execute("SELECT consecutive_errors FROM sluice.nodes") == [(1,)]
        # The worker itself is fine, and so is the leader.
        schedule(database, "postgres", "SELECT 1", "other")
        assert run(database, "other")["outcome"] == "succeeded"
        leader.cancel()
        leader.join()


# How often


def test_once_for_each_fire_though_the_leader_dies_before_it_moves_on(
    cluster: Cluster, shared: Database, lead: Callable[..., Leader]
) -> None:
    """1. The leader queues a fire. 2. It dies before the node moves on, while a worker runs it.
    3. The next leader finds the node due again, and runs it; the fire is on record.
    """
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
    shared.execute("CREATE TABLE log (at timestamptz DEFAULT clock_timestamp())")
    source = shared.execute("SELECT pg_get_functiondef('_sluice.advance'::regproc)")[0][0]
    with shared.connect(autocommit=False) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(4711)")
        shared.execute(
            "CREATE OR REPLACE FUNCTION _sluice.advance(_moves jsonb) RETURNS void LANGUAGE sql AS"
            " 'SELECT pg_advisory_xact_lock(4711)'"
        )
        first = lead()
        shared.execute("SELECT sluice.schedule('job', '1 h', 'INSERT INTO log DEFAULT VALUES')")
        shared.execute("UPDATE _sluice.node SET next_fire_at = date_trunc('second', now())")
        shared.execute("NOTIFY sluice_wake")
        shared.wait_for("SELECT count(*) = 1 FROM sluice.history")
        first.terminate()
        first.join()
        cluster.wait_for(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name LIKE 'pg_sluice%'"
        )
    shared.execute(source)
    lead()
    shared.wait_for("SELECT count(*) = 2 FROM sluice.history")
    rows = shared.execute("SELECT outcome, reason, due_at FROM sluice.history ORDER BY started_at")
    assert [row[:2] for row in rows] == [("succeeded", None), ("skipped", "duplicate")]
    assert rows[0][2] == rows[1][2]
    assert shared.execute("SELECT count(*) FROM log") == [(1,)]
    shared.wait_for("SELECT next_fire_at > now() FROM sluice.nodes")
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")


def test_once_for_each_fire_though_the_leader_dies_before_the_run_is_finished(
    cluster: Cluster, shared: Database, lead: Callable[..., Leader]
) -> None:
    """The run has committed, and is still in the queue when the next leader comes."""
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
    shared.execute("CREATE TABLE log (at timestamptz DEFAULT clock_timestamp())")
    # The worker is held up after the run and before its finish.
    source = cluster.execute("SELECT pg_get_functiondef('_sluice.next_run'::regproc)")[0][0]
    wrapped = source.replace(
        "IF _finished IS NOT NULL THEN",
        "IF _finished IS NOT NULL THEN PERFORM pg_advisory_xact_lock(4711);",
    )
    assert wrapped != source
    schedule(shared, "postgres", "INSERT INTO log DEFAULT VALUES")
    try:
        with cluster.connect(autocommit=False) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(4711)")
            cluster.execute(wrapped)
            first = lead()
            shared.execute("SELECT sluice.run_now('job')")
            shared.wait_for("SELECT count(*) = 1 FROM sluice.history")
            assert cluster.execute("SELECT state FROM _sluice.queue") == [("running",)]
            first.terminate()
            first.join()
    finally:
        cluster.execute(source)
    lead()
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
    assert run(shared)["outcome"] == "succeeded"
    assert shared.execute("SELECT outcome FROM sluice.history") == [("succeeded",)] * 2
    assert shared.execute("SELECT count(*) FROM log") == [(2,)]


def test_run_in_progress_when_the_leader_dies_is_tried_again(
    cluster: Cluster, shared: Database, lead: Callable[..., Leader]
) -> None:
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
    shared.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
    shared.execute("CREATE TABLE log (at timestamptz DEFAULT clock_timestamp())")
    shared.execute("CREATE SEQUENCE tries")
    schedule(
        shared,
        "postgres",
        "INSERT INTO log DEFAULT VALUES;SELECT CASE nextval('tries') WHEN 1 THEN pg_sleep(60) END",
    )
    first = lead()
    shared.execute("SELECT sluice.run_now('job')")
    shared.wait_for("SELECT is_called FROM tries")
    first.terminate()
    first.join()
    lead()
    shared.wait_for("SELECT count(*) = 2 FROM sluice.history")
    rows = shared.execute("SELECT outcome, attempt, due_at FROM sluice.history ORDER BY attempt")
    assert [row[:2] for row in rows] == [("worker_crashed", 1), ("succeeded", 2)]
    assert rows[0][2] == rows[1][2]
    assert shared.execute("SELECT count(*) FROM log") == [(1,)]
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")


def test_catch_up_runs_the_latest_missed_fires(shared: Database, leader: Leader) -> None:
    for name, catch_up in (("one", 1), ("three", 3)):
        shared.execute(
            "SELECT sluice.schedule(%s, '1 h', 'SELECT 1', catch_up => %s)", [name, catch_up]
        )
    grid = dict(shared.execute("SELECT name, next_fire_at FROM sluice.nodes"))
    shared.execute("UPDATE _sluice.node SET next_fire_at = next_fire_at - interval '10 h'")
    shared.execute("NOTIFY sluice_wake")
    shared.wait_for("SELECT count(*) = 4 FROM sluice.history")
    shared.wait_for("SELECT bool_and(next_fire_at > now()) FROM sluice.nodes")
    rows = shared.execute("SELECT name, due_at, reason FROM sluice.history ORDER BY name, due_at")
    missed = [
        (name, grid[name].timestamp() - due.timestamp(), reason) for name, due, reason in rows
    ]
    assert missed == [
        ("one", 3600, "9 missed fires skipped"),
        ("three", 3 * 3600, "7 missed fires skipped"),
        ("three", 2 * 3600, None),
        ("three", 3600, None),
    ]
    assert dict(shared.execute("SELECT name, next_fire_at FROM sluice.nodes")) == grid


def test_unscheduled_job_ends_its_run(cluster: Cluster, shared: Database, leader: Leader) -> None:
    schedule(shared, "postgres", "SELECT pg_sleep(1)")
    shared.execute("SELECT sluice.run_now('job')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
    assert shared.execute("SELECT sluice.unschedule('job'), sluice.unschedule('job')") == [
        (True, False)
    ]
    shared.wait_for("SELECT count(*) = 1 FROM sluice.history")
    assert shared.execute("SELECT name, outcome FROM sluice.history") == [("job", "succeeded")]
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")


def test_run_now_of_a_running_job_is_refused(
    cluster: Cluster, shared: Database, leader: Leader
) -> None:
    schedule(shared, "postgres", "SELECT pg_sleep(30)")
    shared.execute("SELECT sluice.run_now('job')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
    with pytest.raises(psycopg.errors.ObjectInUse):
        shared.execute("SELECT sluice.run_now('job')")


def test_long_run_and_its_grid_never_overlap(
    cluster: Cluster, shared: Database, leader: Leader
) -> None:
    shared.execute("SELECT sluice.schedule('job', '1s', 'SELECT pg_sleep(1.3)')")
    shared.wait_for("SELECT count(*) >= 3 FROM sluice.history")
    assert shared.execute(
        "SELECT count(*) FROM sluice.history AS a, sluice.history AS b"
        " WHERE a.run_id < b.run_id AND tstzrange(a.started_at, a.ended_at) &&"
        " tstzrange(b.started_at, b.ended_at)"
    ) == [(0,)]
    assert shared.execute(
        "SELECT count(*) = count(DISTINCT due_at) FROM sluice.history WHERE outcome = 'succeeded'"
    ) == [(True,)]
