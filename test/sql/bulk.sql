-- bulk_create(): many stream tables, all or none.
\ir setup.psql
SELECT plan(23);

CREATE TABLE src (id integer, grp text);
INSERT INTO src VALUES (1, 'a'), (2, 'b');
CREATE FUNCTION pg_temp.bulk_error(_definitions jsonb) RETURNS text LANGUAGE sql AS $$
    SELECT pg_temp.error_of(format('SELECT * FROM sluice.bulk_create(%L)', _definitions))
$$;

-- All
CREATE TEMP TABLE made AS SELECT * FROM sluice.bulk_create('[
    {"name": "one", "query": "SELECT id FROM src"},
    {"name": "\"Two\"", "query": "SELECT id FROM one", "schedule": "calculated", "priority": 4, "lock_timeout": "1 s"},
    {"name": "three", "query": "SELECT id FROM \"Two\"", "schedule": "5m", "refresh_mode": "full", "initialize": false, "refresh_timeout": "2 s", "max_lag": "1 h"}
]');
SELECT results_eq(
    'SELECT m.name, m.pgt_id = n.pgt_id FROM made AS m JOIN _sluice.node AS n ON n.relid = to_regclass(m.name)',
    $$VALUES ('one', true), ('"Two"', true), ('three', true)$$,
    'it gives the pgt_ids in the order of the definitions, and a later one may read an earlier one'
);
SELECT results_eq(
    'SELECT n.relid::text, n.schedule, n.refresh_mode, n.priority, n.lock_timeout, n.refresh_timeout, v.max_lag, v.status
        FROM _sluice.node AS n JOIN sluice.nodes AS v USING (pgt_id) ORDER BY pgt_id',
    $$VALUES ('one', '@every 1m', 'auto', 0, NULL::interval, NULL::interval, NULL::interval, 'active'),
        ('"Two"', 'calculated', 'auto', 4, interval '1 s', NULL, NULL, 'active'),
        ('three', '5m', 'full', 0, NULL, interval '2 s', interval '1 h', 'needs_init')$$,
    'keys are the arguments of create_stream_table(), with their defaults'
);
SELECT results_eq(
    'SELECT depth, effective_schedule FROM _sluice.graph ORDER BY pgt_id',
    $$VALUES (0, NULL), (1, '@every 5m'), (2, NULL)$$,
    'the graph is whole'
);
SELECT is((SELECT count(*) FROM _sluice.node WHERE next_fire_at > clock_timestamp()), 3::bigint, 'and every node is on its grid');
SELECT results_eq('SELECT id FROM "Two" ORDER BY id', 'VALUES (1), (2)', 'the tables are filled');
SELECT is_empty($$SELECT * FROM sluice.bulk_create('[]')$$, 'no definitions, no tables');
CREATE TEMP TABLE before AS SELECT pg_temp.footprint() AS footprint;

-- None
SELECT is(
    pg_temp.bulk_error('[{"name": "a1", "query": "SELECT id FROM src"}, {"name": "a2", "query": "SELECT id FROM nowhere"}]'),
    '42P01: relation "nowhere" does not exist', 'the second fails'
);
SELECT is(
    pg_temp.bulk_error('[{"name": "a1", "query": "SELECT id FROM src"}, {"name": "a1", "query": "SELECT id FROM src"}]'),
    '42P07: relation "a1" already exists', 'two of one name'
);
SELECT is(
    pg_temp.bulk_error('[{"name": "a1", "query": "SELECT id FROM src"}, {"name": "a2", "query": "SELECT 1 AS a", "refreshmode": "full"}]'),
    E'22023: unrecognized key "refreshmode" in a definition\n'
    'HINT: The keys are name, query, schedule, refresh_mode, initialize, priority, lock_timeout, refresh_timeout, max_lag.',
    'an unknown key'
);
SELECT is(pg_temp.bulk_error('[{"query": "SELECT 1 AS a"}]'), '22004: name must not be null', 'no name');
SELECT is(pg_temp.bulk_error('[{"name": "a1"}]'), '22004: query must not be null', 'no query');
SELECT is(pg_temp.bulk_error('[{"name": "a1", "query": "SELECT 1 AS a", "schedule": null}]'), '22004: schedule must not be null', 'NULL for a schedule');
SELECT is(pg_temp.bulk_error('{"name": "a1"}'), '22023: definitions must be an array of objects', 'an object');
SELECT is(pg_temp.bulk_error('[1]'), '22023: definitions must be an array of objects', 'an array of numbers');
-- Python 3.13 reads them.
SELECT matches(
    pg_temp.bulk_error((repeat('[', 2000) || repeat(']', 2000))::jsonb),
    '^22023: definitions (are nested too deeply, or contain too long a number|must be an array of objects)$',
    'one in the other, deeper than Python 3.11 reads'
);
SELECT is(
    pg_temp.bulk_error(('[{"name": "a1", "query": "SELECT 1 AS a", "priority": ' || repeat('9', 5000) || '}]')::jsonb),
    '22023: definitions are nested too deeply, or contain too long a number', 'a longer number than it reads'
);
SELECT throws_ok('SELECT * FROM sluice.bulk_create(NULL)', '22004', 'definitions must not be null', 'NULL');
SELECT matches(pg_temp.bulk_error('[{"name": 1, "query": "SELECT 1 AS a"}]'), '^22023: ', 'a name that is a number');
SELECT matches(pg_temp.bulk_error('[{"name": "a1", "query": ["SELECT 1"]}]'), '^22023: ', 'a query that is an array');
SELECT matches(pg_temp.bulk_error('[{"name": "a1", "query": "SELECT 1 AS a", "priority": "high"}]'), '^22023: ', 'a priority that is a word');

-- Limits, before any work
SELECT sluice.configure('max_bulk_definitions', '2') \g /dev/null
SELECT is(
    pg_temp.bulk_error('[{"name": "a1", "query": "SELEC"}, {"name": "a2", "query": "SELEC"}, {"name": "a3", "query": "SELEC"}]'),
    E'54000: too many definitions\nDETAIL: It has 3, and max_bulk_definitions is 2.\n'
    'HINT: The setting can be raised with sluice.configure(''max_bulk_definitions'', …).',
    'too many'
);
SELECT sluice.configure('max_bulk_bytes', '1 kB') \g /dev/null
SELECT is(
    split_part(pg_temp.bulk_error(jsonb_build_array(jsonb_build_object('name', 'a1', 'query', repeat('ü', 600)))), E'\n', 1),
    '54000: definitions are too long', 'too long, counted in bytes'
);
SELECT sluice.configure('max_bulk_bytes', NULL), sluice.configure('max_bulk_definitions', NULL) \g /dev/null

SELECT is(pg_temp.footprint(), (SELECT footprint FROM before), 'after all these errors nothing is left');
\ir finish.psql
