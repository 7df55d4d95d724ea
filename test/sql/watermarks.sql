-- Watermarks and their groups, as users make them.
\ir setup.psql
SELECT plan(38);

CREATE ROLE sluice_test_loader;
CREATE ROLE sluice_test_other;
CREATE ROLE sluice_test_deputy IN ROLE sluice_test_loader;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO sluice_test_loader, sluice_test_other;
GRANT CREATE ON SCHEMA public TO sluice_test_loader;
CREATE TABLE orders (id integer);
CREATE TABLE clicks (id integer);
CREATE TABLE visits (id integer);
CREATE SCHEMA apart;
CREATE TABLE apart.orders (id integer);
GRANT INSERT ON orders TO sluice_test_loader;
GRANT SELECT, UPDATE, DELETE ON clicks TO sluice_test_loader;
CREATE FUNCTION pg_temp.watermark(_source text) RETURNS timestamptz LANGUAGE sql AS $$
    SELECT watermark FROM _sluice.watermark WHERE relid = to_regclass(_source)
$$;
CREATE FUNCTION pg_temp.advance(_source text, _watermark text) RETURNS text LANGUAGE sql AS $$
    SELECT pg_temp.error_of(format('SELECT sluice.advance_watermark(%L, %L)', _source, _watermark))
$$;
CREATE FUNCTION pg_temp.make_group(_arguments text) RETURNS text LANGUAGE sql AS $$
    SELECT pg_temp.error_of('SELECT sluice.create_watermark_group(' || _arguments || ')')
$$;

-- Advancing
SELECT is(pg_temp.advance('orders', '2024-01-01'), NULL, 'a first watermark');
SELECT results_eq(
    'SELECT source::regclass, watermark, advanced_at <= clock_timestamp(), advanced_by::text, "group", tolerance FROM sluice.watermarks',
    $$VALUES ('orders'::regclass, timestamptz '2024-01-01', true, 'postgres', NULL::text, NULL::interval)$$,
    'the view shows it, and who advanced it'
);
SET LOCAL ROLE sluice_test_loader;
SELECT is(pg_temp.advance('orders', '2024-01-02 00:00:00.000001'), NULL, 'it goes forward');
RESET ROLE;
SELECT results_eq(
    'SELECT watermark, advanced_by::text FROM sluice.watermarks', $$VALUES (timestamptz '2024-01-02 00:00:00.000001', 'sluice_test_loader')$$, 'to the microsecond'
);
SELECT is(pg_temp.advance('orders', '2024-01-02 00:00:00.000001'), NULL, 'the same again is no error');
SELECT is(
    pg_temp.advance('orders', '2024-01-02'),
    E'22023: watermark of relation public.orders cannot go back\nDETAIL: It is 2024-01-02 00:00:00.000001+00, and 2024-01-02 00:00:00+00 was given.',
    'going back is'
);
SELECT is(pg_temp.watermark('orders'), timestamptz '2024-01-02 00:00:00.000001', 'and changes nothing');
SET LOCAL search_path = apart, public;
SELECT is(pg_temp.advance('orders', '2020-01-01'), NULL, 'a name means what it means in the caller''s search_path');
SET LOCAL search_path = "$user", public;
SELECT is(pg_temp.watermark('apart.orders'), timestamptz '2020-01-01', 'each relation has its own');
SET LOCAL datestyle = 'SQL, DMY';
SELECT is(pg_temp.advance('clicks', '02/01/2024 12:00 Europe/Oslo'), NULL, 'and a time what it means there');
SET LOCAL datestyle = 'ISO, MDY';
SELECT is(pg_temp.watermark('clicks'), timestamptz '2024-01-02 11:00', 'whatever the DateStyle');
SELECT is(pg_temp.advance('nowhere', '2024-01-01'), '42P01: relation "nowhere" does not exist', 'an unknown relation');
SELECT is(pg_temp.advance(NULL, '2024-01-01'), '22004: source must not be null', 'NULL for the source');
SELECT is(pg_temp.advance('orders', NULL), '22004: watermark must not be null', 'NULL for the watermark');
SET LOCAL ROLE sluice_test_loader;
SELECT is(
    pg_temp.advance('clicks', '2025-01-01'),
    E'42501: permission denied for relation public.clicks\nHINT: Advancing a watermark needs the INSERT privilege on its source.',
    'who may not load a relation may not say that it did'
);
RESET ROLE;

