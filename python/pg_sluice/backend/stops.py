"""Drain and pause: a request in the control database, and the wait for what still runs.

Cancel and terminate end the wait at once. A call that ends without its answer takes its request
back. Where it can't, the request is void as soon as its control connection has gone, and the leader
deletes it.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ..core import errors
from ..core.errors import SluiceError
from .control import Control, connected
from .plpy_types import Plpy, rows

_POLL_SECONDS = (0.01, 0.05)
"""Between two looks: at first, and at the most."""
_NOTICE_SECONDS = 2.0


def drain(plpy: Plpy, arguments: dict[str, Any]) -> str:
    """See sluice.drain()."""
    reached = _stop(plpy, arguments, "drain", {}, {})
    return "drained" if reached else "draining"


def pause(plpy: Plpy, arguments: dict[str, Any]) -> str:
    """See sluice.pause()."""
    nodes = arguments["nodes"]
    if not nodes:
        return "paused"
    pgt_ids = [node["pgt_id"] for node in nodes]
    reached = _stop(plpy, arguments, "pause", {"_pgt_ids": pgt_ids}, {"_nodes": nodes})
    return "paused" if reached else "pausing"


def _stop(
    plpy: Plpy,
    arguments: dict[str, Any],
    kind: str,
    which: dict[str, Any],
    details: dict[str, Any],
) -> bool:
    """Makes a request or joins one, and waits if it is to; gives whether it was reached.

    A drain and a pause have the same four functions: request, check, keep and withdraw. `which`
    says what of the database they are about, `details` what the request has besides.
    """
    with connected(plpy) as control:
        db_oid = 0 if arguments.get("cluster") else control.where["db_oid"]
        scope = {"_db_oid": db_oid, **which}
        waiter = control.identity()
        control.call(
            f"request_{kind}",
            _db_oid=db_oid,
            **details,
            _requested_by=arguments["user"],
            **waiter,
        )
        try:
            reached = arguments["wait"] and _wait(plpy, control, kind, scope, arguments["seconds"])
            if not reached:
                control.call(f"keep_{kind}", **scope)
            control.flush()
            if not reached:
                # It may have been ended meanwhile, or have been reached after all.
                reached = _reached(control, kind, scope)
        finally:
            # With it goes what was not reached and nobody else wants. Where that can't be done now,
            # the end of the connection does it.
            with contextlib.suppress(SluiceError):
                control.call(f"withdraw_{kind}", patient=False, _db_oid=db_oid, **waiter)
    return reached


def _reached(control: Control, kind: str, scope: dict[str, Any]) -> bool:
    found = control.call(f"check_{kind}", **scope)
    if found is None:
        raise errors.request_ended(kind)
    return bool(found)


def _wait(plpy: Plpy, control: Control, kind: str, scope: dict[str, Any], seconds: float) -> bool:
    """Looks until nothing runs or the time is over.

    A notice now and then tells who waits; it is also how the server notices that nobody does.
    """
    started = time.monotonic()
    notice = _NOTICE_SECONDS
    first, longest = _POLL_SECONDS
    while not _reached(control, kind, scope):
        waited = time.monotonic() - started
        if waited >= seconds:
            return False
        if waited >= notice:
            plpy.notice("waiting for runs in progress to end")
            notice = waited + _NOTICE_SECONDS
        rest = min(max(first, waited / 50), longest, seconds - waited)
        rows(plpy, "SELECT pg_catalog.pg_sleep($1)", ["double precision"], [rest])
    return True
