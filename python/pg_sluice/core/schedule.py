"""When a node fires: schedules as values, and the arithmetic on their grids.

A schedule defines a *grid* of instants. An interval's grid is `anchor + k * interval` for every
integer k, each point computed from the anchor, so that nothing drifts; months and days are
counted on the UTC calendar. A cron expression's grid is what Debian's cron would run in its time
zone. `calculated` and `manual` have no grid.

Invariants: every datetime taken or returned is aware, what is returned is in UTC; `next_fire` is
strictly later than its argument, `previous_fire` is its inverse, and both cost the same however
far the anchor is. `parse` raises nothing but `SluiceError` with SQLSTATE 22023.

This is the one module that imports cronsim. cronsim reads the fields and walks *wall-clock*
times, which it does exactly, but it is never given a time zone, since cronsim 2.8 has faults
around a clock change:

- `45 1 * * *` asked from the second 01:30 of an autumn night answers the first 01:45, which is
  past; in reverse, from the second 01:15, it answers yesterday's 01:30 and passes over today's;
- `*/10 2 * * *` in Australia/Lord_Howe, which shifts by half an hour, goes from 01:30 to 02:30 by
  whole hours and loses 02:00 to 02:20, in spring likewise at 03:00;
- in reverse, where midnight is the end of the repeated hour (America/Santiago), it enters the
  evening in the first 23:59 and loses the second pass;
- where midnight is skipped, it answers wall-clock times that don't exist.

Wall-clock times become instants here instead, by the rules of Debian's cron. A job whose minute or
hour field begins with a star fires whenever the clock shows a matching time: not in a skipped
hour, twice in a repeated one. Any other job fires once for each matching time: at the moment of
the change if the time is skipped, in the first pass if it is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from fractions import Fraction
from functools import lru_cache
from typing import NoReturn, TypeAlias
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from .errors import invalid_schedule

LONGEST_SPEC = 200
"""Characters of a schedule's text."""

MOST_CRON_STEPS = 1000
"""Fires of a cron expression that `due` looks at in each direction: how far it counts what was
skipped, and the most that `catch_up` gives such a node."""


@dataclass(frozen=True)
class Every:
    """A fixed interval of at least one second, its calendar parts kept apart as PostgreSQL does."""

    months: int
    days: int
    microseconds: int

    def __post_init__(self) -> None:
        if min(self.months, self.days, self.microseconds) < 0 or _size(self) < _SECOND:
            raise ValueError(f"not an interval of at least one second: {self!r}")


@dataclass(frozen=True)
class Cron:
    """Five cron fields, read in the IANA time zone `zone`; made by `parse`, which checks both."""

    expression: str
    zone: str


@dataclass(frozen=True)
class Calculated:
    """Due when a downstream node needs it."""


@dataclass(frozen=True)
class Manual:
    """Due only when somebody asks."""


Schedule: TypeAlias = Every | Cron | Calculated | Manual


@dataclass(frozen=True)
class Firing:
    """One fire to run now: when it was due, how many older ones are passed over, what follows."""

    fire_at: datetime
    skipped: int
    following: datetime | None


# ---------------------------------------------------------------------------------------------
# Reading a schedule
# ---------------------------------------------------------------------------------------------

_MICROSECOND = timedelta(microseconds=1)
_SECOND = 1_000_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR
_CENTURY = 36525 * _DAY

_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_CRON_FIELDS = ("minute", "hour", "day of month", "month", "day of week")
_NEVER = "No date matches this cron expression, so it would never fire."

# Kind of unit and how many of it. `m` is always a minute: a month is at least `mon`.
_UNITS: dict[str, tuple[str, Fraction]] = {
    spelling: (kind, Fraction(amount))
    for kind, amount, spellings in (
        ("year", 1, "y yr yrs year years"),
        ("month", 1, "mon mons month months"),
        ("day", 7, "w week weeks"),
        ("day", 1, "d day days"),
        ("time", _HOUR, "h hr hrs hour hours"),
        ("time", _MINUTE, "m min mins minute minutes"),
        ("time", _SECOND, "s sec secs second seconds"),
        ("time", 1000, "ms msec msecs millisecond milliseconds"),
        ("time", 1, "us usec usecs microsecond microseconds \u00b5s \u03bcs"),
        ("time", Fraction(1, 1000), "ns nanosecond nanoseconds"),
    )
    for spelling in spellings.split()
}

