"""Properties of `pg_sluice.core.schedule`: one list, from reading a schedule to firing it.

The cron grid is compared with an oracle of its own, which walks minute by minute and knows
nothing of cronsim.
"""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import cronsim
import pytest
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st

from pg_sluice.core import schedule as subject
from pg_sluice.core.errors import SluiceError
from pg_sluice.core.schedule import (
    Calculated,
    Cron,
    Every,
    Firing,
    Manual,
    Schedule,
    due,
    next_fire,
    parse,
    previous_fire,
    render,
    spread_anchor,
    tightest,
)

MICROSECOND = timedelta(microseconds=1)
EARLIEST = datetime.min.replace(tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)
SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

few = settings(database=None, max_examples=150)
many = settings(database=None, max_examples=600)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]


def attempt(spec: str, zone: str = "UTC") -> Schedule | SluiceError:
    try:
        return parse(spec, zone)
    except SluiceError as error:
        return error


def fires(schedule: Schedule, after: datetime, anchor: datetime) -> Iterator[datetime]:
    fire = next_fire(schedule, anchor, after)
    while fire is not None:
        yield fire
        fire = next_fire(schedule, anchor, fire)


def fires_within(schedule: Schedule, after: datetime, until: datetime) -> list[datetime]:
    return list(itertools.takewhile(lambda at: at <= until, fires(schedule, after, after)))


def fires_back(schedule: Schedule, after: datetime, until: datetime) -> list[datetime]:
    found: list[datetime] = []
    fire = previous_fire(schedule, after, until)
    while fire is not None and fire > after:
        found.append(fire)
        fire = previous_fire(schedule, after, fire - MICROSECOND)
    return found[::-1]


def local(zone: str, *times: str) -> list[datetime]:
    """`2024-10-27 01:30` in the zone; a trailing `+` is the second pass of a repeated time."""
    return [
        datetime.fromisoformat(time.rstrip("+"))
        .replace(tzinfo=ZoneInfo(zone), fold=int(time.endswith("+")))
        .astimezone(UTC)
        for time in times
    ]


instants = st.datetimes(
    min_value=datetime(1990, 1, 1), max_value=datetime(2090, 1, 1), timezones=st.just(UTC)
)
any_instant = st.datetimes(timezones=st.just(UTC))
pure_times = st.builds(
    Every,
    st.just(0),
    st.integers(0, 400),
    st.one_of(st.integers(SECOND, 3 * DAY), st.sampled_from([SECOND, MINUTE, HOUR, DAY])),
)
calendars = st.builds(
    Every,
    st.one_of(st.integers(1, 30), st.sampled_from([48, 1000])),
    st.one_of(st.just(0), st.integers(0, 60)),
    st.one_of(st.just(0), st.integers(0, 3 * DAY)),
)
intervals = st.one_of(pure_times, calendars)

ZONES = [
    "UTC",
    "Europe/Oslo",
    "America/New_York",
    "Australia/Lord_Howe",
    "America/Havana",
    "America/Santiago",
    "Africa/Casablanca",
    "Antarctica/Troll",
    "Asia/Kolkata",
    "Pacific/Apia",
]


def cron_field(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    span = st.tuples(number, number).map(lambda ends: f"{min(ends)}-{max(ends)}")
    step = st.tuples(st.one_of(st.just("*"), span), st.integers(1, high)).map(
        lambda parts: f"{parts[0]}/{parts[1]}"
    )
    item = st.one_of(number.map(str), span, step)
    return st.one_of(st.just("*"), st.lists(item, min_size=1, max_size=3).map(",".join))


cron_texts = st.tuples(
    cron_field(0, 59),
    cron_field(0, 23),
    st.one_of(st.just("*"), cron_field(1, 31), st.sampled_from(["L", "LW", "$"])),
    cron_field(1, 12),
    st.one_of(st.just("*"), cron_field(0, 7), st.sampled_from(["MON-FRI", "1#5", "5L", "sun"])),
).map(" ".join)


@st.composite
def crons(draw: st.DrawFn) -> Schedule:
    found = attempt(f"TZ={draw(st.sampled_from(ZONES))} {draw(cron_texts)}")
    if isinstance(found, SluiceError):
        assert "never fire" in (found.detail or "")
        reject()
    return found


grids = st.one_of(intervals, crons())
schedules = st.one_of(grids, st.just(Calculated()), st.just(Manual()))


# --- 1. What is read, and as what ------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "months", "days", "microseconds"),
    [
        ("@every 90s", 0, 0, 90 * SECOND),
        ("@every 1h30m", 0, 0, 90 * MINUTE),
        ("@every 1.5h", 0, 0, 90 * MINUTE),
        ("@every .5m", 0, 0, 30 * SECOND),
        ("@every 1s250ms", 0, 0, 1_250_000),
        ("@every 1s5\u00b5s", 0, 0, 1_000_005),
        ("@every 1s5\u03bcs", 0, 0, 1_000_005),
        ("@every 1s7us9ns", 0, 0, 1_000_007),
        ("@every 1500000000ns", 0, 0, 1_500_000),
        ("@every 1d", 0, 1, 0),
        ("@every 1w12h", 0, 7, 12 * HOUR),
        ("  @EVERY\t5M ", 0, 0, 5 * MINUTE),
        ("@every 10 seconds", 0, 0, 10 * SECOND),
        ("@every PT1H", 0, 0, HOUR),
        ("30s", 0, 0, 30 * SECOND),
        ("5m", 0, 0, 5 * MINUTE),
        ("5 m", 0, 0, 5 * MINUTE),
        ("1h30m", 0, 0, 90 * MINUTE),
        ("1H30M", 0, 0, 90 * MINUTE),
        ("24h", 0, 0, DAY),
        ("+5 min", 0, 0, 5 * MINUTE),
        ("10 seconds", 0, 0, 10 * SECOND),
        ("1 sec", 0, 0, SECOND),
        ("2 secs", 0, 0, 2 * SECOND),
        ("90 minutes", 0, 0, 90 * MINUTE),
        ("1 minute 1 second", 0, 0, 61 * SECOND),
        ("2 mins 1500 milliseconds", 0, 0, 121_500_000),
        ("2 hrs", 0, 0, 2 * HOUR),
        ("1 hr", 0, 0, HOUR),
        ("1 day", 0, 1, 0),
        ("1 DAY", 0, 1, 0),
        ("2 weeks", 0, 14, 0),
        ("1.5 weeks", 0, 10, 12 * HOUR),
        ("1.5 days", 0, 1, 12 * HOUR),
        ("1 mon", 1, 0, 0),
        ("1.5 mons", 1, 15, 0),
        ("1 mon 2 days 03:04:05", 1, 2, 3 * HOUR + 4 * MINUTE + 5 * SECOND),
        ("@ 1 year 2 mons 3 days 4 hours", 14, 3, 4 * HOUR),
        ("1 year 2 months", 14, 0, 0),
        ("1.5 years", 18, 0, 0),
        ("2 yrs", 24, 0, 0),
        ("100 years", 1200, 0, 0),
        ("00:00:10.5", 0, 0, 10_500_000),
        ("1 day 02:30", 0, 1, 2 * HOUR + 30 * MINUTE),
        ("36:00:00", 0, 0, 36 * HOUR),
        ("0.9999999 seconds", 0, 0, SECOND),
        ("PT1H30M", 0, 0, 90 * MINUTE),
        ("P1DT2H", 0, 1, 2 * HOUR),
        ("p1y2m3w4dt5h6m7.5s", 14, 25, 5 * HOUR + 6 * MINUTE + 7_500_000),
    ],
)
def test_intervals_are_read(spec: str, months: int, days: int, microseconds: int) -> None:
    assert parse(spec) == Every(months, days, microseconds)


