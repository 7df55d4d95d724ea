"""Announcing alerts on the channel sluice_alert, in a small transaction of its own.

Runs only write rows: a notification in the transaction of a refresh would fail its commit when the
server's queue of notifications is full.
"""

from __future__ import annotations

from ..core import alerts
from .session import Session


async def announce(session: Session) -> None:
    """Announces what is pending in the session's database: opened, closed, or to be reminded of.

    Nothing while the queue of notifications is nearly full: it stays pending.
    """
    pending = await session.rows("pending_alerts")
    if not pending:
        return
    encoding = session.connection.info.parameter_status("server_encoding") or ""
    room = alerts.room(encoding)
    await session.row(
        "emit_alerts",
        seqs=[seq for seq, _, _ in pending],
        versions=[version for _, version, _ in pending],
        # As bytes: they are texts of this database, and have just so much room.
        payloads=[alerts.payload(alert, room).encode() for _, _, alert in pending],
    )
