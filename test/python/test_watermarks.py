"""Nodes wait for sources that are out of step, in serial and parallel mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runs import configure, ended, run_now, schedule

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


@pytest.mark.parametrize("max_workers", ["4", "0"])
@pytest.mark.parametrize(
    "held",
    [
        # One has the node's state in its hands, the other the node.
        "SELECT sluice.refresh_stream_table('both_sources')",
        "SELECT sluice.alter_stream_table('both_sources', priority => 1)",
    ],
)
def test_gated_node_in_an_open_transaction_holds_nobody_up(
    cluster: Cluster, sources: Database, lead: Callable[..., Leader], held: str, max_workers: str
) -> None:
    """1. Nodes are gated. 2. A user's transaction has one. 3. The sources come into step. 4. The
    others run, also those that were gated. 5. It does when the transaction is over."""
    configure(sources, max_workers=max_workers)
    lead()
    gated = "SELECT count(DISTINCT name) = 3 FROM sluice.history WHERE reason = 'gated'"
    sources.wait_for(gated)
    with sources.connect(autocommit=False) as user:
        user.execute(held)
        for source in ("orders", "payments"):
            sources.execute("SELECT sluice.advance_watermark(%s, '2024-01-01')", [source])
        sources.wait_for(
            "SELECT count(*) > 5 FROM sluice.history WHERE name = 'job' AND outcome = 'succeeded'",
            timeout=15,
        )
        assert cluster.execute("SELECT state, failures FROM sluice.databases()") == [
            ("scheduled", 0)
        ]
        user.rollback()
    sources.wait_for(
        "SELECT count(*) > 0 FROM sluice.history"
        " WHERE name = 'public.both_sources' AND outcome = 'no_change' AND reason = 'retry'"
    )


@pytest.mark.parametrize("max_workers", ["1", "0"])
def test_gated_job_at_top_level_waits_no_longer_than_its_lock_timeout(
    cluster: Cluster, sources: Database, lead: Callable[..., Leader], max_workers: str
) -> None:
    """1. A user's transaction has it. 2. Its next fire is to be gated. 3. That is an attempt that
    fails, and gives its worker back."""
    configure(
        sources, max_workers=max_workers, lock_timeout="300 ms", retry_backoff_base="1 h",
        retry_backoff_cap="1 h",
    )  # fmt: skip
    schedule(sources, "VACUUM orders", "vacuum", transactional=False, watermark_group="sales")
    lead()
    assert ended(sources, run_now(sources, "vacuum"))["reason"] == "gated"
    with sources.connect(autocommit=False) as user:
        user.execute("SELECT sluice.reset('vacuum')")
        run_id = run_now(sources, "vacuum")
        cluster.wait_for(
            "SELECT count(*) = 0 FROM _sluice.queue WHERE name = 'vacuum' AND state = 'queued'"
        )
        assert sources.execute("SELECT sluice.drain('20 s')") == [("drained",)]
    assert ended(sources, run_id)["outcome"] == "lock_timeout"
