"""Upkeep of all databases, over one session that goes from one to the next.

Nothing waits for it: neither a tick nor a run is on its session. On the whole server it takes a
share of the time, maintenance_budget out of each scheduler_interval: after each step it rests for
as long as makes that up. But each run that ends has it delete two rows without a rest, so that it
keeps up with whatever load. Databases that have much to do take turns of some seconds.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .session import woken

if TYPE_CHECKING:
    from .process import Leader

CONTROL = 0
"""Stands for the control database, which need not be a member."""

_OPTIONS = "-c lock_timeout=1s -c synchronous_commit=off"
"""A step that a crash undoes is made again."""
_LONGEST_REST_SECONDS = 10.0
"""However small the share is: what runs leave meanwhile is to be deleted too."""
_ROWS_PER_RUN = 2
"""A run writes one row of history; those that are there already are to become fewer besides."""
_MOST_OWED_ROWS = 20_000
"""What was not called for then is not made up for all at once."""
_TURN_SECONDS = 5.0
"""The first step in a new session costs many times what the next ones do."""
_RETRY_SECONDS = 60.0


class Upkeep:
    """Does the upkeep of the databases that ask for it, until it is cancelled."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._waiting: dict[int, None] = {}
        """In the order of their turns."""
        self._failed: set[int] = set()
        self._owed = 0
        """Rows that are to be deleted without a rest."""
        self._news = asyncio.Event()
        self._members_left = asyncio.Event()

    def members_left(self) -> None:
        """Members have left: a session in one of them is to go."""
        self._members_left.set()

    def run_ended(self) -> None:
        """A run has ended, and has left a row of history."""
        self._owed = min(_MOST_OWED_ROWS, self._owed + _ROWS_PER_RUN)

    def want(self, db_oid: int) -> None:
        """A database has something to do, if it is not to be left alone for a while."""
        if db_oid not in self._failed:
            self._waiting[db_oid] = None
            self._news.set()

    async def run(self) -> None:
        """Serves the databases in turn."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._visit(next(iter(self._waiting)), stays=True)

    async def one_round(self) -> None:
        """Serves every database that waits once."""
        for db_oid in list(self._waiting):
            await self._visit(db_oid, stays=False)

    async def _visit(self, db_oid: int, *, stays: bool) -> None:
        del self._waiting[db_oid]
        if not self._is_served(db_oid):
            return
        rest = 0.0
        try:
            rest = await self._work(db_oid, stays=stays)
        except Exception:  # noqa: BLE001 - whatever it is, it must cost nobody a run
            # What a step fails with it records itself. A database that can't be connected to, or
            # whose session was ended, is its scheduler's to report; health tells of what lies.
            self._failed.add(db_oid)
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._failed.discard, db_oid)
        if stays:
            await asyncio.sleep(rest)

    async def _work(self, db_oid: int, *, stays: bool) -> float:
        """Steps until nothing is left to do or it is somebody else's turn; gives the rest that the
        last one calls for."""
        leader = self._leader
        loop = asyncio.get_running_loop()
        async with await leader.server.connect(
            leader.home.database if db_oid == CONTROL else leader.members[db_oid],
            f"pg_sluice upkeep {leader.epoch}",
            options=_OPTIONS,
        ) as session:
            turn_ends = loop.time() + (_TURN_SECONDS if stays else self._budget(db_oid))
            while True:
                share = self._budget(db_oid) / float(leader.settings["scheduler_interval"])
                started = loop.time()
                is_due, deleted = await session.one("upkeep")
                took = loop.time() - started
                rest = min(_LONGEST_REST_SECONDS, took / min(1.0, share) - took)
                if 0 < deleted <= self._owed:
                    rest = 0.0
                self._owed = max(0, self._owed - deleted)
                if not is_due or not self._is_served(db_oid):
                    return rest
                others_wait = not self._waiting.keys() <= {db_oid}
                if loop.time() >= turn_ends and (others_wait or not stays):
                    self._waiting[db_oid] = None
                    return rest
                if stays and not await self._rests(db_oid, rest):
                    return 0.0

    def _budget(self, db_oid: int) -> float:
        return float(self._leader.settings_of(db_oid)["maintenance_budget"])

    async def _rests(self, db_oid: int, seconds: float) -> bool:
        """Waits that long; false as soon as the database is not served any more."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await woken(self._members_left, left)
            if not self._is_served(db_oid):
                return False
        return True

    def _is_served(self, db_oid: int) -> bool:
        return db_oid == CONTROL or self._leader.serves(db_oid)
