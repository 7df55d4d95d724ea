"""What would go on for ever ends at its deadline: locks, slow queries, and runs that resist.

All in either mode: on a worker, and on the scheduler's own session.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from runs import configure, ended, idle, node, run_now, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster import Cluster, Database, Leader
    from faults import Fault

pytestmark = pytest.mark.timeout(120)

NEVER = "10 min"
SOON = "300 ms"


@pytest.fixture
def led(workers: str, member: Database, lead: Callable[..., Leader]) -> Database:
    """A led member. Retries come too late to see, and a worker that has nothing to do goes."""
    configure(
        member,
        max_workers=workers,
        worker_idle_timeout="0 s",
        retry_backoff_base="1 h",
        lock_timeout=NEVER,
        refresh_timeout=NEVER,
    )
    lead()
    return member


def bounds(parallel: str, serial: str) -> pytest.MarkDecorator:
    """Run a test in each mode, where deadlines come from the nodes' own values or the setting."""
    return pytest.mark.parametrize(
        ("workers", "bound"),
        [("4", parallel), ("0", serial)],
        indirect=["workers"],
        ids=[f"parallel-{parallel}", f"serial-{serial}"],
    )


def hourly(database: Database, bound: str, limit: str, commands: dict[str, str]) -> None:
    """Jobs, each by its name, which `limit` bounds by way of `bound`."""
    if bound == "setting":
        database.execute("SELECT sluice.configure(%s, %s)", [limit, SOON])
    own = f", {limit} => '{SOON}'" if bound == "node" else ""
    for name, command in commands.items():
        database.execute(f"SELECT sluice.schedule(%s, '1 h', %s{own})", [name, command])


def fire(database: Database) -> dict[str, Any]:
    """Makes every node due; gives the next fire of each on its grid."""
    grid = dict(database.execute("SELECT name, next_fire_at FROM sluice.nodes"))
    database.execute("UPDATE _sluice.node SET next_fire_at = next_fire_at - interval '1 h'")
    database.execute("NOTIFY sluice_wake")
    return grid


def hangs(cluster: Cluster) -> None:
    cluster.wait_for("SELECT count(*) > 0 FROM _sluice.queue WHERE state = 'running'", timeout=30)


def all_ended_as(
    database: Database, cluster: Cluster, grid: dict[str, Any], outcome: tuple[str, str]
) -> None:
    """Every node has failed once, in that way, and nothing of it is left behind."""
    database.wait_for(f"SELECT count(*) >= {len(grid)} FROM sluice.history", timeout=30)
    rows = database.execute("SELECT name, outcome, sqlstate, message FROM sluice.history")
    assert {row[0]: row[1:3] for row in rows} == dict.fromkeys(grid, outcome), rows
    assert len(rows) == len(grid)
    idle(cluster)
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.slot")
    assert dict(database.execute("SELECT name, next_fire_at FROM sluice.nodes")) == grid
    assert database.execute(
        "SELECT DISTINCT consecutive_errors, status, remedy ~ '^backoff' FROM sluice.nodes"
    ) == [(1, "active", True)]


@bounds(parallel="setting", serial="node")
def test_a_lock_that_is_held_for_ever(led: Database, cluster: Cluster, bound: str) -> None:
    """A row's, a table's and the node's own: each ends at lock_timeout, while they are held."""
    led.execute("CREATE TABLE rows AS SELECT 1 AS x")
    led.execute("CREATE TABLE source AS SELECT 1 AS x")
    led.execute("SELECT sluice.create_stream_table('st', 'SELECT x FROM source', '1 h')")
    hourly(led, bound, "lock_timeout", {"row": "UPDATE rows SET x = 2", "own": "SELECT 1"})
    if bound == "node":
        led.execute("SELECT sluice.alter_stream_table('st', lock_timeout => %s)", [SOON])
    with led.connect(autocommit=False) as holder:
        holder.execute("UPDATE rows SET x = 3")
        holder.execute("LOCK TABLE source")
        with led.connect() as other:
            other.execute(
                "SELECT pg_advisory_lock(_sluice.lock_class('node'), pgt_id::integer)"
                " FROM sluice.nodes WHERE name = 'own'"
            )
            grid = fire(led)
            all_ended_as(led, cluster, grid, ("lock_timeout", "55P03"))
        # The others are held still.
        assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]
        holder.rollback()
    led.execute("SELECT sluice.resume()")
    for name in grid:
        assert ended(led, run_now(led, name))["outcome"] in ("succeeded", "no_change")


