-- How it all fares, in rows that a monitoring check can read.

CREATE FUNCTION _sluice.late_nodes()
RETURNS TABLE (pgt_id bigint, name text, lag interval, bound interval, is_given boolean)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT l.pgt_id, l.name, l.lag, l.bound, l.is_given
    FROM (
        SELECT n.pgt_id, _sluice.node_name(n) AS name,
            clock_timestamp() - COALESCE(s.last_success_at, n.created_at) AS lag,
            -- Where none is given: two fires missed, and a minute for the run.
            COALESCE(n.max_lag, 3 * n.fire_step + interval '1 min') AS bound,
            n.max_lag IS NOT NULL AS is_given
        FROM _sluice.node AS n
        LEFT JOIN _sluice.node_state AS s ON s.pgt_id = n.pgt_id
        WHERE n.max_lag IS NOT NULL OR n.status = 'active'
    ) AS l
    WHERE l.lag > l.bound
$$;
COMMENT ON FUNCTION _sluice.late_nodes() IS
    'Nodes whose last successful run began longer ago than their max_lag (is_given) or, without one, than their schedule lets expect';

CREATE FUNCTION _sluice.first_ten(_texts text[])
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_to_string(_texts[:10], ', ')
        || CASE WHEN cardinality(_texts) > 10 THEN format(', and %s more', cardinality(_texts) - 10) ELSE '' END
$$;
COMMENT ON FUNCTION _sluice.first_ten(text[]) IS 'As a list that stays readable: the first ten, and how many more there are; NULL for NULL';

