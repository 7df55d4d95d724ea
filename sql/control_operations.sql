-- Operations that take effect at once, through a connection to the control database.

CREATE FUNCTION sluice.configure(name text, value text, "cluster" boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.check_setting(name, value, "cluster");
    IF "cluster" THEN
        PERFORM _sluice.control('store_setting', jsonb_build_object('_scope', 'cluster', '_name', name, '_value', value));
    ELSE
        PERFORM _sluice.store_setting('database', name, value);
    END IF;
END;
$$;
COMMENT ON FUNCTION sluice.configure(text, text, boolean) IS
'Sets a setting for this database, as part of the transaction, or with cluster => true for the whole server, at once. value: text in the setting''s type and within its bounds, see sluice.settings; NULL restores the default.';

CREATE FUNCTION _sluice.refuse_own_run(_pgt_ids bigint[])
RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node;
BEGIN
    SELECT n.* INTO v_node
    FROM _sluice.node_lock AS l
    JOIN _sluice.node AS n ON n.pgt_id = l.pgt_id
    WHERE l.pid = pg_backend_pid() AND l.db_oid = _sluice.database_oid()
        AND (_pgt_ids IS NULL OR n.pgt_id = ANY (_pgt_ids))
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_in_use',
            MESSAGE = format('cannot wait for the run of "%s" from within it', _sluice.node_name(v_node)),
            HINT = 'Pass wait => false. A refresh by hand ends with its transaction.';
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.refuse_own_run(bigint[]) IS
    'Raises 55006 where a wait for these nodes (NULL: for all) would be for the calling session itself: its transaction has refreshed one by hand, or it is in the run of a job';

CREATE FUNCTION sluice.drain(
    timeout interval DEFAULT NULL, "cluster" boolean DEFAULT false, wait boolean DEFAULT true
)
RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
-- The notices of the wait are how the server notices that the client is gone.
SET client_min_messages = notice
AS $$
    SELECT _sluice.check_setting('drain_timeout', timeout::text, true);
    SELECT _sluice.refuse_own_run(NULL) WHERE wait;
    SELECT _sluice.unwrap(_sluice.invoke_privileged('drain', jsonb_build_object(
        'seconds', COALESCE(extract(epoch FROM timeout), _sluice.setting('drain_timeout')),
        'cluster', "cluster", 'wait', wait, 'user', _sluice.shown_name(session_user)
    ))) #>> '{}'
$$;
COMMENT ON FUNCTION sluice.drain(interval, boolean, boolean) IS
'Lets no further run start in this database, or with cluster => true on the server, until resume(). Waits up to the timeout (default: drain_timeout) for what runs and returns ''drained'' when nothing does, else ''draining''; in both cases it stays in force. A call that is cancelled before its answer withdraws its request. wait => false returns at once; without it a job, and a transaction that has refreshed a stream table, get an error, since they would wait for themselves.';

CREATE FUNCTION sluice.is_drained("cluster" boolean DEFAULT false)
RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NULLIF(_sluice.control('check_drain', jsonb_build_object(
        '_db_oid', CASE WHEN "cluster" THEN 0 ELSE _sluice.database_oid() END
    )), 'null')::boolean
$$;
COMMENT ON FUNCTION sluice.is_drained(boolean) IS
'NULL: no drain was requested. false: something still runs. true: nothing runs, and nothing will start until resume().';

CREATE FUNCTION sluice.drain_status()
RETURNS TABLE (
    scope text, state text, requested_by text, requested_at timestamptz, drained_at timestamptz,
    active bigint, waiting_for text
)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.scope, r.state, r.requested_by, r.requested_at, r.drained_at, r.active, r.waiting_for
    FROM jsonb_to_recordset(_sluice.control('drain_rows', jsonb_build_object('_db_oid', _sluice.database_oid()))) AS r (
        scope text, state text, requested_by text, requested_at timestamptz, drained_at timestamptz,
        active bigint, waiting_for text
    )
$$;
COMMENT ON FUNCTION sluice.drain_status() IS 'The drain requests that hold for this database, and what they wait for.';

CREATE FUNCTION sluice.resume("cluster" boolean DEFAULT false)
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.control('end_drain', jsonb_build_object(
        '_db_oid', CASE WHEN "cluster" THEN 0 ELSE _sluice.database_oid() END
    ))
$$;
COMMENT ON FUNCTION sluice.resume(boolean) IS
'Ends the drain of this database or, with cluster => true, of the server, at once. The two are separate requests.';

CREATE FUNCTION _sluice.find_nodes(_arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_nodes jsonb := '[]'::jsonb;
    v_node _sluice.node;
    v_entry jsonb;
BEGIN
    FOR v_entry IN SELECT e.value FROM jsonb_array_elements(_arguments -> 'nodes') AS e LOOP
        v_node := _sluice.find_node(v_entry);
        v_nodes := v_nodes || jsonb_build_object('pgt_id', v_node.pgt_id, 'name', _sluice.node_name(v_node));
    END LOOP;
    RETURN v_nodes;
END;
$$;
COMMENT ON FUNCTION _sluice.find_nodes(jsonb) IS 'As find_node, for a list of names; an unknown one is an error';

CREATE FUNCTION _sluice.name_nodes(_nodes text[], _argument text)
RETURNS jsonb
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF _nodes IS NULL OR pg_catalog.array_position(_nodes, NULL) IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'null_value_not_allowed',
            MESSAGE = pg_catalog.format(
                CASE WHEN _nodes IS NULL THEN '%s must not be null' ELSE '%s must not contain nulls' END, _argument
            );
    END IF;
    -- Cardinality first: a name costs a look at the catalog.
    IF pg_catalog.int4gt(pg_catalog.cardinality(_nodes), _sluice.setting('max_pause_nodes')::integer) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'program_limit_exceeded',
            MESSAGE = pg_catalog.format('too many %s: %s', _argument, pg_catalog.cardinality(_nodes)),
            DETAIL = pg_catalog.format('One call takes at most %s (max_pause_nodes).', _sluice.setting('max_pause_nodes'));
    END IF;
    RETURN (
        SELECT COALESCE(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
            'name', n, 'relid', _sluice.relation_of(n)
        )), '[]')
        FROM pg_catalog.unnest(_nodes) AS n
    );
