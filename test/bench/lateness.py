"""How many fires run, and how late, when many nodes fire every second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain

from pgcron import every_second
from report import line, spread, type_of_line
from rig import Member, Window, create_sources, create_stream_tables, leader, members, observe

_WARM_UP_SECONDS = 3.0
_SECONDS = 20.0
_AFTERMATH_SECONDS = 2.0
"""For the last fires of the window to run."""

_DATABASES = 20
_NODES_EACH = 10

_FIRES = """
WITH fire AS (
    SELECT n.pgt_id, f.due_at
    FROM _sluice.node AS n
    CROSS JOIN LATERAL generate_series(
        date_bin(n.schedule::interval, to_timestamp(%(start)s), n.anchor) + n.schedule::interval,
        to_timestamp(%(end)s), n.schedule::interval
    ) AS f (due_at)
)
SELECT 1000 * extract(epoch FROM h.started_at - f.due_at)::double precision
FROM fire AS f
LEFT JOIN sluice.history AS h
    ON h.pgt_id = f.pgt_id AND h.due_at = f.due_at AND h.outcome IN ('succeeded', 'no_change')
"""


def lateness_100() -> Iterator[type_of_line]:
    """A hundred stream tables at '1s'."""
    yield _lateness("lateness_100", 100, "100 % of fires, p99 <= 100 ms")


def lateness_200() -> Iterator[type_of_line]:
    """Two hundred stream tables at '1s'."""
    yield _lateness("lateness_200", 200, ">= 99 % of fires")


def many_databases() -> Iterator[type_of_line]:
    """Twenty databases with ten stream tables each at '5s', on four workers."""
    with members(_DATABASES) as made:
        for member in made:
            create_sources(member)
            create_stream_tables(member, _NODES_EACH, "5s")
        with leader(made[0].cluster):
            time.sleep(_WARM_UP_SECONDS)
            window = observe(made[0].cluster, _SECONDS)
            time.sleep(_AFTERMATH_SECONDS)
        fires = list(chain.from_iterable(fires_of(member, window) for member in made))
    ran = [late for late in fires if late is not None]
    yield line(
        "many_databases",
        spread(ran)["p99"],
        "ms late, p99",
        target="<= 500 ms",
        lateness_ms=spread(ran),
        fires=len(fires),
        ran=len(ran),
        cpu_ms_per_run=window.cpu_ms_per_run(len(ran)),
    )


def _lateness(figure: str, nodes: int, target: str) -> type_of_line:
    with members() as (member,):
        create_sources(member)
        create_stream_tables(member, nodes, "1s")
        with leader(member.cluster):
            time.sleep(_WARM_UP_SECONDS)
            window = observe(member.cluster, _SECONDS)
            time.sleep(_AFTERMATH_SECONDS)
        fires = fires_of(member, window)
        ran = [late for late in fires if late is not None]
        return line(
            figure,
            100 * len(ran) / len(fires),
            "% of fires",
            target=target,
            compared_to=every_second(member, nodes, _SECONDS),
            lateness_ms=spread(ran),
            fires=len(fires),
            ran=len(ran),
            cpu_ms_per_run=window.cpu_ms_per_run(len(ran)),
        )


def fires_of(member: Member, window: Window) -> list[float | None]:
    """Every fire of the grids in the window: how late it started, in ms, or None."""
    found = member.execute(_FIRES, {"start": window.started_at, "end": window.ended_at})
    return [row[0] for row in found]
