"""How nodes hang together: which come first, and which schedule a calculated node follows."""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from . import schedule
from .schedule import Calculated, Schedule


class Cycle(Exception):
    """Nodes read each other; `path` starts and ends with the same node, each reads the next."""

    def __init__(self, path: list[int]) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True)
class Place:
    """A node's place in the graph."""

    depth: int
    """0 for a node that reads no other; otherwise one more than the deepest it reads."""
    upstream: tuple[int, ...]


def places(upstream: Mapping[int, Collection[int]]) -> dict[int, Place]:
    """The place of every node, given the nodes that each one reads. Raises Cycle."""
    sorter = graphlib.TopologicalSorter(upstream)
    try:
        order = tuple(sorter.static_order())
    except graphlib.CycleError as error:
        # graphlib lists each node before the one that reads it.
        raise Cycle(list(reversed(error.args[1]))) from None
    placed: dict[int, Place] = {}
    for node in order:
        read = sorted(upstream.get(node, ()))
        depth = 1 + max((placed[other].depth for other in read), default=-1)
        placed[node] = Place(depth, tuple(read))
    return placed


def effective_schedules(
    placed: Mapping[int, Place], schedules: Mapping[int, Schedule], now: datetime
) -> dict[int, Schedule | None]:
    """For every calculated node the tightest schedule of the nodes that read it, or None.

    Nodes without a readable schedule are absent from `schedules` and count for nothing.
    """
    downstream: dict[int, list[int]] = {node: [] for node in placed}
    for node, place in placed.items():
        for read in place.upstream:
            downstream[read].append(node)
    resolved: dict[int, Schedule | None] = {}
    for node in sorted(placed, key=lambda n: placed[n].depth, reverse=True):
        if not isinstance(schedules.get(node), Calculated):
            continue
        candidates = (resolved.get(reader, schedules.get(reader)) for reader in downstream[node])
        resolved[node] = schedule.tightest(
            (candidate for candidate in candidates if candidate is not None), now, now
        )
    return resolved
