"""The control connection: from a user's backend to the control database, for one call.

What goes over it takes effect at once, whether or not the calling transaction commits, and holds no
snapshot of it. It is opened for a call and closed on every way out. Reached only through the
extension's SECURITY DEFINER functions, since it connects with the extension's rights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import connection
from ..core import errors
from ..core.errors import SluiceError
from .plpy_types import Plpy, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

_POLL = "SELECT pg_catalog.pg_sleep(0.01)"
_NOTICE_SECONDS = 2.0


class Control:
    """An open control connection."""

    def __init__(self, session: psycopg.Connection[Any], database: str) -> None:
        self.session = session
        self._database = database

    def call(self, function: str, **arguments: Any) -> Any:
        """Calls a function of `_sluice` with named arguments; its errors keep their SQLSTATE."""
        import psycopg

        try:
            row = self.session.execute(*connection.call_statement(function, arguments)).fetchone()
        except psycopg.errors.InvalidSchemaName:
            raise errors.control_not_installed(self._database) from None
        except psycopg.Error as error:
            raise connection.as_sluice_error(error) from None
        return None if row is None else row[0]


@contextmanager
def connected(plpy: Plpy) -> Iterator[Control]:
    """A control connection. Raises 55000 without pg_cron and 08001 when it can't be made."""
    import psycopg

    where = _where(plpy)
    database = where["control_database"]
    if database is None:
        raise errors.no_control_database()
    try:
        session = psycopg.connect(
            **_parameters(where, database), application_name="pg_sluice control", autocommit=True
        )
    except psycopg.OperationalError as error:
        raise errors.control_unreachable(database, connection.reason(error)) from None
    with session:
        yield Control(session, database)


def call_function(plpy: Plpy, arguments: dict[str, Any]) -> Any:
    """Calls one function in the control database."""
    with connected(plpy) as control:
        result = control.call(arguments["function"], **arguments["arguments"])
    return result if isinstance(result, (bool, int, float, list, dict, type(None))) else str(result)


def drain(plpy: Plpy, arguments: dict[str, Any]) -> str:
    """See sluice.drain()."""
    where = _where(plpy)
    request: dict[str, Any] = {"_db_oid": 0 if arguments["cluster"] else where["db_oid"]}
    waiter = {"_pid": where["pid"], "_backend_start": where["backend_start"]}
    with connected(plpy) as control:
        control.call(
            "request_drain",
            **request,
            _requested_by=arguments["user"],
            **(waiter if arguments["wait"] else dict.fromkeys(waiter)),
        )

        def drained() -> bool:
            found = control.call("check_drain", **request)
            if found is None:
                raise errors.drain_ended()
            return bool(found)

        if not arguments["wait"]:
            return "drained" if drained() else "draining"
        try:
            done = _wait(plpy, drained, arguments["seconds"], "everything to end its run")
        except BaseException:
            control.call("withdraw_drain", **request, **waiter)
            raise
        control.call("keep_drain", **request, **waiter)
    return "drained" if done else "draining"


def pause(plpy: Plpy, arguments: dict[str, Any]) -> str:
    """See sluice.pause()."""
    where = _where(plpy)
    pgt_ids = [node["pgt_id"] for node in arguments["nodes"]]
    if not pgt_ids:
        return "paused"
    waiter = {"_pid": where["pid"], "_backend_start": where["backend_start"]}
    with connected(plpy) as control:
        control.call(
            "request_pause",
            _db_oid=where["db_oid"],
            _nodes=arguments["nodes"],
            _requested_by=arguments["user"],
            **(waiter if arguments["wait"] else dict.fromkeys(waiter)),
        )

        def done() -> bool:
            return bool(control.call("pause_is_done", _db_oid=where["db_oid"], _pgt_ids=pgt_ids))

        if not arguments["wait"]:
            return "paused" if done() else "pausing"
        try:
            paused = _wait(plpy, done, arguments["seconds"], "these nodes to end their runs")
        except BaseException:
            control.call("withdraw_pause", _db_oid=where["db_oid"], **waiter)
            raise
        control.call("keep_pause", _db_oid=where["db_oid"], **waiter)
    return "paused" if paused else "pausing"


