"""Properties of the graph: order, depth, cycles, calculated schedules."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core.graph import Cycle, effective_schedules, places
from pg_sluice.core.schedule import Calculated, Manual, Schedule, parse

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODES = st.integers(0, 11)
GRAPHS = st.dictionaries(NODES, st.frozensets(NODES, max_size=4), max_size=12).map(
    # Every node that is read is a node.
    lambda graph: {
        node: graph.get(node, frozenset()) for node in set(graph).union(*graph.values() or [set()])
    }
)
# Each node reads only smaller ones.
ACYCLIC = GRAPHS.map(
    lambda graph: {node: frozenset(r for r in read if r < node) for node, read in graph.items()}
)


def has_cycle(graph: dict[int, frozenset[int]]) -> bool:
    """Takes away nodes that read nothing that is left, for as long as there are any."""
    left = dict(graph)
    while ready := [node for node, read in left.items() if not read & left.keys()]:
        for node in ready:
            del left[node]
    return bool(left)


@given(GRAPHS)
def test_cycle_is_found_and_its_path_is_real(graph: dict[int, frozenset[int]]) -> None:
    try:
        places(graph)
    except Cycle as found:
        path = found.path
        assert has_cycle(graph)
        assert path[0] == path[-1]
        assert len(path) > 1
        assert len(set(path[1:])) == len(path) - 1
        assert all(read in graph[node] for node, read in itertools.pairwise(path))
    else:
        assert not has_cycle(graph)


@given(ACYCLIC)
def test_order_is_topological(graph: dict[int, frozenset[int]]) -> None:
    placed = places(graph)
    assert placed.keys() == graph.keys()
    for node, read in graph.items():
        assert placed[node].upstream == tuple(sorted(read))
        assert placed[node].depth == max((placed[r].depth + 1 for r in read), default=0)


@given(ACYCLIC, st.data())
def test_calculated_follows_the_tightest_reader(
    graph: dict[int, frozenset[int]], data: st.DataObject
) -> None:
    schedules: dict[int, Schedule] = {}
    seconds: dict[int, int] = {}
    for node in graph:
        spec = data.draw(st.sampled_from(["calculated", "manual", "unreadable", 1, 5, 60, 3600]))
        if isinstance(spec, int):
            seconds[node] = spec
            schedules[node] = parse(f"{spec}s")
        elif spec != "unreadable":
            schedules[node] = parse(spec)
    resolved = effective_schedules(places(graph), schedules, NOW)
    assert resolved.keys() == {n for n, s in schedules.items() if isinstance(s, Calculated)}

    def tightest(node: int) -> int | None:
        """Seconds of the tightest interval among the readers, through calculated ones."""
        found = []
        for reader in (r for r, read in graph.items() if node in read):
            own = schedules.get(reader)
            found.append(tightest(reader) if isinstance(own, Calculated) else seconds.get(reader))
        return min((s for s in found if s is not None), default=None)

    for node, schedule in resolved.items():
        expected = tightest(node)
        assert schedule == (None if expected is None else parse(f"{expected}s"))


def test_self_reference_is_a_cycle() -> None:
    with pytest.raises(Cycle) as caught:
        places({7: {7}})
    assert caught.value.path == [7, 7]


def test_path_goes_the_way_that_nodes_read() -> None:
    with pytest.raises(Cycle) as caught:
        places({1: {2}, 2: {3}, 3: {1}, 4: {1}})
    path = caught.value.path
    assert len(path) == 4
    assert all((a, b) in {(1, 2), (2, 3), (3, 1)} for a, b in itertools.pairwise(path))


def test_long_chain() -> None:
    """No recursion: a chain is not limited by the stack."""
    length = 20_000
    placed = places({node: {node - 1} if node else set() for node in range(length)})
    assert placed[length - 1].depth == length - 1
    schedules: dict[int, Schedule] = dict.fromkeys(range(length), Calculated())
    schedules[length - 1] = parse("7s")
    resolved = effective_schedules(placed, schedules, NOW)
    assert resolved[0] == parse("7s")


def test_manual_readers_give_no_schedule() -> None:
    placed = places({1: set(), 2: {1}})
    assert effective_schedules(placed, {1: Calculated(), 2: Manual()}, NOW) == {1: None}
