"""Drain and pause: what they promise when they return, and what their failed calls leave behind."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader


class Call:
    """A statement that runs on a connection of its own."""

    def __init__(self, database: Database, statement: str) -> None:
        self.connection = database.connect()
        self.pid = self.connection.info.backend_pid
        self._database = database
        self._value: Any = None
        self._error: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run, args=[statement], daemon=True)
        self._thread.start()

    def _run(self, statement: str) -> None:
        try:
            with self.connection:
                row = self.connection.execute(statement).fetchone()
            self._value = row and row[0]
        except psycopg.Error as error:
            self._error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def value(self, timeout: float = 10) -> Any:
        """What the statement gave; its error is raised."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"no answer within {timeout} s"
        if self._error is not None:
            raise self._error
        return self._value


class Gate:
    """A job that runs until it is let through: it waits for a lock that the test holds."""

    def __init__(self, database: Database, name: str = "gate") -> None:
        self.name = name
        self._database = database
        database.execute("CREATE TABLE IF NOT EXISTS door (name text PRIMARY KEY)")
        database.execute("INSERT INTO door VALUES (%s)", [name])
        database.execute(
            "SELECT sluice.schedule(%s, 'manual', %s, lock_timeout => '5 min')",
            [name, f"UPDATE door SET name = name WHERE name = '{name}'"],
        )
        self._holder = database.connect(autocommit=False)

    def enter(self) -> None:
        """Start the job; returns once it runs."""
        self._holder.execute("SELECT FROM door WHERE name = %s FOR UPDATE", [self.name])
        self._database.execute("SELECT sluice.run_now(%s)", [self.name])
        self._database.wait_for(
            f"SELECT true FROM sluice.queue() WHERE name = '{self.name}' AND state = 'running'"
        )

    def open(self) -> None:
        self._holder.rollback()

    def close(self) -> None:
        self._holder.close()


@contextmanager
def a_run_in_progress(database: Database, name: str = "gate") -> Iterator[Gate]:
    gate = Gate(database, name)
    gate.enter()
    try:
        yield gate
    finally:
        gate.close()


def history(database: Database, name: str) -> list[Any]:
    return database.execute(
        "SELECT outcome, started_at FROM sluice.history WHERE name = %s ORDER BY started_at", [name]
    )


def ticks_pass(database: Database, count: int = 1) -> None:
    """Wait until the database was ticked that many times from now on."""
    for _ in range(count):
        database.wait_for(
            "SELECT d.last_tick_at > now() FROM sluice.databases() AS d"
            " WHERE d.database = current_database()".replace(
                "now()", f"'{database.execute('SELECT clock_timestamp()')[0][0]}'"
            )
        )


# Drain


def test_drain_waits_for_a_run_in_progress(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member) as gate:
        drain = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]
        assert member.execute(
            "SELECT scope, state, requested_by, drained_at, active, waiting_for"
            " FROM sluice.drain_status()"
        ) == [("database", "draining", "postgres", None, 1, 'run of "gate"')]
        assert drain.waits
        gate.open()
        assert drain.value() == "drained"
    assert [outcome for outcome, _ in history(member, "gate")] == ["succeeded"]
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]
    assert member.execute("SELECT state, active FROM sluice.drain_status()") == [("drained", 0)]


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
    member.wait_for("SELECT count(*) > 0 FROM sluice.history WHERE name = 'by_hand'", timeout=2)
    assert history(member, "by_hand")[0][1] >= resumed_at
    assert member.execute("SELECT sluice.is_drained()") == [(None,)]


def test_drain_holds_across_a_change_of_leader(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
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
    member.wait_for(f"SELECT count(*) > {before[0][0]} FROM sluice.history", timeout=3)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_drain_holds_across_a_restart_of_the_server(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], mode: str
) -> None:
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")
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