def check_login(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """Raises 55000 unless the scheduler can connect to this database as a role."""
    import psycopg

    where = _where(plpy)
    try:
        psycopg.connect(
            **{**_parameters(where, where["database"]), "user": arguments["role"]}
        ).close()
    except psycopg.OperationalError as error:
        raise errors.login_refused(arguments["role"], connection.reason(error)) from None


def preflight(plpy: Plpy, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """See sluice.preflight(). A check whose ground is missing is left out."""
    return list(_checks(plpy))


def start(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """See sluice.start()."""
    for check in _checks(plpy):
        if not check["ok"]:
            raise errors.preflight_failed(f"{check['check']}: {check['detail']}.", check["hint"])
    where = _where(plpy)
    with connected(plpy) as control:
        control.call(
            "join_database",
            _db_oid=where["db_oid"],
            _joined_by=arguments["user"],
            _version=where["version"],
        )


def _wait(plpy: Plpy, reached: Callable[[], bool], seconds: float, what: str) -> bool:
    """Polls until a condition holds or the time is over; cancel and terminate end it at once.

    A notice now and then tells who waits; it is also how the server notices that nobody does.
    """
    now = time.monotonic()
    deadline, notice = now + seconds, now + _NOTICE_SECONDS
    while not reached():
        now = time.monotonic()
        if now >= deadline:
            return False
        if now >= notice:
            plpy.notice(f"waiting for {what}")
            notice = now + _NOTICE_SECONDS
        plpy.execute(_POLL)
    return True


def _where(plpy: Plpy) -> dict[str, Any]:
    (row,) = rows(
        plpy,
        """
        SELECT
            pg_catalog.current_setting('cron.database_name', true) AS control_database,
            pg_catalog.current_setting('cron.host', true) AS cron_host,
            pg_catalog.current_setting('cron.use_background_workers', true) AS background_workers,
            pg_catalog.current_setting('unix_socket_directories') AS sockets,
            pg_catalog.current_setting('port') AS port,
            pg_catalog.current_setting('server_version_num') AS server_version,
            current_user::text AS role,
            pg_catalog.current_database()::text AS database,
            _sluice.database_oid() AS db_oid,
            a.pid,
            pg_catalog.to_json(a.backend_start) #>> '{}' AS backend_start,
            (SELECT e.extversion FROM pg_catalog.pg_extension AS e WHERE e.extname = 'pg_sluice')
                AS version
        FROM pg_catalog.pg_stat_activity AS a
        WHERE a.pid = pg_catalog.pg_backend_pid()
        """,
    )
    return row


def _parameters(where: dict[str, Any], database: str) -> dict[str, Any]:
    return connection.parameters(
        where["sockets"], where["port"], where["role"], database, int(where["server_version"])
    )


def _check(check: str, ok: bool, detail: str, hint: str | None = None) -> dict[str, Any]:
    return {"check": check, "ok": ok, "detail": detail, "hint": None if ok else hint}


def _checks(plpy: Plpy) -> Iterator[dict[str, Any]]:
    where = _where(plpy)
    database = where["control_database"]
    if database is None:
        error = errors.no_control_database()
        yield _check("pg_cron is loaded", False, "pg_cron is not loaded", error.hint)
        return
    yield _check("pg_cron is loaded", True, f'the control database is "{database}"')
    try:
        with connected(plpy) as control:
            yield _check("control connection", True, f'role "{where["role"]}" can connect')
            yield from _control_checks(where, control)
    except SluiceError as error:
        yield _check(
            "control connection",
            False,
            f"{error.message}: {error.detail}" if error.detail else error.message,
            f'pg_hba.conf must let role "{where["role"]}" connect over the Unix socket from the'
            " server itself.",
        )
        return
    yield from _leader_session_checks(where, database)
    yield _member_connection_check(where)


def _control_checks(where: dict[str, Any], control: Control) -> Iterator[dict[str, Any]]:
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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace("-", ".").split(".") if part.isdigit())


def _leader_session_checks(where: dict[str, Any], database: str) -> Iterator[dict[str, Any]]:
    """The leader's own session, which is pg_cron's: not a connection with our settings."""
    import psycopg

    by_connection = where["background_workers"] != "on"
    host = where["cron_host"] if by_connection else _parameters(where, database)["host"]
    try:
        session = psycopg.connect(
            host=host, port=where["port"], user=where["role"], dbname=database, connect_timeout=5
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


def _member_connection_check(where: dict[str, Any]) -> dict[str, Any]:
    import psycopg

    try:
        psycopg.connect(**_parameters(where, where["database"])).close()
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
