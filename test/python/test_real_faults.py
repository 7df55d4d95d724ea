"""Faults of the machine, made for real: no memory, no disk, no connections, no session any more.

The server is one of this module's own, since it is starved and killed.
"""

from __future__ import annotations

import contextlib
import pwd
import resource
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cluster import Cluster
from runs import configure, ended, idle, node, run_now, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster import Database, Leader

pytestmark = pytest.mark.timeout(120)

CONNECTIONS = 24
MEGABYTE = 1024 * 1024
QUICK = {"lease_ttl": "1 s", "retry_backoff_base": "100 ms", "retry_backoff_cap": "500 ms"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"max_connections": CONNECTIONS, "shared_buffers": "32MB"}
    with Cluster(fsync=False, settings=settings) as cluster:
        cluster.create_extensions()
        cluster.silence_cron()
        cluster.create_template()
        yield cluster


def attempts(database: Database, columns: str) -> list[Any]:
    return database.execute(f"SELECT {columns} FROM sluice.history ORDER BY started_at")


def goes_on(database: Database, cluster: Cluster) -> None:
    """The next run is an ordinary one, and nothing is left of those before."""
    schedule(database, "SELECT 1", "next")
    assert ended(database, run_now(database, "next"), timeout=30)["outcome"] == "succeeded"
    idle(cluster)


# Memory


@contextlib.contextmanager
def little_memory(cluster: Cluster, megabytes: int) -> Iterator[None]:
    """Every session of the scheduler, and what the server starts from now on, has that much more
    address space than a session needs."""
    pids = [
        pid
        for (pid,) in cluster.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name ~ '^pg_sluice (sch|wor)'"
        )
    ]
    size = max(address_space(pid) for pid in pids) + megabytes * MEGABYTE
    limited = [cluster.postmaster_pid, *pids]
    for pid in limited:
        limit_memory(cluster, pid, str(size))
    try:
        yield
    finally:
        for pid in limited:
            if Path(f"/proc/{pid}").exists():
                limit_memory(cluster, pid, "unlimited")


def limit_memory(cluster: Cluster, pid: int | None, size: str) -> None:
    """As the server's user, who may do that also where root may not. The hard limit stays."""
    group = pwd.getpwnam(cluster.owner).pw_gid
    subprocess.run(
        ["prlimit", f"--pid={pid}", f"--as={size}:"],
        user=cluster.owner,
        group=group,
        check=True,
        capture_output=True,
    )


def address_space(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def test_memory_that_is_exhausted(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], workers: str
) -> None:
    """A sort takes what work_mem lets it, until that is little enough for what there is."""
    configure(member, **QUICK, max_workers=workers, refresh_work_mem="128 MB")
    leader = lead()
    member.wait_for("SELECT state = 'scheduled' FROM sluice.databases()")
    schedule(
        member,
        "SELECT count(DISTINCT (g || repeat('x', 8000)) COLLATE \"C\")"
        " FROM generate_series(1, 12000) AS g",
    )
    with little_memory(cluster, 56):
        member.execute("SELECT sluice.run_now('job')")
        member.wait_for(
            "SELECT count(*) = 1 FROM sluice.history WHERE outcome = 'succeeded'", timeout=60
        )
    assert attempts(member, "outcome, sqlstate, attempt, remedy") == [
        ("out_of_memory", "53200", 1, None),
        ("out_of_memory", "53200", 2, "work_mem 64 MB, no parallel query"),
        ("succeeded", None, 3, "work_mem 32 MB, no parallel query"),
    ]
    # It cost the run, not its session.
    assert len(set(attempts(member, "pid"))) == 1
    assert node(member)["consecutive_errors"] == 0
    assert node(member)["remedy"].startswith("work_mem 32 MB and no parallel query")
    goes_on(member, cluster)
    assert leader.leads


