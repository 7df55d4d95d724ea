"""A worker runs one owner's SQL after another's: nothing of one owner meets the next.

All tests have one worker, so every run is on the same session unless that was lost.
"""

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from cluster import Database
from runs import configure, configure_database

OWNERS = ("alice", "bob")


@pytest.fixture
def shared(shared: Database, lead: Callable[..., Any]) -> Database:
    """With one worker, and no retry in time to be seen."""
    configure(shared, max_workers="1")
    configure_database(shared, retry_backoff_base="1 h", retry_backoff_cap="1 h")
    lead()
    return shared


def job(database: Database, owner: str, command: str) -> Any:
    """Run a command once as a job of the owner and give its history row."""
    number = database.execute("SELECT count(*) FROM sluice.nodes")[0][0]
    name = f"job_{number}"
    with database.connect(owner) as connection:
        connection.execute("SELECT sluice.schedule(%s, 'manual', %s)", [name, command])
    return run(database, name)


def run(database: Database, name: str) -> Any:
    run_id = database.execute("SELECT sluice.run_now(%s)", [name])[0][0]
    return database.wait_for(
        lambda: database.execute(
            "SELECT outcome, message, pid FROM sluice.history WHERE run_id = %s", [run_id]
        )
    )[0]


def seen(database: Database, owner: str, expression: str) -> Any:
    """What an expression gives in a run of the owner, and the pid of its session."""
    outcome, message, pid = job(
        database,
        owner,
        f"CREATE TABLE IF NOT EXISTS {owner}.seen (value text);"
        f"DELETE FROM {owner}.seen; INSERT INTO {owner}.seen SELECT {expression}",
    )
    assert outcome == "succeeded", message
    return database.execute(f"SELECT value FROM {owner}.seen")[0][0], pid


# What alice's job does, what bob looks at, and what he sees in a clean session.
LEFTOVERS = {
    "temporary table": (
        "CREATE TEMPORARY TABLE loot AS SELECT 1 AS x",
        "to_regclass('pg_temp.loot')::text",
        None,
    ),
    "setting": ("SET TimeZone = 'Asia/Tokyo'", "current_setting('TimeZone')", "UTC"),
    "custom setting": (
        "SELECT set_config('alice.secret', '42', false)",
        "COALESCE(current_setting('alice.secret', true), '')",
        "",
    ),
    "search_path": (
        "SELECT set_config('search_path', 'alice', false)",
        "current_setting('search_path')",
        '"$user", public',
    ),
    "prepared statement": (
        "PREPARE stolen AS SELECT 1",
        "(SELECT count(*)::text FROM pg_prepared_statements WHERE name = 'stolen')",
        "0",
    ),
    "session lock": (
        "SELECT pg_advisory_lock(4711)",
        "(SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711)",
        "0",
    ),
    "cursor": (
        "DECLARE stolen CURSOR WITH HOLD FOR SELECT 1",
        "(SELECT count(*)::text FROM pg_cursors WHERE name = 'stolen')",
        "0",
    ),
}


def left(database: Database) -> dict[str, Any]:
    """What a run of bob sees of all that."""
    fields = ", ".join(f"'{kind}', {seen_by}" for kind, (_, seen_by, _) in LEFTOVERS.items())
    return json.loads(seen(database, "bob", f"jsonb_build_object({fields})")[0])


CLEAN = {kind: clean for kind, (_, _, clean) in LEFTOVERS.items()}


def test_next_owner_meets_nothing_that_a_success_left(shared: Database) -> None:
    for command, _, _ in LEFTOVERS.values():
        outcome, message, _ = job(shared, "alice", command)
        assert outcome == "succeeded", message
    assert left(shared) == CLEAN


def test_next_owner_meets_nothing_that_one_job_left(shared: Database) -> None:
    """Some of it at a time could hide the rest, since a session is cleaned as a whole."""
    commands = "; ".join(command for command, _, _ in LEFTOVERS.values())
    outcome, message, _ = job(shared, "alice", commands)
    assert outcome == "succeeded", message
    assert left(shared) == CLEAN


def test_next_owner_meets_nothing_that_a_failure_left(shared: Database) -> None:
    """A rollback undoes most of a failed run, but not a prepared statement or a session lock."""
    commands = "; ".join(command for command, _, _ in LEFTOVERS.values())
    outcome, *_ = job(shared, "alice", f"{commands}; SELECT 1/0")
    assert outcome == "permanent_error"
    assert left(shared) == CLEAN


