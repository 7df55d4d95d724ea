"""Workers: the limit, their coming and going, and what their death leaves behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from calls import Call
from cluster import Cluster, Database, Leader
from runs import configure, idle


def schedule(database: Database, count: int, command: str, prefix: str = "job") -> list[str]:
    names = [f"{prefix}_{n}" for n in range(count)]
    with database.connect() as connection:
        for name in names:
            connection.execute("SELECT sluice.schedule(%s, 'manual', %s)", [name, command])
    return names


def run_now(database: Database, names: list[str]) -> None:
    with database.connect() as connection:
        for name in names:
            connection.execute("SELECT sluice.run_now(%s)", [name])


def ended(database: Database, count: int) -> None:
    database.wait_for(f"SELECT count(*) >= {count} FROM sluice.history")


class Sample:
    """The greatest numbers of slots and of workers' sessions that were seen."""

    def __init__(self, cluster: Cluster) -> None:
        self.slots = self.sessions = self.running = self.samples = 0
        self._connection = cluster.connect()

    def take(self) -> None:
        slots, sessions, running = self._connection.execute(
            "SELECT (SELECT count(*) FROM _sluice.slot),"
            " (SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pg_sluice worker%'),"
            " (SELECT count(*) FROM _sluice.queue WHERE state = 'running')"
        ).fetchone() or (0, 0, 0)
        self.slots = max(self.slots, slots)
        self.sessions = max(self.sessions, sessions)
        self.running = max(self.running, running)
        self.samples += 1

    def close(self) -> None:
        self._connection.close()


@contextmanager
def sampled(cluster: Cluster) -> Iterator[Sample]:
    sample = Sample(cluster)
    yield sample
    sample.close()


def test_limit_holds_under_load(cluster: Cluster, member: Database, leader: Leader) -> None:
    configure(member, max_workers="3", lock_timeout="1 min")
    names = schedule(member, 15, "SELECT pg_advisory_xact_lock_shared(1)")
    with sampled(cluster) as sample:

        def busy() -> bool:
            sample.take()
            return sample.running == 3

        def done() -> bool:
            sample.take()
            return member.execute("SELECT count(*) FROM sluice.history") == [(15,)]

        with member.connect() as holder:
            holder.execute("SELECT pg_advisory_lock(1)")
            run_now(member, names)
            member.wait_for(busy)
        member.wait_for(done)
    assert (sample.slots, sample.sessions, sample.running) == (3, 3, 3)
    idle(cluster)
    limit = dict(member.execute("SELECT ingredient, value FROM sluice.effective_limit()"))
    assert limit["max_workers"] == 3
    assert member.execute(
        'SELECT DISTINCT "limit", ingredient FROM sluice.effective_limit() WHERE binding'
    ) == [(3, "max_workers")]


def test_two_reservations_at_the_same_time(cluster: Cluster, member: Database) -> None:
    """1. One takes the only slot, and has not committed. 2. Another one comes: it waits. 3. The
    first commits: there is none for the second.
    """
    configure(member, max_workers="1")
    with cluster.connect(autocommit=False) as first:
        (epoch,) = first.execute(
            "SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 60)"
        ).fetchone() or (None,)
        first.commit()
        reserve = f"SELECT slot FROM _sluice.member, _sluice.reserve_slot({epoch}, db_oid)"
        assert first.execute(reserve).fetchone() == (1,)
        second = Call(cluster, reserve)
        cluster.wait_for(
            "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            f" AND pid = {second.pid}"
        )
        first.commit()
        assert second.value() is None


