-- One look at the schedule of a member database: what is due, in which order, and how nodes move on.
\ir setup.psql
SELECT plan(33);

CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('up', 'SELECT id FROM src', '1h') AS up \gset
SELECT sluice.create_stream_table('middle', 'SELECT id FROM up', '1h', priority => 7, lock_timeout => '2 s', refresh_timeout => '1 min') AS middle \gset
SELECT sluice.create_stream_table('low', 'SELECT id FROM middle', '1h') AS low \gset
SELECT sluice.schedule('job', '1h', 'SELECT 1', catch_up => 5) AS job \gset
SELECT sluice.schedule('vacuum', '1h', 'VACUUM', transactional => false) AS vacuum \gset
SELECT sluice.schedule('by hand', 'manual', 'SELECT 1') AS manual \gset
CREATE FUNCTION pg_temp.due(_limit integer DEFAULT 100, _busy bigint[] DEFAULT '{}') RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(d.name, ' ' ORDER BY d.ordinality)
    FROM (SELECT *, row_number() OVER () AS ordinality FROM _sluice.due_nodes(clock_timestamp(), _limit, _busy)) AS d
$$;

-- Due
SELECT is(pg_temp.due(), NULL, 'nothing is due before its time');
SELECT results_eq(
    $$SELECT due, wait_seconds BETWEEN 0 AND 3600 FROM _sluice.tick(100, '{}')$$,
    'VALUES (NULL::jsonb, true)',
    'a tick that finds nothing says how long until the next'
);
UPDATE _sluice.node SET next_fire_at = timestamptz '2024-01-01' + pgt_id * interval '-1 s' WHERE pgt_id <> :manual;
SELECT is(pg_temp.due(), 'vacuum job public.up public.middle public.low', 'upstream before downstream, and then what has been due for longest');
SELECT results_eq(
    format('SELECT pgt_id, kind, schedule, due_at, next_fire_at, retry_of, catch_up, priority, attempt, upstream, options
        FROM _sluice.due_nodes(clock_timestamp(), 100, ''{}'') WHERE pgt_id IN (%s, %s, %s)', :middle, :job, :vacuum),
    format($$VALUES
        (%s::bigint, 'job', '1h', timestamptz '2024-01-01' + %1$s * interval '-1 s', timestamptz '2024-01-01' + %1$s * interval '-1 s', NULL::timestamptz,
            1, 0, 1, '{}'::bigint[], '{"job": true, "top_level": true}'::jsonb),
        (%s, 'job', '1h', timestamptz '2024-01-01' + %2$s * interval '-1 s', timestamptz '2024-01-01' + %2$s * interval '-1 s', NULL, 5, 0, 1, '{}', '{"job": true}'),
        (%s, 'stream_table', '1h', timestamptz '2024-01-01' + %3$s * interval '-1 s', timestamptz '2024-01-01' + %3$s * interval '-1 s', NULL, 1, 7, 1, '{%s}',
            '{"lock_timeout": 2, "refresh_timeout": 60}')$$, :vacuum, :job, :middle, :up),
    'all that the leader needs of them'
);
SELECT is(pg_temp.due(_busy => ARRAY[:up, :job]), 'vacuum public.middle public.low', 'none of the busy ones');
SELECT is(pg_temp.due(2), 'vacuum job', 'at most so many, those due for longest');
SELECT is((SELECT jsonb_array_length(due) FROM _sluice.tick(3, '{}')), 3, 'a tick gives them as one value');
UPDATE _sluice.node SET next_fire_at = '2050-01-01' WHERE pgt_id = :job;
SELECT is(pg_temp.due(), 'vacuum public.up public.middle public.low', 'none whose time is to come');
SELECT is(
    (SELECT string_agg(d.name, ' ') FROM _sluice.due_nodes('2050-01-01', 100, '{}') AS d), 'vacuum public.up job public.middle public.low',
    'at the very time it is due'
);
SELECT ok((SELECT wait_seconds > 3600 AND wait_seconds <= extract(epoch FROM timestamptz '2050-01-01' - now()) FROM _sluice.tick(100, '{}')), 'until which a tick says to wait');
UPDATE _sluice.node SET next_fire_at = timestamptz '2024-01-01' + pgt_id * interval '-1 s' WHERE pgt_id = :job;
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :job;
UPDATE _sluice.node SET status = 'quarantined' WHERE pgt_id = :vacuum;
DELETE FROM _sluice.node_state WHERE pgt_id = :low;
SELECT is((SELECT status FROM sluice.nodes WHERE pgt_id = :low), 'needs_init', 'a node that waits for its first run');
SELECT is(pg_temp.due(), 'public.up public.middle public.low', 'is due, not so suspended or quarantined ones');
UPDATE _sluice.node SET status = 'active';

-- Moving on
CREATE FUNCTION pg_temp.move(_pgt_id bigint, _due_at timestamptz, _next timestamptz) RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.advance(jsonb_build_array(jsonb_build_object('pgt_id', _pgt_id, 'due_at', _due_at, 'next_fire_at', _next)))
$$;
UPDATE _sluice.node SET next_fire_at = '2024-01-01' WHERE pgt_id = :up;
SELECT pg_temp.move(:up, '2024-01-01 00:00:01', '2024-02-01') \g /dev/null
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :up), timestamptz '2024-01-01', 'a node that was rescheduled meanwhile is left alone');
SELECT pg_temp.move(:up, '2024-01-01', '2024-02-01') \g /dev/null
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :up), timestamptz '2024-02-01', 'any other goes to its next fire');
SELECT pg_temp.move(:up, '2024-01-01', '2024-03-01') \g /dev/null
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :up), timestamptz '2024-02-01', 'once');
SELECT pg_temp.move(:up, '2024-02-01', NULL) \g /dev/null
SELECT is((SELECT due_at FROM _sluice.node WHERE pgt_id = :up), NULL, 'or to none');
UPDATE _sluice.node SET retry_at = '2024-01-01 00:00:05', retry_of = '2024-01-01', next_fire_at = '2024-02-01' WHERE pgt_id = :up;
UPDATE _sluice.node_state SET consecutive_errors = 2 WHERE pgt_id = :up;
SELECT results_eq(
    format('SELECT due_at, retry_of, attempt FROM _sluice.due_nodes(clock_timestamp(), 100, ''{}'') WHERE pgt_id = %s', :up),
    $$VALUES (timestamptz '2024-01-01 00:00:05', timestamptz '2024-01-01', 3)$$,
    'a retry is due at its own time, for the fire that failed'
);
SELECT pg_temp.move(:up, '2024-01-01 00:00:05', '2024-02-01') \g /dev/null
SELECT results_eq(
    format('SELECT due_at, retry_at, retry_of FROM _sluice.node WHERE pgt_id = %s', :up),
    $$VALUES (timestamptz '2024-02-01', NULL::timestamptz, NULL::timestamptz)$$,
    'after which the grid goes on'
);
SELECT throws_ok(
    format('UPDATE _sluice.node SET retry_at = now() WHERE pgt_id = %s', :up), '23514', NULL, 'a retry is of some fire'
);