@pytest.mark.parametrize(
    ("spec", "expression", "zone"),
    [
        ("0 3 * * *", "0 3 * * *", "UTC"),
        ("  */5   *\t* * mon-fri ", "*/5 * * * MON-FRI", "UTC"),
        ("TZ=Europe/Oslo 0 3 * * *", "0 3 * * *", "Europe/Oslo"),
        ("CRON_TZ=America/New_York 0 3 * * *", "0 3 * * *", "America/New_York"),
        ("tz=europe/oslo 0 3 * * *", "0 3 * * *", "Europe/Oslo"),
        ("TZ=utc 0 3 * * *", "0 3 * * *", "UTC"),
        ("1 2 3 jan 4", "1 2 3 JAN 4", "UTC"),
        ("0 0 29 2 *", "0 0 29 2 *", "UTC"),
        ("0 0 30 2 1", "0 0 30 2 1", "UTC"),
        ("0 0 L * *", "0 0 L * *", "UTC"),
        ("0 0 $ * *", "0 0 L * *", "UTC"),
        ("@hourly", "0 * * * *", "UTC"),
        ("@Daily", "0 0 * * *", "UTC"),
        ("@midnight", "0 0 * * *", "UTC"),
        ("@weekly", "0 0 * * 0", "UTC"),
        ("@monthly", "0 0 1 * *", "UTC"),
        ("@yearly", "0 0 1 1 *", "UTC"),
        ("@annually", "0 0 1 1 *", "UTC"),
        ("TZ=Asia/Kolkata @daily", "0 0 * * *", "Asia/Kolkata"),
    ],
)
def test_cron_expressions_are_read(spec: str, expression: str, zone: str) -> None:
    assert parse(spec) == Cron(expression, zone)


def test_words_are_read_in_any_case() -> None:
    assert parse("calculated") == parse(" CALCULATED\n") == Calculated()
    assert parse("manual") == parse("Manual") == Manual()


