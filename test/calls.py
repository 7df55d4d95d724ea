"""Calls that wait, and runs that they wait for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from cluster import WAIT_SECONDS, Cluster, Database


class Call:
    """A statement that runs on a connection of its own, which ends with it."""

    def __init__(
        self,
        database: Cluster | Database,
        statement: str,
        connection: psycopg.Connection[Any] | None = None,
    ) -> None:
        self.connection = connection or database.connect()
        self.pid = self.connection.info.backend_pid
        self._value: Any = None
        self._error: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run, args=[statement], daemon=True)
        self._thread.start()

    def _run(self, statement: str) -> None:
        try:
            with self.connection:
                cursor = self.connection.execute(statement)
                row = cursor.fetchone() if cursor.description else None
            self._value = row and row[0]
        except psycopg.Error as error:
            self._error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def value(self, timeout: float = WAIT_SECONDS) -> Any:
        """What the statement gave; its error is raised."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"no answer within {timeout} s"
        if self._error is not None:
            raise self._error
        return self._value


class Gate:
    """A job that runs until it is let through: it waits for a lock that the test holds."""

    def __init__(
        self, database: Database, name: str = "gate", *, transactional: bool = True
    ) -> None:
        self.name = name
        self._database = database
        database.execute("CREATE TABLE IF NOT EXISTS door (name text PRIMARY KEY)")
        database.execute("INSERT INTO door VALUES (%s)", [name])
        database.execute(
            "SELECT sluice.schedule(%s, 'manual', %s, %s, lock_timeout => '5 min')",
            [name, f"UPDATE door SET name = name WHERE name = '{name}'", transactional],
        )
        self._holder = database.connect(autocommit=False)

    def enter(self) -> None:
        """Start the job; returns once it waits at the gate."""
        self._holder.execute("SELECT FROM door WHERE name = %s FOR UPDATE", [self.name])
        self._database.execute("SELECT sluice.run_now(%s)", [self.name])
        self._database.wait_for(
            "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            f" AND {self._holder.info.backend_pid} = ANY (pg_blocking_pids(pid))"
        )

    def open(self) -> None:
        self._holder.rollback()

    def close(self) -> None:
        self._holder.close()


@contextmanager
def a_run_in_progress(
    database: Database, name: str = "gate", *, transactional: bool = True
) -> Iterator[Gate]:
    gate = Gate(database, name, transactional=transactional)
    gate.enter()
    try:
        yield gate
    finally:
        gate.close()


def history(database: Database, name: str) -> list[Any]:
    return database.execute(
        "SELECT outcome, started_at FROM sluice.history WHERE name = %s ORDER BY started_at", [name]
    )


def ticks_pass(database: Database, count: int = 1) -> None:
    """Wait until the database was ticked that many times from now on."""
    for _ in range(count):
        ((now,),) = database.execute("SELECT clock_timestamp()")
        database.wait_for(
            f"SELECT d.last_tick_at > '{now}' FROM sluice.databases() AS d"
            " WHERE d.database = current_database()"
        )
