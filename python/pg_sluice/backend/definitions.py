"""Defining nodes, with the caller's rights. What is stored goes through the request view."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import errors, query
from ..core import schedule as schedules
from ..core.texts import to_json
from .plpy_types import Plpy, rows, value

if TYPE_CHECKING:
    from collections.abc import Iterator

_PINNED = {
    "search_path": "pg_catalog, pg_temp",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "standard_conforming_strings": "on",
}
"""What `_sluice.invoke` runs under; see there."""
_INVALID_CURSOR_DEFINITION = "42P11"
_DEFAULTS: dict[str, Any] = {
    "name": None,
    "query": None,
    "schedule": "@every 1m",
    "refresh_mode": "auto",
    "initialize": True,
    "priority": 0,
    "lock_timeout": None,
    "refresh_timeout": None,
    "max_lag": None,
}
"""The arguments of create_stream_table(), for what a definition of bulk_create() leaves out."""
_TYPES = {"initialize": (bool, "true or false"), "priority": (int, "a whole number")}
_DEFINITION = 'pg_temp."pg_sluice: definition"'
_DROP_DEFINITION = 'DROP VIEW pg_temp."pg_sluice: definition"'


@dataclass(frozen=True)
class Definition:
    """A query that may define a stream table, as the server understands it."""

    query: str
    """Canonical text, independent of the search_path."""
    sources: list[int]


def create_stream_table(plpy: Plpy, arguments: dict[str, Any]) -> int:
    """See sluice.create_stream_table()."""
    _check_node_options(plpy, arguments, mode=True)
    _require(arguments, "name", "query", "schedule", "refresh_mode", "initialize", "priority")
    with _as_caller(plpy, arguments["session"]):
        table = _new_table(plpy, arguments["name"])
        _define_view(plpy, arguments["query"])
    definition = _read_definition(plpy)
    plpy.execute(
        f"CREATE TABLE {table} AS TABLE {_DEFINITION}"
        f" WITH {'' if arguments['initialize'] else 'NO '}DATA"
    )
    plpy.execute(_DROP_DEFINITION)
    return int(
        _request(
            plpy,
            "create_stream_table",
            {
                **_stored_options(arguments),
                "relid": _existing(plpy, table),
                "query": definition.query,
                "sources": definition.sources,
                "initialize": arguments["initialize"],
                "deferred": arguments.get("deferred", False),
            },
        )
    )


def alter_stream_table(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """See sluice.alter_stream_table()."""
    _check_node_options(plpy, arguments, mode=True)
    _require(arguments, "name")
    with _as_caller(plpy, arguments["session"]):
        relid = _relation(plpy, arguments["name"])
    stored: dict[str, Any] = {
        **_stored_options(arguments),
        "kinds": ["stream_table"],
        "name": arguments["name"],
        "relid": relid,
    }
    if arguments["query"] is not None and relid is not None:
        with _as_caller(plpy, arguments["session"]):
            _define_view(plpy, arguments["query"])
        definition = _read_definition(plpy)
        if _columns(plpy, _existing(plpy, _DEFINITION)) != _columns(plpy, relid):
            raise errors.columns_differ(arguments["name"])
        plpy.execute(_DROP_DEFINITION)
        stored |= {
            "query": definition.query,
            "sources": definition.sources,
        }
    _request(plpy, "alter_stream_table", stored)


def drop_stream_table(plpy: Plpy, arguments: dict[str, Any]) -> None:
    """See sluice.drop_stream_table()."""
    _require(arguments, "name", "cascade")
    with _as_caller(plpy, arguments["session"]):
        relid = _relation(plpy, arguments["name"])
    found = _request(
        plpy,
        "drop_stream_table",
        {
            "kinds": ["stream_table"],
            "name": arguments["name"],
            "relid": relid,
            "cascade": arguments["cascade"],
        },
    )
    for dropped in found:
        statement = value(
            plpy,
            "SELECT pg_catalog.format('DROP TABLE %s %s', $1::oid::regclass,"
            " CASE WHEN $2 THEN 'CASCADE' END)",
            ["bigint", "boolean"],
            [dropped, arguments["cascade"]],
        )
        plpy.execute(statement)


def bulk_create(plpy: Plpy, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """See sluice.bulk_create()."""
    _require(arguments, "definitions")
    text = arguments["definitions"]
    _check_limit(plpy, "definitions are too long", len(text.encode()), "max_bulk_bytes")
    try:
        definitions = json.loads(text)
    except (RecursionError, ValueError):
        # The server reads more than Python does.
        raise errors.invalid_argument(
            "definitions are nested too deeply, or contain too long a number"
        ) from None
    if not isinstance(definitions, list) or not all(isinstance(d, dict) for d in definitions):
        raise errors.invalid_argument("definitions must be an array of objects")
    _check_limit(plpy, "too many definitions", len(definitions), "max_bulk_definitions")
    created = []
    for definition in definitions:
        _check_definition(definition)
        pgt_id = create_stream_table(
            plpy,
            {**_DEFAULTS, **definition, "session": arguments["session"], "deferred": True},
        )
        created.append({"name": definition["name"], "pgt_id": pgt_id})
    _request(plpy, "bulk_create", {"pgt_ids": [entry["pgt_id"] for entry in created]})
    return created


def schedule_refresh(plpy: Plpy, arguments: dict[str, Any]) -> int:
    """See sluice.schedule_refresh()."""
    _check_node_options(plpy, arguments)
    _require(arguments, "name", "schedule", "concurrently", "priority")
    with _as_caller(plpy, arguments["session"]):
        relid = _relation(plpy, arguments["name"])
    if relid is None:
        raise errors.not_relation(arguments["name"], "materialized view")
    kind = value(plpy, "SELECT relkind FROM pg_catalog.pg_class WHERE oid = $1", ["oid"], [relid])
    if kind != "m":
        raise errors.wrong_kind(
            arguments["name"],
            "materialized view",
            "For a table that is kept equal to a query, use sluice.create_stream_table().",
        )
    return int(
        _request(
            plpy,
            "schedule_refresh",
            {
                **_stored_options(arguments),
                "kinds": ["matview"],
                "name": arguments["name"],
                "relid": relid,
                "concurrently": arguments["concurrently"],
                "sources": _sources(plpy, relid),
            },
        )
    )


def schedule(plpy: Plpy, arguments: dict[str, Any]) -> int:
    """See sluice.schedule()."""
    _check_node_options(plpy, arguments)
    _require(arguments, "name", "schedule", "command", "transactional", "catch_up", "priority")
    if not arguments["name"].strip():
        raise errors.invalid_argument("job name must not be empty")
    _check_limit(plpy, "job name is too long", len(arguments["name"].encode()), "max_query_bytes")
    _check_limit(plpy, "command is too long", len(arguments["command"].encode()), "max_query_bytes")
    if not arguments["command"].strip():
        raise errors.invalid_argument("command must not be empty")
    if not 1 <= arguments["catch_up"] <= 1000:
        raise errors.invalid_argument("catch_up must be between 1 and 1000")
    if isinstance(schedules.parse(arguments["schedule"]), schedules.Calculated):
        raise errors.invalid_argument(
            'a job cannot have the schedule "calculated"',
            detail="It follows the nodes that read a relation, and a job is none.",
        )
    return int(
        _request(
            plpy,
            "schedule",
            {
                **_stored_options(arguments),
                **{
                    key: arguments[key]
                    for key in (
                        "name",
                        "session",
                        "command",
                        "transactional",
                        "catch_up",
                        "watermark_group",
                    )
                },
            },
        )
    )


def _check_definition(definition: dict[str, Any]) -> None:
    for key, given in definition.items():
        if key not in _DEFAULTS:
            raise errors.invalid_argument(
                f'unrecognized key "{key}" in a definition',
                hint=f"The keys are {', '.join(_DEFAULTS)}.",
            )
        wanted, called = _TYPES.get(key, (str, "a string"))
        # To Python a truth value is a number.
        if given is not None and type(given) is not wanted:
            raise errors.invalid_argument(f'"{key}" in a definition must be {called}')


def _require(arguments: dict[str, Any], *names: str) -> None:
    for name in names:
        if arguments[name] is None:
            raise errors.null_argument(name)


def _check_node_options(plpy: Plpy, arguments: dict[str, Any], *, mode: bool = False) -> None:
    """What every node can be given, checked before any work."""
    if arguments["schedule"] is not None:
        schedules.parse(arguments["schedule"])
    if mode and arguments["refresh_mode"] not in (None, "auto", "full"):
        raise errors.invalid_argument(
            f'unrecognized refresh mode "{arguments["refresh_mode"]}"',
            hint="The modes are auto and full.",
        )
    if arguments["priority"] is not None and not -100 <= arguments["priority"] <= 100:
        raise errors.invalid_argument("priority must be between -100 and 100")
    for name in ("lock_timeout", "refresh_timeout"):
        if arguments[name] is not None:
            rows(
                plpy,
                "SELECT _sluice.check_setting($1, $2, true)",
                ["text", "text"],
                [name, arguments[name]],
            )
    max_lag = arguments.get("max_lag")
    if max_lag is not None and not value(
        plpy, "SELECT $1::interval OPERATOR(pg_catalog.>) '0'::interval", ["text"], [max_lag]
    ):
        raise errors.invalid_argument("max_lag must be positive")


def _stored_options(arguments: dict[str, Any]) -> dict[str, Any]:
    names = ("schedule", "refresh_mode", "priority", "lock_timeout", "refresh_timeout", "max_lag")
    return {name: arguments[name] for name in names if name in arguments}


def _check_limit(plpy: Plpy, what: str, size: int, setting: str) -> None:
    maximum = int(value(plpy, "SELECT _sluice.setting($1)", ["text"], [setting]))
    if size > maximum:
        raise errors.limit_exceeded(what, size, maximum, setting)


def _request(plpy: Plpy, command: str, arguments: dict[str, Any]) -> Any:
    result = value(
        plpy,
        "INSERT INTO _sluice.request (command, arguments) VALUES ($1, $2) RETURNING result",
        ["text", "jsonb"],
        [command, to_json(arguments)],
    )
    return None if result is None else json.loads(result)


@contextmanager
def _as_caller(plpy: Plpy, session: dict[str, str]) -> Iterator[None]:
    """The caller's settings, for what is to be understood as the caller wrote it."""
    _configure(plpy, session)
    yield
    # After an error the statement is undone as a whole, and these settings with it.
    _configure(plpy, _PINNED)


