"""Upkeep by a real leader: backlogs go, and nothing that is needed goes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster import Leader
from runs import configure, configure_database, idle, run_now, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster, Database
    from faults import Fault

FILL = """
    INSERT INTO _sluice.history (
        run_id, pgt_id, name, kind, outcome, attempt, due_at, started_at, ended_at
    )
    SELECT gen_random_uuid(), %s, 'node', 'stream_table', 'no_change', 1, t, t, t
    FROM generate_series(1, %s) AS g
    CROSS JOIN LATERAL (SELECT clock_timestamp() - %s::interval - g * interval '1 ms') AS x (t)
"""
GONE = 999
"""The pgt_id of a node that is gone."""
UPKEEP = "SELECT {} FROM pg_stat_activity AS a WHERE a.application_name LIKE 'pg_sluice upkeep %%'"


def fill(database: Database, rows: int, *, age: str = "1 day", pgt_id: int = GONE) -> None:
    """History of a node, the newest row of that age."""
    database.execute(FILL, [pgt_id, rows, age])


def rested(database: Database) -> None:
    """Wait until every task has had its first turn, and have none begin by itself."""
    database.wait_for(
        "SELECT max(last_at) IS NOT NULL AND NOT _sluice.upkeep_is_due() FROM _sluice.upkeep"
    )
    database.execute("UPDATE _sluice.upkeep SET due_at = clock_timestamp() + interval '1 h'")


def work(database: Database) -> None:
    """All steps that there are to do, without a leader."""
    due(database)
    while database.execute("SELECT is_due FROM _sluice.upkeep()") == [(True,)]:
        pass


def due(database: Database) -> None:
    """Have all tasks begin at once."""
    database.execute("UPDATE _sluice.upkeep SET due_at = clock_timestamp()")


def smallest_share(database: Database) -> None:
    """Has steps of a hundred rows, and each rest as long as can be."""
    configure_database(
        database, history_retention="1 h", maintenance_batch="100", maintenance_budget="1 ms"
    )
    configure(database, scheduler_interval="60 s")

    def known() -> bool:
        # The scheduler copies what the leader has read, once it looks.
        database.execute("NOTIFY sluice_wake")
        return database.execute("SELECT _sluice.setting('scheduler_interval') = 60") == [(True,)]

    database.wait_for(known)


def none_left(database: Database) -> None:
    database.wait_for(f"SELECT count(*) = 0 FROM sluice.history WHERE pgt_id = {GONE}", timeout=30)


def test_backlog_is_worked_off(cluster: Cluster, member: Database, leader: Leader) -> None:
    """In steps that follow each other, while jobs fire; the session goes when it is done."""
    rested(member)
    configure_database(member, history_retention="1 h")
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    fill(member, 5000)
    due(member)
    none_left(member)
    assert member.execute(
        "SELECT deleted >= 5000, error FROM _sluice.upkeep WHERE task = 'history_age'"
    ) == [(True, None)]
    member.wait_for("SELECT count(*) > 1 FROM sluice.history WHERE name = 'job'")
    cluster.wait_for(UPKEEP.format("count(*) = 0"))
    assert leader.alive


def test_backlog_of_rows_is_worked_off(member: Database, leader: Leader) -> None:
    rested(member)
    configure_database(member, history_rows="100")
    fill(member, 2000, age="1 s")
    fill(member, 2000, age="1 s", pgt_id=GONE + 1)
    due(member)
    member.wait_for(
        "SELECT array_agg(c.rows) = '{100,100}'"
        " FROM (SELECT count(*) AS rows FROM sluice.history GROUP BY pgt_id) AS c",
        timeout=30,
    )


@pytest.mark.timeout(90)
def test_databases_take_turns(
    cluster: Cluster, member: Database, other: Database, leader: Leader
) -> None:
    """Over one session: a backlog that takes for ever keeps no other database waiting."""
    for database in (member, other):
        rested(database)
        configure_database(database, history_retention="1 h")
    configure_database(member, maintenance_budget="5 ms", maintenance_batch="1")
    fill(member, 20000)
    due(member)
    member.wait_for("SELECT deleted > 0 FROM _sluice.upkeep WHERE task = 'history_age'")
    fill(other, 300)
    due(other)
    most = 0

    def done() -> bool:
        nonlocal most
        ((sessions,),) = cluster.execute(UPKEEP.format("count(*)"))
        most = max(most, sessions)
        return other.execute("SELECT count(*) = 0 FROM sluice.history") == [(True,)]

    cluster.wait_for(done, timeout=30)
    assert most == 1
    ((left,),) = member.execute("SELECT count(*) FROM sluice.history")
    assert left > 0
    # And then it is the first one's turn again.
    member.wait_for(f"SELECT count(*) < {left} FROM sluice.history")
    assert leader.alive


@pytest.mark.timeout(90)
def test_rests_are_short_and_runs_shorten_them(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    """However small upkeep's share of the time is, history becomes fewer: a rest takes seconds, and
    what runs have left is made up for without one. By its share alone each rest took minutes."""
    rested(member)
    member.execute("UPDATE _sluice.upkeep SET due_at = 'infinity'")
    smallest_share(member)
    # Two rows of the backlog for each of these.
    member.execute(
        "SELECT sluice.schedule('job ' || n, '1 h', 'SELECT 1') FROM generate_series(1, 150) AS n"
    )
    member.execute("UPDATE _sluice.node SET next_fire_at = clock_timestamp()")
    member.execute("NOTIFY sluice_wake")
    member.wait_for("SELECT count(*) = 150 FROM sluice.history", timeout=30)
    idle(cluster)
    fill(member, 450)
    member.execute("UPDATE _sluice.upkeep SET due_at = now() WHERE task = 'history_age'")
    member.execute("NOTIFY sluice_wake")
    left = f"(SELECT count(*) FROM sluice.history WHERE pgt_id = {GONE})"
    # Four steps, between which there are no rests; then one after a rest.
    member.wait_for(f"SELECT {left} <= 50", timeout=25)
    member.wait_for(f"SELECT {left} = 0", timeout=25)
    assert leader.alive


@pytest.mark.timeout(90)
def test_long_backlog_takes_one_session_and_hears_of_settings(
    cluster: Cluster, member: Database, control: Database, leader: Leader
) -> None:
    """While no other database waits. Under the settings at first it would take minutes."""
    for database in (control, member):
        rested(database)
        database.execute("UPDATE _sluice.upkeep SET due_at = 'infinity'")
    smallest_share(member)
    fill(member, 2000)
    member.execute("UPDATE _sluice.upkeep SET due_at = now() WHERE task = 'history_age'")
    member.execute("NOTIFY sluice_wake")
    member.wait_for("SELECT deleted > 0 FROM _sluice.upkeep WHERE task = 'history_age'")
    sessions = cluster.execute(UPKEEP.format("a.pid"))
    assert len(sessions) == 1
    configure(member, scheduler_interval="1 s")
    configure_database(member, maintenance_budget="1 s")

    def done() -> bool:
        present = cluster.execute(UPKEEP.format("a.pid"))
        left = member.execute(f"SELECT count(*) FROM sluice.history WHERE pgt_id = {GONE}")
        assert left == [(0,)] or present == sessions
        return left == [(0,)]

    cluster.wait_for(done, timeout=30)
    due(control)
    assert leader.alive


def test_control_database_need_not_be_a_member(
    cluster: Cluster, member: Database, control: Database, leader: Leader
) -> None:
    """Old alerts of the control database, and what a dropped database left there."""
    rested(control)
    control.execute(
        "INSERT INTO _sluice.alert"
        " (event, severity, message, opened_at, closed_at, last_emitted_at)"
        " SELECT 'database_failed', 'critical', 'gone', d, d, d"
        " FROM (VALUES (date '2020-01-01')) AS v (d)"
    )
    control.execute(
        "INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by, stays)"
        " SELECT 999999, n, 'gone', 'x', true FROM generate_series(1, 1200) AS n"
    )
    due(control)
    control.wait_for(
        "SELECT (SELECT count(*) FROM _sluice.alert) = 0"
        " AND (SELECT count(*) FROM _sluice.pause) = 0"
    )


def test_single_pass_does_upkeep(member: Database, lead: Callable[..., Leader]) -> None:
    configure_database(member, history_retention="1 h")
    fill(member, 200)
    assert lead("0", wait=False).join() is None
    assert member.execute("SELECT count(*) FROM sluice.history") == [(0,)]


def test_task_that_fails_stops_nobody(
    member: Database, leader: Leader, fault: Callable[[Database, str], Fault]
) -> None:
    """It is told once, the other tasks and all runs go on, and it is tried again."""
    rested(member)
    configure_database(member, history_retention="1 h", history_rows="100")
    made = fault(member, "dead_history_rows")
    made.arm(1)
    fill(member, 300, age="1 s")
    due(member)
    member.wait_for("SELECT count(*) = 100 FROM sluice.history")
    assert member.execute(
        "SELECT event, severity, node = current_database(), message LIKE '%injected fault%'"
        " FROM sluice.alerts WHERE closed_at IS NULL"
    ) == [("upkeep_failed", "warning", True, True)]
    schedule(member, "SELECT 1")
    run_now(member)
    member.wait_for("SELECT count(*) = 1 FROM sluice.history WHERE name = 'job'")
    fill(member, 5)
    due(member)
    member.wait_for(
        "SELECT count(*) = 0 FROM sluice.history WHERE ended_at < now() - interval '1 h'"
    )
    member.wait_for("SELECT count(*) = 0 FROM sluice.alerts WHERE closed_at IS NULL")
    assert leader.alive
    assert member.execute("SELECT state, error FROM sluice.databases()") == [("scheduled", None)]


def test_locked_rows_are_left(member: Database, leader: Leader) -> None:
    """Nothing waits for who holds a row, and the others go."""
    rested(member)
    configure_database(member, history_retention="1 h")
    fill(member, 300)
    with member.connect(autocommit=False) as holder:
        holder.execute("SELECT FROM _sluice.history ORDER BY ended_at LIMIT 10 FOR UPDATE")
        due(member)
        member.wait_for("SELECT count(*) = 10 FROM sluice.history")
        assert member.execute("SELECT count(*) FROM sluice.alerts") == [(0,)]
    due(member)
    none_left(member)


def test_locked_table_is_left(member: Database) -> None:
    """Somebody has it to himself, as VACUUM FULL does: that is no failure, and passes."""
    configure_database(member, history_retention="1 h")
    fill(member, 3)
    step = "SELECT deleted FROM _sluice.upkeep()"
    with member.connect() as session, member.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE _sluice.history")
        session.execute("SET lock_timeout = '20 ms'")
        due(member)
        for _ in range(3):
            assert session.execute(step).fetchall() == [(0,)]
        assert member.execute(
            "SELECT bool_and(error IS NULL), bool_or(due_at <= now()) FROM _sluice.upkeep"
            " WHERE NOT in_control"
        ) == [(True, False)]
        assert member.execute("SELECT count(*) FROM sluice.alerts") == [(0,)]
    work(member)
    none_left(member)


OLD_ROWS = {
    "history_age": (
        "_sluice.history",
        "INSERT INTO _sluice.history"
        " (run_id, pgt_id, name, kind, outcome, attempt, started_at, ended_at)"
        " SELECT gen_random_uuid(), 999, 'gone', 'job', 'succeeded', 1, t, t"
        " FROM generate_series(timestamptz '2020-01-01', '2020-01-02', '1 h') AS t",
    ),
    "history_rows": (
        "_sluice.history",
        "INSERT INTO _sluice.history"
        " (run_id, pgt_id, name, kind, outcome, attempt, started_at, ended_at)"
        " SELECT gen_random_uuid(), 999, 'gone', 'job', 'succeeded', 1, t, t"
        " FROM generate_series(1, 26) AS n, LATERAL (SELECT now() - n * interval '1 s') AS x (t)",
    ),
    "alerts": (
        "_sluice.alert",
        "INSERT INTO _sluice.alert"
        " (event, severity, message, opened_at, closed_at, last_emitted_at)"
        " SELECT 'suspended', 'critical', 'gone', d, d, d"
        " FROM generate_series(1, 25), (VALUES (date '2020-01-01')) AS v (d)",
    ),
    "vanished_databases, runs": (
        "_sluice.queue",
        "INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at)"
        " SELECT 999999, n, 'gone', now(), now() FROM generate_series(1, 25) AS n",
    ),
    "vanished_databases, pauses": (
        "_sluice.pause",
        "INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by, stays)"
        " SELECT 999999, n, 'gone', 'x', true FROM generate_series(1, 25) AS n",
    ),
}
"""Twenty-five rows that are past their time, by the task that deletes them, and their table."""


@pytest.mark.parametrize("what", OLD_ROWS)
def test_no_step_waits_for_who_holds_a_row(database: Database, what: str) -> None:
    table, fill = OLD_ROWS[what]
    task = what.partition(",")[0]
    configure_database(database, history_rows="1")
    database.execute(fill)
    step = f"SELECT deleted FROM _sluice.purge_{task}(NULL, 1000, clock_timestamp() + '1 min')"
    with database.connect(autocommit=False) as holder:
        held = f"SELECT FROM {table} ORDER BY ctid DESC LIMIT 10 FOR UPDATE"
        assert holder.execute(held).rowcount == 10
        # It would fail with lock_not_available.
        database.execute("SET lock_timeout = '1 ms'")
        assert database.execute(step) == [(15,)]
    assert database.execute(step) == [(10,)]


def test_steps_at_the_same_time_are_of_different_tasks(database: Database) -> None:
    """Two leaders can meet here, a frozen one and the next."""
    configure_database(database, history_retention="1 h")
    fill(database, 10)
    step = "SELECT deleted FROM _sluice.upkeep()"
    database.execute("UPDATE _sluice.upkeep SET due_at = 'infinity' WHERE task <> 'history_age'")
    database.execute("UPDATE _sluice.upkeep SET due_at = now() WHERE task = 'alerts'")
    database.execute("SET lock_timeout = '1 ms'")
    with database.connect(autocommit=False) as former:
        assert former.execute(step).fetchone() == (10,)
        assert database.execute(step) == [(0,)]
    assert database.execute(
        "SELECT task, deleted, error FROM _sluice.upkeep WHERE last_at IS NOT NULL ORDER BY task"
    ) == [("alerts", 0, None), ("history_age", 10, None)]


@pytest.mark.parametrize("signal", ["pg_cancel_backend", "pg_terminate_backend"])
def test_killed_session_loses_nothing(
    cluster: Cluster, member: Database, leader: Leader, signal: str
) -> None:
    """In the middle of a step: it is undone, and made again by whoever comes next."""
    rested(member)
    configure_database(member, history_retention="1 h")
    fill(member, 1000)
    # A step that has deleted, and waits here for the test.
    member.execute("CREATE TABLE door (name text)")
    member.execute("INSERT INTO door VALUES ('door')")
    member.execute(
        "CREATE FUNCTION wait_at_door() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM FROM public.door FOR UPDATE; RETURN NULL; END$$"
    )
    member.execute(
        "CREATE TRIGGER waits AFTER DELETE ON _sluice.history"
        " FOR EACH STATEMENT EXECUTE FUNCTION wait_at_door()"
    )
    member.execute("ALTER FUNCTION wait_at_door() SET lock_timeout = '1 min'")
    with member.connect(autocommit=False) as holder:
        holder.execute("SELECT FROM door FOR UPDATE")
        due(member)
        cluster.wait_for(UPKEEP.format("count(*) = 1") + " AND a.wait_event_type = 'Lock'")
        cluster.execute(UPKEEP.format(f"{signal}(a.pid)"))
        cluster.wait_for(UPKEEP.format("count(*) = 0"))
    assert member.execute(
        "SELECT (SELECT count(*) FROM sluice.history), deleted, error FROM _sluice.upkeep"
        " WHERE task = 'history_age'"
    ) == [(1000, 0, None)]
    member.execute("DROP TRIGGER waits ON _sluice.history")
    # A leader leaves a database alone for a minute where it couldn't work; another one comes.
    work(member)
    assert member.execute("SELECT count(*) FROM sluice.history") == [(0,)]
    assert leader.alive


def test_no_snapshot_between_steps(cluster: Cluster, member: Database, leader: Leader) -> None:
    """Nor a lock: it would keep vacuum from what the steps before it deleted."""
    rested(member)
    configure_database(
        member,
        history_retention="1 h",
        maintenance_batch="100",
        maintenance_budget="10 ms",
    )
    fill(member, 20000)
    due(member)
    idle_once = UPKEEP.format("a.backend_xmin IS NULL AND a.backend_xid IS NULL") + (
        " AND a.state = 'idle'"
    )
    for _ in range(20):
        assert cluster.wait_for(idle_once)
    assert member.execute("SELECT count(*) > 0 FROM sluice.history") == [(True,)]


@pytest.mark.timeout(120)
def test_stopped_member_is_let_go(
    cluster: Cluster, member: Database, other: Database, leader: Leader
) -> None:
    """In the midst of a backlog, and of a rest, by a leader that goes on."""
    rested(member)
    rested(other)
    smallest_share(member)
    fill(member, 2000)
    due(member)
    member.execute("NOTIFY sluice_wake")
    # Others may have their turn before, and the rest that it calls for.
    member.wait_for("SELECT deleted > 0 FROM _sluice.upkeep WHERE task = 'history_age'", timeout=45)
    member.execute("SELECT sluice.stop()")
    cluster.wait_for(UPKEEP.format("count(*) = 0") + f" AND a.datname = '{member.name}'", timeout=8)
    assert member.execute("SELECT count(*) > 0 FROM sluice.history") == [(True,)]
    assert leader.alive
    assert other.execute("SELECT state FROM sluice.databases() WHERE state = 'scheduled'")


@pytest.mark.timeout(90)
def test_fire_runs_once_though_its_history_is_old(
    cluster: Cluster,
    short_lease: None,
    control: Database,
    member: Database,
    lead: Callable[..., Leader],
) -> None:
    """1. A run commits. 2. Its leader ends before it has finished it in the queue. 3. The row that
    tells of the run is past its retention, and upkeep passes. 4. The next leader finds the run: it
    is on record, and not run again."""
    configure_database(member, history_retention="1 s", history_rows="1")
    member.execute("CREATE TABLE effects (at timestamptz DEFAULT clock_timestamp())")
    member.execute("CREATE TABLE door AS SELECT 1 AS one")
    member.execute(
        "SELECT sluice.schedule('job', '1 h', 'INSERT INTO effects DEFAULT VALUES;"
        " SELECT FROM door FOR UPDATE', lock_timeout => '1 min')"
    )
    former = lead()
    with (
        member.connect(autocommit=False) as holder,
        control.connect(autocommit=False) as gatekeeper,
    ):
        holder.execute("SELECT FROM door FOR UPDATE")
        member.execute("UPDATE _sluice.node SET next_fire_at = clock_timestamp()")
        member.execute("NOTIFY sluice_wake")
        member.wait_for(
            "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            f" AND {holder.info.backend_pid} = ANY (pg_blocking_pids(pid))"
        )
        gatekeeper.execute("SELECT _sluice.close_gate()")
        holder.rollback()
        member.wait_for("SELECT count(*) = 1 FROM effects")
        former.terminate()
        former.join()
        cluster.wait_for(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pg_sluice leader'"
        )
    assert control.execute("SELECT state FROM _sluice.queue") == [("running",)]
    member.execute(
        "UPDATE _sluice.history SET started_at = started_at - interval '1 h',"
        " ended_at = ended_at - interval '1 h'"
    )
    work(member)
    lead()
    idle(cluster)
    member.wait_for("SELECT next_fire_at > clock_timestamp() FROM sluice.nodes")
    assert member.execute("SELECT count(*) FROM effects") == [(1,)]
    assert member.execute("SELECT outcome, attempt FROM sluice.history") == [("succeeded", 1)]
    assert member.execute("SELECT consecutive_errors FROM sluice.nodes") == [(0,)]
