-- create_stream_table(): the table that is made, its names, and what of the session goes into it.
\ir setup.psql
SELECT plan(35);

CREATE SCHEMA shop;
CREATE DOMAIN shop.amount AS numeric(12, 2) CHECK (VALUE >= 0);
CREATE TYPE shop.mood AS ENUM ('sad', 'glad');
CREATE TABLE shop.orders (
    id bigint,
    price numeric(10, 2),
    total shop.amount,
    code varchar(20) COLLATE "C",
    letter char(3),
    placed timestamptz(3),
    tags text[],
    mood shop.mood,
    doc json,
    "Größe" integer
);
INSERT INTO shop.orders (id, price, total, code, "Größe") VALUES (1, 1.50, 2, 'b', 7), (2, 2.50, 3, 'a', 8);

-- What is made
SELECT ok(
    (SELECT sluice.create_stream_table('copy', 'SELECT * FROM shop.orders') > 0),
    'it returns a pgt_id'
);
SELECT is(
    (SELECT string_agg(concat_ws(' ', quote_ident(a.attname), format_type(a.atttypid, a.atttypmod), c.collname), E'\n' ORDER BY a.attnum)
        FROM pg_attribute AS a
        LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
        WHERE a.attrelid = 'copy'::regclass AND a.attnum > 0),
    concat_ws(E'\n',
        'id bigint', 'price numeric(10,2)', 'total shop.amount', 'code character varying(20) C',
        'letter character(3) default', 'placed timestamp(3) with time zone', 'tags text[] default',
        'mood shop.mood', 'doc json', '"Größe" integer'
    ),
    'the columns are exactly those of the query, with types, modifiers, collations and order'
);
SELECT results_eq(
    $$SELECT n.pgt_id, n.name::regclass, n.kind, n.schedule, n.refresh_mode, n.status, n.consecutive_errors, n.last_outcome
      FROM sluice.nodes n$$,
    $$SELECT min(pgt_id), 'copy'::regclass, 'stream_table', '@every 1m', 'auto', 'active', 0, NULL FROM sluice.nodes$$,
    'sluice.nodes shows it with the defaults'
);
SELECT ok(
    (SELECT n.next_fire_at > clock_timestamp() AND n.next_fire_at <= clock_timestamp() + interval '1 min' FROM sluice.nodes n),
    'its next fire is within one interval'
);
SELECT results_eq(
    'SELECT id, price, code::text COLLATE "default", "Größe" FROM copy ORDER BY id',
    $$VALUES (1::bigint, 1.50, 'b', 7), (2, 2.50, 'a', 8)$$,
    'it is filled'
);
SELECT is(
    (SELECT relkind::text || relpersistence::text FROM pg_class WHERE oid = 'copy'::regclass), 'rp',
    'it is an ordinary, permanent table'
);
SELECT is(
    (SELECT count(*) FROM pg_class WHERE relname = 'sluice_definition'), 0::bigint,
    'nothing temporary stays'
);
SELECT is(current_setting('search_path'), '"$user", public', 'the search_path is as before');

-- Names
SELECT lives_ok(
    $$SELECT sluice.create_stream_table('"Daily Sales"', 'SELECT id AS "Order Id", code AS "select" FROM shop.orders')$$,
    'a quoted name with capitals and a blank'
);
SELECT has_table('public', 'Daily Sales', 'it has that very name');
SELECT results_eq(
    $$SELECT name FROM sluice.nodes WHERE pgt_id = (SELECT max(pgt_id) FROM sluice.nodes)$$,
    $$VALUES ('public."Daily Sales"')$$,
    'sluice.nodes names it as history and alerts do: qualified and quoted, whatever the reader''s search_path'
);
SELECT sluice.create_stream_table('MixedCase', 'SELECT 1 AS a') \g /dev/null
SELECT has_table('public', 'mixedcase', 'an unquoted name folds to lower case, as in SQL');
SELECT sluice.create_stream_table('shop."Umsätze.2024"', 'SELECT "Größe" AS "Größe" FROM shop.orders') \g /dev/null
SELECT has_table('shop', 'Umsätze.2024', 'a schema-qualified Unicode name with a dot');
SELECT sluice.create_stream_table('"say ""hi"""', 'SELECT id AS "a""b", code AS "c''d" FROM shop.orders') \g /dev/null
SELECT has_table('public', 'say "hi"', 'a name with quotes in it');
UPDATE shop.orders SET code = 'z', "Größe" = 9 WHERE id = 1;
SELECT is(sluice.refresh_stream_table('"say ""hi"""'), 'succeeded', 'and such a table refreshes');
SELECT is(sluice.refresh_stream_table('shop."Umsätze.2024"'), 'succeeded', 'and one with Unicode names');
SELECT sluice.create_stream_table(
    'names', 'SELECT id AS c2, id + 1 AS key, id + 2 AS number, id + 3 AS tid, id + 4 AS c1, id + 5 AS t, id + 6 AS q FROM shop.orders'
) \g /dev/null
UPDATE shop.orders SET id = 10 WHERE id = 1;
SELECT sluice.refresh_stream_table('names') \g /dev/null
SELECT results_eq(
    'SELECT * FROM names ORDER BY c2',
    'VALUES (2::bigint, 3::bigint, 4::bigint, 5::bigint, 6::bigint, 7::bigint, 8::bigint), (10, 11, 12, 13, 14, 15, 16)',
    'columns may have the names that the refresh uses itself'
);

