"""What a tick decides: runs, moves, nodes to set aside, and the way back of those ahead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core import schedule as schedules
from pg_sluice.core.ticks import RETRIES, is_transient, plan, turned_back

ANCHOR = datetime(2026, 1, 1, tzinfo=UTC)
NOW = ANCHOR + timedelta(hours=10, seconds=30)
SETTINGS = {"lock_timeout": 5, "refresh_timeout": 300, "refresh_work_mem": 64 * 1024**2}


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
        "fire_step": 3600.0,
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
    made = plan([node(priority=7, upstream=[3], options={"lock_timeout": 1})], NOW, SETTINGS)
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
    assert move["fire_at"] == run["due_at"]
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
        SETTINGS,
    )
    (run,) = made.runs
    assert (at(run["due_at"]), run["attempt"]) == (ANCHOR + timedelta(hours=9), 3)
    assert run["reason"] == "retry"
    assert at(made.moves[1]["next_fire_at"]) == ANCHOR + timedelta(hours=10)
    assert at(made.moves[1]["due_at"]) == ANCHOR + timedelta(hours=9, minutes=1)
    assert made.moves[1]["fire_at"] == run["due_at"]


def test_retry_of_a_manual_node() -> None:
    made = plan([node(schedule="manual", retry_of=ANCHOR, next_fire_at=None)], NOW, SETTINGS)
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
    made = plan([due], NOW, SETTINGS)
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
            [node(schedule=f"{seconds}s", due_at=due, next_fire_at=due, catch_up=catch_up)],
            now,
            SETTINGS,
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
    made = plan([node(1), node(2, schedule=spec), node(3)], NOW, SETTINGS)
    assert [run["pgt_id"] for run in made.runs] == [1, 3]
    assert made.moves.keys() == {1, 3}
    assert made.unreadable.keys() == {2}
    assert "invalid schedule" in made.unreadable[2].message
    assert at(made.unreadable[2].next_fire_at) == ANCHOR + timedelta(hours=11)


@pytest.mark.parametrize(
    "odd",
    [
        {"anchor": "infinity"},
        {"anchor": "10000-01-01T00:00:00+00:00"},
        {"anchor": "2026-01-01 BC"},
        {"anchor": None},
        {"due_at": "-infinity"},
        {"catch_up": None},
        {"catch_up": "many"},
        {"retry_of": "infinity"},
        {"retry_of": ANCHOR, "next_fire_at": "infinity"},
        {"schedule": None},
        {"schedule": 7},
        {"options": {"refresh_timeout": "Infinity"}},
        {"options": {"lock_timeout": -1}},
        {"options": {"work_mem": "much"}},
        {"options": ["job"]},
        {"kind": "view"},
        {"kind": None},
    ],
)
def test_any_value_that_can_not_be_read_is_set_aside(odd: dict[str, Any]) -> None:
    made = plan([node(1), node(2, **odd), node(3)], NOW, SETTINGS)
    assert [run["pgt_id"] for run in made.runs] == [1, 3]
    assert made.unreadable.keys() == {2}
    following = at(made.unreadable[2].next_fire_at)
    assert following is not None
    assert following > NOW


@pytest.mark.parametrize(
    ("odd", "what"),
    [({"kind": "view"}, "kind is 'view'"), ({"options": {"work_mem": "x"}}, "work_mem is 'x'")],
)
def test_it_is_told_what_can_not_be_read(odd: dict[str, Any], what: str) -> None:
    made = plan([node(**odd)], NOW, SETTINGS)
    assert made.unreadable[1].message == f"a stored value can't be read: {what}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([k for k in node() if k not in ("pgt_id", "name")]), JSON))
def test_no_row_stops_a_tick(odd: dict[str, Any]) -> None:
    """Whatever JSON stands in place of a node's values, the others run."""
    made = plan([node(1), node(2) | odd, node(3)], NOW, SETTINGS)
    runs = [run["pgt_id"] for run in made.runs if run["pgt_id"] != 2]
    assert runs == [1, 3]


