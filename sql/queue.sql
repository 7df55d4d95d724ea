-- Control database: live runs, and nothing but live runs. A finished run is a row in its member's history.
--
--   (none) --enqueue--> queued --claim--> running --finish--> (none)
--                                         running --end_runs--> ended --finish--> (none)
--                       queued --leave_database--> (none)
--                       queued --forget_nodes--> (none)
--                       queued --purge_vanished_databases--> (none)
--
-- A run that has ended has lost its session, and what became of it can't be recorded yet in its member's
-- history: somebody's open transaction has the node, say. Nothing runs then, so nothing waits for it, but
-- until it is recorded it is its node's one live run.

CREATE TABLE _sluice.queue (
    run_id uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT queue_pkey PRIMARY KEY,
    seq bigint GENERATED ALWAYS AS IDENTITY,
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    state text NOT NULL DEFAULT 'queued' CONSTRAINT queue_state_check CHECK (state IN ('queued', 'running', 'ended')),
    priority integer NOT NULL DEFAULT 0,
    -- Where the run stands in line. A step of priority is worth ten seconds of waiting, so a run of
    -- low priority is overtaken for a bounded time only.
    rank timestamptz NOT NULL,
    upstream bigint[] NOT NULL DEFAULT '{}',
    due_at timestamptz NOT NULL,
    attempt integer NOT NULL DEFAULT 1,
    reason text,
    -- What the node asks for in place of the settings, see _sluice.run_options().
    options jsonb,
    enqueued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    not_before timestamptz,
    slot integer,
    epoch bigint,
    started_at timestamptz,
    -- Forbids two live runs of one node.
    CONSTRAINT queue_node_key UNIQUE (db_oid, pgt_id),
    CONSTRAINT queue_running_check CHECK (
        (state <> 'queued') = (epoch IS NOT NULL) AND (state <> 'queued') = (started_at IS NOT NULL)
    )
);
CREATE INDEX queue_claim_idx ON _sluice.queue (db_oid, rank, seq) WHERE state = 'queued';