_BLANKS = " \t\n\r\f\v"
_ALLOWED = frozenset(_BLANKS) | frozenset(map(chr, range(0x21, 0x7F))) | frozenset("\u00b5\u03bc")

# Each of these reads in linear time: no two neighbouring repetitions share a character.
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_CLOCK = re.compile(r"([+-]?)([0-9]+):([0-9]{1,2})(?::([0-9]{1,2}(?:\.[0-9]*)?))?(?![0-9.:])")
_AMOUNT = re.compile(rf"({_NUMBER}) ?([a-z\u00b5\u03bc]*)")
_ISO = re.compile(
    rf"p(?:({_NUMBER})y)?(?:({_NUMBER})m)?(?:({_NUMBER})w)?(?:({_NUMBER})d)?"
    rf"(?:t(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?)?"
)
_ISO_UNITS = ("year", "month", "week", "day", "hour", "minute", "second")
_ZONED = re.compile(r"(?:cron_)?tz=([^ ]*) ?(.*)", re.IGNORECASE)
_ZONE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*")
_NUMERIC_FIELD = re.compile(r"[0-9*][0-9*,/-]*")

# Entries of the zone directory that name no zone, or whose clocks count leap seconds.
_NO_ZONES = frozenset({"posix", "right", "localtime", "posixrules", "factory"})


class _Refused(Exception):
    """Why a schedule can't be parsed, as a sentence; never leaves this module."""


def parse(spec: str, default_zone: str = "UTC") -> Schedule:
    """The schedule that `spec` writes; `default_zone` holds for a cron expression without one.

    >>> parse("@every 1h30m")
    Every(months=0, days=0, microseconds=5400000000)
    >>> parse("1 mon 2 days 03:04:05")
    Every(months=1, days=2, microseconds=11045000000)
    >>> parse("TZ=Europe/Oslo @daily")
    Cron(expression='0 0 * * *', zone='Europe/Oslo')
    """
    try:
        if len(spec) > LONGEST_SPEC:
            raise _Refused(f"A schedule has at most {LONGEST_SPEC} characters.")
        return _read(spec, default_zone)
    except _Refused as refused:
        reason = str(refused)
    raise invalid_schedule(_shown(spec), reason)


def render(schedule: Schedule) -> str:
    """The canonical text of a schedule, which parses back to the same value.

    A cron expression always names its zone, so that it doesn't depend on a default.

    >>> render(parse("1 year 2 months 90 minutes"))
    '@every 1y2mon1h30m'
    """
    match schedule:
        case Calculated():
            return "calculated"
        case Manual():
            return "manual"
        case Cron(expression, zone):
            return f"TZ={zone} {expression}"
        case Every(months, days, microseconds):
            years, months = divmod(months, 12)
            hours, rest = divmod(microseconds, _HOUR)
            minutes, rest = divmod(rest, _MINUTE)
            seconds, fraction = divmod(rest, _SECOND)
            shown_seconds = f"{seconds}.{fraction:06}".rstrip("0") if fraction else f"{seconds}"
            parts = [(years, "y"), (months, "mon"), (days, "d"), (hours, "h"), (minutes, "m")]
            text = "".join(f"{count}{unit}" for count, unit in parts if count)
            return f"@every {text}{shown_seconds}s" if rest else f"@every {text}"


