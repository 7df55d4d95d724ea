-- What a refresh does to the rows: after it a stream table equals its query, row for row.
\ir setup.psql
SELECT plan(38);

-- Rows of the table and of the query that have no counterpart, told apart by their text.
CREATE FUNCTION pg_temp.differences(_table text, _query text)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_count bigint;
BEGIN
    EXECUTE format(
        'SELECT count(*) FROM (SELECT t::text AS line, count(*) AS times FROM %s AS t GROUP BY 1) AS a
            FULL JOIN (SELECT q::text AS line, count(*) AS times FROM (%s) AS q GROUP BY 1) AS b USING (line, times)
         WHERE a.line IS NULL OR b.line IS NULL', _table, _query
    ) INTO v_count;
    RETURN v_count;
END;
$$;
-- The rows that the last refresh changed, as history has them.
CREATE FUNCTION pg_temp.changed()
RETURNS bigint
LANGUAGE sql
AS 'SELECT h.rows_changed FROM sluice.history AS h ORDER BY h.ended_at DESC LIMIT 1';

CREATE TABLE src (id integer, grp text, price numeric, doc json, flag boolean);
INSERT INTO src VALUES (1, 'a', 1.0, '{"a": 1}', true), (2, 'a', 1.0, '{"a": 1}', NULL), (3, NULL, NULL, NULL, NULL);

-- Multiplicity and NULL
SELECT sluice.create_stream_table('bag', 'SELECT grp, price FROM src', 'manual') \g /dev/null
SELECT is(sluice.refresh_stream_table('bag'), 'no_change', 'equal rows are left alone');
SELECT is(pg_temp.changed(), 0::bigint, 'none is written');
INSERT INTO src VALUES (4, 'a', 1.0), (5, NULL, NULL);
SELECT is(sluice.refresh_stream_table('bag'), 'succeeded', 'one more of several equal rows, and of rows of NULLs');
SELECT is(pg_temp.changed(), 2::bigint, 'adds just those');
SELECT is(pg_temp.differences('bag', 'SELECT grp, price FROM src'), 0::bigint, 'with their multiplicity');
DELETE FROM src WHERE id IN (2, 3);
SELECT sluice.refresh_stream_table('bag') \g /dev/null
SELECT is(pg_temp.changed(), 2::bigint, 'one less of each takes just those');
SELECT is(pg_temp.differences('bag', 'SELECT grp, price FROM src'), 0::bigint, 'with their multiplicity');

-- What "=" does not tell apart
UPDATE src SET price = 1.00 WHERE id = 1;
SELECT sluice.refresh_stream_table('bag') \g /dev/null
SELECT is(
    (SELECT string_agg(price::text, ' ' ORDER BY price::text) FROM bag), '1.0 1.00', 'a numeric whose scale changes from 1.0 to 1.00'
);
CREATE TABLE points (x float8, y float8);
INSERT INTO points VALUES (0, 0.3);
SELECT sluice.create_stream_table('floats', 'SELECT x, y FROM points', 'manual') \g /dev/null
UPDATE points SET x = '-0';
SELECT is(sluice.refresh_stream_table('floats'), 'succeeded', 'zero and minus zero');
UPDATE points SET y = 0.1::float8 + 0.2::float8;
SET LOCAL extra_float_digits = 0;
SELECT is(sluice.refresh_stream_table('floats'), 'succeeded', 'the last digit of a float, whatever extra_float_digits the session has');
SET LOCAL extra_float_digits = 1;
SELECT is(pg_temp.differences('floats', 'SELECT x, y FROM points'), 0::bigint, 'to the last bit');
SELECT is((SELECT y = 0.1::float8 + 0.2::float8 FROM floats), true, 'as "=" sees it');