CREATE FUNCTION _sluice.control_checks(_health jsonb)
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH control AS MATERIALIZED (
        SELECT r.*,
            r.oldest_queued_at < clock_timestamp() - interval '5 min' AND NOT r.drain AS queue_stands,
            r.queued >= r.max_queue_depth AS queue_is_full,
            -- A tick of the future was by a clock that has been set back since: it says nothing.
            r.last_tick_at > clock_timestamp() - r.tick_bound
                AND r.last_tick_at <= _sluice.latest_past(clock_timestamp()) AS ticks
        FROM jsonb_to_record(_health) AS r (
            leader_pid integer, leader_alive boolean, leader_entry text, member_state text, last_tick_at timestamptz, last_tick_ms numeric,
            failures integer, error text, spawn_error text, tick_bound interval, queued bigint, running bigint,
            oldest_queued_at timestamptz, max_queue_depth bigint, worker_limit integer, stuck text, drain boolean, drain_end text, unscheduled jsonb,
            members bigint, endpoint jsonb
        )
    )
    SELECT 'leader',
        CASE WHEN NOT c.leader_alive THEN 'critical' WHEN c.leader_entry <> 'active' THEN 'warn' ELSE 'ok' END,
        CASE
            WHEN NOT c.leader_alive THEN 'no leader holds the lease'
            ELSE format('process %s leads%s', c.leader_pid, CASE WHEN c.leader_entry <> 'active' THEN ', and none will follow it' END)
        END,
        CASE
            WHEN c.leader_entry <> 'active' THEN format('pg_cron starts none, since its entry "pg_sluice" is %s; sluice.start() makes it what it should be.', c.leader_entry)
            WHEN c.leader_alive THEN NULL
            WHEN c.leader_entry IS NULL THEN 'No database is scheduled; sluice.start() has pg_cron start one.'
            ELSE 'pg_cron starts one within a minute; otherwise see sluice.preflight() and cron.job_run_details.'
        END
    FROM control AS c
    UNION ALL
    SELECT 'members',
        CASE
            WHEN jsonb_path_exists(c.unscheduled, '$[*] ? (@.state != "joining")') THEN 'critical'
            WHEN c.unscheduled IS NOT NULL THEN 'warn'
            ELSE 'ok'
        END,
        COALESCE(
            (
                SELECT string_agg(format('"%s": %s', e ->> 'database', concat_ws(', ', e ->> 'state', e ->> 'error')), '; ')
                FROM jsonb_array_elements(c.unscheduled) AS e
            ),
            format('%s, all scheduled', c.members)
        ),
        CASE WHEN c.unscheduled IS NOT NULL THEN 'See sluice.databases(), and sluice.health_check() in each of them.' END
    FROM control AS c
    -- It is told for the whole server, in its control database.
    WHERE c.members IS NOT NULL
    UNION ALL
    SELECT 'database',
        CASE
            WHEN c.member_state IS NULL OR c.member_state = 'joining' THEN 'warn'
            WHEN c.member_state = 'scheduled' AND c.ticks AND c.spawn_error IS NULL THEN 'ok'
            ELSE 'critical'
        END,
        CASE
            WHEN c.member_state IS NULL THEN 'this database is not scheduled'
            ELSE format(
                '%s, last tick %s%s%s',
                c.member_state,
                COALESCE(c.last_tick_at::text || format(' in %s ms', round(c.last_tick_ms, 1)), 'never'),
                CASE WHEN c.failures > 1 THEN format(', %s failures in a row', c.failures) END,
                ': ' || COALESCE(c.error, c.spawn_error)
            )
        END,
        CASE
            WHEN c.member_state IS NULL THEN 'Call sluice.start().'
            WHEN c.member_state = 'joining' THEN 'The leader takes it up with its next look; otherwise see sluice.preflight().'
            WHEN c.member_state = 'version_mismatch' THEN 'Run ALTER EXTENSION pg_sluice UPDATE here and in the control database.'
            WHEN c.member_state = 'failed' THEN 'It is tried again every five seconds; the alert in the control database has the details, see sluice.alerts there.'
            WHEN NOT COALESCE(c.ticks, false) THEN 'Is there a leader? See sluice.databases() and sluice.preflight().'
            WHEN c.spawn_error IS NOT NULL THEN 'No worker can be started; see sluice.preflight() and sluice.effective_limit().'
        END
    FROM control AS c
    UNION ALL
    SELECT 'workers',
        CASE WHEN c.stuck IS NOT NULL THEN 'critical' WHEN c.worker_limit = 0 THEN 'warn' ELSE 'ok' END,
        CASE
            WHEN c.stuck IS NOT NULL THEN c.stuck
            WHEN c.worker_limit = 0 THEN 'serial mode: the leader runs nodes one after the other'
            ELSE format('up to %s', c.worker_limit)
        END,
        CASE
            WHEN c.stuck IS NOT NULL THEN 'Only the code that it executes can end it, or a restart of the server.'
            WHEN c.worker_limit = 0 THEN 'See sluice.effective_limit() for what binds.'
        END
    FROM control AS c
    UNION ALL
    SELECT 'queue',
        CASE WHEN c.queue_stands OR c.queue_is_full THEN 'warn' ELSE 'ok' END,
        format('%s queued, %s running%s', c.queued, c.running, ', the oldest queued since ' || c.oldest_queued_at),
        CASE
            WHEN c.queue_is_full THEN 'It is full (max_queue_depth), and what is due waits; see sluice.queue() and sluice.workers().'
            WHEN c.queue_stands THEN 'See sluice.queue() and sluice.workers().'
        END
    FROM control AS c
    UNION ALL
    SELECT 'drain',
        CASE WHEN c.drain THEN 'warn' ELSE 'ok' END,
        CASE WHEN c.drain THEN 'a drain is in force' ELSE 'none' END,
        CASE WHEN c.drain THEN format('See sluice.drain_status(); end it with %s.', c.drain_end) END
    FROM control AS c
    UNION ALL
    SELECT e."check", e.status, e.detail, e.hint FROM control AS c CROSS JOIN _sluice.endpoint_health(c.endpoint) AS e
$$;
COMMENT ON FUNCTION _sluice.control_checks(jsonb) IS 'The rows of health_check() that come of health_of()';

