-- Member database: running one node. A run, its history row and its node's memory commit together.

CREATE FUNCTION _sluice.barrier_body()
RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT $body$
DECLARE
    v_count bigint;
BEGIN
    PERFORM pg_catalog.set_config('search_path', $2, true);
    IF $3 THEN
        EXECUTE $1 INTO v_count;
    ELSE
        EXECUTE $1;
        GET DIAGNOSTICS v_count = ROW_COUNT;
    END IF;
    -- Deferred triggers would run at commit, with the session's rights instead of the owner's.
    SET CONSTRAINTS ALL IMMEDIATE;
    RETURN v_count;
END
$body$
$$;
COMMENT ON FUNCTION _sluice.barrier_body() IS 'Body of the function through which an owner''s SQL runs';

CREATE FUNCTION _sluice.barrier(_owner oid)
RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_name CONSTANT text := 'sluice_run_as_' || _owner;
    v_signature CONSTANT text := format('pg_temp.%I(text, text, boolean)', v_name);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = _owner) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_object', MESSAGE = format('role with OID %s does not exist', _owner);
    END IF;
    -- The owner may alter what it owns, so the function is looked at before each use.
    PERFORM FROM pg_proc AS p
    WHERE p.oid = to_regprocedure(v_signature)
        AND p.proowner = _owner
        AND p.prosecdef
        AND p.prosrc = _sluice.barrier_body()
        AND p.proconfig IS NULL
        AND p.prolang = (SELECT l.oid FROM pg_language AS l WHERE l.lanname = 'plpgsql');
    IF NOT FOUND THEN
        IF to_regprocedure(v_signature) IS NOT NULL THEN
            EXECUTE 'DROP FUNCTION ' || v_signature;
        END IF;
        EXECUTE format(
            'CREATE FUNCTION %s RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS %L',
            v_signature, _sluice.barrier_body()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_signature);
        EXECUTE format('ALTER FUNCTION %s OWNER TO %s', v_signature, _owner::regrole);
    END IF;
    RETURN v_name;
END;
$$;
COMMENT ON FUNCTION _sluice.barrier(oid) IS
    'The name of the SECURITY DEFINER function of a role through which its SQL runs; temporary, one for a session and role, made anew where it is not as it should be';

CREATE FUNCTION _sluice.run_as(_owner oid, _search_path text, _command text, _gives_count boolean)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_barrier CONSTANT text := _sluice.barrier(_owner);
    v_cursor text;
    v_count bigint;
BEGIN
    EXECUTE format('SELECT pg_temp.%I($1::text, $2::text, $3::boolean)', v_barrier)
    INTO v_count USING _command, _search_path, _gives_count;
    -- The owner's SQL can have left any search_path, and with it any operator: pin it again.
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    -- A cursor WITH HOLD is read to its end at commit, with the session's rights.
    FOR v_cursor IN
        SELECT c.name FROM pg_cursors AS c
        -- Those of this statement, also one that took over the name of an older one.
        WHERE c.is_holdable AND c.creation_time >= statement_timestamp()
    LOOP
        EXECUTE format('CLOSE %I', v_cursor);
    END LOOP;
    RETURN v_count;
END;
$$;
COMMENT ON FUNCTION _sluice.run_as(oid, text, text, boolean) IS
    'Executes SQL with exactly the rights of a role: inside a SECURITY DEFINER function that the role owns, SET ROLE and SET SESSION AUTHORIZATION are refused. A caller that goes on in the transaction pins search_path again, and seals the transaction before it commits it with more rights than the role''s';

CREATE FUNCTION _sluice.seal(_owner oid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = _owner) THEN
        -- The commit has no more rights than the owner.
        RETURN;
    END IF;
    IF EXISTS (
        SELECT FROM pg_trigger AS t
        JOIN pg_class AS c ON c.oid = t.tgrelid AND c.relnamespace = pg_my_temp_schema()
        WHERE t.tgdeferrable
    ) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'feature_not_supported',
            MESSAGE = 'a run must not leave deferrable constraints on temporary tables';
    END IF;
    -- None can be made afterwards.
    PERFORM _sluice.barrier(_owner);
    PERFORM pg_catalog.set_config('transaction_read_only', 'on', true);
    PERFORM _sluice.run_as(_owner, 'pg_catalog, pg_temp', 'SELECT 1', false);
