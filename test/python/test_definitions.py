"""Definitions that several sessions change at once."""

import psycopg
import pytest

from cluster import Database


@pytest.fixture
def defined(database: Database) -> Database:
    """One with a stream table that reads a table, and a watermark group."""
    for table in ("base", "other"):
        database.execute(f"CREATE TABLE {table} (id integer)")
    database.execute("SELECT sluice.create_stream_table('first', 'SELECT id FROM base', 'manual')")
    database.execute("SELECT sluice.create_watermark_group('g', '{base,other}')")
    return database


@pytest.mark.parametrize(
    ("meanwhile", "late"),
    [
        (
            "create_stream_table('second', 'SELECT id FROM first', 'manual')",
            "alter_stream_table('first', query => 'SELECT id FROM second')",
        ),
        (
            "create_stream_table('second', 'SELECT id FROM first', 'manual')",
            "drop_stream_table('first')",
        ),
        (
            "drop_watermark_group('g')",
            "schedule('job', 'manual', 'SELECT 1', watermark_group => 'g')",
        ),
        (
            "schedule('job', 'manual', 'SELECT 1', watermark_group => 'g')",
            "drop_watermark_group('g')",
        ),
    ],
    ids=["cycle", "drop", "named_group", "dropped_group"],
)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_definition_from_a_snapshot_that_is_too_old(
    defined: Database, level: str, meanwhile: str, late: str
) -> None:
    """It would be checked against definitions that are no longer there."""
    with defined.connect(autocommit=False) as session:
        session.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        session.execute("SELECT FROM sluice.nodes")
        defined.execute(f"SELECT sluice.{meanwhile}")
        with pytest.raises(psycopg.errors.SerializationFailure):
            session.execute(f"SELECT sluice.{late}")
        session.rollback()
    # Definitions are as they were, and others can follow.
    defined.execute("SELECT sluice.create_stream_table('third', 'SELECT id FROM first', 'manual')")


def test_definitions_from_one_snapshot(defined: Database) -> None:
    """Also after a savepoint was rolled back."""
    with defined.connect(autocommit=False) as session:
        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        session.execute("SAVEPOINT s")
        session.execute("SELECT sluice.schedule('a', 'manual', 'SELECT 1')")
        session.execute("ROLLBACK TO s")
        session.execute("SELECT sluice.schedule('b', 'manual', 'SELECT 1')")
        session.execute("SELECT sluice.create_stream_table('c', 'SELECT id FROM first', 'manual')")
        session.commit()
    assert defined.execute("SELECT name FROM sluice.nodes ORDER BY pgt_id") == [
        ("public.first",),
        ("b",),
        ("public.c",),
    ]
