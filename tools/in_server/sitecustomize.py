"""Measures what PL/Python executes, in a server that tools/line_coverage.py had started.

Python imports this by itself, since it lies on PYTHONPATH. PL/Python never finalizes its
interpreter, so nothing comes of what Python would do at exit. But however a backend ends, short of
SIGKILL and SIGQUIT, it calls the C library's exit(), and that calls us.
"""

import ctypes
from pathlib import Path

import coverage

_measured = coverage.Coverage(
    data_file=str(Path(__file__).resolve().parent / "data" / "server"),
    data_suffix=True,
    branch=True,
    include=["*/pg_sluice/*/pg_sluice/*"],
    config_file=False,
    messages=False,
)


def _save(_: object) -> None:
    _measured.stop()
    # Most sessions have done nothing worth a file.
    if _measured.get_data().measured_files():
        _measured.save()


# Referred to as long as the process lives.
_callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_save)
ctypes.CDLL(None)["__cxa_atexit"](_callback, None, None)
_measured.start()