END;
$$;
COMMENT ON FUNCTION _sluice.seal(oid) IS
    'The last thing before a run commits. A trigger that was deferred, and ran in run_as, can have deferred further ones. Those run here, with the owner''s rights, in a transaction that takes no more writes: so none is left for the commit, which has the session''s rights. Temporary tables stay writable, hence none with deferrable triggers may be there';

CREATE FUNCTION _sluice.refresh_stream_table(_node _sluice.node, _owner oid)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
SET extra_float_digits = 1
AS $$
BEGIN
    IF _sluice.column_signature(_node.relid) IS DISTINCT FROM _node.column_signature THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('columns of stream table %s were changed', _node.relid),
            DETAIL = format(
                'They were %s, and are %s.',
                _node.column_signature, COALESCE(_sluice.column_signature(_node.relid), 'none')
            ),
            HINT = 'Drop the stream table and create it with the query that you want; columns can be renamed.';
    END IF;
    PERFORM FROM pg_class AS c, pg_roles AS r
    WHERE c.oid = _node.relid AND c.relrowsecurity AND c.relforcerowsecurity
        AND r.oid = _owner AND NOT (r.rolsuper OR r.rolbypassrls);
    IF FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('row-level security of stream table %s applies to its owner', _node.relid),
            DETAIL = 'A refresh runs with the owner''s rights and must see all rows of the table.',
            HINT = 'Use ALTER TABLE ... NO FORCE ROW LEVEL SECURITY.';
    END IF;
    RETURN _sluice.run_as(
        _owner, 'pg_catalog, pg_temp', _sluice.difference_statement(_node.relid, _node.query), true
    );
END;
$$;
COMMENT ON FUNCTION _sluice.refresh_stream_table(_sluice.node, oid) IS
    'Makes a stream table equal to its query, with the owner''s rights, under the settings that its stored query was written with; gives the number of rows that it deleted and inserted';

CREATE FUNCTION _sluice.refresh_matview(_relid regclass, _concurrently boolean)
RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- With it on, PostgreSQL's own statements of REFRESH ... CONCURRENTLY are syntax errors.
SET quote_all_identifiers = off
AS $$
DECLARE
    -- What REFRESH ... CONCURRENTLY asks for: contents, and a unique index over plain columns of all rows.
    v_concurrently CONSTANT boolean := _concurrently
        AND (SELECT c.relispopulated FROM pg_class AS c WHERE c.oid = _relid)
        AND EXISTS (
            SELECT FROM pg_index AS i
            WHERE i.indrelid = _relid AND i.indisunique AND i.indisvalid AND i.indimmediate
                AND i.indpred IS NULL AND i.indexprs IS NULL
        );
BEGIN
    -- The server itself runs the query with the owner's rights.
    EXECUTE format(
        'REFRESH MATERIALIZED VIEW %s %s', CASE WHEN v_concurrently THEN 'CONCURRENTLY' END, _relid
    );
    RETURN CASE WHEN v_concurrently THEN 'concurrently' ELSE 'full' END;
END;
$$;
COMMENT ON FUNCTION _sluice.refresh_matview(regclass, boolean) IS
    'Refreshes a materialized view, without blocking its readers where it allows that; gives the mode';

CREATE FUNCTION _sluice.remedy_text(_work_mem bigint)
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('work_mem %s, no parallel query', pg_size_pretty(_work_mem))
$$;
COMMENT ON FUNCTION _sluice.remedy_text(bigint) IS 'How history shows the remedy that a run was under';

