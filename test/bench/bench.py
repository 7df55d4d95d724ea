"""Measures pg_sluice on throwaway clusters: one line of JSON on stdout for each figure.

    bench.py [FIGURE]...

runs all figures, or those that are named. Progress goes to stderr. A figure is a function in
FIGURES that makes its own cluster and yields lines; its name is its function's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from creation import create_cost
from deadlines import deadlines
from endpoint import idle_endpoint, scrape_cost, slow_clients
from idle import idle_leader, snapshot
from lateness import lateness_100, lateness_200, many_databases
from report import progress, publish, type_of_line
from slots import slot_cost
from stops import drain_idle, drain_run, stop_reaction
from throughput import noop_runs
from tick import tick_flat, upkeep_flat
from upkeep import upkeep

FIGURES: tuple[Callable[[], Iterator[type_of_line]], ...] = (
    lateness_100,
    lateness_200,
    many_databases,
    slot_cost,
    drain_idle,
    drain_run,
    stop_reaction,
    deadlines,
    noop_runs,
    tick_flat,
    upkeep_flat,
    upkeep,
    idle_leader,
    idle_endpoint,
    scrape_cost,
    slow_clients,
    snapshot,
    create_cost,
)


def main(names: list[str]) -> int:
    figures = {figure.__name__: figure for figure in FIGURES}
    if unknown := set(names) - figures.keys():
        progress(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(figures)}")
        return 2
    for name in names or figures:
        progress(name)
        started = time.monotonic()
        for line in figures[name]():
            publish(line)
        progress(f"  {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