def test_a_zone_of_its_own_goes_before_the_default() -> None:
    assert parse("0 3 * * *", "Europe/Oslo") == Cron("0 3 * * *", "Europe/Oslo")
    assert parse("@daily", "europe/oslo") == Cron("0 0 * * *", "Europe/Oslo")
    assert parse("TZ=UTC @daily", "Europe/Oslo") == Cron("0 0 * * *", "UTC")
    with pytest.raises(SluiceError) as caught:
        parse("0 3 * * *", "Mars/Olympus")
    assert caught.value.detail == 'The time zone "Mars/Olympus" is not known.'
    assert parse("5m", "Mars/Olympus") == Every(0, 0, 5 * MINUTE)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "The schedule is empty."),
        (" \t ", "The schedule is empty."),
        ("0s", "The interval is zero."),
        ("00:00:00", "The interval is zero."),
        ("0 0", "A cron expression has five fields, this one has 2."),
        ("-5 minutes", "The interval, or a part of it, is negative."),
        ("1 day -1 hour", "The interval, or a part of it, is negative."),
        ("1 day -01:00", "The interval, or a part of it, is negative."),
        ("PT-5M", "The interval, or a part of it, is negative."),
        ("5 minutes ago", "The interval, or a part of it, is negative."),
        ("999ms", "The interval is shorter than one second."),
        ("@every 250ms", "The interval is shorter than one second."),
        ("1ns", "The interval is shorter than one second."),
        ("100 years 1 second", "The interval is longer than 100 years."),
        ("9" * 190 + " days", "The interval is longer than 100 years."),
        ("10", 'The number "10" has no unit, as it has in "10 seconds".'),
        ("1 hour 10", 'The number "10" has no unit, as it has in "10 seconds".'),
        ("10 parsecs", '"parsecs" is not a unit of time.'),
        ("1 day & more", 'The interval can\'t be read from "& more" on.'),
        ("01:60:00", 'Minutes and seconds are at most 59 in "01:60:00".'),
        ("01:00 02:00", "The interval has two times of the form hours:minutes:seconds."),
        ("P", 'It is not an ISO 8601 duration, such as "PT1H30M" or "P1DT2H".'),
        ("P1DT", 'It is not an ISO 8601 duration, such as "PT1H30M" or "P1DT2H".'),
        ("@every", 'There is no interval after "@every".'),
        ("@every @every 5s", "It is neither an interval, nor a cron expression, nor a known word."),
        (
            "@reboot",
            '"@reboot" is not one of "@every", "@hourly", "@daily", "@midnight", "@weekly", '
            '"@monthly", "@yearly", "@annually".',
        ),
        ("often", "It is neither an interval, nor a cron expression, nor a known word."),
        ("* * * *", "A cron expression has five fields, this one has 4."),
        (
            "*/10 * * * * *",
            "A cron expression has five fields, this one has 6; there is no field for seconds, "
            'write an interval such as "10 seconds" instead.',
        ),
        ("60 * * * *", 'The minute field "60" is not valid.'),
        ("0 24 * * *", 'The hour field "24" is not valid.'),
        ("0 0 32 * *", 'The day of month field "32" is not valid.'),
        ("0 0 * 13 *", 'The month field "13" is not valid.'),
        ("0 0 * * foo", 'The day of week field "FOO" is not valid.'),
        ("0 0 \u00b5 * *", 'The day of month field "\u039c" is not valid.'),
        ("*/0 * * * *", 'The minute field "*/0" is not valid.'),
        ("0 0 30 2 *", "No date matches this cron expression, so it would never fire."),
        ("0 0 31 4,6 *", "No date matches this cron expression, so it would never fire."),
        ("0 0 */31 * 1#5", "No date matches this cron expression, so it would never fire."),
        (
            "TZ=Europe/Oslo */5 2 * 3 0L",  # an hour that is skipped each year
            "No date matches this cron expression, so it would never fire.",
        ),
        ("TZ=Europe/Olso 0 3 * * *", 'The time zone "Europe/Olso" is not known.'),
        ("TZ=Europe 0 3 * * *", 'The time zone "Europe" is not known.'),
        ("TZ=../../etc/passwd 0 3 * * *", 'The time zone "../../etc/passwd" is not known.'),
        ("TZ=right/UTC 0 3 * * *", 'The time zone "right/UTC" is not known.'),
        ("TZ=localtime 0 3 * * *", 'The time zone "localtime" is not known.'),
        ("TZ=zone.tab 0 3 * * *", 'The time zone "zone.tab" is not known.'),
        ("TZ= 0 3 * * *", 'The time zone "" is not known.'),
        ("TZ=UTC", "There is no cron expression after the time zone."),
        (
            "TZ=UTC 5m",
            'A time zone goes only with five cron fields or a word such as "@daily"; '
            "intervals are counted in UTC.",
        ),
        ("5m\0", "It contains the character U+0000, which no schedule has."),
        ("5\u00a0m", "It contains the character U+00A0, which no schedule has."),
        ("\u0665 minutes", "It contains the character U+0665, which no schedule has."),
        ("5 \ud800", "It contains the character U+D800, which no schedule has."),
        ("0 0 * * \u017fun", "It contains the character U+017F, which no schedule has."),
        ("1 day " * 40, "A schedule has at most 200 characters."),
    ],
)
def test_refusals_say_why(spec: str, reason: str) -> None:
    with pytest.raises(SluiceError) as caught:
        parse(spec)
    assert (caught.value.sqlstate, caught.value.detail) == ("22023", reason)


@few
@given(st.text(max_size=400))
@example("\0" * 300)
@example("\udfff\n\u202e")
def test_the_message_of_a_refusal_is_short_and_printable(spec: str) -> None:
    error = attempt(spec)
    if isinstance(error, SluiceError):
        for text in (error.message, error.detail or ""):
            assert text.isprintable()
            assert "\0" not in text
            text.encode()
        assert len(error.message) <= 60 * len("\\U00000000") + len('invalid schedule "..."')


PIECES = [
    *" .:+-*/,#LW$@\t0123456789",
    *["P", "T", "tz=", "CRON_TZ=", "Europe/Oslo ", "America", "@every ", "@daily", "ago", "mon"],
    *["1 ", "days ", "1.5h", "02:30", "-", "* * * * *", "0 0 ", "sun", "calculated", "\u00b5s"],
    *["99999999999999999999", "1e9", "0x10", "inf", "nan", "year", "PT", "\0", "\u0661", "\ud800"],
]
likely_texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.sampled_from(PIECES), min_size=5, max_size=6).map(" ".join),
    cron_texts,
    st.text(alphabet="0123456789*/,-#LW$ MONJAN?", max_size=30),
)


@many
@given(
    st.one_of(st.text(), st.text(st.characters()), likely_texts),
    st.one_of(st.just("UTC"), st.text(max_size=20)),
)
@example("1" * 200, "UTC")
@example("1h" * 100, "UTC")
@example("0 0 * * 1" + "," * 191, "UTC")
@example("0 0 * * " + "1/" * 96, "UTC")
@example("* * * * " + "9" * 192, "UTC")
@example("0." + "0" * 190 + "1 y", "UTC")
@example("0 0 1 1 *", "a/" * 5000)
@example("0 0 1 1 *", "\0")
def test_any_text_is_a_schedule_or_a_22023(spec: str, zone: str) -> None:
    found = attempt(spec, zone)
    if isinstance(found, SluiceError):
        assert found.sqlstate == "22023"
        assert found.message.startswith('invalid schedule "')
        assert found.detail is not None
        assert found.detail.endswith(".")
    else:
        assert parse(render(found)) == found
        anchor = utc(2024, 1, 1)
        has_grid = isinstance(found, Every | Cron)
        assert (next_fire(found, anchor, anchor) is not None) == has_grid


