"""How fast a drain answers, and how fast a call that waits heeds a cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg

from calls import Call
from cluster import Database
from report import line, progress, spread, type_of_line
from rig import Member, leader, members

_ROUNDS = 100
_FIRST_ROUNDS = 10
_RUN_ROUNDS = 10
_SIGNAL_ROUNDS = 10
_PHASE_SECONDS = 0.037
"""No multiple of the pause between two looks: each round comes at another moment of it."""

_WAITING = {
    "drain": "SELECT sluice.drain('5 min')",
    "pause": "SELECT sluice.pause('{st}', '5 min')",
    "refresh": "SELECT sluice.refresh_stream_table('st')",
}
_WAITS = {
    "drain": "SELECT count(*) = 1 FROM _sluice.drain_waiter",
    "pause": "SELECT count(*) = 1 FROM _sluice.pause_waiter",
    "refresh": "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted",
}


def drain_idle() -> Iterator[type_of_line]:
    """drain() of a database in which nothing runs: in a session that has called it before, and in
    new ones, which import the driver.
    """
    with members() as (member,), leader(member.cluster):
        first = []
        for _ in range(_FIRST_ROUNDS):
            with member.cluster.connect(member.name) as session:
                first.append(_drain(session))
        with member.cluster.connect(member.name) as session:
            _drain(session)
            warm = [_drain(session) for _ in range(_ROUNDS)]
    yield line(
        "drain_idle",
        spread(warm)["p99"],
        "ms, p99",
        target="< 50 ms",
        compared_to={"the first one in a session, ms": spread(first)["p50"]},
        milliseconds=spread(warm),
    )


def drain_run() -> Iterator[type_of_line]:
    """From the end of the one run in progress, as history has it, to the answer of drain()."""
    with members() as (member,), leader(member.cluster):
        member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(1)')")
        with member.cluster.connect(member.name) as session:
            _drain(session)
            late = [_drain_with_a_run(member, session) for _ in range(_RUN_ROUNDS)]
    yield line(
        "drain_run",
        max(late),
        "ms after the run's end, max",
        target="<= 100 ms",
        milliseconds=spread(late),
    )


def stop_reaction() -> Iterator[type_of_line]:
    """From pg_cancel_backend or pg_terminate_backend to the end of a call that waits."""
    with members() as (member,), leader(member.cluster), ExitStack() as stack:
        member.execute(
            "SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual',"
            " lock_timeout => '10 min')"
        )
        # What all of them wait for: a refresh whose transaction is open.
        holder = stack.enter_context(member.cluster.connect(member.name, autocommit=False))
        holder.execute("SELECT sluice.refresh_stream_table('st')")
        admin = stack.enter_context(member.cluster.connect())
        for signal in ("cancel", "terminate"):
            for call in _WAITING:
                progress(f"  {signal} {call}")
                took = [_reaction(member, admin, call, signal, n) for n in range(_SIGNAL_ROUNDS)]
                yield line(
                    f"stop_reaction_{signal}_{call}",
                    max(took),
                    "ms, max",
                    target="<= 200 ms",
                    milliseconds=spread(took),
                )


def _drain(session: psycopg.Connection[Any]) -> float:
    """The time of a drain() that is reached at once, in ms; it is resumed."""
    started = time.perf_counter()
    answer = session.execute("SELECT sluice.drain('1 min')").fetchone()
    took = 1000 * (time.perf_counter() - started)
    assert answer == ("drained",)
    session.execute("SELECT sluice.resume()")
    return took


def _drain_with_a_run(member: Member, session: psycopg.Connection[Any]) -> float:
    session.execute("SELECT sluice.run_now('job')")
    member.cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
    answer = session.execute("SELECT sluice.drain('1 min')").fetchone()
    answered_at = time.time()
    assert answer == ("drained",)
    session.execute("SELECT sluice.resume()")
    ((ended_at,),) = member.execute(
        "SELECT extract(epoch FROM max(ended_at))::double precision FROM sluice.history"
    )
    return float(1000 * (answered_at - ended_at))


def _reaction(
    member: Member, admin: psycopg.Connection[Any], call: str, signal: str, number: int
) -> float:
    database = Database(member.cluster, member.name)
    session = database.connect()
    # So that it has the driver.
    session.execute("SELECT sluice.is_drained()")
    waiting = Call(database, _WAITING[call], session)
    member.cluster.wait_for(_WAITS[call])
    time.sleep(number * _PHASE_SECONDS)
    started = time.perf_counter()
    admin.execute(f"SELECT pg_{signal}_backend(%s)", [waiting.pid])
    try:
        waiting.value()
    except psycopg.Error:
        return 1000 * (time.perf_counter() - started)
    raise RuntimeError(f"{call} was not ended by {signal}")
