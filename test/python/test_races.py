"""Drain against everything that starts runs, all of it at once."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader
from runs import configure

INTERVAL_SECONDS = 0.1
INTERVALS = 2
FEEDERS = 8
JOBS = [f"job_{n}" for n in range(8)]
TOP_LEVEL = "top_level"
STREAM_TABLE = "public.runs_by_name"
NODES = (*JOBS, TOP_LEVEL, STREAM_TABLE)
BY_HAND = "public.refreshed_by_hand"

RUNNING = """
SELECT format('run of %s by the queue', q.name) FROM _sluice.queue AS q WHERE q.state = 'running'
UNION ALL
SELECT format('lock of node %s held by %s', l.objid, a.application_name)
FROM pg_locks AS l
JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.classid = _sluice.lock_class('node')::oid AND l.granted
    -- A refresh by hand takes it before it is refused.
    AND a.application_name LIKE 'pg_sluice%'
UNION ALL
SELECT format('%s executes %s', a.application_name, a.query)
FROM pg_stat_activity AS a
WHERE a.application_name SIMILAR TO 'pg_sluice (worker|job) %' AND a.state <> 'idle'
    -- What a new worker asks before it claims anything.
    AND a.query NOT LIKE '%pg_stat_activity%'
"""


class Feeders:
    """Sessions that keep all nodes due, by the schedule and by run_now(), and one that refreshes a
    stream table by hand.
    """

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._chance = random.Random(seed)  # noqa: S311 - load, no secret
        self._over = threading.Event()
        self.done: Counter[str] = Counter()
        self.errors: list[psycopg.Error] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=[action], daemon=True)
            for action in (*[self._feed] * FEEDERS, self._refresh)
        ]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _repeat(self, action: Callable[[psycopg.Connection[Any]], None]) -> None:
        try:
            with self._database.connect() as connection:
                # Much faster than the scheduler looks; at full speed they would starve it.
                while not self._over.wait(0.02):
                    action(connection)
        except psycopg.Error as error:
            self.errors.append(error)

    def _feed(self, connection: psycopg.Connection[Any]) -> None:
        if self._chance.random() < 0.02:
            # While the node runs it is an error.
            with suppress(psycopg.errors.ObjectInUse):
                connection.execute("SELECT sluice.run_now(%s)", [self._chance.choice(NODES)])
                self.done["run_now"] += 1
        else:
            connection.execute(
                "UPDATE _sluice.node SET next_fire_at = clock_timestamp()"
                f" WHERE pgt_id = {self._chance.randint(1, len(NODES))}; NOTIFY sluice_wake"
            )
            self.done["due"] += 1

    def _refresh(self, connection: psycopg.Connection[Any]) -> None:
        try:
            connection.execute("SELECT sluice.refresh_stream_table(%s)", [BY_HAND])
            self.done["refreshed"] += 1
        except psycopg.errors.ObjectNotInPrerequisiteState:
            self.done["refused"] += 1


@pytest.fixture
def overtaken(cluster: Cluster) -> Iterator[Callable[[], list[Any]]]:
    """Claims that were under way when a drain was requested: it has to wait for them.

    They are made so slow that there often is one. Few drains would give the wrong answer without
    that wait, since mostly another run is in progress.
    """
    cluster.execute("CREATE TABLE public.overtaken (name text)")
    cluster.execute(
        """
        CREATE FUNCTION public.be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep(random() * 0.02);
            INSERT INTO public.overtaken
            SELECT NEW.name FROM _sluice.drain AS d WHERE d.db_oid IN (0, NEW.db_oid);
            RETURN NEW;
        END $$
        """
    )
    cluster.execute(
        "CREATE TRIGGER be_slow BEFORE UPDATE ON _sluice.queue"
        " FOR EACH ROW WHEN (NEW.state = 'running') EXECUTE FUNCTION public.be_slow()"
    )
    yield lambda: cluster.execute("TABLE public.overtaken")
    cluster.execute("DROP FUNCTION public.be_slow() CASCADE")
    cluster.execute("DROP TABLE public.overtaken")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("workers", "cycles"), [(4, 120), (0, 80)], ids=["workers", "serial"])
def test_nothing_runs_from_drained_to_resume_while_everything_is_due(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    overtaken: Callable[[], list[Any]],
    workers: int,
    cycles: int,
) -> None:
    """1. Runs start as fast as they can. 2. A drain is answered. 3. Nothing runs, while the
    scheduler ticks on and has queued all nodes. 4. After resume() runs start again.
    """
    chance = random.Random(seed := time.time_ns())  # noqa: S311 - load, no secret
    print(f"seed {seed}")
    configure(cluster, scheduler_interval=f"{INTERVAL_SECONDS} s", max_workers=str(workers))
    # What the jobs write is a second record, in which the scheduler has no part.
    member.execute("CREATE TABLE ran (name text, at timestamptz)")
    for name in (*JOBS, TOP_LEVEL):
        member.execute(
            "SELECT sluice.schedule(%s, 'manual', %s, transactional => %s)",
            [name, f"INSERT INTO ran VALUES ('{name}', clock_timestamp())", name != TOP_LEVEL],
        )
    for name in (STREAM_TABLE, BY_HAND):
        member.execute(
            "SELECT sluice.create_stream_table(%s, %s, 'manual')",
            [name, "SELECT name, count(*) AS runs FROM ran GROUP BY name"],
        )
    leader = lead()
    feeders = Feeders(member, seed)
    drained: list[tuple[datetime, datetime]] = []
    began = now(member)
    with feeders.at_work(), cluster.connect() as control:
        for _ in range(cycles):
            wait_for_runs_since(member, began, chance.randint(1, 4))
            whole_server = chance.random() < 0.25
            answer, answered_at = member.execute(
                "SELECT d, clock_timestamp() FROM sluice.drain(cluster => %s) AS d", [whole_server]
            )[0]
            assert answer == "drained"
            watch(cluster, control)
            began = now(member)
            assert late(member, [(answered_at, began)]) == []
            drained.append((answered_at, began))
            member.execute("SELECT sluice.resume(cluster => %s)", [whole_server])
        wait_for_runs_since(member, began, 1)
    assert feeders.errors == []
    assert feeders.done.keys() == {"due", "run_now", "refreshed", "refused"}
    assert leader.alive
    assert overtaken() == []
    # Once more, for what was under way all the while and told of itself only afterwards.
    assert late(member, drained) == []
    assert len(drained) == cycles
    runs: Counter[str] = Counter()
    for mode, outcome, count in member.execute(
        "SELECT mode, outcome, count(*) FROM sluice.history"
        " WHERE reason IS DISTINCT FROM 'manual' GROUP BY 1, 2"
    ):
        assert outcome in ("succeeded", "no_change")
        runs[mode] += count
    assert runs.keys() == {"transactional", "top_level", "full"}
    assert min(runs.values()) >= 5
    assert runs.total() >= 2 * cycles


def now(database: Database) -> datetime:
    at = database.execute("SELECT clock_timestamp()")[0][0]
    assert isinstance(at, datetime)
    return at


def wait_for_runs_since(database: Database, at: datetime, count: int) -> None:
    database.wait_for(
        f"SELECT count(*) >= {count} FROM sluice.history"
        f" WHERE started_at > '{at}' AND reason IS DISTINCT FROM 'manual'",
        timeout=30,
    )


def watch(cluster: Cluster, control: psycopg.Connection[Any]) -> None:
    """Looks for what runs until some intervals are over, and as many ticks, and all is queued."""
    until = time.monotonic() + INTERVALS * INTERVAL_SECONDS
    ticks = set()

    def over() -> bool:
        assert control.execute(RUNNING).fetchall() == []
        ((ticked_at, queued),) = control.execute(
            "SELECT m.last_tick_at, (SELECT count(*) FROM _sluice.queue) FROM _sluice.member AS m"
        ).fetchall()
        ticks.add(ticked_at)
        return time.monotonic() > until and len(ticks) > INTERVALS and queued == len(NODES)

    cluster.wait_for(over, timeout=30)


def late(database: Database, drained: list[tuple[datetime, datetime]]) -> list[Any]:
    """What began or ended between an answer and the resume() after it."""
    answers, resumes = zip(*drained, strict=True)
    return database.execute(
        """
        SELECT r.what, r.at, d.answered_at
        FROM (
            SELECT 'began: ' || h.name, h.started_at FROM sluice.history AS h
            UNION ALL
            SELECT 'ended: ' || h.name, h.ended_at FROM sluice.history AS h
            UNION ALL
            SELECT 'wrote: ' || e.name, e.at FROM ran AS e
        ) AS r (what, at)
        JOIN unnest(%s::timestamptz[], %s::timestamptz[]) AS d (answered_at, resumed_at)
            ON r.at > d.answered_at AND r.at < d.resumed_at
        """,
        [list(answers), list(resumes)],
    )
