"""Builds the extension's install script from sql/, and verifies what has to agree with it.

`write` puts the files named in sql/order.txt, in that order, into extension/pg_sluice--VERSION.sql.
`verify` changes nothing and fails when that script is stale, when a file in sql/ is not in the
order or not in ASCII, or when the control file, META.json and the package name different versions.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = ROOT / "sql" / "order.txt"
HEADER = """\
-- Generated from sql/ by "make script". Change it there.
\\echo Use "CREATE EXTENSION pg_sluice" to load this file. \\quit
"""


def package_version() -> str:
    """Read `__version__`, the one place of the version, without importing the package."""
    source = (ROOT / "python" / "pg_sluice" / "__init__.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("python/pg_sluice/__init__.py sets no __version__")


def script_path() -> Path:
    return ROOT / "extension" / f"pg_sluice--{package_version()}.sql"


def ordered_names() -> list[str]:
    if not ORDER.exists():
        raise SystemExit("sql/order.txt does not exist")
    lines = (line.split("#")[0].strip() for line in ORDER.read_text().splitlines())
    return [line for line in lines if line]


def order_problems() -> list[str]:
    named = ordered_names()
    present = {path.relative_to(ORDER.parent).as_posix() for path in ORDER.parent.rglob("*.sql")}
    return [
        *(f"sql/{name} is not in sql/order.txt" for name in sorted(present - set(named))),
        *(
            f"sql/order.txt names {name}, which does not exist"
            for name in named
            if name not in present
        ),
        *(
            f"sql/order.txt names {name} twice"
            for name in sorted({n for n in named if named.count(n) > 1})
        ),
        # A database can be in any encoding, and takes the script for its own.
        *(
            f"sql/{name} is not in ASCII"
            for name in sorted(present)
            if not (ORDER.parent / name).read_text().isascii()
        ),
    ]


def build() -> str:
    parts = [HEADER]
    for name in ordered_names():
        body = (ORDER.parent / name).read_text().strip()
        parts.append(f"-- sql/{name}\n\n{body}\n")
    return "\n".join(parts)


def version_problems() -> list[str]:
    version = package_version()
    control = (ROOT / "extension" / "pg_sluice.control").read_text()
    found = re.search(r"^default_version\s*=\s*'([^']*)'", control, re.MULTILINE)
    meta = json.loads((ROOT / "META.json").read_text())
    provided = meta["provides"]["pg_sluice"]
    stated = {
        "extension/pg_sluice.control": found[1] if found else None,
        "META.json version": meta["version"],
        "META.json provides.pg_sluice.version": provided["version"],
    }
    problems = [
        f"{place} says {other}, the package says {version}"
        for place, other in stated.items()
        if other != version
    ]
    if ROOT / provided["file"] != script_path():
        problems.append(
            f"META.json names {provided['file']}, not {script_path().relative_to(ROOT)}"
        )
    return problems


def script_problems() -> list[str]:
    script = script_path()
    if script.exists() and script.read_text() == build():
        return []
    return [f'{script.relative_to(ROOT)} does not match sql/: run "make script" and commit it']


def main(command: str) -> None:
    problems = order_problems()
    if command == "verify":
        problems += version_problems() + ([] if problems else script_problems())
    if problems:
        raise SystemExit("\n".join(problems))
    if command == "write" and script_problems():
        script_path().write_text(build())
        print(f"wrote {script_path().relative_to(ROOT)}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["verify"]):
        raise SystemExit("usage: script.py write|verify")
    main(sys.argv[1])
