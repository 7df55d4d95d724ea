-- Who may do what: nothing without a grant, and with a grant only to one's own nodes.
\ir setup.psql
SELECT plan(42);

CREATE ROLE sluice_test_nobody;
CREATE ROLE sluice_test_alice;
CREATE ROLE sluice_test_mallory;
CREATE ROLE sluice_test_deputy IN ROLE sluice_test_alice;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO sluice_test_alice, sluice_test_mallory;
GRANT EXECUTE ON PROCEDURE sluice.run, sluice.serve_metrics TO sluice_test_mallory;
GRANT CREATE ON SCHEMA public TO sluice_test_nobody, sluice_test_alice, sluice_test_mallory;
CREATE TABLE src (id integer);
GRANT SELECT ON src TO sluice_test_alice;

SET LOCAL ROLE sluice_test_alice;
SELECT sluice.create_stream_table('hers', 'SELECT id FROM src', 'manual') \g /dev/null
CREATE MATERIALIZED VIEW her_view AS SELECT id FROM src;
CREATE MATERIALIZED VIEW her_other_view AS SELECT id FROM src;
SELECT sluice.schedule_refresh('her_view', 'manual') \g /dev/null
SELECT sluice.schedule('her_job', 'manual', 'SELECT 1') \g /dev/null
RESET ROLE;
CREATE TEMP TABLE before AS SELECT * FROM _sluice.node;
GRANT SELECT ON before TO PUBLIC;

-- Nothing granted
SELECT is_empty(
    $$SELECT p.oid::regprocedure FROM pg_proc AS p
      WHERE p.pronamespace = 'sluice'::regnamespace AND has_function_privilege('sluice_test_nobody', p.oid, 'EXECUTE')$$,
    'a plain role can call no public function'
);
SELECT is_empty(
    $$SELECT c.oid::regclass FROM pg_class AS c
      WHERE c.relnamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace) AND c.relkind IN ('r', 'v', 'm', 'p')
        AND has_table_privilege('sluice_test_nobody', c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')$$,
    'a plain role has no right on any table or view'
);
SELECT is(
    (SELECT string_agg(format('%s of %s.%s', p.privilege, c.oid::regclass, a.attname), ', ' ORDER BY a.attnum)
        FROM pg_class AS c
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND NOT a.attisdropped
        CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS p (privilege)
        WHERE c.relnamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace) AND c.relkind IN ('r', 'v', 'm', 'p')
            AND has_column_privilege('sluice_test_nobody', c.oid, a.attnum, p.privilege)),
    'INSERT of _sluice.request.command, INSERT of _sluice.request.arguments, SELECT of _sluice.request.result',
    'nor on any column, except to ask and to read the answer'
);
SELECT is_empty(
    $$SELECT c.oid::regclass FROM pg_class AS c
      WHERE c.relnamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace) 
        AND CASE WHEN c.relkind = 'S' THEN has_sequence_privilege('sluice_test_nobody', c.oid, 'USAGE, SELECT, UPDATE') END$$,
    'nor on any sequence'
);
SELECT ok(
    NOT has_schema_privilege('sluice_test_nobody', 'sluice', 'CREATE') AND NOT has_schema_privilege('sluice_test_nobody', '_sluice', 'CREATE'),
    'nor to create in the schemas'
);
CREATE TEMP TABLE private_table AS
    SELECT c.oid::regclass::text AS name FROM pg_class AS c
    WHERE (c.relkind = 'r' AND c.relnamespace = '_sluice'::regnamespace) OR c.relnamespace = '_sluice_locks'::regnamespace;
