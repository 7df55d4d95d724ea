-- schedule_refresh(): existing materialized views on a schedule.
\ir setup.psql
SELECT plan(28);

CREATE TABLE src (id integer, grp text);
INSERT INTO src VALUES (1, 'a'), (2, 'b');
CREATE MATERIALIZED VIEW mv AS SELECT id FROM src;
CREATE UNIQUE INDEX ON mv (id);
CREATE MATERIALIZED VIEW empty AS SELECT id FROM src WITH NO DATA;
CREATE VIEW plain AS SELECT id FROM src;
CREATE FUNCTION pg_temp.fail_text(_call text) RETURNS text LANGUAGE sql AS 'SELECT pg_temp.error_of(''SELECT sluice.schedule_refresh('' || _call || '')'')';

-- Scheduling
SELECT sluice.schedule_refresh('mv', '@every 1h') AS mv \gset
SELECT results_eq(
    'SELECT pgt_id, name::regclass, kind, schedule, refresh_mode, status, consecutive_errors FROM sluice.nodes',
    format($$VALUES (%s::bigint, 'mv'::regclass, 'matview', '@every 1h', 'concurrently', 'active', 0)$$, :mv),
    'a materialized view is a node'
);
SELECT ok(
    (SELECT next_fire_at > clock_timestamp() AND next_fire_at <= clock_timestamp() + interval '1 h' FROM sluice.nodes), 'on its grid'
);
SELECT is((SELECT string_agg(relid::text, ',') FROM _sluice.dependency WHERE pgt_id = :mv), 'src', 'with what it reads');
SELECT is(
    sluice.schedule_refresh('mv', 'manual', "concurrently" => false, priority => 3, lock_timeout => '1 s', refresh_timeout => '2 s', max_lag => '1 d'),
    :mv::bigint, 'called again it is the same node'
);
SELECT results_eq(
    'SELECT schedule, "concurrently", priority, lock_timeout, refresh_timeout, max_lag, next_fire_at FROM _sluice.node',
    $$VALUES ('manual', false, 3, interval '1 s', interval '2 s', interval '1 d', NULL::timestamptz)$$,
    'with new properties'
);
SELECT is((SELECT refresh_mode FROM sluice.nodes), 'full', 'which the view shows');
SELECT is((SELECT count(*) FROM _sluice.dependency WHERE pgt_id = :mv), 1::bigint, 'and the same dependencies');
SELECT sluice.schedule_refresh('empty', 'manual') AS empty \gset
SELECT is((SELECT status FROM sluice.nodes WHERE pgt_id = :empty), 'needs_init', 'one without contents waits for its first run');
SELECT is(
    (SELECT outcome FROM _sluice.perform(md5('1')::uuid, :empty, '2024-01-01', 1, NULL, NULL)), 'succeeded', 'which fills it'
);
SELECT results_eq(
    format('SELECT status, (SELECT count(*) FROM empty) FROM sluice.nodes WHERE pgt_id = %s', :empty), $$VALUES ('active', 2::bigint)$$, 'and then it is active'
);
CREATE SCHEMA "Odd Schema";
CREATE MATERIALIZED VIEW "Odd Schema"."My View" AS SELECT 1 AS a;
SELECT lives_ok($$SELECT sluice.schedule_refresh('"Odd Schema"."My View"', 'manual')$$, 'a quoted, qualified name');
SELECT is(
    (SELECT outcome FROM _sluice.node AS n, _sluice.perform(md5('2')::uuid, n.pgt_id, '2024-01-01', 1, NULL, NULL)
        WHERE n.relid = '"Odd Schema"."My View"'::regclass), 'succeeded', 'can be refreshed'
);

-- Refused
SELECT is(
    pg_temp.fail_text($$'src', '5m'$$),
    E'42809: "src" is not a materialized view\nHINT: For a table that is kept equal to a query, use sluice.create_stream_table().',
    'a table'
);
SELECT is(
    pg_temp.fail_text($$'plain', '5m'$$),
    E'42809: "plain" is not a materialized view\nHINT: For a table that is kept equal to a query, use sluice.create_stream_table().',
    'a view'
);
SELECT is(pg_temp.fail_text($$'nowhere', '5m'$$), '42P01: materialized view "nowhere" does not exist', 'an unknown one');
SELECT is(split_part(pg_temp.fail_text($$'mv', 'soon'$$), E'\n', 1), '22023: invalid schedule "soon"', 'a schedule that is none');
SELECT is(pg_temp.fail_text($$NULL, '5m'$$), '22004: name must not be null', 'NULL for the name');
SELECT is(pg_temp.fail_text($$'mv', NULL$$), '22004: schedule must not be null', 'NULL for the schedule');
SELECT is(pg_temp.fail_text($$'mv', '5m', priority => -101$$), '22023: priority must be between -100 and 100', 'a priority out of bounds');
SELECT is(
    pg_temp.fail_text($$'mv', '5m', lock_timeout => '0'$$),
    '22023: 00:00:00 is outside the valid range for setting "lock_timeout" (1 ms .. 10 min)', 'a timeout out of bounds'
);
SELECT is((SELECT schedule FROM sluice.nodes WHERE pgt_id = :mv), 'manual', 'after all this the schedule is as before');

-- The end
SELECT ok(sluice.unschedule('mv'), 'unschedule() ends it');
SELECT results_eq(
    $$SELECT (SELECT count(*) FROM sluice.nodes WHERE kind = 'matview' AND name LIKE '%mv'), to_regclass('mv') IS NOT NULL$$,
    'VALUES (0::bigint, true)', 'and leaves the materialized view'
);
SELECT ok(NOT sluice.unschedule('mv'), 'again: there is none');
SELECT sluice.schedule_refresh('mv', 'manual') AS mv \gset
DROP MATERIALIZED VIEW mv;
SELECT is_empty(format('SELECT 1 FROM _sluice.node WHERE pgt_id = %s', :mv), 'DROP MATERIALIZED VIEW takes the node along');
CREATE MATERIALIZED VIEW mv AS SELECT grp FROM src;
SELECT sluice.schedule_refresh('mv', 'manual') AS mv \gset
SET LOCAL client_min_messages = error;
ALTER TABLE src DROP COLUMN grp CASCADE;
SELECT is_empty(format('SELECT 1 FROM _sluice.node WHERE pgt_id = %s', :mv), 'so does ALTER TABLE … DROP COLUMN … CASCADE');
CREATE FUNCTION same(integer, integer) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1 = $2';
CREATE OPERATOR === (LEFTARG = integer, RIGHTARG = integer, FUNCTION = same);
CREATE MATERIALIZED VIEW mv AS SELECT id FROM src WHERE id === 1;
SELECT sluice.schedule_refresh('mv', 'manual') AS mv \gset
DROP OPERATOR === (integer, integer) CASCADE;
SELECT is_empty(format('SELECT 1 FROM _sluice.node WHERE pgt_id = %s', :mv), 'and whatever else drops it');
SELECT results_eq(
    'SELECT n.relid::oid FROM _sluice.node AS n', 'SELECT c.oid FROM _sluice.node AS n JOIN pg_class AS c ON c.oid = n.relid',
    'so no node is without its relation'
);
\ir finish.psql
