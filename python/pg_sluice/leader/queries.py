"""The statements of queries.sql, by name."""

from __future__ import annotations

import importlib.resources
import re
from functools import cache

_NAME = re.compile(r"^-- name: (\w+)\n((?:--.*\n)+)", re.MULTILINE)


@cache
def statements() -> dict[str, str]:
    """All statements."""
    text = importlib.resources.files(__package__).joinpath("queries.sql").read_text("utf-8")
    parts = _NAME.split(text)[1:]
    return {
        name: statement.strip().removesuffix(";")
        for name, statement in zip(parts[::3], parts[2::3], strict=True)
    }
