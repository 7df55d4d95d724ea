-- The lease of the control database: one leader, under an epoch that fences all that it does.
\ir setup.psql
SELECT plan(26);

CREATE FUNCTION pg_temp.lapse() RETURNS void LANGUAGE sql AS $$
    UPDATE _sluice.lease SET expires_at = clock_timestamp() - interval '1 ms'
$$;
CREATE FUNCTION pg_temp.gate() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(l.mode, ' ' ORDER BY l.mode) FROM pg_locks AS l WHERE l.relation = '_sluice_locks.gate'::regclass AND l.granted
$$;
UPDATE _sluice.lease SET epoch = 41;

SELECT results_eq(
    'SELECT acquired, epoch, wait_seconds FROM _sluice.acquire_lease(11, ''2024-01-01'', 3600)',
    'VALUES (true, 42::bigint, 0::double precision)',
    'a free lease is taken, under the next epoch'
);
SELECT results_eq(
    $$SELECT pid, backend_start, renewed_at <= clock_timestamp(), expires_at - renewed_at BETWEEN interval '3599 s' AND interval '3601 s' FROM _sluice.lease$$,
    $$VALUES (11, timestamptz '2024-01-01', true, true)$$,
    'it names its holder and ends after its time'
);
SELECT results_eq(
    'SELECT acquired, epoch, wait_seconds BETWEEN 3000 AND 3600 FROM _sluice.acquire_lease(12, ''2024-01-01'', 3600)',
    'VALUES (false, 42::bigint, true)',
    'while it lives nobody else gets it, and learns how long that is'
);
SELECT is((SELECT pid FROM _sluice.lease), 11, 'the holder is as before');
SELECT throws_ok('SELECT * FROM _sluice.renew_lease(41, 10)', 'SL001', 'leadership lost', 'a former epoch can''t renew it');
SELECT throws_ok('SELECT * FROM _sluice.renew_lease(43, 10)', 'SL001', 'leadership lost', 'nor a future one');
SELECT throws_ok('SELECT * FROM _sluice.release_lease(41)', 'SL001', 'leadership lost', 'nor release it');
SELECT lives_ok('SELECT _sluice.renew_lease(42, 7200)', 'its holder can renew it');
SELECT ok((SELECT expires_at > clock_timestamp() + interval '3601 s' FROM _sluice.lease), 'from now on');
SELECT lives_ok('SELECT _sluice.enter_gate(42)', 'a live epoch enters the gate');
SELECT is(
    pg_temp.gate(), 'ExclusiveLock RowShareLock', 'and holds it with others, where who takes the lease holds it alone, but for those who read'
);

SELECT pg_temp.lapse() \g /dev/null
SELECT is(
    pg_temp.error_of('SELECT _sluice.enter_gate(42)'),
    E'SL001: leadership lost\nDETAIL: The lease of epoch 42 has ended or another leader holds it.',
    'a lapsed one does not'
);
SELECT throws_ok('SELECT _sluice.renew_lease(42, 10)', 'SL001', 'leadership lost', 'a lapsed lease is lost, not renewed');
SELECT throws_ok('SELECT _sluice.release_lease(42)', 'SL001', 'leadership lost', 'nor released');
SELECT results_eq(
    'SELECT acquired, epoch FROM _sluice.acquire_lease(12, ''2024-01-01'', 3600)', 'VALUES (true, 43::bigint)', 'it goes to the next who asks'
);
SELECT throws_ok('SELECT _sluice.enter_gate(42)', 'SL001', 'leadership lost', 'and the former leader stays out');
SELECT lives_ok('SELECT _sluice.release_lease(43)', 'a clean end releases it');
SELECT results_eq(
    'SELECT epoch, pid, backend_start, expires_at FROM _sluice.lease',
    'VALUES (43::bigint, NULL::integer, NULL::timestamptz, NULL::timestamptz)',
    'the epoch stays, the holder goes'
);
SELECT throws_ok('SELECT _sluice.enter_gate(43)', 'SL001', 'leadership lost', 'a released lease lets nobody in');
SELECT results_eq(
    'SELECT acquired, epoch FROM _sluice.acquire_lease(13, ''2024-01-01'', 3600)', 'VALUES (true, 44::bigint)', 'and is free at once'
);

-- The clock was wrong, a day ahead, and nobody has renewed the lease since it is right
SELECT _sluice.renew_lease(44, 10) \g /dev/null
UPDATE _sluice.lease SET renewed_at = renewed_at + interval '9 s', expires_at = expires_at + interval '9 s';
SELECT is((SELECT acquired FROM _sluice.acquire_lease(14, '2024-01-01', 10)), false, 'a clock that goes back by less than a lease takes it from nobody');
UPDATE _sluice.lease SET renewed_at = renewed_at + interval '1 d', expires_at = expires_at + interval '1 d';
SELECT is(_sluice.leader_lives(), false, 'a lease that was renewed in the future is no sign of life');
SELECT results_eq(
    'SELECT acquired, epoch FROM _sluice.acquire_lease(14, ''2024-01-01'', 10)', 'VALUES (true, 45::bigint)', 'and is free'
);

SELECT throws_ok('INSERT INTO _sluice.lease DEFAULT VALUES', '23505', NULL, 'there is one lease');
SELECT throws_ok('INSERT INTO _sluice.lease (singleton) VALUES (false)', '23514', NULL, 'and can be no other');
SELECT throws_ok('UPDATE _sluice.lease SET pid = NULL', '23514', NULL, 'a holder is whole or absent');
\ir finish.psql
