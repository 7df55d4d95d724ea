"""The limits of a run: options before settings, and nothing unreadable."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core.limits import limits

SETTINGS = {"lock_timeout": 5.0, "refresh_timeout": 300.0, "refresh_work_mem": 64 * 1024**2}


def test_settings_hold_where_the_node_says_nothing() -> None:
    found = limits({}, SETTINGS)
    assert found.settings() == {
        "lock_timeout": "5000ms",
        "statement_timeout": "300000ms",
        "work_mem": "65536kB",
    }
    assert not found.spares_memory


def test_the_nodes_own_values_win() -> None:
    found = limits({"lock_timeout": 0.25, "refresh_timeout": "7.5", "job": True}, SETTINGS)
    assert (found.lock_timeout, found.refresh_timeout) == (0.25, 7.5)


def test_a_remedy() -> None:
    found = limits({"work_mem": 8 * 1024**2}, SETTINGS)
    assert found.settings() == {
        "lock_timeout": "5000ms",
        "statement_timeout": "300000ms",
        "work_mem": "8192kB",
        "max_parallel_workers_per_gather": "0",
        "hash_mem_multiplier": "1",
    }


def test_a_remedy_gives_no_more_than_the_setting() -> None:
    found = limits({"work_mem": 1024**3}, SETTINGS)
    assert (found.work_mem, found.spares_memory) == (64 * 1024**2, True)


def test_the_least_is_never_none() -> None:
    """A timeout of 0 would be none at all, and less work_mem the server does not take."""
    found = limits({"lock_timeout": 1e-9, "refresh_timeout": 0.0004, "work_mem": 1}, SETTINGS)
    assert found.settings() == {
        "lock_timeout": "1ms",
        "statement_timeout": "1ms",
        "work_mem": "64kB",
        "max_parallel_workers_per_gather": "0",
        "hash_mem_multiplier": "1",
    }


@pytest.mark.parametrize("name", ["lock_timeout", "refresh_timeout", "work_mem"])
@pytest.mark.parametrize("value", ["soon", -1, 0, math.inf, math.nan, "Infinity", [], {}])
def test_what_can_not_be_read_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        limits({name: value}, SETTINGS)


@given(st.floats(1e-9, 1e12), st.integers(1, 2**50))
def test_any_size_is_one_that_the_server_takes(seconds: float, size: int) -> None:
    found = limits(
        {"lock_timeout": seconds, "refresh_timeout": seconds, "work_mem": size}, SETTINGS
    ).settings()
    for name in ("lock_timeout", "statement_timeout"):
        assert 1 <= int(found[name].removesuffix("ms")) <= 2**31 - 1
    assert 64 <= int(found["work_mem"].removesuffix("kB")) <= 64 * 1024
