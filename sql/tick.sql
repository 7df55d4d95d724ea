-- Member database: what is due. The leader reads it, queues it in the control database, and then moves
-- the nodes on. A crash between the two repeats the tick: the queue holds one run of a node.

CREATE FUNCTION _sluice.run_options(_node _sluice.node)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NULLIF(jsonb_strip_nulls(jsonb_build_object(
        'lock_timeout', extract(epoch FROM _node.lock_timeout),
        'refresh_timeout', extract(epoch FROM _node.refresh_timeout),
        'top_level', NULLIF(NOT _node.transactional, false),
        'job', NULLIF(_node.kind = 'job', false)
    )), '{}')
$$;
COMMENT ON FUNCTION _sluice.run_options(_sluice.node) IS
    'How a run of the node differs from the rule, for the executor: timeouts in seconds, whether it is a job, and whether its command runs outside a transaction block; NULL for a node like all others';

CREATE FUNCTION _sluice.due_nodes(_now timestamptz, _limit integer, _busy bigint[])
RETURNS TABLE (
    pgt_id bigint, name text, kind text, schedule text, anchor timestamptz, due_at timestamptz,
    next_fire_at timestamptz, retry_of timestamptz, catch_up integer, priority integer,
    attempt integer, upstream bigint[], options jsonb
)
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT n.pgt_id, _sluice.node_name(n), n.kind, COALESCE(g.effective_schedule, n.schedule), n.anchor,
        n.due_at, n.next_fire_at, n.retry_of, n.catch_up, n.priority,
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
    ORDER BY g.depth, n.due_at, n.pgt_id
$$;
COMMENT ON FUNCTION _sluice.due_nodes(timestamptz, integer, bigint[]) IS
    'The nodes that are due and not busy, upstream before downstream: a range of the index on due_at, so its cost follows what is due and not what exists';

CREATE FUNCTION _sluice.tick(_limit integer, _busy bigint[])
RETURNS TABLE (due jsonb, wait_seconds double precision)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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
    RETURN NEXT;
END;
$$;
COMMENT ON FUNCTION _sluice.tick(integer, bigint[]) IS
    'One look at the schedule: what is due, at most that many nodes and none of the busy ones, and how long until the next one is';

CREATE FUNCTION _sluice.advance(_moves jsonb)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.node AS n
    SET next_fire_at = m.next_fire_at, retry_at = NULL, retry_of = NULL
    FROM jsonb_to_recordset(_moves) AS m (pgt_id bigint, due_at timestamptz, next_fire_at timestamptz)
    WHERE n.pgt_id = m.pgt_id AND n.due_at = m.due_at
$$;
COMMENT ON FUNCTION _sluice.advance(jsonb) IS
    'Moves nodes whose run is queued to their next fire; one that somebody rescheduled meanwhile is left alone';

CREATE FUNCTION _sluice.quarantine(_pgt_id bigint, _message text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node%ROWTYPE;
BEGIN
    UPDATE _sluice.node AS n SET status = 'quarantined', retry_at = NULL, retry_of = NULL
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
COMMENT ON FUNCTION _sluice.quarantine(bigint, text) IS
    'active -> quarantined: the stored schedule can''t be read. Warns and opens an alert, once';

CREATE FUNCTION _sluice.member_state()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'version', (SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'pg_sluice'),
        'settings', _sluice.settings_in_force()
    )
$$;
COMMENT ON FUNCTION _sluice.member_state() IS 'What the leader has to know of a member before it schedules it';

CREATE FUNCTION _sluice.upkeep()
RETURNS bigint
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH old AS (
        SELECT h.run_id FROM _sluice.history AS h
        -- As a subquery the bound is an index condition.
        WHERE h.ended_at < (
            SELECT clock_timestamp() - make_interval(secs => _sluice.setting('history_retention')::double precision)
        )
        ORDER BY h.ended_at
        LIMIT (SELECT _sluice.setting('maintenance_batch')::integer)
    ), deleted AS (
        DELETE FROM _sluice.history AS h USING old WHERE h.run_id = old.run_id RETURNING 1
    ), closed AS (
        DELETE FROM _sluice.alert AS a
        WHERE a.closed_at < (
            SELECT clock_timestamp() - make_interval(secs => _sluice.setting('history_retention')::double precision)
        )
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM deleted) + (SELECT count(*) FROM closed)
$$;
COMMENT ON FUNCTION _sluice.upkeep() IS 'Deletes one batch of history, and the closed alerts, that are past their retention; gives the number of rows';