CREATE FUNCTION _sluice.member_checks(_is_held boolean, _paused bigint[])
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH stale AS MATERIALIZED (
        SELECT d AS pgt_id FROM _sluice.downstream(_paused) AS d WHERE d <> ALL (_paused)
    ), late AS MATERIALIZED (
        SELECT l.*
        FROM _sluice.late_nodes() AS l
        -- What is held back is late by somebody's will, which other rows tell; a given bound holds all the same.
        WHERE l.is_given
            OR NOT (_is_held OR l.pgt_id = ANY (_paused) OR l.pgt_id IN (SELECT s.pgt_id FROM stale AS s))
    ), oldest AS (
        SELECT o.holder, o.since
        FROM (
            SELECT format('process %s', a.pid) AS holder, a.xact_start AS since
            FROM pg_stat_activity AS a
            WHERE a.datid = _sluice.database_oid() AND a.xact_start IS NOT NULL
            UNION ALL
            SELECT format('prepared transaction "%s"', p.gid), p.prepared
            FROM pg_prepared_xacts AS p
            WHERE p.database = current_database()
        ) AS o
        WHERE o.since < clock_timestamp() - interval '1 h'
        ORDER BY o.since
        LIMIT 1
    )
    SELECT 'pauses',
        CASE WHEN p.paused IS NULL THEN 'ok' ELSE 'warn' END,
        COALESCE('paused: ' || p.paused || COALESCE('; stale for that: ' || p.stale, ''), 'none'),
        CASE WHEN p.paused IS NOT NULL THEN 'sluice.unpause() lets them run.' END
    FROM (
        SELECT
            string_agg(format('"%s"', _sluice.node_name(n)), ', ' ORDER BY n.pgt_id)
                FILTER (WHERE n.pgt_id = ANY (_paused)) AS paused,
            string_agg(format('"%s"', _sluice.node_name(n)), ', ' ORDER BY n.pgt_id)
                FILTER (WHERE n.pgt_id <> ALL (_paused)) AS stale
        FROM _sluice.node AS n
        WHERE n.pgt_id = ANY (_paused) OR n.pgt_id IN (SELECT s.pgt_id FROM stale AS s)
    ) AS p
    UNION ALL
    SELECT 'nodes',
        CASE WHEN bool_or(n.status <> 'active') THEN 'critical' WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        COALESCE(string_agg(
            CASE n.status
                WHEN 'active' THEN format(
                    '"%s" failed %s, with %s', _sluice.node_name(n),
                    CASE s.consecutive_errors WHEN 1 THEN 'once' ELSE format('%s times in a row', s.consecutive_errors) END, s.last_outcome
                )
                ELSE format('"%s" is %s', _sluice.node_name(n), n.status)
            END, ', ' ORDER BY n.pgt_id
        ), 'all can run'),
        NULLIF(concat_ws(
            ' ',
            CASE
                WHEN bool_or(n.status = 'suspended') THEN 'See sluice.history for the reason; sluice.reset() lifts it.'
                WHEN bool_or(n.status = 'active') THEN 'See sluice.history for the reason, and sluice.nodes for the remedy.'
            END,
            -- It was not run with such a value, so history knows nothing of it.
            CASE WHEN bool_or(n.status = 'quarantined') THEN 'See sluice.alerts for the reason; a valid schedule or sluice.reset() ends it.' END
        ), '')
    FROM _sluice.node AS n
    LEFT JOIN _sluice.node_state AS s ON s.pgt_id = n.pgt_id
    WHERE n.status IN ('suspended', 'quarantined') OR s.consecutive_errors > 0
    UNION ALL
    SELECT 'freshness',
        CASE WHEN bool_or(l.is_given) THEN 'critical' WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        COALESCE(
            _sluice.first_ten(array_agg(format(
                '"%s" succeeded %s ago (%s %s)', l.name, date_trunc('second', l.lag),
                CASE WHEN l.is_given THEN 'max_lag' ELSE 'expected within' END, date_trunc('second', l.bound)
            ) ORDER BY l.is_given DESC, l.pgt_id)),
            'no node is late'
        ),
        CASE WHEN count(*) > 0 THEN 'See sluice.history and sluice.queue() for what became of their runs; sluice.run_now() starts one.' END
    FROM late AS l
    UNION ALL
    SELECT 'clock',
        CASE WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        COALESCE(
            'ahead of the clock: ' || _sluice.first_ten(array_agg(
                concat(format('"%s"', a.name), ' waits until ' || a.waits_until) ORDER BY a.waits_until IS NULL, a.pgt_id
            )),
            'no node is ahead of the clock'
        ),
        CASE WHEN count(*) > 0
            THEN 'It was set back. A job waits until its last fire is past, sluice.run_now() runs it before; other nodes go on within a minute.' END
    FROM _sluice.nodes_ahead() AS a
    UNION ALL
    SELECT 'alerts',
        CASE WHEN bool_or(a.severity = 'critical') THEN 'critical' WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        CASE WHEN count(*) > 0
            THEN format('%s open: %s', count(*), string_agg(DISTINCT a.event, ', ' ORDER BY a.event))
            ELSE 'none is open'
        END,
        CASE WHEN count(*) > 0 THEN 'See sluice.alerts; docs/alerts.md says what to do about each.' END
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
    UNION ALL
    SELECT 'notifications',
        CASE WHEN NOT u.can_notify THEN 'critical' WHEN u.usage >= 0.5 THEN 'warn' ELSE 'ok' END,
        format('the server''s queue of notifications is %s %% full', round((100 * u.usage)::numeric))
            || CASE WHEN u.can_notify THEN '' ELSE ', alerts are not announced' END,
        CASE WHEN u.usage >= 0.5 OR NOT u.can_notify
            THEN 'A session that listens stays in a transaction, the oldest in pg_stat_activity; pg_terminate_backend() ends it.' END
    FROM (SELECT pg_notification_queue_usage() AS usage, _sluice.can_notify() AS can_notify) AS u
    UNION ALL
    SELECT 'transactions',
        CASE WHEN o.since IS NULL THEN 'ok' ELSE 'warn' END,
        CASE WHEN o.since IS NULL THEN 'none is old' ELSE format('the one of %s is open since %s', o.holder, o.since) END,
        CASE WHEN o.since IS NOT NULL THEN 'It keeps what others delete; see pg_stat_activity and pg_prepared_xacts, pg_terminate_backend() ends a session.' END
    FROM (SELECT) AS one
    LEFT JOIN oldest AS o ON true
    UNION ALL
    SELECT u."check", u.status, u.detail, u.hint FROM _sluice.upkeep_health() AS u
