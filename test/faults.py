"""Faults on the real path: a function of `_sluice` that fails as often as it is armed to.

    fault = Fault(database, "tick")     # wrapped, disarmed
    fault.arm(2, "40001")               # its next two calls fail, whoever makes them
    assert fault.consumed == 2
    fault.lift()                        # as if nothing had been

It holds in one database, and for all of its sessions.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from cluster import Database

_SQL = Path(__file__).with_suffix(".sql").read_text()


class Fault:
    """The faults of one function in one database."""

    def __init__(self, database: Database, function: str) -> None:
        self._database = database
        self._function = function
        self._armed = 0
        self._log_start = 0
        self.message = f"injected fault in {function}"
        if database.execute("SELECT to_regnamespace('faults') IS NULL") == [(True,)]:
            database.execute(_SQL)
        database.execute("SELECT faults.wrap(%s)", [function])
        self.arm(0)

    def arm(self, times: int, sqlstate: str = "XX000") -> None:
        """Has that many calls fail from now on, and counts anew."""
        self._log_start = len(self._database.cluster.log_text())
        self._armed = times
        self._database.execute(
            "UPDATE faults.fault SET sqlstate = %s, message = %s WHERE function = %s",
            [sqlstate, self.message, self._function],
        )
        # After the rest, and at once for all sessions: a sequence has no transaction.
        self._database.execute(
            "SELECT setval(format('faults.%%I', %s::text), %s)", [self._function, -times]
        )

    @property
    def calls(self) -> int:
        """How often it was called since it was armed, failing or not."""
        ((last,),) = self._database.execute(f'SELECT last_value FROM faults."{self._function}"')
        return int(last) + self._armed

    @property
    def consumed(self) -> int:
        """How many calls failed since it was armed."""
        return min(self.calls, self._armed)

    @property
    def times(self) -> list[datetime]:
        """When they failed: what the server's log has since it was armed."""
        line = re.compile(
            rf"^(\S+ \S+) UTC \[\d+\] {re.escape(self._database.name)} .*"
            rf"ERROR:  {re.escape(self.message)}$",
            re.MULTILINE,
        )
        return [
            datetime.fromisoformat(at).replace(tzinfo=UTC)
            for at in line.findall(self._database.cluster.log_text()[self._log_start :])
        ]

    def lift(self) -> None:
        """Puts the function itself back."""
        self._database.execute("SELECT faults.lift(%s)", [self._function])
        if self._database.execute("SELECT count(*) FROM faults.fault") == [(0,)]:
            self._database.execute("DROP SCHEMA faults CASCADE")