def _configure(plpy: Plpy, settings: dict[str, str]) -> None:
    for name, setting in settings.items():
        rows(
            plpy,
            "SELECT pg_catalog.set_config($1, $2, true)",
            ["text", "text"],
            [name, setting],
        )


def _relation(plpy: Plpy, name: str) -> int | None:
    found = value(plpy, "SELECT _sluice.relation_of($1)", ["text"], [name])
    return None if found is None else int(found)


def _existing(plpy: Plpy, quoted: str) -> int:
    return int(value(plpy, "SELECT $1::regclass::oid::bigint", ["text"], [quoted]))


def _new_table(plpy: Plpy, name: str) -> str:
    """The quoted, qualified name of a table to create, as CREATE TABLE would take it."""
    parts = value(plpy, "SELECT pg_catalog.parse_ident($1)", ["text"], [name])
    if len(parts) > 2:
        raise errors.invalid_argument(f'improper relation name (too many dotted names): "{name}"')
    if len(parts) == 1:
        schema = value(plpy, "SELECT pg_catalog.current_schema()::text")
        if schema is None:
            raise errors.no_schema()
        parts = [schema, *parts]
    if parts[0].startswith("pg_temp"):
        raise errors.unsupported_query("stream table must not be temporary")
    return ".".join(
        value(plpy, "SELECT pg_catalog.quote_ident($1)", ["text"], [part]) for part in parts
    )


