"""The control connection: from a user's backend to the control database, for one call.

What goes over it takes effect at once, whether or not the calling transaction commits, and holds no
snapshot of it. It is opened for a call and closed on every way out. Reached only through the
extension's SECURITY DEFINER functions, since it connects with the extension's rights.

Whatever it waits for, it heeds a cancel or terminate of the user's session, see session.py.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import connection
from ..core import errors
from . import server
from .plpy_types import Plpy, check_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import LiteralString

    from .session import Session

_LOCK_TIMEOUT = "100ms"
_PATIENCE_SECONDS = 10.0
"""Longest wait for a lock in the control database. Its holders keep them for milliseconds."""


class Control:
    """An open control connection."""

    def __init__(self, plpy: Plpy, session: Session, where: dict[str, Any]) -> None:
        self.session = session
        self.where = where
        """As server.where() has it."""
        self._plpy = plpy
        self._to_flush = False
        self._database = where["control_database"]

    def call(self, function: str, *, patient: bool = True, **arguments: Any) -> Any:
        """Calls a function of `_sluice` with named arguments; its errors keep their SQLSTATE.

        Waits for a lock until the user's session is cancelled, or hardly at all if it is not
        `patient`. Its commit waits for nothing, since it has locks, the gate too, that the others
        need: see flush().
        """
        import psycopg

        if not patient:
            self.session.hurry()
        statement = connection.call_statement(function, arguments)
        give_up = time.monotonic() + (_PATIENCE_SECONDS if patient else 0)
        while True:
            try:
                row = self.session.execute(*statement).fetchone()
            except psycopg.errors.LockNotAvailable as error:
                if time.monotonic() > give_up:
                    raise errors.control_busy(self._database) from error
                check_interrupts(self._plpy)
            except psycopg.errors.InvalidSchemaName:
                raise errors.control_not_installed(self._database) from None
            except psycopg.Error as error:
                raise connection.as_sluice_error(error) from None
            else:
                result, wrote = row or (None, False)
                self._to_flush = self._to_flush or wrote
                return result

    def flush(self) -> None:
        """Waits until what the calls have changed outlives a crash and, where commits wait for a
        standby, a failover.

        By a commit that comes later and holds no lock. It waits only where its transaction has
        written something, hence the message, which is for nobody.
        """
        if self._to_flush:
            self._row("SELECT pg_logical_emit_message(true, 'pg_sluice', '')")

    def identity(self) -> dict[str, Any]:
        """The connection's own session, by which what it asks for ends with it."""
        row = self._row(
            "SELECT a.pid, to_json(a.backend_start) #>> '{}' FROM pg_stat_activity AS a"
            " WHERE a.pid = pg_backend_pid()"
        )
        return dict(zip(("_pid", "_backend_start"), row, strict=True))

    def _row(self, query: LiteralString) -> tuple[Any, ...]:
        import psycopg

        try:
            return self.session.execute(query).fetchone() or ()
        except psycopg.Error as error:
            raise connection.as_sluice_error(error) from None


@contextmanager
def connected(plpy: Plpy) -> Iterator[Control]:
    """A control connection. Raises 55000 without pg_cron and 08001 when it can't be made."""
    connection.load_driver()
    import psycopg

    from .session import connect

    where = server.where(plpy)
    database = where["control_database"]
    if database is None:
        raise errors.no_control_database()
    given = parameters(where, where["control_dbname"]) | {"application_name": "pg_sluice control"}
    given["options"] += f" -c lock_timeout={_LOCK_TIMEOUT}"
    try:
        session = connect(plpy, given)
    except psycopg.OperationalError as error:
        raise errors.control_unreachable(database, connection.reason(error)) from None
    with session:
        yield Control(plpy, session, where)


def call_function(plpy: Plpy, arguments: dict[str, Any]) -> Any:
    """Calls one function in the control database."""
    with connected(plpy) as control:
        result = control.call(arguments["function"], **arguments["arguments"])
        control.flush()
    return result if isinstance(result, (bool, int, float, list, dict, type(None))) else str(result)


def parameters(where: dict[str, Any], database: bytes) -> dict[str, Any]:
    """How the extension connects to a database of this server."""
    return connection.parameters(
        where["sockets"], where["port"], where["username"], database, int(where["server_version"])
    )