@many
@given(schedules)
def test_render_and_parse_are_inverse(schedule: Schedule) -> None:
    text = render(schedule)
    assert parse(text, "Europe/Oslo") == schedule
    assert render(parse(text)) == text


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("90 minutes", "@every 1h30m"),
        ("1 day", "@every 1d"),
        ("24 hours", "@every 24h"),
        ("1500ms", "@every 1.5s"),
        ("1 year 00:00:00.000001", "@every 1y0.000001s"),
        ("@daily", "TZ=UTC 0 0 * * *"),
        ("TZ=Europe/Oslo  0 0 * * fri", "TZ=Europe/Oslo 0 0 * * FRI"),
    ],
)
def test_canonical_texts(spec: str, canonical: str) -> None:
    assert render(parse(spec)) == canonical


def test_an_interval_below_one_second_can_not_be_built() -> None:
    for parts in [(0, 0, 0), (0, 0, SECOND - 1), (1, -1, 0), (1, 0, -1), (-1, 40, 0)]:
        with pytest.raises(ValueError, match="at least one second"):
            Every(*parts)


def test_the_docstrings_tell_the_truth() -> None:
    result = doctest.testmod(subject)
    assert result.attempted > 0
    assert result.failed == 0


# --- 2. The grid of an interval --------------------------------------------------------------


def test_a_million_periods_do_not_drift() -> None:
    anchor = utc(2024, 2, 29, 23, 59, 59, 999_999)
    for every in [Every(0, 0, SECOND), Every(0, 0, 1_000_001), Every(0, 1, 7), Every(0, 0, HOUR)]:
        period = timedelta(days=every.days, microseconds=every.microseconds)
        for k in [1, 2, 3, 10, 999_999, 1_000_000]:
            point = anchor + k * period
            assert next_fire(every, anchor, point - MICROSECOND) == point
            assert next_fire(every, anchor, point) == point + period
            assert previous_fire(every, anchor, point) == point
            assert previous_fire(every, anchor, point - MICROSECOND) == point - period
    every = Every(0, 0, 1_000_001)
    walked = list(itertools.islice(fires(every, anchor, anchor), 20_000))
    assert walked[-1] == anchor + 20_000 * timedelta(microseconds=1_000_001)


@pytest.mark.parametrize(
    ("spec", "anchor", "points"),
    [
        ("1 mon", "2024-01-31", ["2024-02-29", "2024-03-31", "2024-04-30", "2024-05-31"]),
        ("1 mon", "2023-01-30", ["2023-02-28", "2023-03-30", "2023-04-30", "2023-05-30"]),
        ("1 year", "2024-02-29", ["2025-02-28", "2026-02-28", "2027-02-28", "2028-02-29"]),
        ("4 years", "2096-02-29", ["2100-02-28", "2104-02-29"]),
        ("1 mon 1 day", "2024-01-31", ["2024-03-01", "2024-04-02", "2024-05-03", "2024-06-04"]),
        ("1 mon 12:00", "2024-01-01", ["2024-02-01T12:00", "2024-03-02T00:00"]),
    ],
)
def test_months_are_counted_from_the_anchor(spec: str, anchor: str, points: list[str]) -> None:
    start, *expected = (
        datetime.fromisoformat(point).replace(tzinfo=UTC) for point in [anchor, *points]
    )
    got = list(itertools.islice(fires(parse(spec), start, start), len(expected)))
    assert got == expected
    back = [previous_fire(parse(spec), start, point - MICROSECOND) for point in expected]
    assert back == [start, *expected[:-1]]


def test_months_are_counted_backwards_from_the_anchor_too() -> None:
    anchor = utc(2024, 3, 31, 12)
    every = parse("1 mon")
    assert previous_fire(every, anchor, utc(2024, 3, 31, 11)) == utc(2024, 2, 29, 12)
    assert next_fire(every, anchor, utc(2023, 2, 1)) == utc(2023, 2, 28, 12)
    assert next_fire(every, anchor, utc(1, 1, 1)) == utc(1, 1, 31, 12)