def function(command: str, gives: str) -> str:
    """Makes one of alice's that a query may call, and that leaves something in the session."""
    return (
        "CREATE FUNCTION alice.leaves() RETURNS integer STABLE LANGUAGE plpgsql AS"
        f" $$BEGIN PERFORM FROM ({command}) AS l; RETURN {gives}; END$$"
    )


@pytest.mark.parametrize("kind", ["stream table", "matview"])
def test_next_owner_meets_nothing_that_a_failed_refresh_left(shared: Database, kind: str) -> None:
    command, look, clean = LEFTOVERS["session lock"]
    with shared.connect("alice") as connection:
        connection.execute(function(command, "1 / 0"))
        if kind == "matview":
            connection.execute(
                "CREATE MATERIALIZED VIEW alice.node AS SELECT alice.leaves() AS x WITH NO DATA"
            )
            connection.execute("SELECT sluice.schedule_refresh('alice.node', 'manual')")
        else:
            connection.execute(
                "SELECT sluice.create_stream_table("
                "'alice.node', 'SELECT alice.leaves() AS x', 'manual', initialize => false)"
            )
    outcome, message, pid = run(shared, "alice.node")
    assert (outcome, message) == ("permanent_error", "division by zero")
    assert seen(shared, "bob", look) == (clean, pid)


def test_next_owner_meets_nothing_across_a_matview(shared: Database) -> None:
    """The refresh of bob's view between alice's job and bob's does not make the session clean."""
    with shared.connect("bob") as connection:
        connection.execute("CREATE MATERIALIZED VIEW bob.mv AS SELECT 1 AS x")
        connection.execute("SELECT sluice.schedule_refresh('bob.mv', 'manual')")
    job(shared, "alice", "CREATE TEMPORARY TABLE loot AS SELECT 1 AS x")
    assert run(shared, "bob.mv")[0] == "succeeded"
    assert seen(shared, "bob", "to_regclass('pg_temp.loot')::text")[0] is None


def test_matview_meets_no_setting_of_another_owner(shared: Database) -> None:
    with shared.connect("bob") as connection:
        connection.execute(
            "CREATE MATERIALIZED VIEW bob.mv AS SELECT current_setting('TimeZone') AS zone"
        )
        connection.execute("SELECT sluice.schedule_refresh('bob.mv', 'manual')")
    job(shared, "alice", "SET TimeZone = 'Asia/Tokyo'")
    assert run(shared, "bob.mv")[0] == "succeeded"
    assert shared.execute("SELECT zone FROM bob.mv") == [("UTC",)]


def test_matview_is_refreshed_after_a_job_left_the_session_read_only(shared: Database) -> None:
    with shared.connect("bob") as connection:
        connection.execute("CREATE MATERIALIZED VIEW bob.mv AS SELECT 1 AS x")
        connection.execute("SELECT sluice.schedule_refresh('bob.mv', 'manual')")
    job(shared, "alice", "SET default_transaction_read_only = on")
    outcome, message, _ = run(shared, "bob.mv")
    assert outcome == "succeeded", message


def test_next_owner_meets_nothing_after_a_run_of_a_dropped_node(shared: Database) -> None:
    """A queued run whose node is gone tells the worker nothing about whose session it is."""
    with shared.connect("alice") as connection:
        connection.execute("SELECT sluice.schedule('gone', 'manual', 'SELECT 1')")
    with shared.connect("bob") as connection:
        connection.execute(
            "SELECT sluice.schedule('look', 'manual', 'CREATE TABLE bob.seen AS"
            " SELECT to_regclass(''pg_temp.loot'')::text AS value')"
        )
    job(shared, "alice", "CREATE TEMPORARY TABLE loot AS SELECT 1 AS x")
    shared.execute("SELECT sluice.drain()")
    shared.execute("SELECT sluice.run_now('gone')")
    shared.execute("SELECT sluice.unschedule('gone')")
    run_id = shared.execute("SELECT sluice.run_now('look')")[0][0]
    shared.execute("SELECT sluice.resume()")
    shared.wait_for(f"SELECT true FROM sluice.history WHERE run_id = '{run_id}'")
    assert shared.execute("SELECT value FROM bob.seen") == [(None,)]