def _define_view(plpy: Plpy, text: str) -> None:
    """Makes the temporary view of a query; errors speak of the user's own text."""
    _check_limit(plpy, "query is too long", len(text.encode()), "max_query_bytes")
    statement = text.strip().rstrip(";").rstrip()
    if not statement:
        raise errors.invalid_argument("query must not be empty")
    try:
        # A cursor takes one statement that gives rows and does not start it.
        plpy.cursor(statement).close()
    except plpy.SPIError as error:
        if getattr(error, "sqlstate", None) != _INVALID_CURSOR_DEFINITION:
            raise
        raise errors.unsupported_query(
            "query of a stream table must be a single SELECT",
            hint="Other statements can be scheduled with sluice.schedule().",
        ) from None
    # The caller's own text, run with the caller's rights; the cursor took it as one SELECT.
    plpy.execute(f"CREATE TEMPORARY VIEW {_DEFINITION} AS {statement}")


def _read_definition(plpy: Plpy) -> Definition:
    """What the server made of the view, checked for what a stream table can't have."""
    view = _existing(plpy, _DEFINITION)
    trees = [
        row["tree"]
        for row in rows(
            plpy,
            "SELECT r.ev_action::text AS tree FROM pg_catalog.pg_rewrite AS r"
            " WHERE r.ev_class = $1",
            ["oid"],
            [view],
        )
    ]
    size = query.tree_size(trees[0])
    _check_limit(plpy, "query is too large", size.nodes, "max_parse_nodes")
    _check_limit(plpy, "query is nested too deeply", size.depth, "max_parse_depth")
    if any(":rowMarks (" in tree for tree in trees):
        raise errors.unsupported_query("query of a stream table must not lock rows")
    sources = _sources(plpy, view)
    _check_limit(plpy, "query reads too many relations", len(sources), "max_query_sources")
    _refuse_temporary(plpy, [view, *sources])
    _refuse_volatile(plpy, [view, *sources])
    if not _columns(plpy, view):
        raise errors.unsupported_query("stream table must have at least one column")
    _configure(plpy, {"search_path": ""})
    canonical = value(plpy, "SELECT pg_catalog.pg_get_viewdef($1)", ["oid"], [view])
    _configure(plpy, _PINNED)
    return Definition(str(canonical).strip().rstrip(";"), sources)


