"""The part of PL/Python's `plpy` module that the package uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Plpy(Protocol):
    """What PL/Python hands to a function under the name plpy."""

    SPIError: type[Exception]
    """An error in a statement."""
    Error: type[Exception]
    """One outside statements, as when a notice finds that the session was cancelled."""

    def execute(self, query: Any, arguments: Sequence[Any] = ..., /) -> Any: ...

    def prepare(self, query: str, types: Sequence[str] = ..., /) -> Any: ...

    def cursor(self, query: str, /) -> Any: ...

    def commit(self) -> None: ...

    def notice(self, message: str, /, **fields: Any) -> None: ...

    def warning(self, message: str, /, **fields: Any) -> None: ...


def rows(
    plpy: Plpy, query: str, types: Sequence[str] = (), values: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """The rows of a query with parameters of these types."""
    if not types:
        return list(plpy.execute(query))
    return list(plpy.execute(plpy.prepare(query, types), values))


def value(plpy: Plpy, query: str, types: Sequence[str] = (), values: Sequence[Any] = ()) -> Any:
    """The only column of the only row of a query."""
    (row,) = rows(plpy, query, types, values)
    (result,) = row.values()
    return result


def check_interrupts(plpy: Plpy) -> None:
    """Ends the call here if the user's session was cancelled or terminated."""
    plpy.execute("SELECT 1")
