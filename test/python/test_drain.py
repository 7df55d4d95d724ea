"""Drain: what it promises when it returns, and what its failed calls leave behind."""

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from calls import Call, Gate, a_run_in_progress, history, ticks_pass
from cluster import Cluster, Database, Leader


@pytest.mark.parametrize(
    ("max_workers", "transactional"),
    [("0", True), ("4", False)],
    ids=["in serial mode", "at top level"],
)
def test_drain_waits_for_a_run_in_progress(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    max_workers: str,
    transactional: bool,
) -> None:
    cluster.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [max_workers])
    member.execute("SELECT sluice.schedule('next', 'manual', 'SELECT 1', priority => -100)")
    lead()
    with a_run_in_progress(member, transactional=transactional) as gate:
        drain = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]
        assert member.execute(
            "SELECT scope, state, requested_by, drained_at, active, waiting_for"
            " FROM sluice.drain_status()"
        ) == [("database", "draining", "postgres", None, 1, 'run of "gate"')]
        assert drain.waits
        member.execute("SELECT sluice.run_now('next')")
        gate.open()
        assert drain.value() == "drained"
    assert [outcome for outcome, _ in history(member, "gate")] == ["succeeded"]
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]
    assert member.execute("SELECT state, active FROM sluice.drain_status()") == [("drained", 0)]
    assert member.execute("SELECT name, state FROM sluice.queue()") == [("next", "queued")]
    member.execute("SELECT sluice.resume()")
    member.wait_for("SELECT count(*) = 1 FROM sluice.history WHERE name = 'next'")


def test_nothing_starts_between_drained_and_resume(member: Database, leader: Leader) -> None:
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    member.execute("SELECT sluice.schedule('by_hand', 'manual', 'SELECT 1')")
    member.wait_for("SELECT count(*) > 1 FROM sluice.history")
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    before = member.execute("SELECT count(*) FROM sluice.history")
    member.execute("SELECT sluice.run_now('by_hand')")
    # The node is due again by its grid, which the queue shows, and is not run.
    member.wait_for("SELECT count(*) = 2 FROM sluice.queue() WHERE state = 'queued'")
    ticks_pass(member, 1)
    assert member.execute("SELECT count(*) FROM sluice.history") == before
    assert member.execute("SELECT count(*) FROM sluice.queue() WHERE state = 'running'") == [(0,)]
    resumed_at = member.execute("SELECT clock_timestamp()")[0][0]
    member.execute("SELECT sluice.resume()")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history WHERE name = 'by_hand'")
    assert history(member, "by_hand")[0][1] >= resumed_at
    assert member.execute("SELECT sluice.is_drained()") == [(None,)]


def test_drain_holds_across_a_change_of_leader(
    member: Database, short_lease: None, lead: Callable[..., Leader]
) -> None:
    first = lead()
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    before = member.execute("SELECT count(*) FROM sluice.history")
    first.terminate()
    first.join()
    lead()
    ticks_pass(member, 1)
    assert member.execute("SELECT sluice.is_drained(), count(*) FROM sluice.history") == [
        (True, *before[0])
    ]
    member.execute("SELECT sluice.resume()")
    member.wait_for(f"SELECT count(*) > {before[0][0]} FROM sluice.history")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_drain_holds_across_a_restart_of_the_server(
    cluster: Cluster,
    member: Database,
    short_lease: None,
    lead: Callable[..., Leader],
    mode: str,
) -> None:
    lead()
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    before = member.execute("SELECT count(*) FROM sluice.history")
    cluster.restart(mode)
    lead()
    ticks_pass(member)
    assert member.execute("SELECT sluice.is_drained(), count(*) FROM sluice.history") == [
        (True, *before[0])
    ]


@pytest.mark.parametrize(
    ("call", "shows"),
    [
        ("drain()", "SELECT drained_at IS NOT NULL FROM _sluice.drain"),
        ("drain(wait => false)", "SELECT stays FROM _sluice.drain"),
        ("pause('{job}')", "SELECT stays FROM _sluice.pause"),
        ("run_now('job')", "SELECT count(*) = 1 FROM _sluice.queue"),
        ("stop()", "SELECT count(*) = 0 FROM _sluice.member"),
    ],
)
def test_answer_survives_a_crash(cluster: Cluster, member: Database, call: str, shows: str) -> None:
    """One that comes at once: no later commit has flushed what it says."""
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
    member.execute(f"SELECT sluice.{call}")
    cluster.restart("immediate")
    assert cluster.execute(shows) == [(True,)]