@many
@given(calendars, instants, st.integers(-600, 600))
def test_points_of_a_calendar_are_what_date_arithmetic_says(
    every: Every, anchor: datetime, k: int
) -> None:
    month = anchor.year * 12 + anchor.month - 1 + k * every.months
    assume(12 <= month < 9999 * 12)
    first = date(month // 12, month % 12 + 1, 1)
    after_it = date((month + 1) // 12, (month + 1) % 12 + 1, 1)
    day = min(anchor.day, (after_it - first).days)
    try:
        point = anchor.replace(year=first.year, month=first.month, day=day)
        point += k * timedelta(days=every.days, microseconds=every.microseconds)
    except OverflowError:
        return
    assert previous_fire(every, anchor, point) == point
    if point > utc(1, 1, 1):
        assert next_fire(every, anchor, point - MICROSECOND) == point


@many
@given(grids, instants, instants)
def test_next_is_strictly_later_and_previous_its_inverse(
    schedule: Schedule, anchor: datetime, at: datetime
) -> None:
    following = next_fire(schedule, anchor, at)
    previous = previous_fire(schedule, anchor, at)
    assert following is not None
    assert previous is not None
    assert previous <= at < following
    assert following.tzinfo is UTC
    assert previous.tzinfo is UTC
    assert next_fire(schedule, anchor, previous) == following
    assert previous_fire(schedule, anchor, following) == following
    assert previous_fire(schedule, anchor, following - MICROSECOND) == previous
    if previous < at:
        assert next_fire(schedule, anchor, previous - MICROSECOND) == previous


@few
@given(intervals, any_instant, any_instant)
@example(Every(1, 0, 0), EARLIEST, LATEST)
@example(Every(1, 0, 0), LATEST, EARLIEST)
@example(Every(0, 0, SECOND), EARLIEST, LATEST)
@example(Every(0, 0, SECOND), LATEST, EARLIEST)
def test_an_interval_holds_over_the_whole_calendar(
    every: Every, anchor: datetime, at: datetime
) -> None:
    following = next_fire(every, anchor, at)
    previous = previous_fire(every, anchor, at)
    longest = timedelta(days=31 * every.months + every.days, microseconds=every.microseconds)
    assert (at < following) if following else at > LATEST - longest
    assert (previous <= at) if previous else at < EARLIEST + longest


@pytest.mark.parametrize("zone", ["UTC", "Europe/Oslo", "Pacific/Kiritimati", "Pacific/Niue"])
@pytest.mark.parametrize("text", ["* * * * *", "0 3 * * *", "0 0 29 2 *", "*/5 2 L 12 *"])
def test_cron_ends_quietly_at_the_ends_of_the_calendar(text: str, zone: str) -> None:
    cron = parse(f"TZ={zone} {text}")
    for edge in [EARLIEST, LATEST]:
        for hours in [-14, -1, 0, 1, 14]:
            at = edge.replace(tzinfo=timezone(timedelta(hours=hours)))
            following, previous = next_fire(cron, at, at), previous_fire(cron, at, at)
            assert (following is not None) == (edge == EARLIEST)
            assert (previous is not None) == (edge == LATEST)
            assert due(cron, at, at, at, 3) is not None
            spread_anchor(cron, at, 1)
            spread_anchor(Every(0, 0, SECOND), at, 1)


def test_the_last_and_the_first_leap_day_have_no_neighbour() -> None:
    cron = parse("0 0 29 2 *")
    for later in [utc(9996, 2, 29), utc(9997, 1, 1), utc(9999, 12, 28)]:
        assert next_fire(cron, later, later) is None
    for earlier in [utc(4, 2, 28), utc(3, 1, 1), utc(1, 1, 4)]:
        assert previous_fire(cron, earlier, earlier) is None


@few
@given(schedules, instants, instants)
def test_any_zone_of_the_arguments_will_do(
    schedule: Schedule, anchor: datetime, at: datetime
) -> None:
    zone = ZoneInfo("Australia/Lord_Howe")
    for function in (next_fire, previous_fire):
        expected = function(schedule, anchor, at)
        assert function(schedule, anchor.astimezone(zone), at.astimezone(zone)) == expected


def test_what_has_no_grid_never_fires() -> None:
    now = utc(2024, 1, 1)
    for schedule in (Calculated(), Manual()):
        assert next_fire(schedule, now, now) is None
        assert previous_fire(schedule, now, now) is None
        assert due(schedule, now, now, now, 1) is None


# --- 3. The grid of a cron expression --------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "start", "end", "expected"),
    [
        # Spring: 02:00 to 03:00 is skipped.
        ("TZ=Europe/Oslo 30 2 * * *", "2024-03-30 12:00", "2024-04-01 00:00", ["03-31 03:00"]),
        ("TZ=Europe/Oslo 0,30 2,3 * * *", "2024-03-31 00:00", "2024-03-31 12:00",
         ["03-31 03:00", "03-31 03:30"]),
        ("TZ=Europe/Oslo */30 * * * *", "2024-03-31 01:00", "2024-03-31 03:30",
         ["03-31 01:30", "03-31 03:00", "03-31 03:30"]),
        ("TZ=Europe/Oslo */30 2 * * *", "2024-03-30 02:15", "2024-04-01 02:15",
         ["03-30 02:30", "04-01 02:00"]),
        ("TZ=America/New_York 30 2 * * *", "2024-03-09 12:00", "2024-03-11 12:00",
         ["03-10 03:00", "03-11 02:30"]),
        ("TZ=America/New_York 0 * * * *", "2024-03-10 00:30", "2024-03-10 04:30",
         ["03-10 01:00", "03-10 03:00", "03-10 04:00"]),
        # Lord Howe skips 02:00 to 02:30.
        ("TZ=Australia/Lord_Howe 15 2 * * *", "2024-10-05 12:00", "2024-10-07 12:00",
         ["10-06 02:30", "10-07 02:15"]),
        ("TZ=Australia/Lord_Howe */15 2,3 * * *", "2024-10-06 01:00", "2024-10-06 04:00",
         ["10-06 02:30", "10-06 02:45", "10-06 03:00", "10-06 03:15", "10-06 03:30",
          "10-06 03:45"]),
        ("TZ=Australia/Lord_Howe */15 3 * * *", "2024-10-06 01:00", "2024-10-06 04:00",
         ["10-06 03:00", "10-06 03:15", "10-06 03:30", "10-06 03:45"]),
        # Autumn: 02:00 to 03:00 comes twice.
        ("TZ=Europe/Oslo 30 2 * * *", "2024-10-26 12:00", "2024-10-28 12:00",
         ["10-27 02:30", "10-28 02:30"]),
        ("TZ=Europe/Oslo 45 2 * * *", "2024-10-27 02:30+", "2024-10-29 00:00", ["10-28 02:45"]),
        ("TZ=Europe/Oslo */30 2 * * *", "2024-10-27 00:00", "2024-10-27 12:00",
         ["10-27 02:00", "10-27 02:30", "10-27 02:00+", "10-27 02:30+"]),
        ("TZ=Europe/Oslo 30 * * * *", "2024-10-27 01:00", "2024-10-27 04:00",
         ["10-27 01:30", "10-27 02:30", "10-27 02:30+", "10-27 03:30"]),
        ("TZ=Europe/Oslo 0 1-4 * * *", "2024-10-27 00:00", "2024-10-27 12:00",
         ["10-27 01:00", "10-27 02:00", "10-27 03:00", "10-27 04:00"]),
        ("TZ=America/New_York 30 1 * * *", "2024-11-02 12:00", "2024-11-04 12:00",
         ["11-03 01:30", "11-04 01:30"]),
        ("TZ=America/New_York 15,45 * * * *", "2024-11-03 00:30", "2024-11-03 02:30",
         ["11-03 00:45", "11-03 01:15", "11-03 01:45", "11-03 01:15+", "11-03 01:45+",
          "11-03 02:15"]),
        # Lord Howe repeats 01:30 to 02:00.
        ("TZ=Australia/Lord_Howe 45 1 * * *", "2024-04-06 12:00", "2024-04-08 12:00",
         ["04-07 01:45", "04-08 01:45"]),
        ("TZ=Australia/Lord_Howe */15 1 * * *", "2024-04-07 00:00", "2024-04-07 12:00",
         ["04-07 01:00", "04-07 01:15", "04-07 01:30", "04-07 01:45", "04-07 01:30+",
          "04-07 01:45+"]),
        ("TZ=Australia/Lord_Howe */10 2 * * *", "2024-04-07 00:00", "2024-04-07 12:00",
         ["04-07 02:00", "04-07 02:10", "04-07 02:20", "04-07 02:30", "04-07 02:40",
          "04-07 02:50"]),
        # Midnight is the end of the repeated hour, and one that is skipped.
        ("TZ=America/Santiago */30 23 * * *", "2024-04-06 12:00", "2024-04-07 12:00",
         ["04-06 23:00", "04-06 23:30", "04-06 23:00+", "04-06 23:30+"]),
        ("TZ=America/Santiago */30 0 8 9 *", "2024-09-07 12:00", "2024-09-08 12:00", []),
        ("TZ=America/Santiago 15 0 * * *", "2024-09-07 12:00", "2024-09-09 12:00",
         ["09-08 01:00", "09-09 00:15"]),
        # A whole day is skipped.
        ("TZ=Pacific/Apia 0 12 * * *", "2011-12-28 13:00", "2012-01-01 00:00",
         ["12-29 12:00", "12-31 00:00", "12-31 12:00"]),
    ],
)  # fmt: skip
def test_clock_changes(spec: str, start: str, end: str, expected: list[str]) -> None:
    zone = spec[3 : spec.index(" ")]
    after, until = local(zone, start, end)
    wanted = local(zone, *(f"{start[:5]}{time}" for time in expected))
    cron = parse(spec)
    assert fires_within(cron, after, until) == wanted
    assert fires_back(cron, after, until) == wanted
    assert [next_fire(cron, after, fire - MICROSECOND) for fire in wanted] == wanted
    assert [previous_fire(cron, after, fire) for fire in wanted] == wanted


def test_previous_in_the_second_pass_sees_all_of_the_first() -> None:
    (at,) = local("Europe/Oslo", "2024-10-27 02:15+")
    cron = parse("TZ=Europe/Oslo 45 2 * * *")
    assert [previous_fire(cron, at, at)] == local("Europe/Oslo", "2024-10-27 02:45")


CHANGES = [
    ("Europe/Oslo", date(2024, 3, 31)),
    ("Europe/Oslo", date(2024, 10, 27)),
    ("America/New_York", date(2024, 3, 10)),
    ("America/New_York", date(2024, 11, 3)),
    ("Australia/Lord_Howe", date(2024, 4, 7)),
    ("Australia/Lord_Howe", date(2024, 10, 6)),
    ("America/Havana", date(2024, 3, 10)),
    ("America/Havana", date(2024, 11, 3)),
    ("America/Santiago", date(2024, 4, 6)),
    ("America/Santiago", date(2024, 9, 8)),
    ("Africa/Casablanca", date(2024, 3, 10)),
    ("Africa/Casablanca", date(2024, 4, 14)),
    ("Antarctica/Troll", date(2024, 3, 31)),
    ("Antarctica/Troll", date(2024, 10, 27)),
    ("Pacific/Apia", date(2011, 12, 30)),
    ("UTC", date(2024, 2, 29)),
]


def oracle(
    zone: str, minutes: set[int], hours: set[int], star: bool, after: datetime, until: datetime
) -> list[datetime]:
    """Minute by minute: every day, with Debian's two rules."""

    def matches(wall: datetime) -> bool:
        return wall.minute in minutes and wall.hour in hours

    clock: list[tuple[datetime, datetime]] = []
    at = after - timedelta(days=3)
    while at <= until:
        clock.append((at, at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)))
        at += timedelta(minutes=1)
    found = set()
    latest = clock[0][1]
    for at, wall in clock[1:]:
        if star:
            if matches(wall):
                found.add(at)
        else:  # whatever the clock reaches or passes for the first time
            while latest < wall:
                latest += timedelta(minutes=1)
                if matches(latest):
                    found.add(at)
    return sorted(at for at in found if after < at <= until)


