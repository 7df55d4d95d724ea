"""Calls that are cancelled, killed or left by their client at any moment leave nothing behind."""

import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, cycle, product
from typing import Any

import psycopg
import pytest
from psycopg import pq

from calls import a_run_in_progress
from cluster import Cluster, Database, Leader

ROUNDS = 100
KINDS = ("drain", "pause", "refresh")
WAYS = {"cancel": "cancelled", "terminate": "terminated", "vanish": "vanished"}
BEATS = [f"beat_{n}" for n in range(4)]

# A request that was reached outlives whoever made it.
REQUESTS = """
SELECT drained_at IS NOT NULL FROM _sluice.drain UNION ALL SELECT stays FROM _sluice.pause
"""
REQUESTS_IN_FORCE = """
SELECT drained_at IS NOT NULL FROM _sluice.drain_in_force
UNION ALL
SELECT p.stays FROM _sluice.pause AS p JOIN _sluice.pause_in_force USING (db_oid, pgt_id)
"""

CONTROL_SESSIONS = "SELECT FROM pg_stat_activity WHERE application_name = 'pg_sluice control'"

LEFTOVERS = """
SELECT 'drain' FROM _sluice.drain
UNION ALL SELECT 'waiter of a drain' FROM _sluice.drain_waiter
UNION ALL SELECT 'pause of ' || p.name FROM _sluice.pause AS p
UNION ALL SELECT 'waiter of a pause' FROM _sluice.pause_waiter
UNION ALL SELECT 'slot that is ' || s.state FROM _sluice.slot AS s
    WHERE s.state <> 'live' OR _sluice.slot_is_gone(s)
UNION ALL SELECT 'run of ' || q.name FROM _sluice.queue AS q WHERE q.state = 'running'
UNION ALL SELECT format('session %s, %s', a.application_name, a.state) FROM pg_stat_activity AS a
    WHERE a.application_name = 'pg_sluice control' OR a.state LIKE 'idle in transaction%'
UNION ALL SELECT format('lock %s %s of %s', l.classid, l.objid, l.pid) FROM pg_locks AS l
    WHERE l.locktype = 'advisory'
"""


class Call:
    """A statement under way on a session that is its own."""

    def __init__(
        self, session: psycopg.Connection[Any], statement: str, *, in_transaction: bool
    ) -> None:
        self._session = session
        self.pid = session.info.backend_pid
        self.sqlstate: bytes | None = None
        if in_transaction:
            session.execute("BEGIN")
        session.pgconn.send_query(statement.encode())

    @property
    def over(self) -> bool:
        try:
            self._session.pgconn.consume_input()
        except psycopg.OperationalError:
            return True
        return not self._session.pgconn.is_busy()

    def answer(self) -> str | None:
        """What the call gave; None where it ended with an error."""
        result = self._session.pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.TUPLES_OK:
            return (result.get_value(0, 0) or b"").decode()
        if result is not None:
            self.sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE)
        return None

    def vanish(self) -> None:
        """The client ends without a word."""
        with socket.socket(fileno=os.dup(self._session.pgconn.socket)) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._session.close()

    def give_back(self) -> None:
        """The session is free again."""
        while self._session.pgconn.get_result():
            pass
        self._session.rollback()


