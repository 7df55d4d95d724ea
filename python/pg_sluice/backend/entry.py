"""The door from SQL: one call in, a value or an error record out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import SluiceError
from . import control, definitions, metrics, preflight, server, settle, stops
from .plpy_types import Plpy

Registry = Mapping[str, Callable[[Plpy, dict[str, Any]], Any]]

CALLER: Registry = {
    "create_stream_table": definitions.create_stream_table,
    "alter_stream_table": definitions.alter_stream_table,
    "drop_stream_table": definitions.drop_stream_table,
    "bulk_create": definitions.bulk_create,
    "schedule_refresh": definitions.schedule_refresh,
    "schedule": definitions.schedule,
}
"""What any role may have run, since it runs with that role's own rights."""

PRIVILEGED: Registry = {
    "settle": settle.settle,
    "control": control.call_function,
    "preflight": preflight.preflight,
    "start": preflight.start,
    "check_login": preflight.check_login,
    "drain": stops.drain,
    "pause": stops.pause,
    "metrics": metrics.metrics,
}
"""What only the extension's own SECURITY DEFINER functions may have run."""


def invoke(plpy: Plpy, registry: Registry, function: str, arguments: str) -> str:
    """Runs a function of the registry on JSON arguments; gives the JSON for `_sluice.unwrap`.

    Errors of the server keep their SQLSTATE, detail and hint; anything else is a fault of ours and
    passes through with its traceback.
    """
    try:
        value = registry[function](plpy, json.loads(arguments))
    except SluiceError as error:
        return server.returned(plpy, {"error": error.record()})
    except (plpy.SPIError, plpy.Error) as error:
        return server.returned(plpy, {"error": server.as_sluice_error(error).record()})
    return server.returned(plpy, {"value": value})
