-- Control database: live runs, and nothing but live runs. A finished run is a row in its member's history.
--
--   (none) --enqueue--> queued --claim--> running --finish--> (none)
--                       queued --leave_database--> (none)

CREATE TABLE _sluice.queue (
    run_id uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT queue_pkey PRIMARY KEY,
    seq bigint GENERATED ALWAYS AS IDENTITY,
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    state text NOT NULL DEFAULT 'queued' CONSTRAINT queue_state_check CHECK (state IN ('queued', 'running')),
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
        (state = 'running') = (epoch IS NOT NULL) AND (state = 'running') = (started_at IS NOT NULL)
    )
);
CREATE INDEX queue_claim_idx ON _sluice.queue (db_oid, rank, seq) WHERE state = 'queued';

CREATE FUNCTION _sluice.add_runs(_db_oid oid, _runs jsonb)
RETURNS TABLE (pgt_id bigint, run_id uuid)
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO _sluice.queue AS q (
        db_oid, pgt_id, name, priority, rank, upstream, due_at, attempt, reason, options
    )
    SELECT _db_oid, r.pgt_id, r.name, r.priority, now() - r.priority * interval '10 s', r.upstream,
        r.due_at, r.attempt, r.reason, r.options
    FROM ROWS FROM (jsonb_to_recordset(_runs) AS (
        pgt_id bigint, name text, priority integer, upstream bigint[],
        due_at timestamptz, attempt integer, reason text, options jsonb
    )) WITH ORDINALITY AS r (
        pgt_id, name, priority, upstream, due_at, attempt, reason, options, position
    )
    WHERE NOT EXISTS (
        SELECT FROM _sluice.queue AS live WHERE live.db_oid = _db_oid AND live.pgt_id = r.pgt_id
    )
    -- In the order of the tick, upstream first: it is the order in line.
    ORDER BY r.position
    LIMIT greatest(0, _sluice.setting('max_queue_depth')
        - (SELECT count(*) FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued'))
    ON CONFLICT ON CONSTRAINT queue_node_key DO NOTHING
    RETURNING q.pgt_id, q.run_id
$$;
COMMENT ON FUNCTION _sluice.add_runs(oid, jsonb) IS
    'Queues runs and gives those that were added: not those of nodes with a live run, nor what exceeds max_queue_depth';

CREATE FUNCTION _sluice.enqueue(_epoch bigint, _db_oid oid, _runs jsonb)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    RETURN ARRAY(SELECT a.pgt_id FROM _sluice.add_runs(_db_oid, _runs) AS a);
END;
$$;
COMMENT ON FUNCTION _sluice.enqueue(bigint, oid, jsonb) IS
    'Queues the runs that a tick found due; gives the nodes whose run was added';

CREATE FUNCTION _sluice.enqueue_now(_db_oid oid, _run jsonb)
RETURNS uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_run_id uuid;
BEGIN
    IF NOT EXISTS (SELECT FROM _sluice.member AS m WHERE m.db_oid = _db_oid) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'this database is not scheduled',
            HINT = 'Call sluice.start() first.';
    END IF;
    SELECT a.run_id INTO v_run_id FROM _sluice.add_runs(_db_oid, jsonb_build_array(_run)) AS a;
    IF v_run_id IS NULL THEN
        SELECT q.run_id INTO v_run_id FROM _sluice.queue AS q
        WHERE q.db_oid = _db_oid AND q.pgt_id = (_run ->> 'pgt_id')::bigint AND q.state = 'queued';
    END IF;
    PERFORM pg_notify('sluice_wake', _db_oid::text);
    RETURN v_run_id;
END;
$$;
COMMENT ON FUNCTION _sluice.enqueue_now(oid, jsonb) IS
    'Queues one run for a user, who needs no lease; gives the run that is queued already, or NULL while the node runs or the queue is full';

CREATE FUNCTION _sluice.next_run(_epoch bigint, _finished uuid, _db_oid oid, _slot integer)
RETURNS TABLE (run_id uuid, pgt_id bigint, name text, due_at timestamptz, attempt integer, reason text, options jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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
                        u.seq < c.seq
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
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT q.db_oid, count(*)
    FROM _sluice.queue AS q
    JOIN _sluice.member AS m ON m.db_oid = q.db_oid
    WHERE q.state = 'queued'
        AND NOT EXISTS (SELECT FROM _sluice.pause AS p WHERE p.db_oid = q.db_oid AND p.pgt_id = q.pgt_id)
        AND NOT EXISTS (SELECT FROM _sluice.drain AS d WHERE d.db_oid IN (0, q.db_oid))
    GROUP BY q.db_oid
$$;
COMMENT ON FUNCTION _sluice.waiting_databases() IS
    'Members with queued runs that neither a drain nor a pause holds back, and how many';

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
    WHERE q.state = 'running'
        AND q.epoch < _epoch
        AND NOT EXISTS (SELECT FROM _sluice.slot AS s WHERE s.slot = q.slot)
        -- A run without a slot was on a scheduler's own session; a job at top level has one besides.
        AND NOT EXISTS (
            SELECT FROM pg_stat_activity AS a
            WHERE a.datid = q.db_oid
                AND a.application_name IN ('pg_sluice scheduler ' || q.epoch, 'pg_sluice job ' || q.epoch)
        );
END;
$$;
COMMENT ON FUNCTION _sluice.orphaned_runs(bigint) IS
    'Runs of former leaders whose session is gone: their outcome is to be taken from the member''s history';
