"""The clock is set back while nodes are scheduled. It is the same as if all that is on record had
happened later, so that is what these tests bring about."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cluster import Cluster, Database, Leader
from runs import configure, ended, run_now

HOURS = 10
TIMES = {
    "node": ("next_fire_at", "fired_at", "retry_at", "retry_of", "created_at"),
    "node_state": ("last_run_at", "last_success_at"),
    "history": ("due_at", "started_at", "ended_at"),
}
CLOCK = "SELECT status, detail FROM sluice.health_check() WHERE \"check\" = 'clock'"


def set_back(member: Database, hours: int = HOURS, only: str = "true") -> None:
    """Sets the clock back for the nodes for which `only` is true, between two of their runs."""
    with member.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE _sluice.node_state IN EXCLUSIVE MODE")
        for table, columns in TIMES.items():
            later = ", ".join(f"{name} = {name} + interval '{hours} h'" for name in columns)
            connection.execute(
                f"UPDATE _sluice.{table} SET {later}"
                f" WHERE pgt_id IN (SELECT pgt_id FROM _sluice.node WHERE {only})"
            )
        connection.execute("NOTIFY sluice_wake")


def runs(member: Database, name: str) -> int:
    (count,) = member.execute("SELECT count(*) FROM sluice.history WHERE name = %s", [name])[0]
    return int(count)


def runs_again(member: Database, name: str, *, times: int = 1) -> None:
    before = runs(member, name)
    member.wait_for(lambda: runs(member, name) >= before + times)


@pytest.mark.parametrize("leads", [True, False], ids=["running", "stopped"])
def test_nodes_go_on_on_their_own_grid(
    member: Database, short_lease: None, lead: Callable[..., Leader], leads: bool
) -> None:
    """1. All kinds run. 2. The clock is set back, while a leader runs or before the next one comes.
    3. What has contents is refreshed again, on its grid, and its age is told again."""
    member.execute("CREATE TABLE base AS SELECT 1 AS x")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT x FROM base', '1s')")
    member.execute("CREATE MATERIALIZED VIEW mv AS SELECT x FROM base")
    member.execute("SELECT sluice.schedule_refresh('mv', '2s')")
    member.execute("SELECT sluice.create_stream_table('hourly', 'SELECT x FROM base', '1h')")
    leader = lead()
    member.wait_for("SELECT count(DISTINCT name) = 2 FROM sluice.history")
    # It fired the last time an hour ago.
    member.execute(
        "UPDATE _sluice.node SET fired_at = next_fire_at - interval '1 h', fire_step = '1 h'"
        " WHERE schedule = '1h'"
    )
    if not leads:
        leader.terminate()
        leader.join()
    set_back(member)
    if not leads:
        assert member.execute(CLOCK) == [
            ("warn", 'ahead of the clock: "public.st", "public.mv", "public.hourly"')
        ]
        lead()
    member.execute("INSERT INTO base VALUES (2)")
    for relation in ("st", "mv"):
        member.wait_for(f"SELECT count(*) = 2 FROM {relation}")
    member.wait_for(f"SELECT status = 'ok' FROM ({CLOCK}) AS c")
    # Ten hours are so many steps of each grid.
    rows = member.execute(
        "SELECT next_fire_at - anchor, fire_step, next_fire_at - clock_timestamp(), s.lag,"
        " last_run_at <= clock_timestamp() OR last_run_at IS NULL"
        " FROM _sluice.node JOIN sluice.nodes AS s USING (pgt_id, next_fire_at)"
        " ORDER BY pgt_id"
    )
    assert [step.total_seconds() for _, step, *_ in rows] == [1, 2, 3600]
    for since_anchor, step, until_next, lag, ran_in_the_past in rows:
        assert since_anchor % step == timedelta(0)
        assert until_next <= step
        assert timedelta(0) <= lag < timedelta(minutes=1)
        assert ran_in_the_past
    assert member.execute("SELECT count(*) FROM sluice.alerts") == [(0,)]


def test_retry_that_waits_is_made(
    member: Database, lead: Callable[..., Leader], cluster: Cluster
) -> None:
    """Of every kind of node, and the fire that it is of is none of the present."""
    configure(cluster, retry_backoff_base="1 h", retry_backoff_cap="1 h")
    member.execute("CREATE TABLE switch AS SELECT true AS fails")
    member.execute(
        "CREATE FUNCTION try() RETURNS integer STABLE LANGUAGE plpgsql AS $$BEGIN"
        " IF (SELECT fails FROM public.switch) THEN RAISE SQLSTATE '40001'; END IF; RETURN 1; END$$"
    )
    member.execute(
        "SELECT sluice.create_stream_table('st', 'SELECT try() AS x', '1d', initialize => false)"
    )
    member.execute("CREATE MATERIALIZED VIEW mv AS SELECT try() AS x WITH NO DATA")
    member.execute("SELECT sluice.schedule_refresh('mv', '1d')")
    member.execute("SELECT sluice.schedule('job', '1d', 'SELECT public.try()')")
    member.execute("UPDATE _sluice.node SET next_fire_at = date_trunc('second', now())")
    lead()
    member.wait_for("SELECT count(*) = 3 FROM sluice.nodes WHERE consecutive_errors = 1")
    assert member.execute("SELECT bool_and(retry_at > now()) FROM _sluice.node") == [(True,)]
    member.execute("UPDATE switch SET fails = false")
    set_back(member)
    member.wait_for("SELECT count(*) = 3 FROM sluice.history WHERE outcome = 'succeeded'")
    for name in ("public.st", "public.mv", "job"):
        assert member.execute(
            "SELECT attempt, reason, due_at = lead(due_at) OVER (ORDER BY attempt DESC)"
            " FROM sluice.history WHERE name = %s ORDER BY attempt DESC",
            [name],
        ) == [(2, "retry", True), (1, None, None)]


def test_job_waits_and_runs_once_for_each_fire(
    member: Database, leader: Leader, cluster: Cluster
) -> None:
    """1. A job runs every second. 2. The clock is set back: it waits, as health says, and what has
    contents does not. 3. Somebody runs it. 4. The clock has passed its last fire: it goes on."""
    member.execute("CREATE TABLE log (at timestamptz DEFAULT clock_timestamp())")
    member.execute("SELECT sluice.schedule('job', '1s', 'INSERT INTO log DEFAULT VALUES')")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '1s')")
    member.wait_for("SELECT count(*) >= 3 FROM log")
    member.wait_for("SELECT count(*) >= 3 FROM sluice.history WHERE name = 'public.st'")
    set_back(member)
    ran = runs(member, "job")
    runs_again(member, "public.st", times=3)
    member.wait_for(f"SELECT detail NOT LIKE '%public.st%' FROM ({CLOCK}) AS c")
    ((next_fire_at,),) = member.execute(
        "SELECT next_fire_at::text FROM sluice.nodes WHERE name = 'job'"
    )
    assert member.execute(CLOCK) == [
        ("warn", f'ahead of the clock: "job" waits until {next_fire_at}')
    ]
    assert runs(member, "job") == ran
    # It is late, which shows though its last success lay in the future.
    assert member.execute(
        "SELECT last_success_at BETWEEN now() - interval '1 min' AND now()"
        " FROM _sluice.node_state JOIN _sluice.node USING (pgt_id) WHERE kind = 'job'"
    ) == [(True,)]
    assert ended(member, run_now(member))["outcome"] == "succeeded"
    set_back(member, -HOURS, "kind = 'job'")
    member.wait_for(lambda: runs(member, "job") >= ran + 3)
    assert member.execute(CLOCK) == [("ok", "no node is ahead of the clock")]
    assert member.execute(
        "SELECT count(*) - count(DISTINCT due_at), count(*) FILTER (WHERE outcome <> 'succeeded')"
        " FROM sluice.history WHERE name = 'job'"
    ) == [(0, 0)]


def test_job_that_is_scheduled_anew_does_not_wait(member: Database, leader: Leader) -> None:
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    runs_again(member, "job")
    set_back(member)
    member.wait_for(f"SELECT detail LIKE '%until%' FROM ({CLOCK}) AS c")
    member.execute("SELECT sluice.schedule('job', '2s', 'SELECT 1')")
    runs_again(member, "job", times=2)
    assert member.execute(CLOCK) == [("ok", "no node is ahead of the clock")]


def test_node_that_was_made_in_the_future_fires(member: Database, leader: Leader) -> None:
    """A job too: it has no fire yet that it would wait for."""
    member.execute("SELECT sluice.schedule('job', '2s', 'SELECT 1')")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '2s')")
    with member.connect() as connection, connection.transaction():
        connection.execute(
            "UPDATE _sluice.node SET anchor = anchor + interval '10 h', fired_at = NULL,"
            " created_at = created_at + interval '10 h', fire_step = NULL,"
            " next_fire_at = next_fire_at + interval '10 h'"
        )
        connection.execute("NOTIFY sluice_wake")
    for name in ("job", "public.st"):
        runs_again(member, name, times=2)


def test_what_is_locked_or_unreadable_keeps_nobody_back(
    member: Database, leader: Leader, cluster: Cluster
) -> None:
    """1. The clock is set back while somebody alters a node, and one has a schedule that can't be
    read. 2. The others go on. 3. He commits, and so does his."""
    for name in ("good", "locked", "odd"):
        member.execute(f"SELECT sluice.create_stream_table('{name}', 'SELECT 1 AS x', '1s')")
    member.wait_for("SELECT count(DISTINCT name) = 3 FROM sluice.history")
    member.execute("SELECT sluice.drain()")
    set_back(member)
    member.execute(
        "UPDATE _sluice.node SET schedule = 'every blue moon' WHERE relid = 'odd'::regclass"
    )
    with member.connect(autocommit=False) as holder:
        holder.execute("SELECT sluice.alter_stream_table('locked', priority => 1)")
        set_back(member, only="relid <> 'locked'::regclass")
        member.execute("SELECT sluice.resume()")
        runs_again(member, "public.good", times=2)
        locked = runs(member, "public.locked")
        holder.commit()
    member.wait_for(lambda: runs(member, "public.locked") > locked)
    assert member.execute(
        "SELECT next_fire_at > now() + interval '9 h', status FROM sluice.nodes"
        " WHERE name = 'public.odd'"
    ) == [(True, "active")]
    assert member.execute("SELECT count(*) FROM sluice.alerts") == [(0,)]
    assert cluster.execute("SELECT failures FROM _sluice.member") == [(0,)]


def test_run_in_progress_is_none_of_its_business(
    member: Database, leader: Leader, cluster: Cluster
) -> None:
    """1. A stream table is ahead, and refreshed. 2. Others are brought back meanwhile, and it is
    not: what its run is to write would be too new for its snapshot. 3. The run ends well."""
    member.execute("CREATE TABLE door AS SELECT 1 AS x")
    member.execute(
        "CREATE FUNCTION slow() RETURNS integer STABLE LANGUAGE plpgsql AS $$BEGIN"
        " PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); RETURN 1; END$$"
    )
    member.execute("SELECT sluice.create_stream_table('slow', 'SELECT slow() AS x', 'manual')")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '1s')")
    runs_again(member, "public.st")
    with member.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        member.execute(
            "UPDATE _sluice.node_state SET last_success_at = last_success_at + interval '10 h'"
            " WHERE pgt_id = (SELECT pgt_id FROM sluice.nodes WHERE name = 'public.slow')"
        )
        run_id = run_now(member, "slow")
        member.wait_for(
            "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        )
        ahead = "SELECT lag < interval '0' FROM sluice.nodes WHERE name = 'public.slow'"
        was_ahead: Any = member.execute(ahead)
        set_back(member, only="relid <> 'slow'::regclass")
        runs_again(member, "public.st", times=2)
        assert member.execute(ahead) == was_ahead
    assert ended(member, run_id)["outcome"] == "no_change"
