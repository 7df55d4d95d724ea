-- Membership of databases and their health, in the control database.
\ir setup.psql
\ir cron.psql
SELECT plan(51);

CREATE FUNCTION pg_temp.jobs() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s|%s|%s|%s', jobname, schedule, command, active), ', ' ORDER BY jobid) FROM cron.job
$$;
CREATE FUNCTION pg_temp.open_alerts() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(event, ', ' ORDER BY seq) FROM sluice.alerts WHERE closed_at IS NULL
$$;
SELECT oid AS own FROM pg_database WHERE datname = current_database() \gset
SELECT oid AS second FROM pg_database WHERE datname = 'template1' \gset
SELECT extversion AS version FROM pg_extension WHERE extname = 'pg_sluice' \gset
SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
INSERT INTO cron.job (jobname, schedule, command) VALUES ('theirs', '0 0 * * *', 'SELECT 1');

-- Joining
SELECT _sluice.join_database(:own, 'somebody', :'version') \g /dev/null
SELECT results_eq(
    'SELECT db_oid, joined_by, state, failures, last_tick_at FROM _sluice.member',
    format($$VALUES (%s::oid, 'somebody', 'joining', 0, NULL::timestamptz)$$, :own),
    'a database joins'
);
SELECT is(pg_temp.jobs(), 'theirs|0 0 * * *|SELECT 1|t, pg_sluice|* * * * *|CALL sluice.run()|t', 'pg_cron gets the one entry');
SELECT _sluice.join_database(:own, 'somebody else', :'version'), _sluice.join_database(:second, 'x', :'version') \g /dev/null
SELECT is((SELECT joined_by FROM _sluice.member WHERE db_oid = :own), 'somebody', 'joining again changes nothing');
SELECT is((SELECT count(*) FROM cron.job), 2::bigint, 'and adds no entry, nor does another database');
UPDATE cron.job SET active = false WHERE jobname = 'pg_sluice';
SELECT _sluice.join_database(:own, 'x', :'version') \g /dev/null
SELECT is(pg_temp.jobs(), 'theirs|0 0 * * *|SELECT 1|t, pg_sluice|* * * * *|CALL sluice.run()|t', 'an entry that was switched off is switched on');
SELECT is(_sluice.leader_entry(), 'active', 'which is told');
UPDATE cron.job SET active = false WHERE jobname = 'pg_sluice';
SELECT is(_sluice.leader_entry(), 'inactive', 'and so is it of one that is off');
UPDATE cron.job SET command = 'SELECT 1' WHERE jobname = 'pg_sluice';
SELECT is(_sluice.leader_entry(), 'missing', 'and of none');
SELECT _sluice.join_database(:own, 'x', :'version') \g /dev/null
SELECT is(_sluice.leader_entry(), 'active', 'joining makes it what it should be');
SELECT is(
    pg_temp.error_of(format($$SELECT _sluice.join_database(%s, 'x', '99.0')$$, :own)),
    format(E'55000: pg_sluice is at version 99.0 here and at version %s in the control database\n'
        'HINT: Run ALTER EXTENSION pg_sluice UPDATE in both.', :'version'),
    'another version of the extension can''t join'
);

