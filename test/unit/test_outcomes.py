"""Outcomes: the table of SQLSTATEs, and what follows from each."""

from __future__ import annotations

import re

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core import outcomes
from pg_sluice.core.outcomes import Outcome, classify

ALL = {value.name: value for value in vars(outcomes).values() if isinstance(value, Outcome)}
SQLSTATES = sorted(
    {
        value.sqlstate
        for value in vars(psycopg.errors).values()
        if isinstance(value, type) and issubclass(value, psycopg.Error) and value.sqlstate
    }
)


@pytest.mark.parametrize(
    ("sqlstate", "name"),
    [
        ("55P03", "lock_timeout"),
        ("53200", "out_of_memory"),
        ("40001", "serialization_failure"),
        ("40P01", "deadlock"),
        ("53000", "resource_exhausted"),
        ("53100", "resource_exhausted"),
        ("53300", "resource_exhausted"),
        ("53400", "resource_exhausted"),
        ("08000", "connection_lost"),
        ("08003", "connection_lost"),
        ("08006", "connection_lost"),
        ("08P01", "connection_lost"),
        (None, "connection_lost"),
        # The session was ended from outside: by a person, a crash, a restart, a timeout of the
        # session, or because its database went.
        ("57P01", "worker_crashed"),
        ("57P02", "worker_crashed"),
        ("57P03", "worker_crashed"),
        ("57P04", "worker_crashed"),
        ("57P05", "worker_crashed"),
        ("22012", "permanent_error"),
        ("42P01", "permanent_error"),
        ("P0001", "permanent_error"),
        ("XX000", "permanent_error"),
        ("40000", "permanent_error"),
        ("55000", "permanent_error"),
        ("57000", "permanent_error"),
    ],
)
def test_classification(sqlstate: str | None, name: str) -> None:
    assert classify(sqlstate, overdue=False).name == name


@pytest.mark.parametrize("sqlstate", ["57014", "57P01", "08006", None])
def test_end_of_an_overdue_run_is_the_deadlines(sqlstate: str | None) -> None:
    assert classify(sqlstate, overdue=True).name == "deadline_exceeded"


def test_cancellation_before_the_deadline_is_a_persons() -> None:
    assert classify("57014", overdue=False).name == "cancelled"


@pytest.mark.parametrize("sqlstate", ["55P03", "53200", "40001", "40P01", "53100", "22012"])
def test_an_error_of_its_own_stays_what_it_is(sqlstate: str) -> None:
    """Also of a run that is overdue."""
    assert classify(sqlstate, overdue=True) is classify(sqlstate, overdue=False)


@pytest.mark.parametrize(
    ("name", "retried", "counts"),
    [
        ("lock_timeout", True, True),
        ("deadline_exceeded", True, True),
        ("out_of_memory", True, True),
        ("serialization_failure", True, True),
        ("deadlock", True, True),
        ("resource_exhausted", True, True),
        ("connection_lost", True, True),
        ("worker_crashed", True, True),
        ("cancelled", False, False),
        ("permanent_error", False, True),
    ],
)
def test_consequences(name: str, retried: bool, counts: bool) -> None:
    assert ALL[name] == Outcome(name, retried=retried, counts=counts)


@pytest.mark.parametrize("sqlstate", SQLSTATES)
def test_every_sqlstate_has_an_outcome(sqlstate: str) -> None:
    outcome = classify(sqlstate, overdue=False)
    assert ALL[outcome.name] is outcome
    # What is tried again must be able to go away by itself.
    assert not outcome.retried or sqlstate[:2] in ("08", "40", "53", "55", "57")


@given(st.none() | st.text(), st.booleans())
def test_anything_is_classified(sqlstate: str | None, overdue: bool) -> None:
    assert classify(sqlstate, overdue=overdue).name in ALL


def test_names_are_sql_identifiers() -> None:
    assert all(re.fullmatch(r"[a-z_]+", name) for name in ALL)
