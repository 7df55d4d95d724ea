"""sluice.metrics(): the server's part over a control connection, this database's own from here."""

from __future__ import annotations

import json
import time
from typing import Any

from ..core.texts import acceptable
from . import server
from .control import connected
from .plpy_types import Plpy, value


def metrics(plpy: Plpy, arguments: dict[str, Any]) -> str:
    """See sluice.metrics()."""
    # It takes a while to import its library.
    from ..core import metrics

    started = time.monotonic()
    with connected(plpy) as control:
        shared = control.call("server_metrics")
    found = json.loads(
        value(plpy, "SELECT _sluice.node_metrics($1)", ["pg_catalog.int4"], [metrics.node_limit(1)])
    )
    # Its series have one name, in whatever encoding it is read.
    name = next(
        (m["database"] for m in shared["members"] if m["db_oid"] == found["db_oid"]),
        found["database"],
    )
    text = metrics.exposition(shared, {name: found}, time.monotonic() - started)
    if acceptable(text, server.encoding(plpy)) == text:
        return text
    # Other characters as XML would refer to them: the format has no escapes of its own.
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")
