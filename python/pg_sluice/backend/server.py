"""The server as the session sees it: where it listens, who we are, what errors it raises."""

from __future__ import annotations

from typing import Any

from ..core.errors import SluiceError
from ..core.texts import acceptable, to_json
from .plpy_types import Plpy, rows, value


def where(plpy: Plpy) -> dict[str, Any]:
    """This session, its database and version of the extension, and what a connection needs.

    Names as they are shown, and as bytes, see connection.Name.
    """
    (row,) = rows(
        plpy,
        """
        SELECT
            _sluice.control_database() AS control_database,
            _sluice.raw_name(pg_catalog.current_setting('cron.database_name', true))
                AS control_dbname,
            pg_catalog.current_setting('cron.host', true) AS cron_host,
            pg_catalog.current_setting('cron.use_background_workers', true) AS background_workers,
            pg_catalog.current_setting('unix_socket_directories') AS sockets,
            pg_catalog.current_setting('port') AS port,
            pg_catalog.current_setting('server_version_num') AS server_version,
            _sluice.shown_name(current_user) AS role,
            _sluice.raw_name(current_user) AS username,
            _sluice.here() AS database,
            _sluice.raw_name(pg_catalog.current_database()) AS dbname,
            _sluice.database_oid() AS db_oid,
            a.pid,
            pg_catalog.to_json(a.backend_start) #>> '{}' AS backend_start,
            _sluice.extension_version() AS version
        FROM pg_catalog.pg_stat_activity AS a
        WHERE a.pid = pg_catalog.pg_backend_pid()
        """,
    )
    return row


def has_loaded_pg_cron(plpy: Plpy) -> bool:
    """Whether the settings of pg_cron's are more than names in postgresql.conf.

    Those of a library that is not loaded have values too, and are in pg_settings only once it is.
    """
    found: bool = value(
        plpy,
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_settings AS s"
        " WHERE s.name = 'cron.database_name')",
    )
    return found


def encoding(plpy: Plpy) -> str:
    """That of the session's database."""
    found: str = value(plpy, "SELECT pg_catalog.getdatabaseencoding()")
    return found


def returned(plpy: Plpy, given: dict[str, Any]) -> str:
    """The JSON that a function gives to SQL, of which the texts can come from other databases."""
    text = to_json(given)
    return text if text.isascii() else to_json(given, encoding(plpy))


def warn(plpy: Plpy, message: str) -> None:
    """Warns in the server's log and, where there is one, the client."""
    plpy.warning(acceptable(message, encoding(plpy)))


def as_sluice_error(error: Any) -> SluiceError:
    """An error that the server raised, as it would have reached the user without us.

    One in a statement has its fields in `spidata`, one outside has them as attributes.
    """
    fields = getattr(error, "spidata", None)
    detail, hint = (
        fields[1:3] if fields else (getattr(error, "detail", None), getattr(error, "hint", None))
    )
    return SluiceError(error.sqlstate or "XX000", str(error), detail=detail, hint=hint)
