-- One look at the schedule of a member database: what is due, in which order, and how nodes move on.
\ir setup.psql
SELECT plan(65);

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
    SELECT _sluice.advance(jsonb_build_array(jsonb_build_object(
        'pgt_id', _pgt_id, 'due_at', _due_at, 'fire_at', _due_at, 'next_fire_at', _next
    )))
$$;
UPDATE _sluice.node SET next_fire_at = '2024-01-01' WHERE pgt_id = :up;
SELECT pg_temp.move(:up, '2024-01-01 00:00:01', '2024-02-01') \g /dev/null
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :up), timestamptz '2024-01-01', 'a node that was rescheduled meanwhile is left alone');
SELECT next_fire_at AS stored FROM _sluice.node WHERE pgt_id = :low \gset
UPDATE _sluice.node SET next_fire_at = '2024-01-01' WHERE pgt_id = :low;
SELECT pg_temp.move(:up, '2024-01-01', '2024-02-01') \g /dev/null
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :low), timestamptz '2024-01-01', 'so is one that is due at the same moment');
UPDATE _sluice.node SET next_fire_at = :'stored' WHERE pgt_id = :low;
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
SELECT _sluice.quarantine(:low, 'invalid schedule "x"', '2030-01-01'), _sluice.quarantine(:low, 'again', '2031-01-01'), _sluice.quarantine(999, 'gone', NULL) \g /dev/null
SET LOCAL client_min_messages = warning;
SELECT results_eq(
    format('SELECT status, due_at, next_fire_at FROM _sluice.node WHERE pgt_id = %s', :low),
    $$VALUES ('quarantined', NULL::timestamptz, timestamptz '2030-01-01')$$,
    'a quarantined node is not due, and its next fire is moved once'
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
SELECT _sluice.quarantine(:low, 'x', NULL) \g /dev/null
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
SELECT pg_temp.move(:grid, n.next_fire_at, n.next_fire_at + interval '1 h') FROM _sluice.node AS n WHERE pgt_id = :grid \g /dev/null
SELECT is((SELECT next_fire_at - fired_at FROM _sluice.node WHERE pgt_id = :grid), interval '1 h', 'the fire that was queued is known');
SELECT is((SELECT fire_step FROM _sluice.node WHERE pgt_id = :grid), interval '1 h', 'its last step is known');
SELECT _sluice.advance(jsonb_build_array(jsonb_build_object(
    'pgt_id', pgt_id, 'due_at', due_at, 'fire_at', due_at + interval '9 h', 'next_fire_at', due_at + interval '10 h'
))) FROM _sluice.node WHERE pgt_id = :grid \g /dev/null
SELECT is((SELECT fire_step FROM _sluice.node WHERE pgt_id = :grid), interval '1 h', 'fires that were skipped do not count for one');
SELECT sluice.schedule('grid', '1 day', 'SELECT 1') \g /dev/null
SELECT is((SELECT fire_step FROM _sluice.node WHERE pgt_id = :grid), NULL, 'which is none of its next grid''s');

-- Plans are kept, and tables were small when they were made, and known to be.
UPDATE pg_class SET relpages = 1, reltuples = 2 WHERE oid IN ('_sluice.node'::regclass, '_sluice.node_state'::regclass, '_sluice.graph'::regclass);
CREATE FUNCTION pg_temp.whole_reads() RETURNS numeric LANGUAGE sql AS $$
    SELECT sum(t.seq_scan) FROM pg_stat_xact_user_tables AS t WHERE t.schemaname = '_sluice' AND t.relname IN ('node', 'node_state', 'graph')
$$;
SELECT pg_temp.whole_reads() AS reads \gset
UPDATE _sluice.node SET next_fire_at = '2024-01-01' WHERE pgt_id = :up;
SELECT pg_temp.whole_reads() - :reads AS own \gset
SELECT (due -> 0) || '{"fire_at": "2024-01-01", "next_fire_at": "2050-01-01"}' AS move FROM _sluice.tick(100, '{}') \gset
SELECT _sluice.advance(jsonb_build_array(:'move'::jsonb)) \g /dev/null
SELECT is(pg_temp.whole_reads() - :reads - :own, 0::numeric, 'a tick and a move read no table from end to end, however small');

-- A clock that was set back
DELETE FROM _sluice.node WHERE pgt_id NOT IN (:up, :job, :manual);
UPDATE _sluice.node_state SET last_run_at = NULL, consecutive_errors = 0;
UPDATE _sluice.node SET retry_at = NULL, retry_of = NULL, fired_at = now() - interval '59 min', fire_step = '1 h', next_fire_at = now() + interval '1 min'
WHERE pgt_id <> :manual;
-- The nodes that are ahead of the clock: with w one that waits for its last fire, with r a retry that waits too long.
CREATE FUNCTION pg_temp.ahead() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(concat(a.name, CASE WHEN a.waits_until = a.next_fire_at THEN ' w' END, CASE WHEN a.retries THEN ' r' END), ', ' ORDER BY a.pgt_id)
    FROM _sluice.nodes_ahead() AS a
$$;
-- Those that are so after a change, which is undone.
CREATE FUNCTION pg_temp.ahead_after(_change text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_ahead text;
BEGIN
    EXECUTE _change;
    v_ahead := pg_temp.ahead();
    RAISE raise_exception;
EXCEPTION
    WHEN raise_exception THEN
        RETURN v_ahead;
END;
$$;
CREATE FUNCTION pg_temp.later(_table text, VARIADIC _columns text[]) RETURNS text LANGUAGE sql AS $$
    SELECT format('UPDATE _sluice.%I SET %s', _table, string_agg(format('%1$I = %1$I + interval ''10 h''', c), ', ')) FROM unnest(_columns) AS c
$$;
SELECT is(pg_temp.ahead(), NULL, 'no node is ahead of a clock that goes on');
SELECT is(pg_temp.ahead_after($$UPDATE _sluice.node SET next_fire_at = now() + interval '1 h 900 ms'$$), NULL, 'nor of one that is set back by less than a second');
SELECT is(pg_temp.ahead_after(pg_temp.later('node', 'fired_at', 'next_fire_at')), 'public.up, job w', 'one whose fire lies in the future is, and a job waits until that is past');
SELECT is(pg_temp.ahead_after('UPDATE _sluice.node SET fire_step = NULL'), NULL, 'one that has not fired yet is not');
SELECT is(
    pg_temp.ahead_after($$UPDATE _sluice.node SET fire_step = NULL, anchor = now() + interval '10 h', next_fire_at = next_fire_at + interval '10 h'$$),
    'public.up, job', 'but when it got its grid in the future, and a job then has no fire to wait for'
);
SELECT is(pg_temp.ahead_after(pg_temp.later('node', 'anchor')), NULL, 'where the grid begins is no matter once it has fired, nor where there is none');
SELECT is(pg_temp.ahead_after(pg_temp.later('node', 'created_at')), 'public.up, job, by hand', 'one that was made in the future');
SELECT is(pg_temp.ahead_after($$UPDATE _sluice.node_state SET last_run_at = now() + interval '10 h'$$), 'public.up', 'or ran there');
SELECT is(pg_temp.ahead_after(pg_temp.later('node_state', 'last_success_at')), 'public.up', 'or was filled there');
UPDATE _sluice.node SET retry_at = now() + interval '4 min', retry_of = now() WHERE pgt_id = :up;
SELECT is(pg_temp.ahead(), NULL, 'a retry waits for a while');
SELECT is(pg_temp.ahead_after(pg_temp.later('node', 'retry_at')), 'public.up r', 'too long when that is beyond retry_backoff_cap');
SELECT is(pg_temp.ahead_after($$UPDATE _sluice.node_state SET last_run_at = now() + interval '3 min'$$), 'public.up r', 'or when the run before it lies in the future');
SELECT is(
    pg_temp.ahead_after($$UPDATE _sluice.node SET status = 'suspended'; $$ || pg_temp.later('node', 'fired_at', 'next_fire_at', 'created_at')), NULL,
    'one that is suspended does not wait'
);
SELECT lives_ok(
    format('SELECT pg_temp.ahead_after(%L)', format('UPDATE _sluice.node SET %s, fire_step = ''178000000 y''', c)), 'no time is out of range: ' || c
)
FROM unnest(ARRAY[
    $$next_fire_at = 'infinity'$$, $$next_fire_at = '-infinity'$$, $$anchor = 'infinity'$$, $$next_fire_at = '4714-11-24 BC'$$, $$next_fire_at = '294276-12-31'$$
]) AS c;

-- The way back
CREATE FUNCTION pg_temp.back(_move jsonb DEFAULT '{}') RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.turn_back(jsonb_agg(
        to_jsonb(a) || jsonb_build_object('former', a.next_fire_at, 'next_fire_at', '2030-01-02 01:00Z', 'before', '2030-01-02 00:00Z') || _move
    ))
    FROM _sluice.nodes_ahead() AS a
$$;
CREATE FUNCTION pg_temp.next(_pgt_id bigint) RETURNS timestamptz LANGUAGE sql AS 'SELECT next_fire_at FROM _sluice.node WHERE pgt_id = _pgt_id';
UPDATE _sluice.node SET fired_at = '2060-01-01', next_fire_at = '2060-01-02', created_at = '2060-01-01' WHERE pgt_id <> :manual;
UPDATE _sluice.node SET retry_at = '2060-01-01' WHERE pgt_id = :up;
UPDATE _sluice.node_state SET last_run_at = '2060-01-01', last_success_at = '2060-01-01';
SELECT pg_temp.back('{"former": "2059-01-01"}'), pg_temp.back('{"due_at": null}') \g /dev/null
SELECT is(pg_temp.next(:up), timestamptz '2060-01-02', 'a node that was rescheduled meanwhile is left alone');
SAVEPOINT running;
SELECT pg_advisory_xact_lock(_sluice.lock_class('node'), :up) \g /dev/null
SELECT pg_temp.back() \g /dev/null
SELECT is(pg_temp.next(:up), timestamptz '2060-01-02', 'so is one that runs');
SELECT is(pg_temp.next(:job), timestamptz '2030-01-02 01:00Z', 'which keeps back no other');
ROLLBACK TO running;
SELECT pg_temp.back() \g /dev/null
SELECT results_eq(
    format('SELECT next_fire_at, fire_step, now() <= retry_at AND retry_at <= clock_timestamp(), retry_of IS NOT NULL,
        now() <= created_at AND created_at <= clock_timestamp() FROM _sluice.node WHERE pgt_id = %s', :up),
    $$VALUES (timestamptz '2030-01-02 01:00Z', interval '1 h', true, true, true)$$,
    'any other goes to its next fire, with the step before that; its retry is due, and it was made at the latest now'
);
SELECT results_eq(
    'SELECT now() <= last_run_at AND last_run_at <= clock_timestamp(), last_success_at = last_run_at FROM _sluice.node_state', 'VALUES (true, true)',
    'as it ran at the latest now'
);
UPDATE _sluice.node_state SET last_run_at = now() + interval '10 h';
SELECT _sluice.turn_back('[]') \g /dev/null
SELECT is((SELECT bool_and(last_run_at > now() + interval '9 h') FROM _sluice.node_state), true, 'only nodes that were found ahead are touched');
UPDATE _sluice.node_state SET last_run_at = now();
SELECT is((SELECT retry_at FROM _sluice.node WHERE pgt_id = :job), NULL, 'where there is no retry none is made');
UPDATE _sluice.node SET next_fire_at = now() + interval '10 h', fire_step = '1 h', retry_at = now() + interval '1 min' WHERE pgt_id = :up;
SELECT ctid AS place FROM _sluice.node WHERE pgt_id = :up \gset
SELECT pg_temp.back(jsonb_build_object('next_fire_at', pg_temp.next(:up), 'before', NULL)) \g /dev/null
SELECT is((SELECT ctid::text FROM _sluice.node WHERE pgt_id = :up), :'place', 'what is as it should be is not written, nor is a retry that does not wait too long');
SELECT results_eq(
    format('SELECT a.kind, a.schedule, a.anchor = n.anchor, a.due_at = n.due_at, a.fire_step, a.fired_at = n.fired_at, a.next_fire_at = n.next_fire_at
        FROM _sluice.nodes_ahead() AS a JOIN _sluice.node AS n USING (pgt_id) WHERE n.pgt_id = %s', :up),
    $$VALUES ('stream_table', '1h', true, true, 3600::double precision, true, true)$$,
    'all that the leader needs of them'
);
UPDATE _sluice.graph SET effective_schedule = '7 min' WHERE pgt_id = :up;
SELECT is((SELECT schedule FROM _sluice.nodes_ahead() WHERE pgt_id = :up), '7 min', 'of a calculated one the schedule that it has');
DELETE FROM _sluice.node_state;
UPDATE _sluice.node SET created_at = created_at + interval '10 h' WHERE pgt_id = :manual;
SELECT pg_temp.back('{"next_fire_at": null, "before": null}') \g /dev/null
SELECT results_eq(
    format('SELECT created_at <= clock_timestamp(), due_at FROM _sluice.node WHERE pgt_id = %s', :manual), 'VALUES (true, NULL::timestamptz)', 'a node that has no fire is none the less'
);

SELECT sluice.configure('maintenance_batch', '3') \g /dev/null
-- What the leader asks first
SELECT is(
    (_sluice.member_state() ->> 'version'), (SELECT extversion FROM pg_extension WHERE extname = 'pg_sluice'), 'the version of this database'
);
SELECT is(
    (_sluice.member_state() -> 'settings' ->> 'maintenance_batch'), '3', 'its settings, as numbers'
);
SELECT is(_sluice.member_state() ->> 'upkeep_is_due', 'true', 'and whether there is upkeep to do');

-- Nodes that are gone
SELECT is(
    _sluice.gone_nodes(jsonb_build_array(jsonb_build_object('pgt_id', :up, 'since', timestamptz '2024-01-01'), jsonb_build_object('pgt_id', 999, 'since', timestamptz '2024-01-01'))),
    '{999}'::bigint[], 'what the control database knows of nodes that this one does not have'
);
\ir finish.psql