def test_cancelled_drain_withdraws_its_request(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        drain = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        member.execute("SELECT pg_cancel_backend(%s)", [drain.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            drain.value()
        assert member.execute("SELECT sluice.is_drained()") == [(None,)]


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
        member.wait_for("SELECT sluice.is_drained() IS NULL", timeout=5)


def test_drain_whose_client_vanishes_is_withdrawn(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        connection = member.connect()
        connection.pgconn.send_query(b"SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        connection.pgconn.finish()
        member.wait_for("SELECT sluice.is_drained() IS NULL", timeout=10)


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


def test_resume_ends_a_wait(member: Database, leader: Leader) -> None:
    """Whoever resumes while another waits for the drain ends that drain; the wait tells so."""
    with a_run_in_progress(member):
        drain = Call(member, "SELECT sluice.drain('5 min')")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        member.execute("SELECT sluice.resume()")
        assert member.execute("SELECT sluice.is_drained()") == [(None,)]
        with pytest.raises(psycopg.Error) as caught:
            drain.value(5)
        assert caught.value.sqlstate == "55000"


def test_drain_takes_effect_though_its_transaction_rolls_back(
    member: Database, leader: Leader
) -> None:
    with member.connect(autocommit=False) as connection:
        assert connection.execute("SELECT sluice.drain()").fetchone() == ("drained",)
        assert member.execute("SELECT sluice.is_drained()") == [(True,)]
        connection.rollback()
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]


def test_drain_of_one_database_leaves_the_other_alone(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    with cluster.database() as other:
        other.execute("SELECT sluice.start()")
        for database in (member, other):
            database.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
        assert member.execute("SELECT sluice.drain()") == [("drained",)]
        other.wait_for("SELECT count(*) > 1 FROM sluice.history")
        assert other.execute("SELECT sluice.is_drained()") == [(None,)]
        assert cluster.execute("SELECT sluice.is_drained(cluster => true)") == [(None,)]
        other.execute("SELECT sluice.stop()")


def test_drain_of_the_server_stops_all_databases(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    with cluster.database() as other:
        other.execute("SELECT sluice.start()")
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
        other.wait_for(f"SELECT count(*) > {before[0][0]} FROM sluice.history", timeout=3)
        other.execute("SELECT sluice.stop()")


def test_drain_without_a_leader(member: Database) -> None:
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    assert member.execute("SELECT sluice.is_drained()") == [(True,)]


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


# A manual refresh


def test_manual_refresh_is_refused_while_drained(member: Database) -> None:
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    member.execute("SELECT sluice.drain()")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        member.execute("SELECT sluice.refresh_stream_table('st')")
    assert "st" in str(refused.value)
    assert refused.value.diag.message_hint is not None
    assert member.execute("SELECT sluice.refresh_stream_table('st', force => true)") == [
        ("no_change",)
    ]
    member.execute("SELECT sluice.resume()")
    assert member.execute("SELECT sluice.refresh_stream_table('st')") == [("no_change",)]


def test_drain_waits_for_a_manual_refresh(member: Database) -> None:
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    with member.connect(autocommit=False) as connection:
        connection.execute("SELECT sluice.refresh_stream_table('st')")
        drain = Call(member, "SELECT sluice.drain()")
        member.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        assert member.execute("SELECT sluice.is_drained()") == [(False,)]
        assert (
            "manual refresh"
            in member.execute("SELECT waiting_for FROM sluice.drain_status()")[0][0]
        )
        connection.commit()
        assert drain.value() == "drained"


# Pause


def test_pause_waits_for_the_nodes_run_only(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member, "one") as one, a_run_in_progress(member, "two") as two:
        pause = Call(member, "SELECT sluice.pause(ARRAY['one'])")
        member.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"
        )
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
    member.wait_for(f"SELECT count(*) > {before} FROM sluice.history WHERE name = 'one'", timeout=3)


def test_timed_out_pause_stays(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member) as gate:
        assert member.execute("SELECT sluice.pause(ARRAY['gate'], '50 ms')") == [("pausing",)]
        gate.open()
        member.wait_for("SELECT sluice.pause(ARRAY['gate'], '0 s') = 'paused'")
    member.execute("SELECT sluice.run_now('gate')")
    ticks_pass(member)
    assert len(history(member, "gate")) == 1


def test_cancelled_pause_withdraws_what_it_added(member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        member.execute("SELECT sluice.schedule('other', 'manual', 'SELECT 1')")
        member.execute("SELECT sluice.pause(ARRAY['other'])")
        pause = Call(member, "SELECT sluice.pause(ARRAY['gate', 'other'])")
        member.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"
        )
        member.execute("SELECT pg_cancel_backend(%s)", [pause.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            pause.value()
        # What was paused before it remains.
        assert member.execute("SELECT sluice.unpause(ARRAY['gate', 'other'])") == [(1,)]


def test_killed_pause_is_withdrawn(cluster: Cluster, member: Database, leader: Leader) -> None:
    with a_run_in_progress(member):
        pause = Call(member, "SELECT sluice.pause(ARRAY['gate'])")
        cluster.wait_for("SELECT count(*) = 1 FROM _sluice.pause")
        member.execute("SELECT pg_terminate_backend(%s)", [pause.pid])
        with pytest.raises(psycopg.OperationalError):
            pause.value()
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.pause", timeout=5)


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
    member.execute("SELECT sluice.run_now('up')")
    before = len(history(member, "down"))
    member.wait_for(
        f"SELECT count(*) > {before + 1} FROM sluice.history WHERE name IN ('down', 'public.down')"
    )