$$;
COMMENT ON FUNCTION _sluice.member_checks(boolean, bigint[]) IS
    'The rows of health_check() that come of this database itself; _is_held: nothing runs by somebody''s will, _paused: nor do these nodes';

CREATE FUNCTION _sluice.ask_health()
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_message text;
    v_detail text;
    v_hint text;
BEGIN
    RETURN jsonb_build_object(
        'health', _sluice.control('health_of', jsonb_build_object('_db_oid', _sluice.database_oid()))
    );
EXCEPTION
    -- Whatever it is, the rest can be told.
    WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS
            v_message = MESSAGE_TEXT, v_detail = PG_EXCEPTION_DETAIL, v_hint = PG_EXCEPTION_HINT;
        RETURN jsonb_build_object(
            'error', concat_ws(': ', v_message, NULLIF(v_detail, '')),
            'hint', COALESCE(NULLIF(v_hint, ''), 'See sluice.preflight().')
        );
END;
$$;
COMMENT ON FUNCTION _sluice.ask_health() IS 'What health_of() says in the control database, or why it does not answer';

CREATE FUNCTION sluice.health_check()
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    WITH answer AS MATERIALIZED (
        SELECT a -> 'health' AS health, a ->> 'error' AS error, a ->> 'hint' AS hint FROM _sluice.ask_health() AS a
    )
    SELECT 'control',
        CASE WHEN a.error IS NULL THEN 'ok' ELSE 'critical' END,
        COALESCE(a.error, format('the control database "%s" answers', _sluice.control_database())),
        a.hint
    FROM answer AS a
    UNION ALL
    SELECT c."check", c.status, c.detail, c.hint
    FROM answer AS a
    CROSS JOIN LATERAL _sluice.control_checks(a.health) AS c
    WHERE a.error IS NULL
    UNION ALL
    SELECT m."check", m.status, m.detail, m.hint
    FROM answer AS a
    CROSS JOIN LATERAL _sluice.member_checks(
        -- Without an answer nobody knows, and to be late is worth telling.
        a.error IS NULL AND ((a.health ->> 'drain')::boolean OR a.health ->> 'member_state' IS NULL),
        ARRAY(SELECT p.value::bigint FROM jsonb_array_elements_text(NULLIF(a.health -> 'paused', 'null')) AS p)
    ) AS m
