"""Nodes wait for sources that are out of step, in serial and parallel mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster, Database, Leader

GROUP = "SELECT sluice.create_watermark_group('sales', '{orders,payments}', '1 min')"


@pytest.fixture
def sources(member: Database) -> Database:
    """Two sources, and a node of each kind that reads both."""
    member.execute("CREATE TABLE orders (n int); CREATE TABLE payments (n int)")
    member.execute(GROUP)
    member.execute(
        "SELECT sluice.create_stream_table('both_sources',"
        " 'SELECT n FROM orders UNION ALL SELECT n FROM payments', '1s', initialize => false)"
    )
    member.execute(
        "CREATE MATERIALIZED VIEW mv AS SELECT o.n FROM orders o, payments p WITH NO DATA"
    )
    member.execute("SELECT sluice.schedule_refresh('mv', '1s')")
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1', watermark_group => 'sales')")
    member.execute("SELECT sluice.create_stream_table('one', 'SELECT n FROM orders', '1s')")
    return member


def test_nodes_are_gated_until_their_sources_are_in_step(
    cluster: Cluster, sources: Database, lead: Callable[..., Leader], workers: str
) -> None:
    sources.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [workers])
    sources.execute("SELECT sluice.advance_watermark('orders', '2024-01-01 12:00+00')")
    lead()
    sources.wait_for(
        "SELECT count(DISTINCT name) = 3 FROM sluice.history"
        " WHERE outcome = 'skipped' AND reason = 'gated'"
    )
    assert sources.execute(
        "SELECT DISTINCT name FROM sluice.history WHERE outcome <> 'skipped'"
    ) in ([("public.one",)], [])
    with sources.connect(autocommit=False) as loader:
        loader.execute("INSERT INTO payments VALUES (7)")
        loader.execute("SELECT sluice.advance_watermark('payments', '2024-01-01 12:01+00')")
        loader.commit()
    sources.wait_for(
        "SELECT count(DISTINCT name) = 4 FROM sluice.history"
        " WHERE outcome IN ('succeeded', 'no_change')"
    )
    sources.wait_for("SELECT n = 7 FROM both_sources")
    assert sources.execute(
        "SELECT DISTINCT b.db_oid = d.oid, b.watermark = w.watermark"
        " FROM _sluice.baseline AS b JOIN _sluice.watermark AS w ON w.relid = b.relid"
        " JOIN pg_database AS d ON d.datname = current_database()"
    ) == [(True, True)]


def test_gated_node_runs_as_soon_as_sources_are_in_step(sources: Database, leader: Leader) -> None:
    """Long before its next fire."""
    sources.execute("SELECT sluice.schedule('late', '1 h', 'SELECT 1', watermark_group => 'sales')")
    sources.execute("UPDATE _sluice.node SET next_fire_at = now() WHERE job_name = 'late'")
    sources.wait_for("SELECT count(*) = 1 FROM sluice.history WHERE name = 'late'")
    for source in ("orders", "payments"):
        sources.execute("SELECT sluice.advance_watermark(%s, '2024-01-01')", [source])
    sources.wait_for(
        "SELECT count(*) = 1 FROM sluice.history WHERE name = 'late' AND outcome = 'succeeded'",
    )
    assert sources.execute(
        "SELECT count(DISTINCT due_at), array_agg(outcome ORDER BY started_at)"
        " FROM sluice.history WHERE name = 'late'"
    ) == [(1, ["skipped", "succeeded"])]


def test_groups_of_two_databases_are_apart(
    sources: Database, other: Database, leader: Leader
) -> None:
    """Equal names, equal pgt_ids: gated in one, running in the other."""
    other.execute("CREATE TABLE orders (n int); CREATE TABLE payments (n int)")
    other.execute(GROUP)
    other.execute(
        "SELECT sluice.create_stream_table('both_sources',"
        " 'SELECT n FROM orders UNION ALL SELECT n FROM payments', '1s')"
    )
    for source in ("orders", "payments"):
        other.execute("SELECT sluice.advance_watermark(%s, '2024-01-01')", [source])
    other.wait_for("SELECT count(*) > 1 FROM sluice.history WHERE outcome = 'no_change'")
    sources.wait_for("SELECT count(*) > 0 FROM sluice.history WHERE reason = 'gated'")
    assert other.execute("SELECT count(*) FROM sluice.history WHERE reason = 'gated'") == [(0,)]
    assert sources.execute(
        "SELECT count(*) FROM sluice.history"
        " WHERE name = 'public.both_sources' AND outcome <> 'skipped'"
    ) == [(0,)]