@pytest.mark.parametrize("step", [3600.0, 60.0, 7.0])
@pytest.mark.parametrize("behind", [0, 1, 3599, 3600, 10**6])
def test_a_node_set_aside_goes_on_on_its_own_grid(step: float, behind: int) -> None:
    due = NOW - timedelta(seconds=behind)
    odd = node(schedule="?", due_at=due, next_fire_at=due, fire_step=step)
    following = at(plan([odd], NOW, SETTINGS).unreadable[1].next_fire_at)
    assert following is not None
    assert NOW < following <= NOW + timedelta(seconds=step)
    assert (following - due) % timedelta(seconds=step) == timedelta(0)


def test_a_node_set_aside_that_never_fired_takes_its_first_step() -> None:
    odd = node(schedule="?", fire_step=None, next_fire_at=ANCHOR + timedelta(hours=4))
    assert at(plan([odd], NOW, SETTINGS).unreadable[1].next_fire_at) == ANCHOR + timedelta(hours=12)


def test_a_node_set_aside_keeps_a_fire_that_is_to_come() -> None:
    """It was due for a retry."""
    to_come = NOW + timedelta(hours=5)
    odd = node(schedule="?", retry_of=ANCHOR, due_at=NOW, next_fire_at=to_come)
    assert at(plan([odd], NOW, SETTINGS).unreadable[1].next_fire_at) == to_come


def test_order_of_runs_is_the_order_of_the_tick() -> None:
    """Upstream first, as the database gave them."""
    made = plan([node(5), node(2), node(9)], NOW, SETTINGS)
    assert [run["pgt_id"] for run in made.runs] == [5, 2, 9]


@pytest.mark.parametrize("spec", ["manual", "calculated"])
def test_node_without_a_grid_that_was_made_due_runs_once(spec: str) -> None:
    """Somebody set its next_fire_at, as a new query does. It must not stay due for ever."""
    made = plan([node(schedule=spec)], NOW, SETTINGS)
    assert [run["pgt_id"] for run in made.runs] == [1]
    assert made.moves[1]["next_fire_at"] is None


def test_cron_schedule() -> None:
    due = datetime(2026, 1, 1, 10, 0, tzinfo=UTC)
    made = plan([node(schedule="*/15 * * * *", due_at=due)], NOW, SETTINGS)
    assert at(made.runs[0]["due_at"]) == due
    assert at(made.moves[1]["next_fire_at"]) == due + timedelta(minutes=15)
    assert schedules.parse("*/15 * * * *")


def test_the_last_fire_of_all() -> None:
    last = datetime(9999, 12, 31, 23, tzinfo=UTC)
    made = plan([node(due_at=last, next_fire_at=last)], last + timedelta(minutes=1), SETTINGS)
    assert at(made.runs[0]["due_at"]) == last
    assert made.moves[1]["next_fire_at"] is None


def test_nothing_due() -> None:
    made = plan([], NOW, SETTINGS)
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
        ("40000", False),
        ("SL001", False),
    ],
)
def test_transient_errors_of_a_tick(sqlstate: str | None, transient: bool) -> None:
    assert is_transient(sqlstate) is transient


def test_waits_between_retries_of_a_tick() -> None:
    assert RETRIES == (0.25, 0.5, 1.0)


@pytest.mark.parametrize("step", [-5, None])
def test_a_node_set_aside_without_a_usable_step_goes_on_daily(step: int | None) -> None:
    due = NOW - timedelta(hours=1)
    odd = node(schedule="?", anchor=due, due_at=due, next_fire_at=due, fire_step=step)
    assert at(plan([odd], NOW, SETTINGS).unreadable[1].next_fire_at) == due + timedelta(days=1)


def test_a_node_whose_grid_has_no_fire_yet_is_left_alone() -> None:
    """The clock was set back after it was found due."""
    due = NOW + timedelta(hours=5)
    made = plan([node(due_at=due, next_fire_at=due)], NOW, SETTINGS)
    assert (made.runs, made.moves, made.unreadable) == ([], {}, {})


