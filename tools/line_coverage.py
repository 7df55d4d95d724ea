"""Measures which lines of the package the tests execute, also inside the server.

    .venv/bin/python tools/line_coverage.py [arguments for pytest instead of "test/python"]

The unit tests run under coverage. The behaviour tests run as ever, but clusters that they start
have tools/in_server on PYTHONPATH, and with it a copy of coverage that the server's user can read:
each backend that loads PL/Python is measured and saves what it has at its end. One that is killed
saves nothing. All of it is combined into .coverage and reported; it is an error when a line of what
decides about failures was never executed.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "pg_sluice"
UNIT = ["--doctest-modules", "python/pg_sluice/core", "test/unit", "test/fuzz"]
WHOLE = (
    "core/limits.py",
    "core/outcomes.py",
    "core/remediation.py",
    "core/ticks.py",
    "leader/retry.py",
)
"""What is executed to the last line: the classifier, remedies and limits, quarantine, the retry
loop."""


def main(behaviour: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="sluice-measure-", dir="/tmp") as name:
        place = Path(name)
        prepare(place)
        data = place / "data"
        run("coverage", "run", f"--data-file={data / 'unit'}", "-m", "pytest", *UNIT)
        run("pytest", *behaviour, SLUICE_PYTHONPATH=name)
        combined = coverage.Coverage(data_file=str(ROOT / ".coverage"))
        combined.combine([str(path) for path in data.iterdir()])
        combined.save()
    combined.report(show_missing=True)
    missing = {path: lines for path in WHOLE if (lines := missed(combined, path))}
    for path, lines in missing.items():
        print(f"{path}: lines that no test executes: {lines}", file=sys.stderr)
    return 1 if missing else 0


def prepare(place: Path) -> None:
    """What a server started by the tests has on its PYTHONPATH, whoever's it is."""
    shutil.copytree(Path(inspect.getfile(coverage)).parent, place / "coverage")
    shutil.copy(ROOT / "tools" / "in_server" / "sitecustomize.py", place)
    (place / "data").mkdir()
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (place / "data").chmod(0o777)


def run(*command: str, **environment: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(done.returncode)


def missed(combined: coverage.Coverage, path: str) -> str:
    """The lines of a file that were not executed, as text."""
    return combined.analysis2(str(PACKAGE / path))[4]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["test/python"]))
