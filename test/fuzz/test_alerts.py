"""Properties of `pg_sluice.core.alerts`: whatever an alert says, its announcement fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alerts
from pg_sluice.core import alerts as subject

LIMIT = 7999
EXAMPLES = 600


def alert(**given: Any) -> dict[str, Any]:
    return {
        "event": "suspended",
        "severity": "critical",
        "database": "app",
        "node": "public.t",
        "pgt_id": 7,
        "at": "2026-01-02T03:04:05.678901+00:00",
        "seq": 12,
        "message": "it failed",
        "detail": None,
    } | given


def read(given: dict[str, Any]) -> bytes:
    """As pending_alerts() has it."""
    detail = None if given["detail"] is None else json.dumps(given["detail"], ensure_ascii=False)
    return json.dumps(given | {"detail": detail}, ensure_ascii=False).encode()


CHARACTERS = st.characters(exclude_categories=("Cs",))


def test_any_alert_fits_parses_and_says_what_it_is_about() -> None:
    seen, cut = 0, 0

    @settings(database=None, max_examples=EXAMPLES)
    @given(
        node=st.none() | alerts.texts(CHARACTERS, 20_000),
        pgt_id=st.none() | st.integers(-alerts.BIGINT, alerts.BIGINT),
        seq=st.integers(1, alerts.BIGINT),
        message=alerts.texts(CHARACTERS, 100_000),
        detail=alerts.details(CHARACTERS),
    )
    def holds(**given: Any) -> None:
        nonlocal seen, cut
        seen += 1
        made = alert(**given)
        cut += alerts.check(subject.payload(read(made), LIMIT), made)["truncated"]

    holds()
    assert seen >= EXAMPLES
    assert cut > EXAMPLES / 10, "hardly one was too long"


def test_any_bytes_give_an_announcement() -> None:
    """A database in SQL_ASCII has no characters, only bytes."""
    seen = 0

    @settings(database=None, max_examples=EXAMPLES)
    @given(message=st.binary(max_size=3000), repeated=st.integers(1, 20))
    def holds(message: bytes, repeated: int) -> None:
        nonlocal seen
        seen += 1
        # As to_json() of the server writes them: controls, quotes and backslashes escaped.
        body = b"".join(
            b"\\u%04x" % byte if byte < 32 or byte in b'"\\' else bytes([byte])
            for byte in message * repeated
        )
        made = read(alert(message="@")).replace(b"@", body)
        text = subject.payload(made, LIMIT)
        alerts.check(text, alert(message=(message * repeated).decode("utf-8", "replace")))

    holds()
    assert seen >= EXAMPLES


def test_the_limit_is_sharp() -> None:
    room = LIMIT - len(subject.payload(read(alert(message="")), LIMIT).encode())
    text = subject.payload(read(alert(message="x" * room)), LIMIT)
    assert (len(text.encode()), json.loads(text)["truncated"]) == (LIMIT, False)
    text = subject.payload(read(alert(message="x" * (room + 1))), LIMIT)
    assert (len(text.encode()), json.loads(text)["truncated"]) == (LIMIT, True)


def test_as_little_is_cut_as_it_takes() -> None:
    text = subject.payload(read(alert(message="x" * 20_000)), LIMIT)
    assert len(text.encode()) == LIMIT
    # A character is kept or cut as a whole: of four bytes each, at most three are wasted.
    text = subject.payload(read(alert(message="\U0001f600" * 20_000)), LIMIT)
    assert LIMIT - 4 < len(text.encode()) <= LIMIT


def test_a_long_message_leaves_the_short_strings_of_the_detail() -> None:
    detail: dict[str, Any] = {"sqlstate": "P0001", "outcome": "permanent_error", "pid": 4}
    detail |= {"message": "y" * 70_000, "context": ["z" * 70_000, "short"]}
    told = json.loads(subject.payload(read(alert(message="x" * 70_000, detail=detail)), LIMIT))
    assert told["detail"].keys() == detail.keys()
    assert {key: told["detail"][key] for key in ("sqlstate", "outcome", "pid")} == {
        "sqlstate": "P0001",
        "outcome": "permanent_error",
        "pid": 4,
    }
    long, short = told["detail"]["context"]
    assert len(told["message"]) == len(told["detail"]["message"]) == len(long) > 2000
    assert short == "short"


@pytest.mark.parametrize("detail", [[1] * 9000, ["yy"] * 1800], ids=["never fits", "fits empty"])
def test_a_detail_of_too_many_parts_goes_before_the_message_does(detail: Any) -> None:
    message = "x" * 5000
    told = json.loads(subject.payload(read(alert(message=message, detail=detail)), LIMIT))
    assert (told["detail"], told["message"], told["truncated"]) == (None, message, True)


@pytest.mark.parametrize(
    "detail",
    ["[" * 100_000 + "]" * 100_000, "9" * 5000, "9" * 400 + ".5", "1" * 131_000],
    ids=["deep", "long integer", "no float", "longer than its room"],
)
def test_a_detail_that_parsers_refuse_is_left_out(detail: str) -> None:
    made = json.dumps(alert(detail=detail)).encode()
    told = json.loads(subject.payload(made, LIMIT))
    assert (told["detail"], told["message"], told["truncated"]) == (None, "it failed", True)


@pytest.mark.parametrize("kind", [list, dict])
def test_nesting_ends_where_parsers_may_refuse_it(kind: type) -> None:
    detail: Any = "innermost"
    for _ in range(400):
        detail = [detail] if kind is list else {"in": detail}
    told = json.loads(subject.payload(read(alert(detail=detail)), LIMIT))
    levels = 0
    found = told["detail"]
    while found is not None:
        (found,), levels = found if kind is list else found.values(), levels + 1
    assert (levels, told["truncated"]) == (16, True)


@pytest.mark.parametrize(
    ("encoding", "room"),
    [
        ("UTF8", 7999),
        ("LATIN1", 7999),
        ("EUC_JP", 5332),
        ("EUC_TW", 5332),
        ("MULE_INTERNAL", 5332),
    ],
)
def test_room_is_for_the_bytes_of_the_database(encoding: str, room: int) -> None:
    assert subject.room(encoding) == room
