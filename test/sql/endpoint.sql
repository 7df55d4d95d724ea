-- The endpoint of the metrics: where it may listen, its pg_cron entry, and what health_check() says.
\ir setup.psql
\ir cron.psql
SELECT plan(60);

CREATE FUNCTION pg_temp.jobs() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s|%s|%s', jobname, command, active), ', ' ORDER BY jobname) FROM cron.job
$$;
CREATE FUNCTION pg_temp.refused(_address text) RETURNS text LANGUAGE sql AS $$
    SELECT pg_temp.error_of(format('SELECT sluice.configure(%L, %L, cluster => true)', 'metrics_listen', _address))
$$;
CREATE FUNCTION pg_temp.health() RETURNS text LANGUAGE sql AS $$
    SELECT format('%s: %s', h.status, h.detail) FROM _sluice.endpoint_health(_sluice.endpoint_state()) AS h
$$;
CREATE FUNCTION pg_temp.served_by() RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN pid = pg_backend_pid() THEN 'this session' ELSE pid::text END FROM _sluice.endpoint
$$;
SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid() \gset
SELECT oid AS own FROM pg_database WHERE datname = current_database() \gset
SELECT oid AS second FROM pg_database WHERE datname = 'template1' \gset
SELECT extversion AS version FROM pg_extension WHERE extname = 'pg_sluice' \gset

-- Addresses
SELECT results_eq(
    $$SELECT a.given, p.host, p.port
      FROM unnest(ARRAY['127.0.0.1:9188', 'localhost:1', '0.0.0.0:65535', '[::1]:9188', '[::]:80', '[fe80::A:1]:7', '[::ffff:10.0.0.1]:9', '10.1.2.3:0009'])
        WITH ORDINALITY AS a (given, n) CROSS JOIN _sluice.parse_address(a.given) AS p ORDER BY a.n$$,
    $$VALUES ('127.0.0.1:9188', '127.0.0.1', 9188), ('localhost:1', '127.0.0.1', 1), ('0.0.0.0:65535', '0.0.0.0', 65535),
        ('[::1]:9188', '::1', 9188), ('[::]:80', '::', 80), ('[fe80::A:1]:7', 'fe80::a:1', 7), ('[::ffff:10.0.0.1]:9', '::ffff:10.0.0.1', 9),
        ('10.1.2.3:0009', '10.1.2.3', 9)$$,
    'IP addresses and localhost, with a port'
);
SELECT results_eq($$SELECT host, port FROM _sluice.parse_address('off')$$, 'VALUES (NULL::text, NULL::integer)', 'or off');
SELECT is(
    pg_temp.refused(a), format(E'22023: invalid value for setting "metrics_listen": "%s"\nHINT: The value is ''off'', or an IP address or '
        'localhost with a port, such as ''127.0.0.1:9188'' or ''[::1]:9188''.', a),
    format('"%s" is refused', replace(a, E'\n', '\n'))
)
FROM unnest(ARRAY[
    '', 'on', '9188', ':9188', '127.0.0.1', '127.0.0.1:', '127.0.0.1:0', '127.0.0.1:65536', '127.0.0.1:99999', '127.0.0.1:-1', '127.0.0.1:http',
    '127.0.0.256:9188', '127.0.0.1/8:9188', '127.1:9188', '::1:9188', '[::1]', '[::1:9188', '[127.0.0.1]:9188', '[::g]:1', '[1:2]:3',
    'example.org:9188', 'Localhost:9188', ' 127.0.0.1:9188', '127.0.0.1:9188 ', E'127.0.0.1:9188\n', '[fe80::1%eth0]:80', '٣.0.0.1:9188'
]) AS a;
SELECT is(
    pg_temp.error_of($$SELECT sluice.configure('metrics_listen', '127.0.0.1:9188')$$),
    E'22023: setting "metrics_listen" can only be set for the whole server\nHINT: Pass cluster => true.', 'it is a setting of the server'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.configure('metrics_timeout', '61 s', cluster => true)$$),
    '22023: 61 s is outside the valid range for setting "metrics_timeout" (100 ms .. 60 s)', 'a collection has a bound'
);
SELECT is_empty($$SELECT name FROM sluice.settings WHERE name LIKE 'metrics%' AND value <> "default"$$, 'after all this nothing is stored');

