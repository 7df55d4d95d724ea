"""Calls that wait end when they are cancelled, killed or cut off, and leave nothing requested."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import psycopg
import pytest
from psycopg import pq

from calls import Call
from cluster import Cluster, Database, Leader
from runs import configure

CALLS = [
    "sluice.drain()",
    "sluice.pause('{{st{0}}}')",
    "sluice.refresh_stream_table('st{0}')",
]
"""All calls that wait, each for a stream table of that number."""
ENDS = {
    "pg_cancel_backend": (psycopg.errors.QueryCanceled, "57014"),
    "pg_terminate_backend": (psycopg.OperationalError, "57P01"),
}
LIMIT = 5
"""Seconds in which a call that is ended has to end: far less than its patience, which is 10 s."""


@pytest.fixture
def scheduled(member: Database) -> Database:
    """A member with stream tables st0, st1, st2."""
    member.execute(
        "SELECT sluice.create_stream_table('st' || n, 'SELECT 1', 'manual', lock_timeout => '60 s')"
        " FROM generate_series(0, 2) AS n"
    )
    return member


Connection = psycopg.Connection[Any]


def start(database: Database, number: int = 0) -> list[Call]:
    return [Call(database, f"SELECT {call.format(number)}") for call in CALLS]


def end(observer: Connection, calls: list[Call], how: str) -> None:
    kind, sqlstate = ENDS[how]
    for call in calls:
        observer.execute(f"SELECT {how}(%s)", [call.pid])
    for call in calls:
        with pytest.raises(kind) as ended:
            call.value(LIMIT)
        assert ended.value.sqlstate in (sqlstate, None)


def nothing_is_requested(cluster: Cluster) -> None:
    """Nor will it be: no call is left that could."""
    cluster.wait_for(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"
    )
    assert cluster.execute(
        "SELECT (SELECT count(*) FROM _sluice.drain_in_force),"
        " (SELECT count(*) FROM _sluice.pause_in_force)"
    ) == [(0, 0)]


@contextmanager
def closed_gate(cluster: Cluster) -> Iterator[bool]:
    """Somebody holds what all calls need in the control database."""
    with cluster.connect(autocommit=False) as holder:
        holder.execute("SELECT _sluice.close_gate()")
        holder.execute("LOCK TABLE _sluice.drain")
        yield True


@pytest.mark.parametrize("how", ENDS)
def test_end_of_calls_that_wait_for_a_run(cluster: Cluster, scheduled: Database, how: str) -> None:
    """Also while they can't take anything back, since the gate is closed."""
    with (
        cluster.connect() as observer,
        scheduled.connect(autocommit=False) as refresher,
    ):
        refresher.execute("SELECT sluice.refresh_stream_table('st0')")
        for gate in (nullcontext(), closed_gate(cluster)):
            # The refresh first: while a drain is in force it would be refused.
            calls = []
            for call in reversed(CALLS):
                calls.append(Call(scheduled, f"SELECT {call.format(0)}"))
                cluster.wait_for(
                    "SELECT (SELECT count(*) FROM _sluice.drain_in_force)"
                    " + (SELECT count(*) FROM _sluice.pause_in_force)"
                    f" + (SELECT count(*) FROM pg_locks WHERE NOT granted) = {len(calls)}"
                )
            with gate as closed:
                end(observer, calls, how)
                if how == "pg_cancel_backend" and not closed:
                    assert (
                        observer.execute(
                            "SELECT FROM _sluice.drain UNION ALL SELECT FROM _sluice.pause"
                        ).fetchall()
                        == []
                    )
            nothing_is_requested(cluster)
        refresher.commit()
    assert scheduled.execute("SELECT sluice.refresh_stream_table('st0')") == [("no_change",)]


def test_loss_of_the_control_connection_leaves_nothing_requested(
    cluster: Cluster, scheduled: Database
) -> None:
    """The call fails; its session lives on, and does not count as waiting."""
    with (
        scheduled.connect(autocommit=False) as refresher,
        scheduled.connect() as first,
        scheduled.connect() as second,
    ):
        refresher.execute("SELECT sluice.refresh_stream_table('st0')")
        for session, stop in ((first, CALLS[0]), (second, CALLS[1])):
            session.pgconn.send_query(f"SELECT {stop.format(0)}".encode())
        cluster.wait_for(
            "SELECT (SELECT count(*) FROM _sluice.drain_waiter) = 1"
            " AND (SELECT count(*) FROM _sluice.pause_waiter) = 1"
        )
        cluster.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'pg_sluice control'"
        )
        for session in (first, second):
            result = session.pgconn.get_result()
            assert result is not None
            assert result.error_field(pq.DiagnosticField.SQLSTATE) in (b"57P01", b"08006")
            while session.pgconn.get_result() is not None:
                pass
        nothing_is_requested(cluster)
        assert first.execute("SELECT sluice.is_drained()").fetchone() == (None,)


