"""Alerts of any content, and what must hold of the announcement of each."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

KEYS = (
    "event", "severity", "database", "node", "pgt_id", "at", "seq", "message", "detail",
    "truncated",
)  # fmt: skip
"""The members of an announcement, in order."""

BIGINT = 2**63 - 1


def texts(characters: st.SearchStrategy[str], longest: int) -> st.SearchStrategy[str]:
    """Texts, also much longer than hypothesis makes them by itself."""
    short = st.text(characters, max_size=60)
    repeated = st.builds(
        lambda part, times: (part * times)[:longest],
        st.text(characters, min_size=1, max_size=8),
        st.integers(1, longest),
    )
    return short | repeated


def details(characters: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """JSON values of any nesting."""
    leaves = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    )
    values = st.recursive(
        leaves | texts(characters, 20_000),
        lambda inner: (
            st.lists(inner, max_size=40)
            | st.dictionaries(st.text(characters, max_size=20), inner, max_size=20)
        ),
        max_leaves=60,
    )

    def nested(value: Any, levels: int, as_object: bool) -> Any:
        for _ in range(levels):
            value = {"in": value} if as_object else [value]
        return value

    return values | st.builds(nested, values, st.integers(1, 400), st.booleans())


def check(text: str, given: dict[str, Any]) -> dict[str, Any]:
    """What an announcement must be, whatever the alert; gives the parsed object."""
    assert len(text.encode("utf-8")) <= 7999
    told: dict[str, Any] = json.loads(text)
    assert tuple(told) == KEYS
    for key in ("event", "severity", "database", "pgt_id", "seq", "at"):
        assert told[key] == given[key], key
    if given["node"] is None or len(given["node"]) <= 300:
        assert told["node"] == given["node"]
    else:
        assert len(told["node"]) >= 300
        assert given["node"].startswith(told["node"])
    assert given["message"].startswith(told["message"])
    assert isinstance(told["truncated"], bool)
    is_whole = all(told[key] == given[key] for key in ("node", "message", "detail"))
    assert told["truncated"] is not is_whole
    return told
