-- What a node's owner can do with any kind of node.

CREATE FUNCTION _sluice.do_run_now(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node CONSTANT _sluice.node := _sluice.find_own_node(_caller, _arguments);
    v_run_id jsonb;
BEGIN
    IF v_node.status IN ('suspended', 'quarantined') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('"%s" is %s', _arguments ->> 'name', v_node.status),
            HINT = 'Clear that with sluice.reset().';
    ELSIF v_node.created_at >= transaction_timestamp() THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('"%s" was made after this transaction began', _arguments ->> 'name'),
            DETAIL = 'A run knows only what was committed before it begins.',
            HINT = 'Commit, then call sluice.run_now().';
    END IF;
    v_run_id := _sluice.control('enqueue_now', jsonb_build_object(
        '_db_oid', _sluice.database_oid(),
        '_run', jsonb_build_object(
            'pgt_id', v_node.pgt_id, 'name', _sluice.node_name(v_node), 'priority', 100,
            'upstream', '[]'::jsonb, 'due_at', clock_timestamp(), 'attempt', 1, 'reason', 'run_now',
            'options', _sluice.run_options(v_node)
        )
    ));
    IF v_run_id IS NULL OR v_run_id = 'null' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_in_use',
            MESSAGE = format('"%s" is running', _arguments ->> 'name'),
            DETAIL = 'A node has one run at a time, until that is recorded in history.',
            HINT = 'Call again when sluice.queue() no longer shows it.';
    END IF;
    RETURN v_run_id;
END;
$$;

CREATE FUNCTION sluice.run_now(name text)
RETURNS uuid
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('run_now', pg_catalog.jsonb_build_object(
        'name', name, 'relid', _sluice.relation_of(name)
    ))
    RETURNING (result OPERATOR(pg_catalog.#>>) '{}')::uuid
$$;
COMMENT ON FUNCTION sluice.run_now(text) IS
'Queues a run of a node at once, whether or not the calling transaction commits; returns its run_id, or that of the run that is queued already. An error where the database was not started, in the transaction that made the node (55000), while it runs, and when the database has max_queue_depth queued runs (53400). Only for its owner.';

CREATE FUNCTION _sluice.do_reset(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node CONSTANT _sluice.node := _sluice.find_own_node(_caller, _arguments);
BEGIN
    UPDATE _sluice.node AS n
    SET status = CASE WHEN n.status IN ('suspended', 'quarantined') THEN 'active' ELSE n.status END,
        retry_at = NULL, retry_of = NULL
    WHERE n.pgt_id = v_node.pgt_id;
    UPDATE _sluice.node_state AS s SET consecutive_errors = 0, work_mem = NULL, successes = 0 WHERE s.pgt_id = v_node.pgt_id;
    PERFORM _sluice.close_alert('suspended', v_node.pgt_id);
    PERFORM _sluice.close_alert('quarantined', v_node.pgt_id);
    PERFORM _sluice.wake();
    RETURN NULL;
END;
$$;

CREATE FUNCTION sluice.reset(name text)
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('reset', pg_catalog.jsonb_build_object(
        'name', name, 'relid', _sluice.relation_of(name)
    ))
$$;
COMMENT ON FUNCTION sluice.reset(text) IS
'Lifts a node''s suspension or quarantine and clears its errors, pending retry and remedies. Only for its owner.';
