"""The demo's output: a panel that is painted over and over on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from flights import DAYS
from watch import Node, Snapshot

BOLD, RED, DIM, PLAIN = "1", "31", "2", "0"

ROW = "{:<9}{:<15}{:<11}{:>7}{:>5}{:>5}{:>7}{:>9}  {}"
# "same" are the runs that found nothing to change, "rows" the rows changed by all runs.
HEADINGS = ("database", "node", "schedule", "lag", "runs", "same", "failed", "rows", "last")

Line = tuple[str, str]
"""How a line looks and what it says."""


class Screen:
    """`say` prints a line that stays, `show` tells how things are, `close` ends the output."""

    period: float
    """Seconds from one `show` to the next."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started = time.monotonic()
        self._shown = 0.0

    def say(self, text: str = "") -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    def show(self, doing: str, look: Callable[[], Snapshot]) -> None:
        """Show what goes on, unless that was shown just now; only then `look` is called."""
        now = time.monotonic()
        if now >= self._shown + self.period:
            self._shown = now
            self._show(doing, look())

    def close(self) -> None:
        pass

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def _show(self, doing: str, now: Snapshot) -> None:
        raise NotImplementedError


class Lines(Screen):
    """One line every few seconds, for a file, a pipe or a dumb terminal."""

    period = 5.0

    def _show(self, doing: str, now: Snapshot) -> None:
        lags = [node.lag for node in now.nodes if node.lag is not None]
        self.say(
            f"{self.elapsed:5.0f} s  {doing}: day {now.day}/{DAYS}, {now.flights:,} flights,"
            f" {sum(node.runs for node in now.nodes):,} runs,"
            f" {sum(node.failed for node in now.nodes)} failed,"
            f" greatest lag {max(lags, default=0):.1f} s,"
            f" {len(now.working_on)}/{now.live}/{now.slots} workers busy/live/allowed,"
            f" {now.queued} queued"
        )


class Panel(Screen):
    """Repaints its lines in place, cut to the terminal's size."""

    period = 0.5

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._painted = 0
        self._size = shutil.get_terminal_size()
        self._full, self._empty = _bar_characters(out.encoding)

    def say(self, text: str = "") -> None:
        self._out.write(f"{self._back()}\x1b[J{text}\n\x1b[?25h")
        self._out.flush()
        self._painted = 0

    def close(self) -> None:
        """Leave the panel as it is and give the cursor back."""
        self._painted = 0
        self._out.write("\x1b[?25h")
        self._out.flush()

    def _show(self, doing: str, now: Snapshot) -> None:
        self._paint(
            [
                (BOLD, f"{doing}  ({self.elapsed:.0f} s)"),
                (PLAIN, self._progress(now)),
                (PLAIN, self._workers(now)),
                (DIM, ROW.format(*HEADINGS)),
                *(_node_line(node) for node in now.nodes),
            ]
        )

    def _progress(self, now: Snapshot) -> str:
        told = f" {now.date}  day {now.day:3}/{DAYS}  {now.flights:,} flights"
        width = max(5, self._size.columns - len(told) - 1)
        full = width * now.day // DAYS
        return self._full * full + self._empty * (width - full) + told

    def _workers(self, now: Snapshot) -> str:
        return (
            f"{now.live} of {now.slots} workers live, {len(now.working_on)} busy,"
            f" {now.queued} runs queued  {', '.join(now.working_on)}"
        )

    def _paint(self, lines: list[Line]) -> None:
        back = self._back()
        lines = lines[: self._size.lines - 1]
        text = "".join(
            f"\x1b[{look}m{line[: self._size.columns - 1]}\x1b[0m\x1b[K\n" for look, line in lines
        )
        # In one piece, so that it doesn't flicker.
        self._out.write(f"\x1b[?25l{back}{text}\x1b[J")
        self._out.flush()
        self._painted = len(lines)

    def _back(self) -> str:
        """What brings the cursor to where the panel begins; takes note of the terminal's size."""
        size = shutil.get_terminal_size()
        if size != self._size:
            # The terminal has wrapped or cut what was there: where it is now nobody knows.
            self._size = size
            return "\x1b[2J\x1b[H"
        return f"\x1b[{self._painted}F" if self._painted else ""


def open_screen() -> Screen:
    """The panel on a terminal that can paint it, else plain lines."""
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return Panel(sys.stdout)
    return Lines(sys.stdout)


def _bar_characters(encoding: str | None) -> tuple[str, str]:
    try:
        "█░".encode(encoding or "ascii")
    except UnicodeEncodeError:
        return "#", "."
    return "█", "░"


def _node_line(node: Node) -> Line:
    text = ROW.format(
        node.database,
        node.name,
        node.schedule,
        "" if node.lag is None else f"{node.lag:.1f} s",
        f"{node.runs:,}",
        f"{node.unchanged:,}",
        f"{node.failed:,}",
        "" if node.rows_changed is None else f"{node.rows_changed:,}",
        (node.last_outcome or "") if node.status == "active" else node.status,
    )
    return RED if node.failed or node.status != "active" else PLAIN, text