-- Groups
SELECT is(pg_temp.make_group($$'g', '{orders,clicks}', '1 h'$$), NULL, 'a group');
SELECT results_eq(
    $$SELECT source::regclass, tolerance FROM sluice.watermarks WHERE "group" = 'g' ORDER BY 1$$,
    $$SELECT c.oid::regclass, interval '1 h' FROM pg_class AS c WHERE c.oid IN ('orders'::regclass, 'clicks'::regclass) ORDER BY 1$$,
    'the view shows its sources'
);
SELECT is(pg_temp.make_group($$'Über "g"', ARRAY['orders', 'apart.orders', 'visits', 'orders']$$), NULL, 'under any name, also of sources without a watermark, one named twice');
SELECT results_eq(
    $$SELECT source::regclass, watermark IS NULL, tolerance FROM sluice.watermarks WHERE "group" = 'Über "g"' ORDER BY 1$$,
    $$SELECT c.oid::regclass, c.relname = 'visits', interval '0' FROM pg_class AS c
      WHERE c.oid IN ('orders'::regclass, 'apart.orders'::regclass, 'visits'::regclass) ORDER BY 1$$,
    'without a tolerance unless it is given'
);
SELECT is(pg_temp.make_group($$'g', '{orders,visits}'$$), '42710: watermark group "g" already exists', 'a name that is taken');
SELECT is(pg_temp.make_group($$'h', '{orders}'$$), '22023: a watermark group needs at least two sources', 'one source');
SELECT is(pg_temp.make_group($$'h', '{orders,public.orders}'$$), '22023: a watermark group needs at least two sources', 'the same under two names');
SELECT is(pg_temp.make_group($$'h', '{}'$$), '22023: a watermark group needs at least two sources', 'none');
SELECT is(pg_temp.make_group($$'h', '{orders,clicks}', '-1 s'$$), '22023: tolerance must not be negative', 'a negative tolerance');
SELECT is(pg_temp.make_group($$'h', '{orders,nowhere}'$$), '42P01: relation "nowhere" does not exist', 'an unknown source');
SELECT is(
    concat_ws(E'\n', pg_temp.make_group($$NULL, '{orders,clicks}'$$), pg_temp.make_group($$'h', '{orders,clicks}', NULL$$)),
    E'22004: name must not be null\n22004: tolerance must not be null', 'NULL for the name or the tolerance'
);
SELECT is(pg_temp.make_group($$'h', NULL$$), '22004: sources must not be null', 'NULL for the sources');
SELECT matches(pg_temp.make_group($$'h', '{orders,NULL}'$$), '^22004: ', 'NULL among them');
SELECT is((SELECT string_agg(name, ', ' ORDER BY name) FROM _sluice.watermark_group), 'g, Über "g"', 'after all these errors there are no others');
SELECT matches(pg_temp.make_group($$' ', '{orders,clicks}'$$), '^22023: ', 'an empty name');
SET LOCAL ROLE sluice_test_other;
SELECT matches(
    pg_temp.make_group($$'h', '{orders,clicks}'$$), '^42501: ', 'relations on which the caller has no right: it would hold up the nodes of others'
);
RESET ROLE;
DELETE FROM _sluice.watermark_group WHERE name IN (' ', 'h');

-- Dropping
SELECT throws_ok($$SELECT sluice.drop_watermark_group('nowhere')$$, '42704', 'watermark group "nowhere" does not exist', 'an unknown group');
SELECT throws_ok('SELECT sluice.drop_watermark_group(NULL)', '22004', 'name must not be null', 'NULL');
UPDATE _sluice.watermark_group SET owner = 'sluice_test_loader' WHERE name = 'g';
SET LOCAL ROLE sluice_test_other;
SELECT throws_ok($$SELECT sluice.drop_watermark_group('g')$$, '42501', 'must be owner of watermark group "g"', 'another''s');
SET LOCAL ROLE sluice_test_loader;
SELECT sluice.schedule('job', 'manual', 'SELECT 1', watermark_group => 'g') \g /dev/null
SELECT is(
    pg_temp.error_of($$SELECT sluice.drop_watermark_group('g')$$),
    E'2BP01: cannot drop watermark group "g" because jobs name it\nHINT: Schedule them without it first.', 'one that a job names'
);
SELECT sluice.schedule('job', 'manual', 'SELECT 1') \g /dev/null
RESET ROLE;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO sluice_test_deputy;
SET LOCAL ROLE sluice_test_deputy;
SELECT is(pg_temp.error_of($$SELECT sluice.drop_watermark_group('g')$$), NULL, 'one''s own, or that of a role whose rights one has');
RESET ROLE;
SELECT results_eq(
    $$SELECT count(*) FILTER (WHERE "group" = 'g'), count(DISTINCT watermark) FROM sluice.watermarks$$, 'VALUES (0::bigint, 3::bigint)', 'goes, and the watermarks stay'
);

-- A source that is dropped
DROP TABLE apart.orders;
SELECT is_empty(
    $$SELECT source FROM sluice.watermarks WHERE to_regclass(source) IS NULL$$, 'takes its watermark and its place in groups along'
);
\ir finish.psql
