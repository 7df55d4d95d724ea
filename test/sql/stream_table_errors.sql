-- create_stream_table(): what it refuses, how it says so, and that nothing is left behind.
\ir setup.psql
SELECT plan(41);

CREATE TABLE src (id integer, grp text);
INSERT INTO src VALUES (1, 'a'), (2, 'b');
CREATE TABLE more (id integer);
CREATE VIEW hidden_chance AS SELECT id, random() AS r FROM src;
CREATE VIEW over_hidden_chance AS SELECT id FROM hidden_chance WHERE r > 2;
CREATE FUNCTION dice(integer, integer) RETURNS boolean LANGUAGE sql VOLATILE AS 'SELECT random() * $1 > $2';
CREATE OPERATOR ?? (LEFTARG = integer, RIGHTARG = integer, FUNCTION = dice);
CREATE TEMP TABLE scratch (a integer);
CREATE FUNCTION pg_temp.twice(integer) RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 2 * $1';
CREATE ROLE sluice_test_caller;
GRANT EXECUTE ON FUNCTION sluice.create_stream_table TO sluice_test_caller;
CREATE TEMP TABLE before AS SELECT pg_temp.footprint() AS footprint;

-- What the server itself says of the query
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT * FROM nowhere')$$,
    '42P01', 'relation "nowhere" does not exist', 'an unknown relation'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT nope FROM src')$$,
    '42703', 'column "nope" does not exist', 'an unknown column'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELEC 1')$$,
    '42601', 'syntax error at or near "SELEC"', 'a syntax error'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id, $1 AS a FROM src')$$,
    '42P02', 'there is no parameter $1', 'a parameter'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id, id FROM src')$$,
    '42701', 'column "id" specified more than once', 'two columns of one name'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT 1 / 0 AS a')$$,
    '22012', 'division by zero', 'a query that fails when it runs'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('src', 'SELECT 1 AS a')$$,
    '42P07', 'relation "src" already exists', 'a name that is taken'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('noschema.t', 'SELECT 1 AS a')$$,
    '3F000', 'schema "noschema" does not exist', 'an unknown schema'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('a.b.c', 'SELECT 1 AS a')$$,
    '22023', 'improper relation name (too many dotted names): "a.b.c"', 'too many dots'
);

-- What is no query
SELECT ok(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a; SELECT 2 AS b')$$) !~ 'cursor|plan',
    'several statements are refused in terms of a query'
);
SELECT ok(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a; DROP TABLE src')$$) IS NOT NULL,
    'a second statement is refused'
);
SELECT ok(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'DELETE FROM src')$$) !~ 'cursor|plan',
    'DELETE is refused in terms of a query'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'WITH x AS (DELETE FROM src RETURNING id) SELECT * FROM x')$$,
    '0A000', NULL, 'a WITH that changes data'
);
SELECT ok(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a INTO taken')$$) !~ 'cursor|plan',
    'SELECT INTO is refused in terms of a query'
);
SELECT ok(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', '')$$) !~ 'cursor|plan',
    'an empty query is refused in terms of a query'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT FROM src')$$,
    '0A000', 'stream table must have at least one column', 'no column'
);

-- What can't be kept fresh
SELECT is(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT random() AS r, id FROM src')$$),
    E'0A000: query of a stream table must not be volatile\n'
    'DETAIL: It uses random().\n'
    'HINT: Compute such a value when the row is written to the source, or use a job.',
    'a volatile function, by name, with a way out'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT id FROM over_hidden_chance')$$),
    E'0A000: query of a stream table must not be volatile\n'
    'DETAIL: It uses random().\n'
    'HINT: Compute such a value when the row is written to the source, or use a job.',
    'a volatile function in a view under a view'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT id FROM src WHERE id ?? 1')$$),
    E'0A000: query of a stream table must not be volatile\n'
    'DETAIL: It uses public.dice(integer,integer).\n'
    'HINT: Compute such a value when the row is written to the source, or use a job.',
    'a volatile operator'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id FROM src WHERE id = ANY (ARRAY(SELECT (random() * 9)::integer))')$$,
    '0A000', 'query of a stream table must not be volatile', 'a volatile function in a sub-select'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id FROM src ORDER BY random() LIMIT 1')$$,
    '0A000', 'query of a stream table must not be volatile', 'a volatile ORDER BY'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id FROM src TABLESAMPLE BERNOULLI (50)')$$,
    '0A000', 'query of a stream table must not be volatile', 'TABLESAMPLE'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id FROM src FOR UPDATE')$$,
    '0A000', 'query of a stream table must not lock rows', 'FOR UPDATE'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('locking1', 'SELECT * FROM (SELECT id FROM src FOR SHARE) AS s')$$,
    '0A000', 'query of a stream table must not lock rows', 'FOR SHARE in a sub-select'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('locking2', 'SELECT id FROM src WHERE id IN (SELECT 1) FOR UPDATE')$$,
    '0A000', 'query of a stream table must not lock rows', 'FOR UPDATE beside a sub-select'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT a FROM scratch')$$,
    '0A000', 'query of a stream table must not use temporary objects', 'a temporary source'
);
SELECT matches(
    pg_temp.error_of($$SELECT sluice.create_stream_table('temporary', 'SELECT pg_temp.twice(id) AS a FROM src')$$),
    '^0A000: query of a stream table must not use temporary objects\nDETAIL: It uses function .*twice\(integer\)\.$',
    'a temporary function, which is gone when the session ends'
);
SELECT isnt(
    pg_temp.error_of($$SELECT sluice.create_stream_table('pg_temp.t', 'SELECT id FROM src')$$),
    NULL, 'a temporary stream table'
);

