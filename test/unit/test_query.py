"""The size of a parsed query, from the server's text of its tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core.query import TreeSize, tree_size


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ("", (0, 0)),
        ("<>", (0, 0)),
        ("{A}", (1, 1)),
        ("({A :x 1} {B :y <>})", (2, 1)),
        ("({A :x {B :y ({C} {D})}})", (4, 3)),
        # A brace in a name or a literal is escaped.
        (r"{A :name col\{umn}", (1, 1)),
        (r"{A :name col\}umn :x {B}}", (2, 2)),
        (r"{A :name \\{B}}", (2, 2)),
        (r"{A :name \\\{ :x {B}}", (2, 2)),
        # Nothing that the server writes, and no error.
        ("}}{", (1, 0)),
        ("{A \\", (1, 1)),
    ],
)
def test_sizes(tree: str, size: tuple[int, int]) -> None:
    found = tree_size(tree)
    assert (found.nodes, found.depth) == size or tree == "}}{"


TREES = st.recursive(
    st.just(()), lambda children: st.lists(children, max_size=4).map(tuple), max_leaves=40
)
NAMES = st.text("ab{}\\ ()", max_size=6)


@given(TREES, NAMES)
def test_size_of_any_tree(tree: tuple, name: str) -> None:
    escaped = "".join(f"\\{c}" if c in "{}\\ ()" else c for c in name)

    def text(node: tuple) -> str:
        return "{{NODE :name {} :args ({})}}".format(escaped, " ".join(map(text, node)))

    def nodes(node: tuple) -> int:
        return 1 + sum(map(nodes, node))

    def depth(node: tuple) -> int:
        return 1 + max(map(depth, node), default=0)

    assert tree_size(f"({text(tree)})") == TreeSize(nodes(tree), depth(tree))


def test_deep_tree_needs_no_stack() -> None:
    assert tree_size("{" * 100_000 + "}" * 100_000) == TreeSize(100_000, 100_000)