-- The pg_cron entries
SELECT _sluice.store_setting('cluster', 'metrics_listen', '127.0.0.1:9188') \g /dev/null
SELECT is(pg_temp.jobs(), NULL, 'without a member there is nothing to serve');
SELECT is((SELECT host FROM _sluice.endpoint_settings()), NULL, 'nor to listen on');
SELECT _sluice.join_database(:own, 'x', :'version'), _sluice.join_database(:second, 'x', :'version') \g /dev/null
SELECT is(pg_temp.jobs(), 'pg_sluice|CALL sluice.run()|t, pg_sluice metrics|CALL sluice.serve_metrics()|t', 'with one there are two entries');
SELECT results_eq(
    'SELECT host, port, address, timeout_seconds, version FROM _sluice.endpoint_settings()',
    format($$VALUES ('127.0.0.1', 9188, '127.0.0.1:9188', 5::double precision, %L)$$, :'version'), 'what the endpoint looks at'
);
SELECT is(pg_temp.health(), 'warn: not served on 127.0.0.1:9188 yet', 'pg_cron has to start it');
UPDATE cron.job SET active = false WHERE jobname = 'pg_sluice metrics';
SELECT is(
    (SELECT h.hint FROM _sluice.endpoint_health(_sluice.endpoint_state()) AS h),
    'pg_cron does not start it, since its entry "pg_sluice metrics" is inactive; sluice.start() makes it what it should be.', 'unless it will not'
);
SELECT _sluice.join_database(:own, 'x', :'version') \g /dev/null
SELECT is(pg_temp.jobs(), 'pg_sluice|CALL sluice.run()|t, pg_sluice metrics|CALL sluice.serve_metrics()|t', 'which it then does');
SELECT _sluice.store_setting('cluster', 'metrics_listen', 'off') \g /dev/null
SELECT is(pg_temp.jobs(), 'pg_sluice|CALL sluice.run()|t', 'off takes the entry away');
SELECT _sluice.store_setting('cluster', 'metrics_listen', '[::1]:1') \g /dev/null
SELECT is(pg_temp.jobs(), 'pg_sluice|CALL sluice.run()|t, pg_sluice metrics|CALL sluice.serve_metrics()|t', 'and an address brings it back');
DELETE FROM cron.job WHERE jobname = 'pg_sluice';
SELECT _sluice.store_setting('cluster', 'metrics_listen', '[::1]:1') \g /dev/null
SELECT is(pg_temp.jobs(), 'pg_sluice metrics|CALL sluice.serve_metrics()|t', 'the entry of the leader is none of its business');
SELECT _sluice.join_database(:own, 'x', :'version'), _sluice.leave_database(:second) \g /dev/null
SELECT is((SELECT count(*) FROM cron.job), 2::bigint, 'both stay while there is a member');

-- An address that can't be had
SELECT _sluice.record_endpoint('cannot serve') \g /dev/null
SELECT results_eq(
    'SELECT event, severity, node, message FROM sluice.alerts WHERE closed_at IS NULL',
    $$VALUES ('metrics_failed', 'warning', current_database()::text COLLATE "default", 'cannot serve')$$, 'is an alert'
);
SELECT is(pg_temp.health(), 'warn: cannot serve', 'and shows in health_check()');
SELECT _sluice.begin_serving(pg_backend_pid(), :'backend_start'), _sluice.record_endpoint(NULL) \g /dev/null
SELECT is(pg_temp.health(), 'ok: served on [::1]:1', 'until one listens');
SELECT _sluice.record_endpoint('cannot serve') \g /dev/null
SELECT _sluice.leave_database(:own) \g /dev/null
SELECT is(pg_temp.jobs(), NULL, 'the last member takes both entries along');
SELECT is_empty('SELECT event FROM sluice.alerts WHERE closed_at IS NULL', 'and ends the alert');

-- One session serves
SELECT ok(NOT _sluice.begin_serving(1, now()), 'while one serves no other does');
SELECT ok(_sluice.begin_serving(pg_backend_pid(), :'backend_start'), 'it can itself, once more');
SELECT is(pg_temp.served_by(), 'this session', 'it is on record');
SELECT _sluice.end_serving(pg_backend_pid(), :'backend_start'::timestamptz - interval '1 us') \g /dev/null
SELECT is(pg_temp.served_by(), 'this session', 'it is for nobody else to end');
SELECT _sluice.end_serving(pg_backend_pid(), :'backend_start') \g /dev/null
SELECT is(pg_temp.served_by(), NULL, 'at its end nobody is');
SELECT ok(_sluice.begin_serving(pg_backend_pid(), :'backend_start'::timestamptz - interval '1 us'), 'then another can');
SELECT is((SELECT _sluice.endpoint_state() ->> 'lives'), 'false', 'a session that is gone serves no more, though another one has its pid');
SELECT ok(_sluice.begin_serving(pg_backend_pid(), :'backend_start'), 'nor does it keep others out');
SELECT is(current_setting('synchronous_commit'), 'off', 'no standby that is waited for does either');
SELECT throws_ok('INSERT INTO _sluice.endpoint DEFAULT VALUES', '23505', NULL, 'there is one endpoint');
SELECT throws_ok('INSERT INTO _sluice.endpoint (singleton) VALUES (false)', '23514', NULL, 'and can be no other');
SELECT throws_ok('UPDATE _sluice.endpoint SET pid = NULL', '23514', NULL, 'a session is whole or absent');
\ir finish.psql