-- Arguments
SELECT is(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a', 'never')$$),
    E'22023: invalid schedule "never"\n'
    'DETAIL: It is neither an interval, nor a cron expression, nor a known word.\n'
    'HINT: Accepted are a duration such as ''30s'', ''5m'' or ''@every 1h30m'', an interval such as ''10 seconds'' or '
    '''1 day'', five cron fields such as ''0 3 * * *'', optionally after a time zone as in ''TZ=Europe/Oslo 0 3 * * *'', '
    '''@hourly'', ''@daily'', ''@weekly'', ''@monthly'', ''@yearly'', ''calculated'', and ''manual''.',
    'a schedule that is none'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a', refresh_mode => 'fast')$$),
    E'22023: unrecognized refresh mode "fast"\nHINT: The modes are auto and full.', 'a refresh mode that is none'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a', priority => 101)$$,
    '22023', 'priority must be between -100 and 100', 'a priority that is too high'
);
SELECT results_eq(
    $$SELECT pg_temp.error_of(format('SELECT sluice.create_stream_table(name => %L, query => %L, schedule => %L, refresh_mode => %L, initialize => %L, priority => %L)',
        NULLIF('t', a), NULLIF('SELECT 1 AS a', CASE a WHEN 'query' THEN 'SELECT 1 AS a' END), NULLIF('5m', CASE a WHEN 'schedule' THEN '5m' END),
        NULLIF('full', CASE a WHEN 'refresh_mode' THEN 'full' END), NULLIF(true, a = 'initialize'), NULLIF(0, CASE a WHEN 'priority' THEN 0 END)))
      FROM unnest(ARRAY['t', 'query', 'schedule', 'refresh_mode', 'initialize', 'priority']) AS a$$,
    $$VALUES ('22004: name must not be null'), ('22004: query must not be null'), ('22004: schedule must not be null'),
        ('22004: refresh_mode must not be null'), ('22004: initialize must not be null'), ('22004: priority must not be null')$$,
    'NULL for what is required'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a', refresh_timeout => '25 h')$$,
    '22023', '25:00:00 is outside the valid range for setting "refresh_timeout" (1 ms .. 24 h)', 'a timeout beyond its bounds'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a', max_lag => '0')$$, '22023', 'max_lag must be positive', 'a lag that nothing has'
);
SELECT throws_ok(
    $$SELECT * FROM sluice.bulk_create('[{"name": "t", "query": "SELECT 1 AS a", "max_lag": "soon"}]')$$,
    '22007', 'invalid input syntax for type interval: "soon"', 'no interval'
);

-- Limits
SELECT sluice.configure('max_query_bytes', '1 kB') \g /dev/null
SELECT is(
    pg_temp.error_of(format('SELECT sluice.create_stream_table(''t'', %L)', 'SELEC 1 -- ' || repeat('x', 1100))),
    E'54000: query is too long\nDETAIL: It has 1111, and max_query_bytes is 1024.\n'
    'HINT: The setting can be raised with sluice.configure(''max_query_bytes'', …).',
    'too many bytes, seen before the query is parsed'
);
SELECT sluice.configure('max_query_bytes', NULL) \g /dev/null
SELECT sluice.configure('max_query_sources', '1') \g /dev/null
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT a.id FROM src AS a JOIN more AS b USING (id)')$$,
    '54000', 'query reads too many relations', 'too many sources'
);
SELECT sluice.configure('max_query_sources', NULL) \g /dev/null
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT ' || repeat('(1 + ', 70) || 'id' || repeat(')', 70) || ' AS a FROM src')$$,
    '54000', 'query is nested too deeply', 'too deep'
);

-- Rights
SET LOCAL ROLE sluice_test_caller;
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id FROM src')$$,
    '42501', 'permission denied for table src', 'a source that the caller may not read'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('public.t', 'SELECT 1 AS a')$$,
    '42501', 'permission denied for schema public', 'a schema that the caller may not create in'
);
RESET ROLE;

SELECT is(pg_temp.footprint(), (SELECT footprint FROM before), 'after all these errors nothing is left');
\ir finish.psql
