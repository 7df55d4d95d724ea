"""What is announced of an alert: one JSON object that every notification has room for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_NOTIFICATION_BYTES = 7999
"""The longest payload of NOTIFY, in the encoding of the database."""
_WIDER_ENCODINGS = frozenset({"EUC_JP", "EUC_TW", "MULE_INTERNAL"})
"""Some of their characters are three bytes where UTF-8 has two, or four where it has three."""
_NAME = 300
"""Characters of a node's name that are kept. A relation's qualified name has at most 257."""
_LEAST = 200
"""Characters of message and detail below which the message alone says more."""
_DEPTH = 16
"""Deepest nesting of a detail: what readers' parsers surely take."""


def room(server_encoding: str) -> int:
    """How many bytes of UTF-8 a notification takes in a database of that encoding."""
    wider = server_encoding in _WIDER_ENCODINGS
    return _NOTIFICATION_BYTES * 2 // 3 if wider else _NOTIFICATION_BYTES


def payload(alert: bytes, limit: int) -> str:
    """The JSON that announces an alert, in at most `limit` bytes of UTF-8.

    `alert` is the JSON object of `_sluice.pending_alerts()`, in which "detail" is JSON text.
    In a database in SQL_ASCII its strings can be of any bytes: those that are no UTF-8 are
    replaced. Where it is too long, the strings of message and detail are cut, all to one length, as
    little as it takes; where little would be left of them, the detail goes. The structure stays,
    and so does what identifies the alert: of that only a node's name can be cut, one longer than
    relations have.
    """
    given = json.loads(alert.decode("utf-8", "replace"))
    detail, whole = _parsed(given["detail"])
    event = given | {"detail": detail, "truncated": not whole}
    if _fits(event, limit):
        return _to_json(event)
    event = _cut(event | {"truncated": True}, ("node",), _NAME)
    length = _greatest(limit, lambda n: _fits(_cut(event, ("message", "detail"), n), limit))
    if length >= _LEAST:
        return _to_json(_cut(event, ("message", "detail"), length))
    event["detail"] = None
    length = _greatest(limit, lambda n: _fits(_cut(event, ("message",), n), limit))
    return _to_json(_cut(event, ("message",), length))


def _parsed(detail: str | None) -> tuple[Any, bool]:
    """A detail, and whether all of it is there: none where other readers could not parse it."""
    try:
        found = json.loads(detail or "null")
        _to_json(found)
    except (ValueError, RecursionError):
        return None, False
    pruned = _pruned(found, _DEPTH)
    return pruned, pruned == found


def _pruned(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item, depth - 1) for key, item in value.items()} if depth else None
    if isinstance(value, list):
        return [_pruned(item, depth - 1) for item in value] if depth else None
    return value


def _cut(event: dict[str, Any], keys: tuple[str, ...], length: int) -> dict[str, Any]:
    return event | {key: _shortened(event[key], length) for key in keys}


def _shortened(value: Any, length: int) -> Any:
    """The value with every string cut to that many characters."""
    if isinstance(value, str):
        return value[:length]
    if isinstance(value, dict):
        return {key: _shortened(item, length) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item, length) for item in value]
    return value


def _greatest(limit: int, holds: Callable[[int], bool]) -> int:
    """The greatest number up to the limit for which it holds, as for all smaller ones; else 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(event: dict[str, Any], limit: int) -> bool:
    return len(_to_json(event).encode()) <= limit


def _to_json(value: Any) -> str:
    """As texts.to_json(), and never what JSON does not have: a number too large for a float."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