some_minutes = st.sets(st.sampled_from([0, 1, 14, 15, 29, 30, 31, 45, 59]), min_size=1, max_size=4)
some_hours = st.sets(st.sampled_from([0, 1, 2, 3, 4, 12, 22, 23]), min_size=1, max_size=4)


@few
@given(
    st.sampled_from(CHANGES),
    some_minutes,
    some_hours,
    st.sampled_from(["neither", "minute", "hour", "half hours"]),
    st.integers(-26 * 60, 26 * 60),
)
def test_clock_changes_are_what_walking_by_the_minute_finds(
    change: tuple[str, date], minutes: set[int], hours: set[int], star: str, shift: int
) -> None:
    zone, day = change
    minute_field = ",".join(map(str, sorted(minutes)))
    hour_field = ",".join(map(str, sorted(hours)))
    if star == "minute":
        minute_field, minutes = "*", set(range(60))
    elif star == "half hours":
        minute_field, minutes = "*/30", {0, 30}
    elif star == "hour":
        hour_field, hours = "*", set(range(24))
    cron = parse(f"TZ={zone} {minute_field} {hour_field} * * *")
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=ZoneInfo(zone)).astimezone(UTC)
    after = noon + timedelta(minutes=shift)
    until = after + timedelta(hours=30)
    expected = oracle(zone, minutes, hours, star != "neither", after, until)
    assert fires_within(cron, after, until) == expected
    assert fires_back(cron, after, until) == expected


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("0 0 29 2 *", utc(2023, 3, 1), [2024, 2028, 2032]),
        ("0 0 29 2 *", utc(2096, 2, 29), [2104, 2108]),
        ("0 0 29 2 */7", utc(2024, 1, 1), [2032, 2060, 2088]),  # only when it is a Sunday
        ("0 0 29 2 */7", utc(2088, 3, 1), [2128]),
        ("0 0 * 2 1#5", utc(2024, 3, 1), [2044, 2072]),  # a February of five Mondays
    ],
)
def test_leap_days(text: str, after: datetime, expected: list[int]) -> None:
    got = list(itertools.islice(fires(parse(text), after, after), len(expected)))
    assert got == [utc(year, 2, 29) for year in expected]
    assert fires_back(parse(text), after, got[-1]) == got


