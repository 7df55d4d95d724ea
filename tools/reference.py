"""Writes docs/reference.md from the COMMENTs of the extension, on a throwaway cluster.

`write` writes the page, `verify` fails when it is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import Cluster

if TYPE_CHECKING:
    import psycopg

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"

SECTIONS = {
    "Stream tables": [
        "create_stream_table",
        "alter_stream_table",
        "drop_stream_table",
        "refresh_stream_table",
        "explain_stream_table",
        "bulk_create",
    ],
    "Materialized views and jobs": ["schedule_refresh", "schedule", "unschedule"],
    "Any node": ["run_now", "reset", "pause", "unpause"],
    "Watermarks": ["advance_watermark", "create_watermark_group", "drop_watermark_group"],
    "The scheduler": ["preflight", "start", "stop", "run", "configure"],
    "Drain": ["drain", "is_drained", "drain_status", "resume"],
    "Looking": ["queue", "workers", "databases", "effective_limit", "health_check"],
    "Metrics": ["metrics", "serve_metrics"],
}
VIEWS = ["nodes", "history", "alerts", "watermarks", "settings"]

_FUNCTIONS = """
SELECT p.proname, p.prokind, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
    obj_description(p.oid, 'pg_proc')
FROM pg_proc AS p WHERE p.pronamespace = 'sluice'::regnamespace
"""
_COLUMNS = """
SELECT string_agg('`' || a.attname || '`', ', ' ORDER BY a.attnum),
    obj_description(a.attrelid, 'pg_class')
FROM pg_attribute AS a WHERE a.attrelid = ('sluice.' || %(view)s)::regclass AND a.attnum > 0
GROUP BY a.attrelid
"""


def page(connection: psycopg.Connection[Any]) -> str:
    """The page for the extension as it is installed."""
    functions = {row[0]: row for row in connection.execute(_FUNCTIONS)}
    listed = [name for names in SECTIONS.values() for name in names]
    if sorted(listed) != sorted(functions):
        raise SystemExit(f"not in a section: {sorted(functions.keys() ^ set(listed))}")
    parts = [
        "# SQL reference\n",
        "Made from the comments of the extension, which `\\df+ sluice.*` shows too. Names of nodes"
        " and relations may be schema-qualified and resolve in the caller's `search_path`.\n",
    ]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts.extend(_function(*functions[name]) for name in names)
    parts.append("## Views\n")
    for view in VIEWS:
        row = connection.execute(_COLUMNS, {"view": view}).fetchone()
        parts.append(f"### sluice.{view}\n\n{row[1]}.\n\nColumns: {row[0]}.\n" if row else "")
    parts.append(_settings(connection))
    return "\n".join(parts)


def _function(name: str, kind: str, arguments: str, result: str | None, comment: str) -> str:
    given = re.sub(r"::[a-z ]+", "", arguments).replace(", ", ",\n        ")
    signature = f"sluice.{name}({given})"
    signature = f"CALL {signature}" if kind == "p" else f"{signature} → {result}"
    text = "\n\n".join(comment.splitlines())
    return f"### {name}\n\n    {signature}\n\n{text}\n"


def _settings(connection: psycopg.Connection[Any]) -> str:
    rows = connection.execute(
        'SELECT name, "default", min, max, scope, description FROM sluice.settings'
    ).fetchall()
    lines = [
        "## Settings\n",
        "| name | default | minimum | maximum | scope | meaning |",
        "|---|---|---|---|---|---|",
    ]
    lines.extend(
        f"| `{name}` | {' | '.join(text or '' for text in others)} |" for name, *others in rows
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes or verifies the page."""
    with Cluster(fsync=False) as cluster, cluster.connect("postgres") as connection:
        connection.execute("CREATE EXTENSION pg_sluice CASCADE")
        made = page(connection)
    if sys.argv[1] == "write":
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        raise SystemExit("docs/reference.md is stale: run 'make reference'")


if __name__ == "__main__":
    main()
