"""What the documents show is run here as it stands; docs/operations.md in test_operations.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from documents import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster


def run(connection: psycopg.Connection, document: str) -> list[list[tuple]]:
    """Runs all blocks; gives the rows of each statement that has any."""
    results = []
    for block in blocks(document):
        cursor = connection.execute(block.text)
        while True:
            if cursor.description:
                results.append(cursor.fetchall())
            if not cursor.nextset():
                break
    return results


@pytest.mark.timeout(120)
def test_the_tour_works_when_pasted(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(extensions=False)
    with cluster.connect("postgres") as connection:
        results = run(connection, "README.md")
        assert [("north", 1, 10), ("south", 2, 50)] in [sorted(rows) for rows in results]
        assert [("north", 110)] in results, "the stream table on top follows"
        assert [("drained",)] in results
        assert all(row[1] for rows in results for row in rows if row[0] == "control connection")
        assert connection.execute("SELECT count(*) FROM sluice.nodes").fetchone() == (0,)


def test_the_lines_that_grant_work(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster()
    with cluster.connect("postgres") as connection:
        for role in ("developers", "operators", "monitoring"):
            connection.execute(f"CREATE ROLE {role} LOGIN")
        run(connection, "docs/security.md")
        connection.execute("GRANT CREATE ON SCHEMA public TO developers")
    with cluster.connect("postgres", user="developers") as connection:
        connection.execute("SELECT sluice.create_stream_table('mine', 'SELECT 1 AS one')")
        connection.execute("SELECT sluice.refresh_stream_table('mine')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT sluice.drain()")
    with cluster.connect("postgres", user="operators") as connection:
        assert connection.execute("SELECT sluice.pause('{mine}')").fetchone() == ("paused",)
        assert connection.execute("SELECT sluice.drain()").fetchone() == ("drained",)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT sluice.refresh_stream_table('mine', force => true)")
    with cluster.connect("postgres", user="monitoring") as connection:
        for relation in ("nodes", "history", "alerts", "settings"):
            connection.execute(f"SELECT * FROM sluice.{relation}")
        for function in (
            "queue",
            "workers",
            "databases",
            "effective_limit",
            "health_check",
            "metrics",
        ):
            connection.execute(f"SELECT * FROM sluice.{function}()")