def test_last_day_of_february() -> None:
    got = itertools.islice(fires(parse("0 6 L 2 *"), utc(2023, 1, 1), utc(2023, 1, 1)), 2)
    assert list(got) == [utc(2023, 2, 28, 6), utc(2024, 2, 29, 6)]


def test_day_of_month_or_day_of_week_unless_one_has_a_star() -> None:
    start, end = utc(2024, 9, 1), utc(2024, 9, 30)
    either = [at.day for at in fires_within(parse("0 12 13 * FRI"), start, end)]
    assert either == [6, 13, 20, 27]
    both = [at.day for at in fires_within(parse("0 12 */13 * FRI"), start, end)]
    assert both == [27]


@few
@given(crons(), instants)
def test_cron_ignores_the_anchor(cron: Schedule, at: datetime) -> None:
    assert next_fire(cron, utc(1999, 1, 1), at) == next_fire(cron, at, at)
    assert previous_fire(cron, utc(1999, 1, 1), at) == previous_fire(cron, at, at)


# --- 4. The anchor ---------------------------------------------------------------------------


@few
@given(schedules, instants, st.integers(-(2**63), 2**63 - 1))
def test_an_anchor_is_at_most_a_minute_and_an_interval_early(
    schedule: Schedule, created_at: datetime, pgt_id: int
) -> None:
    anchor = spread_anchor(schedule, created_at, pgt_id)
    early = created_at - anchor
    if isinstance(schedule, Every):
        assert timedelta(0) <= early < timedelta(minutes=1)
        following = next_fire(schedule, anchor, anchor)
        assert following is not None
        assert created_at < following
    else:
        assert anchor == created_at
    assert anchor.tzinfo is UTC


@pytest.mark.parametrize("spec", ["1s", "10s", "1m", "1h", "1 mon"])
def test_nodes_made_together_are_spread_evenly(spec: str) -> None:
    created_at, count = utc(2024, 1, 1), 300
    every = parse(spec)
    span = {"1s": SECOND, "10s": 10 * SECOND}.get(spec, MINUTE)
    early = sorted(
        (created_at - spread_anchor(every, created_at, pgt_id)) // MICROSECOND
        for pgt_id in range(1, count + 1)
    )
    gaps = [b - a for a, b in itertools.pairwise([*early, early[0] + span])]
    assert max(gaps) < 3 * span / count
    assert min(gaps) > span / count / 3


# --- 5. What is due --------------------------------------------------------------------------


def run_all(
    schedule: Schedule, anchor: datetime, stored: datetime | None, now: datetime, catch_up: int
) -> tuple[list[Firing], datetime | None]:
    """Fire until nothing is due, as successive ticks do."""
    firings: list[Firing] = []
    while firing := due(schedule, anchor, stored, now, catch_up):
        firings.append(firing)
        stored = firing.following
        assert len(firings) <= max(catch_up, 1)
    return firings, stored


def test_nothing_is_due_before_its_time() -> None:
    every, anchor = parse("1m"), utc(2024, 1, 1)
    fire_at = utc(2024, 1, 1, 0, 1)
    assert due(every, anchor, fire_at, fire_at - MICROSECOND, 1) is None
    assert due(every, anchor, None, fire_at, 1) is None
    assert due(every, anchor, fire_at, fire_at, 1) == Firing(fire_at, 0, utc(2024, 1, 1, 0, 2))


