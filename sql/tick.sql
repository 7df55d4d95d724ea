-- Member database: what is due. The leader reads it, queues it in the control database, and then moves
-- the nodes on. A crash between the two repeats the tick: the queue holds one run of a node.

CREATE FUNCTION _sluice.run_options(_node _sluice.node)
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT NULLIF(jsonb_strip_nulls(jsonb_build_object(
            'lock_timeout', extract(epoch FROM _node.lock_timeout),
            'refresh_timeout', extract(epoch FROM _node.refresh_timeout),
            'top_level', NULLIF(NOT _node.transactional, false),
            'job', NULLIF(_node.kind = 'job', false),
            'work_mem', s.work_mem,
            'successes', CASE WHEN s.work_mem IS NOT NULL THEN s.successes END
        )), '{}')
        FROM (SELECT) AS one
        LEFT JOIN _sluice.node_state AS s ON s.pgt_id = _node.pgt_id
    );
END;
$$;
COMMENT ON FUNCTION _sluice.run_options(_sluice.node) IS
    'How a run of the node differs from the rule, for the executor: timeouts in seconds, whether it is a job, whether its command runs outside a transaction block, and the remedy that it is under; NULL for a node like all others';

CREATE FUNCTION _sluice.due_nodes(_now timestamptz, _limit integer, _busy bigint[])
RETURNS TABLE (
    pgt_id bigint, name text, kind text, schedule text, anchor timestamptz, due_at timestamptz,
    next_fire_at timestamptz, fire_step double precision, retry_of timestamptz, catch_up integer, priority integer,
    attempt integer, upstream bigint[], options jsonb
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT n.pgt_id, _sluice.node_name(n), n.kind, COALESCE(g.effective_schedule, n.schedule), n.anchor,
        n.due_at, n.next_fire_at, extract(epoch FROM n.fire_step)::double precision, n.retry_of, n.catch_up, n.priority,
        CASE WHEN n.retry_of IS NULL THEN 1 ELSE _sluice.failures(n.pgt_id) + 1 END, g.upstream,
        _sluice.run_options(n)
    FROM (
        SELECT * FROM _sluice.node AS d
        WHERE d.due_at <= _now AND d.pgt_id <> ALL (_busy)
        ORDER BY d.due_at
        LIMIT _limit
        -- Not one that somebody is altering in a transaction that is open: the others don't wait.
        FOR NO KEY UPDATE OF d SKIP LOCKED
    ) AS n
    -- OFFSET keeps it a look-up for each row instead of a scan of the whole graph.
    CROSS JOIN LATERAL (SELECT * FROM _sluice.graph AS o WHERE o.pgt_id = n.pgt_id OFFSET 0) AS g
    ORDER BY g.depth, n.due_at, n.pgt_id;
END;
$$;
COMMENT ON FUNCTION _sluice.due_nodes(timestamptz, integer, bigint[]) IS
    'The nodes that are due and not busy, upstream before downstream: a range of the index on due_at, so its cost follows what is due and not what exists';

CREATE FUNCTION _sluice.tick(_limit integer, _busy bigint[])
RETURNS TABLE (due jsonb, wait_seconds double precision, has_alerts boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- For full tables, whatever they were when the session made its plans: see CONTRIBUTING.md.
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_sort = off
AS $$
DECLARE
    -- One clock for both questions, so that no node is between them.
    v_now timestamptz;
BEGIN
    PERFORM _sluice.release_gated();
    v_now := clock_timestamp();
    due := (SELECT jsonb_agg(to_jsonb(d)) FROM _sluice.due_nodes(v_now, _limit, _busy) AS d);
    wait_seconds := (
        SELECT extract(epoch FROM n.due_at - clock_timestamp())
        FROM _sluice.node AS n
        WHERE n.due_at > v_now
        ORDER BY n.due_at
        LIMIT 1
    );
    has_alerts := COALESCE(
        (SELECT true FROM _sluice.unannounced_alert AS u ORDER BY u.opened_at LIMIT 1), false
    );
    RETURN NEXT;
END;
$$;
COMMENT ON FUNCTION _sluice.tick(integer, bigint[]) IS
    'One look at the schedule: what is due, at most that many nodes and none of the busy ones, how long until the next one is, and whether an alert was opened or closed that is not announced yet';

CREATE FUNCTION _sluice.advance(_moves jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- For full tables, whatever they were when the session made its plans: see CONTRIBUTING.md.
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_sort = off
AS $$
BEGIN
    UPDATE _sluice.node AS n
    SET next_fire_at = m.next_fire_at,
        -- A retry leaves it as it is: its fire can be an older one.
        fire_step = CASE WHEN m.next_fire_at > n.next_fire_at THEN m.next_fire_at - m.fire_at ELSE n.fire_step END,
        fired_at = m.fire_at, retry_at = NULL, retry_of = NULL
    FROM (
        SELECT g.pgt_id, g.fire_at, g.next_fire_at
        FROM jsonb_to_recordset(_moves) AS g (pgt_id bigint, due_at timestamptz, fire_at timestamptz, next_fire_at timestamptz)
        JOIN _sluice.node AS d ON d.pgt_id = g.pgt_id AND d.due_at = g.due_at
        -- As in due_nodes().
        FOR NO KEY UPDATE OF d SKIP LOCKED
    ) AS m
    WHERE n.pgt_id = m.pgt_id;
END;
$$;
COMMENT ON FUNCTION _sluice.advance(jsonb) IS
    'Moves nodes whose run is queued to their next fire; one that somebody rescheduled meanwhile is left alone, and one that somebody has locked in an open transaction stays due: the queue and history know its fire';

CREATE FUNCTION _sluice.nodes_ahead()
RETURNS TABLE (
    pgt_id bigint, name text, kind text, schedule text, anchor timestamptz, due_at timestamptz,
    next_fire_at timestamptz, fire_step double precision, fired_at timestamptz, waits_until timestamptz, retries boolean
)
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH clock AS MATERIALIZED (
        SELECT l.latest, extract(epoch FROM l.latest) AS seconds,
            l.latest + _sluice.interval_setting('retry_backoff_cap') AS latest_retry
        FROM (SELECT _sluice.latest_past(clock_timestamp())) AS l (latest)
    )
    SELECT n.pgt_id, _sluice.node_name(n), n.kind, COALESCE(g.effective_schedule, n.schedule), n.anchor, n.due_at,
        n.next_fire_at, extract(epoch FROM n.fire_step), n.fired_at,
        CASE WHEN n.kind = 'job' AND n.fire_step IS NOT NULL AND a.grid THEN n.next_fire_at END, a.retry
    FROM clock AS c
    CROSS JOIN _sluice.node AS n
    LEFT JOIN _sluice.node_state AS s ON s.pgt_id = n.pgt_id
    LEFT JOIN _sluice.graph AS g ON g.pgt_id = n.pgt_id
    CROSS JOIN LATERAL (SELECT
        -- The fire before its next one; or where there was none yet, when it got its grid. In numbers,
        -- which know no time that is out of range.
        COALESCE(n.next_fire_at > c.latest AND CASE
            WHEN n.fire_step IS NULL THEN n.anchor > c.latest
            ELSE extract(epoch FROM n.next_fire_at) - extract(epoch FROM n.fire_step) > c.seconds
        END, false) AS grid,
        -- The attempt before it, or one that ended in the future.
        COALESCE(n.retry_at > c.latest AND (s.last_run_at > c.latest OR n.retry_at > c.latest_retry), false) AS retry
    ) AS a
    WHERE n.status = 'active'
        AND (a.grid OR a.retry OR greatest(n.created_at, s.last_run_at, s.last_success_at) > c.latest)
$$;
COMMENT ON FUNCTION _sluice.nodes_ahead() IS
    'Active nodes that are ahead of the clock: something that they already did lies in the future, so the clock has been set back since. They would wait for it to come, and count as fresh until then. waits_until: when a job does go on whose last fire lies in the future; retries: whether it is a retry that waits too long';

CREATE FUNCTION _sluice.turn_back(_moves jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_now CONSTANT timestamptz := clock_timestamp();
    -- A run writes the same rows, in a snapshot that must not become too old for that.
    v_running CONSTANT bigint[] := ARRAY(
        SELECT l.pgt_id FROM _sluice.node_lock AS l WHERE l.db_oid = _sluice.database_oid()
    );
    v_free CONSTANT bigint[] := ARRAY(
        SELECT n.pgt_id
        FROM jsonb_to_recordset(_moves) AS m (pgt_id bigint, due_at timestamptz, former timestamptz)
        JOIN _sluice.node AS n ON n.pgt_id = m.pgt_id
        WHERE (n.due_at, n.next_fire_at) IS NOT DISTINCT FROM (m.due_at, m.former) AND n.pgt_id <> ALL (v_running)
        FOR NO KEY UPDATE OF n SKIP LOCKED
    );
BEGIN
    UPDATE _sluice.node AS n
    SET next_fire_at = c.next_fire_at, fire_step = c.fire_step, retry_at = c.retry_at, created_at = c.created_at
    FROM (
        SELECT o.pgt_id, m.next_fire_at, COALESCE(m.next_fire_at - m.before, o.fire_step) AS fire_step,
            CASE WHEN m.retries THEN least(o.retry_at, v_now) ELSE o.retry_at END AS retry_at,
            least(o.created_at, v_now) AS created_at
        FROM jsonb_to_recordset(_moves) AS m (
            pgt_id bigint, next_fire_at timestamptz, before timestamptz, retries boolean
        )
        JOIN _sluice.node AS o ON o.pgt_id = m.pgt_id
        WHERE o.pgt_id = ANY (v_free)
    ) AS c
    WHERE n.pgt_id = c.pgt_id
        AND (n.next_fire_at, n.fire_step, n.retry_at, n.created_at)
            IS DISTINCT FROM (c.next_fire_at, c.fire_step, c.retry_at, c.created_at);
    -- It was now at the latest.
    UPDATE _sluice.node_state AS s
    SET last_run_at = CASE WHEN s.last_run_at > v_now THEN v_now ELSE s.last_run_at END,
        last_success_at = CASE WHEN s.last_success_at > v_now THEN v_now ELSE s.last_success_at END
    WHERE s.pgt_id IN (
        SELECT o.pgt_id
        FROM _sluice.node_state AS o
        WHERE o.pgt_id = ANY (v_free) AND greatest(o.last_run_at, o.last_success_at) > v_now
        FOR NO KEY UPDATE SKIP LOCKED
    );
END;
$$;
COMMENT ON FUNCTION _sluice.turn_back(jsonb) IS
    'Brings nodes that were ahead of the clock back to it: to their next fire, as core/ticks.py decided, a retry that waits too long to now, and with them the times that they ran and were made. Left to the next look are nodes that run at the moment, that somebody has locked in an open transaction, or that were rescheduled meanwhile';

CREATE FUNCTION _sluice.gone_nodes(_known jsonb)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Before the look at the nodes, which has a later snapshot: a transaction that is not among these
    -- has committed what it made, or it never will.
    v_oldest CONSTANT timestamptz := (
        -- With track_activities off it is not known when one began that has made something.
        SELECT min(COALESCE(a.xact_start, CASE WHEN a.backend_xid IS NOT NULL THEN timestamptz '-infinity' END))
        FROM pg_stat_activity AS a
        WHERE a.datid = _sluice.database_oid() AND a.pid <> pg_backend_pid()
    );
BEGIN
    RETURN ARRAY(
        SELECT k.pgt_id
        FROM jsonb_to_recordset(_known) AS k (pgt_id bigint, since timestamptz)
        WHERE (v_oldest IS NULL OR k.since < v_oldest)
            AND NOT EXISTS (SELECT FROM _sluice.node AS n WHERE n.pgt_id = k.pgt_id)
    );
END;
$$;
COMMENT ON FUNCTION _sluice.gone_nodes(jsonb) IS
    'Which of the nodes that the control database knows are gone. A node that was made in a transaction and queued in the same one, which is still open, can''t be seen yet and is not gone: so only what is known since before every open transaction counts';

CREATE FUNCTION _sluice.report_queue(_is_full boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF _is_full THEN
        PERFORM _sluice.open_alert(
            'queue_full', 'warning', NULL, _sluice.here(),
            format('the queue of database "%s" is full: nodes that are due wait for room in it', _sluice.here()),
            jsonb_build_object('max_queue_depth', _sluice.setting('max_queue_depth'))
        );
    ELSE
        PERFORM _sluice.close_alerts('queue_full');
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.report_queue(boolean) IS
    'Opens the alert queue_full when a tick could not queue all that is due since max_queue_depth was reached; closes it when one could';

CREATE FUNCTION _sluice.quarantine(_pgt_id bigint, _message text, _next_fire_at timestamptz)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node%ROWTYPE;
BEGIN
    UPDATE _sluice.node AS n
    SET status = 'quarantined', next_fire_at = _next_fire_at, retry_at = NULL, retry_of = NULL
    WHERE n.pgt_id = _pgt_id AND n.status = 'active'
    RETURNING * INTO v_node;
    IF FOUND THEN
        RAISE WARNING USING
            MESSAGE = format('"%s" is quarantined: %s', _sluice.node_name(v_node), _message),
            HINT = 'Give it a valid schedule, or call sluice.reset().';
        PERFORM _sluice.open_alert('quarantined', 'critical', _pgt_id, _sluice.node_name(v_node), _message);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.quarantine(bigint, text, timestamptz) IS
    'active -> quarantined: a stored value of the node can''t be read. Warns and opens an alert, once; the next fire is moved to the one given, past now on the node''s grid';

CREATE FUNCTION _sluice.member_state()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'db_oid', _sluice.database_oid(),
        'version', _sluice.extension_version(),
        'settings', _sluice.settings_in_force(),
        'upkeep_is_due', _sluice.upkeep_is_due()
    )
$$;
COMMENT ON FUNCTION _sluice.member_state() IS 'What the leader has to know of a member before it schedules it';
