"""CPU time of the processes of a cluster, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


def own_seconds(pid: int) -> float:
    """CPU seconds of a process so far, to the nanosecond; 0 of one that is gone."""
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def cluster_seconds(postmaster: int) -> dict[int, float]:
    """CPU seconds so far by process; what has ended counts as the postmaster's."""
    spent = {postmaster: own_seconds(postmaster) + _ended_seconds(postmaster)}
    return spent | {child: own_seconds(child) for child in _children(postmaster)}


def _children(parent: int) -> set[int]:
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return {pid for pid in pids if (found := _stat(pid)) and int(found[1]) == parent}


def _ended_seconds(parent: int) -> float:
    """CPU seconds of the children that a process has waited for."""
    found = _stat(parent)
    return (int(found[13]) + int(found[14])) / _TICKS if found else 0.0


def _stat(pid: int) -> list[str]:
    """The fields after the command's name, which can hold spaces."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
