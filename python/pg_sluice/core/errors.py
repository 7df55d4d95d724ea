"""The catalogue of errors that pg_sluice itself raises.

Each function builds one error: SQLSTATE, primary message, detail and hint, in PostgreSQL's
message style. Standard SQLSTATEs are used wherever one fits; the class SL exists only for
what a client must tell apart.
"""

from __future__ import annotations


class SluiceError(Exception):
    """An error with the fields that reach the user of SQL."""

    def __init__(
        self, sqlstate: str, message: str, *, detail: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message
        self.detail = detail
        self.hint = hint

    def record(self) -> dict[str, str]:
        """The fields that are present, as `_sluice.unwrap` takes them."""
        fields = {
            "sqlstate": self.sqlstate,
            "message": self.message,
            "detail": self.detail,
            "hint": self.hint,
        }
        return {name: value for name, value in fields.items() if value is not None}


SCHEDULES_ACCEPTED = (
    "Accepted are a duration such as '30s', '5m' or '@every 1h30m', an interval such as "
    "'10 seconds' or '1 day', five cron fields such as '0 3 * * *', optionally after a time zone "
    "as in 'TZ=Europe/Oslo 0 3 * * *', '@hourly', '@daily', '@weekly', '@monthly', '@yearly', "
    "'calculated', and 'manual'."
)


def invalid_schedule(spec: str, reason: str) -> SluiceError:
    """A schedule that can't be parsed; `reason` is a full sentence."""
    return SluiceError(
        "22023", f'invalid schedule "{spec}"', detail=reason, hint=SCHEDULES_ACCEPTED
    )


def cannot_listen(sqlstate: str, address: str, reason: str) -> SluiceError:
    """The metrics can't be served on the address that is configured."""
    return SluiceError(
        sqlstate,
        f"could not serve metrics on {address}: {reason}",
        hint="sluice.configure('metrics_listen', …, cluster => true) sets another address.",
    )


def null_argument(name: str) -> SluiceError:
    """A required argument is NULL."""
    return SluiceError("22004", f"{name} must not be null")


def invalid_argument(
    message: str, *, detail: str | None = None, hint: str | None = None
) -> SluiceError:
    """An argument has a value that is never accepted."""
    return SluiceError("22023", message, detail=detail, hint=hint)


def limit_exceeded(what: str, value: int, maximum: int, setting: str) -> SluiceError:
    """An argument is larger than a setting allows; `what` names it, as in "query is too long"."""
    return SluiceError(
        "54000",
        what,
        detail=f"It has {value}, and {setting} is {maximum}.",
        hint=f"The setting can be raised with sluice.configure('{setting}', …).",
    )


def volatile_query(functions: list[str]) -> SluiceError:
    """A stream table's query calls volatile functions."""
    return SluiceError(
        "0A000",
        "query of a stream table must not be volatile",
        detail=f"It uses {', '.join(functions)}.",
        hint="Compute such a value when the row is written to the source, or use a job.",
    )


def unsupported_query(
    message: str, *, detail: str | None = None, hint: str | None = None
) -> SluiceError:
    """A stream table's query uses something that can't be kept fresh."""
    return SluiceError("0A000", message, detail=detail, hint=hint)


def columns_differ(name: str) -> SluiceError:
    """An altered query does not have the columns of its table."""
    return SluiceError(
        "42P16",
        f'cannot change columns of stream table "{name}"',
        detail="The new query must have the same columns: names, types, collations and order.",
        hint="Drop the stream table and create it with the new query.",
    )


def cycle(path: list[str]) -> SluiceError:
    """Nodes read each other; `path` starts and ends with the same name."""
    return SluiceError(
        "42P17",
        f'"{path[0]}" would read itself',
        detail=f"The path is {' -> '.join(path)}, where each reads the next.",
    )


def not_relation(name: str, wanted: str) -> SluiceError:
    """A name that is no relation of the wanted kind."""
    return SluiceError("42P01", f'{wanted} "{name}" does not exist')


def no_schema() -> SluiceError:
    """An unqualified name where the search_path has no schema to create in."""
    return SluiceError("3F000", "no schema has been selected to create in")


def wrong_kind(name: str, wanted: str, hint: str) -> SluiceError:
    """A relation of another kind than the function works on."""
    return SluiceError("42809", f'"{name}" is not a {wanted}', hint=hint)


def preflight_failed(detail: str, hint: str | None) -> SluiceError:
    """`start()` where a check of `preflight()` fails."""
    return SluiceError(
        "55000",
        "cannot start scheduling in this database",
        detail=detail if detail.endswith((".", "?")) else f"{detail}.",
        hint=hint,
    )


def request_ended(kind: str) -> SluiceError:
    """Somebody ended a drain or pause while a call waited for it; `kind` says which."""
    end = {"drain": "sluice.resume()", "pause": "sluice.unpause()"}[kind]
    return SluiceError("55000", f"the {kind} was ended by {end} before it was reached")


def no_control_database() -> SluiceError:
    """The server has not loaded pg_cron, so there is no control database."""
    return SluiceError(
        "55000",
        "pg_cron is not loaded",
        hint="Add pg_cron to shared_preload_libraries, set cron.database_name, and restart the"
        " server.",
    )


def control_unreachable(database: str, reason: str) -> SluiceError:
    """A connection to the control database can't be made."""
    return SluiceError(
        "08001",
        f'could not connect to the control database "{database}"',
        detail=reason,
        hint="See sluice.preflight() for the connection that is needed.",
    )


def control_busy(database: str) -> SluiceError:
    """A lock in the control database is held for much longer than anything of ours holds it."""
    return SluiceError(
        "55P03",
        f'could not obtain a lock in the control database "{database}"',
        hint="pg_locks in that database shows who holds it.",
    )


def control_not_installed(database: str) -> SluiceError:
    """The control database does not have the extension."""
    return SluiceError(
        "55000",
        f'pg_sluice is not installed in the control database "{database}"',
        hint=f'Run CREATE EXTENSION pg_sluice CASCADE in database "{database}".',
    )


def not_control_database(control: str, current: str) -> SluiceError:
    """What runs in the control database alone, called in another one."""
    return SluiceError(
        "55000",
        f'must be called in the control database "{control}"',
        detail=f'The current database is "{current}".',
    )


def leadership_lost() -> SluiceError:
    """The lease ended or another leader holds it."""
    return SluiceError(
        "SL001",
        "leadership lost",
        hint="Another leader has taken over, or pg_cron starts one within a minute.",
    )


class TickFailed(SluiceError):
    """A pass of the scheduler over a database that failed, for good or once too often.

    `step` says what it did, `node` for which node where it was for one, `attempts` how often,
    `reason`, `sqlstate` and `context` what the server said. Its cause is the original error.
    """

    def __init__(
        self,
        database: str,
        step: str,
        node: str | None,
        attempts: int,
        *,
        reason: str,
        sqlstate: str | None,
        context: str | None,
    ) -> None:
        where = f'step "{step}"' + (f' for node "{node}"' if node else "")
        tried = f", after {attempts} attempts" if attempts > 1 else ""
        super().__init__(
            "SL002",
            f'scheduling of database "{database}" failed',
            detail=f"{where[0].upper()}{where[1:]} failed{tried}: {reason}"
            + (f" (SQLSTATE {sqlstate})" if sqlstate else ""),
        )
        self.facts = {
            "database": database,
            "step": step,
            "node": node,
            "attempts": attempts,
            "sqlstate": sqlstate,
            "message": reason,
            "context": context,
        }
        """The same for the detail of an alert."""


def login_refused(role: str, reason: str) -> SluiceError:
    """A job at top level whose owner the scheduler can't connect as."""
    return SluiceError(
        "55000",
        f'the scheduler could not connect as role "{role}"',
        detail=f"A job with transactional => false runs in a session of its owner: {reason}",
        hint="Let the server's operating-system user connect as that role over the Unix socket "
        "(pg_hba.conf and pg_ident.conf), or make the job transactional.",
    )