CREATE FUNCTION _sluice.enter_queue(_db_oid oid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM _sluice.member AS m WHERE m.db_oid = _db_oid FOR NO KEY UPDATE;
    RETURN FOUND;
END;
$$;
COMMENT ON FUNCTION _sluice.enter_queue(oid) IS
    'Whoever adds runs of a database does so alone until the end of the transaction: the bound holds whoever comes at the same time, and none is left behind by sluice.stop(). False: the database is no member';

CREATE FUNCTION _sluice.add_runs(
    _db_oid oid, _runs jsonb, OUT queued bigint[], OUT run_ids uuid[], OUT is_full boolean
)
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
    WITH room AS (
        SELECT greatest(0, _sluice.setting('max_queue_depth') - count(*)) AS places
        FROM _sluice.queue AS q
        WHERE q.db_oid = _db_oid AND q.state = 'queued'
    ), candidate AS (
        SELECT r.*
        FROM ROWS FROM (jsonb_to_recordset(_runs) AS (
            pgt_id bigint, name text, priority integer, upstream bigint[],
            due_at timestamptz, attempt integer, reason text, options jsonb
        )) WITH ORDINALITY AS r (
            pgt_id, name, priority, upstream, due_at, attempt, reason, options, position
        )
        WHERE NOT EXISTS (
            SELECT FROM _sluice.queue AS live WHERE live.db_oid = _db_oid AND live.pgt_id = r.pgt_id
        )
    ), added AS (
        INSERT INTO _sluice.queue AS q (
            db_oid, pgt_id, name, priority, rank, upstream, due_at, attempt, reason, options
        )
        SELECT _db_oid, c.pgt_id, c.name, c.priority, now() - c.priority * interval '10 s', c.upstream,
            c.due_at, c.attempt, c.reason, c.options
        FROM candidate AS c
        -- In the order of the tick, upstream first: it is the order in line.
        ORDER BY c.position
        LIMIT (SELECT r.places FROM room AS r)
        ON CONFLICT ON CONSTRAINT queue_node_key DO NOTHING
        RETURNING q.pgt_id, q.run_id
    )
    SELECT
        ARRAY(SELECT a.pgt_id FROM added AS a),
        ARRAY(SELECT a.run_id FROM added AS a),
        (SELECT count(*) FROM candidate) > (SELECT r.places FROM room AS r)
    INTO queued, run_ids, is_full;
END;
$$;
COMMENT ON FUNCTION _sluice.add_runs(oid, jsonb) IS
    'Queues runs, after enter_queue, and gives the nodes whose run was added: not those with a live run, nor what exceeds max_queue_depth, and then is_full says so';

CREATE FUNCTION _sluice.enqueue(
    _epoch bigint, _db_oid oid, _runs jsonb, OUT queued bigint[], OUT is_full boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    queued := '{}';
    is_full := false;
    IF _sluice.enter_queue(_db_oid) THEN
        SELECT a.queued, a.is_full INTO queued, is_full FROM _sluice.add_runs(_db_oid, _runs) AS a;
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.enqueue(bigint, oid, jsonb) IS
    'Queues the runs that a tick found due; gives the nodes whose run was added, and whether some did not fit';

CREATE FUNCTION _sluice.enqueue_now(_db_oid oid, _run jsonb)
RETURNS uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_run_id uuid;
    v_is_full boolean;
BEGIN
    IF NOT _sluice.enter_queue(_db_oid) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'this database is not scheduled',
            HINT = 'Call sluice.start() first.';
    END IF;
    SELECT a.run_ids[1], a.is_full INTO v_run_id, v_is_full
    FROM _sluice.add_runs(_db_oid, jsonb_build_array(_run)) AS a;
    IF v_is_full THEN
        RAISE EXCEPTION USING
            ERRCODE = 'configuration_limit_exceeded',
            MESSAGE = format('queue of database "%s" is full', _sluice.database_name(_db_oid)),
            DETAIL = format('A database can have %s queued runs (max_queue_depth).', _sluice.setting('max_queue_depth')),
            HINT = 'Call again when runs have ended; sluice.queue() shows them, sluice.health_check() what holds them up.';
    END IF;
    IF v_run_id IS NULL THEN
        SELECT q.run_id INTO v_run_id FROM _sluice.queue AS q
        WHERE q.db_oid = _db_oid AND q.pgt_id = (_run ->> 'pgt_id')::bigint AND q.state = 'queued';
    END IF;
    PERFORM _sluice.wake();
    RETURN v_run_id;
END;
$$;
COMMENT ON FUNCTION _sluice.enqueue_now(oid, jsonb) IS
    'Queues one run for a user, who needs no lease; gives the run that is queued already, or NULL while the node runs or its last run waits to be recorded. Raises 53400 when the queue is full';

CREATE FUNCTION _sluice.known_nodes(_epoch bigint, _db_oid oid)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_now CONSTANT timestamptz := clock_timestamp();
    v_latest CONSTANT timestamptz := _sluice.latest_past(v_now);
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    -- Where the clock has been set back since, they would stand behind all that comes until then.
    UPDATE _sluice.queue AS q SET enqueued_at = q.enqueued_at - a.lead, rank = q.rank - a.lead
    FROM (
        SELECT max(o.enqueued_at) - v_now AS lead FROM _sluice.queue AS o
        WHERE o.db_oid = _db_oid AND o.state = 'queued'
    ) AS a
    WHERE q.db_oid = _db_oid AND q.state = 'queued' AND q.enqueued_at > v_latest;
    RETURN (
        SELECT jsonb_agg(to_jsonb(k))
        FROM (
            SELECT q.pgt_id, q.enqueued_at AS since FROM _sluice.queue AS q
            WHERE q.db_oid = _db_oid AND q.state = 'queued'
            UNION ALL
            SELECT p.pgt_id, p.requested_at FROM _sluice.pause AS p WHERE p.db_oid = _db_oid
        ) AS k
    );
END;
$$;
COMMENT ON FUNCTION _sluice.known_nodes(bigint, oid) IS
    'The nodes of a member that are queued or paused, and since when: the member knows whether they still exist, see gone_nodes. NULL when there are none. Runs that are queued since a time which lies in the future are so from now on';

CREATE FUNCTION _sluice.forget_nodes(_epoch bigint, _db_oid oid, _pgt_ids bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    DELETE FROM _sluice.queue AS q
    WHERE q.db_oid = _db_oid AND q.pgt_id = ANY (_pgt_ids) AND q.state = 'queued';
    DELETE FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids);
END;
$$;
COMMENT ON FUNCTION _sluice.forget_nodes(bigint, oid, bigint[]) IS
    'Takes away what is queued or paused of nodes that are gone; a run in progress ends by itself';

CREATE FUNCTION _sluice.next_run(_epoch bigint, _finished uuid, _db_oid oid, _slot integer)
RETURNS TABLE (run_id uuid, pgt_id bigint, name text, due_at timestamptz, attempt integer, reason text, options jsonb)
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
    PERFORM _sluice.enter_gate(_epoch);
    IF _finished IS NOT NULL THEN
        DELETE FROM _sluice.queue AS q WHERE q.run_id = _finished;
    END IF;
    IF _db_oid IS NULL OR EXISTS (SELECT FROM _sluice.drain AS d WHERE d.db_oid IN (0, _db_oid)) THEN
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE _sluice.queue AS q
    SET state = 'running', slot = _slot, epoch = _epoch, started_at = clock_timestamp()
    WHERE q.run_id = (
        SELECT c.run_id
        FROM _sluice.queue AS c
        WHERE c.db_oid = _db_oid
            AND c.state = 'queued'
            AND (c.not_before IS NULL OR c.not_before <= clock_timestamp())
            AND NOT EXISTS (SELECT FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = c.pgt_id)
            -- Only an upstream that stood in line before is waited for: two nodes never wait for each other.
            AND (c.upstream = '{}' OR NOT EXISTS (
                SELECT FROM _sluice.queue AS u
                WHERE u.db_oid = _db_oid AND u.pgt_id = ANY (c.upstream)
                    AND (u.state = 'running' OR (
                        u.state = 'queued' AND u.seq < c.seq
                        AND NOT EXISTS (SELECT FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = u.pgt_id)
                    ))
            ))
        ORDER BY c.rank, c.seq
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    )
    RETURNING q.run_id, q.pgt_id, q.name, q.due_at, q.attempt, q.reason, q.options;
END;
$$;
COMMENT ON FUNCTION _sluice.next_run(bigint, uuid, oid, integer) IS
    'Finishes a run, claims the next of that database, or both in one: no row while the database drains or nothing may run. A NULL database only finishes';

CREATE FUNCTION _sluice.queued_by_database()
RETURNS TABLE (db_oid oid, queued bigint, running bigint, held bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.db_oid,
        (SELECT count(*) FROM _sluice.queue AS q WHERE q.db_oid = m.db_oid AND q.state = 'queued'),
        (SELECT count(*) FROM _sluice.queue AS q WHERE q.db_oid = m.db_oid AND q.state = 'running'),
        (SELECT count(*) FROM _sluice.slot AS s WHERE s.db_oid = m.db_oid)
    FROM _sluice.member AS m
$$;
COMMENT ON FUNCTION _sluice.queued_by_database() IS 'Counted from the tables, so that it can''t drift';

CREATE FUNCTION _sluice.waiting_databases()
RETURNS TABLE (db_oid oid, runs bigint)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT q.db_oid, count(*)
    FROM _sluice.queue AS q
    JOIN _sluice.member AS m ON m.db_oid = q.db_oid
    WHERE q.state = 'queued'
        AND NOT EXISTS (SELECT FROM _sluice.pause AS p WHERE p.db_oid = q.db_oid AND p.pgt_id = q.pgt_id)
        AND NOT EXISTS (SELECT FROM _sluice.drain AS d WHERE d.db_oid IN (0, q.db_oid))
    GROUP BY q.db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.waiting_databases() IS
    'Members with queued runs that neither a drain nor a pause holds back, and how many';

CREATE FUNCTION _sluice.is_orphaned(_run _sluice.queue)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _run.state = 'running'
        AND NOT EXISTS (
            SELECT FROM _sluice.lease AS l WHERE l.epoch = _run.epoch AND l.expires_at > clock_timestamp()
        )
        AND NOT EXISTS (
            SELECT FROM _sluice.slot AS s
            WHERE s.slot = _run.slot AND s.epoch = _run.epoch AND NOT _sluice.slot_is_gone(s)
        )
        -- A run without a slot was on a scheduler's own session.
        AND NOT EXISTS (
            SELECT FROM _sluice.superuser_session AS a
            WHERE a.datid = _run.db_oid AND a.application_name = 'pg_sluice scheduler ' || _run.epoch
        )
        -- A job at top level has one besides, perhaps as its owner.
        AND NOT EXISTS (
            SELECT FROM pg_stat_activity AS a
            WHERE a.datid = _run.db_oid AND a.application_name = 'pg_sluice job ' || _run.epoch
        )
$$;
COMMENT ON FUNCTION _sluice.is_orphaned(_sluice.queue) IS
    'Whether a run was in progress under a leader that leads no more, and its session is gone: it does not run, and waits for a leader to record it';

CREATE FUNCTION _sluice.end_runs(_epoch bigint, _run_ids uuid[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.queue AS q
    SET state = 'ended'
    WHERE q.run_id = ANY (_run_ids)
        AND q.state = 'running'
        AND (_sluice.is_orphaned(q) OR (
            q.epoch = _epoch
            -- What began after the run was claimed is another's by now. A job at top level has a session
            -- besides, whose lock of the node is looked at like a manual refresh.
            AND NOT EXISTS (SELECT FROM _sluice.slot AS s WHERE s.slot = q.slot AND _sluice.began_before(s.backend_start, q.started_at))
            AND (q.slot IS NOT NULL OR NOT EXISTS (
                SELECT FROM _sluice.superuser_session AS a
                WHERE a.datid = q.db_oid
                    AND a.application_name = 'pg_sluice scheduler ' || _epoch
                    AND _sluice.began_before(a.backend_start, q.started_at)
            ))
        ));
END;
$$;
COMMENT ON FUNCTION _sluice.end_runs(bigint, uuid[]) IS
    'running -> ended, for runs that are to be recorded over another session than their own: those of which the backend is gone';

CREATE FUNCTION _sluice.orphaned_runs(_epoch bigint)
RETURNS TABLE (run_id uuid, db_oid oid, pgt_id bigint, name text, due_at timestamptz, attempt integer, started_at timestamptz)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    RETURN QUERY
    SELECT q.run_id, q.db_oid, q.pgt_id, q.name, q.due_at, q.attempt, q.started_at
    FROM _sluice.queue AS q
    WHERE (q.state = 'running' AND _sluice.is_orphaned(q)) OR (q.state = 'ended' AND q.epoch <> _epoch);
END;
$$;
COMMENT ON FUNCTION _sluice.orphaned_runs(bigint) IS
    'Runs of former leaders whose session is gone, marked so or not: their outcome is to be taken from the member''s history';

CREATE FUNCTION _sluice.queue_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'run_id', q.run_id,
        'db_oid', q.db_oid::bigint,
        'database', _sluice.shown_name(d.datname),
        'pgt_id', q.pgt_id,
        'name', q.name,
        'state', q.state,
        'priority', q.priority,
        'enqueued_at', q.enqueued_at,
        'not_before', q.not_before
    ) ORDER BY q.state DESC, q.rank, q.seq), '[]')
    FROM _sluice.queue AS q
    LEFT JOIN pg_database AS d ON d.oid = q.db_oid
$$;
COMMENT ON FUNCTION _sluice.queue_rows() IS 'The rows of sluice.queue()';
