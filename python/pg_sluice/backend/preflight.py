"""What start() needs, and start() itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import connection
from ..core import errors
from ..core.errors import SluiceError
from . import server
from .control import Control, connected, parameters
from .plpy_types import Plpy

if TYPE_CHECKING:
    from collections.abc import Iterator


_ENTRY = "entry in pg_cron"


def check_login(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """Raises 55000 unless the scheduler can connect to this database as a role."""
    connection.load_driver()
    import psycopg

    from .session import connect

    where = server.where(plpy)
    user = {"user": bytes.fromhex(arguments["user"])}
    try:
        connect(plpy, parameters(where, where["dbname"]) | user).close()
    except psycopg.OperationalError as error:
        raise errors.login_refused(arguments["role"], connection.reason(error)) from None


def preflight(plpy: Plpy, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """See sluice.preflight(). A check whose ground is missing is left out."""
    return list(_checks(plpy))


def start(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """See sluice.start()."""
    for check in _checks(plpy):
        # What it sees to itself is no obstacle.
        if not check["ok"] and check["check"] != _ENTRY:
            raise errors.preflight_failed(f"{check['check']}: {check['detail']}", check["hint"])
    with connected(plpy) as control:
        control.call(
            "join_database",
            _db_oid=control.where["db_oid"],
            _joined_by=arguments["user"],
            _version=control.where["version"],
        )
        control.flush()


def _check(check: str, ok: bool, detail: str, hint: str | None = None) -> dict[str, Any]:
    return {"check": check, "ok": ok, "detail": detail, "hint": None if ok else hint}


def _checks(plpy: Plpy) -> Iterator[dict[str, Any]]:
    connection.load_driver()
    where = server.where(plpy)
    database = where["control_database"]
    if database is None or not server.has_loaded_pg_cron(plpy):
        error = errors.no_control_database()
        yield _check("pg_cron is loaded", False, "pg_cron is not loaded", error.hint)
        return
    yield _check("pg_cron is loaded", True, f'the control database is "{database}"')
    try:
        with connected(plpy) as control:
            yield _check("control connection", True, f'role "{where["role"]}" can connect')
            yield from _control_checks(control)
    except SluiceError as error:
        yield _check(
            "control connection",
            False,
            f"{error.message}: {error.detail}" if error.detail else error.message,
            f'pg_hba.conf must let role "{where["role"]}" connect over the Unix socket from the'
            " server itself.",
        )
        return
    yield from _leader_session_checks(plpy, where, database)
    yield _member_connection_check(plpy, where)


def _control_checks(control: Control) -> Iterator[dict[str, Any]]:
    where = control.where
    database = where["control_database"]
    versions = dict(
        control.session.execute(
            "SELECT e.extname, e.extversion FROM pg_catalog.pg_extension AS e"
            " WHERE e.extname IN ('pg_cron', 'pg_sluice')"
        ).fetchall()
    )
    cron = versions.get("pg_cron")
    yield _check(
        "pg_cron is installed",
        cron is not None,
        f"version {cron}" if cron else f'not in the control database "{database}"',
        f'Run CREATE EXTENSION pg_cron in database "{database}".',
    )
    ours = versions.get("pg_sluice")
    yield _check(
        "pg_sluice in the control database",
        ours == where["version"],
        f"version {ours}" if ours else f'not installed in the control database "{database}"',
        f'Run ALTER EXTENSION pg_sluice UPDATE in database "{database}" and here.'
        if ours
        else f'Run CREATE EXTENSION pg_sluice CASCADE in database "{database}".',
    )
    if cron is not None:
        stalls = where["background_workers"] == "on" and _version(cron) < (1, 5)
        yield _check(
            "pg_cron runs jobs side by side",
            not stalls,
            f"pg_cron {cron} with cron.use_background_workers = {where['background_workers']}",
            "Before pg_cron 1.5 one long job in a background worker stops all other cron jobs. Set"
            " cron.use_background_workers = off and cron.host to the Unix socket directory, and"
            " restart the server.",
        )
    if cron is not None and ours == where["version"]:
        entry = control.call("leader_entry")
        yield _check(
            _ENTRY,
            entry in (None, "active"),
            f'"pg_sluice" is {entry}' if entry else "sluice.start() makes it",
            "Without it pg_cron starts no leader. sluice.start() makes it what it should be.",
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace("-", ".").split(".") if part.isdigit())


def _leader_session_checks(
    plpy: Plpy, where: dict[str, Any], database: str
) -> Iterator[dict[str, Any]]:
    """The leader's own session, which is pg_cron's: not a connection with our settings."""
    import psycopg

    from .session import connect

    by_connection = where["background_workers"] != "on"
    host = (
        where["cron_host"] if by_connection else parameters(where, where["control_dbname"])["host"]
    )
    try:
        session = connect(
            plpy,
            {
                "host": host,
                "port": where["port"],
                "user": where["username"],
                "dbname": where["control_dbname"],
            },
            seconds=5,
        )
    except psycopg.OperationalError as error:
        yield _check(
            "connection of pg_cron",
            False,
            connection.reason(error),
            "pg_cron connects to cron.host. Set cron.host to the Unix socket directory"
            f" ({where['sockets']}) and restart the server, or let the role in with pg_hba.conf.",
        )
        return
    with session:
        yield _check("connection of pg_cron", True, f'to "{host}"')
        limits = session.execute(
            "SELECT s.name, s.setting, s.unit FROM pg_catalog.pg_settings AS s"
            " WHERE s.name = ANY (%s) AND s.setting <> '0' ORDER BY s.name",
            [list(connection.TIMEOUTS)],
        ).fetchall()
    yield _check(
        "sessions may be long",
        not limits,
        ", ".join(f"{name} is {setting} {unit}" for name, setting, unit in limits) or "no timeout",
        f'Set it to 0 with ALTER ROLE {where["role"]} IN DATABASE "{database}" SET …, since the'
        " leader is one long session.",
    )


def _member_connection_check(plpy: Plpy, where: dict[str, Any]) -> dict[str, Any]:
    import psycopg

    from .session import connect

    try:
        connect(plpy, parameters(where, where["dbname"])).close()
    except psycopg.OperationalError as error:
        return _check(
            "connection of the scheduler",
            False,
            connection.reason(error),
            "The database must accept connections, and pg_hba.conf must let the role in.",
        )
    return _check(
        "connection of the scheduler", True, f'role "{where["role"]}" to "{where["database"]}"'
    )
