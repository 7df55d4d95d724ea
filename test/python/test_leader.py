"""The leader: what it runs, how it ends, and that there is one."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from calls import a_run_in_progress
from cluster import Cluster, Database, Leader
from runs import configure, ran, run_now, schedule


def lease(cluster: Cluster) -> Any:
    return cluster.execute("SELECT epoch, pid, expires_at FROM _sluice.lease")[0]


def no_sessions(cluster: Cluster) -> None:
    cluster.wait_for(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name LIKE 'pg_sluice%'",
    )


# What it runs


def test_all_kinds_run_on_their_grid(member: Database, leader: Leader) -> None:
    member.execute("CREATE TABLE base AS SELECT 1 AS x")
    member.execute("CREATE TABLE log (at timestamptz DEFAULT clock_timestamp())")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT sum(x) FROM base', '1s')")
    member.execute("CREATE MATERIALIZED VIEW mv AS SELECT sum(x) FROM base")
    member.execute("SELECT sluice.schedule_refresh('mv', '2s')")
    member.execute("SELECT sluice.schedule('job', '1s', 'INSERT INTO log DEFAULT VALUES')")
    member.execute("INSERT INTO base VALUES (41)")
    member.wait_for("SELECT count(DISTINCT pgt_id) = 3 AND count(*) >= 7 FROM sluice.history")
    for relation in ("st", "mv"):
        member.wait_for(f"SELECT sum = 42 FROM {relation}")
    rows = member.execute(
        "SELECT n.name,"
        " array_agg(extract(epoch FROM h.due_at - n.anchor)::float8 ORDER BY h.due_at),"
        " max(extract(epoch FROM h.started_at - h.due_at))::float8, array_agg(DISTINCT h.outcome)"
        " FROM sluice.history AS h JOIN"
        " (SELECT pgt_id, anchor, name FROM _sluice.node JOIN sluice.nodes USING (pgt_id)) AS n"
        " USING (pgt_id) GROUP BY 1"
    )
    for name, offsets, lateness, outcomes in rows:
        step = 2 if name.endswith("mv") else 1
        assert offsets == [offsets[0] + step * k for k in range(len(offsets))], name
        assert offsets[0] % step == 0, name
        assert lateness < 0.8, name
        assert set(outcomes) <= {"succeeded", "no_change"}, name
    assert member.execute("SELECT count(*) FROM log") == member.execute(
        "SELECT count(*) FROM sluice.history WHERE kind = 'job'"
    )


def test_upstream_runs_before_downstream(member: Database, leader: Leader) -> None:
    """Due together: the reader waits for what it reads, and sees its new rows."""
    member.execute("CREATE TABLE base AS SELECT 1 AS x")
    member.execute("SELECT sluice.create_stream_table('up', 'SELECT x FROM base', '1 h')")
    member.execute(
        "SELECT sluice.create_stream_table('down', 'SELECT x FROM up', '1 h', priority => 100)"
    )
    member.execute("INSERT INTO base VALUES (2)")
    # The downstream is more urgent and has been due for longer.
    member.execute(
        "UPDATE _sluice.node SET next_fire_at = now() - interval '1 s' * pgt_id; NOTIFY sluice_wake"
    )
    ran(member, 2)
    assert member.execute("SELECT x FROM down ORDER BY x") == [(1,), (2,)]
    up, down = member.execute("SELECT started_at, ended_at FROM sluice.history ORDER BY pgt_id")
    assert up[1] <= down[0]


def test_calculated_follows_its_reader(member: Database, leader: Leader) -> None:
    member.execute("CREATE TABLE base AS SELECT 1 AS x")
    member.execute("SELECT sluice.create_stream_table('up', 'SELECT x FROM base', 'calculated')")
    assert member.execute("SELECT next_fire_at FROM sluice.nodes") == [(None,)]
    member.execute("SELECT sluice.create_stream_table('down', 'SELECT x FROM up', '1s')")
    member.wait_for("SELECT count(DISTINCT pgt_id) = 2 FROM sluice.history")
    member.execute("SELECT sluice.drop_stream_table('down')")
    assert member.execute("SELECT next_fire_at FROM sluice.nodes") == [(None,)]


def test_table_without_contents_is_filled_by_its_first_run(
    member: Database, leader: Leader
) -> None:
    member.execute(
        "SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '1s', initialize => false)"
    )
    member.execute("CREATE MATERIALIZED VIEW mv AS SELECT 1 AS x WITH NO DATA")
    member.execute("SELECT sluice.schedule_refresh('mv', '1s')")
    member.wait_for("SELECT bool_and(status = 'active') FROM sluice.nodes")
    for relation in ("st", "mv"):
        assert member.execute(f"SELECT x FROM {relation}") == [(1,)]


@pytest.mark.parametrize("schedule", ["manual", "1 h"])
def test_new_query_shows_at_the_next_tick(member: Database, leader: Leader, schedule: str) -> None:
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', %s)", [schedule])
    member.execute("SELECT sluice.alter_stream_table('st', query => 'SELECT 2 AS x')")
    member.wait_for("SELECT x = 2 FROM st")
    member.wait_for("SELECT next_fire_at IS NULL OR next_fire_at > now() FROM sluice.nodes")


def test_dropped_relation_is_no_trouble(member: Database, leader: Leader) -> None:
    """A relation that goes while its run is queued or its node is due."""
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '1s')")
    member.execute("CREATE MATERIALIZED VIEW mv AS SELECT 1 AS x")
    member.execute("SELECT sluice.schedule_refresh('mv', '1s')")
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    ran(member, 3)
    member.execute("DROP TABLE st; DROP MATERIALIZED VIEW mv")
    assert member.execute("SELECT name FROM sluice.nodes") == [("job",)]
    count = member.execute("SELECT count(*) FROM sluice.history WHERE name = 'job'")[0][0]
    member.wait_for(f"SELECT count(*) > {count + 1} FROM sluice.history WHERE name = 'job'")
    assert set(member.execute("SELECT DISTINCT outcome FROM sluice.history")) <= {
        ("succeeded",),
        ("no_change",),
    }


def test_setting_takes_effect_soon(cluster: Cluster, member: Database, lead: Any) -> None:
    """At the next wake-up, however long the scheduler_interval is."""
    cluster.execute("SELECT sluice.configure('scheduler_interval', '60 s', cluster => true)")
    lead()
    member.wait_for("SELECT last_tick_at IS NOT NULL FROM sluice.databases()")
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(1)')")
    member.execute("SELECT sluice.configure('refresh_timeout', '200 ms')")

    def outcome() -> str:
        (run_id,) = member.execute("SELECT sluice.run_now('job')")[0]
        return str(member.wait_for(f"SELECT outcome FROM sluice.history WHERE run_id = '{run_id}'"))

    member.wait_for(lambda: outcome() == "deadline_exceeded")


def test_news_that_comes_during_a_tick_is_not_missed(
    cluster: Cluster, member: Database, lead: Any
) -> None:
    """However long the scheduler_interval is: there is another tick at once."""
    cluster.execute("SELECT sluice.configure('scheduler_interval', '60 s', cluster => true)")
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
    lead()
    member.wait_for("SELECT last_tick_at IS NOT NULL FROM sluice.databases()")
    for runs in range(1, 11):
        with member.connect(autocommit=False) as holder:
            # The tick has looked for what is due when it reads them.
            holder.execute("LOCK TABLE _sluice.setting")
            member.execute("NOTIFY sluice_wake")
            member.wait_for(
                "SELECT true FROM pg_stat_activity AS a WHERE a.wait_event_type = 'Lock'"
                " AND a.application_name LIKE 'pg_sluice scheduler%'"
                " AND a.datname = current_database()"
            )
            member.execute("UPDATE _sluice.node SET next_fire_at = now(); NOTIFY sluice_wake")
        ran(member, runs)


# One pass


@pytest.fixture
def gate(cluster: Cluster) -> Iterator[int]:
    """Whoever holds this advisory lock of the control database lets nobody queue anything."""
    cluster.execute(
        "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_advisory_xact_lock(8); RETURN NULL; END'"
    )
    cluster.execute(
        "CREATE TRIGGER wait BEFORE INSERT ON _sluice.queue EXECUTE FUNCTION public.wait()"
    )
    yield 8
    cluster.execute("DROP FUNCTION public.wait CASCADE")


def test_node_that_somebody_takes_during_a_tick_holds_nobody_up(
    cluster: Cluster, member: Database, gate: int, leader: Leader
) -> None:
    """1. A tick reads two nodes that are due. 2. While it queues them, a user's transaction takes
    one. 3. The other goes on. 4. So does that one afterwards, with each fire run once."""
    for name in ("taken", "other"):
        member.execute("SELECT sluice.schedule(%s, '1h', 'SELECT 1')", [name])
    with cluster.connect() as holder, member.connect(autocommit=False) as user:
        holder.execute("SELECT pg_advisory_lock(%s)", [gate])
        member.execute("UPDATE _sluice.node SET schedule = '1s', next_fire_at = now()")
        member.execute("UPDATE _sluice.graph SET effective_schedule = '1s'")
        cluster.wait_for(
            "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        )
        user.execute("SELECT sluice.reset('taken')")
        holder.execute("SELECT pg_advisory_unlock(%s)", [gate])
        # A tick that waits does so for five seconds.
        member.wait_for("SELECT count(*) > 1 FROM sluice.history WHERE name = 'other'", timeout=4)
    member.wait_for(
        "SELECT count(*) > 2 FROM sluice.history WHERE name = 'taken' AND outcome = 'succeeded'"
    )
    assert cluster.execute("SELECT state, failures FROM sluice.databases()") == [("scheduled", 0)]


def test_one_pass_runs_what_is_due_everywhere(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    with cluster.database() as other:
        other.execute("SELECT sluice.start()")
        for database in (member, other):
            database.execute("SELECT sluice.schedule('due', '1 h', 'SELECT pg_sleep(0.2)')")
            database.execute("SELECT sluice.schedule('later', '1 h', 'SELECT 1')")
            database.execute("SELECT sluice.schedule('by_hand', 'manual', 'SELECT 1')")
            database.execute("UPDATE _sluice.node SET next_fire_at = now() WHERE job_name = 'due'")
            database.execute("SELECT sluice.run_now('by_hand')")
        for passes in (1, 2):
            leader = lead("0", wait=False)
            assert leader.join() is None
            for database in (member, other):
                assert database.execute("SELECT name FROM sluice.history ORDER BY name") == [
                    ("by_hand",),
                    ("due",),
                ]
            assert lease(cluster) == (lease(cluster)[0], None, None)
            assert cluster.execute("SELECT count(*) FROM _sluice.queue") == [(0,)], passes
            no_sessions(cluster)


def test_one_pass_while_drained_or_paused_ends(
    member: Database, lead: Callable[..., Leader]
) -> None:
    member.execute("SELECT sluice.schedule('one', 'manual', 'SELECT 1')")
    member.execute("SELECT sluice.pause(ARRAY['one'])")
    member.execute("SELECT sluice.run_now('one')")
    assert lead("0", wait=False).join() is None
    member.execute("SELECT sluice.unpause(ARRAY['one'])")
    member.execute("SELECT sluice.drain()")
    assert lead("0", wait=False).join() is None
    assert member.execute("SELECT count(*) FROM sluice.history") == [(0,)]


@pytest.mark.parametrize("run_for", ["0", "1 hour"])
def test_leader_without_members_ends(
    cluster: Cluster, lead: Callable[..., Leader], run_for: str
) -> None:
    leader = lead(run_for, wait=False)
    assert leader.join() is None
    assert lease(cluster)[1:] == (None, None)
    no_sessions(cluster)


def test_leader_ends_with_its_last_member(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    member.execute("SELECT sluice.stop()")
    assert leader.join() is None
    assert lease(cluster)[1:] == (None, None)
    no_sessions(cluster)


# Its end


def test_term_ends_cleanly(cluster: Cluster, member: Database, lead: Callable[..., Leader]) -> None:
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    leader = lead("2 s")
    assert leader.join() is None
    assert lease(cluster)[1:] == (None, None)
    no_sessions(cluster)
    assert cluster.execute("SELECT count(*) FROM _sluice.slot") == [(0,)]
    assert cluster.execute("SELECT count(*) FROM _sluice.queue WHERE state = 'running'") == [(0,)]
    # The next one leads at once.
    count = member.execute("SELECT count(*) FROM sluice.history")[0][0]
    lead()
    ran(member, count + 1)


def test_term_waits_for_the_run_in_progress(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(4)')")
    leader = lead("1 s")
    member.execute("SELECT sluice.run_now('job')")
    assert leader.join() is None
    assert member.execute("SELECT outcome FROM sluice.history") == [("succeeded",)]
    assert cluster.execute("SELECT count(*) FROM _sluice.queue") == [(0,)]


def test_long_run_at_the_end_of_the_term_stops_no_other(
    cluster: Cluster,
    member: Database,
    other: Database,
    lead: Callable[..., Leader],
    workers: str,
) -> None:
    """Scheduling goes on, however long that takes, and the leader ends after that run."""
    configure(cluster, max_workers=workers)
    other.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    schedule(member, "SELECT pg_advisory_xact_lock(1)", lock_timeout="5 min")
    run_now(member)
    with member.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(1)")
        leader = lead("2 s")
        other.wait_for(
            "SELECT count(*) > 0 FROM sluice.history, pg_stat_activity AS a"
            f" WHERE a.pid = {leader.pid} AND started_at > a.backend_start + interval '6 s'"
        )
    assert leader.join() is None
    assert member.execute("SELECT outcome FROM sluice.history") == [("succeeded",)]
    assert cluster.execute("SELECT count(*) FROM _sluice.queue WHERE state = 'running'") == [(0,)]


def test_long_run_of_the_last_member_stops_no_newcomer(
    cluster: Cluster, member: Database, other: Database, lead: Callable[..., Leader]
) -> None:
    other.execute("SELECT sluice.stop()")
    leader = lead()
    with a_run_in_progress(member) as gate:
        member.execute("SELECT sluice.stop()")
        cluster.wait_for(
            "SELECT count(*) = 0 FROM pg_stat_activity"
            " WHERE application_name LIKE 'pg_sluice scheduler%'"
        )
        other.execute("SELECT sluice.start()")
        schedule(other, "SELECT 1")
        run_now(other)
        ran(other)
        gate.open()
    # One that was about to end is replaced.
    assert leader.join() is None


def test_cancel_ends_it_at_once(cluster: Cluster, member: Database, leader: Leader) -> None:
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(60)')")
    member.execute("SELECT sluice.run_now('job')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
    leader.cancel()
    error = leader.join()
    assert isinstance(error, psycopg.errors.QueryCanceled)
    assert error.diag.message_primary == "canceling statement due to user request"
    # After an error the lease is left to lapse.
    assert lease(cluster)[1] == leader.pid
    no_sessions(cluster)


def test_terminate_ends_its_workers_too(cluster: Cluster, member: Database, leader: Leader) -> None:
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(60)')")
    member.execute("SELECT sluice.run_now('job')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
    leader.terminate()
    assert isinstance(leader.join(), psycopg.errors.AdminShutdown)
    assert lease(cluster)[1] == leader.pid
    no_sessions(cluster)


def test_statement_timeout_ends_it_with_its_own_error(cluster: Cluster, member: Database) -> None:
    """Whatever ends it is told as PostgreSQL tells it, without a traceback."""
    with cluster.connect() as connection:
        connection.execute("SET statement_timeout = '1500ms'")
        with pytest.raises(psycopg.errors.QueryCanceled) as caught:
            connection.execute("CALL sluice.run()")
    assert caught.value.diag.message_primary == "canceling statement due to statement timeout"


@pytest.mark.parametrize("in_a_tick", [False, True])
def test_lost_control_connection_ends_it(
    cluster: Cluster, member: Database, control: Database, leader: Leader, in_a_tick: bool
) -> None:
    """With what happened to it, whoever notices: no database's scheduling has failed."""
    with control.connect(autocommit=False) as holder:
        if in_a_tick:
            holder.execute("SELECT FROM _sluice.member FOR UPDATE")
        cluster.wait_for(
            "SELECT count(pg_terminate_backend(pid)) = 1 FROM pg_stat_activity AS a"
            " WHERE application_name = 'pg_sluice leader'"
            f" AND (NOT {in_a_tick} OR (wait_event_type = 'Lock' AND query ~ 'record_tick'))"
        )
        error = leader.join()
    assert error is not None
    assert error.sqlstate is not None
    assert error.sqlstate[:2] in ("57", "08"), error
    assert "Traceback" not in str(error)
    no_sessions(cluster)


