"""Pause: what it promises when it returns, and what its failed calls leave behind."""

import psycopg
import pytest

from calls import Call, a_run_in_progress, history, ticks_pass
from cluster import Cluster, Database, Leader
from runs import configure_database


def test_pause_waits_for_the_nodes_run_only(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    with a_run_in_progress(member, "one") as one, a_run_in_progress(member, "two") as two:
        pause = Call(member, "SELECT sluice.pause(ARRAY['one'])")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.pause_waiter")
        assert pause.waits
        one.open()
        assert pause.value() == "paused"
        two.open()
    member.execute("SELECT sluice.schedule('one', '1s', 'SELECT 1')")
    member.execute("SELECT sluice.schedule('two', '1s', 'SELECT 1')")
    before = len(history(member, "one"))
    member.wait_for("SELECT count(*) > 2 FROM sluice.history WHERE name = 'two'")
    assert len(history(member, "one")) == before
    assert member.execute("SELECT sluice.unpause(ARRAY['one', 'two'])") == [(1,)]
    member.wait_for(f"SELECT count(*) > {before} FROM sluice.history WHERE name = 'one'")


def test_timed_out_pause_stays(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member) as gate:
        assert member.execute("SELECT sluice.pause(ARRAY['gate'], '50 ms')") == [("pausing",)]
        gate.open()
        member.wait_for("SELECT sluice.pause(ARRAY['gate'], '0 s') = 'paused'")
    member.execute("SELECT sluice.run_now('gate')")
    ticks_pass(member)
    assert len(history(member, "gate")) == 1


def test_pause_without_waiting_stays(cluster: Cluster, member: Database, leader: Leader) -> None:
    """Also when a call that joined it is cancelled; a run that is asked for waits for its end."""
    with a_run_in_progress(member) as gate:
        assert member.execute("SELECT sluice.pause(ARRAY['gate'], wait => false)") == [("pausing",)]
        joined = Call(member, "SELECT sluice.pause(ARRAY['gate'])")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.pause_waiter")
        member.execute("SELECT pg_cancel_backend(%s)", [joined.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            joined.value()
        gate.open()
        member.wait_for("SELECT count(*) = 1 FROM sluice.history")
    member.wait_for("SELECT sluice.run_now('gate') IS NOT NULL")
    ticks_pass(member)
    assert member.execute("SELECT name, state FROM sluice.queue()") == [("gate", "queued")]
    assert member.execute("SELECT sluice.unpause(ARRAY['gate'])") == [(1,)]
    member.wait_for("SELECT count(*) = 2 FROM sluice.history")


def test_cancelled_pause_withdraws_what_it_added(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    with a_run_in_progress(member):
        member.execute("SELECT sluice.schedule('other', 'manual', 'SELECT 1')")
        member.execute("SELECT sluice.pause(ARRAY['other'])")
        pause = Call(member, "SELECT sluice.pause(ARRAY['gate', 'other'])")
        cluster.wait_for("SELECT count(*) = 2 FROM _sluice.pause_waiter")
        member.execute("SELECT pg_cancel_backend(%s)", [pause.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            pause.value()
        # What was paused before it remains.
        assert member.execute("SELECT sluice.unpause(ARRAY['gate', 'other'])") == [(1,)]


def test_joined_pause_goes_with_its_last_caller(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    def cancel(call: Call) -> None:
        member.execute("SELECT pg_cancel_backend(%s)", [call.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            call.value()

    def two() -> tuple[Call, Call]:
        calls = tuple(Call(member, "SELECT sluice.pause(ARRAY['gate'])") for _ in range(2))
        cluster.wait_for("SELECT count(*) = 2 FROM _sluice.pause_waiter")
        return calls[0], calls[1]

    with a_run_in_progress(member) as gate:
        first, second = two()
        cancel(first)
        assert cluster.execute("SELECT count(*) FROM _sluice.pause") == [(1,)]
        cancel(second)
        assert cluster.execute("SELECT count(*) FROM _sluice.pause") == [(0,)]
        first, second = two()
        cancel(second)
        assert first.waits
        gate.open()
        assert first.value() == "paused"
    assert member.execute("SELECT sluice.unpause(ARRAY['gate'])") == [(1,)]


def test_unpause_of_one_node_ends_a_wait_for_it(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    """Nothing stays of what that call paused, since it can't give the answer any more."""
    member.execute("SELECT sluice.schedule('other', 'manual', 'SELECT 1')")
    with a_run_in_progress(member):
        pause = Call(member, "SELECT sluice.pause(ARRAY['gate', 'other'], '5 min')")
        cluster.wait_for("SELECT count(*) = 2 FROM _sluice.pause_waiter")
        assert member.execute("SELECT sluice.unpause(ARRAY['gate'])") == [(1,)]
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as ended:
            pause.value()
        assert ended.value.diag.message_primary == (
            "the pause was ended by sluice.unpause() before it was reached"
        )
        assert member.execute("SELECT sluice.unpause(ARRAY['other'])") == [(0,)]


def test_pause_in_a_transaction_sees_the_present_and_outlives_it(
    member: Database, leader: Leader
) -> None:
    pause = "SELECT sluice.pause(ARRAY['gate'], %s)"
    with a_run_in_progress(member) as gate:
        for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"):
            with member.connect(autocommit=False) as connection:
                connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                assert connection.execute(pause, ["0 s"]).fetchone() == ("pausing",)
                gate.open()
                assert connection.execute(pause, ["1 min"]).fetchone() == ("paused",)
                connection.rollback()
            assert member.execute("SELECT sluice.unpause(ARRAY['gate'])") == [(1,)]
            gate.enter()


def test_pending_retry_of_a_paused_node_waits(member: Database, leader: Leader) -> None:
    configure_database(member, max_consecutive_errors="100", retry_backoff_cap="100 ms")
    member.execute(
        "SELECT sluice.schedule('job', 'manual',"
        " $$DO 'BEGIN RAISE EXCEPTION USING ERRCODE = ''40001''; END'$$)"
    )
    member.execute("SELECT sluice.run_now('job')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    assert member.execute("SELECT sluice.pause(ARRAY['job'])") == [("paused",)]
    failures = len(history(member, "job"))
    member.wait_for("SELECT count(*) = 1 FROM sluice.queue() WHERE state = 'queued'")
    ticks_pass(member)
    assert len(history(member, "job")) == failures
    member.execute("SELECT sluice.unpause(ARRAY['job'])")
    member.wait_for(f"SELECT count(*) = 1 FROM sluice.history WHERE attempt = {failures + 1}")


def test_killed_pause_is_withdrawn(cluster: Cluster, member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        pause = Call(member, "SELECT sluice.pause(ARRAY['gate'])")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.pause")
        member.execute("SELECT pg_terminate_backend(%s)", [pause.pid])
        with pytest.raises(psycopg.OperationalError):
            pause.value()
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.pause")


def test_pause_whose_client_vanishes_is_withdrawn(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    """Also one that wants no notices, by which the server notices."""
    with a_run_in_progress(member):
        connection = member.connect(options="-c client_min_messages=error")
        connection.pgconn.send_query(b"SELECT sluice.pause(ARRAY['gate'])")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.pause")
        connection.pgconn.finish()
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.pause")


def test_pause_is_all_or_none(cluster: Cluster, member: Database) -> None:
    member.execute("SELECT sluice.schedule('one', 'manual', 'SELECT 1')")
    member.execute("SELECT sluice.schedule('two', 'manual', 'SELECT 1')")
    with pytest.raises(psycopg.errors.UndefinedObject):
        member.execute("SELECT sluice.pause(ARRAY['one', 'nobody'])")
    assert cluster.execute("SELECT count(*) FROM _sluice.pause") == [(0,)]
    cluster.execute("SELECT sluice.configure('max_pause_entries', '1', cluster => true)")
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        member.execute("SELECT sluice.pause(ARRAY['one', 'two'])")
    assert cluster.execute("SELECT count(*) FROM _sluice.pause") == [(0,)]


def test_paused_upstream_does_not_block_its_downstream(member: Database, leader: Leader) -> None:
    member.execute("CREATE TABLE base AS SELECT 1 AS x")
    member.execute("SELECT sluice.create_stream_table('up', 'SELECT x FROM base', 'manual')")
    member.execute("SELECT sluice.create_stream_table('down', 'SELECT x FROM up', '1s')")
    assert member.execute("SELECT sluice.pause(ARRAY['up'])") == [("paused",)]
    assert member.execute(
        "SELECT status, detail FROM sluice.health_check() WHERE \"check\" = 'pauses'"
    ) == [("warn", 'paused: "public.up"; stale for that: "public.down"')]
    member.execute("SELECT sluice.run_now('up')")
    before = len(history(member, "down"))
    member.wait_for(
        f"SELECT count(*) > {before + 1} FROM sluice.history WHERE name IN ('down', 'public.down')"
    )
