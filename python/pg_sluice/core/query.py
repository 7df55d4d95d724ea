"""Queries of stream tables, as the server parsed them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeSize:
    """The size of a query as the server parsed it."""

    nodes: int
    depth: int


def tree_size(tree: str) -> TreeSize:
    """The size of a tree in the server's text form (pg_node_tree); a backslash escapes a brace."""
    nodes = depth = deepest = 0
    escaped = False
    for character in tree:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            nodes += 1
            depth += 1
            deepest = max(deepest, depth)
        elif character == "}":
            depth -= 1
    return TreeSize(nodes, deepest)
