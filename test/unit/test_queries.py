"""The leader's statements: each has a name, a description and a use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pg_sluice.leader.queries import statements

LEADER = Path(__file__).resolve().parents[2] / "python" / "pg_sluice" / "leader"
TEXT = (LEADER / "queries.sql").read_text("utf-8")
NAMES = re.findall(r"^-- name: (\w+)$", TEXT, re.MULTILINE)
METHODS = {"row", "rows", "one", "value"}


def uses() -> dict[str, list[set[str] | None]]:
    """The names of the arguments of each statement's calls; None where they are not literal."""
    found: dict[str, list[set[str] | None]] = {}
    for path in LEADER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in METHODS
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                given = {keyword.arg for keyword in node.keywords}
                literal = None if None in given else {name for name in given if name}
                found.setdefault(node.args[0].value, []).append(literal)
    return found


def test_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES)) > 20
    assert statements().keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_statement_is_described(name: str) -> None:
    found = re.search(rf"^-- name: {name}\n((?:-- .*\n)+)", TEXT, re.MULTILINE)
    assert found, "no description"
    description = " ".join(line.removeprefix("-- ") for line in found[1].splitlines())
    assert re.match(r"(Control|Member|Any)\. \S.*\.$", description), description


@pytest.mark.parametrize("name", NAMES)
def test_statement_is_used_with_its_parameters(name: str) -> None:
    calls = uses().get(name)
    assert calls, "never used"
    parameters = set(re.findall(r"%\((\w+)\)s", statements()[name]))
    for given in calls:
        assert given is None or given == parameters


def test_only_known_statements_are_used() -> None:
    assert uses().keys() <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_statement_depends_on_no_search_path(name: str) -> None:
    """Names that are called or read are qualified, and there is one statement."""
    statement = re.sub(r"'[^']*'", "''", statements()[name])
    assert ";" not in statement
    for called in re.findall(r"([\w.]+)\(", statement):
        assert "." in called or called.upper() in ("IN", "ANY", "VALUES", "AS", "OPERATOR"), called
    for relation in re.findall(r"\b(?:FROM|JOIN)\s+([\w.]+)", statement):
        assert "." in relation, relation