CREATE FUNCTION _sluice.record_run(
    _run_id uuid, _node _sluice.node, _mode text, _outcome text, _attempt integer, _due_at timestamptz,
    _started_at timestamptz, _rows bigint, _reason text, _work_mem bigint
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO _sluice.history (
        run_id, pgt_id, name, kind, mode, outcome, attempt, due_at, started_at, ended_at,
        rows_changed, reason, remedy, pid
    )
    VALUES (
        _run_id, _node.pgt_id, _sluice.node_name(_node), _node.kind, _mode, _outcome, _attempt, _due_at,
        _started_at, clock_timestamp(), _rows, _reason, _sluice.remedy_text(_work_mem), pg_backend_pid()
    );
END;
$$;
COMMENT ON FUNCTION _sluice.record_run(uuid, _sluice.node, text, text, integer, timestamptz, timestamptz, bigint, text, bigint) IS
    'The history row of a run that ended without an error';

CREATE FUNCTION _sluice.count_run(_runs jsonb, _outcome text)
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN _runs || jsonb_build_object(_outcome, COALESCE((_runs -> _outcome)::bigint, 0) + 1);
END;
$$;
COMMENT ON FUNCTION _sluice.count_run(jsonb, text) IS 'Runs by outcome, with one more of that outcome';

CREATE FUNCTION _sluice.skips(_run_id uuid, _node _sluice.node, _due_at timestamptz, _attempt integer)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_reason text;
BEGIN
    IF _node.kind = 'job' AND EXISTS (
        SELECT FROM _sluice.history AS h
        WHERE h.pgt_id = _node.pgt_id AND h.due_at = _due_at AND h.kind = 'job'
            AND h.outcome IN ('succeeded', 'no_change')
    ) THEN
        v_reason := 'duplicate';
    ELSIF EXISTS (SELECT FROM _sluice.watermark_group) AND _sluice.group_out_of_step(_node.pgt_id) IS NOT NULL THEN
        v_reason := 'gated';
        PERFORM _sluice.gate_node(_node.pgt_id, _due_at);
    ELSE
        RETURN false;
    END IF;
    INSERT INTO _sluice.node_state AS s (pgt_id, runs)
    SELECT n.pgt_id, _sluice.count_run('{}', 'skipped') FROM _sluice.node AS n WHERE n.pgt_id = _node.pgt_id
    ON CONFLICT (pgt_id) DO UPDATE SET runs = _sluice.count_run(s.runs, 'skipped');
    PERFORM _sluice.record_run(
        _run_id, _node, NULL, 'skipped', _attempt, _due_at, clock_timestamp(), NULL, v_reason, NULL
    );
    RETURN true;
END;
$$;
COMMENT ON FUNCTION _sluice.skips(uuid, _sluice.node, timestamptz, integer) IS
    'Whether a fire is skipped, which it then records: a job''s that is on record already (duplicate), or one whose sources are out of step (gated)';

CREATE FUNCTION _sluice.perform(
    _run_id uuid, _pgt_id bigint, _due_at timestamptz, _attempt integer, _reason text, _session_owner oid,
    OUT outcome text, OUT rows_changed bigint, OUT session_owner oid
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_started_at CONSTANT timestamptz := clock_timestamp();
    v_node _sluice.node%ROWTYPE;
    v_mode text;
BEGIN
    PERFORM pg_advisory_xact_lock(_sluice.lock_class('node'), _pgt_id::integer);
    SELECT * INTO v_node FROM _sluice.node AS n WHERE n.pgt_id = _pgt_id;
    IF NOT FOUND THEN
        outcome := 'skipped';
        RETURN;
    END IF;
    session_owner := _sluice.node_owner(v_node);
    IF session_owner IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_table',
            MESSAGE = format('relation with OID %s does not exist', v_node.relid::oid),
            HINT = 'Drop the node with sluice.drop_stream_table() or sluice.unschedule().';
    END IF;
    IF _session_owner <> session_owner THEN
        -- The session has run another owner's SQL and is not clean.
        outcome := 'unclean';
        RETURN;
    END IF;
    IF _reason IS DISTINCT FROM 'manual' AND _sluice.skips(_run_id, v_node, _due_at, _attempt) THEN
        outcome := 'skipped';
        RETURN;
    END IF;

    CASE v_node.kind
        WHEN 'stream_table' THEN
            rows_changed := _sluice.refresh_stream_table(v_node, session_owner);
            v_mode := 'full';
        WHEN 'matview' THEN
            v_mode := _sluice.refresh_matview(v_node.relid, v_node.concurrently);
        WHEN 'job' THEN
            rows_changed := _sluice.run_as(session_owner, v_node.job_search_path, v_node.command, false);
            v_mode := 'transactional';
    END CASE;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    outcome := CASE WHEN v_node.kind = 'stream_table' AND rows_changed = 0 THEN 'no_change' ELSE 'succeeded' END;
    PERFORM _sluice.finish_run(
        _run_id, v_node, v_mode, outcome, _attempt, _due_at, v_started_at, rows_changed, _reason
    );
END;
$$;
COMMENT ON FUNCTION _sluice.perform(uuid, bigint, timestamptz, integer, text, oid) IS
    'One run, in the caller''s transaction: takes the node''s lock, executes with the owner''s rights, writes history and clears the errors. "unclean": the session was used by another owner, nothing was done. A leader then calls _sluice.seal() and commits. Errors of the SQL pass through';

CREATE FUNCTION _sluice.finish_run(
    _run_id uuid, _node _sluice.node, _mode text, _outcome text, _attempt integer, _due_at timestamptz,
    _started_at timestamptz, _rows bigint, _reason text
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_work_mem bigint;
BEGIN
    INSERT INTO _sluice.node_state AS s (
        pgt_id, last_run_at, last_outcome, last_success_at, runs, run_seconds, rows_changed
    )
    SELECT n.pgt_id, _started_at, _outcome, _started_at, _sluice.count_run('{}', _outcome),
        extract(epoch FROM clock_timestamp() - _started_at), COALESCE(_rows, 0)
    -- It can have been unscheduled meanwhile.
    FROM _sluice.node AS n WHERE n.pgt_id = _node.pgt_id
    ON CONFLICT (pgt_id) DO UPDATE
    SET last_run_at = EXCLUDED.last_run_at, last_outcome = EXCLUDED.last_outcome,
        last_success_at = EXCLUDED.last_success_at, consecutive_errors = 0,
        runs = _sluice.count_run(s.runs, _outcome), run_seconds = s.run_seconds + EXCLUDED.run_seconds,
        rows_changed = s.rows_changed + EXCLUDED.rows_changed
    RETURNING s.work_mem INTO v_work_mem;
    IF EXISTS (SELECT FROM _sluice.watermark) THEN
        PERFORM _sluice.record_baseline(_node.pgt_id);
    END IF;
    PERFORM _sluice.record_run(
        _run_id, _node, _mode, _outcome, _attempt, _due_at, _started_at, _rows, _reason,
        -- A run by hand has the caller's memory.
        CASE WHEN _reason IS DISTINCT FROM 'manual' THEN v_work_mem END
    );
END;
$$;
COMMENT ON FUNCTION _sluice.finish_run(uuid, _sluice.node, text, text, integer, timestamptz, timestamptz, bigint, text) IS
    'A success, in the node''s state and in history';

CREATE FUNCTION _sluice.top_level_command(_run_id uuid, _pgt_id bigint, _due_at timestamptz, _attempt integer)
RETURNS TABLE (command text, search_path text, owner oid, owner_name bytea, is_superuser boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node%ROWTYPE;
BEGIN
    SELECT * INTO v_node FROM _sluice.node AS n WHERE n.pgt_id = _pgt_id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = v_node.job_owner) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_object',
            MESSAGE = format('role with OID %s does not exist', v_node.job_owner::oid);
    END IF;
    IF NOT _sluice.skips(_run_id, v_node, _due_at, _attempt) THEN
        RETURN QUERY
        SELECT v_node.command, v_node.job_search_path, r.oid, _sluice.raw_name(r.rolname), r.rolsuper
        FROM pg_roles AS r
        WHERE r.oid = v_node.job_owner;
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.top_level_command(uuid, bigint, timestamptz, integer) IS
    'What a job with transactional => false executes, and as whom; no row when the fire is skipped or the job is gone';

CREATE FUNCTION _sluice.failures(_pgt_id bigint)
RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN COALESCE((SELECT s.consecutive_errors FROM _sluice.node_state AS s WHERE s.pgt_id = _pgt_id), 0);
END;
$$;
COMMENT ON FUNCTION _sluice.failures(bigint) IS 'Failures of a node in a row, so far';

CREATE FUNCTION _sluice.record_top_level_run(
    _run_id uuid, _pgt_id bigint, _due_at timestamptz, _attempt integer, _started_at timestamptz, _reason text
)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.finish_run(
        _run_id, n, 'top_level', 'succeeded', _attempt, _due_at, _started_at, NULL, _reason
    )
    FROM _sluice.node AS n
    WHERE n.pgt_id = _pgt_id
$$;
COMMENT ON FUNCTION _sluice.record_top_level_run(uuid, bigint, timestamptz, integer, timestamptz, text) IS
    'The success of a job that ran outside a transaction block, recorded after it: such a job is at-least-once';

CREATE FUNCTION _sluice.failure_state(
    _pgt_id bigint, OUT consecutive_errors integer, OUT work_mem bigint, OUT policy jsonb
)
RETURNS SETOF record
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO _sluice.node_state (pgt_id)
    -- Waits here for somebody who is about to remove it, and then it is gone.
    SELECT n.pgt_id FROM _sluice.node AS n WHERE n.pgt_id = _pgt_id FOR KEY SHARE
    ON CONFLICT (pgt_id) DO NOTHING;
    SELECT s.consecutive_errors, s.work_mem, jsonb_build_object(
        'max_consecutive_errors', _sluice.setting('max_consecutive_errors'),
        'retry_backoff_base', _sluice.setting('retry_backoff_base'),
        'retry_backoff_cap', _sluice.setting('retry_backoff_cap'),
        'refresh_work_mem', _sluice.setting('refresh_work_mem')
    )
    FROM _sluice.node_state AS s
    WHERE s.pgt_id = _pgt_id
    FOR UPDATE
$$;
COMMENT ON FUNCTION _sluice.failure_state(bigint) IS
    'What is decided about a failed attempt from, see core/remediation.py; locks it until the end of the transaction. No row: the node is gone';

CREATE FUNCTION _sluice.record_failure(
    _run_id uuid, _pgt_id bigint, _due_at timestamptz, _attempt integer, _started_at timestamptz,
    _reason text, _error jsonb, _verdict jsonb
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node%ROWTYPE;
    v_name text;
    v_failures integer;
BEGIN
    INSERT INTO _sluice.history (
        run_id, pgt_id, name, kind, outcome, sqlstate, message, detail, context, attempt, due_at,
        started_at, ended_at, reason, remedy, pid
    )
    SELECT _run_id, n.pgt_id, _sluice.node_name(n), n.kind, e.outcome, e.sqlstate,
        e.message, e.detail, e.context, _attempt, _due_at,
        _started_at, clock_timestamp(), _reason, _sluice.remedy_text(s.work_mem), e.pid
    FROM _sluice.node AS n
    LEFT JOIN _sluice.node_state AS s ON s.pgt_id = n.pgt_id
    CROSS JOIN jsonb_to_record(_error) AS e (
        outcome text, sqlstate text, message text, detail text, context text, pid integer
    )
    WHERE n.pgt_id = _pgt_id
    ON CONFLICT (run_id) DO NOTHING;
    IF NOT FOUND THEN
        -- The node is gone, or the attempt is on record already.
        RETURN;
    END IF;
    INSERT INTO _sluice.node_state AS s (
        pgt_id, last_run_at, last_outcome, consecutive_errors, work_mem, runs, run_seconds
    )
    VALUES (
        _pgt_id, _started_at, _error ->> 'outcome', (_verdict ->> 'counts')::boolean::integer,
        (_verdict ->> 'work_mem')::bigint, _sluice.count_run('{}', _error ->> 'outcome'),
        extract(epoch FROM clock_timestamp() - _started_at)
    )
    ON CONFLICT (pgt_id) DO UPDATE
    SET last_run_at = EXCLUDED.last_run_at, last_outcome = EXCLUDED.last_outcome,
        consecutive_errors = s.consecutive_errors + EXCLUDED.consecutive_errors,
        work_mem = EXCLUDED.work_mem, successes = 0,
        runs = _sluice.count_run(s.runs, EXCLUDED.last_outcome), run_seconds = s.run_seconds + EXCLUDED.run_seconds
    RETURNING s.consecutive_errors INTO v_failures;
    UPDATE _sluice.node AS n
    SET status = CASE WHEN (_verdict ->> 'suspend')::boolean AND n.status = 'active' THEN 'suspended' ELSE n.status END,
        retry_at = clock_timestamp() + make_interval(secs => (_verdict ->> 'retry_seconds')::double precision),
        retry_of = CASE WHEN _verdict ->> 'retry_seconds' IS NOT NULL THEN _due_at END
    WHERE n.pgt_id = _pgt_id
    RETURNING * INTO v_node;
    v_name := _sluice.node_name(v_node);
    IF v_node.status = 'suspended' THEN
        PERFORM _sluice.open_alert(
            'suspended', 'critical', _pgt_id, v_name,
            format(
                '"%s" is suspended after %s failures in a row: %s',
                v_name, v_failures, _error ->> 'message'
            ),
            _error
        );
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.record_failure(uuid, bigint, timestamptz, integer, timestamptz, text, jsonb, jsonb) IS
    'A failed attempt: one row, one count, and the verdict of core/remediation.py on it: retry, suspension, remedy. Recording an attempt again does nothing. Called after failure_state, in the same transaction';

CREATE FUNCTION _sluice.record_recovery(_pgt_id bigint, _work_mem bigint, _successes integer)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- reset() may have ended it meanwhile.
    UPDATE _sluice.node_state AS s SET work_mem = _work_mem, successes = _successes
    WHERE s.pgt_id = _pgt_id AND s.work_mem IS NOT NULL
$$;
COMMENT ON FUNCTION _sluice.record_recovery(bigint, bigint, integer) IS
    'A success under a remedy: what is left of it, and how many successes in a row it has had';
