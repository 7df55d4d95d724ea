"""The exposition: valid for every name, bounded in its labels, and nothing counted twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pg_sluice.core import metrics

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def server(*members: str, **given: Any) -> dict[str, Any]:
    return {
        "version": "1.2",
        "database": "control",
        "alerts": {"critical": 2},
        "leader": True,
        "epoch": 7,
        "worker_limit": 4,
        "slots": {"live": 3},
        "members": [
            {
                "database": name,
                "state": "scheduled",
                "failures": 0,
                "last_tick": 1.7e9,
                "tick_seconds": 0.01,
                "drain": False,
                "paused": 0,
            }
            for name in members
        ],
        "queue": [],
    } | given


def database(*nodes: dict[str, Any], name: str = "app") -> dict[str, Any]:
    return {
        "database": name,
        "alerts": {"warning": 1},
        "numbers": [{"kind": "job", "status": "active", "number": len(nodes)}],
        "nodes": list(nodes),
    }


def node(name: str, **given: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "job",
        "status": "active",
        "consecutive_errors": 1,
        "lag": 2.5,
        "last_success": 1.7e9,
        "runs": {"succeeded": 3, "no_change": 4},
        "run_seconds": 1.5,
        "rows_changed": 9,
    } | given


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples by name and labels, as Prometheus' own parser reads them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in series, "a series twice"
            series[labels] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name][tuple(sorted(labels.items()))]


def test_all_metrics_are_there() -> None:
    text = metrics.exposition(
        server("app", queue=[{"database": "app", "state": "queued", "depth": 5, "oldest": 60}]),
        {"app": database(node("n"))},
        0.25,
    )
    assert samples(text).keys() == metrics.METRICS.keys()
    assert value(text, "sluice_queue_depth", database="app", state="queued") == 5
    assert value(text, "sluice_queue_depth", database="app", state="running") == 0
    assert value(text, "sluice_queue_oldest_seconds", database="app") == 60
    assert value(text, "sluice_build_info", version="1.2") == 1
    assert [value(text, "sluice_slots", state=s) for s in ("free", "reserved", "live")] == [1, 0, 3]
    assert value(text, "sluice_alerts_open", database="app", severity="warning") == 1
    assert value(text, "sluice_alerts_open", database="app", severity="info") == 0
    assert value(text, "sluice_alerts_open", database="control", severity="critical") == 2
    runs = {"database": "app", "node": "n", "kind": "job"}
    assert value(text, "sluice_runs_total", **runs, outcome="no_change") == 4
    assert value(text, "sluice_run_seconds_total", **runs) == 1.5
    assert value(text, "sluice_rows_changed_total", **runs) == 9
    assert value(text, "sluice_node_status", **runs, status="active") == 1


def test_what_is_counted_is_a_counter() -> None:
    text = metrics.exposition(server("app"), {"app": database(node("n"))}, 0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name


@pytest.mark.parametrize("limit", [2, 3])
def test_no_slot_is_free_where_the_limit_was_lowered(limit: int) -> None:
    text = metrics.exposition(server(worker_limit=limit), {}, 0)
    assert value(text, "sluice_slots", state="free") == 0


@pytest.mark.parametrize("name", metrics.METRICS)
def test_names_follow_the_conventions(name: str) -> None:
    assert name.startswith("sluice_")
    metric = metrics.METRICS[name]
    assert metric.help.endswith(".")
    assert set(metric.labels) <= {
        "database", "node", "kind", "outcome", "state", "status", "severity", "version",
    }  # fmt: skip


@given(NAMES, NAMES)
def test_any_name_comes_back(database_name: str, node_name: str) -> None:
    text = metrics.exposition(
        server(database_name),
        {database_name: database(node(node_name), name=database_name)},
        0,
    )
    series = samples(text)["sluice_runs_total"]
    assert {dict(labels)["node"] for labels in series} == {node_name}
    assert {dict(labels)["database"] for labels in series} == {database_name}


def test_job_and_relation_of_one_name_have_series_of_their_own() -> None:
    both = database(node("public.t"), node("public.t", kind="matview"))
    text = metrics.exposition(server("app"), {"app": both}, 0)
    assert len(samples(text)["sluice_node_status"]) == 2


def test_a_database_that_is_not_reached_is_down_and_the_others_answer() -> None:
    text = metrics.exposition(server("a", "b"), {"a": None, "b": database(name="b")}, 0)
    assert value(text, "sluice_database_up", database="a") == 0
    assert value(text, "sluice_database_up", database="b") == 1
    assert value(text, "sluice_database_state", database="a", state="scheduled") == 1


def test_alerts_of_the_control_database_count_once() -> None:
    control = database(name="control") | {"alerts": {"critical": 2}}
    text = metrics.exposition(server("control"), {"control": control}, 0)
    assert value(text, "sluice_alerts_open", database="control", severity="critical") == 2


@given(st.integers(0, 5000))
def test_nodes_with_series_are_bounded(databases: int) -> None:
    limit = metrics.node_limit(databases)
    assert 1 <= limit <= metrics.NODES_OF_DATABASE
    assert limit * min(databases, metrics.DATABASES) <= metrics.NODES


def test_databases_beyond_the_bound_are_told_and_their_queue_is_counted() -> None:
    names = [f"db{number}" for number in range(metrics.DATABASES + 3)]
    queue = [{"database": name, "state": "queued", "depth": 2, "oldest": 9} for name in names[-4:]]
    text = metrics.exposition(server(*names, queue=queue), {}, 0)
    assert value(text, "sluice_databases_omitted") == 3
    assert value(text, "sluice_queue_depth", database="other", state="queued") == 6
    assert sum(samples(text)["sluice_queue_depth"].values()) == 8
    assert len(samples(text)["sluice_drain"]) == metrics.DATABASES


def test_only_what_is_queued_has_an_age() -> None:
    queue = [{"database": "a", "state": "running", "depth": 1, "oldest": 9}]
    text = metrics.exposition(server("a", "b", queue=queue), {}, 0)
    assert value(text, "sluice_queue_depth", database="a", state="running") == 1
    assert value(text, "sluice_queue_oldest_seconds", database="a") == 0
    assert value(text, "sluice_queue_oldest_seconds", database="b") == 0


def test_database_that_was_never_ticked_has_no_tick() -> None:
    given = server("app")
    given["members"][0] |= {"last_tick": None, "tick_seconds": None}
    found = samples(metrics.exposition(given, {}, 0))
    assert not found.keys() & {"sluice_last_tick_timestamp_seconds", "sluice_tick_seconds"}


def test_node_without_state_and_the_rest_of_the_nodes() -> None:
    fresh = node("fresh", lag=None, last_success=None, runs={}, run_seconds=0, rows_changed=0)
    rest = node("other", kind="other", status=None)
    text = metrics.exposition(server("app"), {"app": database(fresh, rest)}, 0)
    labels = {"database": "app", "node": "fresh", "kind": "job"}
    assert value(text, "sluice_runs_total", **labels, outcome="succeeded") == 0
    assert len(samples(text)["sluice_node_lag_seconds"]) == 1
    assert len(samples(text)["sluice_node_status"]) == 1