class Storm:
    """Rounds of one call each, under a run in progress (busy) or while runs come and go."""

    def __init__(
        self, cluster: Cluster, database: Database, chance: random.Random, *, busy: bool
    ) -> None:
        self._cluster = cluster
        self._database = database
        self._chance = chance
        self._busy = busy
        self._nodes = ["gate", BEATS[0]] if busy else BEATS[:2]
        self.ends: Counter[tuple[str, str]] = Counter()
        self.reached: Counter[tuple[str, str]] = Counter()
        """The calls among them that gave no answer though they had been reached."""

    def rage(self) -> None:
        kinds = list(product((True, False), WAYS, KINDS))
        with (
            sessions(self._database) as made,
            self._cluster.connect() as self._control,
            self._database.connect(autocommit=False) as self._holder,
        ):
            self._longest_wait = 1.5 * self._duration_of_a_call()
            session = next(made)
            for number in range(ROUNDS):
                self._round(number, session, *kinds[number % len(kinds)])
                if session.closed:
                    session = next(made)
            session.close()

    def _duration_of_a_call(self) -> float:
        durations = []
        for _ in range(3):
            started = time.monotonic()
            self._database.execute("SELECT sluice.drain('0 s')")
            durations.append(time.monotonic() - started)
            self._database.execute("SELECT sluice.resume()")
        return sorted(durations)[1]

    def _round(
        self, number: int, session: psycopg.Connection[Any], late: bool, way: str, kind: str
    ) -> None:
        whole_server = self._chance.random() < 0.5
        in_transaction = self._chance.random() < 0.5
        statement, answers, request = {
            "drain": (f"SELECT sluice.drain(cluster => {whole_server})", ["drained"], [(True,)]),
            "pause": (
                f"SELECT sluice.pause('{{{','.join(self._nodes)}}}')",
                ["paused"],
                [(True,)] * len(self._nodes),
            ),
            "refresh": (
                "SELECT sluice.refresh_stream_table('refreshed')",
                ["succeeded", "no_change"],
                [],
            ),
        }[kind]
        # Where nothing stays in progress a call can have been reached before it was interrupted.
        allowed = [[]] if self._busy else [[], request]
        if way == "vanish" and (kind == "refresh" or number % 4):
            # Otherwise the server notices when the waiting call gives its notice.
            session.execute("SET client_connection_check_interval = '50 ms'")
        if self._busy and kind == "refresh":
            self._holder.execute("SELECT sluice.refresh_stream_table('refreshed')")
        refreshes = self._refreshes()

        call = Call(session, statement, in_transaction=in_transaction)
        self._let_pass(call, late=late)
        answer = self._interrupt(call, way)
        how = WAYS[way] if answer is None else "answered"
        where = f"round {number}, {how}: {statement}"
        if answer is not None:
            assert answer in answers, where
            # What the leader does every moment: it must not take this one away.
            self._control.execute(
                "SELECT _sluice.end_abandoned_drains(), _sluice.end_abandoned_pauses()"
            )
            assert self._requests() == request, where
        else:
            if way == "cancel":
                assert call.sqlstate == b"57014", where
                assert self._refreshes() == refreshes, where
                assert (
                    self._rows(
                        f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = {call.pid}"
                    )
                    == []
                ), where
            # Its control session ends with it, or a moment later when there was no time to take the
            # request back; what that executes at the moment can still reach the request.
            self._wait_for_no_rows(CONTROL_SESSIONS)
            assert self._rows(REQUESTS_IN_FORCE) in allowed, where
        if kind == "drain":
            drained = True if self._rows(REQUESTS_IN_FORCE) else None
            assert self._database.execute(
                "SELECT sluice.is_drained(cluster => %s)", [whole_server]
            ) == [(drained,)], where
        if answer is None:
            self._cluster.wait_for(lambda: self._requests() in allowed)
            self.reached[kind, how] += self._requests() != []
        self._wait_for_no_rows(CONTROL_SESSIONS)
        self.ends[kind, how] += 1

        if way == "cancel":
            call.give_back()
        else:
            session.close()
        self._holder.rollback()
        if kind == "drain":
            self._database.execute("SELECT sluice.resume(cluster => %s)", [whole_server])
        elif kind == "pause":
            self._database.execute("SELECT sluice.unpause(%s)", [self._nodes])
        assert self._requests() == [], where

    def _let_pass(self, call: Call, *, late: bool) -> None:
        """Until any moment of the call or, late, until it waits for what stays in progress or else
        has its answer.
        """
        if not late:
            time.sleep(self._chance.uniform(0, self._longest_wait))
        elif self._busy:
            # A drain or pause waits under the name of its control session.
            self._wait_for_rows(
                "SELECT FROM pg_stat_activity AS a WHERE (a.pid, a.backend_start) IN ("
                " SELECT pid, backend_start FROM _sluice.drain_waiter"
                " UNION SELECT pid, backend_start FROM _sluice.pause_waiter"
                ") OR a.pid IN ("
                " SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                f" AND pid = {call.pid})"
            )
        else:
            self._cluster.wait_for(lambda: call.over)

    def _interrupt(self, call: Call, way: str) -> str | None:
        """Gives the answer that the call had all the same."""
        if way == "vanish":
            answer = call.answer() if call.over else None
            call.vanish()
        else:

            def interrupted() -> bool:
                # Again and again: before the call has begun to execute, a cancel is lost.
                self._control.execute(f"SELECT pg_{way}_backend({call.pid})")
                return call.over

            self._cluster.wait_for(interrupted)
            answer = call.answer()
        if way != "cancel":
            self._wait_for_no_rows(f"SELECT FROM pg_stat_activity WHERE pid = {call.pid}")
        return answer

    def _rows(self, query: str) -> list[Any]:
        return self._control.execute(query).fetchall()

    def _requests(self) -> list[Any]:
        return self._rows(REQUESTS)

    def _refreshes(self) -> Any:
        return self._database.execute(
            "SELECT count(*) FROM sluice.history WHERE name = 'public.refreshed'"
        )

    def _wait_for_rows(self, query: str) -> None:
        self._cluster.wait_for(lambda: self._rows(query))

    def _wait_for_no_rows(self, query: str) -> None:
        self._cluster.wait_for(lambda: not self._rows(query))