def _shown(text: str) -> str:
    """What an error message can carry: printable, on one line, not long."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:60]
    )
    return shown if len(text) <= 60 else shown + "..."


@lru_cache(maxsize=1024)
def _read(spec: str, default_zone: str) -> Schedule:
    odd = next((c for c in spec if c not in _ALLOWED), None)
    if odd is not None:
        raise _Refused(f"It contains the character U+{ord(odd):04X}, which no schedule has.")
    text = " ".join(spec.split())
    lower = text.lower()
    if not text:
        raise _Refused("The schedule is empty.")
    if lower == "calculated":
        return Calculated()
    if lower == "manual":
        return Manual()
    if zoned := _ZONED.fullmatch(text):
        zone, rest = _zone_name(zoned[1]), zoned[2]
        if not rest:
            raise _Refused("There is no cron expression after the time zone.")
        if not (rest.lower() in _MACROS or _looks_like_cron(rest)):
            raise _Refused(
                'A time zone goes only with five cron fields or a word such as "@daily"; '
                "intervals are counted in UTC."
            )
        return _cron(_MACROS.get(rest.lower(), rest), zone)
    if lower in _MACROS:
        return _cron(_MACROS[lower], _zone_name(default_zone))
    if lower == "@every":
        raise _Refused('There is no interval after "@every".')
    if lower.startswith("@every "):
        return _interval(lower.removeprefix("@every "))
    if lower.startswith("@") and not lower.startswith("@ "):
        known = ", ".join(f'"{word}"' for word in ("@every", *_MACROS))
        raise _Refused(f'"{_shown(text.split()[0])}" is not one of {known}.')
    if _looks_like_cron(text):
        return _cron(text, _zone_name(default_zone))
    return _interval(lower)


def _looks_like_cron(text: str) -> bool:
    """Intervals alternate numbers and units, so two numbers in a row can only be cron fields."""
    fields = text.split()
    numeric = all(_NUMERIC_FIELD.fullmatch(field) for field in fields[:2])
    return "*" in text or (len(fields) > 1 and numeric)


def _cron(text: str, zone: str) -> Cron:
    fields = text.upper().split()
    if len(fields) == 6:
        raise _Refused(
            "A cron expression has five fields, this one has 6; there is no field for seconds, "
            'write an interval such as "10 seconds" instead.'
        )
    if len(fields) != 5:
        raise _Refused(f"A cron expression has five fields, this one has {len(fields)}.")
    fields[2] = fields[2].replace("$", "L")  # pg_cron's spelling of the last day of the month
    if not text.isascii() or not _cron_reads(fields):
        for index, name in enumerate(_CRON_FIELDS):
            alone = ["*"] * 5
            alone[index] = fields[index]
            if not fields[index].isascii() or not _cron_reads(alone):
                raise _Refused(f'The {name} field "{_shown(fields[index])}" is not valid.')
        raise _Refused(_NEVER)  # each field is fine, but cronsim sees that no month has the day
    cron = Cron(" ".join(fields), zone)
    # A fixed date, for there is no clock here: 28 years hold every combination of day, month,
    # weekday and leap day, and the search goes on for 50.
    start = datetime(2024, 1, 1, tzinfo=UTC)
    if next_fire(cron, start, start) is None:
        raise _Refused(_NEVER)
    return cron


def _cron_reads(fields: list[str]) -> bool:
    try:
        CronSim(" ".join(fields), datetime(2024, 1, 1))
    except CronSimError:
        return False
    return True


def _interval(text: str) -> Every:
    """`text` is in lower case, with single blanks."""
    text = text.removeprefix("@ ")  # as IntervalStyle postgres_verbose writes
    if text.endswith(" ago"):
        _refuse_negative()
    parts = [Fraction(0), Fraction(0), Fraction(0)]
    for amount, unit in _iso_amounts(text) if text.startswith("p") else _amounts(text):
        _add(parts, amount, unit)
    months, days, microseconds = (round(part) for part in parts)
    if not any(parts):
        raise _Refused("The interval is zero.")
    if _total(months, days, microseconds) < _SECOND:
        raise _Refused("The interval is shorter than one second.")
    if _total(months, days, microseconds) > _CENTURY:
        raise _Refused("The interval is longer than 100 years.")
    return Every(months, days, microseconds)


def _amounts(text: str) -> Iterator[tuple[Fraction, str]]:
    position, clocks = 0, 0
    while position < len(text):
        if found := _CLOCK.match(text, position):
            sign, hours, minutes, seconds = found.groups(default="0")
            clocks += 1
            if sign == "-":
                _refuse_negative()
            if clocks > 1:
                raise _Refused("The interval has two times of the form hours:minutes:seconds.")
            if int(minutes) > 59 or Fraction(seconds) >= 60:
                raise _Refused(f'Minutes and seconds are at most 59 in "{found[0]}".')
            yield Fraction(hours), "hour"
            yield Fraction(minutes), "minute"
            yield Fraction(seconds), "second"
        elif found := _AMOUNT.match(text, position):
            number, unit = found.groups()
            if number.startswith("-"):
                _refuse_negative()
            if not unit:
                raise _Refused(
                    f'The number "{_shown(number)}" has no unit, as it has in "10 seconds".'
                )
            if unit not in _UNITS:
                raise _Refused(f'"{_shown(unit)}" is not a unit of time.')
            yield _number(number), unit
        elif position == 0:
            raise _Refused("It is neither an interval, nor a cron expression, nor a known word.")
        else:
            raise _Refused(f'The interval can\'t be read from "{_shown(text[position:])}" on.')
        position = found.end()
        if text.startswith(" ", position):
            position += 1


def _iso_amounts(text: str) -> Iterator[tuple[Fraction, str]]:
    found = _ISO.fullmatch(text)
    if not found or text.endswith("t") or not any(found.groups()):
        raise _Refused('It is not an ISO 8601 duration, such as "PT1H30M" or "P1DT2H".')
    for number, unit in zip(found.groups(), _ISO_UNITS, strict=True):
        if number is not None:
            if number.startswith("-"):
                _refuse_negative()
            yield _number(number), unit


def _number(text: str) -> Fraction:
    # Not every supported Fraction reads "1." and ".5".
    whole, _, fraction = text.lstrip("+").partition(".")
    return Fraction(int(whole + fraction or "0"), 10 ** len(fraction))


def _refuse_negative() -> NoReturn:
    raise _Refused("The interval, or a part of it, is negative.")


def _add(parts: list[Fraction], amount: Fraction, unit: str) -> None:
    """Add to (months, days, microseconds); what isn't whole goes to the next, as in PostgreSQL."""
    kind, factor = _UNITS[unit]
    amount *= factor
    if kind == "year":
        parts[0] += round(amount * 12)
    if kind == "month":
        parts[0] += int(amount)
        kind, amount = "day", (amount - int(amount)) * 30
    if kind == "day":
        parts[1] += int(amount)
        kind, amount = "time", (amount - int(amount)) * _DAY
    if kind == "time":
        parts[2] += amount


