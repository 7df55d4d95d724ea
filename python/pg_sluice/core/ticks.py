"""What a tick decides about nodes that are due, and about those that are ahead of the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from . import limits
from . import schedule as schedules
from .errors import SluiceError

RETRIES = (0.25, 0.5, 1.0)
"""Waits in seconds before what failed with a transient error is tried again."""

_TRANSIENT = ("08", "40001", "40P01", "53300", "55P03", "57P")
_DAY = 86400.0
_KINDS = ("stream_table", "matview", "job")


@dataclass(frozen=True)
class Unreadable:
    """Why a node is set aside, and its next fire should it be readable again."""

    message: str
    next_fire_at: str


@dataclass(frozen=True)
class Plan:
    """What follows from a tick: runs to queue, moves of those that were, nodes to set aside."""

    runs: list[dict[str, Any]]
    moves: dict[int, dict[str, Any]]
    unreadable: dict[int, Unreadable]


def plan(due: list[dict[str, Any]], now: datetime, settings: dict[str, Any]) -> Plan:
    """Decides about due nodes, given as `_sluice.due_nodes` has them, times in ISO format.

    A node with a stored value that can't be read is set aside; it never stops the others.
    """
    made = Plan([], {}, {})
    for node in due:
        try:
            _check_kind(node)
            limits.limits(node["options"] or {}, settings)
            fire, following, reason = _fire(node, now)
        except SluiceError as error:
            message = f"{error.message}: {error.detail}"
        except Exception as error:  # noqa: BLE001 - whatever a value that was edited by hand raises
            message = f"a stored value can't be read: {error}"
        else:
            if fire is not None:
                run = {
                    key: node[key]
                    for key in ("pgt_id", "name", "priority", "upstream", "attempt", "options")
                }
                made.runs.append(run | {"due_at": fire, "reason": reason})
                made.moves[node["pgt_id"]] = {
                    "pgt_id": node["pgt_id"],
                    "due_at": node["due_at"],
                    "fire_at": fire,
                    "next_fire_at": following,
                }
            continue
        made.unreadable[node["pgt_id"]] = Unreadable(message, _beyond(node, now).isoformat())
    return made


def _beyond(node: dict[str, Any], now: datetime) -> datetime:
    """The first time after now on a grid that can only be told from its last step.

    A node that has never fired has its first step for that, from its anchor.
    """
    try:
        last = datetime.fromisoformat(node["next_fire_at"])
        step = node["fire_step"] or 0
        if step == 0:
            step = (last - datetime.fromisoformat(node["anchor"])).total_seconds()
        if not step > 0:
            step = _DAY
        steps = max(0, math.floor((now - last).total_seconds() / step) + 1)
        return last + timedelta(seconds=step) * steps
    except Exception:  # noqa: BLE001 - as above
        return now + timedelta(seconds=_DAY)


def _check_kind(node: dict[str, Any]) -> None:
    if node["kind"] not in _KINDS:
        raise ValueError(f"kind is {node['kind']!r}")


def _checked(moment: str | None) -> str | None:
    return None if moment is None else datetime.fromisoformat(moment).isoformat()


def _fire(node: dict[str, Any], now: datetime) -> tuple[str | None, str | None, str | None]:
    """The fire to run, the next one after it, and a reason worth recording."""
    schedule = schedules.parse(node["schedule"])
    due_at = datetime.fromisoformat(node["due_at"])
    if node["retry_of"] is not None:
        return _checked(node["retry_of"]), _checked(node["next_fire_at"]), "retry"
    if isinstance(schedule, schedules.Manual | schedules.Calculated):
        # It has no grid, and somebody made it due: once.
        return node["due_at"], None, None
    anchor = datetime.fromisoformat(node["anchor"])
    firing = schedules.due(schedule, anchor, due_at, now, node["catch_up"])
    if firing is None:
        return None, None, None
    following = firing.following.isoformat() if firing.following else None
    reason = f"{firing.skipped} missed fires skipped" if firing.skipped else None
    return firing.fire_at.isoformat(), following, reason


def turned_back(ahead: list[dict[str, Any]], now: datetime) -> list[dict[str, Any]]:
    """Where nodes go on that are ahead of the clock, given as `_sluice.nodes_ahead` has them.

    A node is due at the first point of its own grid after now, or before that if it was so. A node
    with a stored value that can't be read is left as it is: it is set aside when it is due.
    """
    moves = []
    for node in ahead:
        try:
            _check_kind(node)
            next_fire_at, before = _turned_back(node, now)
        except Exception:  # noqa: BLE001, S112 - whatever a value that was edited by hand raises
            continue
        moves.append(
            {key: node[key] for key in ("pgt_id", "due_at", "retries")}
            | {
                "former": node["next_fire_at"],
                "next_fire_at": next_fire_at and next_fire_at.isoformat(),
                "before": before and before.isoformat(),
            }
        )
    return moves


def _turned_back(node: dict[str, Any], now: datetime) -> tuple[datetime | None, datetime | None]:
    """The next fire, and the point before it on the grid, where that was looked for."""
    if node["next_fire_at"] is None:
        return None, None
    stored = datetime.fromisoformat(node["next_fire_at"])
    schedule = schedules.parse(node["schedule"])
    is_job = node["kind"] == "job"
    if is_job and node["fire_step"] is not None:
        # Each of its fires runs once, and those up to the last one have run.
        return stored, None
    if isinstance(schedule, schedules.Manual | schedules.Calculated):
        # Somebody made it due.
        return min(stored, now), None
    anchor = datetime.fromisoformat(node["anchor"])
    after = now
    if is_job and node["fired_at"] is not None:
        # On a grid that it had before, which can have the same points.
        after = max(now, datetime.fromisoformat(node["fired_at"]))
    following = schedules.next_fire(schedule, anchor, after)
    if following is None or stored <= after:
        return stored, None
    return min(stored, following), schedules.previous_fire(schedule, anchor, after)


def is_transient(sqlstate: str | None) -> bool:
    """Whether a failed tick may succeed when it is tried again; None is a lost connection."""
    return sqlstate is None or sqlstate.startswith(_TRANSIENT)