@pytest.mark.parametrize("spec", ["1m", "* * * * *", "TZ=Asia/Kolkata * * * * *"])
@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [
        (-1, [(10, 9)]),
        (0, [(10, 9)]),
        (1, [(10, 9)]),
        (3, [(8, 7), (9, 0), (10, 0)]),
        (9, [(2, 1), *((minute, 0) for minute in range(3, 11))]),
        (10, [(minute, 0) for minute in range(1, 11)]),
        (11, [(minute, 0) for minute in range(1, 11)]),
        (10**9, [(minute, 0) for minute in range(1, 11)]),
    ],
)
def test_the_most_recent_missed_fires_are_caught_up_with(
    spec: str, catch_up: int, expected: list[tuple[int, int]]
) -> None:
    anchor, now = utc(2024, 1, 1), utc(2024, 1, 1, 0, 10, 30)
    firings, stored = run_all(parse(spec), anchor, utc(2024, 1, 1, 0, 1), now, catch_up)
    assert [(firing.fire_at.minute, firing.skipped) for firing in firings] == expected
    assert stored == utc(2024, 1, 1, 0, 11)


@many
@given(
    grids,
    instants,
    instants,
    st.integers(0, 40),
    st.integers(0, 3 * DAY),
    st.integers(-1, 12),
    st.booleans(),
)
def test_due_is_what_a_plain_list_of_missed_fires_gives(
    schedule: Schedule,
    anchor: datetime,
    start: datetime,
    missed: int,
    later: int,
    catch_up: int,
    on_grid: bool,
) -> None:
    stored = next_fire(schedule, anchor, start) if on_grid else start
    assert stored is not None
    grid = list(itertools.islice(fires(schedule, stored, anchor), missed + 1))
    now = min(([stored, *grid])[-2] + timedelta(microseconds=later), grid[-1] - MICROSECOND)
    pending = [stored, *grid[:-1]]
    kept = pending[-max(catch_up, 1) :]

    firings, following = run_all(schedule, anchor, stored, now, catch_up)
    assert [firing.fire_at for firing in firings] == kept
    assert [firing.skipped for firing in firings] == [len(pending) - len(kept)] + [0] * (
        len(kept) - 1
    )
    assert following == grid[-1] > now
    assert all(firing.fire_at.tzinfo is UTC for firing in firings)


def test_skipped_intervals_are_counted_exactly() -> None:
    anchor, now = utc(2014, 1, 1), utc(2024, 1, 1)
    firing = due(Every(0, 0, SECOND), anchor, anchor, now, 1)
    assert firing == Firing(now, (now - anchor) // timedelta(seconds=1), utc(2024, 1, 1, 0, 0, 1))
    firing = due(Every(1, 0, 0), anchor, anchor, now, 5)
    assert firing == Firing(utc(2023, 9, 1), 116, utc(2023, 10, 1))


@pytest.mark.parametrize("spec", ["* * * * *", "TZ=Europe/Oslo * * * * *", "0-59 0-23 * * *"])
@pytest.mark.parametrize("catch_up", [1, 10, 10**9])
def test_ten_years_of_downtime_cost_bounded_work(
    spec: str, catch_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cron = parse(spec)
    steps = 0

    class Counting(cronsim.CronSim):
        def __next__(self) -> datetime:
            nonlocal steps
            steps += 1
            return super().__next__()

    monkeypatch.setattr(subject, "CronSim", Counting)
    then, now = utc(2014, 1, 1), utc(2024, 1, 1)
    firing = due(cron, then, then, now, catch_up)
    kept = min(catch_up, subject.MOST_CRON_STEPS)
    oldest = now - (kept - 1) * timedelta(minutes=1)
    assert firing == Firing(oldest, subject.MOST_CRON_STEPS, oldest + timedelta(minutes=1))
    assert steps <= kept + subject.MOST_CRON_STEPS + 5


def test_skipped_cron_fires_are_exact_up_to_the_bound() -> None:
    now = utc(2024, 1, 1)
    for missed in [998, 999, 1000, 1001, 5000]:
        stored = now - missed * timedelta(minutes=1)
        firing = due(parse("* * * * *"), now, stored, now, 1)
        assert firing is not None
        assert firing.skipped == min(missed, subject.MOST_CRON_STEPS)


def test_a_stored_time_off_the_grid_is_due_itself() -> None:
    anchor, stored = utc(2024, 1, 1), utc(2024, 1, 1, 0, 1, 17)
    for spec in ["1m", "* * * * *"]:
        firing = due(parse(spec), anchor, stored, stored, 1)
        assert firing == Firing(stored, 0, utc(2024, 1, 1, 0, 2))


# --- 6. The tightest of several --------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["1h", "5m", "manual", "calculated", "@hourly"], "5m"),
        (["@hourly", "1h"], "@hourly"),
        (["1 mon", "31 days", "30 days"], "1 mon"),  # from 31 January it is 29 and 31 days
        (["manual", "calculated"], None),
        ([], None),
    ],
)
def test_tightest(specs: list[str], expected: str | None) -> None:
    anchor = utc(2024, 1, 31)
    found = tightest([parse(spec) for spec in specs], anchor, utc(2024, 1, 30))
    assert found == (None if expected is None else parse(expected))


@few
@given(st.lists(schedules, max_size=5), instants, instants)
def test_no_schedule_is_tighter_than_the_tightest(
    several: list[Any], anchor: datetime, now: datetime
) -> None:
    def gap(schedule: Schedule) -> timedelta:
        first, second = itertools.islice(fires(schedule, now, anchor), 2)
        return second - first

    found = tightest(several, anchor, now)
    rivals = [schedule for schedule in several if isinstance(schedule, Every | Cron)]
    assert (found is None) == (not rivals)
    if found is not None:
        assert gap(found) == min(map(gap, rivals))
