"""After a change of definitions: the grid of nodes and the graph that they form."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ..core import errors, graph
from ..core import schedule as schedules
from ..core.errors import SluiceError
from ..core.schedule import Schedule
from ..core.texts import to_json
from .plpy_types import Plpy, rows, value


def settle(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """Puts the nodes `pgt_ids` on a new grid and, if `graph` is true, derives the graph anew.

    Jobs read no relation that we know of: they stand in the graph alone. A calculated node whose
    schedule changed gets a new grid too. Raises 42P17 for a cycle, naming its path.
    """
    now = datetime.fromisoformat(
        value(plpy, "SELECT pg_catalog.to_json(pg_catalog.clock_timestamp()) #>> '{}'")
    )
    regrid = set(arguments["pgt_ids"])
    nodes = {
        row["pgt_id"]: row
        for row in rows(
            plpy,
            "SELECT n.pgt_id, n.kind, n.relid::oid::bigint AS relid, n.schedule,"
            " g.effective_schedule, _sluice.node_name(n) AS name"
            " FROM _sluice.node AS n LEFT JOIN _sluice.graph AS g USING (pgt_id)"
            " WHERE n.pgt_id = ANY ($1) OR ($2 AND n.kind <> 'job')",
            ["bigint[]", "boolean"],
            [list(regrid), arguments["graph"]],
        )
    }
    readable: dict[int, Schedule] = {}
    for pgt_id, node in nodes.items():
        try:
            readable[pgt_id] = schedules.parse(node["schedule"])
        except SluiceError:
            # Written by hand or by a newer version: the scheduler quarantines it when it is due.
            regrid.discard(pgt_id)
    effective = _store_graph(plpy, nodes, readable, now)
    for pgt_id, resolved in effective.items():
        if nodes[pgt_id]["effective_schedule"] != (resolved and schedules.render(resolved)):
            regrid.add(pgt_id)
    _store_grid(plpy, {p: effective.get(p, readable.get(p)) for p in regrid if p in nodes}, now)


def _store_graph(
    plpy: Plpy, nodes: dict[int, dict[str, Any]], readable: dict[int, Schedule], now: datetime
) -> dict[int, Schedule | None]:
    by_relation = {node["relid"]: pgt_id for pgt_id, node in nodes.items() if node["relid"]}
    upstream: dict[int, set[int]] = {pgt_id: set() for pgt_id in nodes}
    for row in rows(
        plpy,
        "SELECT d.pgt_id, d.relid::oid::bigint AS relid FROM _sluice.dependency AS d"
        " WHERE d.pgt_id = ANY ($1)",
        ["bigint[]"],
        [list(nodes)],
    ):
        if row["relid"] in by_relation:
            upstream[row["pgt_id"]].add(by_relation[row["relid"]])
    try:
        placed = graph.places(upstream)
    except graph.Cycle as found:
        raise errors.cycle([nodes[pgt_id]["name"] for pgt_id in found.path]) from None
    effective = graph.effective_schedules(placed, readable, now)
    stored = [
        {
            "pgt_id": pgt_id,
            "depth": place.depth,
            "upstream": place.upstream,
            "effective_schedule": schedules.render(resolved)
            if (resolved := effective.get(pgt_id))
            else None,
        }
        for pgt_id, place in placed.items()
    ]
    rows(plpy, "SELECT _sluice.store_graph($1)", ["jsonb"], [to_json(stored)])
    return effective


def _store_grid(plpy: Plpy, regrid: dict[int, Schedule | None], now: datetime) -> None:
    grid = []
    for pgt_id, schedule in regrid.items():
        anchor, fire = now, None
        if schedule is not None:
            anchor = schedules.spread_anchor(schedule, now, pgt_id)
            fire = schedules.next_fire(schedule, anchor, now)
        grid.append(
            {
                "pgt_id": pgt_id,
                "anchor": anchor.isoformat(),
                "next_fire_at": fire and fire.isoformat(),
            }
        )
    if grid:
        rows(plpy, "SELECT _sluice.store_grid($1)", ["jsonb"], [to_json(grid)])