def test_workers_shows_what_runs(cluster: Cluster, member: Database, leader: Leader) -> None:
    configure(member, max_workers="2")
    (name,) = schedule(member, 1, "SELECT pg_sleep(60)")
    run_now(member, [name])
    member.wait_for("SELECT count(*) = 1 FROM sluice.workers() WHERE name IS NOT NULL")
    rows = member.execute("SELECT slot, state, database, name FROM sluice.workers()")
    assert rows == [(1, "live", member.name, name), (2, "free", None, None)]
    assert member.execute(
        "SELECT a.pid = w.pid FROM sluice.workers() AS w"
        " JOIN pg_stat_activity AS a ON a.query LIKE '%%_sluice.perform(%%' AND a.state = 'active'"
        "  AND a.pid <> pg_backend_pid()"
        " WHERE w.state = 'live'"
    ) == [(True,)]


def test_fair_share_between_databases(cluster: Cluster, member: Database, leader: Leader) -> None:
    """One database has all workers; when another has work, it gets its half as runs end."""
    configure(member, max_workers="4")
    names = schedule(member, 40, "SELECT pg_sleep(0.6)")
    with cluster.database() as other:
        other.execute("SELECT sluice.start()")
        others = schedule(other, 10, "SELECT pg_sleep(0.2)")
        run_now(member, names)
        member.wait_for("SELECT count(*) = 4 FROM sluice.queue() WHERE state = 'running'")
        run_now(other, others)
        cluster.wait_for(
            f"SELECT count(*) >= 2 FROM _sluice.queue AS q WHERE q.state = 'running'"
            f" AND q.db_oid = (SELECT oid FROM pg_database WHERE datname = '{other.name}')"
        )
        ended(other, 10)
        # Others ended before the first database's long line did.
        assert member.execute("SELECT count(*) < 40 FROM sluice.history") == [(True,)]
        member.wait_for("SELECT count(*) = 40 FROM sluice.history", timeout=30)
        idle(cluster)
        other.execute("SELECT sluice.stop()")