def test_a_refresh_by_hand_that_stays_open_holds_no_slot(led: Database, cluster: Cluster) -> None:
    """Nor does it hold up other nodes. What it locks is needed to record that the node's run
    failed, so that is on record once it ends.
    """
    led.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    led.execute("SELECT sluice.alter_stream_table('st', lock_timeout => %s)", [SOON])
    schedule(led, "SELECT 1", "other")
    with led.connect(autocommit=False) as by_hand:
        by_hand.execute("SELECT sluice.refresh_stream_table('st')")
        run_id = run_now(led, "st")
        hangs(cluster)
        cluster.wait_for("SELECT count(*) = 0 FROM _sluice.slot", timeout=30)
        assert ended(led, run_now(led, "other"), timeout=30)["outcome"] == "succeeded"
        assert led.execute("SELECT sluice.drain('0 s')") == [("draining",)]
        by_hand.rollback()
    assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]
    row = ended(led, run_id)
    assert (row["outcome"], row["sqlstate"]) == ("lock_timeout", "55P03")


NAP = """
CREATE TABLE nap AS SELECT 0 AS seconds;
CREATE FUNCTION nap() RETURNS integer STABLE LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep(seconds) FROM public.nap; RETURN 1; END $$;
"""


@bounds(parallel="node", serial="setting")
def test_a_refresh_of_ten_minutes(led: Database, cluster: Cluster, bound: str) -> None:
    led.execute(NAP)
    led.execute("SELECT sluice.create_stream_table('st', 'SELECT nap() AS x', '1 h')")
    led.execute("CREATE MATERIALIZED VIEW mv AS SELECT public.nap() AS x")
    led.execute("SELECT sluice.schedule_refresh('mv', '1 h')")
    hourly(led, bound, "refresh_timeout", {"job": "SELECT pg_sleep(600)"})
    led.execute("SELECT sluice.schedule('top', '1 h', 'SELECT pg_sleep(600)', false)")
    if bound == "node":
        led.execute("UPDATE _sluice.node SET refresh_timeout = %s", [SOON])
    led.execute("UPDATE nap SET seconds = 600")
    grid = fire(led)
    hangs(cluster)
    assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]
    led.execute("SELECT sluice.resume()")
    all_ended_as(led, cluster, grid, ("deadline_exceeded", "57014"))
    assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]


# What the server's own timer does not end

SWALLOW = """
CREATE FUNCTION swallow() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    LOOP
        BEGIN
            PERFORM pg_sleep(600);
        EXCEPTION
            WHEN query_canceled THEN RAISE LOG 'swallowed a cancellation';
        END;
    END LOOP;
END $$;
"""

# The run itself makes constraints immediate; this one is deferred again while that happens.
AT_COMMIT = """
CREATE TABLE deferred (what text);
CREATE TABLE deferred_again (what text);
CREATE FUNCTION defer_again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    SET CONSTRAINTS ALL DEFERRED;
    INSERT INTO deferred_again VALUES (NEW.what);
    RETURN NULL;
END $$;
CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.what = 'sleeps' THEN PERFORM pg_sleep(600); ELSE PERFORM public.swallow(); END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER a AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION defer_again();
CREATE CONSTRAINT TRIGGER b AFTER INSERT ON deferred_again DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION act();
"""


def test_a_run_that_swallows_its_cancellation(
    led: Database, cluster: Cluster, workers: str
) -> None:
    """It is cancelled by the server's timer, cancelled from outside and then terminated. In serial
    mode that ends the scheduler's own session, which is made again."""
    led.execute(SWALLOW)
    leader = cluster.execute("SELECT pid FROM _sluice.lease")
    start = cluster.log_text().count("swallowed a cancellation")
    for name, transactional in (("job", True), ("top", False)):
        led.execute(
            "SELECT sluice.schedule(%s, '1 h', 'SELECT swallow()', %s, refresh_timeout => %s)",
            [name, transactional, SOON],
        )
    grid = fire(led)
    hangs(cluster)
    assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]
    led.execute("SELECT sluice.resume()")
    all_ended_as(led, cluster, grid, ("deadline_exceeded", "57P01"))
    assert cluster.log_text().count("swallowed a cancellation") == start + 2 * len(grid)
    schedule(led, "SELECT 1", "well")
    assert ended(led, run_now(led, "well"))["outcome"] == "succeeded"
    assert cluster.execute("SELECT pid FROM _sluice.lease") == leader
    assert led.execute("SELECT state, error FROM sluice.databases()") == [("scheduled", None)]


def test_a_commit_that_takes_too_long(led: Database, cluster: Cluster) -> None:
    """A trigger that is left for the commit sleeps there; another swallows what would end it."""
    led.execute(SWALLOW + AT_COMMIT)
    for name, way in (("sleeps", "57014"), ("swallows", "57P01")):
        schedule(led, f"INSERT INTO deferred VALUES ('{name}')", name, refresh_timeout=SOON)
        run_id = run_now(led, name)
        if name == "swallows":
            cluster.wait_for(
                "SELECT count(*) = 1 FROM pg_stat_activity"
                " WHERE wait_event = 'PgSleep' AND query LIKE '%COMMIT'",
                timeout=30,
            )
        row = ended(led, run_id, timeout=30)
        assert (row["outcome"], row["sqlstate"]) == ("deadline_exceeded", way), row
        assert node(led, name)["consecutive_errors"] == 1
    assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.slot")
    assert led.execute("SELECT count(*) FROM sluice.history") == [(2,)]
    assert led.execute("SELECT count(*) FROM deferred") == [(0,)]


