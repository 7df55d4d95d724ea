"""Whether the demo came out right, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import sql

from flights import DAYS, MATVIEW, STREAM_TABLES, Feed, Member

STREAM_TABLE_QUERY = "SELECT value FROM sluice.explain_stream_table(%s) WHERE property = 'query'"

DIFFERENCE = """
    SELECT (SELECT count(*) FROM {table}),
           (SELECT count(*) FROM (({query}) EXCEPT ALL SELECT * FROM {table}) AS missing),
           (SELECT count(*) FROM (SELECT * FROM {table} EXCEPT ALL ({query})) AS surplus)
"""

FAILED = """
    SELECT name, outcome, coalesce(sqlstate, '') AS sqlstate, coalesce(message, '') AS message
      FROM sluice.history
     WHERE outcome NOT IN ('succeeded', 'no_change', 'skipped')
     ORDER BY started_at
"""

FIGURES = """
    SELECT current_database(), kind, count(*),
           count(*) FILTER (WHERE outcome = 'succeeded'),
           count(*) FILTER (WHERE outcome = 'no_change'),
           count(*) FILTER (WHERE outcome NOT IN ('succeeded', 'no_change')),
           sum(rows_changed)::bigint,
           percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (
               ORDER BY extract(epoch FROM started_at - due_at)::float * 1000
           ) FILTER (WHERE due_at >= %(since)s),
           percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (
               ORDER BY extract(epoch FROM ended_at - started_at)::float * 1000
           ) FILTER (WHERE due_at >= %(since)s)
      FROM sluice.history
     GROUP BY kind
     ORDER BY kind DESC
"""


@dataclass(frozen=True)
class Comparison:
    """A stream table or materialized view against its query, as bags of rows."""

    database: str
    name: str
    rows: int
    missing: int
    surplus: int


def compare(member: Member) -> list[Comparison]:
    """Compare everything that the scheduler kept up to date with what its query gives now."""
    compared = [
        _compare(member, table.name, _one(member, STREAM_TABLE_QUERY, table.name))
        for table in STREAM_TABLES
    ]
    matview_query = _one(member, "SELECT rtrim(pg_get_viewdef(%s::regclass), ';')", MATVIEW)
    return [*compared, _compare(member, MATVIEW, matview_query)]


def problems(
    members: Sequence[Member], comparisons: Sequence[Comparison], drained_at: datetime
) -> Iterator[str]:
    """Everything that is not as it must be, one sentence each."""
    for compared in comparisons:
        if compared.missing or compared.surplus:
            yield (
                f"{compared.database}.{compared.name} differs from its query:"
                f" {compared.missing} rows are missing, {compared.surplus} are too many"
            )
    for member in members:
        if not _one(member, "SELECT count(*) FROM sluice.history"):
            yield f"nothing has run in {member.name}"
        for name, outcome, sqlstate, message in member.connection.execute(FAILED):
            yield f"{member.name}.{name}: a run ended with {outcome} {sqlstate} {message}".rstrip()
        if late := _one(
            member, "SELECT count(*) FROM sluice.history WHERE started_at > %s", drained_at
        ):
            yield f"{late} runs started in {member.name} after the drain"
        if left := _one(member, "SELECT count(*) FROM flights_to_come"):
            yield f"{left} flights in {member.name} have arrived and were not forgotten"


def report(
    members: Sequence[Member], comparisons: Sequence[Comparison], feed: Feed, since: datetime
) -> Iterator[str]:
    """The figures, line by line. Times are those of the runs that were due after `since`."""
    yield f"{feed.flights:,} flights arrived on {feed.day} of {DAYS} days"
    yield ""
    yield "(late: ms from due to started; took: ms; both median/99th percentile)"
    row = "{:<9}{:<13}{:>5}{:>10}{:>10}{:>6}{:>8}{:>9}{:>9}"
    yield row.format(
        "database", "kind", "runs", "succeeded", "no change", "other", "rows", "late", "took"
    )
    for member in members:
        for database, kind, *numbers, lateness, duration in member.connection.execute(
            FIGURES, {"since": since}
        ):
            yield row.format(
                database,
                kind.replace("_", " "),
                *("-" if number is None else f"{number:,}" for number in numbers),
                _percentiles(lateness),
                _percentiles(duration),
            )
    yield ""
    row = "{:<9}{:<16}{:>7}{:>9}{:>9}"
    yield row.format("database", "table", "rows", "missing", "surplus")
    for c in comparisons:
        yield row.format(c.database, c.name, f"{c.rows:,}", f"{c.missing:,}", f"{c.surplus:,}")


def _compare(member: Member, table: str, query: str) -> Comparison:
    statement = sql.SQL(DIFFERENCE).format(table=sql.Identifier(table), query=sql.SQL(query))
    row = member.connection.execute(statement).fetchone()
    assert row is not None
    return Comparison(member.name, table, *row)


def _one(member: Member, query: str, *parameters: Any) -> Any:
    row = member.connection.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def _percentiles(values: list[float] | None) -> str:
    return "/".join(f"{value:,.0f}" for value in values) if values else "-"
