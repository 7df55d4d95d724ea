"""Whether upkeep of a long history keeps up, and what it costs those who are at work meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lateness import fires_of
from report import line, percentile, progress, rounded, spread, type_of_line
from rig import Member, create_sources, create_stream_tables, leader, members, observe
from throughput import fed, wait_for_workers

_ROWS = 10_000_000
_BATCH = 1_000_000
_NODES = 100
_ROUNDS = 3
_WARM_UP_SECONDS = 3.0
_SECONDS = 20.0
_AFTERMATH_SECONDS = 2.0
_TICK_SECONDS = 0.05
_TICK = "SELECT due, wait_seconds FROM _sluice.tick(1000, '{}')"
_FILL = """
INSERT INTO _sluice.history (
    run_id, pgt_id, name, kind, mode, outcome, attempt, due_at, started_at, ended_at, rows_changed,
    pid
)
SELECT gen_random_uuid(), 1 + g %% %s, 'public.stream', 'stream_table', 'full', 'no_change', 1,
    t, t, t, 0, 1
FROM generate_series(%s, %s) AS g
CROSS JOIN LATERAL (SELECT now() - interval '1 d' + g * interval '5 ms') AS x (t)
"""
_PROGRESS = """
SELECT u.deleted, s.n_tup_ins
FROM _sluice.upkeep AS u, pg_stat_all_tables AS s
WHERE u.task = 'history_age' AND s.relid = '_sluice.history'::regclass
"""


@dataclass
class Phases:
    """What was seen of one database in all of its phases."""

    member: Member
    tick_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    fires: int = 0


def upkeep() -> Iterator[type_of_line]:
    """A hundred stream tables at '1s', in turn in a database without a history and in one with ten
    million rows and a retention of a second; then runs as fast as they go in both.
    """
    with members(2) as (short, long):
        nodes = {}
        for member in (short, long):
            create_sources(member)
            nodes[member.name] = create_stream_tables(member, _NODES, "1s")
        _fill(long)
        long.execute("SELECT sluice.configure('history_retention', '1 s')")
        long.execute("SELECT sluice.stop()")
        backlog = [_ROWS]
        with leader(short.cluster):
            phases = [Phases(short), Phases(long)]
            for _ in range(_ROUNDS):
                for this, other in (phases, reversed(phases)):
                    _take_over(this.member, other.member)
                    _measure(this)
                    if this.member is long:
                        backlog.append(_ROWS - _progress(long)[0])
                        progress(f"  {backlog[-1]} rows wait")
            yield from _compared(*phases, backlog)
            saturated = []
            for this, other in ((short, long), (long, short)):
                _take_over(this, other)
                saturated.append(_saturate(this, nodes[this.name]))
        yield _full_load(*saturated)


def _fill(member: Member) -> None:
    for start in range(1, _ROWS, _BATCH):
        progress(f"  {start + _BATCH - 1} rows of history")
        member.execute(_FILL, [_NODES, start, start + _BATCH - 1])
    member.execute("VACUUM ANALYZE _sluice.history")
    member.execute("CHECKPOINT")


def _take_over(member: Member, other: Member) -> None:
    """Has the leader schedule the one and no longer the other."""
    member.execute("SELECT sluice.start()")
    other.execute("SELECT sluice.stop()")
    member.cluster.wait_for(
        f"SELECT state = 'scheduled' FROM _sluice.member WHERE db_oid = {member.oid}", timeout=20
    )
    time.sleep(_WARM_UP_SECONDS)


def _measure(phases: Phases) -> None:
    with _ticking(phases):
        window = observe(phases.member.cluster, _SECONDS)
    time.sleep(_AFTERMATH_SECONDS)
    found = fires_of(phases.member, window)
    phases.fires += len(found)
    phases.late_ms.extend(late for late in found if late is not None)


@contextmanager
def _ticking(phases: Phases) -> Iterator[None]:
    """Meanwhile times what a tick reads, from a session of its own."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(_TICK_SECONDS):
            started = time.perf_counter()
            connection.execute(_TICK)
            phases.tick_ms.append(1000 * (time.perf_counter() - started))

    with phases.member.cluster.connect(phases.member.name) as connection:
        thread = threading.Thread(target=tick)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _compared(short: Phases, long: Phases, backlog: list[int]) -> Iterator[type_of_line]:
    for figure, without, beside in (
        ("upkeep_tick", short.tick_ms, long.tick_ms),
        ("upkeep_lateness", short.late_ms, long.late_ms),
    ):
        yield line(
            figure,
            percentile(beside, 99) / percentile(without, 99),
            f"times, the p99 with {_ROWS} rows to delete",
            target="<= 2",
            ms_without=spread(without),
            ms_beside=spread(beside),
        )
    yield line(
        "upkeep_backlog",
        (backlog[0] - backlog[-1]) / (_ROUNDS * (_WARM_UP_SECONDS + _SECONDS + _AFTERMATH_SECONDS)),
        "rows/s less",
        target="> 0",
        backlog=backlog,
        fires={"without": short.fires, "beside": long.fires},
        ran={"without": len(short.late_ms), "beside": len(long.late_ms)},
    )


def _progress(member: Member) -> tuple[int, int]:
    """Rows deleted and rows written so far."""
    ((deleted, written),) = member.execute(_PROGRESS)
    return deleted, written


def _saturate(member: Member, nodes: list[int]) -> dict[str, Any]:
    """Rows written and deleted per second, and the change of the backlog every two seconds."""
    # What is queued here is not to meet what a tick queues.
    member.execute("UPDATE _sluice.node SET schedule = 'manual', next_fire_at = NULL")
    with fed(member, nodes):
        workers = wait_for_workers(member)
        time.sleep(_WARM_UP_SECONDS)
        seen = [(time.time(), *_progress(member))]
        while seen[-1][0] < seen[0][0] + _SECONDS:
            time.sleep(2)
            seen.append((time.time(), *_progress(member)))
    seconds = seen[-1][0] - seen[0][0]
    return {
        "written": (seen[-1][2] - seen[0][2]) / seconds,
        "deleted": (seen[-1][1] - seen[0][1]) / seconds,
        "change": [(w - seen[0][2]) - (d - seen[0][1]) for _, d, w in seen],
        "workers": workers,
    }


def _full_load(without: dict[str, Any], beside: dict[str, Any]) -> type_of_line:
    return line(
        "upkeep_full_load",
        beside["deleted"] / beside["written"],
        "rows deleted for each that is written",
        target="> 1",
        rows_per_second={what: rounded(beside[what]) for what in ("written", "deleted")},
        rows_per_second_without=rounded(without["written"]),
        change_of_backlog=beside["change"],
        workers=beside["workers"],
    )
