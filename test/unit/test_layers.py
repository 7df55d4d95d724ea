"""Which module may import what: decisions know nothing of how they are carried out."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "pg_sluice"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

# What core must not know, though it is in the standard library: time and jitter are arguments.
IMPURE = {
    "asyncio", "concurrent", "multiprocessing", "os", "random", "secrets", "select", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
# The one module of core for each library.
EXCEPTIONS = {"core/metrics.py": {"prometheus_client"}, "core/schedule.py": {"cronsim"}}


def imports(source: str, module: str) -> Iterator[str]:
    """The modules that a source imports, wherever in it; those of the package from its top."""
    package = ("pg_sluice", *Path(module).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join((*base, *([node.module] if node.module else [])))
            # `from . import name` imports a module; `from .module import name` need not.
            yield from (f"{start}.{alias.name}" for alias in node.names)


def under(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def breaches(source: str, module: str) -> list[str]:
    """What a module imports and may not."""
    layer = Path(module).parts[0]
    found = []
    for name in imports(source, module):
        top = name.partition(".")[0]
        if layer == "core":
            pure = top in sys.stdlib_module_names and top not in IMPURE
            allowed = pure or under(name, "pg_sluice.core") or top in EXCEPTIONS.get(module, set())
        elif layer == "backend":
            allowed = not under(name, "asyncio", "threading", "pg_sluice.leader", "plpy")
        elif layer == "leader":
            allowed = top != "plpy"
        else:
            allowed = top != "plpy" and not under(name, "pg_sluice.backend", "pg_sluice.leader")
        if not allowed:
            found.append(name)
    return found


def clock_readings(source: str) -> list[str]:
    """Calls that read the clock by way of a module that may be imported."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today")
    ]


@pytest.mark.parametrize("module", MODULES)
def test_layers(module: str) -> None:
    assert breaches((PACKAGE / module).read_text("utf-8"), module) == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("core/")])
def test_core_reads_no_clock(module: str) -> None:
    assert clock_readings((PACKAGE / module).read_text("utf-8")) == []


def test_all_layers_are_there() -> None:
    assert {Path(module).parts[0] for module in MODULES} >= {"core", "backend", "leader"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core/share.py", "import asyncio"),
        ("core/share.py", "import os.path"),
        ("core/share.py", "from random import random"),
        ("core/share.py", "def f():\n    from time import monotonic"),
        ("core/share.py", "import psycopg"),
        ("core/share.py", "import cronsim"),
        ("core/share.py", "from .. import connection"),
        ("core/share.py", "from ..backend import entry"),
        ("backend/entry.py", "import asyncio"),
        ("backend/entry.py", "from ..leader import process"),
        ("backend/entry.py", "import plpy"),
        ("leader/pool.py", "import plpy"),
        ("connection.py", "from .leader import session"),
    ],
)
def test_breach_is_found(module: str, source: str) -> None:
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core/schedule.py", "from cronsim import CronSim"),
        ("core/ticks.py", "from . import schedule"),
        ("core/ticks.py", "from .errors import SluiceError"),
        ("core/ticks.py", "import math\nfrom datetime import datetime"),
        ("backend/control.py", "import psycopg, time\nfrom ..core import errors"),
        ("leader/pool.py", "import asyncio, psycopg\nfrom ..core import share"),
    ],
)
def test_no_breach_is_found(module: str, source: str) -> None:
    assert breaches(source, module) == []


def test_clock_reading_is_found() -> None:
    assert clock_readings("datetime.now(UTC)") == ["datetime.now"]
