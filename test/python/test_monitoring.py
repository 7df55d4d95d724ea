"""What monitoring/ ships is valid, and asks only for what an exposition of a real server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from cluster import Database

DIRECTORY = Path(__file__).resolve().parents[2] / "monitoring"
# Those that Prometheus adds itself.
ADDED_METRICS = {"up": set[str]()}
ADDED_LABELS = {"instance", "job"}
VARIABLES = {"$__rate_interval": "5m"}
CHECKS = {
    "state": ("member_state_check", "queue_state_check", "slot_state_check"),
    "status": ("node_status_check",),
    "severity": ("alert_severity_check",),
    "outcome": ("history_outcome_check",),
}


def loaded(name: str) -> Any:
    text = (DIRECTORY / name).read_text("utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def rules() -> list[dict[str, Any]]:
    return [rule for group in loaded("rules.yml")["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    """All that is asked of Prometheus."""
    yield from (rule["expr"] for rule in rules())
    for panel in loaded("grafana.json")["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield expression
    for variable in loaded("grafana.json")["templating"]["list"]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        if variable["type"] == "query":
            assert found
            yield f"sum by ({found[2]}) ({found[1]})"


def nodes(expression: str, kind: type) -> list[Any]:
    """The parts of that kind of an expression, which must be valid."""
    found: list[Any] = []
    promql.walk(promql.parse(expression), lambda part: found.append(part))
    return [part for part in found if isinstance(part, kind)]


@pytest.fixture
def labels(member: Database) -> dict[str, set[str]]:
    """The labels of each metric of a database with a stream table that has run."""
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    member.execute("SELECT sluice.refresh_stream_table('st')")
    member.cluster.execute("UPDATE _sluice.member SET last_tick_at = now(), last_tick_ms = 1")
    ((text,),) = member.execute("SELECT sluice.metrics()")
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def values(member: Database) -> dict[str, set[str]]:
    """What the labels with few values can be, by the constraints of the tables."""
    found = {
        label: {
            value
            for check in checks
            for (text,) in member.execute(
                "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = %s", [check]
            )
            for value in re.findall(r"'(\w+)'", text)
        }
        for label, checks in CHECKS.items()
    }
    assert all(found.values())
    found["state"].add("free")
    found["status"].add("needs_init")
    return found


def test_expressions_ask_for_what_there_is(
    labels: dict[str, set[str]], values: dict[str, set[str]]
) -> None:
    known = labels | ADDED_METRICS
    asked = set()
    for expression in expressions():
        for selector in nodes(expression, promql.VectorSelector):
            assert selector.name in known, expression
            asked.add(selector.name)
            for matcher in selector.matchers.matchers:
                assert matcher.name in known[selector.name] | ADDED_LABELS, expression
                if matcher.name in values:
                    assert set(matcher.value.split("|")) <= values[matcher.name], expression
    # Each is of use for something.
    assert asked >= labels.keys() - {
        "sluice_database_failures",
        "sluice_node_status",
        "sluice_node_last_success_timestamp_seconds",
    }


def test_rates_are_of_counters() -> None:
    for expression in expressions():
        for call in nodes(expression, promql.Call):
            if call.func.name in ("rate", "increase"):
                (selector,) = nodes(str(call), promql.VectorSelector)
                assert selector.name.endswith("_total"), expression


def test_groups_are_by_labels_that_there_are(labels: dict[str, set[str]]) -> None:
    for expression in expressions():
        for aggregate in nodes(expression, promql.AggregateExpr):
            grouped = set(aggregate.modifier.labels) if aggregate.modifier else set()
            found = {selector.name for selector in nodes(str(aggregate), promql.VectorSelector)}
            for name in found - ADDED_METRICS.keys():
                assert grouped <= labels[name] | ADDED_LABELS, expression


def test_rules_tell_what_to_do(labels: dict[str, set[str]]) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        known = labels | ADDED_METRICS
        first = nodes(rule["expr"], promql.VectorSelector)[0].name
        assert used <= known[first] | ADDED_LABELS, rule["alert"]


def test_scrape_configuration(member: Database) -> None:
    """It leaves time for a collection, and scrapes what the document has served."""
    configuration = loaded("prometheus.yml")
    (job,) = configuration["scrape_configs"]
    assert [(DIRECTORY / name).exists() for name in configuration["rule_files"]] == [True]
    assert any(f'job="{job["job_name"]}"' in rule["expr"] for rule in rules())
    ((timeout,),) = member.execute(
        'SELECT extract(epoch FROM "default"::interval)::int FROM sluice.settings'
        " WHERE name = 'metrics_timeout'"
    )
    assert (
        timeout
        < int(job["scrape_timeout"].removesuffix("s"))
        <= int(job["scrape_interval"].removesuffix("s"))
    )
    (target,) = job["static_configs"][0]["targets"]
    assert f"'metrics_listen', '{target}'" in (DIRECTORY.parent / "docs/monitoring.md").read_text()


def test_dashboard_fits_its_grid() -> None:
    dashboard = loaded("grafana.json")
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["title"]
        assert panel["description"].endswith(".")
        taken |= cells
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))