# The clock is set back


def ahead(pgt_id: int = 1, **given_fields: Any) -> dict[str, Any]:
    """A node as `_sluice.nodes_ahead` gives it: it fired five hours after now."""
    fields: dict[str, Any] = {
        "kind": "stream_table",
        "due_at": ANCHOR + timedelta(hours=16),
        "next_fire_at": ANCHOR + timedelta(hours=16),
        "fired_at": ANCHOR + timedelta(hours=15),
        "waits_until": None,
        "retries": False,
    } | given_fields
    return node(pgt_id, **fields)


@pytest.mark.parametrize("kind", ["stream_table", "matview"])
def test_node_ahead_of_the_clock_goes_on_on_its_own_grid(kind: str) -> None:
    (move,) = turned_back([ahead(kind=kind)], NOW)
    assert at(move["next_fire_at"]) == ANCHOR + timedelta(hours=11)
    assert at(move["before"]) == ANCHOR + timedelta(hours=10)
    assert move["pgt_id"] == 1
    assert at(move["former"]) == at(move["due_at"]) == ANCHOR + timedelta(hours=16)


def test_job_waits_until_its_last_fire_is_past() -> None:
    (move,) = turned_back([ahead(kind="job")], NOW)
    assert at(move["next_fire_at"]) == ANCHOR + timedelta(hours=16)
    assert move["before"] is None


def test_job_that_has_not_fired_on_its_grid_has_no_fire_to_wait_for() -> None:
    """It was scheduled, or scheduled anew, while the clock was ahead."""
    new = {"kind": "job", "fire_step": None, "anchor": ANCHOR + timedelta(hours=15)}
    for fired_at in (None, ANCHOR + timedelta(hours=9)):
        (move,) = turned_back([ahead(**new, fired_at=fired_at)], NOW)
        assert at(move["next_fire_at"]) == ANCHOR + timedelta(hours=11)
        assert at(move["before"]) == ANCHOR + timedelta(hours=10)
    # On another grid before, of which the points may have been the same.
    (move,) = turned_back([ahead(**new, fired_at=ANCHOR + timedelta(hours=13))], NOW)
    assert at(move["next_fire_at"]) == ANCHOR + timedelta(hours=14)


def test_retry_and_what_was_asked_for_pass_through() -> None:
    (move,) = turned_back([ahead(retries=True, due_at=ANCHOR + timedelta(hours=12))], NOW)
    assert move["retries"] is True
    assert at(move["due_at"]) == ANCHOR + timedelta(hours=12)


@pytest.mark.parametrize("spec", ["manual", "calculated"])
def test_node_without_a_grid_is_due_as_it_was(spec: str) -> None:
    (move,) = turned_back([ahead(schedule=spec, next_fire_at=None)], NOW)
    assert move["next_fire_at"] is None
    (move,) = turned_back([ahead(schedule=spec)], NOW)
    assert at(move["next_fire_at"]) == NOW
    (move,) = turned_back([ahead(schedule=spec, next_fire_at=ANCHOR)], NOW)
    assert at(move["next_fire_at"]) == ANCHOR


def test_node_that_is_due_or_due_sooner_stays_so() -> None:
    for hours, before in ((9.0, None), (10.5, ANCHOR + timedelta(hours=10))):
        stored = ANCHOR + timedelta(hours=hours)
        (move,) = turned_back([ahead(next_fire_at=stored)], NOW)
        assert at(move["next_fire_at"]) == stored
        assert at(move["before"]) == before


@pytest.mark.parametrize(
    "odd",
    [
        {"schedule": "every blue moon"},
        {"schedule": None},
        {"kind": "view"},
        {"anchor": "infinity"},
        {"next_fire_at": "infinity"},
        {"next_fire_at": "2026-01-01 BC"},
        {"kind": "job", "fire_step": None, "fired_at": "-infinity"},
    ],
)
def test_unreadable_node_stays_as_it_is_and_others_go_on(odd: dict[str, Any]) -> None:
    moves = turned_back([ahead(1), ahead(2, **odd), ahead(3)], NOW)
    assert [move["pgt_id"] for move in moves] == [1, 3]


