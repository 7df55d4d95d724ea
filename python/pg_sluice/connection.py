"""What both shells share of psycopg: where to connect, and how our SQL functions are called.

Imported late inside a user's session: psycopg takes 190 ms to import.
"""

from __future__ import annotations

import signal
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .core.errors import SluiceError
from .core.texts import acceptable, to_json

if TYPE_CHECKING:
    import psycopg
    from psycopg.abc import Buffer, Dumper

CONNECT_SECONDS = 10


TIMEOUTS = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}
"""What a role or database may set that would end a session of ours, and since which version."""


class Name(NamedTuple):
    """Of a database or role. They are shared by databases of all encodings."""

    shown: str
    """As a text."""
    raw: bytes
    """As the server knows it."""


def load_driver() -> None:
    """Imports psycopg while cancel and terminate wait: what is to use it first comes here first.

    To find libpq, ctypes runs ldconfig. The server signals a backend's whole process group, so what
    ends a statement would end that too, and the import fail.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        import psycopg  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parameters(
    sockets: str, port: str, role: bytes, database: bytes, version: int
) -> dict[str, Any]:
    """How the server connects to itself.

    Over its first Unix socket directory, or over TCP where it has none. Sessions of ours have no
    deadline from outside, have the rights of the role that connects, and don't depend on anybody's
    search_path. `version` is the server's own server_version_num.
    """
    host = sockets.split(",")[0].strip().strip('"') or "localhost"
    timeouts = " ".join(f"-c {name}=0" for name, since in TIMEOUTS.items() if version >= since)
    return {
        "host": host,
        "port": port,
        "user": role,
        "dbname": database,
        # Of a database in SQL_ASCII the driver would make bytes.
        "client_encoding": "UTF8",
        "options": f"{timeouts} -c search_path=pg_catalog,pg_temp -c client_min_messages=warning"
        " -c default_transaction_isolation=read\\ committed -c default_transaction_read_only=off"
        " -c role=none",
    }


def conninfo(given: dict[str, Any]) -> bytes:
    """A connection string of libpq's, in which names are any bytes."""
    return b" ".join(
        b"%s='%s'" % (key.encode(), _escaped(value if isinstance(value, bytes) else str(value)))
        for key, value in given.items()
    )


def _escaped(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return raw.replace(b"\\", b"\\\\").replace(b"'", b"\\'")


def send_acceptable(session: psycopg.BaseConnection[Any]) -> None:
    """From now on has all texts sent, also those in JSON, as the session's database takes them.

    They come from databases and a server that know other characters, and are to be shown. What is
    to be exact goes as bytes.
    """
    from psycopg.types.json import Jsonb

    text, jsonb = _dumpers(session.info.parameter_status("server_encoding") or "")
    session.adapters.register_dumper(str, text)
    session.adapters.register_dumper(Jsonb, jsonb)


@cache
def _dumpers(encoding: str) -> tuple[type[Dumper], type[Dumper]]:
    """Of texts and of JSON. Once for each encoding: psycopg keeps every class that it is given for
    good, so those of each session would fill the memory of who opens many."""
    from psycopg.types.json import Jsonb, JsonbDumper
    from psycopg.types.string import StrDumperUnknown

    class TextDumper(StrDumperUnknown):
        def dump(self, obj: str) -> Buffer | None:
            return super().dump(acceptable(obj, encoding))

    class JsonTextDumper(JsonbDumper):
        def dump(self, obj: Jsonb) -> Buffer | None:
            return super().dump(Jsonb(obj.obj, partial(to_json, encoding=encoding)))

    return TextDumper, JsonTextDumper


def call_statement(function: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The statement that calls a function of `_sluice` with named arguments, and its parameters.

    Its commit waits for no flush and no standby. It gives the result, and whether something was
    written.
    """
    from psycopg import sql

    statement = sql.SQL(
        "SELECT _sluice.{}({}), pg_current_xact_id_if_assigned() IS NOT NULL"
        " FROM _sluice.commit_without_flush()"
    ).format(
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
    """The message of an error and its detail, in one line; not the statements that it was in."""
    diag = getattr(error, "diag", None)
    told = [diag.message_primary, diag.message_detail] if diag else []
    return " ".join((": ".join(filter(None, told)) or str(error)).split())
