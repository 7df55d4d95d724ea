"""What both shells share of psycopg: where to connect, and how our SQL functions are called.

Imported late inside a user's session: psycopg takes 190 ms to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.errors import SluiceError

if TYPE_CHECKING:
    import psycopg

CONNECT_SECONDS = 10


TIMEOUTS = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}
"""What a role or database may set that would end a session of ours, and since which version."""


def parameters(sockets: str, port: str, role: str, database: str, version: int) -> dict[str, Any]:
    """How the server connects to itself.

    Over its first Unix socket directory, or over TCP where it has none. Sessions of ours have no
    deadline from outside and don't depend on anybody's search_path. `version` is the server's own
    server_version_num.
    """
    host = sockets.split(",")[0].strip().strip('"') or "localhost"
    timeouts = " ".join(f"-c {name}=0" for name, since in TIMEOUTS.items() if version >= since)
    return {
        "host": host,
        "port": port,
        "user": role,
        "dbname": database,
        "connect_timeout": CONNECT_SECONDS,
        "options": f"{timeouts} -c search_path=pg_catalog,pg_temp -c client_min_messages=warning"
        " -c default_transaction_isolation=read\\ committed -c default_transaction_read_only=off",
    }


def call_statement(function: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The statement that calls a function of `_sluice` with named arguments, and its parameters."""
    from psycopg import sql

    statement = sql.SQL("SELECT _sluice.{}({})").format(
        sql.Identifier(function),
        sql.SQL(", ").join(
            sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name))
            for name in arguments
        ),
    )
    return statement, {name: _adapted(given) for name, given in arguments.items()}


def _adapted(given: Any) -> Any:
    from psycopg.types.json import Jsonb

    if isinstance(given, dict) or (
        isinstance(given, list) and given and isinstance(given[0], dict)
    ):
        return Jsonb(given)
    return given


def as_sluice_error(error: psycopg.Error) -> SluiceError:
    """An error of another session, with its SQLSTATE, detail and hint."""
    return SluiceError(
        error.sqlstate or "08006",
        error.diag.message_primary or reason(error),
        detail=error.diag.message_detail,
        hint=error.diag.message_hint,
    )


def reason(error: Exception) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split())