$$;
COMMENT ON FUNCTION sluice.health_check() IS
'The state of the scheduler and of this database: one row a check, with ok, warn or critical, the detail, and what to do. For monitoring: SELECT ... WHERE status <> ''ok''.
Called in the control database it also tells of the member databases. It never fails for what it checks: where the control database does not answer, the row "control" says why and the rows about it are left out.
clock: active nodes that fired, ran, failed or were made at a time that lies in the future, since the clock was set back. The scheduler brings them back within a minute, all but jobs, which wait until their last fire is past: each fire of a job runs once.
freshness: a node is late, critical, when its last successful run began longer ago than its max_lag; one without max_lag, warn, after three times its interval and a minute, unless it is paused, drained, suspended or quarantined.';

CREATE FUNCTION _sluice.health_of(_db_oid oid)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'leader_pid', l.pid,
        'leader_alive', _sluice.leader_lives(),
        'leader_entry', _sluice.leader_entry(),
        'member_state', m.state,
        'last_tick_at', m.last_tick_at,
        'last_tick_ms', m.last_tick_ms,
        'failures', m.failures,
        'error', m.error,
        'spawn_error', m.spawn_error,
        -- A database without a connection of its own is looked at within ten intervals.
        'tick_bound', interval '1 min' + 10 * _sluice.interval_setting('scheduler_interval'),
        'queued', q.queued,
        'running', q.running,
        'oldest_queued_at', q.oldest_queued_at,
        'max_queue_depth', _sluice.setting('max_queue_depth'),
        'worker_limit', _sluice.worker_limit(),
        'stuck', (
            SELECT a.message FROM _sluice.alert AS a
            WHERE a.event = 'session_stuck' AND a.closed_at IS NULL AND a.node = _sluice.database_name(_db_oid)
        ),
        'drain', _sluice.is_draining(_db_oid),
        'drain_end', _sluice.drain_end(_db_oid),
        'endpoint', _sluice.endpoint_state(),
        'paused', (SELECT jsonb_agg(p.pgt_id) FROM _sluice.pause_in_force AS p WHERE p.db_oid = _db_oid)
    ) || CASE WHEN _db_oid = _sluice.database_oid() THEN jsonb_build_object(
        'members', (SELECT count(*) FROM _sluice.member),
        'unscheduled', (
            SELECT jsonb_agg(jsonb_build_object(
                'database', _sluice.database_name(o.db_oid), 'state', o.state, 'error', o.error
            ) ORDER BY o.db_oid)
            FROM _sluice.member AS o
            WHERE o.state <> 'scheduled'
        )
    ) ELSE '{}' END
    FROM _sluice.lease AS l
    LEFT JOIN _sluice.member AS m ON m.db_oid = _db_oid
    CROSS JOIN (
        SELECT count(*) FILTER (WHERE r.state = 'queued') AS queued,
            count(*) FILTER (WHERE r.state = 'running') AS running,
            min(r.enqueued_at) FILTER (WHERE r.state = 'queued') AS oldest_queued_at
        FROM _sluice.queue AS r
        WHERE r.db_oid = _db_oid
    ) AS q
$$;
COMMENT ON FUNCTION _sluice.health_of(oid) IS
    'What the control database knows of a member''s health; of itself, also what it knows of the others';
