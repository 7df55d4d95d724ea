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
