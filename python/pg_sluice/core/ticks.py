"""What a tick decides about each node that is due."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from . import schedule as schedules
from .errors import SluiceError

RETRIES = (0.25, 0.5, 1.0)
"""Waits in seconds before a tick that failed with a transient error is tried again."""

_TRANSIENT = ("08", "40", "57P", "53300", "55P03")


@dataclass(frozen=True)
class Plan:
    """What follows from a tick: runs to queue, moves of those that were, nodes to set aside."""

    runs: list[dict[str, Any]]
    moves: dict[int, dict[str, Any]]
    unreadable: dict[int, str]


def plan(due: list[dict[str, Any]], now: datetime) -> Plan:
    """Decides about due nodes, given as `_sluice.due_nodes` has them, times in ISO format."""
    made = Plan([], {}, {})
    for node in due:
        try:
            fire, following, reason = _fire(node, now)
        except SluiceError as error:
            made.unreadable[node["pgt_id"]] = f"{error.message}: {error.detail}"
            continue
        except (ValueError, OverflowError) as error:
            made.unreadable[node["pgt_id"]] = f"invalid time: {error}"
            continue
        if fire is not None:
            run = {
                key: node[key]
                for key in ("pgt_id", "name", "priority", "upstream", "attempt", "options")
            }
            made.runs.append(run | {"due_at": fire, "reason": reason})
            made.moves[node["pgt_id"]] = {
                "pgt_id": node["pgt_id"],
                "due_at": node["due_at"],
                "next_fire_at": following,
            }
    return made


def _fire(node: dict[str, Any], now: datetime) -> tuple[str | None, str | None, str | None]:
    """The fire to run, the next one after it, and a reason worth recording."""
    schedule = schedules.parse(node["schedule"])
    if node["retry_of"] is not None:
        return node["retry_of"], node["next_fire_at"], "retry"
    if isinstance(schedule, schedules.Manual | schedules.Calculated):
        # It has no grid, and somebody made it due: once.
        return node["due_at"], None, None
    firing = schedules.due(
        schedule,
        datetime.fromisoformat(node["anchor"]),
        datetime.fromisoformat(node["due_at"]),
        now,
        node["catch_up"],
    )
    if firing is None:
        return None, None, None
    following = firing.following.isoformat() if firing.following else None
    reason = f"{firing.skipped} missed fires skipped" if firing.skipped else None
    return firing.fire_at.isoformat(), following, reason


def is_transient(sqlstate: str | None) -> bool:
    """Whether a failed tick may succeed when it is tried again; None is a lost connection."""
    return sqlstate is None or sqlstate.startswith(_TRANSIENT)