def test_fewer_workers_than_databases_starve_nobody(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """The one worker takes turns, though the first database always has more to do."""
    configure(member, max_workers="1", worker_idle_timeout="0 s")
    lead()
    names = schedule(member, 20, "SELECT pg_sleep(0.15)")
    with cluster.database() as other:
        other.execute("SELECT sluice.start()")
        others = schedule(other, 1, "SELECT 1")
        run_now(member, names)
        member.wait_for("SELECT count(*) > 0 FROM sluice.queue() WHERE state = 'running'")
        run_now(other, others)
        ended(other, 1)
        assert member.execute("SELECT count(*) < 18 FROM sluice.history") == [(True,)]
        other.execute("SELECT sluice.stop()")


def test_serial_mode_runs_on_the_schedulers_session(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    configure(member, max_workers="0")
    lead()
    names = schedule(member, 3, "SELECT pg_sleep(0.05)")
    member.execute("CREATE TABLE base AS SELECT 1 AS x")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT x FROM base', '1s')")
    member.execute("CREATE MATERIALIZED VIEW mv AS SELECT x FROM base")
    member.execute("SELECT sluice.schedule_refresh('mv', '1s')")
    run_now(member, names)
    with sampled(cluster) as sample:

        def done() -> bool:
            sample.take()
            return member.execute("SELECT count(DISTINCT name) FROM sluice.history") == [(5,)]

        member.wait_for(done)
    assert (sample.slots, sample.sessions) == (0, 0)
    assert sample.running <= 1
    assert member.execute("SELECT DISTINCT outcome FROM sluice.history WHERE kind = 'job'") == [
        ("succeeded",)
    ]
    (pids,) = member.execute("SELECT array_agg(DISTINCT pid) FROM sluice.history")[0]
    assert cluster.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pg_sluice scheduler%'"
    ) == [(pids[0],)]
    assert len(pids) == 1
    assert [row[:2] for row in member.execute("SELECT * FROM sluice.workers()")] == []


def test_limit_is_lowered_while_runs_go_on(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    """Runs in progress end as usual; from then on there are fewer."""
    configure(member, max_workers="4")
    names = schedule(member, 16, "SELECT pg_sleep(0.3)")
    run_now(member, names)
    member.wait_for("SELECT count(*) = 4 FROM sluice.queue() WHERE state = 'running'")
    configure(member, max_workers="1")
    cluster.wait_for("SELECT count(*) <= 1 FROM _sluice.slot")
    with sampled(cluster) as sample:

        def done() -> bool:
            sample.take()
            return member.execute("SELECT count(*) FROM sluice.history") == [(16,)]

        member.wait_for(done)
    assert (sample.slots, sample.running) == (1, 1)
    assert member.execute("SELECT DISTINCT outcome FROM sluice.history") == [("succeeded",)]


def test_limit_is_lowered_while_workers_are_idle(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    configure(member, max_workers="4", worker_idle_timeout="1 h")
    run_now(member, schedule(member, 4, "SELECT pg_sleep(2)"))
    cluster.wait_for("SELECT count(*) = 4 FROM _sluice.slot WHERE state = 'live'")
    ended(member, 4)
    configure(member, max_workers="1")
    cluster.wait_for("SELECT count(*) <= 1 FROM _sluice.slot")


@pytest.mark.parametrize("limit", ["0", "2"])
def test_mode_changes_under_the_queue(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], limit: str
) -> None:
    """From parallel to serial mode and back, with a queue: all runs end, each once."""
    configure(member, max_workers="2" if limit == "0" else "0")
    lead()
    names = schedule(member, 8, "SELECT pg_sleep(0.15)")
    run_now(member, names)
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    configure(member, max_workers=limit)
    ended(member, 8)
    idle(cluster)
    assert member.execute("SELECT outcome, count(*) FROM sluice.history GROUP BY 1") == [
        ("succeeded", 8)
    ]


def test_idle_worker_goes_after_its_timeout(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    configure(member, worker_idle_timeout="500 ms")
    run_now(member, schedule(member, 1, "SELECT 1"))
    ended(member, 1)
    cluster.wait_for(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice worker%')"
        " AND NOT EXISTS (SELECT FROM _sluice.slot)",
    )
    assert member.execute(
        "SELECT clock_timestamp() - max(ended_at) > interval '500 ms' FROM sluice.history"
    ) == [(True,)]


def test_worker_killed_in_a_run(cluster: Cluster, member: Database, leader: Leader) -> None:
    member.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
    member.execute("CREATE TABLE tries (at timestamptz DEFAULT clock_timestamp())")
    member.execute("CREATE SEQUENCE s")
    (name,) = schedule(
        member,
        1,
        "INSERT INTO tries DEFAULT VALUES; SELECT CASE nextval('s') WHEN 1 THEN pg_sleep(60) END",
    )
    run_now(member, [name])
    member.wait_for("SELECT last_value = 1 AND is_called FROM s")
    assert member.execute(
        "SELECT pg_terminate_backend(pid) FROM sluice.workers() WHERE name IS NOT NULL"
    ) == [(True,)]
    ended(member, 2)
    first, second = member.execute(
        "SELECT outcome, sqlstate, attempt, due_at, reason FROM sluice.history ORDER BY started_at"
    )
    assert first[0] in ("worker_crashed", "connection_lost")
    assert first[1:3] == ("57P01", 1)
    assert second[0] == "succeeded"
    assert second[2:4] == (2, first[3])
    # The first attempt left nothing behind.
    assert member.execute("SELECT count(*) FROM tries") == [(1,)]
    idle(cluster)
    cluster.wait_for(
        "SELECT NOT EXISTS (SELECT FROM _sluice.slot AS s WHERE NOT EXISTS"
        " (SELECT FROM pg_stat_activity AS a WHERE a.pid = s.pid))"
    )


def test_idle_worker_killed_costs_no_attempt(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    """Nothing ran on it, so nothing has failed."""
    configure(member, worker_idle_timeout="1 h", max_workers="1")
    (name,) = schedule(member, 1, "SELECT 1")
    run_now(member, [name])
    ended(member, 1)
    assert cluster.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice worker%'"
    ) == [(1,)]
    cluster.wait_for(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice worker%')"
    )
    run_now(member, [name])
    ended(member, 2)
    assert member.execute("SELECT outcome, attempt FROM sluice.history ORDER BY started_at") == [
        ("succeeded", 1),
        ("succeeded", 1),
    ]
    idle(cluster)


def test_slot_of_a_killed_idle_worker_is_freed(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    configure(member, worker_idle_timeout="1 h", max_workers="1")
    run_now(member, schedule(member, 1, "SELECT 1"))
    ended(member, 1)
    cluster.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice worker%'"
    )
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.slot")


def test_all_workers_killed_at_once(cluster: Cluster, member: Database, leader: Leader) -> None:
    member.execute("SELECT sluice.configure('retry_backoff_base', '100 ms')")
    configure(member, max_workers="4")
    member.execute("CREATE TABLE done (name text)")
    names = [f"job_{n}" for n in range(8)]
    for name in names:
        member.execute(
            "SELECT sluice.schedule(%s, 'manual', %s)",
            [name, f"INSERT INTO done VALUES ('{name}'); SELECT pg_sleep(0.3)"],
        )
    run_now(member, names)
    member.wait_for("SELECT count(*) = 4 FROM sluice.queue() WHERE state = 'running'")
    cluster.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice worker%'"
    )
    member.wait_for("SELECT count(*) = 8 FROM sluice.history WHERE outcome = 'succeeded'")
    idle(cluster)
    assert member.execute("SELECT count(*), count(DISTINCT name) FROM done") == [(8, 8)]
    assert member.execute("SELECT max(attempt) FROM sluice.history") == [(2,)]


def test_scheduler_killed(cluster: Cluster, member: Database, leader: Leader) -> None:
    """It is made again at once, which is no failure, and others never notice."""
    with cluster.database() as other:
        other.execute("SELECT sluice.start()")
        for database in (member, other):
            database.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
            ended(database, 1)
        cluster.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pg_sluice scheduler%%' AND datname = %s",
            [member.name],
        )
        at = member.execute("SELECT clock_timestamp()")[0][0]
        member.wait_for(f"SELECT count(*) > 1 FROM sluice.history WHERE started_at > '{at}'")
        assert member.execute(
            "SELECT state, error FROM sluice.databases() WHERE database = current_database()"
        ) == [("scheduled", None)]
        assert cluster.execute("SELECT count(*) FROM sluice.alerts") == [(0,)]
        late = other.execute(
            "SELECT max(started_at - due_at) < interval '1 s' FROM sluice.history"
            " WHERE started_at > %s",
            [at],
        )
        assert late == [(True,)]
        assert leader.alive
        other.execute("SELECT sluice.stop()")


def test_run_now_is_noticed_at_once(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], workers: str
) -> None:
    """Though the next tick is a minute away."""
    configure(member, scheduler_interval="60 s", max_workers=workers)
    lead()
    member.wait_for("SELECT last_tick_at IS NOT NULL FROM sluice.databases()")
    (name,) = schedule(member, 1, "SELECT 1")
    member.wait_for(
        "SELECT count(*) = 1 FROM pg_stat_activity"
        " WHERE application_name LIKE 'pg_sluice scheduler%' AND state = 'idle'"
    )
    for number in (1, 2):
        run_now(member, [name])
        ended(member, number)


