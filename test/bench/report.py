"""What a figure reports: lines of JSON, and the statistics in them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

type_of_line = dict[str, Any]


def line(
    figure: str,
    value: float,
    unit: str,
    *,
    target: str | None = None,
    compared_to: dict[str, Any] | None = None,
    **more: Any,
) -> type_of_line:
    """One figure: its value, what it should be, what it is compared to, and what explains it."""
    return {
        "figure": figure,
        "value": rounded(value),
        "unit": unit,
        "target": target,
        "compared_to": compared_to or {},
        **more,
    }


def publish(made: type_of_line) -> None:
    """To stdout, which holds nothing else."""
    print(json.dumps(made), flush=True)


def progress(text: str) -> None:
    """To stderr."""
    print(text, file=sys.stderr, flush=True)


def rounded(value: float) -> float:
    """To four significant digits: no figure here is more exact than that."""
    return float(f"{value:.4g}")


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank; NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """How values are distributed."""
    return {
        "p50": rounded(percentile(values, 50)),
        "p95": rounded(percentile(values, 95)),
        "p99": rounded(percentile(values, 99)),
        "max": rounded(max(values, default=math.nan)),
    }