def test_timed_out_drain_stays_in_force(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member) as gate:
        assert member.execute("SELECT sluice.drain('100 ms')") == [("draining",)]
        ticks_pass(member)
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]
        gate.open()
        member.wait_for("SELECT sluice.is_drained()")


def test_drain_without_waiting_returns_at_once_and_stays(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        assert member.execute("SELECT sluice.drain(wait => false)") == [("draining",)]
        ticks_pass(member)
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]


def test_statement_timeout_in_drain_withdraws_its_request(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member), member.connect() as connection:
        connection.execute("SET statement_timeout = '700ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("SELECT sluice.drain()")
        assert member.execute("SELECT sluice.is_drained()") == [(None,)]


def test_killed_drain_is_withdrawn(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        drain = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        member.execute("SELECT pg_terminate_backend(%s)", [drain.pid])
        with pytest.raises(psycopg.OperationalError):
            drain.value()
        member.wait_for("SELECT sluice.is_drained() IS NULL")


@pytest.mark.parametrize("client_min_messages", ["notice", "error"])
def test_drain_whose_client_vanishes_is_withdrawn(
    member: Database, leader: Leader, client_min_messages: str
) -> None:
    """Also one that wants no notices, by which the server notices."""
    with a_run_in_progress(member):
        connection = member.connect(options=f"-c client_min_messages={client_min_messages}")
        connection.pgconn.send_query(b"SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        connection.pgconn.finish()
        member.wait_for("SELECT sluice.is_drained() IS NULL")


def test_joined_drain_outlives_the_call_that_made_it(member: Database, leader: Leader) -> None:
    """Two calls wait for one request; the first is cancelled, the second still means it."""
    with a_run_in_progress(member) as gate:
        first = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        second = Call(member, "SELECT sluice.drain()")
        member.wait_for(
            "SELECT count(*) = 2 FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"
        )
        member.execute("SELECT pg_cancel_backend(%s)", [first.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            first.value()
        assert second.waits
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]
        gate.open()
        assert second.value() == "drained"
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]


def test_drain_that_was_told_to_stay_stays_though_it_joined(
    member: Database, leader: Leader
) -> None:
    with a_run_in_progress(member):
        first = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        assert member.execute("SELECT sluice.drain(wait => false)") == [("draining",)]
        member.execute("SELECT pg_cancel_backend(%s)", [first.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            first.value()
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]


def test_cancelling_a_call_that_joined_leaves_the_request(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        assert member.execute("SELECT sluice.drain(wait => false)") == [("draining",)]
        second = Call(member, "SELECT sluice.drain()")
        member.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"
        )
        member.execute("SELECT pg_cancel_backend(%s)", [second.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            second.value()
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]


def test_resume_ends_all_waits(cluster: Cluster, member: Database, leader: Leader) -> None:
    """Whoever resumes while others wait for the drain ends that drain; the waits tell so."""
    with a_run_in_progress(member):
        drains = [Call(member, "SELECT sluice.drain('5 min')") for _ in range(2)]
        cluster.wait_for("SELECT count(*) = 2 FROM _sluice.drain_waiter")
        # One with a shorter timeout joins them and leaves.
        assert member.execute("SELECT sluice.drain('100 ms')") == [("draining",)]
        assert all(drain.waits for drain in drains)
        member.execute("SELECT sluice.resume()")
        assert member.execute("SELECT sluice.is_drained()") == [(None,)]
        for drain in drains:
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
                drain.value()
            assert caught.value.diag.message_primary == (
                "the drain was ended by sluice.resume() before it was reached"
            )


def test_drain_in_a_transaction_sees_the_present_and_outlives_it(
    member: Database, leader: Leader
) -> None:
    with a_run_in_progress(member) as gate:
        for mode in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE, READ ONLY"):
            with member.connect(autocommit=False) as connection:
                connection.execute(f"SET TRANSACTION ISOLATION LEVEL {mode}")
                assert connection.execute("SELECT sluice.drain('0 s')").fetchone() == ("draining",)
                gate.open()
                assert connection.execute("SELECT sluice.drain()").fetchone() == ("drained",)
                assert connection.execute("SELECT sluice.is_drained()").fetchone() == (True,)
                member.execute("SELECT sluice.resume()")
                assert connection.execute("SELECT sluice.is_drained()").fetchone() == (None,)
                assert connection.execute("SELECT sluice.drain()").fetchone() == ("drained",)
                connection.rollback()
            assert member.execute("SELECT sluice.is_drained()") == [(True,)]
            member.execute("SELECT sluice.resume()")
            gate.enter()


def test_drain_of_one_database_leaves_the_other_alone(
    member: Database, other: Database, leader: Leader
) -> None:
    for database in (member, other):
        database.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    other.wait_for("SELECT count(*) > 1 FROM sluice.history")
    assert other.execute("SELECT sluice.is_drained()") == [(None,)]
    assert other.execute("SELECT sluice.is_drained(cluster => true)") == [(None,)]


def test_drain_of_the_server_stops_all_databases(
    member: Database, other: Database, leader: Leader
) -> None:
    other.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    other.wait_for("SELECT count(*) > 0 FROM sluice.history")
    assert member.execute("SELECT sluice.drain(cluster => true)") == [("drained",)]
    before = other.execute("SELECT count(*) FROM sluice.history")
    ticks_pass(other, 1)
    assert other.execute("SELECT count(*) FROM sluice.history") == before
    # resume() of a database does not end the drain of the server.
    other.execute("SELECT sluice.resume()")
    ticks_pass(other, 1)
    assert other.execute("SELECT count(*) FROM sluice.history") == before
    assert other.execute("SELECT scope, state FROM sluice.drain_status()") == [
        ("cluster", "drained")
    ]
    member.execute("SELECT sluice.resume(cluster => true)")
    other.wait_for(f"SELECT count(*) > {before[0][0]} FROM sluice.history")


STATUS = "SELECT scope, state, active, waiting_for FROM sluice.drain_status()"
DRAINED = "SELECT sluice.is_drained(), sluice.is_drained(cluster => true)"


def test_drain_of_a_database_inside_one_of_the_server(
    member: Database, other: Database, leader: Leader
) -> None:
    """Two requests, each reached by itself and ended by itself, in either order."""
    with a_run_in_progress(member, "mine") as mine, a_run_in_progress(other, "theirs") as theirs:
        outer = Call(member, "SELECT sluice.drain(cluster => true)")
        inner = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 2 FROM sluice.drain_status()")
        assert member.execute(STATUS) == [
            ("cluster", "draining", 2, 'run of "mine", run of "theirs"'),
            ("database", "draining", 1, 'run of "mine"'),
        ]
        mine.open()
        assert inner.value() == "drained"
        assert outer.waits
        assert member.execute(STATUS) == [
            ("cluster", "draining", 1, 'run of "theirs"'),
            ("database", "drained", 0, None),
        ]
        assert member.execute(DRAINED) == [(True, False)]
        assert other.execute(DRAINED) == [(None, False)]
        assert other.execute(STATUS) == [("cluster", "draining", 1, 'run of "theirs"')]
        theirs.open()
        assert outer.value() == "drained"
    for database in (member, other):
        database.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
        database.execute("SELECT sluice.run_now('job')")
    # Ending the drain of the database frees nothing yet.
    member.execute("SELECT sluice.resume()")
    assert member.execute(DRAINED) == [(None, True)]
    ticks_pass(member)
    assert history(member, "job") == []
    # Ending that of the server frees what has none of its own.
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    member.execute("SELECT sluice.resume(cluster => true)")
    assert member.execute(DRAINED) == [(True, None)]
    other.wait_for("SELECT count(*) = 1 FROM sluice.history WHERE name = 'job'")
    ticks_pass(member)
    assert history(member, "job") == []
    member.execute("SELECT sluice.resume()")
    member.wait_for("SELECT count(*) = 1 FROM sluice.history WHERE name = 'job'")
    assert member.execute(STATUS) == []


def test_drain_without_a_leader(member: Database) -> None:
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]


def test_drain_is_reached_when_a_run_that_would_not_end_has_had_its_time(
    member: Database, leader: Leader
) -> None:
    """Without anybody's help; and what failed is not tried again before resume()."""
    member.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
    member.execute(
        "SELECT sluice.schedule('endless', 'manual', 'SELECT pg_sleep(600)',"
        " refresh_timeout => '1500 ms')"
    )
    member.execute("SELECT sluice.run_now('endless')")
    member.wait_for("SELECT state = 'running' FROM sluice.queue()")
    assert member.execute("SELECT sluice.drain('100 ms')") == [("draining",)]
    member.wait_for("SELECT sluice.is_drained()")
    assert [outcome for outcome, _ in history(member, "endless")] == ["deadline_exceeded"]
    member.wait_for("SELECT state = 'queued' FROM sluice.queue()")
    ticks_pass(member)
    assert len(history(member, "endless")) == 1


@pytest.mark.parametrize("transactional", [True, False])
def test_job_cannot_wait_for_itself(member: Database, leader: Leader, transactional: bool) -> None:
    """A drain or pause of its own run that waits is refused at once; the others are not."""
    commands = {
        "drains": "drain()",
        "drains_all": "drain(cluster => true)",
        "pauses": "pause(ARRAY['pauses'])",
        "pauses_other": "pause(ARRAY['pauses'])",
        "pauses_later": "pause(ARRAY['pauses_later'], wait => false)",
        "drains_later": "drain(wait => false)",
    }
    for name, call in commands.items():
        member.execute(
            "SELECT sluice.schedule(%s, 'manual', %s, %s)",
            [name, f"SELECT sluice.{call}", transactional],
        )
        member.execute("SELECT sluice.run_now(%s)", [name])
        member.wait_for(f"SELECT count(*) = 1 FROM sluice.history WHERE name = '{name}'")
    assert dict(
        member.execute("SELECT name, concat_ws(' ', sqlstate, message) FROM sluice.history")
    ) == {
        "drains": '55006 cannot wait for the run of "drains" from within it',
        "drains_all": '55006 cannot wait for the run of "drains_all" from within it',
        "pauses": '55006 cannot wait for the run of "pauses" from within it',
        "pauses_other": "",
        "pauses_later": "",
        "drains_later": "",
    }
    member.wait_for("SELECT sluice.is_drained()")
    assert member.execute("SELECT sluice.unpause(ARRAY['pauses', 'pauses_later'])") == [(2,)]


# The leader changes


@pytest.mark.parametrize("state", ["killed", "frozen"])
def test_stops_wait_for_the_runs_of_a_former_leader(
    cluster: Cluster,
    member: Database,
    short_lease: None,
    lead: Callable[..., Leader],
    state: str,
) -> None:
    """1. A leader is killed or frozen while a run is in progress, whose backend does not notice.
    2. Another takes over. 3. Drain and pause wait until that backend is gone. 4. Nothing starts.
    """
    member.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
    member.execute("SELECT sluice.schedule('next', 'manual', 'SELECT 1')")
    former = lead()
    with a_run_in_progress(member):
        ((worker,),) = member.execute("SELECT pid FROM sluice.workers() WHERE name = 'gate'")
        os.kill(worker, signal.SIGSTOP)
        try:
            if state == "frozen":
                os.kill(former.pid, signal.SIGSTOP)
            else:
                former.terminate()
            pause = Call(member, "SELECT sluice.pause(ARRAY['gate'])")
            drain = Call(member, "SELECT sluice.drain()")
            cluster.wait_for("SELECT count(*) = 1 FROM _sluice.drain_waiter")
            member.execute("SELECT sluice.run_now('next')")
            lead()
            ticks_pass(member)
            assert (pause.waits, drain.waits) == (True, True)
            assert member.execute("SELECT sluice.is_drained()") == [(False,)]
            os.kill(worker, signal.SIGCONT)
            assert drain.value() == "drained"
            assert cluster.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [worker]
            ) == [(0,)]
            assert pause.value() == "paused"
            member.wait_for("SELECT count(*) = 1 FROM sluice.history")
            ticks_pass(member)
            assert member.execute("SELECT name, outcome FROM sluice.history") == [
                ("gate", "worker_crashed")
            ]
            assert member.execute("SELECT DISTINCT state FROM sluice.queue()") == [("queued",)]
        finally:
            for pid in (worker, former.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def test_drain_is_reached_without_a_leader_once_nothing_runs(
    cluster: Cluster, member: Database, short_lease: None, lead: Callable[..., Leader]
) -> None:
    """The last leader was killed with a run in progress, and no other comes: the database is no
    member any more, and it was the only one."""
    former = lead()
    with a_run_in_progress(member):
        former.terminate()
        former.join()
        member.execute("SELECT sluice.stop()")
        assert member.execute("SELECT sluice.drain()") == [("drained",)]
    assert cluster.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ '^pg_sluice (worker|sched)'"
    ) == [(0,)]
    # A later leader puts the run on record and starts nothing.
    member.execute("SELECT sluice.start()")
    lead()
    member.wait_for("SELECT count(*) = 1 FROM sluice.history")
    ticks_pass(member)
    assert member.execute("SELECT outcome FROM sluice.history") == [("worker_crashed",)]
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]


# The database leaves


def test_stop_and_start_leave_a_drain_in_force(
    cluster: Cluster, member: Database, other: Database, leader: Leader
) -> None:
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    with a_run_in_progress(member) as gate:
        drain = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        member.execute("SELECT sluice.stop()")
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]
        gate.open()
        assert drain.value() == "drained"
    before = member.execute("SELECT count(*) FROM sluice.history")
    for call in ("stop", "start"):
        member.execute(f"SELECT sluice.{call}()")
        assert member.execute("SELECT sluice.is_drained()") == [(True,)]
    ticks_pass(member)
    assert member.execute("SELECT count(*) FROM sluice.history") == before
    member.execute("SELECT sluice.resume()")
    member.wait_for(f"SELECT count(*) > {before[0][0]} FROM sluice.history")


@pytest.mark.parametrize("force", [False, True], ids=["after stop", "with force"])
def test_dropped_database_leaves_no_stop_behind(
    cluster: Cluster, member: Database, other: Any, leader: Leader, force: bool
) -> None:
    """One that is drained and has a paused node, or whose calls still wait for a run."""
    ((db_oid,),) = other.execute(
        "SELECT oid::bigint FROM pg_database WHERE datname = current_database()"
    )
    with contextlib.closing(Gate(other)) as gate:
        if force:
            gate.enter()
            calls = [Call(other, f"SELECT sluice.{c}") for c in ("drain()", "pause('{gate}')")]
            cluster.wait_for("SELECT count(*) = 1 FROM _sluice.drain_waiter")
            cluster.wait_for("SELECT count(*) = 1 FROM _sluice.pause_waiter")
            cluster.execute(f"DROP DATABASE {other.name} WITH (FORCE)")
            for call in calls:
                with pytest.raises(psycopg.OperationalError):
                    call.value()
        else:
            other.execute("SELECT sluice.pause('{gate}')")
            other.execute("SELECT sluice.run_now('gate')")
            other.execute("SELECT sluice.drain()")
            other.execute("SELECT sluice.stop()")
    if not force:
        other.let_go()
        cluster.wait_for(
            f"SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = '{other.name}'"
        )
        cluster.execute(f"DROP DATABASE {other.name}")
    for table in ("drain", "pause", "queue", "slot", "member"):
        cluster.wait_for(f"SELECT count(*) = 0 FROM _sluice.{table} WHERE db_oid = {db_oid}")
    assert leader.alive


@pytest.mark.timeout(90)
def test_extension_is_dropped_while_a_drain_waits(
    cluster: Cluster, member: Database, other: Database, leader: Leader
) -> None:
    """1. A drain waits for two runs, one of them at top level. 2. DROP EXTENSION waits for the
    drain's transaction and for the run's. 3. It comes through, and the run at top level ends with
    nowhere to record that. 4. Nothing waits for it for ever, and the request is still in force."""
    other.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    drop = "DROP EXTENSION pg_sluice CASCADE"

    def dropped() -> bool:
        # A tick that needs what it has locked already makes a deadlock; either of the two ends.
        with member.connect() as connection:
            try:
                connection.execute(drop)
            except (psycopg.errors.DeadlockDetected, psycopg.errors.UndefinedObject) as error:
                return isinstance(error, psycopg.errors.UndefinedObject)
        return True

    with (
        a_run_in_progress(member, "top", transactional=False) as top,
        a_run_in_progress(member, "inside") as inside,
    ):
        ((db_oid,),) = cluster.execute(
            "SELECT oid::bigint FROM pg_database WHERE datname = %s", [member.name]
        )
        drain = Call(member, "SELECT sluice.drain('1 s')")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.drain_waiter")
        first = Call(member, drop)
        assert drain.value() == "draining"
        inside.open()
        with contextlib.suppress(psycopg.errors.DeadlockDetected):
            first.value()
        cluster.wait_for(dropped)
        top.open()
    cluster.wait_for(
        f"SELECT count(*) = 0 FROM _sluice.queue WHERE db_oid = {db_oid} AND state = 'running'",
    )
    count = len(history(other, "each_second"))
    other.wait_for(f"SELECT count(*) > {count} FROM sluice.history")
    assert other.execute("SELECT sluice.drain(cluster => true)") == [("drained",)]
    other.execute("SELECT sluice.resume(cluster => true)")
    member.execute("CREATE EXTENSION pg_sluice CASCADE")
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]
    member.execute("SELECT sluice.resume()")
    assert leader.alive