GRANT SELECT ON private_table TO PUBLIC;
SET LOCAL ROLE sluice_test_nobody;
SELECT is_empty(
    $$SELECT t.name, m.mode
      FROM private_table AS t
      CROSS JOIN unnest(ARRAY['ACCESS SHARE', 'ROW SHARE', 'ROW EXCLUSIVE', 'SHARE UPDATE EXCLUSIVE', 'SHARE', 'SHARE ROW EXCLUSIVE',
        'EXCLUSIVE', 'ACCESS EXCLUSIVE']) AS m (mode)
      WHERE pg_temp.error_of(format('LOCK TABLE %s IN %s MODE', t.name, m.mode)) IS DISTINCT FROM CASE WHEN t.name ~ '^_sluice_locks'
        THEN '42501: permission denied for schema _sluice_locks'
        ELSE format('42501: permission denied for table %s', split_part(t.name, '.', 2)) END$$,
    'locking a private table is refused, in any mode'
);
SELECT throws_ok(
    $$PREPARE hold AS SELECT FROM _sluice_locks.gate FOR UPDATE$$, '42501', 'permission denied for schema _sluice_locks',
    'nor can it be had without privilege on it, as that of other tables can'
);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT 1 AS a')$$,
    '42501', 'permission denied for function create_stream_table', 'calling one is refused'
);
SELECT throws_ok(
    $$SELECT * FROM sluice.nodes$$, '42501', 'permission denied for view nodes', 'reading a view is refused'
);
SELECT throws_ok(
    $$SELECT * FROM _sluice.node$$, '42501', 'permission denied for table node', 'reading a private table is refused'
);
SELECT is_empty(
    $$SELECT c.command
      FROM unnest(ARRAY['create_stream_table', 'alter_stream_table', 'drop_stream_table', 'refresh_stream_table',
        'explain_stream_table', 'bulk_create', 'schedule_refresh', 'schedule', 'unschedule', 'run_now', 'reset', 'pause', 'unpause',
        'advance_watermark', 'create_watermark_group', 'drop_watermark_group']) AS c (command)
      WHERE pg_temp.error_of(format('INSERT INTO _sluice.request (command, arguments) VALUES (%L, %L)', c.command, '{"name": "her_job"}'))
        IS DISTINCT FROM format('42501: permission denied for function %s', c.command)$$,
    'the door asks for the same grants'
);
SELECT throws_ok(
    $$INSERT INTO _sluice.request (command, arguments) VALUES ('forget_everything', '{}')$$,
    '42883', 'command "forget_everything" does not exist', 'the door knows only public functions'
);
SELECT throws_ok(
    $$SELECT _sluice.unwrap(_sluice.invoke('schedule', jsonb_build_object('session', _sluice.session_settings(), 'name', 'mine',
        'schedule', 'manual', 'command', 'SELECT 1', 'transactional', true, 'catch_up', 1, 'priority', 0, 'lock_timeout', NULL,
        'refresh_timeout', NULL, 'watermark_group', NULL)))$$,
    '42501', 'permission denied for function schedule', 'the package, called directly, asks for the same grants'
);
SELECT throws_ok(
    $$SELECT _sluice.invoke_privileged('settle', '{"pgt_ids": [], "graph": true}')$$,
    '42501', 'permission denied for function invoke_privileged', 'its privileged part is closed'
);
SELECT throws_ok(
    $$SELECT _sluice.perform(gen_random_uuid(), 1, now(), 1, NULL, NULL)$$,
    '42501', 'permission denied for function perform', 'so is running a node'
);
SELECT throws_ok(
    $$SELECT _sluice.run_as(10, 'public', 'SELECT 1', false)$$,
    '42501', 'permission denied for function run_as', 'so is running SQL as somebody'
);
RESET ROLE;