# There is one


def test_second_leader_waits_for_one_lease_and_ends(
    cluster: Cluster, member: Database, short_lease: None, lead: Callable[..., Leader]
) -> None:
    first = lead()
    second = lead(wait=False)
    assert second.join() is None
    assert first.leads
    assert cluster.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pg_sluice scheduler%'"
    ) == [(1,)]


def test_second_leader_takes_over_after_a_kill(
    cluster: Cluster, member: Database, short_lease: None, lead: Callable[..., Leader]
) -> None:
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    first = lead()
    ran(member)
    epoch = lease(cluster)[0]
    second = lead(wait=False)
    first.terminate()
    cluster.wait_for(lambda: second.leads)
    assert lease(cluster)[0] > epoch
    count = member.execute("SELECT count(*) FROM sluice.history")[0][0]
    ran(member, count + 2)


def test_many_candidates_give_one_leader(
    cluster: Cluster, member: Database, short_lease: None, lead: Callable[..., Leader]
) -> None:
    leaders = [lead(wait=False) for _ in range(4)]
    cluster.wait_for(lambda: sum(leader.alive for leader in leaders) == 1)
    (one,) = (leader for leader in leaders if leader.alive)
    assert one.leads
    assert [leader.error for leader in leaders] == [None] * 4


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE _sluice.lease SET epoch = epoch + 1",
        "UPDATE _sluice.lease SET expires_at = clock_timestamp()",
        "UPDATE _sluice.lease SET pid = NULL, backend_start = NULL, expires_at = NULL",
    ],
    ids=["taken over", "lapsed", "released"],
)
def test_leader_with_a_stale_lease_stops_at_once(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], change: str
) -> None:
    """Long before it would renew the lease. It takes its runs in progress along, since the next
    leader will start them again.
    """
    cluster.execute("SELECT sluice.configure('lease_ttl', '5 min', cluster => true)")
    leader = lead()
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(60)')")
    member.execute("SELECT sluice.run_now('job')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
    cluster.execute(change)
    error = leader.join()
    assert error is not None
    assert (error.sqlstate, error.diag.message_primary) == ("SL001", "leadership lost")
    no_sessions(cluster)
    assert member.execute("SELECT count(*) FROM sluice.history") == [(0,)]


def test_stale_epoch_changes_nothing(cluster: Cluster, member: Database, leader: Leader) -> None:
    """Each function that changes dispatch state refuses the epoch before ours."""
    epoch = lease(cluster)[0] - 1
    for call in (
        "renew_lease(%s, 15)",
        "release_lease(%s)",
        "reserve_slot(%s, 1)",
        "activate_slot(%s, gen_random_uuid(), 1, now())",
        "release_slot(%s, gen_random_uuid())",
        "reconcile_slots(%s)",
        "enqueue(%s, 1, '[]')",
        "next_run(%s, NULL, 1, NULL)",
        "known_nodes(%s, 1)",
        "forget_nodes(%s, 1, '{1}')",
        "orphaned_runs(%s)",
        "members(%s)",
        "record_tick(%s, 1, 1)",
        "record_failed_tick(%s, 1, 'failed', 'x', NULL)",
        "interrupt_backend(%s, 1, now(), false)",
        "report_stuck_backend(%s, 1, now())",
    ):
        with pytest.raises(psycopg.Error) as caught:
            cluster.execute(f"SELECT _sluice.{call}", [epoch])
        assert caught.value.sqlstate == "SL001", call


def test_leader_holds_no_snapshot(cluster: Cluster, member: Database, leader: Leader) -> None:
    """Between ticks: what was committed up to now, no session of ours holds back."""
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    ran(member)
    (pid,) = cluster.execute("SELECT pid FROM _sluice.lease")[0]
    with cluster.connect() as connection:
        for _ in range(10):
            connection.execute("SELECT txid_current()")
            cluster.wait_for(
                lambda: (
                    connection.execute(
                        "SELECT count(*) >= 4"
                        " AND bool_and(backend_xmin IS NULL AND backend_xid IS NULL)"
                        " FROM pg_stat_activity"
                        " WHERE pid = %s OR application_name LIKE 'pg_sluice%%'",
                        [pid],
                    ).fetchone()
                    == (True,)
                ),
            )
        # In transactions of its own, so that it is never idle in one.
        assert connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pg_sluice%' AND state LIKE 'idle in transaction%'"
        ).fetchone() == (0,)


