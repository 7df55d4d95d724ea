-- How it all fares, in rows that a monitoring check can read.

CREATE FUNCTION sluice.health_check()
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    WITH control AS MATERIALIZED (
        SELECT r.*
        FROM jsonb_to_record(_sluice.control('health_of', jsonb_build_object('_db_oid', _sluice.database_oid()))) AS r (
            leader_pid integer, leader_alive boolean, member_state text, last_tick_at timestamptz,
            error text, spawn_error text, tick_bound interval, queued bigint, oldest_queued_at timestamptz,
            worker_limit integer, drain boolean
        )
    )
    SELECT 'leader',
        CASE WHEN c.leader_alive THEN 'ok' ELSE 'critical' END,
        CASE WHEN c.leader_alive THEN format('process %s leads', c.leader_pid) ELSE 'no leader holds the lease' END,
        CASE WHEN NOT c.leader_alive THEN 'pg_cron starts one within a minute; otherwise see sluice.preflight() and cron.job_run_details.' END
    FROM control AS c
    UNION ALL
    SELECT 'database',
        CASE
            WHEN c.member_state = 'scheduled' AND c.last_tick_at > clock_timestamp() - c.tick_bound
                THEN CASE WHEN c.spawn_error IS NULL THEN 'ok' ELSE 'critical' END
            WHEN c.member_state IS NULL THEN 'warn'
            WHEN c.member_state = 'joining' THEN 'warn'
            ELSE 'critical'
        END,
        CASE
            WHEN c.member_state IS NULL THEN 'this database is not scheduled'
            ELSE format('%s, last tick %s%s', c.member_state, COALESCE(c.last_tick_at::text, 'never'), ': ' || COALESCE(c.error, c.spawn_error))
        END,
        CASE WHEN c.member_state IS NULL THEN 'Call sluice.start().' END
    FROM control AS c
    UNION ALL
    SELECT 'workers',
        CASE WHEN c.worker_limit = 0 THEN 'warn' ELSE 'ok' END,
        CASE WHEN c.worker_limit = 0 THEN 'serial mode: the leader runs nodes one after the other' ELSE format('up to %s', c.worker_limit) END,
        CASE WHEN c.worker_limit = 0 THEN 'See sluice.effective_limit() for what binds.' END
    FROM control AS c
    UNION ALL
    SELECT 'queue',
        CASE WHEN c.oldest_queued_at < clock_timestamp() - interval '5 min' AND NOT c.drain THEN 'warn' ELSE 'ok' END,
        format('%s queued%s', c.queued, ', the oldest since ' || c.oldest_queued_at),
        CASE WHEN c.oldest_queued_at < clock_timestamp() - interval '5 min' AND NOT c.drain THEN 'See sluice.queue() and sluice.workers().' END
    FROM control AS c
    UNION ALL
    SELECT 'drain',
        CASE WHEN c.drain THEN 'warn' ELSE 'ok' END,
        CASE WHEN c.drain THEN 'a drain is in force' ELSE 'none' END,
        CASE WHEN c.drain THEN 'See sluice.drain_status(); sluice.resume() ends it.' END
    FROM control AS c
    UNION ALL
    SELECT 'nodes',
        CASE WHEN count(*) = 0 THEN 'ok' ELSE 'critical' END,
        CASE WHEN count(*) = 0 THEN 'all can run'
            ELSE string_agg(format('"%s" is %s', _sluice.node_name(n), n.status), ', ' ORDER BY n.pgt_id) END,
        CASE WHEN count(*) > 0 THEN 'See sluice.history for the reason; sluice.reset() lifts it.' END
    FROM _sluice.node AS n
    WHERE n.status IN ('suspended', 'quarantined')
$$;
COMMENT ON FUNCTION sluice.health_check() IS
'The state of the scheduler and of this database: one row a check, with ok, warn or critical, the detail, and what to do. For monitoring: SELECT … WHERE status <> ''ok''.';

CREATE FUNCTION _sluice.health_of(_db_oid oid)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'leader_pid', l.pid,
        'leader_alive', COALESCE(l.expires_at > clock_timestamp(), false),
        'member_state', m.state,
        'last_tick_at', m.last_tick_at,
        'error', m.error,
        'spawn_error', m.spawn_error,
        -- A database without a connection of its own is looked at within ten intervals.
        'tick_bound', make_interval(secs => 60 + 10 * _sluice.setting('scheduler_interval')::double precision),
        'queued', (SELECT count(*) FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued'),
        'oldest_queued_at', (SELECT min(q.enqueued_at) FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued'),
        'worker_limit', _sluice.worker_limit(),
        'drain', _sluice.drain_in_force(_db_oid)
    )
    FROM _sluice.lease AS l
    LEFT JOIN _sluice.member AS m ON m.db_oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.health_of(oid) IS 'What the control database knows of a member''s health';
