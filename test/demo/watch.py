"""What the demo shows and waits for, as the extension's public views and functions tell it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from flights import Feed, Member

NODES = """
    SELECT current_database()::text AS database, n.name, n.kind, n.schedule, n.status,
           extract(epoch FROM n.lag)::float AS lag, n.last_outcome,
           coalesce(h.runs, 0) AS runs, coalesce(h.unchanged, 0) AS unchanged,
           coalesce(h.failed, 0) AS failed, h.rows_changed::bigint AS rows_changed
      FROM sluice.nodes AS n
      LEFT JOIN (
           SELECT pgt_id, count(*) AS runs,
                  count(*) FILTER (WHERE outcome = 'no_change') AS unchanged,
                  count(*) FILTER (
                      WHERE outcome NOT IN ('succeeded', 'no_change', 'skipped')
                  ) AS failed,
                  sum(rows_changed) AS rows_changed
             FROM sluice.history
            GROUP BY pgt_id
           ) AS h ON h.pgt_id = n.pgt_id
     ORDER BY n.pgt_id
"""

LAST_RUNS = """
    SELECT pgt_id, name, upstream, last_run_at, last_outcome, clock_timestamp()
      FROM sluice.nodes
     ORDER BY pgt_id
"""


@dataclass(frozen=True)
class Node:
    """A stream table, materialized view or job and its runs so far."""

    database: str
    name: str
    kind: str
    schedule: str
    status: str
    lag: float | None
    last_outcome: str | None
    runs: int
    unchanged: int
    failed: int
    rows_changed: int | None


@dataclass(frozen=True)
class Snapshot:
    """Everything at one moment."""

    day: int
    date: str
    flights: int
    nodes: list[Node]
    slots: int
    live: int
    """Workers that are connected, busy or not."""
    working_on: list[str]
    queued: int


class Watch:
    """Looks at the scheduler (through the control database) and at its members."""

    def __init__(self, control: psycopg.Connection[Any], members: list[Member], feed: Feed) -> None:
        self._control = control
        self._members = members
        self._feed = feed

    def look(self) -> Snapshot:
        workers = self._control.execute(
            "SELECT state, database, name FROM sluice.workers() ORDER BY slot"
        ).fetchall()
        queued = self._control.execute("SELECT FROM sluice.queue() WHERE state = 'queued'").rowcount
        return Snapshot(
            day=self._feed.day,
            date=self._feed.date.isoformat() if self._feed.day else "none yet",
            flights=self._feed.flights,
            nodes=[node for member in self._members for node in _nodes(member)],
            slots=len(workers),
            live=sum(state == "live" for state, _, _ in workers),
            working_on=[
                f"{database}.{name.removeprefix('public.')}"
                for _, database, name in workers
                if name is not None
            ],
            queued=queued,
        )

    def all_scheduled(self) -> bool:
        """Whether the scheduler has looked at every member database."""
        ticked = self._control.execute(
            "SELECT FROM sluice.databases() WHERE last_tick_at IS NOT NULL"
        ).rowcount
        return ticked == len(self._members)


class Settling:
    """Waits until everything in a database has seen all that was written up to a moment.

    A node has when it has run after that moment and after all nodes that it reads have: only then
    has what a downstream node shows come all the way.
    """

    def __init__(self, member: Member, since: datetime) -> None:
        self._member = member
        self._since = since
        self._settled: dict[int, datetime] = {}
        """When each node was seen to have settled."""

    def unsettled(self) -> list[str]:
        """Look again; the names of the nodes that are still waited for."""
        waiting = []
        for row in self._member.connection.execute(LAST_RUNS):
            pgt_id, name, upstream, last_run_at, last_outcome, now = row
            if pgt_id in self._settled:
                continue
            times = [self._settled.get(node) for node in upstream or ()]
            if (
                last_run_at is not None
                and last_outcome in ("succeeded", "no_change")
                and all(time is not None and last_run_at > time for time in times)
                and last_run_at > self._since
            ):
                self._settled[pgt_id] = now
            else:
                waiting.append(f"{self._member.name}.{name} (last run: {last_outcome})")
        return waiting


def _nodes(member: Member) -> list[Node]:
    with member.connection.cursor(row_factory=class_row(Node)) as cursor:
        return cursor.execute(NODES).fetchall()
