"""What a tick decides: runs, moves, and nodes to set aside."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core import schedule as schedules
from pg_sluice.core.ticks import RETRIES, is_transient, plan

ANCHOR = datetime(2026, 1, 1, tzinfo=UTC)
NOW = ANCHOR + timedelta(hours=10, seconds=30)


def node(pgt_id: int = 1, **given_fields: Any) -> dict[str, Any]:
    """A due node as `_sluice.due_nodes` gives it."""
    fields: dict[str, Any] = {
        "pgt_id": pgt_id,
        "name": f"node_{pgt_id}",
        "kind": "job",
        "schedule": "1 h",
        "anchor": ANCHOR,
        "due_at": ANCHOR + timedelta(hours=10),
        "next_fire_at": ANCHOR + timedelta(hours=10),
        "retry_of": None,
        "catch_up": 1,
        "priority": 0,
        "attempt": 1,
        "upstream": [],
        "options": None,
    } | given_fields
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in fields.items()}


def at(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def test_node_on_its_grid() -> None:
    made = plan([node(priority=7, upstream=[3], options={"lock_timeout": 1})], NOW)
    (run,) = made.runs
    assert at(run["due_at"]) == ANCHOR + timedelta(hours=10)
    assert {key: run[key] for key in ("pgt_id", "name", "priority", "upstream", "attempt")} == {
        "pgt_id": 1,
        "name": "node_1",
        "priority": 7,
        "upstream": [3],
        "attempt": 1,
    }
    assert run["options"] == {"lock_timeout": 1}
    assert run["reason"] is None
    move = made.moves[1]
    assert at(move["due_at"]) == ANCHOR + timedelta(hours=10)
    assert at(move["next_fire_at"]) == ANCHOR + timedelta(hours=11)
    assert made.unreadable == {}


def test_retry_is_of_its_own_fire_and_leaves_the_grid_alone() -> None:
    made = plan(
        [
            node(
                retry_of=ANCHOR + timedelta(hours=9),
                due_at=ANCHOR + timedelta(hours=9, minutes=1),
                next_fire_at=ANCHOR + timedelta(hours=10),
                attempt=3,
            )
        ],
        NOW,
    )
    (run,) = made.runs
    assert (at(run["due_at"]), run["attempt"]) == (ANCHOR + timedelta(hours=9), 3)
    assert run["reason"] == "retry"
    assert at(made.moves[1]["next_fire_at"]) == ANCHOR + timedelta(hours=10)
    assert at(made.moves[1]["due_at"]) == ANCHOR + timedelta(hours=9, minutes=1)


def test_retry_of_a_manual_node() -> None:
    made = plan([node(schedule="manual", retry_of=ANCHOR, next_fire_at=None)], NOW)
    assert at(made.runs[0]["due_at"]) == ANCHOR
    assert made.moves[1]["next_fire_at"] is None


@pytest.mark.parametrize(
    ("catch_up", "hour", "reason"),
    [
        (1, 10, "9 missed fires skipped"),
        (3, 8, "7 missed fires skipped"),
        (10, 1, None),
        (99, 1, None),
    ],
)
def test_missed_fires(catch_up: int, hour: int, reason: str | None) -> None:
    due = node(due_at=ANCHOR + timedelta(hours=1), catch_up=catch_up)
    made = plan([due], NOW)
    assert at(made.runs[0]["due_at"]) == ANCHOR + timedelta(hours=hour)
    assert made.runs[0]["reason"] == reason
    assert at(made.moves[1]["next_fire_at"]) == ANCHOR + timedelta(hours=hour + 1)


@given(st.integers(1, 86400), st.integers(0, 10**7), st.integers(1, 1000), st.integers(0, 60))
def test_repeated_ticks_catch_up_and_end(
    seconds: int, behind: int, catch_up: int, fraction: int
) -> None:
    """Tick after tick at the same moment: at most `catch_up` runs, on the grid, in order."""
    every = timedelta(seconds=seconds)
    now = ANCHOR + every * 50 + timedelta(seconds=behind, milliseconds=fraction)
    due = ANCHOR + every * 50
    fires = []
    while due <= now:
        made = plan(
            [node(schedule=f"{seconds}s", due_at=due, next_fire_at=due, catch_up=catch_up)], now
        )
        fires.append(at(made.runs[0]["due_at"]))
        following = at(made.moves[1]["next_fire_at"])
        assert following is not None
        assert following > due
        due = following
        assert len(fires) <= catch_up
        if len(fires) > 5:
            break
    else:
        assert now < due <= now + every
        assert fires[-1] == due - every
    assert fires == sorted(fires)
    assert all((fire - ANCHOR) % every == timedelta(0) for fire in fires if fire)


@pytest.mark.parametrize(
    "spec", ["every blue moon", "", "* * * *", "99s99", "TZ=Nowhere/Land * * * * *"]
)
def test_unreadable_schedule_is_set_aside_and_others_fire(spec: str) -> None:
    made = plan([node(1), node(2, schedule=spec), node(3)], NOW)
    assert [run["pgt_id"] for run in made.runs] == [1, 3]
    assert made.moves.keys() == {1, 3}
    assert made.unreadable.keys() == {2}
    assert "invalid schedule" in made.unreadable[2]


def test_order_of_runs_is_the_order_of_the_tick() -> None:
    """Upstream first, as the database gave them."""
    made = plan([node(5), node(2), node(9)], NOW)
    assert [run["pgt_id"] for run in made.runs] == [5, 2, 9]


@pytest.mark.parametrize("spec", ["manual", "calculated"])
def test_node_without_a_grid_that_was_made_due_runs_once(spec: str) -> None:
    """Somebody set its next_fire_at, as a new query does. It must not stay due for ever."""
    made = plan([node(schedule=spec)], NOW)
    assert [run["pgt_id"] for run in made.runs] == [1]
    assert made.moves[1]["next_fire_at"] is None


def test_cron_schedule() -> None:
    due = datetime(2026, 1, 1, 10, 0, tzinfo=UTC)
    made = plan([node(schedule="*/15 * * * *", due_at=due)], NOW)
    assert at(made.runs[0]["due_at"]) == due
    assert at(made.moves[1]["next_fire_at"]) == due + timedelta(minutes=15)
    assert schedules.parse("*/15 * * * *")


def test_nothing_due() -> None:
    made = plan([], NOW)
    assert (made.runs, made.moves, made.unreadable) == ([], {}, {})


@pytest.mark.parametrize(
    ("sqlstate", "transient"),
    [
        (None, True),
        ("08006", True),
        ("40001", True),
        ("40P01", True),
        ("57P01", True),
        ("53300", True),
        ("55P03", True),
        ("57014", False),
        ("42P01", False),
        ("22012", False),
        ("53100", False),
        ("SL001", False),
    ],
)
def test_transient_errors_of_a_tick(sqlstate: str | None, transient: bool) -> None:
    assert is_transient(sqlstate) is transient


def test_waits_between_retries_of_a_tick() -> None:
    assert RETRIES == (0.25, 0.5, 1.0)