@contextmanager
def sessions(database: Database) -> Iterator[Iterator[psycopg.Connection[Any]]]:
    """Sessions made ahead. Most have imported the package, which is the longest part of a call."""

    def make(number: int) -> psycopg.Connection[Any]:
        session = database.connect()
        if number % 10:
            session.execute("SELECT FROM sluice.queue()")
        return session

    def take() -> Iterator[psycopg.Connection[Any]]:
        numbers = count()
        while True:
            while len(ahead) < 3:
                ahead.append(makers.submit(make, next(numbers)))
            yield ahead.popleft().result()

    ahead: deque[Future[psycopg.Connection[Any]]] = deque()
    with ThreadPoolExecutor(2) as makers:
        try:
            yield take()
        finally:
            for made in ahead:
                made.result().close()


@contextmanager
def runs_come_and_go(database: Database) -> Iterator[None]:
    """Short jobs that are due again soon after they have ended."""
    for name in BEATS:
        database.execute("SELECT sluice.schedule(%s, 'manual', 'SELECT pg_sleep(0.02)')", [name])
    over = threading.Event()

    def feed() -> None:
        with database.connect() as connection:
            for name in cycle(BEATS):
                connection.execute(
                    "UPDATE _sluice.node SET next_fire_at = clock_timestamp()"
                    f" WHERE job_name = '{name}'; NOTIFY sluice_wake"
                )
                if over.wait(0.01):
                    return

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        yield
    finally:
        over.set()
        feeder.join()


@pytest.mark.timeout(400)
def test_calls_interrupted_at_any_moment_leave_nothing(
    cluster: Cluster, member: Database, leader: Leader
) -> None:
    chance = random.Random(seed := time.time_ns())  # noqa: S311 - chaos, no secret
    print(f"seed {seed}")
    member.execute("SELECT sluice.create_stream_table('refreshed', 'SELECT 1 AS x', 'manual')")
    busy = Storm(cluster, member, chance, busy=True)
    idle = Storm(cluster, member, chance, busy=False)
    with runs_come_and_go(member):
        with a_run_in_progress(member):
            busy.rage()
            # So no drain and no pause of it was ever reached.
            assert member.execute("SELECT state FROM sluice.queue() WHERE name = 'gate'") == [
                ("running",)
            ]
        idle.rage()
    cluster.wait_for(lambda: cluster.execute(LEFTOVERS) == [])
    print(busy.ends, idle.ends, idle.reached)
    assert busy.ends.total() + idle.ends.total() == 2 * ROUNDS
    for kind, how in product(KINDS, WAYS.values()):
        assert busy.ends[kind, how] >= 10
    for kind in KINDS:
        assert idle.ends[kind, "answered"] >= 10
        assert sum(idle.ends[kind, how] for how in WAYS.values()) > 0
    for how in WAYS.values():
        assert sum(idle.ends[kind, how] for kind in KINDS) > 0
    assert leader.alive
    assert member.execute("SELECT DISTINCT outcome FROM sluice.history WHERE kind = 'job'") == [
        ("succeeded",)
    ]
    run_id = member.execute("SELECT sluice.run_now('gate')")[0][0]
    member.wait_for(f"SELECT true FROM sluice.history WHERE run_id = '{run_id}'")