@given(st.dictionaries(st.sampled_from([k for k in ahead() if k not in ("pgt_id", "name")]), JSON))
def test_no_row_stops_the_way_back(odd: dict[str, Any]) -> None:
    moves = turned_back([ahead(1), ahead(2) | odd, ahead(3)], NOW)
    assert [move["pgt_id"] for move in moves if move["pgt_id"] != 2] == [1, 3]


SPECS = ["7s", "5m", "1 h", "1 day", "1 mon", "*/15 * * * *", "0 3 * * *", "0 9-17 * * 1-5"]
SPECS += ["TZ=Europe/Oslo 30 2 * * *", "0 0 1 * *"]
SPAN = st.timedeltas(timedelta(0), timedelta(days=40))


class Life:
    """A node with what its ticks make of it, as `_sluice.advance` and the others store that."""

    def __init__(self, kind: str, spec: str, made_at: datetime) -> None:
        self.kind, self.spec = kind, spec
        self.schedule = schedules.parse(spec)
        self.anchor = schedules.spread_anchor(self.schedule, made_at, 1)
        self.next_fire_at = schedules.next_fire(self.schedule, self.anchor, made_at)
        self.fired_at: datetime | None = None
        self.before: datetime | None = None
        self.fires: list[datetime] = []

    def _row(self) -> dict[str, Any]:
        step = self.next_fire_at and self.before and self.next_fire_at - self.before
        return ahead(
            kind=self.kind,
            schedule=self.spec,
            anchor=self.anchor,
            due_at=self.next_fire_at,
            next_fire_at=self.next_fire_at,
            fire_step=step and step.total_seconds(),
            fired_at=self.fired_at,
        )

    def tick(self, now: datetime) -> None:
        while self.next_fire_at is not None and self.next_fire_at <= now:
            (move,) = plan([self._row()], now, SETTINGS).moves.values()
            self.fired_at = self.before = at(move["fire_at"])
            self.next_fire_at = at(move["next_fire_at"])
            assert self.fired_at is not None
            self.fires.append(self.fired_at)

    def is_ahead(self, now: datetime) -> bool:
        """As `_sluice.nodes_ahead` has it, of the grid."""
        return self.next_fire_at is not None and (self.before or self.anchor) > now

    def turn_back(self, now: datetime) -> None:
        (move,) = turned_back([self._row()], now)
        self.next_fire_at = at(move["next_fire_at"])
        self.before = at(move["before"]) or self.before


@given(
    st.sampled_from(["stream_table", "job"]),
    st.sampled_from(SPECS),
    st.lists(SPAN, max_size=3),
    st.timedeltas(timedelta(0), timedelta(days=100)),
    st.lists(SPAN, min_size=1, max_size=3),
)
def test_a_clock_that_is_set_back_stops_no_grid(
    kind: str, spec: str, before: list[timedelta], back: timedelta, after: list[timedelta]
) -> None:
    """1. A node is never ahead of a clock that goes on. 2. The clock is set back, and a node that
    is ahead goes on at the first point of its grid, a job after its last fire. 3. It goes on."""
    now = NOW
    life = Life(kind, spec, now)
    for span in before:
        now += span
        life.tick(now)
        assert not life.is_ahead(now)
    now -= back
    stored, last = life.next_fire_at, life.fired_at
    was_ahead = life.is_ahead(now)
    if was_ahead:
        life.turn_back(now)
        assert kind == "job" or not life.is_ahead(now)
    first = max(now, last) if kind == "job" and last else now
    assert life.next_fire_at == schedules.next_fire(life.schedule, life.anchor, first)
    assert stored is not None
    assert life.next_fire_at is not None
    assert life.next_fire_at <= stored
    for span in after:
        now += span
        life.tick(now)
        if not (kind == "job" and last and last > now):
            assert not life.is_ahead(now)
    if kind == "job":
        assert sorted(set(life.fires)) == life.fires
