"""What failed in passing is tried again, and what fails for good keeps its cause."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from pg_sluice.connection import Name
from pg_sluice.core import ticks
from pg_sluice.core.errors import TickFailed
from pg_sluice.leader.process import Leader
from pg_sluice.leader.retry import retrying
from pg_sluice.leader.scheduler import Scheduler, Step


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "RETRIES", (0.0, 0.0, 0.0))


class Attempts:
    """Fails with the given errors, one after the other, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.log: list[str] = []

    async def attempt(self) -> str:
        self.log.append("attempt")
        if self._errors:
            raise self._errors.pop(0)
        return "done"

    async def look(self) -> None:
        self.log.append("look")


def test_waits_grow_and_the_lease_is_looked_at_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was held while it waited may be lost by then."""
    made = Attempts(psycopg.errors.DeadlockDetected(), psycopg.errors.LockNotAvailable())

    async def sleep(seconds: float) -> None:
        made.log.append(f"{seconds} s")

    monkeypatch.setattr(ticks, "RETRIES", (0.25, 0.5, 1.0))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert asyncio.run(retrying(made.attempt, made.look)) == "done"
    assert made.log == ["attempt", "0.25 s", "look", "attempt", "0.5 s", "look", "attempt"]


def test_there_are_three_retries() -> None:
    errors = [psycopg.errors.SerializationFailure(str(n)) for n in range(5)]
    made = Attempts(*errors)
    with pytest.raises(psycopg.errors.SerializationFailure) as caught:
        asyncio.run(retrying(made.attempt, made.look))
    assert caught.value is errors[3]
    assert made.log.count("attempt") == 4


def test_lost_lease_ends_it() -> None:
    made = Attempts(psycopg.errors.SerializationFailure())
    lost = RuntimeError("lost")

    async def look() -> None:
        raise lost

    with pytest.raises(RuntimeError) as caught:
        asyncio.run(retrying(made.attempt, look))
    assert caught.value is lost
    assert made.log == ["attempt"]


@pytest.mark.parametrize("error", [psycopg.errors.DivisionByZero(), ValueError()])
def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    made = Attempts(error)
    with pytest.raises(type(error)) as caught:
        asyncio.run(retrying(made.attempt, made.look))
    assert caught.value is error
    assert made.log == ["attempt"]


def test_what_may_not_be_tried_again_is_not() -> None:
    made = Attempts(psycopg.errors.SerializationFailure())
    with pytest.raises(psycopg.errors.SerializationFailure):
        asyncio.run(retrying(made.attempt, made.look, may_retry=lambda: False))
    assert made.log == ["attempt"]


async def _nothing(*_: object, **__: object) -> None:
    pass


@pytest.mark.parametrize(
    ("error", "attempts"),
    [(psycopg.errors.SerializationFailure("no"), 4), (psycopg.errors.DivisionByZero("no"), 1)],
)
def test_failed_tick_has_its_original_error_as_cause(error: psycopg.Error, attempts: int) -> None:
    leader = SimpleNamespace(
        epoch=1, members={7: Name("app", b"app")}, control=SimpleNamespace(row=_nothing)
    )
    scheduler = Scheduler(cast("Leader", leader), 7)
    made = Attempts(*[error] * 4)

    async def one_pass(_: float) -> Any:
        scheduler._step = Step("quarantine", node="odd")
        return await made.attempt()

    scheduler._pass = one_pass  # type: ignore[method-assign]
    with pytest.raises(TickFailed) as caught:
        asyncio.run(scheduler._pass_with_retries(0))
    assert caught.value.__cause__ is error
    assert made.log.count("attempt") == attempts
    assert caught.value.facts == {
        "database": "app",
        "step": "quarantine",
        "node": "odd",
        "attempts": attempts,
        "sqlstate": error.sqlstate,
        "message": "no",
        "context": None,
    }
