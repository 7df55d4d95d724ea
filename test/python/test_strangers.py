"""What a role can hold up that can connect, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader, Procedure, free_port
from documents import sections
from runs import configure, ended, idle, run_now, schedule

# First keys of the advisory locks that pg_sluice takes, or could take.
CLASSES = range(1936748801, 1936748810)


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    """A role without any privilege."""
    cluster.execute("CREATE ROLE stranger LOGIN")
    yield "stranger"
    cluster.execute("DROP ROLE stranger")


@pytest.fixture
def owner(cluster: Cluster, stranger: str) -> Iterator[None]:
    """The control database is that role's."""
    database = cluster.control_db
    cluster.execute(f"ALTER DATABASE {database} OWNER TO {stranger}")
    yield
    cluster.execute(f"ALTER DATABASE {database} OWNER TO CURRENT_USER")


def take_advisory_locks(session: psycopg.Connection[Any]) -> None:
    for lock_class in CLASSES:
        session.execute(
            "SELECT pg_advisory_lock(%s, n) FROM generate_series(0, 20) AS n", [lock_class]
        )


def prepare_statements(session: psycopg.Connection[Any]) -> None:
    """PREPARE locks a table as the statement would, and asks for no privilege on it."""
    for (table,) in session.execute(
        "SELECT c.oid::regclass::text FROM pg_class AS c"
        " WHERE c.relkind = 'r' AND c.relnamespace::regnamespace::text ~ 'sluice'"
    ).fetchall():
        with suppress(psycopg.errors.InsufficientPrivilege), session.transaction():
            session.execute(f'PREPARE "{table}" AS DELETE FROM {table}')


def analyze_all(session: psycopg.Connection[Any]) -> None:
    """It names no table, and locks all that it may until the end of the transaction."""
    session.execute("ANALYZE")


LOCKS = """
SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE a.usename = 'stranger' AND l.granted
    AND (l.locktype = 'advisory' OR l.mode ~ '^(RowShare|RowExclusive|ShareUpdateExclusive)Lock$')
"""


@contextmanager
def holding(
    database: Cluster | Database, hold: Callable[[psycopg.Connection[Any]], None]
) -> Iterator[int]:
    """The stranger's session, in a transaction, holds what it can get. Gives its pid."""
    with database.connect(user="stranger", autocommit=False) as session:
        hold(session)
        held = database.execute(LOCKS)
        assert held > [(10,)]
        yield session.info.backend_pid
        assert database.execute(LOCKS) == held
        session.rollback()


@pytest.mark.parametrize("hold", [take_advisory_locks, prepare_statements])
def test_in_the_control_database(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    stranger: str,
    hold: Callable[[psycopg.Connection[Any]], None],
) -> None:
    all_goes_on(cluster, member, lead, hold)


def test_owner_of_the_control_database(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], owner: None
) -> None:
    all_goes_on(cluster, member, lead, analyze_all)


def all_goes_on(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    hold: Callable[[psycopg.Connection[Any]], None],
) -> None:
    """Leadership, claims, drain and pause, membership, and the endpoint."""
    address = f"127.0.0.1:{free_port()}"
    configure(member, lease_ttl="2 s", metrics_listen=address)
    schedule(member, "SELECT 1")

    def health() -> tuple[str, str]:
        (row,) = member.execute(
            "SELECT status, detail FROM sluice.health_check() WHERE \"check\" = 'metrics'"
        )
        return row

    with holding(cluster, hold):
        assert health() == ("warn", f"not served on {address} yet")
        leader = lead()
        assert ended(member, run_now(member))["outcome"] == "succeeded"
        assert member.execute("SELECT sluice.drain('5 s')") == [("drained",)]
        member.execute("SELECT sluice.resume()")
        assert member.execute("SELECT sluice.pause('{job}', '5 s')") == [("paused",)]
        member.execute("SELECT sluice.unpause('{job}')")
        leader.terminate()
        leader.join()
        lead()
        member.execute("SELECT sluice.start()")
        assert ended(member, run_now(member))["outcome"] == "succeeded"
        endpoint = Procedure(cluster, "serve_metrics")
        try:
            cluster.wait_for(lambda: health() == ("ok", f"served on {address}"))
        finally:
            endpoint.terminate()
            endpoint.join()
        assert health() == ("warn", f"not served on {address} yet")


def test_in_a_member(cluster: Cluster, member: Database, leader: Leader, stranger: str) -> None:
    """As docs/security.md has it: its nodes wait as long as a run waits for a lock, its definitions
    wait, and a drain of it is not reached. Who it is shows.
    """
    schedule(member, "SELECT 1", lock_timeout="100 ms")
    assert ended(member, run_now(member))["outcome"] == "succeeded"
    idle(cluster)
    with holding(member, take_advisory_locks) as pid:
        run = ended(member, run_now(member))
        assert (run["outcome"], run["sqlstate"]) == ("lock_timeout", "55P03")
        with (
            member.connect(options="-c lock_timeout=100ms") as session,
            pytest.raises(psycopg.errors.LockNotAvailable),
        ):
            session.execute("SELECT sluice.schedule('other', 'manual', 'SELECT 1')")
        assert member.execute("SELECT sluice.drain('0 s')") == [("draining",)]
        ((waiting_for,),) = member.execute("SELECT waiting_for FROM sluice.drain_status()")
        assert f"process {pid}" in waiting_for
        (block,) = sections("docs/security.md")["What a role can hold up that can connect"]
        shown = member.execute(block.text)
        assert {row[:2] for row in shown} == {(pid, "stranger")}
        assert {row[-1] for row in shown} == {"job", None}
    assert member.execute("SELECT sluice.drain('5 s')") == [("drained",)]


def test_copied_name(cluster: Cluster, member: Database, leader: Leader, stranger: str) -> None:
    """It takes the place of no worker: the slot of one that is gone is free."""
    schedule(member, "SELECT 1")
    ended(member, run_now(member))
    worker = "FROM pg_stat_activity WHERE application_name ~ '^pg_sluice worker' AND usesysid = 10"
    ((name,),) = member.execute(f"SELECT application_name {worker}")
    with member.connect(user=stranger, application_name=name):
        member.execute(f"SELECT pg_terminate_backend(pid) {worker}")
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.slot")