def _sources(plpy: Plpy, relation: int) -> list[int]:
    """The relations that a view or materialized view reads, directly or through views."""
    return [
        row["relid"]
        for row in rows(
            plpy,
            """
            WITH RECURSIVE reads (relid) AS (
                SELECT $1::oid
                UNION
                SELECT d.refobjid
                FROM reads AS u
                JOIN pg_catalog.pg_class AS c ON c.oid = u.relid AND (c.relkind = 'v' OR c.oid = $1)
                JOIN pg_catalog.pg_rewrite AS r ON r.ev_class = c.oid
                JOIN pg_catalog.pg_depend AS d
                    ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = r.oid
                    AND d.refclassid = 'pg_catalog.pg_class'::regclass
            )
            SELECT DISTINCT u.relid::bigint AS relid FROM reads AS u WHERE u.relid <> $1 ORDER BY 1
            """,
            ["oid"],
            [relation],
        )
    ]


def _refuse_temporary(plpy: Plpy, relations: list[int]) -> None:
    """Nothing that ends with the session: relations, functions, types."""
    temporary = rows(
        plpy,
        """
        SELECT DISTINCT pg_catalog.pg_describe_object(d.refclassid, d.refobjid, 0) AS name
        FROM pg_catalog.pg_rewrite AS r
        JOIN pg_catalog.pg_depend AS d
            ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = r.oid
            AND d.refobjid <> r.ev_class
        LEFT JOIN pg_catalog.pg_class AS c
            ON d.refclassid = 'pg_catalog.pg_class'::regclass AND c.oid = d.refobjid
        LEFT JOIN pg_catalog.pg_proc AS p
            ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND p.oid = d.refobjid
        LEFT JOIN pg_catalog.pg_type AS t
            ON d.refclassid = 'pg_catalog.pg_type'::regclass AND t.oid = d.refobjid
        WHERE r.ev_class = ANY ($1::oid[])
            AND COALESCE(c.relnamespace, p.pronamespace, t.typnamespace)
                = pg_catalog.pg_my_temp_schema()
        ORDER BY 1
        """,
        ["bigint[]"],
        [relations],
    )
    if temporary:
        raise errors.unsupported_query(
            "query of a stream table must not use temporary objects",
            detail=f"It uses {', '.join(row['name'] for row in temporary)}.",
        )


def _refuse_volatile(plpy: Plpy, relations: list[int]) -> None:
    """Built-in functions are in no dependency, so they are read off the parsed queries."""
    found = rows(
        plpy,
        r"""
        SELECT DISTINCT p.oid::regprocedure::text AS name
        FROM pg_catalog.pg_rewrite AS r
        JOIN pg_catalog.pg_class AS c ON c.oid = r.ev_class AND c.relkind = 'v'
        CROSS JOIN LATERAL pg_catalog.regexp_matches(
            r.ev_action::text, ':(?:funcid|opfuncid|aggfnoid|winfnoid) (\d+)', 'g'
        ) AS m
        JOIN pg_catalog.pg_proc AS p ON p.oid = m[1]::oid
        WHERE r.ev_class = ANY ($1::oid[]) AND p.provolatile = 'v'
        UNION
        SELECT 'TABLESAMPLE'
        FROM pg_catalog.pg_rewrite AS r
        JOIN pg_catalog.pg_class AS c ON c.oid = r.ev_class AND c.relkind = 'v'
        WHERE r.ev_class = ANY ($1::oid[]) AND r.ev_action::text LIKE '%:tablesample {%'
        ORDER BY 1
        """,
        ["bigint[]"],
        [relations],
    )
    if found:
        raise errors.volatile_query([row["name"] for row in found])


def _columns(plpy: Plpy, relation: int | None) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for row in rows(
            plpy,
            "SELECT a.attname, a.atttypid, a.atttypmod, a.attcollation"
            " FROM pg_catalog.pg_attribute AS a"
            " WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            ["oid"],
            [relation],
        )
    ]