-- Types without equality, and text that needs care
SELECT sluice.create_stream_table('docs', 'SELECT id, doc, point(id, 1) AS p, NULL::xml AS x FROM src', 'manual') \g /dev/null
SELECT is(sluice.refresh_stream_table('docs'), 'no_change', 'json, point and xml columns');
UPDATE src SET doc = '{"a":  1}' WHERE id = 1;
SELECT is(sluice.refresh_stream_table('docs'), 'succeeded', 'json that differs in a blank');
SELECT is(pg_temp.changed(), 2::bigint, 'is one row out and one in');
CREATE TABLE words (a text, b text);
INSERT INTO words VALUES ('x', 'y,z'), ('x,y', 'z'), ('', NULL), (NULL, ''), ('"', '\'), ('(', ')'), (E'\n', ' ');
SELECT sluice.create_stream_table('texts', 'SELECT a, b FROM words', 'manual') \g /dev/null
UPDATE words SET a = b, b = a;
SELECT sluice.refresh_stream_table('texts') \g /dev/null
SELECT is(pg_temp.differences('texts', 'SELECT a, b FROM words'), 0::bigint, 'commas, quotes, empty strings and NULLs are told apart');
CREATE COLLATION loose (PROVIDER = icu, LOCALE = 'und-u-ks-level2', DETERMINISTIC = false);
CREATE TABLE cases (a text COLLATE loose);
INSERT INTO cases VALUES ('a');
SELECT sluice.create_stream_table('folded', 'SELECT a FROM cases', 'manual') \g /dev/null
UPDATE cases SET a = 'A';
SELECT is(sluice.refresh_stream_table('folded'), 'succeeded', 'a change that the collation takes for equal');

-- Emptying and filling
CREATE TABLE few (id integer);
SELECT sluice.create_stream_table('few_too', 'SELECT id FROM few', 'manual') \g /dev/null
SELECT is_empty('TABLE few_too', 'an empty result');
INSERT INTO few SELECT generate_series(1, 3);
SELECT sluice.refresh_stream_table('few_too') \g /dev/null
SELECT is((SELECT count(*) FROM few_too), 3::bigint, 'that fills');
TRUNCATE few;
SELECT sluice.refresh_stream_table('few_too') \g /dev/null
SELECT is_empty('TABLE few_too', 'and empties');
DELETE FROM bag;
SELECT is(sluice.refresh_stream_table('bag'), 'succeeded', 'rows that somebody deleted from the table');
SELECT is(pg_temp.differences('bag', 'SELECT grp, price FROM src'), 0::bigint, 'come back');

-- Groups, joins, many rows
CREATE TABLE facts (k integer, v integer);
INSERT INTO facts SELECT n % 100, n FROM generate_series(1, 5000) AS n;
SELECT sluice.create_stream_table('sums', 'SELECT k, count(*) AS n, sum(v) AS total FROM facts GROUP BY k', 'manual') \g /dev/null
SELECT sluice.create_stream_table('pairs', 'SELECT a.k, b.k AS other FROM facts AS a JOIN facts AS b ON b.v = a.v + 1 WHERE a.k < 3', 'manual') \g /dev/null
SELECT sluice.create_stream_table('plain', 'SELECT k % 7 AS k FROM facts', 'manual') \g /dev/null
DELETE FROM facts WHERE v % 3 = 0;
UPDATE facts SET v = -v WHERE v % 5 = 0;
INSERT INTO facts SELECT 1000 + n % 3, n FROM generate_series(1, 5000) AS n;
DELETE FROM facts WHERE k = 42;
SELECT sluice.refresh_stream_table('sums'), sluice.refresh_stream_table('pairs'), sluice.refresh_stream_table('plain') \g /dev/null
SELECT is(
    pg_temp.differences('sums', 'SELECT k, count(*) AS n, sum(v) AS total FROM facts GROUP BY k'), 0::bigint, 'groups that change, appear and vanish'
);
SELECT is(
    pg_temp.differences('pairs', 'SELECT a.k, b.k AS other FROM facts AS a JOIN facts AS b ON b.v = a.v + 1 WHERE a.k < 3'), 0::bigint, 'a self-join'
);
SELECT is(pg_temp.differences('plain', 'SELECT k % 7 AS k FROM facts'), 0::bigint, 'thousands of equal rows');

-- Constraints of the stream table hold all the while
CREATE TABLE holders (id integer, seat integer);
INSERT INTO holders VALUES (1, 1), (2, 2), (3, 3);
SELECT sluice.create_stream_table('seats', 'SELECT id, seat FROM holders', 'manual') \g /dev/null
CREATE UNIQUE INDEX ON seats (seat);
UPDATE holders SET seat = seat % 3 + 1;
SELECT is(pg_temp.error_of($$SELECT sluice.refresh_stream_table('seats')$$), NULL, 'a unique index bears a swap of keys');
SELECT is(pg_temp.differences('seats', 'SELECT id, seat FROM holders'), 0::bigint, 'and the rows are right');
UPDATE holders SET seat = 1;
SELECT throws_ok($$SELECT sluice.refresh_stream_table('seats')$$, '23505', NULL, 'rows that it can''t hold are an error');
SELECT is((SELECT count(*) FROM seats), 3::bigint, 'which leaves the table as it was');

-- The table is ordinary to others
INSERT INTO few VALUES (1);
CREATE TABLE child () INHERITS (few_too);
INSERT INTO child SELECT 77 FROM generate_series(1, 20);
SELECT sluice.refresh_stream_table('few_too') \g /dev/null
CREATE TABLE watched (id integer);
CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.watched VALUES (NEW.id); RETURN NULL; END; $$;
CREATE TRIGGER watch AFTER INSERT ON few_too FOR EACH ROW EXECUTE FUNCTION watch();
INSERT INTO few VALUES (2);
SELECT sluice.refresh_stream_table('few_too') \g /dev/null
SELECT results_eq('TABLE watched', 'VALUES (2)', 'triggers on it see just the rows that change');
SELECT is((SELECT string_agg(id::text, ',' ORDER BY id) FROM ONLY few_too), '1,2', 'rows of a table that inherits from it are not taken for its own');
SELECT is((SELECT count(*) FROM child WHERE id = 77), 20::bigint, 'nor touched');

-- Policies on it, which can hide its rows from the owner too
CREATE ROLE sluice_test_owner;
GRANT SELECT ON few TO sluice_test_owner;
ALTER TABLE few_too OWNER TO sluice_test_owner;
DROP TRIGGER watch ON few_too;
CREATE POLICY low ON few_too USING (id < 2) WITH CHECK (true);
ALTER TABLE few_too ENABLE ROW LEVEL SECURITY;
SELECT is(sluice.refresh_stream_table('few_too'), 'no_change', 'policies for others are none of a refresh''s business');
ALTER TABLE few_too FORCE ROW LEVEL SECURITY;
SELECT is(
    pg_temp.error_of($$SELECT sluice.refresh_stream_table('few_too')$$),
    E'55000: row-level security of stream table public.few_too applies to its owner\n'
    'DETAIL: A refresh runs with the owner''s rights and must see all rows of the table.\n'
    'HINT: Use ALTER TABLE ... NO FORCE ROW LEVEL SECURITY.', 'those for the owner would have it add the hidden rows again'
);
SELECT is((SELECT count(*) FROM ONLY few_too), 2::bigint, 'and nothing is written');
ALTER ROLE sluice_test_owner BYPASSRLS;
SELECT is(sluice.refresh_stream_table('few_too'), 'no_change', 'an owner whom they don''t apply to sees all');

-- Manual refreshes say what they can't do
SELECT throws_ok(
    $$SELECT sluice.refresh_stream_table('src')$$, '42704', 'stream table "src" does not exist', 'an ordinary table'
);
SELECT throws_ok($$SELECT sluice.refresh_stream_table(NULL)$$, '22004', 'name must not be null', 'NULL');
\ir finish.psql