-- Health
SELECT results_eq(
    format('SELECT db_oid, database FROM _sluice.members(%s) ORDER BY db_oid', :epoch),
    'SELECT oid, datname::text COLLATE "default" FROM pg_database WHERE oid IN (SELECT db_oid FROM _sluice.member) ORDER BY oid',
    'the databases to schedule, by name'
);
SELECT _sluice.record_tick(:epoch, :own, 12.5) \g /dev/null
SELECT results_eq(
    format('SELECT state, last_tick_at IS NOT NULL, last_tick_ms, failures, error FROM _sluice.member WHERE db_oid = %s', :own),
    $$VALUES ('scheduled', true, 12.5::double precision, 0, NULL::text)$$,
    'a tick'
);
SELECT _sluice.record_failed_tick(:epoch, :own, 'failed', 'no way in', '{"step": "connect"}'), _sluice.record_failed_tick(:epoch, :own, 'failed', 'still none', NULL) \g /dev/null
SELECT results_eq(
    format('SELECT state, failures, error FROM _sluice.member WHERE db_oid = %s', :own),
    $$VALUES ('failed', 2, 'still none')$$,
    'failed ticks are counted'
);
SELECT results_eq(
    $$SELECT event, severity, node, message, detail ->> 'step' FROM sluice.alerts WHERE closed_at IS NULL$$,
    format($$VALUES ('database_failed', 'critical', %L, 'database "%s" is not scheduled: no way in', 'connect')$$, current_database(), current_database()),
    'with one alert, which says where it failed'
);
SELECT _sluice.record_failed_tick(:epoch, :second, 'failed', 'x', NULL) \g /dev/null
SELECT is(pg_temp.open_alerts(), 'database_failed, database_failed', 'another database has its own');
SELECT _sluice.record_tick(:epoch, :own, 1) \g /dev/null
SELECT is((SELECT string_agg(node, ',') FROM sluice.alerts WHERE closed_at IS NULL), 'template1', 'a tick closes just its own');
SELECT is((SELECT failures FROM _sluice.member WHERE db_oid = :own), 0, 'and ends the count');
SELECT _sluice.record_tick(:epoch, :second, 1) \g /dev/null
SELECT _sluice.record_failed_tick(:epoch, :own, 'failed', 'x', NULL), _sluice.record_failed_tick(:epoch, :own, 'version_mismatch', 'y', NULL) \g /dev/null
SELECT _sluice.record_tick(:epoch, :own, 1) \g /dev/null
SELECT is(pg_temp.open_alerts(), NULL, 'a tick closes all that was open about its database');
SELECT is(
    (SELECT string_agg(COALESCE(e, 'no error'), E'\n' ORDER BY n) FROM unnest(ARRAY[
        pg_temp.error_of(format('SELECT * FROM _sluice.members(%s)', :epoch - 1)),
        pg_temp.error_of(format('SELECT _sluice.record_tick(%s, 1, 1)', :epoch - 1)),
        pg_temp.error_of(format('SELECT _sluice.record_failed_tick(%s, 1, ''failed'', ''x'', NULL)', :epoch - 1)),
        pg_temp.error_of(format('SELECT _sluice.record_spawn_failure(%s, 1, ''x'')', :epoch - 1)),
        pg_temp.error_of(format('SELECT * FROM _sluice.orphaned_runs(%s)', :epoch - 1))
    ]) WITH ORDINALITY AS x (e, n) WHERE e IS NULL OR e NOT LIKE 'SL001: leadership lost%'),
    NULL, 'a former leader can do none of this'
);
SELECT throws_ok(
    format($$SELECT _sluice.record_failed_tick(%s, %s, 'odd', 'x', NULL)$$, :epoch, :own), '23514', NULL, 'a state that is none'
);

-- Workers that can't be started
SELECT is(
    ARRAY[_sluice.record_spawn_failure(:epoch, :own, 'no slot of mine'), _sluice.record_spawn_failure(:epoch, :own, 'no way in')], ARRAY[1, 2],
    'workers that did not come about are counted'
);
SELECT results_eq(
    'SELECT event, severity, node, message FROM sluice.alerts WHERE closed_at IS NULL',
    format($$VALUES ('spawn_failed', 'critical', %1$L, 'no worker can be started in database "%1$s": no slot of mine')$$, current_database()),
    'with one alert'
);
SELECT _sluice.record_tick(:epoch, :own, 1) \g /dev/null
SELECT is(
    (SELECT r.error FROM jsonb_to_recordset(_sluice.database_rows()) AS r (db_oid oid, error text) WHERE r.db_oid = :own), 'no way in',
    'databases() shows the latest error, which a tick does not end'
);
SELECT nonce FROM _sluice.reserve_slot(:epoch, :second) \gset
SELECT _sluice.activate_slot(:epoch, :'nonce', 2147483647, '2024-01-01') \g /dev/null
SELECT is((SELECT spawn_failures FROM _sluice.member WHERE db_oid = :own), 2, 'nor does a worker of another database');
SELECT nonce FROM _sluice.reserve_slot(:epoch, :own) \gset
SELECT is((SELECT spawn_failures FROM _sluice.member WHERE db_oid = :own), 2, 'nor a reservation');
SELECT _sluice.activate_slot(:epoch, :'nonce', 2147483647, '2024-01-01') \g /dev/null
SELECT results_eq(
    format('SELECT spawn_failures, spawn_error, pg_temp.open_alerts() FROM _sluice.member WHERE db_oid = %s', :own),
    'VALUES (0, NULL::text, NULL::text)',
    'a worker that goes live ends the count and closes the alert'
);
DELETE FROM _sluice.slot;
SELECT is(_sluice.record_spawn_failure(:epoch, 1000, 'x'), NULL, 'a database that is no member has no count');
SELECT is(pg_temp.open_alerts(), NULL, 'and no alert: nobody would close it');
SELECT _sluice.record_failed_tick(:epoch, 1000, 'failed', 'x', NULL) \g /dev/null
SELECT is(pg_temp.open_alerts(), NULL, 'nor has its failed tick one');
UPDATE _sluice.alert SET closed_at = now() WHERE closed_at IS NULL;

