"""What bounds a run: the node's own values in place of the settings, and its remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_SECONDS = 2_147_483.0
"""The server's timeouts are milliseconds in 32 bits."""


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds, work_mem in bytes."""

    lock_timeout: float
    refresh_timeout: float
    work_mem: int
    spares_memory: bool
    """Whether memory ran out before, so that the run has less of it and no parallel workers."""

    def settings(self) -> dict[str, str]:
        """The server's settings that apply them."""
        found = {
            "lock_timeout": milliseconds(self.lock_timeout),
            "statement_timeout": milliseconds(self.refresh_timeout),
            "work_mem": f"{max(64, self.work_mem // 1024)}kB",
        }
        if self.spares_memory:
            found |= {"max_parallel_workers_per_gather": "0", "hash_mem_multiplier": "1"}
        return found


def limits(options: Mapping[str, Any], settings: Mapping[str, Any]) -> Limits:
    """The limits of a run from `_sluice.run_options()` and the settings in force.

    Raises ValueError, naming the value, where one can't be read: the row was edited by hand or
    written by another version.
    """
    remedied = options.get("work_mem")
    given = settings["refresh_work_mem"]
    return Limits(
        _seconds("lock_timeout", options, settings),
        _seconds("refresh_timeout", options, settings),
        int(given if remedied is None else min(given, _positive("work_mem", remedied))),
        remedied is not None,
    )


def _seconds(name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    return min(_positive(name, options.get(name, settings[name])), _LONGEST_SECONDS)


def _positive(name: str, given: Any) -> float:
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {given!r}") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {given!r}")
    return number


def milliseconds(seconds: float) -> str:
    """A time as the server's timeouts take it; never 0, which would mean none."""
    return f"{max(1, round(seconds * 1000))}ms"