def test_new_node_and_resume_are_noticed_at_once(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], workers: str
) -> None:
    configure(member, scheduler_interval="60 s", max_workers=workers)
    lead()
    member.wait_for("SELECT last_tick_at IS NOT NULL FROM sluice.databases()")
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    ended(member, 2)
    assert member.execute("SELECT sluice.drain()") == [("drained",)]
    member.wait_for("SELECT count(*) = 1 FROM sluice.queue()")
    before = member.execute("SELECT count(*) FROM sluice.history")[0][0]
    member.execute("SELECT sluice.resume()")
    ended(member, before + 1)


def test_wake_up_outlives_a_change_of_owner_in_serial_mode(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """Cleaning the session for the next owner must not end what it listens to."""
    cluster.create_role("carol")
    member.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO carol")
    configure(member, max_workers="0", scheduler_interval="60 s")
    lead()
    with member.connect("carol") as connection:
        connection.execute("SELECT sluice.schedule('hers', 'manual', 'SELECT 1')")
    schedule(member, 1, "SELECT 1")
    run_now(member, ["hers", "job_0"])
    ended(member, 2)
    member.execute("SELECT sluice.schedule('new', '1s', 'SELECT 1')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history WHERE name = 'new'")


@contextmanager
def slow_connections(cluster: Cluster) -> Iterator[None]:
    """Every new session takes two seconds to come about."""
    cluster.configure({"post_auth_delay": 2})
    cluster.reload()
    try:
        yield
    finally:
        cluster.configure({"post_auth_delay": 0})
        cluster.reload()


def queued_runs(cluster: Cluster, member: Database, names: list[str]) -> str:
    """Queue runs that wait for the drain to end; gives the statement that ends it."""
    member.execute("SELECT sluice.drain()")
    run_now(member, names)
    return "SELECT _sluice.end_drain(db_oid) FROM _sluice.drain"


def test_worker_that_is_slow_to_start_keeps_its_reservation(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    resume = queued_runs(cluster, member, schedule(member, 2, "SELECT 1"))
    with cluster.connect() as control, slow_connections(cluster):
        control.execute(resume)
        cluster.wait_for(lambda: control.execute("SELECT state FROM _sluice.slot").fetchall() != [])
        assert control.execute("SELECT DISTINCT state FROM _sluice.slot").fetchall() == [
            ("reserved",)
        ]
    ended(member, 2)
    assert member.execute("SELECT outcome, max(attempt) FROM sluice.history GROUP BY 1") == [
        ("succeeded", 1)
    ]
    idle(cluster)


def test_worker_that_does_not_start_is_given_up(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    configure(member, worker_start_timeout="300 ms")
    resume = queued_runs(cluster, member, schedule(member, 2, "SELECT 1"))
    with cluster.connect() as control, slow_connections(cluster):
        control.execute(resume)
        cluster.wait_for(lambda: control.execute("SELECT FROM _sluice.slot").rowcount > 0)
        cluster.wait_for(lambda: control.execute("SELECT FROM _sluice.slot").rowcount == 0)
        assert control.execute("SELECT DISTINCT state FROM _sluice.queue").fetchall() == [
            ("queued",)
        ]
    ended(member, 2)
    assert member.execute("SELECT outcome, max(attempt) FROM sluice.history GROUP BY 1") == [
        ("succeeded", 1)
    ]
    idle(cluster)


def test_resume_uses_all_workers_at_once(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """However long the scheduler_interval is."""
    configure(member, scheduler_interval="60 s", max_workers="4")
    lead()
    resume = queued_runs(cluster, member, schedule(member, 8, "SELECT pg_sleep(1)"))
    cluster.execute(resume)
    cluster.wait_for("SELECT count(*) = 4 FROM _sluice.queue WHERE state = 'running'")
    ended(member, 8)


def test_load_leaves_nothing_behind(cluster: Cluster, member: Database, leader: Leader) -> None:
    """Failures, successes and skips: in the end the queue is empty and history has all of them."""
    member.execute("SELECT sluice.configure('max_consecutive_errors', '1')")
    bad = schedule(member, 5, "SELECT 1/0", "bad")
    good = schedule(member, 15, "SELECT 1", "good")
    run_now(member, bad + good)
    ended(member, 20)
    idle(cluster)
    assert member.execute("SELECT outcome, count(*) FROM sluice.history GROUP BY 1 ORDER BY 1") == [
        ("permanent_error", 5),
        ("succeeded", 15),
    ]
    rows: list[Any] = member.execute("SELECT queued, running FROM sluice.databases()")
    assert rows == [(0, 0)]