@pytest.mark.timeout(90)
def test_calls_that_cannot_get_their_lock(cluster: Cluster, scheduled: Database) -> None:
    """Those that are ended end at once, the others by themselves when their patience is over; none
    has asked for anything when the lock is free again."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name = 'pg_sluice control' AND query LIKE 'SELECT _sluice.%'"
    )
    with cluster.connect() as observer, closed_gate(cluster):
        for number, how in enumerate(ENDS):
            calls = start(scheduled, number)
            cluster.wait_for(lambda: cluster.execute(waiting) == [(len(CALLS),)])
            end(observer, calls, how)
            cluster.wait_for(lambda: cluster.execute(waiting) == [(0,)])
        for call in start(scheduled, len(ENDS)):
            with pytest.raises(psycopg.errors.LockNotAvailable) as busy:
                call.value(40)
            assert busy.value.diag.message_primary == (
                'could not obtain a lock in the control database "postgres"'
            )
            assert busy.value.diag.message_hint == "pg_locks in that database shows who holds it."
    nothing_is_requested(cluster)


def test_calls_whose_control_connection_is_slow_to_start(
    cluster: Cluster, scheduled: Database
) -> None:
    """They end while it still starts, and it asks for nothing when it has started."""
    with cluster.connect() as observer:
        sessions = {how: [scheduled.connect() for _ in CALLS] for how in ENDS}
        # What takes them time is done: they will connect at the same time.
        for session in chain(*sessions.values()):
            session.execute("SELECT sluice.is_drained()")

        def starting() -> int:
            (count,) = observer.execute(
                "SELECT count(*) FROM pg_locks AS l WHERE l.locktype = 'virtualxid'"
                " AND NOT EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = l.pid)"
            ).fetchone() or (0,)
            return int(count)

        cluster.configure({"post_auth_delay": 5})
        cluster.reload()
        try:
            doomed = {
                how: [
                    Call(scheduled, f"SELECT {call.format(number)}", session)
                    for call, session in zip(CALLS, sessions[how], strict=True)
                ]
                for number, how in enumerate(ENDS)
            }
            cluster.wait_for(lambda: starting() == len(ENDS) * len(CALLS))
            for how, calls in doomed.items():
                end(observer, calls, how)
            assert starting() > 0
        finally:
            cluster.configure({"post_auth_delay": 0})
            cluster.reload()
        cluster.wait_for(lambda: starting() == 0)
    nothing_is_requested(cluster)


# A standby that is gone, and that all commits wait for


@contextmanager
def hanging_standby(cluster: Cluster) -> Iterator[None]:
    """A commit that need not be lost in a crash does not return."""

    def set_names(names: str) -> None:
        cluster.configure({"synchronous_standby_names": names})
        cluster.reload()

    hangs = "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid = {}"
    with cluster.connect() as probe:
        probe.execute("CREATE TABLE probe (x int)")
        set_names("gone")
        try:
            # It begins with the next commit after the checkpointer has read the settings.
            def begins() -> bool:
                if not probe.pgconn.is_busy():
                    while probe.pgconn.get_result():
                        pass
                    probe.pgconn.send_query(b"INSERT INTO probe VALUES (1)")
                probe.pgconn.consume_input()
                found = cluster.execute(hangs.format(probe.info.backend_pid))
                return bool(found == [(True,)])

            cluster.wait_for(begins)
            yield
        finally:
            set_names("")
            while probe.pgconn.get_result():
                pass
            probe.execute("DROP TABLE probe")


HANGING = {
    "sluice.drain()": "SELECT stays = false AND drained_at IS NOT NULL FROM _sluice.drain",
    "sluice.resume()": "SELECT count(*) = 0 FROM _sluice.drain",
    "sluice.drain(wait => false)": "SELECT stays FROM _sluice.drain",
    "sluice.is_drained()": "SELECT drained_at IS NOT NULL FROM _sluice.drain",
    "sluice.pause('{st0}')": "SELECT stays FROM _sluice.pause",
    "sluice.unpause('{st0}')": "SELECT count(*) = 0 FROM _sluice.pause",
    "sluice.configure('max_workers', '3', cluster => true)": (
        "SELECT value = '3' FROM _sluice.setting WHERE name = 'max_workers'"
    ),
    "sluice.run_now('st0')": "SELECT count(*) = 1 FROM _sluice.queue",
    "sluice.stop()": "SELECT count(*) = 0 FROM _sluice.member",
    "sluice.start()": "SELECT count(*) = 1 FROM _sluice.member",
}
"""All calls that change something in the control database, and what shows that they have."""


@pytest.mark.parametrize("how", [*ENDS, "statement_timeout"])
def test_end_of_calls_whose_commit_hangs(cluster: Cluster, scheduled: Database, how: str) -> None:
    """It ends at once, and so does its session in the control database, which holds locks. As in
    PostgreSQL itself, what it had committed is in force.
    """
    with cluster.connect() as observer, hanging_standby(cluster):
        for call, shows in HANGING.items():
            session = scheduled.connect()
            # So that it has the driver.
            session.execute("SELECT sluice.queue()")
            if how == "statement_timeout":
                session.execute("SET statement_timeout = '1 s'")
            hanging = Call(scheduled, f"SELECT {call}", session)
            cluster.wait_for(
                "SELECT count(*) = 1 FROM pg_stat_activity"
                " WHERE application_name = 'pg_sluice control' AND wait_event = 'SyncRep'"
            )
            assert hanging.waits
            if how == "statement_timeout":
                with pytest.raises(psycopg.errors.QueryCanceled) as timed_out:
                    hanging.value(LIMIT)
                assert timed_out.value.diag.message_primary == (
                    "canceling statement due to statement timeout"
                )
            else:
                end(observer, [hanging], how)
            cluster.wait_for(
                "SELECT count(*) = 0 FROM pg_stat_activity"
                " WHERE application_name = 'pg_sluice control'"
            )
            assert cluster.execute(shows) == [(True,)], call


@pytest.mark.timeout(120)
def test_others_go_on_while_commits_hang(
    cluster: Cluster, scheduled: Database, other: Database, lead: Callable[..., Leader]
) -> None:
    """A call that waits for the standby holds nothing that they need: not another member's runs,
    nor the leader, nor the same call once more.
    """
    for database in (scheduled, other):
        cluster.execute(f"ALTER DATABASE {database.name} SET synchronous_commit = local")
        database.let_go()
    configure(other, lease_ttl="2 s")
    other.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    leader = lead()
    hanging = (
        "SELECT count(*) = {} FROM pg_stat_activity"
        " WHERE application_name = 'pg_sluice control' AND wait_event = 'SyncRep'"
    )
    with cluster.connect() as observer, hanging_standby(cluster):
        for call in HANGING:
            calls = [Call(scheduled, f"SELECT {call}")]
            cluster.wait_for(hanging.format(1))
            ((since,),) = other.execute("SELECT clock_timestamp()")
            if call.startswith(("sluice.drain(", "sluice.pause(")):
                calls.append(Call(scheduled, f"SELECT {call}"))
                cluster.wait_for(hanging.format(2))
            other.wait_for(f"SELECT max(started_at) > '{since}' FROM sluice.history")
            assert all(call.waits for call in calls)
            end(observer, calls, "pg_cancel_backend")
        assert leader.leads


@pytest.mark.parametrize("how", ENDS)
def test_end_of_a_wait_while_commits_hang(cluster: Cluster, scheduled: Database, how: str) -> None:
    """To take a request back needs no standby."""
    with (
        cluster.connect() as observer,
        scheduled.connect(autocommit=False) as refresher,
        hanging_standby(cluster),
    ):
        refresher.execute("SELECT sluice.refresh_stream_table('st0')")
        calls = [Call(scheduled, f"SELECT {call.format(0)}") for call in CALLS[:2]]
        cluster.wait_for(
            "SELECT (SELECT count(*) FROM _sluice.drain_in_force)"
            " + (SELECT count(*) FROM _sluice.pause_in_force) = 2"
        )
        end(observer, calls, how)
        nothing_is_requested(cluster)
        refresher.rollback()


def test_end_of_preflight_whose_connection_hangs(own_cluster: Callable[..., Cluster]) -> None:
    """Where cron.host leads to something that accepts and says nothing."""
    cluster = own_cluster(fsync=False, settings={"cron.host": "127.0.0.1"})
    calls = ("SELECT sluice.start()", "SELECT * FROM sluice.preflight()")
    with (
        socket.create_server(("127.0.0.1", cluster.port)) as silent,
        cluster.connect() as observer,
        cluster.database() as database,
    ):
        silent.settimeout(20)
        for how in ENDS:
            for statement in calls:
                with database.connect() as session:
                    session.execute("SELECT sluice.queue()")
                    call = Call(database, statement, session)
                    # pg_cron itself has no job yet.
                    with silent.accept()[0]:
                        observer.execute(f"SELECT {how}(%s)", [call.pid])
                        with pytest.raises(ENDS[how][0]):
                            # Not the five seconds that the connection may take.
                            call.value(4)


# The first call of a session


def test_cancel_while_the_package_is_looked_for(cluster: Cluster, member: Database) -> None:
    """It is told as any other: no prefix, no traceback."""
    member.execute(
        """
        CREATE OR REPLACE FUNCTION _sluice.package_directory() RETURNS text
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        AS $$ BEGIN PERFORM pg_sleep(60); END $$
        """
    )
    for statement in (
        "SELECT sluice.drain()",
        "SELECT * FROM sluice.preflight()",
        "SELECT sluice.schedule('job', '1h', 'SELECT 1')",
        "CALL sluice.run()",
        "CALL sluice.serve_metrics()",
    ):
        call = Call(member, statement)
        cluster.wait_for(
            f"SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = {call.pid}"
        )
        cluster.execute("SELECT pg_cancel_backend(%s)", [call.pid])
        with pytest.raises(psycopg.errors.QueryCanceled) as cancelled:
            call.value(LIMIT)
        told = cancelled.value.diag
        assert told.message_primary == "canceling statement due to user request"
        assert "Traceback" not in (told.context or "")


@pytest.mark.parametrize("call", ["sluice.drain('0 s')", "sluice.preflight()"])
def test_cancel_of_the_first_call_of_a_session(
    cluster: Cluster, member: Database, call: str
) -> None:
    """Which imports what it needs to connect, and runs a program of the system for that."""
    with cluster.connect() as observer:
        for moment in range(15):
            with member.connect() as session:
                session.pgconn.send_query(f"SELECT {call}".encode())
                observer.execute("SELECT pg_sleep(%s)", [moment / 100])
                while session.pgconn.is_busy():
                    observer.execute("SELECT pg_cancel_backend(%s)", [session.info.backend_pid])
                    session.pgconn.consume_input()
                result = session.pgconn.get_result()
                assert result is not None
                assert result.error_field(pq.DiagnosticField.SQLSTATE) in (b"57014", None)
                while session.pgconn.get_result():
                    pass


def test_cancel_that_a_notice_finds(member: Database) -> None:
    """It is no error of a statement, and still tells what happened."""
    member.execute(
        """
        DO LANGUAGE plpython3u $$
        plpy.execute("SELECT _sluice.load_package()")
        import json, os, signal
        from pg_sluice.backend import entry

        def cancelled(plpy, arguments):
            os.kill(os.getpid(), signal.SIGINT)
            plpy.notice("waiting")

        record = json.loads(entry.invoke(plpy, {"cancelled": cancelled}, "cancelled", "{}"))
        assert record["error"]["sqlstate"] == "57014", record
        $$
        """
    )


def test_terminate_before_a_statement(cluster: Cluster, member: Database) -> None:
    """One that the server has taken note of already: what would outlive the call is not sent."""
    call = Call(
        member,
        """
        DO LANGUAGE plpython3u $$
        plpy.execute("SELECT _sluice.load_package()")
        import os, signal
        from pg_sluice.backend import control

        with control.connected(plpy) as there:
            os.kill(os.getpid(), signal.SIGTERM)
            there.session.execute("SELECT pg_sleep(60)")
        $$
        """,
    )
    with pytest.raises(psycopg.OperationalError):
        call.value(LIMIT)
    cluster.wait_for(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"
    )