def test_more_than_a_query_can_ever_have(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """PostgreSQL has no value of a gigabyte: with any memory, so it is no lack of it."""
    configure(member, **QUICK, max_workers="1")
    lead()
    for name, command, sqlstate in (
        ("value", "SELECT repeat('x', 1073741823)", "54000"),
        ("format", "SELECT to_char(now(), repeat(repeat('x', 1000), 90000))", "XX000"),
    ):
        schedule(member, command, name)
        row = ended(member, run_now(member, name))
        assert (row["outcome"], row["sqlstate"]) == ("permanent_error", sqlstate), row
        assert row["remedy"] is None
    assert len(set(attempts(member, "pid"))) == 1
    goes_on(member, cluster)


# Disk


@pytest.fixture
def small_disk(cluster: Cluster, member: Database) -> Iterator[Path]:
    """A file system of 4 MB, with the tablespace "small" on it."""
    place = cluster.directory / "small"
    place.mkdir()
    shutil.chown(place, cluster.owner, cluster.owner)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        place.rmdir()
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        shutil.chown(place, cluster.owner, cluster.owner)
        place.chmod(0o700)
        cluster.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        yield place
        member.execute("DROP TABLE IF EXISTS big")
        cluster.execute("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


def test_disk_that_is_full(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], small_disk: Path
) -> None:
    """What was written is given back, and once there is room the retry succeeds."""
    configure(member, **QUICK, max_consecutive_errors="100")
    lead()
    member.execute("CREATE TABLE big (x integer) TABLESPACE small")
    schedule(member, "INSERT INTO big SELECT generate_series(1, 200000)")
    member.execute("SELECT sluice.run_now('job')")
    member.wait_for("SELECT count(*) >= 2 FROM sluice.history", timeout=30)
    failed = attempts(member, "outcome, sqlstate")
    assert set(failed) == {("resource_exhausted", "53100")}
    assert node(member)["remedy"].startswith("backoff")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    member.wait_for(
        "SELECT count(*) = 1 FROM sluice.history WHERE outcome = 'succeeded'", timeout=30
    )
    assert member.execute("SELECT count(*) FROM big") == [(200000,)]
    assert node(member)["consecutive_errors"] == 0
    goes_on(member, cluster)


# Connections


def test_no_connection_is_left(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """No worker can be started: somebody is told, runs wait, and it recovers by itself."""
    configure(member, **QUICK, max_workers="2", worker_idle_timeout="0 s")
    leader = lead()
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    with contextlib.ExitStack() as others, cluster.connect() as control:

        def no_worker_starts() -> bool:
            # Also what ends meanwhile is taken.
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    others.enter_context(cluster.connect())
            return control.execute(
                "SELECT EXISTS (SELECT FROM sluice.alerts"
                " WHERE event = 'spawn_failed' AND closed_at IS NULL)"
            ).fetchone() == (True,)

        cluster.wait_for(no_worker_starts, timeout=30)
        assert control.execute("SELECT severity, node FROM sluice.alerts").fetchall() == [
            ("critical", member.name)
        ]
        error = control.execute("SELECT spawn_error FROM _sluice.member").fetchone()
        assert error is not None
        assert "too many clients" in error[0]
    cluster.wait_for(
        "SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE event = 'spawn_failed'", timeout=60
    )
    at = member.execute("SELECT clock_timestamp()")[0][0]
    member.wait_for(f"SELECT count(*) > 1 FROM sluice.history WHERE started_at > '{at}'")
    assert set(attempts(member, "outcome")) == {("succeeded",)}
    assert leader.leads


# Sessions


@pytest.mark.parametrize("transactional", [True, False], ids=["transactional", "top_level"])
def test_session_of_a_run_is_cancelled_or_ended(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    workers: str,
    transactional: bool,
) -> None:
    """By a person: the one costs the run and is no failure, the other is one and is tried again."""
    configure(member, **QUICK, max_workers=workers)
    leader = lead()
    member.execute("CREATE TABLE nap AS SELECT 600 AS seconds")
    schedule(member, "SELECT pg_sleep(seconds) FROM nap", transactional=transactional)

    def interrupted(function: str) -> dict[str, Any]:
        run_id = run_now(member)
        cluster.wait_for(
            f"SELECT count({function}(pid)) = 1 FROM pg_stat_activity"
            " WHERE wait_event = 'PgSleep' AND pid <> pg_backend_pid()",
            timeout=30,
        )
        return ended(member, run_id, timeout=30)

    row = interrupted("pg_cancel_backend")
    assert (row["outcome"], row["sqlstate"]) == ("cancelled", "57014")
    assert node(member)["consecutive_errors"] == 0
    idle(cluster)
    row = interrupted("pg_terminate_backend")
    assert (row["outcome"], row["sqlstate"]) == ("worker_crashed", "57P01")
    assert node(member)["consecutive_errors"] == 1
    member.execute("UPDATE nap SET seconds = 0")
    cluster.execute(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    )
    goes_on(member, cluster)
    assert leader.leads


def test_server_crashes_under_a_serial_run(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """kill -9 of the scheduler's own session: the server restarts, and the next leader finds the
    run that is left over."""
    configure(member, **QUICK, max_workers="0")
    lead()
    member.execute("CREATE TABLE nap AS SELECT 600 AS seconds")
    schedule(member, "SELECT pg_sleep(seconds) FROM nap")
    run_id = run_now(member)
    pid = cluster.wait_for(
        "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'", timeout=30
    )
    # A claim is not flushed at once, and one that a crash loses is simply claimed again.
    ((written,),) = cluster.execute("SELECT pg_current_wal_insert_lsn()")
    cluster.wait_for(f"SELECT pg_current_wal_flush_lsn() >= '{written}'")
    cluster.crash(pid)
    member.execute("UPDATE nap SET seconds = 0")
    leader = lead()
    row = ended(member, run_id, timeout=30)
    assert (row["outcome"], row["attempt"]) == ("worker_crashed", 1)
    member.wait_for("SELECT count(*) = 2 FROM sluice.history")
    assert attempts(member, "outcome, attempt") == [("worker_crashed", 1), ("succeeded", 2)]
    assert node(member)["consecutive_errors"] == 0
    goes_on(member, cluster)
    assert leader.leads