# Claims


def test_claims_racing_a_drain(member: Database, leader: Leader) -> None:
    """No run starts after drain() has answered, however busy the workers are."""
    member.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
    names = [f"job_{n}" for n in range(12)]
    for name in names:
        member.execute("SELECT sluice.schedule(%s, '1s', 'SELECT 1')", [name])
    member.execute("UPDATE _sluice.node SET next_fire_at = clock_timestamp()")
    for _ in range(4):
        answer, answered_at = member.execute(
            "SELECT d, clock_timestamp() FROM sluice.drain() AS d"
        )[0]
        assert answer == "drained"
        member.execute("UPDATE _sluice.node SET next_fire_at = clock_timestamp()")
        ticks_pass(member, 1)
        late = member.execute(
            "SELECT name, started_at FROM sluice.history WHERE started_at > %s OR ended_at > %s",
            [answered_at, answered_at],
        )
        assert late == []
        member.execute("SELECT sluice.resume()")
        member.wait_for(
            f"SELECT count(*) > 0 FROM sluice.history WHERE started_at > '{answered_at}'"
        )


@pytest.mark.parametrize("call", ["drain()", "pause(ARRAY['job'])"])
def test_claim_under_way_is_waited_for(cluster: Cluster, member: Database, call: str) -> None:
    """1. A worker's claim has not committed. 2. A drain is requested. 3. The claim commits: its
    run is seen, and the drain waits for it.
    """
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
    member.execute("SELECT sluice.run_now('job')")
    with cluster.connect() as worker:
        (epoch,) = worker.execute(
            "SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 60)"
        ).fetchone() or (None,)
        claim = "SELECT run_id FROM _sluice.next_run(%s, %s, %s, NULL)"
        db_oid = cluster.execute("SELECT db_oid FROM _sluice.queue")[0][0]
        with worker.transaction():
            (run_id,) = worker.execute(claim, [epoch, None, db_oid]).fetchone() or (None,)
            assert run_id is not None
            stop = Call(member, f"SELECT sluice.{call}")
            cluster.wait_for(
                lambda: (
                    not stop.waits
                    or cluster.execute(
                        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                        " AND application_name = 'pg_sluice control'"
                    )
                    == [(1,)]
                )
            )
            assert stop.waits
        assert cluster.execute("SELECT state FROM _sluice.queue") == [("running",)]
        assert stop.waits
        worker.execute(claim, [epoch, run_id, None])
        assert stop.value() in ("drained", "paused")
