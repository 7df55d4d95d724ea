"""What creating stream tables costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from report import line, rounded, type_of_line
from rig import create_sources, definition, members

_CREATE = "SELECT sluice.create_stream_table(%(name)s, %(query)s, %(schedule)s)"
_CREATE_MANY = "SELECT * FROM sluice.bulk_create(%s)"
_ONE_BY_ONE = 20
_BULK = 100


def create_cost() -> Iterator[type_of_line]:
    """One by one in a new session, then a hundred at once, then one by one beside those."""
    with members() as (member,):
        create_sources(member)
        with member.cluster.connect(member.name) as connection:
            numbers = iter(range(1 + _ONE_BY_ONE + _BULK + _ONE_BY_ONE))
            first = _create(connection, next(numbers))
            few = [_create(connection, next(numbers)) for _ in range(_ONE_BY_ONE)]
            bulk = [definition(next(numbers), "1h") for _ in range(_BULK)]
            together = _ms(connection.execute, _CREATE_MANY, [Jsonb(bulk)])
            many = [_create(connection, next(numbers)) for _ in range(_ONE_BY_ONE)]
    yield line(
        "create_cost",
        median(few),
        "ms for one more",
        compared_to={
            "the first one in a session, ms": rounded(first),
            f"{_BULK} with bulk_create, ms each": rounded(together / _BULK),
            f"one more beside {_BULK}, ms": rounded(median(many)),
        },
        bulk_create_ms=rounded(together),
    )


def _create(connection: psycopg.Connection[Any], number: int) -> float:
    return _ms(connection.execute, _CREATE, definition(number, "1h"))


def _ms(call: Callable[..., object], *arguments: Any) -> float:
    started = time.perf_counter()
    call(*arguments)
    return 1000 * (time.perf_counter() - started)