def test_next_owner_meets_nothing_of_a_refresh_before_a_run_of_a_dropped_node(
    shared: Database,
) -> None:
    """Unlike a job's, a refresh's session is cleaned for the next owner only."""
    command, look, clean = LEFTOVERS["session lock"]
    with shared.connect("alice") as connection:
        connection.execute(function(command, "1"))
        connection.execute(
            "SELECT sluice.create_stream_table("
            "'alice.node', 'SELECT alice.leaves() AS x', 'manual', initialize => false)"
        )
        connection.execute("SELECT sluice.create_stream_table('alice.gone', 'SELECT 1', 'manual')")
    with shared.connect("bob") as connection:
        connection.execute(
            "SELECT sluice.schedule('look', 'manual', %s)",
            [f"CREATE TABLE bob.seen AS SELECT {look} AS value"],
        )
    outcome, message, pid = run(shared, "alice.node")
    assert outcome == "succeeded", message
    assert shared.execute(f"SELECT {look}") == [("1",)]
    shared.execute("SELECT sluice.drain()")
    shared.execute("SELECT sluice.run_now('alice.gone')")
    shared.execute("SELECT sluice.drop_stream_table('alice.gone')")
    run_id = shared.execute("SELECT sluice.run_now('look')")[0][0]
    shared.execute("SELECT sluice.resume()")
    assert shared.wait_for(f"SELECT pid FROM sluice.history WHERE run_id = '{run_id}'") == pid
    assert shared.execute("SELECT value FROM bob.seen") == [(clean,)]


def test_owner_keeps_its_session(shared: Database) -> None:
    """Otherwise the tests above would pass on a fresh connection for every run."""
    pids = {seen(shared, owner, "1")[1] for owner in ("alice", "bob", "alice", "alice", "bob")}
    assert len(pids) == 1


def test_a_session_survives_many_changes_of_owner(shared: Database) -> None:
    """Cleaning drops the statements that the client believes prepared."""
    for owner in OWNERS:
        with shared.connect(owner) as connection:
            connection.execute("SELECT sluice.schedule(%s, 'manual', 'SELECT 1')", [owner])
    outcomes = [run(shared, owner)[0] for _ in range(8) for owner in OWNERS]
    assert set(outcomes) == {"succeeded"}


def test_owner_cannot_become_the_scheduler(shared: Database) -> None:
    for attempt in ("RESET ROLE", "SET ROLE postgres", "RESET SESSION AUTHORIZATION"):
        outcome, message, _ = job(shared, "alice", attempt)
        assert outcome == "permanent_error", f"{attempt}: {message}"
    for expression in ("current_user", "session_user"):
        outcome, message, _ = job(
            shared,
            "alice",
            f"DO $do$BEGIN IF {expression} = 'alice' THEN RAISE 'it is %', 'me'; END IF; END$do$",
        )
        assert (outcome == "permanent_error") == (expression == "current_user"), message


@pytest.mark.parametrize(
    "setting",
    ["statement_timeout = '1ms'", "idle_session_timeout = '50ms'", "lock_timeout = '1ms'"],
)
def test_a_timeout_that_a_job_sets_does_not_fail_the_next_owners_run(
    shared: Database, setting: str
) -> None:
    job(shared, "alice", f"SET {setting}")
    for _ in range(3):
        outcome, message, _ = job(shared, "bob", "SELECT pg_sleep(0.1)")
        assert outcome == "succeeded", message


def test_serial_mode_ticks_on_after_a_job_left_settings(shared: Database) -> None:
    """There the job runs on the scheduler's own session."""
    shared.execute("SELECT sluice.configure('max_workers', '0', cluster => true)")
    shared.wait_for("SELECT count(*) = 0 FROM sluice.workers()")
    job(shared, "alice", "SET statement_timeout = '1ms'; SET default_transaction_read_only = on")
    outcome, message, _ = job(shared, "bob", "SELECT pg_sleep(0.1)")
    assert outcome == "succeeded", message
    assert shared.execute("SELECT state, error FROM sluice.databases()") == [("scheduled", None)]


def test_role_that_a_resting_session_has_run_sql_of_can_be_dropped(shared: Database) -> None:
    """As the documents say it: with DROP OWNED, which the session's next run outlives."""
    shared.cluster.create_role("carol")
    shared.execute("CREATE SCHEMA carol AUTHORIZATION carol")
    shared.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO carol")
    with shared.connect("carol") as connection:
        connection.execute("SELECT sluice.create_stream_table('carol.st', 'SELECT 1', 'manual')")
    ended = "SELECT count(*) FROM sluice.history WHERE outcome IN ('succeeded', 'no_change')"
    shared.execute("SELECT sluice.run_now('carol.st')")
    shared.wait_for(f"SELECT ({ended}) = 1")
    shared.execute("SELECT sluice.drop_stream_table('carol.st')")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        shared.cluster.execute("DROP ROLE carol")
    shared.execute("DROP OWNED BY carol")
    shared.cluster.execute("DROP ROLE carol")
    for owner in OWNERS:
        assert job(shared, owner, "SELECT 1")[0] == "succeeded"