-- Quarantine
SET LOCAL client_min_messages = error;
SELECT _sluice.quarantine(:low, 'invalid schedule "x"'), _sluice.quarantine(:low, 'again'), _sluice.quarantine(999, 'gone') \g /dev/null
SET LOCAL client_min_messages = warning;
SELECT results_eq(
    format('SELECT status, due_at FROM _sluice.node WHERE pgt_id = %s', :low), $$VALUES ('quarantined', NULL::timestamptz)$$,
    'a quarantined node is not due'
);
SELECT results_eq(
    'SELECT event, severity, node, pgt_id, message FROM sluice.alerts WHERE closed_at IS NULL',
    format($$VALUES ('quarantined', 'critical', 'public.low', %s::bigint, 'invalid schedule "x"')$$, :low),
    'there is one alert, however often it is found'
);
SELECT sluice.reset('low') \g /dev/null
SELECT results_eq(
    format('SELECT status, (SELECT count(*) FROM sluice.alerts WHERE closed_at IS NULL) FROM _sluice.node WHERE pgt_id = %s', :low),
    $$VALUES ('active', 0::bigint)$$,
    'reset() ends it'
);
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :low;
SELECT _sluice.quarantine(:low, 'x') \g /dev/null
SELECT is((SELECT status FROM _sluice.node WHERE pgt_id = :low), 'suspended', 'a suspended node stays that');
UPDATE _sluice.node SET status = 'active' WHERE pgt_id = :low;

-- The grid
SELECT sluice.schedule('cron', '0 3 * * *', 'SELECT 1') AS cron \gset
SELECT results_eq(
    format($$SELECT next_fire_at > clock_timestamp(), next_fire_at < clock_timestamp() + interval '24 h 1 s',
        (next_fire_at AT TIME ZONE 'UTC')::time FROM _sluice.node WHERE pgt_id = %s$$, :cron),
    $$VALUES (true, true, time '03:00')$$,
    'a cron expression fires at its next time'
);
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :manual), NULL, 'manual never does');
SELECT sluice.schedule('grid', '1h', 'SELECT 1') AS grid \gset
SELECT ok(
    (SELECT next_fire_at > clock_timestamp() AND next_fire_at <= clock_timestamp() + interval '1 h'
        AND mod(extract(epoch FROM next_fire_at - anchor), 3600) = 0 FROM _sluice.node WHERE pgt_id = :grid),
    'an interval''s next fire is on its grid, within one interval'
);

-- Upkeep
INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, attempt, started_at, ended_at)
SELECT gen_random_uuid(), n, 'old', 'job', 'succeeded', 1, '2020-01-01', timestamptz '2020-01-01' + n * interval '1 s' FROM generate_series(5, 1, -1) AS n;
INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, attempt, started_at, ended_at)
VALUES (gen_random_uuid(), 9, 'new', 'job', 'succeeded', 1, now(), now());
SELECT sluice.configure('maintenance_batch', '3') \g /dev/null
SELECT is(_sluice.upkeep(), 3::bigint, 'upkeep deletes history past its retention, a batch at a time');
SELECT is((SELECT string_agg(pgt_id::text, ',' ORDER BY pgt_id) FROM _sluice.history WHERE name = 'old'), '4,5', 'the oldest first');
SELECT is(_sluice.upkeep(), 2::bigint, 'then the rest');
SELECT is(_sluice.upkeep(), 0::bigint, 'then nothing');
SELECT is((SELECT count(*) FROM _sluice.history WHERE name = 'new'), 1::bigint, 'what is younger stays');

-- What the leader asks first
SELECT is(
    (_sluice.member_state() ->> 'version'), (SELECT extversion FROM pg_extension WHERE extname = 'pg_sluice'), 'the version of this database'
);
SELECT is(
    (_sluice.member_state() -> 'settings' ->> 'maintenance_batch'), '3', 'its settings, as numbers'
);
\ir finish.psql