def test_an_interruption_that_comes_late_meets_no_other_run(
    led: Database,
    cluster: Cluster,
    control: Database,
    fault: Callable[[Database, str], Fault],
    workers: str,
) -> None:
    """1. A run is past its grace, and the call that cancels it fails for now. 2. It ends by itself.
    3. The next run starts where it was. 4. The call is made again."""
    if workers != "0":
        configure(led, max_workers="1")
    led.execute("CREATE TABLE door AS SELECT 1 AS x")
    schedule(
        led,
        "DO $do$BEGIN BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN NULL; END;"
        " PERFORM FROM public.door FOR UPDATE; END$do$",
        "late",
        refresh_timeout=SOON,
    )
    schedule(led, "SELECT pg_sleep(3)", "next")
    interrupt = fault(control, "interrupt_backend")
    interrupt.arm(3, "55P03")
    with led.connect(autocommit=False) as holder:
        holder.execute("SELECT FROM door FOR UPDATE")
        late = run_now(led, "late")
        cluster.wait_for(lambda: interrupt.consumed > 0, timeout=30)
        following = run_now(led, "next")
        holder.rollback()
    assert ended(led, late)["outcome"] == "succeeded"
    assert ended(led, following, timeout=30)["outcome"] == "succeeded"
    assert interrupt.calls > 3


@pytest.fixture
def fifo(cluster: Cluster) -> Iterator[Path]:
    """A pipe that nobody writes to. Who opens it to read waits for that, deaf to any signal."""
    path = cluster.directory / "fifo"
    os.mkfifo(path, 0o666)
    path.chmod(0o666)
    yield path
    let_go(path)
    path.unlink()


def let_go(fifo: Path) -> None:
    """Lets go of who waits, if somebody does."""
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def test_a_run_that_never_looks_for_interrupts(
    led: Database, cluster: Cluster, fifo: Path, workers: str
) -> None:
    """Nothing can end it: somebody is told, it counts as running for as long as it does, and then
    everything is as it should be.
    """

    def health() -> tuple[str, str]:
        found: tuple[str, str] = led.execute(
            "SELECT status, detail FROM sluice.health_check() WHERE \"check\" = 'workers'"
        )[0]
        return found

    led.execute(
        "CREATE EXTENSION IF NOT EXISTS plpython3u; CREATE FUNCTION deaf() RETURNS void"
        f" LANGUAGE plpython3u AS 'open(\"{fifo}\").read()'"
    )
    leader = cluster.execute("SELECT pid FROM _sluice.lease")
    schedule(led, "SELECT deaf()", refresh_timeout=SOON)
    run_id = run_now(led)
    led.wait_for("SELECT count(*) = 1 FROM sluice.queue() WHERE state = 'running'", timeout=30)
    cluster.wait_for(
        "SELECT count(*) = 1 FROM sluice.alerts WHERE event = 'session_stuck'", timeout=40
    )
    ((pid, severity, database),) = cluster.execute(
        "SELECT (detail ->> 'pid')::integer, severity, node FROM sluice.alerts"
        " WHERE event = 'session_stuck' AND closed_at IS NULL"
    )
    assert (severity, database) == ("critical", led.name)
    assert cluster.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid]) == [(1,)]
    status, detail = health()
    assert status == "critical"
    assert f"process {pid} " in detail
    # It does run.
    if workers != "0":
        assert led.execute("SELECT pid, name FROM sluice.workers() WHERE state = 'live'") == [
            (pid, "job")
        ]
    assert led.execute("SELECT sluice.drain('100 ms')") == [("draining",)]
    assert led.execute("SELECT waiting_for FROM sluice.drain_status()") == [('run of "job"',)]
    assert led.execute("SELECT count(*) FROM sluice.history") == [(0,)]

    let_go(fifo)
    assert led.execute("SELECT sluice.drain('30 s')") == [("drained",)]
    assert ended(led, run_id)["outcome"] == "deadline_exceeded"
    assert led.execute("SELECT count(*) FROM sluice.history") == [(1,)]
    assert node(led)["consecutive_errors"] == 1
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.slot")
    cluster.wait_for(
        "SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE event = 'session_stuck'"
    )
    assert health()[0] == ("warn" if workers == "0" else "ok")
    led.execute("SELECT sluice.resume()")
    schedule(led, "SELECT 1", "well")
    assert ended(led, run_now(led, "well"))["outcome"] == "succeeded"
    assert cluster.execute("SELECT pid FROM _sluice.lease") == leader
