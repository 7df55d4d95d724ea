"""The end of a leader's term, and the runs that are in progress then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pg_sluice import __version__
from pg_sluice.leader import process
from pg_sluice.leader.pool import Pool
from pg_sluice.leader.process import Leader


def over(*ages: float, stuck: int = 0, version: str = __version__) -> Leader:
    """A leader at the end of its term, with runs that have been in progress for so many seconds."""
    leader = Leader(cast("Any", None), cast("Any", SimpleNamespace(server=None)), cast("Any", None))
    leader.version = version
    leader.pool = Pool(leader, asyncio.create_task)
    leader._stuck = stuck
    leader._over.set()
    now = asyncio.get_running_loop().time()
    leader.pool.runs = {number: now - age for number, age in enumerate(ages)}
    return leader


async def until_claiming(leader: Leader, *, goes_on: bool) -> None:
    async with asyncio.timeout(5):
        while leader.pool.claiming != goes_on:
            await asyncio.sleep(0)


def test_run_that_turns_out_to_be_long_stops_no_other_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. It has just begun when the term ends: claiming stops. 2. It does not end: claiming goes
    on, and who waits is looked up. 3. It ends, and so does the term."""
    monkeypatch.setattr(process, "_LONG_RUN_SECONDS", 0.1)

    async def term() -> None:
        leader = over(0)
        ending = asyncio.create_task(leader._term(60))
        await until_claiming(leader, goes_on=False)
        assert not leader._news.is_set()
        await until_claiming(leader, goes_on=True)
        assert leader._news.is_set()
        leader.pool.runs.clear()
        await asyncio.wait_for(ending, 5)

    asyncio.run(term())


def test_long_run_is_waited_for_before_claiming_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next try comes at once."""
    monkeypatch.setattr(process, "_LONG_RUN_SECONDS", 3600)

    async def term() -> None:
        leader = over(7200, 0)
        ending = asyncio.create_task(leader._term(60))
        # It has looked.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert leader.pool.claiming
        del leader.pool.runs[0]
        await until_claiming(leader, goes_on=False)
        leader.pool.runs.clear()
        await asyncio.wait_for(ending, 5)

    asyncio.run(term())


def test_run_that_nothing_can_end_is_not_waited_for() -> None:
    async def term() -> None:
        await asyncio.wait_for(over(7200, stuck=1)._term(60), 5)

    asyncio.run(term())


def test_leader_of_another_version_waits_for_no_moment_to_end() -> None:
    """It is to claim nothing more, and the caller waits for what runs."""

    async def term() -> None:
        await asyncio.wait_for(over(7200, version="0")._term(60), 5)

    asyncio.run(term())
