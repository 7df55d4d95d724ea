"""Whether what the scheduler does all the time costs what is due, or what exists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

import psycopg

from report import line, progress, rounded, type_of_line
from rig import Member, insert_jobs, members

_SIZES = (100, 1_000, 10_000)
_DUE = 10
_CALLS = 300
_TICK = "SELECT due, wait_seconds FROM _sluice.tick(1000, '{}')"

_HISTORY_ROWS = (1_000, 100_000)
_UPKEEP_CALLS = 5
_PURGE = "SELECT _sluice.purge_history_age(NULL, 500, 'infinity')"

type_of_medians = dict[int, float]
"""Milliseconds by the number of rows that exist."""


def tick_flat() -> Iterator[type_of_line]:
    """The time of a tick at three sizes, with an equal number due and with one in a hundred due."""
    with members(len(_SIZES)) as databases:
        by_size = dict(zip(_SIZES, databases, strict=True))
        equal = _ticks(by_size, dict.fromkeys(_SIZES, _DUE))
        share = _ticks(by_size, {size: size // 100 for size in _SIZES})
    yield _flatness("tick_flat", equal, "nodes", ms_1_percent_due=_rounded(share))


def upkeep_flat() -> Iterator[type_of_line]:
    """The time of an upkeep that finds nothing old in a short and in a long history."""
    with members(len(_HISTORY_ROWS)) as databases:
        by_size = dict(zip(_HISTORY_ROWS, databases, strict=True))
        for rows, member in by_size.items():
            _insert_history(member, rows)
        taken = _medians(by_size, _PURGE, _UPKEEP_CALLS)
    yield _flatness("upkeep_flat", taken, "history rows")


def _flatness(figure: str, taken: type_of_medians, what: str, **more: Any) -> type_of_line:
    small, large = min(taken), max(taken)
    return line(
        figure,
        taken[large] / taken[small],
        f"times, from {small} to {large} {what}",
        target="<= 2",
        ms=_rounded(taken),
        **more,
    )


def _rounded(taken: type_of_medians) -> dict[str, float]:
    return {str(size): rounded(time_ms) for size, time_ms in taken.items()}


def _ticks(by_size: dict[int, Member], due: dict[int, int]) -> type_of_medians:
    for size, member in by_size.items():
        progress(f"  {size} nodes, {due[size]} due")
        member.execute("TRUNCATE _sluice.node CASCADE")
        insert_jobs(member, size, "@every 1h", due[size])
        ((found, _),) = member.execute(_TICK)
        assert len(found) == due[size]
    return _medians(by_size, _TICK, _CALLS)


def _insert_history(member: Member, rows: int) -> None:
    member.execute(
        """
        INSERT INTO _sluice.history (
            run_id, pgt_id, name, kind, outcome, attempt, due_at, started_at, ended_at
        )
        SELECT gen_random_uuid(), g %% 100, 'node', 'stream_table', 'no_change', 1, t, t, t
        FROM generate_series(1, %s) AS g
        CROSS JOIN LATERAL (SELECT now() - g * interval '1 s') AS x (t)
        """,
        [rows],
    )
    member.execute("VACUUM ANALYZE _sluice.history")


def _medians(by_size: dict[int, Member], query: str, calls: int) -> type_of_medians:
    """The median time of a statement, called in the databases in turn so that all meet the same."""
    with ExitStack() as stack:
        connections = {
            size: stack.enter_context(member.cluster.connect(member.name))
            for size, member in by_size.items()
        }
        taken: dict[int, list[float]] = {size: [] for size in by_size}
        for _ in range(calls):
            for size, connection in connections.items():
                taken[size].append(_ms(connection, query))
    return {size: median(times) for size, times in taken.items()}


def _ms(connection: psycopg.Connection[Any], query: str) -> float:
    started = time.perf_counter()
    connection.execute(query)
    return 1000 * (time.perf_counter() - started)
