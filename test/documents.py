"""What the documents show, for the tests that run it as it stands.

A block of a recipe begins with a comment that says where it is run, and says what it gives in lines
that begin with `-- =>` or `# =>`: one for each line of output, where … is anything, or (no rows).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(r"^```(sql|sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RESULT = re.compile(r"^(?:--|#) => (.*)$")
_NOTHING = "(no rows)"


@dataclass(frozen=True)
class Block:
    """A block of code in a document."""

    language: str
    """sql, sh or python."""
    text: str

    @property
    def place(self) -> str:
        """What its first line says of where it is run."""
        return re.sub(r"^(--|#) ", "", self.text.splitlines()[0])

    @property
    def steps(self) -> Iterator[tuple[str, list[str] | None]]:
        """Its parts, each with the lines that it promises to give; None where it promises none."""
        code: list[str] = []
        results: list[str] = []
        for line in self.text.splitlines():
            found = _RESULT.match(line)
            if found:
                results.append(found[1])
            elif results:
                yield "\n".join(code), results
                code, results = [line], []
            else:
                code.append(line)
        yield "\n".join(code), results or None


def blocks(document: str) -> list[Block]:
    """The blocks of a document, in order."""
    text = (ROOT / document).read_text("utf-8")
    found = [Block(language, code) for language, code in _BLOCK.findall(text)]
    assert found, f"{document} shows no code"
    return found


def sections(document: str) -> dict[str, list[Block]]:
    """The blocks of a document by the heading that they stand below."""
    text = (ROOT / document).read_text("utf-8")
    parts = re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)
    found = {
        heading: [Block(language, code) for language, code in _BLOCK.findall(body)]
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {heading: shown for heading, shown in found.items() if shown}


def is_as_promised(written: str, promised: list[str]) -> bool:
    """Whether output is what a block says, apart from blanks and empty lines."""
    lines = [line for line in map(_plain, written.splitlines()) if line]
    wanted = [] if promised == [_NOTHING] else promised
    return len(lines) == len(wanted) and all(
        # A last column can be empty, and its blank is gone.
        re.fullmatch(".*".join(map(re.escape, _plain(want).split("…"))) + " ?", f"{line} ")
        for want, line in zip(wanted, lines, strict=True)
    )


def _plain(line: str) -> str:
    return " ".join(line.split())