def _total(months: int, days: int, microseconds: int) -> int:
    """Microseconds, with a twelfth of 365.25 days for a month."""
    return months * (_CENTURY // 1200) + days * _DAY + microseconds


def _size(every: Every) -> int:
    return _total(every.months, every.days, every.microseconds)


# ---------------------------------------------------------------------------------------------
# Time zones
# ---------------------------------------------------------------------------------------------


def _zone_name(name: str) -> str:
    """The zone's own spelling; as in PostgreSQL, the case doesn't matter."""
    if name.lower() == "utc":
        return "UTC"
    if _ZONE_NAME.fullmatch(name) and name.lower().partition("/")[0] not in _NO_ZONES:
        if _zone_exists(name):
            return name
        if name.lower() in _zone_spellings():
            return _zone_spellings()[name.lower()]
    raise _Refused(f'The time zone "{_shown(name)}" is not known.')


def _zone_exists(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; not a zone file; a directory
        return False
    return True


@lru_cache(maxsize=1)
def _zone_spellings() -> dict[str, str]:
    return {name.lower(): name for name in available_timezones()}


@lru_cache(maxsize=256)
def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)


def _offset(at: datetime, zone: tzinfo) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta(0)


def _wall(at: datetime, zone: tzinfo) -> datetime:
    """What a clock in the zone shows, without zone or fold."""
    return at.astimezone(zone).replace(tzinfo=None, fold=0)


def _change(low: datetime, high: datetime, zone: tzinfo) -> datetime:
    """The first instant of `high`'s offset, which isn't `low`'s."""
    before = _offset(low, zone)
    while high - low > _MICROSECOND:
        middle = low + (high - low) // 2
        if _offset(middle, zone) == before:
            low = middle
        else:
            high = middle
    return high


# ---------------------------------------------------------------------------------------------
# The grid of an interval, in microseconds since 1970
# ---------------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_FIRST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_GREGORIAN_MONTH = 146097 * _DAY // 4800
_MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DAYS_BEFORE = tuple(sum(_MONTH_LENGTHS[:month]) for month in range(12))


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def _datetime(micros: int) -> datetime | None:
    return _EPOCH + timedelta(microseconds=micros) if _FIRST <= micros <= _LAST else None


def _utc(at: datetime) -> datetime:
    """In UTC; at the very ends of the calendar, the last instant that UTC can express."""
    return _EPOCH + timedelta(microseconds=min(max(_micros(at), _FIRST), _LAST))


def _point(every: Every, anchor: int, k: int) -> int:
    """The k-th point. Integers all the way, so it holds for years that a datetime can't express."""
    clock = every.days * _DAY + every.microseconds
    if not every.months:
        return anchor + k * clock
    whole_days, time_of_day = divmod(anchor, _DAY)
    start = date.fromordinal(whole_days + _EPOCH_ORDINAL)
    year, month = divmod(start.year * 12 + start.month - 1 + k * every.months, 12)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    length = _MONTH_LENGTHS[month] + (leap and month == 1)
    past = year - 1
    ordinal = past * 365 + past // 4 - past // 100 + past // 400
    ordinal += _DAYS_BEFORE[month] + (leap and month > 1) + min(start.day, length)
    return (ordinal - _EPOCH_ORDINAL) * _DAY + time_of_day + k * clock


def _index(every: Every, anchor: int, at: int) -> int:
    """The greatest k whose point is at or before `at`."""
    # Exact without months. With them, months of mean length never miss by more than a few days,
    # while points are 28 days apart or more: the loops below make a step or two.
    mean = every.months * _GREGORIAN_MONTH + every.days * _DAY + every.microseconds
    k = (at - anchor) // mean
    while _point(every, anchor, k) > at:
        k -= 1
    while _point(every, anchor, k + 1) <= at:
        k += 1
    return k


# ---------------------------------------------------------------------------------------------
# The grid of a cron expression
# ---------------------------------------------------------------------------------------------

# Cron's instants lie between these, away from the edges where local times overflow.
_CRON_FIRST = datetime(1, 1, 3, tzinfo=UTC)
_CRON_LAST = datetime(9999, 12, 29, tzinfo=UTC)
_HORIZON = timedelta(days=50 * 366)
_NEAR = timedelta(days=2)
"""More than any clock was ever shifted by, a day in Samoa."""


def _walls(expression: str, start: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    """The matching wall-clock times from `start` on, or back; cronsim itself excludes its start."""
    return CronSim(expression, start + _MICROSECOND if reverse else start - _MICROSECOND, reverse)


def _follows_clock(expression: str) -> bool:
    """Whether Debian's cron runs it by what the clock shows: twice in a repeated hour."""
    minute, hour, *_ = expression.split()
    return minute.startswith("*") or hour.startswith("*")


def _cron_next(cron: Cron, after: datetime) -> datetime | None:
    if after >= _CRON_LAST:
        return None
    zone = _zone(cron.zone)
    start = max(_utc(after) + _MICROSECOND, _CRON_FIRST)
    search = _clock_next if _follows_clock(cron.expression) else _fixed_next
    try:
        found = search(cron.expression, start, zone)
    except OverflowError:
        return None
    return found if found is not None and found <= _CRON_LAST else None


def _cron_previous(cron: Cron, at: datetime) -> datetime | None:
    if at < _CRON_FIRST:
        return None
    zone = _zone(cron.zone)
    start = min(_utc(at), _CRON_LAST)
    search = _clock_previous if _follows_clock(cron.expression) else _fixed_previous
    try:
        found = search(cron.expression, start, zone)
    except OverflowError:
        return None
    return found if found is not None and found >= _CRON_FIRST else None


def _fixed_instant(wall: datetime, zone: tzinfo) -> datetime:
    """When a fixed time fires. It never decreases as `wall` grows."""
    instant = wall.replace(tzinfo=zone).astimezone(UTC)
    if _wall(instant, zone) == wall:
        return instant
    # Skipped: PEP 495 reads fold 0 with the offset before the change, fold 1 with that after it,
    # which lands on the far side of the change each time.
    return _change(wall.replace(tzinfo=zone, fold=1).astimezone(UTC), instant, zone)


def _fixed_next(expression: str, start: datetime, zone: tzinfo) -> datetime | None:
    """The first fire at or after `start`."""
    # From just before, so that times skipped by a change at `start` are seen. In the second pass
    # of a repeated hour the first instants found are past, and are left behind.
    for wall in _walls(expression, _wall(start - _MICROSECOND, zone) + _MICROSECOND):
        instant = _fixed_instant(wall, zone)
        if instant >= start:
            return instant
    return None


def _fixed_previous(expression: str, start: datetime, zone: tzinfo) -> datetime | None:
    """The last fire at or before `start`."""
    # In the second pass of a repeated hour, all of the first pass is past, also what the clock
    # has yet to show again.
    first_pass = start.astimezone(zone).replace(fold=0).astimezone(UTC)
    for wall in _walls(expression, _wall(start, zone) + (start - first_pass), reverse=True):
        instant = _fixed_instant(wall, zone)
        if instant <= start:
            return instant
    return None


def _clock_next(expression: str, start: datetime, zone: tzinfo) -> datetime | None:
    """The first instant at or after `start` when the clock shows a matching time."""
    end = min(start, _CRON_LAST - _HORIZON) + _HORIZON
    while start <= end:
        offset = _offset(start, zone)
        wall = next(_walls(expression, _wall(start, zone)), None)
        if wall is None:
            return None
        # Right if the offset still holds then. Otherwise search again from the change. Only a
        # change near either end can matter: elsewhere the clock shows nothing that matches.
        instant = (wall - offset).replace(tzinfo=UTC)
        near = min(instant, start + _NEAR)
        if _offset(near, zone) != offset:
            start = _change(start, near, zone)
        elif near == instant:
            return instant
        else:
            start = instant - _NEAR
    return None


def _clock_previous(expression: str, start: datetime, zone: tzinfo) -> datetime | None:
    """The last instant at or before `start` when the clock shows a matching time."""
    end = max(start, _CRON_FIRST + _HORIZON) - _HORIZON
    while start >= end:
        offset = _offset(start, zone)
        wall = next(_walls(expression, _wall(start, zone), reverse=True), None)
        if wall is None:
            return None
        instant = (wall - offset).replace(tzinfo=UTC)
        near = max(instant, start - _NEAR)
        if _offset(near, zone) != offset:
            start = _change(near, start, zone) - _MICROSECOND
        elif near == instant:
            return instant
        else:
            start = instant + _NEAR
    return None


# ---------------------------------------------------------------------------------------------
# Firing
# ---------------------------------------------------------------------------------------------

# The golden ratio's conjugate in 64 bits: its multiples modulo one are spread as evenly as can be.
_GOLDEN = 0x9E3779B97F4A7C15


def spread_anchor(schedule: Schedule, created_at: datetime, pgt_id: int) -> datetime:
    """The anchor of a new node: up to a minute early, so that nodes made together don't herd."""
    if not isinstance(schedule, Every):
        return _utc(created_at)
    span = min(_size(schedule), _MINUTE)
    early = (pgt_id * _GOLDEN % 2**64) * span >> 64
    return _datetime(_micros(created_at) - early) or _utc(created_at)


def next_fire(schedule: Schedule, anchor: datetime, after: datetime) -> datetime | None:
    """The first grid point strictly later than `after`; None if there is none."""
    if isinstance(schedule, Every):
        origin = _micros(anchor)
        return _datetime(_point(schedule, origin, _index(schedule, origin, _micros(after)) + 1))
    if isinstance(schedule, Cron):
        return _cron_next(schedule, after)
    return None


def previous_fire(schedule: Schedule, anchor: datetime, at: datetime) -> datetime | None:
    """The last grid point at or before `at`; None if there is none."""
    if isinstance(schedule, Every):
        origin = _micros(anchor)
        return _datetime(_point(schedule, origin, _index(schedule, origin, _micros(at))))
    if isinstance(schedule, Cron):
        return _cron_previous(schedule, at)
    return None


def due(
    schedule: Schedule,
    anchor: datetime,
    next_fire_at: datetime | None,
    now: datetime,
    catch_up: int,
) -> Firing | None:
    """The fire to run now, if any: the oldest of the `catch_up` most recent ones missed.

    `next_fire_at` is what is stored, on the grid or not. Missed are it and the grid points after
    it up to `now`. Called again with `following`, it gives the next of them, and None in the end.

    For a cron expression the work is bounded by `MOST_CRON_STEPS`: `skipped` is exact up to it,
    and at most so many fires are caught up with.
    """
    if next_fire_at is None or next_fire_at > now:
        return None
    first = _utc(next_fire_at)
    catch_up = max(catch_up, 1)
    if isinstance(schedule, Every):
        fire_at, skipped = _due_every(schedule, anchor, first, now, catch_up)
    elif isinstance(schedule, Cron):
        fire_at, skipped = _due_cron(schedule, first, now, min(catch_up, MOST_CRON_STEPS))
    else:
        return None
    return Firing(fire_at, skipped, next_fire(schedule, anchor, fire_at))


def _due_every(
    every: Every, anchor: datetime, first: datetime, now: datetime, catch_up: int
) -> tuple[datetime, int]:
    origin = _micros(anchor)
    newest = _index(every, origin, _micros(now))
    skipped = 1 + newest - _index(every, origin, _micros(first)) - catch_up
    if skipped > 0:
        oldest = _datetime(_point(every, origin, newest - catch_up + 1))
        if oldest is not None:  # always so: it lies after `first` and not after `now`
            return oldest, skipped
    return first, 0


def _due_cron(cron: Cron, first: datetime, now: datetime, catch_up: int) -> tuple[datetime, int]:
    oldest = min(now, _CRON_LAST) + _MICROSECOND
    for _ in range(catch_up):
        earlier = _cron_previous(cron, oldest - _MICROSECOND)
        if earlier is None or earlier <= first:
            return first, 0
        oldest = earlier
    skipped, passed = 1, _cron_next(cron, first)
    while skipped < MOST_CRON_STEPS and passed is not None and passed < oldest:
        skipped, passed = skipped + 1, _cron_next(cron, passed)
    return oldest, skipped


def tightest(schedules: Iterable[Schedule], anchor: datetime, now: datetime) -> Schedule | None:
    """The schedule with the least time between its next two fires; the first of equals."""
    best: tuple[timedelta, Schedule] | None = None
    for schedule in schedules:
        fire = next_fire(schedule, anchor, now)
        following = None if fire is None else next_fire(schedule, anchor, fire)
        if fire is not None and following is not None:
            gap = following - fire
            if best is None or gap < best[0]:
                best = gap, schedule
    return None if best is None else best[1]
