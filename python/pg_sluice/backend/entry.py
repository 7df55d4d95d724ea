"""The door from SQL: one call in, a value or an error record out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import SluiceError
from . import control, definitions, settle
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
    "preflight": control.preflight,
    "start": control.start,
    "check_login": control.check_login,
    "drain": control.drain,
    "pause": control.pause,
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
        return json.dumps({"error": error.record()})
    except plpy.SPIError as error:
        return json.dumps({"error": server_error(error).record()})
    return json.dumps({"value": value})


def server_error(error: Any) -> SluiceError:
    """An error that the server raised in a statement of ours, as it would have reached the user."""
    spidata = getattr(error, "spidata", None) or (None, None, None)
    return SluiceError(error.sqlstate or "XX000", str(error), detail=spidata[1], hint=spidata[2])