# Refusals


@pytest.mark.parametrize("procedure", ["run", "serve_metrics"])
def test_what_is_called_elsewhere_is_refused(member: Database, procedure: str) -> None:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        member.execute(f"CALL sluice.{procedure}('1 s')")
    assert caught.value.diag.message_primary == (
        'must be called in the control database "postgres"'
    )
    assert member.name in caught.value.diag.message_detail


def test_run_in_a_transaction_block_is_refused(cluster: Cluster, member: Database) -> None:
    with cluster.connect(autocommit=False) as connection:
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL sluice.run('1 s')")
        assert caught.value.sqlstate in ("25001", "2D000")
        assert "Traceback" not in str(caught.value)
    assert lease(cluster)[1] is None


@pytest.mark.parametrize(
    ("run_for", "sqlstate"), [("NULL", "22004"), ("'-1 s'", "22023"), ("'infinity'", "22007 22023")]
)
def test_run_for_nonsense_is_refused(
    cluster: Cluster, member: Database, run_for: str, sqlstate: str
) -> None:
    with cluster.connect() as connection:
        connection.execute("SET statement_timeout = '5 s'")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(f"CALL sluice.run({run_for})")
    # Before PostgreSQL 17 there is no endless interval to refuse.
    assert caught.value.sqlstate in sqlstate.split()


def test_only_a_superuser_leads(cluster: Cluster, member: Database) -> None:
    cluster.create_role("dave")
    with (
        cluster.connect(user="dave") as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CALL sluice.run('1 s')")


def test_health_check_tells_of_the_leader(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    check = "SELECT status FROM sluice.health_check() WHERE \"check\" = 'leader'"
    assert member.execute(check) == [("critical",)]
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
    leader = lead()
    assert member.execute(check) == [("ok",)]
    assert (
        str(leader.pid)
        in member.execute("SELECT detail FROM sluice.health_check() WHERE \"check\" = 'leader'")[0][
            0
        ]
    )
    leader.terminate()
    member.wait_for(check.replace("SELECT status", "SELECT status = 'critical'"))
