"""A refresh by hand, beside a drain and beside the scheduler's runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from calls import Call, history, ticks_pass
from cluster import Database, Leader


@pytest.fixture
def held(member: Database) -> Database:
    """A member with the stream table st, whose refresh goes on for as long as somebody holds it."""
    member.execute(
        "CREATE FUNCTION held() RETURNS integer LANGUAGE plpgsql STABLE AS $$"
        "BEGIN"
        "    WHILE NOT pg_catalog.pg_try_advisory_xact_lock_shared(1) LOOP"
        "        PERFORM pg_catalog.pg_sleep(0.02);"
        "    END LOOP;"
        "    RETURN 1;"
        "END$$"
    )
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT held() AS x', 'manual')")
    return member


@contextmanager
def a_refresh_in_progress(held: Database) -> Iterator[psycopg.Connection[None]]:
    """The scheduler refreshes st; a commit on the connection lets it end."""
    with held.connect(autocommit=False) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(1)")
        held.execute("SELECT sluice.run_now('st')")
        held.wait_for("SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
        yield holder


def advance(database: Database) -> None:
    """Move st on as a tick does, which must not wait for a lock."""
    with database.connect() as connection:
        connection.execute("SET lock_timeout = '1s'")
        connection.execute(
            "UPDATE _sluice.node SET next_fire_at = '2024-01-01' WHERE relid = 'st'::regclass"
        )
        connection.execute(
            "SELECT _sluice.advance(jsonb_build_array(jsonb_build_object('pgt_id', n.pgt_id,"
            " 'due_at', n.due_at, 'next_fire_at', '2024-01-02'::timestamptz)))"
            " FROM _sluice.node AS n WHERE n.relid = 'st'::regclass"
        )
        assert connection.execute(
            "SELECT next_fire_at = '2024-01-02' FROM sluice.nodes WHERE name = 'public.st'"
        ).fetchone() == (True,)


WAITS = "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
REFRESH = "SELECT sluice.refresh_stream_table('st')"


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


def test_wait_for_a_run_is_bounded_by_the_shortest_lock_timeout(
    held: Database, leader: Leader
) -> None:
    """The node's, the setting or the caller's own, which is as it was afterwards."""
    held.execute("SELECT sluice.configure('lock_timeout', '10 min')")
    with held.connect(autocommit=False) as connection, a_refresh_in_progress(held) as holder:
        for callers, setting, nodes in (
            ("100ms", "10 min", None),
            ("1h", "100 ms", None),
            ("0", "10 min", "100 ms"),
            ("100ms", "10 min", "10 min"),
        ):
            held.execute("SELECT sluice.configure('lock_timeout', %s)", [setting])
            held.execute("SELECT sluice.alter_stream_table('st', lock_timeout => %s)", [nodes])
            connection.execute(f"SET LOCAL lock_timeout = '{callers}'")
            with (
                pytest.raises(psycopg.errors.LockNotAvailable) as refused,
                connection.transaction(),
            ):
                connection.execute(REFRESH)
            assert refused.value.diag.message_primary == (
                'could not refresh stream table "public.st" because a run of it is in progress'
            )
            assert refused.value.diag.message_detail == (
                "The wait for it is bounded by lock_timeout: the shortest of the node's or the"
                " setting, and the session's."
            )
            assert refused.value.diag.message_hint == "sluice.queue() shows the run."
            assert connection.execute("SHOW lock_timeout").fetchone() == (callers,)
        holder.commit()
        held.wait_for("SELECT count(*) = 1 FROM sluice.history")
        connection.execute("SET LOCAL lock_timeout = '1h'")
        assert connection.execute(REFRESH).fetchone() == ("no_change",)
        assert connection.execute("SHOW lock_timeout").fetchone() == ("1h",)


def test_scheduler_goes_on_while_a_refresh_waits_for_a_run(held: Database, leader: Leader) -> None:
    held.execute("SELECT sluice.configure('lock_timeout', '10 min')")
    held.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    with a_refresh_in_progress(held) as holder:
        refresh = Call(held, REFRESH)
        held.wait_for(WAITS)
        before = len(history(held, "each_second"))
        ticks_pass(held)
        held.wait_for(f"SELECT count(*) > {before + 1} FROM sluice.history")
        advance(held)
        assert refresh.waits
        holder.commit()
        assert refresh.value() == "no_change"
    assert [outcome for outcome, _ in history(held, "public.st")] == ["no_change"] * 2


def test_scheduler_goes_on_while_a_refresh_is_not_committed(
    member: Database, leader: Leader
) -> None:
    """The node's own run waits for it, and others go on."""
    member.execute(
        "SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '1s', lock_timeout => '10 min')"
    )
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    with member.connect(autocommit=False) as connection:
        connection.execute(REFRESH)
        member.wait_for(WAITS)
        before = len(history(member, "each_second"))
        ticks_pass(member)
        member.wait_for(
            f"SELECT count(*) > {before + 1} FROM sluice.history WHERE name = 'each_second'"
        )
        advance(member)
        member.wait_for(WAITS)
        connection.commit()
    # The manual one, and one that came after.
    member.wait_for("SELECT count(*) > 1 FROM sluice.history WHERE outcome = 'no_change'")


def test_refresh_that_waited_is_refused_when_a_drain_came_meanwhile(
    held: Database, leader: Leader
) -> None:
    with a_refresh_in_progress(held) as holder:
        refresh = Call(held, REFRESH)
        held.wait_for(WAITS)
        drain = Call(held, "SELECT sluice.drain()")
        held.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()")
        holder.commit()
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            refresh.value()
        assert drain.value() == "drained"
    assert len(history(held, "public.st")) == 1


def test_refused_refresh_does_not_wait_nor_hold_the_drain_up(member: Database) -> None:
    """It takes no lock: sessions that try again and again would leave the drain no moment."""
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    with member.connect(autocommit=False) as holder, member.connect() as connection:
        holder.execute("SELECT sluice.refresh_stream_table('st')")
        assert member.execute("SELECT sluice.drain(wait => false)") == [("draining",)]
        connection.execute("SET lock_timeout = '1 s'")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            connection.execute("SELECT sluice.refresh_stream_table('st')")