END;
$$;
COMMENT ON FUNCTION _sluice.name_nodes(text[], text) IS
    'Names with what they are as relations in the caller''s search_path, hence without a pinned one';

CREATE FUNCTION _sluice.do_pause(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- As in drain().
SET client_min_messages = notice
AS $$
DECLARE
    v_wait CONSTANT boolean := (_arguments ->> 'wait')::boolean;
    v_nodes jsonb;
BEGIN
    PERFORM _sluice.check_setting('pause_timeout', _arguments ->> 'timeout', true);
    v_nodes := _sluice.find_nodes(_arguments);
    IF v_wait THEN
        PERFORM _sluice.refuse_own_run(ARRAY(
            SELECT (e.value ->> 'pgt_id')::bigint FROM jsonb_array_elements(v_nodes) AS e
        ));
    END IF;
    RETURN _sluice.unwrap(_sluice.invoke_privileged('pause', jsonb_build_object(
        'nodes', v_nodes,
        'seconds', COALESCE(extract(epoch FROM (_arguments ->> 'timeout')::interval), _sluice.setting('pause_timeout')),
        'wait', v_wait,
        'user', _sluice.shown_name(_caller)
    )));
END;
$$;

CREATE FUNCTION sluice.pause(nodes text[], timeout interval DEFAULT NULL, wait boolean DEFAULT true)
RETURNS text
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('pause', pg_catalog.jsonb_build_object(
        'nodes', _sluice.name_nodes(nodes, 'nodes'), 'timeout', timeout, 'wait', wait
    ))
    RETURNING result OPERATOR(pg_catalog.#>>) '{}'
$$;
COMMENT ON FUNCTION sluice.pause(text[], interval, boolean) IS
'Lets no further run of these nodes start until unpause(): all of them or, on an error, none. Waits up to the timeout (default: pause_timeout) for their runs and returns ''paused'', else ''pausing''; it stays in force. A call that is cancelled withdraws what it added. Takes effect at once. wait => false returns at once; without it, a run that pauses its own node gets an error.';

CREATE FUNCTION _sluice.do_unpause(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.control('end_pause', jsonb_build_object(
        '_db_oid', _sluice.database_oid(),
        '_pgt_ids', ARRAY(
            SELECT (e.value ->> 'pgt_id')::bigint FROM jsonb_array_elements(_sluice.find_nodes(_arguments)) AS e
        )
    ))
$$;

CREATE FUNCTION sluice.unpause(nodes text[])
RETURNS integer
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('unpause', pg_catalog.jsonb_build_object('nodes', _sluice.name_nodes(nodes, 'nodes')))
    RETURNING result::integer
$$;
COMMENT ON FUNCTION sluice.unpause(text[]) IS
'Ends the pause of these nodes at once; returns how many of them were paused.';

CREATE FUNCTION sluice.queue()
RETURNS TABLE (
    run_id uuid, db_oid oid, database text, pgt_id bigint, name text, state text, priority integer,
    enqueued_at timestamptz, not_before timestamptz
)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.run_id, r.db_oid, r.database, r.pgt_id, r.name, r.state, r.priority, r.enqueued_at, r.not_before
    FROM jsonb_to_recordset(_sluice.control('queue_rows', '{}')) AS r (
        run_id uuid, db_oid oid, database text, pgt_id bigint, name text, state text, priority integer,
        enqueued_at timestamptz, not_before timestamptz
    )
$$;
COMMENT ON FUNCTION sluice.queue() IS 'The live runs of the whole server: queued, running, and ended where the session is gone and its outcome waits to be recorded, as while an open transaction has the node. Finished ones are in sluice.history of their database.';

CREATE FUNCTION sluice.workers()
RETURNS TABLE (
    slot integer, state text, db_oid oid, database text, pid integer, run_id uuid, name text, since timestamptz
)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.slot, r.state, r.db_oid, r.database, r.pid, r.run_id, r.name, r.since
    FROM jsonb_to_recordset(_sluice.control('worker_rows', '{}')) AS r (
        slot integer, state text, db_oid oid, database text, pid integer, run_id uuid, name text, since timestamptz
    )
$$;
COMMENT ON FUNCTION sluice.workers() IS 'The worker slots of the whole server and what runs on them.';

CREATE FUNCTION sluice.databases()
RETURNS TABLE (
    db_oid oid, database text, state text, last_tick_at timestamptz, last_tick_ms double precision,
    queued bigint, running bigint, drain text, error text, failures integer, oldest_queued_at timestamptz,
    workers bigint, paused bigint, joined_by text, joined_at timestamptz
)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.db_oid, r.database, r.state, r.last_tick_at, r.last_tick_ms, r.queued, r.running, r.drain, r.error,
        r.failures, r.oldest_queued_at, r.workers, r.paused, r.joined_by, r.joined_at
    FROM jsonb_to_recordset(_sluice.control('database_rows', '{}')) AS r (
        db_oid oid, database text, state text, last_tick_at timestamptz, last_tick_ms double precision,
        queued bigint, running bigint, drain text, error text, failures integer, oldest_queued_at timestamptz,
        workers bigint, paused bigint, joined_by text, joined_at timestamptz
    )
$$;
COMMENT ON FUNCTION sluice.databases() IS 'The member databases of the server and how their scheduling fares. failures: ticks in a row that failed. workers: slots that it holds. paused: nodes.';

CREATE FUNCTION sluice.effective_limit()
RETURNS TABLE ("limit" integer, ingredient text, value integer, binding boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r."limit", r.ingredient, r.value, r.binding
    FROM jsonb_to_recordset(_sluice.control('limit_rows', '{}'))
        AS r ("limit" integer, ingredient text, value integer, binding boolean)
$$;
COMMENT ON FUNCTION sluice.effective_limit() IS
'How many workers the server may have at once: the least of the ingredients. 0 means serial mode: the leader runs the nodes itself.';
