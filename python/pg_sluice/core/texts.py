"""Texts as every database takes them."""

from __future__ import annotations

import json
import unicodedata
from functools import lru_cache
from typing import Any

_UNLIMITED = frozenset({"UTF8", "SQL_ASCII"})
"""Databases in these encodings take every text that we have."""
_CODECS = {
    "EUC_CN": ["gb2312"],
    "EUC_JIS_2004": ["shift_jis_2004"],
    "EUC_JP": ["euc_jp", "cp932"],
    "EUC_KR": ["euc_kr"],
    "EUC_TW": ["big5"],
    "KOI8R": ["koi8-r"],
    "KOI8U": ["koi8-u"],
    **{f"ISO_8859_{part}": [f"iso8859-{part}"] for part in range(5, 9)},
    **{
        f"LATIN{number}": [f"iso8859-{part}"]
        for number, part in enumerate((1, 2, 3, 4, 9, 10, 13, 14, 15, 16), start=1)
    },
    **{f"WIN{page}": [f"cp{page}"] for page in (866, 874, *range(1250, 1259))},
}
"""Python's codecs that have the characters of a database's encoding. Most are the same character
for character. What the others have too much, _takes() leaves out; of EUC_JIS_2004, EUC_KR and
EUC_TW they have less."""
_WITHOUT = {
    "EUC_JP": frozenset("\x80\xa2\xa3\xa5\xac\u2016\u203e\u2212\u301c"),
    "EUC_JIS_2004": frozenset("\u2015\u2985\u2986\uffe3\uffe5"),
}


def to_json(given: Any, encoding: str = "UTF8") -> str:
    """JSON for a database in that encoding, with its characters as they are: one in SQL_ASCII
    refuses escaped ones. Those that the encoding lacks are as in acceptable()."""
    return _replaced(json.dumps(given, ensure_ascii=False), encoding, "\\\\")


def acceptable(text: str, encoding: str) -> str:
    """The text for a database in that encoding. A character that it lacks, on which the server
    would raise 22P05, is written as in PostgreSQL's escape strings: what is shown says what it was.

    >>> print(acceptable("naïve Ω😀", "LATIN1"))
    naïve \\u03a9\\U0001f600
    """
    return _replaced(text, encoding, "\\")


def _replaced(text: str, encoding: str, backslash: str) -> str:
    if encoding in _UNLIMITED or text.isascii():
        return text
    return "".join(
        one if one.isascii() or _takes(encoding, one) else backslash + _code(one) for one in text
    )


@lru_cache(10_000)
def _takes(encoding: str, character: str) -> bool:
    """Whether the encoding surely has a character."""
    if unicodedata.category(character) == "Co" or character in _WITHOUT.get(encoding, ()):
        return False
    if encoding == "EUC_TW" and not "\u4e00" <= character <= "\u9fff":
        return False
    for codec in _CODECS.get(encoding, ()):
        try:
            raw = character.encode(codec)
        except UnicodeEncodeError:
            continue
        # Python's codec composes syllables that are no characters of EUC_KR.
        return encoding != "EUC_KR" or len(raw) == 2
    return False


def _code(character: str) -> str:
    number = ord(character)
    return f"u{number:04x}" if number < 0x10000 else f"U{number:08x}"


def shortened(text: str, longest: int) -> str:
    """The text, cut at a character to so many bytes of UTF-8. A database in SQL_ASCII would cut it
    anywhere: it takes each byte for a character.

    >>> shortened("naïve", 3)
    'na'
    """
    return text.encode("utf-8", "replace")[:longest].decode("utf-8", "ignore")