-- The rows that users see
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at) VALUES (:own, 1, 'n1', now(), now()), (:own, 2, 'n2', now(), now()), (:second, 1, 'm1', now(), now());
SELECT pgt_id FROM _sluice.next_run(:epoch, NULL, :own, NULL) \g /dev/null
INSERT INTO _sluice.drain (db_oid, requested_by, stays) VALUES (:second, 'x', true);
SELECT results_eq(
    $$SELECT r.database, r.state, r.queued, r.running, r.drain
      FROM jsonb_to_recordset(_sluice.database_rows()) AS r (database text, state text, queued bigint, running bigint, drain text)
      ORDER BY r.database$$,
    format($$VALUES (%L, 'scheduled', 1::bigint, 1::bigint, NULL), ('template1', 'scheduled', 1, 0, 'drained')$$, current_database()),
    'databases()'
);
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by, stays) VALUES (:own, 1, 'n1', 'test', true);
INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline) VALUES (9, 'reserved', :own, :epoch, now());
SELECT results_eq(
    $$SELECT r.failures, r.oldest_queued_at IS NOT NULL, r.workers, r.paused, r.joined_by, r.joined_at IS NOT NULL
      FROM jsonb_to_recordset(_sluice.database_rows()) AS r (
          database text, failures integer, oldest_queued_at timestamptz, workers bigint, paused bigint, joined_by text, joined_at timestamptz
      )
      ORDER BY r.database$$,
    $$VALUES (0, true, 1::bigint, 1::bigint, 'somebody', true), (0, true, 0, 0, 'x', true)$$,
    'with what they hold and what holds them'
);
DELETE FROM _sluice.pause;
DELETE FROM _sluice.slot WHERE slot = 9;
SELECT results_eq(
    $$SELECT r.database, r.name, r.state FROM jsonb_to_recordset(_sluice.queue_rows()) AS r (database text, name text, state text)$$,
    format($$VALUES (%1$L, 'n1', 'running'), (%1$L, 'n2', 'queued'), ('template1', 'm1', 'queued')$$, current_database()),
    'queue(): what runs, then what is next'
);
SELECT results_eq(
    'SELECT db_oid, queued, running FROM _sluice.queued_by_database() ORDER BY queued, running',
    format('VALUES (%s::oid, 1::bigint, 0::bigint), (%s, 1, 1)', :second, :own),
    'counted from the queue'
);
SELECT results_eq(
    format($$SELECT r.leader_alive, r.member_state, r.queued, r.drain FROM jsonb_to_record(_sluice.health_of(%s)) AS r
        (leader_alive boolean, member_state text, queued bigint, drain boolean)$$, :second),
    $$VALUES (true, 'scheduled', 1::bigint, true)$$,
    'what health_check() asks for'
);
DELETE FROM _sluice.drain;

