"""What all our sessions have in common costs a process that opens many of them nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import psycopg
from psycopg.adapt import AdaptersMap

from pg_sluice.connection import send_acceptable


def dumpers(encoding: str) -> set[Any]:
    """The classes that a session gets besides those of psycopg."""
    given: set[Any] = set()
    adapters = AdaptersMap(psycopg.adapters)
    session = SimpleNamespace(
        adapters=SimpleNamespace(
            register_dumper=lambda _, dumper: given.add(dumper),
            get_dumper=adapters.get_dumper,
        ),
        info=SimpleNamespace(parameter_status=lambda _: encoding),
    )
    send_acceptable(cast("psycopg.Connection[Any]", session))
    return given


def test_sessions_of_one_encoding_share_their_classes() -> None:
    """psycopg keeps every class that it is given: a leader that opens a session for each look at
    each of a hundred databases grew by hundreds of megabytes in an hour."""
    assert dumpers("UTF8") == dumpers("UTF8")
    assert not dumpers("UTF8") & dumpers("LATIN1")
