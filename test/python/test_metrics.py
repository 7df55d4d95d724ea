"""sluice.metrics() on real clusters: totals that survive, names in any encoding, the document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import Cluster, Database
from documents import blocks
from runs import configure, ended, run_now, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Leader

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
ODD = 'it\'s "odd" \\ a\nb'


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of an exposition by name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, "a series twice"
            found[key] = sample.value
    return found


def metrics(database: Database, name: str) -> dict[frozenset[tuple[str, str]], float]:
    """The series of a metric by labels."""
    ((text,),) = database.execute("SELECT sluice.metrics()")
    return {labels: value for (found, labels), value in series(text).items() if found == name}


def runs(database: Database) -> dict[tuple[str, str], float]:
    """sluice_runs_total by node and outcome, without the zeros."""
    return {
        (dict(labels)["node"], dict(labels)["outcome"]): value
        for labels, value in metrics(database, "sluice_runs_total").items()
        if value
    }


def test_totals_are_what_history_says_and_outlive_it(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    configure(member, retry_backoff_base="1 h", retry_backoff_cap="1 h")
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    schedule(member, "SELECT 1")
    schedule(member, "SELECT 1 / 0", "bad")
    schedule(member, "VACUUM", "vacuum", transactional=False)
    lead()
    for name in ("st", "job", "job", "bad", "vacuum"):
        ended(member, run_now(member, name))
    member.execute("SELECT sluice.refresh_stream_table('st')")
    expected = {
        (name, outcome): number
        for name, outcome, number in member.execute(
            "SELECT name, outcome, count(*) FROM sluice.history GROUP BY 1, 2"
        )
    }
    assert expected == {
        ("public.st", "no_change"): 2,
        ("job", "succeeded"): 2,
        ("bad", "permanent_error"): 1,
        ("vacuum", "succeeded"): 1,
    }
    assert runs(member) == expected
    member.execute("DELETE FROM _sluice.history")
    cluster.restart()
    assert runs(member) == expected


def test_queue_depth_is_the_number_of_rows(cluster: Cluster, member: Database) -> None:
    for number in range(5):
        schedule(member, "SELECT 1", f"job{number}")
        run_now(member, f"job{number}")
    depth = metrics(member, "sluice_queue_depth")
    assert depth[frozenset({("database", member.name), ("state", "queued")})] == 5
    assert [(sum(depth.values()),)] == cluster.execute("SELECT count(*) FROM _sluice.queue")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "UTF8"])
def test_any_name_in_any_encoding(
    cluster: Cluster, shared_state: None, database: Database, encoding: str
) -> None:
    name = f"in_{encoding.lower()}"
    beside = f"{ODD} Ж"
    quoted = beside.replace('"', '""')
    cluster.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        " TEMPLATE template0"
    )
    cluster.execute(f'CREATE DATABASE "{quoted}" TEMPLATE sluice_template')
    node = f"{ODD} é"
    try:
        with cluster.connect(name, client_encoding="UTF8") as connection:
            connection.execute("CREATE EXTENSION pg_sluice CASCADE")
            connection.execute("SELECT sluice.start()")
            connection.execute("SELECT sluice.schedule(%s, 'manual', 'SELECT 1')", [node])
        cluster.execute("SELECT sluice.start()", dbname=beside)
        with cluster.connect(name, client_encoding="UTF8") as connection:
            ((text,),) = connection.execute("SELECT sluice.metrics()").fetchall()
        found = series(text)
        assert {
            dict(labels)["node"] for metric, labels in found if metric == "sluice_node_status"
        } in ({node}, {node.replace("é", "&#233;")})
        databases = {
            dict(labels)["database"] for metric, labels in found if metric == "sluice_drain"
        }
        assert databases == {
            name,
            beside.replace("Ж", "&#1046;") if encoding == "LATIN1" else beside,
        }
    finally:
        cluster.execute(f"DROP DATABASE {name} WITH (FORCE)")
        cluster.execute(f'DROP DATABASE "{quoted}" WITH (FORCE)')


def test_what_the_document_shows_works(member: Database) -> None:
    for block in blocks("docs/monitoring.md"):
        member.execute(block.text)
    assert ("metrics_listen", "127.0.0.1:9188") in member.cluster.execute(
        "SELECT name, value FROM sluice.settings"
    )


def test_the_document_has_all_metrics_with_their_labels(member: Database) -> None:
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', 'manual')")
    member.execute("UPDATE _sluice.node_state SET last_success_at = now()")
    ((text,),) = member.execute("SELECT sluice.metrics()")
    described = {
        name: set(labels.replace(" ", "").split(",")) - {""}
        for name, labels in re.findall(
            r"^\| `(sluice_\w+)`(?: \| \w+) \|([\w, ]*)\|",
            DOCUMENT.read_text("utf-8"),
            re.MULTILINE,
        )
    }
    assert described.keys() == set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    for name, labels in series(text):
        assert {label for label, _ in labels} == described[name], name