-- Runs of former leaders
UPDATE _sluice.queue SET epoch = :epoch - 1 WHERE state = 'running';
SELECT results_eq(
    format('SELECT db_oid, pgt_id, name FROM _sluice.orphaned_runs(%s)', :epoch),
    format($$VALUES (%s::oid, 1::bigint, 'n1')$$, :own),
    'a run of a former leader whose session is gone is an orphan'
);
SELECT set_config('application_name', 'pg_sluice scheduler ' || :epoch - 1, true), pg_stat_clear_snapshot() \g /dev/null
SELECT is_empty(format('SELECT 1 FROM _sluice.orphaned_runs(%s)', :epoch), 'not while that session is there');
SELECT set_config('application_name', 'pgTAP', true), pg_stat_clear_snapshot() \g /dev/null
UPDATE _sluice.queue SET slot = 3 WHERE state = 'running';
INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline, pid, backend_start)
SELECT 3, 'live', :own, :epoch - 1, now(), a.pid, a.backend_start FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid();
SELECT is_empty(format('SELECT 1 FROM _sluice.orphaned_runs(%s)', :epoch), 'nor while its worker is there');
UPDATE _sluice.slot SET epoch = :epoch;
SELECT is((SELECT count(*) FROM _sluice.orphaned_runs(:epoch)), 1::bigint, 'a worker of this leader in its slot is another');
UPDATE _sluice.queue SET epoch = :epoch WHERE state = 'running';
DELETE FROM _sluice.slot;
SELECT is_empty(format('SELECT 1 FROM _sluice.orphaned_runs(%s)', :epoch), 'and a run of this leader never is');

-- Leaving
UPDATE _sluice.alert SET closed_at = now();
SELECT _sluice.record_failed_tick(:epoch, :own, 'failed', 'x', NULL), _sluice.record_spawn_failure(:epoch, :own, 'x') \g /dev/null
SELECT _sluice.leave_database(:own) \g /dev/null
SELECT is((SELECT string_agg(name, ',' ORDER BY name) FROM _sluice.queue), 'm1,n1', 'leaving forgets what was queued; what runs ends as usual');
SELECT is(pg_temp.open_alerts(), NULL, 'and closes the alerts about it, which no tick would');
SELECT is((SELECT count(*) FROM cron.job), 2::bigint, 'the entry of pg_cron stays for the other database');
SELECT _sluice.leave_database(:second), _sluice.leave_database(:second) \g /dev/null
SELECT is(pg_temp.jobs(), 'theirs|0 0 * * *|SELECT 1|t', 'the last one takes it along');
SELECT is(_sluice.leader_entry(), NULL, 'where there is none, none is missing');

-- Dropped databases
UPDATE _sluice.upkeep SET due_at = 'infinity';
INSERT INTO _sluice.member (db_oid, joined_by) VALUES (1000, 'x'), (:own, 'x');
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at) VALUES (1000, 1, 'gone', now(), now());
SELECT _sluice.record_failed_tick(:epoch, 1000, 'failed', 'database does not exist', NULL) \g /dev/null
INSERT INTO _sluice.drain (db_oid, requested_by, stays) VALUES (1000, 'x', true), (0, 'x', true), (:own, 'x', true);
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by, stays) VALUES (1000, 1, 'gone', 'x', true), (:own, 1, 'n1', 'x', true);
SELECT is((SELECT count(*) FROM _sluice.members(:epoch)), 1::bigint, 'a dropped database is not scheduled');
SELECT ok(
    (SELECT due_at <= clock_timestamp() FROM _sluice.upkeep WHERE task = 'vanished_databases'), 'what may be much is upkeep''s, at once'
);
SELECT is((SELECT (deleted, is_over)::text FROM _sluice.purge_vanished_databases(NULL, 10, 'infinity')), '(2,t)', 'which deletes it');
UPDATE _sluice.upkeep SET due_at = 'infinity';
INSERT INTO _sluice.drain (db_oid, requested_by, stays) VALUES (1001, 'x', true);
SELECT _sluice.members(:epoch) \g /dev/null
SELECT ok(
    (SELECT due_at <= clock_timestamp() FROM _sluice.upkeep WHERE task = 'vanished_databases'),
    'so it is when the database was no member any more'
);
SELECT results_eq(
    $$SELECT (SELECT count(*) FROM _sluice.member WHERE db_oid = 1000), (SELECT count(*) FROM _sluice.queue WHERE name = 'gone'),
        (SELECT count(*) FROM _sluice.drain WHERE db_oid = 1000), (SELECT count(*) FROM _sluice.pause WHERE db_oid = 1000)$$,
    'VALUES (0::bigint, 0::bigint, 0::bigint, 0::bigint)',
    'and leaves nothing behind'
);
SELECT is(pg_temp.open_alerts(), NULL, 'no alert either');
SELECT results_eq(
    'SELECT (SELECT count(*) FROM _sluice.drain), (SELECT count(*) FROM _sluice.pause)', 'VALUES (2::bigint, 1::bigint)', 'what others asked for stays'
);
\ir finish.psql