-- Who asks can't be forged
SET LOCAL ROLE sluice_test_mallory;
SELECT throws_ok(
    $$INSERT INTO _sluice.request (command, arguments, caller) VALUES ('reset', '{"name": "her_job"}', 'sluice_test_alice')$$,
    '42501', 'permission denied for view request', 'a caller can''t name another caller'
);
CREATE VIEW forged AS SELECT command, arguments, caller FROM _sluice.request;
ALTER VIEW forged ALTER COLUMN caller SET DEFAULT 'sluice_test_alice';
SELECT throws_ok(
    $$INSERT INTO forged (command, arguments) VALUES ('reset', '{"name": "her_job"}')$$,
    '42501', 'must be owner of "her_job"', 'nor through the default of a view of its own over the door'
);
CREATE VIEW forged_root AS SELECT command, arguments, caller FROM _sluice.request;
ALTER VIEW forged_root ALTER COLUMN caller SET DEFAULT 'postgres';
SELECT pg_temp.error_of($$INSERT INTO forged_root (command, arguments) VALUES ('schedule', '{"name": "root_job", "schedule": "manual",
        "command": "SELECT 1", "transactional": true, "catch_up": 1, "priority": 0, "session": {"search_path": "public"}}')$$) \g /dev/null
RESET ROLE;
SELECT is_empty(
    $$SELECT job_name FROM _sluice.node WHERE job_owner = 'postgres'::regrole$$, 'such a view makes no job of a superuser'
);
SET LOCAL ROLE sluice_test_mallory;

-- With the grants: only one's own
SELECT throws_ok(
    $$SELECT sluice.alter_stream_table('hers', schedule => '5m')$$, '42501', 'must be owner of "hers"', 'alter_stream_table: another''s'
);
SELECT throws_ok(
    $$SELECT sluice.drop_stream_table('hers')$$, '42501', 'must be owner of "hers"', 'drop_stream_table: another''s'
);
SELECT throws_ok(
    $$SELECT sluice.refresh_stream_table('hers')$$, '42501', 'must be owner of "hers"', 'refresh_stream_table: another''s'
);
SELECT throws_ok(
    $$SELECT sluice.explain_stream_table('hers')$$, '42501', 'must be owner of "hers"', 'explain_stream_table: another''s'
);
SELECT throws_ok(
    $$SELECT sluice.reset('her_job')$$, '42501', 'must be owner of "her_job"', 'reset: another''s'
);
SELECT throws_ok(
    $$SELECT sluice.run_now('her_job')$$, '42501', 'must be owner of "her_job"', 'run_now: another''s'
);
SELECT throws_ok(
    $$SELECT sluice.unschedule('her_job')$$, '42501', 'must be owner of "her_job"', 'unschedule: another''s job'
);
SELECT throws_ok(
    $$SELECT sluice.unschedule('her_view')$$, '42501', 'must be owner of "her_view"', 'unschedule: another''s materialized view'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.schedule('her_job', 'manual', 'DROP TABLE hers')$$),
    E'42710: job "her_job" already exists\nDETAIL: It belongs to another role.', 'schedule: another''s job'
);
SELECT throws_ok(
    $$SELECT sluice.schedule_refresh('her_view', '5m')$$, '42501', 'must be owner of "her_view"', 'schedule_refresh: another''s schedule'
);
SELECT throws_ok(
    $$SELECT sluice.schedule_refresh('her_other_view', '5m')$$,
    '42501', 'must be owner of relation public.her_other_view', 'schedule_refresh: another''s materialized view'
);
SELECT throws_ok(
    format($$INSERT INTO _sluice.request (command, arguments) VALUES ('create_stream_table', '{"relid": %s, "query": "SELECT 1", "schedule": "manual"}')$$,
        'src'::regclass::oid),
    '42501', 'must be owner of relation public.src', 'the door takes no table of another for a stream table'
);
SELECT throws_ok(
    $$CALL sluice.run('0')$$, '42501', 'permission denied for procedure lead', 'run(): only for superusers, whatever is granted'
);
SELECT throws_ok(
    $$CALL sluice.serve_metrics('0')$$, '42501', 'permission denied for procedure serve', 'and so is serve_metrics()'
);
RESET ROLE;
SELECT results_eq(
    $$SELECT * FROM _sluice.node WHERE job_name IS DISTINCT FROM 'root_job' ORDER BY pgt_id$$, 'SELECT * FROM before ORDER BY pgt_id',
    'after all this the nodes are as before'
);

SET LOCAL ROLE sluice_test_mallory;
CREATE TABLE his (id integer);
SELECT throws_ok(
    $$SELECT sluice.create_stream_table('t', 'SELECT id FROM src')$$, '42501', 'permission denied for table src', 'a grant on a function gives no right on data'
);
SELECT lives_ok($$SELECT sluice.create_stream_table('copy', 'SELECT id FROM his', 'manual')$$, 'its own table is fine');
SELECT lives_ok($$SELECT sluice.alter_stream_table('copy', schedule => '5m')$$, 'to change');
SELECT is(sluice.refresh_stream_table('copy'), 'no_change', 'to refresh');
RESET ROLE;
GRANT SELECT ON copy TO sluice_test_alice;
SET LOCAL ROLE sluice_test_alice;
SELECT sluice.create_stream_table('hers_of_his', 'SELECT id FROM copy', 'manual') \g /dev/null
SET LOCAL ROLE sluice_test_mallory;
SELECT throws_ok(
    $$SELECT sluice.drop_stream_table('copy', true)$$,
    '42501', 'must be owner of table hers_of_his', 'cascade => true drops no table of another'
);
RESET ROLE;
SET LOCAL ROLE sluice_test_deputy;
SELECT lives_ok($$SELECT sluice.reset('her_job')$$, 'a member of the owner''s role acts as the owner');
RESET ROLE;
REVOKE EXECUTE ON FUNCTION sluice.create_stream_table FROM sluice_test_mallory;
SET LOCAL ROLE sluice_test_mallory;
SELECT throws_ok(
    $$SELECT sluice.bulk_create('[{"name": "b", "query": "SELECT 1 AS a"}]')$$,
    '42501', 'permission denied for function create_stream_table', 'bulk_create() needs the right to create too'
);
SELECT has_table('public', 'copy', 'and its own table is still there');
RESET ROLE;
\ir finish.psql