-- The search_path of the call
CREATE TABLE public.things (a integer);
CREATE TABLE shop.things (a integer);
INSERT INTO public.things VALUES (1);
INSERT INTO shop.things VALUES (2);
SET LOCAL search_path = shop, public;
SELECT sluice.create_stream_table('latest', 'SELECT a FROM things') \g /dev/null
SET LOCAL search_path = "$user", public;
SELECT results_eq('SELECT a FROM shop.latest', 'VALUES (2)', 'table and sources resolve in the caller''s search_path');
INSERT INTO shop.things VALUES (3);
SELECT sluice.refresh_stream_table('shop.latest') \g /dev/null
SELECT results_eq('SELECT a FROM shop.latest ORDER BY a', 'VALUES (2), (3)', 'and mean the same under another one later');

-- What the text of a query may look like
SELECT lives_ok($$SELECT sluice.create_stream_table('q1', E'  SELECT 1 AS a ;\n')$$, 'a closing semicolon');
SELECT lives_ok($$SELECT sluice.create_stream_table('q2', E'-- why\nSELECT 1 AS a -- so')$$, 'comments before and after');
SELECT lives_ok($$SELECT sluice.create_stream_table('q3', 'WITH x AS (SELECT 1 AS a) SELECT a FROM x UNION ALL SELECT 2')$$, 'WITH and UNION');
SELECT lives_ok($$SELECT sluice.create_stream_table('q4', 'VALUES (1, ''a''), (2, ''b'')')$$, 'VALUES');
SELECT lives_ok($$SELECT sluice.create_stream_table('q5', 'TABLE shop.orders')$$, 'TABLE');
SELECT lives_ok(
    $$SELECT sluice.create_stream_table('q6', 'SELECT id AS ":funcid 1598 {{{{", ''random()'' AS text FROM shop.orders')$$,
    'text that looks like a volatile call is none'
);

-- A definition means the same whatever the settings of the session that refreshes
CREATE TABLE days (d date, span interval);
INSERT INTO days VALUES ('2024-01-15', '1 day'), ('2024-02-15', '-1 day');
SET LOCAL datestyle = 'SQL, DMY';
SELECT sluice.create_stream_table('since', $$SELECT d FROM days WHERE d >= DATE '01/02/2024'$$) \g /dev/null
SET LOCAL datestyle = 'ISO, MDY';
SELECT sluice.refresh_stream_table('since') \g /dev/null
SELECT results_eq('SELECT d FROM since', $$VALUES (DATE '2024-02-15')$$, 'a date constant keeps its value under another DateStyle');
SET LOCAL intervalstyle = 'sql_standard';
SELECT sluice.create_stream_table('spans', $$SELECT span FROM days WHERE span > INTERVAL '-1 1:00:00'$$) \g /dev/null
SET LOCAL intervalstyle = 'postgres';
SELECT is(sluice.refresh_stream_table('spans'), 'no_change', 'an interval constant keeps its value under another IntervalStyle');
SET LOCAL standard_conforming_strings = off;
SET LOCAL escape_string_warning = off;
SELECT sluice.create_stream_table('strings', 'SELECT E''a\\\\b''::text AS x') \g /dev/null
SET LOCAL standard_conforming_strings = on;
SELECT is(sluice.refresh_stream_table('strings'), 'no_change', 'a string constant keeps its value under another standard_conforming_strings');
SET LOCAL standard_conforming_strings = off;
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('chance', 'SELECT random() AS r')$$,
    '0A000', 'query of a stream table must not be volatile',
    'standard_conforming_strings = off does not hide a volatile function'
);
SET LOCAL standard_conforming_strings = on;
SET LOCAL escape_string_warning = on;

-- initialize => false
SELECT sluice.create_stream_table('later', 'SELECT id FROM shop.orders', schedule => 'manual', initialize => false) \g /dev/null
SELECT results_eq(
    $$SELECT status, next_fire_at, lag FROM sluice.nodes WHERE name::regclass = 'later'::regclass$$,
    $$VALUES ('needs_init', NULL::timestamptz, NULL::interval)$$,
    'initialize => false: the table waits for its first run'
);
SELECT is_empty('TABLE later', 'and is empty until then');
SELECT is(sluice.refresh_stream_table('later'), 'succeeded', 'that first run fills it');
SELECT results_eq(
    $$SELECT status, (SELECT count(*) FROM later) FROM sluice.nodes WHERE name::regclass = 'later'::regclass$$,
    $$VALUES ('active', 2::bigint)$$,
    'and it is active'
);

-- Its owner is the caller
CREATE ROLE sluice_test_owner;
GRANT CREATE ON SCHEMA public TO sluice_test_owner;
GRANT SELECT ON shop.orders TO sluice_test_owner;
GRANT USAGE ON SCHEMA shop TO sluice_test_owner;
GRANT EXECUTE ON FUNCTION sluice.create_stream_table TO sluice_test_owner;
SET LOCAL ROLE sluice_test_owner;
SELECT sluice.create_stream_table('mine', 'SELECT id FROM shop.orders', '5m', priority => 7) \g /dev/null
RESET ROLE;
SELECT table_owner_is('public', 'mine', 'sluice_test_owner', 'the caller owns the table');
SELECT results_eq(
    $$SELECT owner::text COLLATE "default", schedule, priority FROM sluice.nodes WHERE name::regclass = 'mine'::regclass$$,
    $$VALUES ('sluice_test_owner', '5m', 7)$$,
    'and the node, with the options given'
);
\ir finish.psql
