-- Stream tables: a public function for the caller, and what it asks of the private tables.

CREATE FUNCTION _sluice.difference_statement(_relid regclass, _query text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT format(
        $statement$
WITH fresh AS (
    SELECT q.*, ROW(%2$s)::text COLLATE "C" AS key FROM (
%5$s
    ) AS q (%1$s)
), fresh_numbered AS (
    SELECT f.*, row_number() OVER (PARTITION BY f.key) AS number FROM fresh AS f
), stored AS (
    SELECT t.ctid AS tid, ROW(%4$s)::text COLLATE "C" AS key FROM ONLY %6$s AS t
), stored_numbered AS (
    SELECT s.tid, s.key, row_number() OVER (PARTITION BY s.key) AS number FROM stored AS s
), difference AS MATERIALIZED (
    SELECT s.tid, f.*
    FROM stored_numbered AS s FULL JOIN fresh_numbered AS f ON f.key = s.key AND f.number = s.number
    WHERE s.tid IS NULL OR f.key IS NULL
), deleted AS (
    DELETE FROM ONLY %6$s AS t USING difference AS d WHERE t.ctid = d.tid RETURNING 1
), inserted AS (
    INSERT INTO %6$s (%3$s)
    SELECT %1$s FROM difference AS d
    -- Every row that goes is gone before the first one comes, so a unique index holds all the while.
    WHERE d.tid IS NULL AND (SELECT count(*) FROM deleted) >= 0
    RETURNING 1
)
SELECT (SELECT count(*) FROM deleted) + (SELECT count(*) FROM inserted)
$statement$,
        string_agg(format('c%s', c.number), ', ' ORDER BY c.number),
        string_agg(format('q.c%s', c.number), ', ' ORDER BY c.number),
        string_agg(format('%I', c.attname), ', ' ORDER BY c.number),
        string_agg(format('t.%I', c.attname), ', ' ORDER BY c.number),
        _query,
        _relid
    )
    FROM (
        SELECT a.attname, row_number() OVER (ORDER BY a.attnum) AS number
        FROM pg_attribute AS a
        WHERE a.attrelid = _relid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS c);
END;
$$;
COMMENT ON FUNCTION _sluice.difference_statement(regclass, text) IS
    'The statement that makes a table equal to a query and gives the number of rows that it deleted and inserted. It writes only the difference, under ROW EXCLUSIVE. Rows are the same when their text forms are, which tells apart what "=" does not (1.0 and 1.00) and works for types without equality; of several equal rows the n-th stands for the n-th. The query''s columns are renamed by position, so no name can clash';

CREATE FUNCTION _sluice.do_create_stream_table(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_relid CONSTANT oid := (_arguments ->> 'relid')::oid;
    v_pgt_id bigint;
BEGIN
    PERFORM _sluice.begin_definition();
    PERFORM _sluice.check_owned_relation(_caller, v_relid);
    INSERT INTO _sluice.node AS n (
        kind, relid, query, column_signature, refresh_mode, mode_reason, schedule, anchor, priority,
        lock_timeout, refresh_timeout, max_lag
    )
    VALUES (
        'stream_table', v_relid, _arguments ->> 'query', _sluice.column_signature(v_relid),
        _arguments ->> 'refresh_mode', 'incremental refresh is not available in this version',
        _arguments ->> 'schedule', clock_timestamp(), (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval,
        (_arguments ->> 'max_lag')::interval
    )
    RETURNING n.pgt_id INTO v_pgt_id;
    INSERT INTO _sluice.node_state (pgt_id, last_success_at)
    SELECT v_pgt_id, statement_timestamp() WHERE (_arguments ->> 'initialize')::boolean;
    INSERT INTO _sluice.dependency (pgt_id, relid)
    SELECT v_pgt_id, s.value::oid FROM jsonb_array_elements_text(_arguments -> 'sources') AS s;
    IF NOT (_arguments ->> 'deferred')::boolean THEN
        PERFORM _sluice.settle(ARRAY[v_pgt_id], true);
    END IF;
    RETURN to_jsonb(v_pgt_id);
END;
$$;

CREATE FUNCTION sluice.create_stream_table(
    name text,
    query text,
    schedule text DEFAULT '@every 1m',
    refresh_mode text DEFAULT 'auto',
    initialize boolean DEFAULT true,
    priority integer DEFAULT 0,
    lock_timeout interval DEFAULT NULL,
    refresh_timeout interval DEFAULT NULL,
    max_lag interval DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('create_stream_table', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', name, 'query', query, 'schedule', schedule, 'refresh_mode', refresh_mode,
        'initialize', initialize, 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout, 'max_lag', max_lag
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.create_stream_table(text, text, text, text, boolean, integer, interval, interval, interval) IS
'Creates a table that is kept equal to a query.
name: the table to create, optionally schema-qualified. query: one SELECT without volatile functions, resolved in the present search_path. schedule: when it is refreshed. refresh_mode: auto or full. initialize: fill it now; otherwise the first run does. priority: -100 to 100, a step is worth ten seconds of waiting. lock_timeout, refresh_timeout: for this node instead of the settings. max_lag: when health_check() calls it late, see there.
The table is made, filled and later refreshed with the rights of the caller, who owns it. Returns its pgt_id. Errors leave nothing behind. Locks: as CREATE TABLE AS.';

CREATE FUNCTION _sluice.do_alter_stream_table(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node;
    v_reschedule CONSTANT boolean := _arguments ->> 'schedule' IS NOT NULL;
BEGIN
    PERFORM _sluice.begin_definition();
    v_node := _sluice.find_own_node(_caller, _arguments);
    UPDATE _sluice.node AS n
    SET query = COALESCE(_arguments ->> 'query', n.query),
        -- The new query was compared with the columns that the table has now.
        column_signature = CASE
            WHEN _arguments ->> 'query' IS NULL THEN n.column_signature
            ELSE _sluice.column_signature(n.relid)
        END,
        refresh_mode = COALESCE(_arguments ->> 'refresh_mode', n.refresh_mode),
        schedule = COALESCE(_arguments ->> 'schedule', n.schedule),
        anchor = CASE WHEN v_reschedule THEN clock_timestamp() ELSE n.anchor END,
        priority = COALESCE((_arguments ->> 'priority')::integer, n.priority),
        lock_timeout = COALESCE((_arguments ->> 'lock_timeout')::interval, n.lock_timeout),
        refresh_timeout = COALESCE((_arguments ->> 'refresh_timeout')::interval, n.refresh_timeout),
        max_lag = COALESCE((_arguments ->> 'max_lag')::interval, n.max_lag),
        status = CASE WHEN v_reschedule AND n.status = 'quarantined' THEN 'active' ELSE n.status END
    WHERE n.pgt_id = v_node.pgt_id;
    IF v_reschedule THEN
        PERFORM _sluice.close_alert('quarantined', v_node.pgt_id);
    END IF;
    IF _arguments -> 'sources' IS NOT NULL THEN
        DELETE FROM _sluice.dependency AS d WHERE d.pgt_id = v_node.pgt_id;
        INSERT INTO _sluice.dependency (pgt_id, relid)
        SELECT v_node.pgt_id, s.value::oid FROM jsonb_array_elements_text(_arguments -> 'sources') AS s;
    END IF;
    PERFORM _sluice.settle(CASE WHEN v_reschedule THEN ARRAY[v_node.pgt_id] ELSE '{}' END, true);
    -- A new query shows at the next tick, on whatever grid the table was put.
    UPDATE _sluice.node AS n SET next_fire_at = clock_timestamp()
    WHERE n.pgt_id = v_node.pgt_id AND _arguments ->> 'query' IS NOT NULL;
    RETURN NULL;
END;
$$;

CREATE FUNCTION sluice.alter_stream_table(
    name text,
    query text DEFAULT NULL,
    schedule text DEFAULT NULL,
    refresh_mode text DEFAULT NULL,
    priority integer DEFAULT NULL,
    lock_timeout interval DEFAULT NULL,
    refresh_timeout interval DEFAULT NULL,
    max_lag interval DEFAULT NULL
)
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('alter_stream_table', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', name, 'query', query, 'schedule', schedule, 'refresh_mode', refresh_mode,
        'priority', priority, 'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout,
        'max_lag', max_lag
    )))
$$;
COMMENT ON FUNCTION sluice.alter_stream_table(text, text, text, text, integer, interval, interval, interval) IS
'Changes what is given of a stream table; NULL leaves a property as it is.
query: must have the same columns; the rows follow with a run that is due at once. schedule: starts a new grid now and ends a quarantine. A query that would make the table read itself is refused with the path.
Only for its owner. Locks: none on the table.';

CREATE FUNCTION _sluice.do_drop_stream_table(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node;
    v_dependents jsonb;
BEGIN
    PERFORM _sluice.begin_definition();
    v_node := _sluice.find_own_node(_caller, _arguments);
    SELECT jsonb_agg(n.relid::oid::bigint ORDER BY g.depth DESC) INTO v_dependents
    FROM _sluice.downstream(ARRAY[v_node.pgt_id]) AS w
    JOIN _sluice.node AS n ON n.pgt_id = w AND n.kind = 'stream_table'
    JOIN _sluice.graph AS g ON g.pgt_id = n.pgt_id;
    IF v_dependents IS NOT NULL AND NOT (_arguments ->> 'cascade')::boolean THEN
        RAISE EXCEPTION USING
            ERRCODE = 'dependent_objects_still_exist',
            MESSAGE = format('cannot drop stream table "%s" because other stream tables read it', _arguments ->> 'name'),
            DETAIL = (
                SELECT string_agg(format('stream table %s reads it', e.value::oid::regclass), E'\n')
                FROM jsonb_array_elements_text(v_dependents) AS e
            ),
            HINT = 'Pass cascade => true to drop them too.';
    END IF;
    RETURN COALESCE(v_dependents, '[]') || to_jsonb(v_node.relid::oid::bigint);
END;
$$;

CREATE FUNCTION sluice.drop_stream_table(name text, "cascade" boolean DEFAULT false)
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('drop_stream_table', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(), 'name', name, 'cascade', "cascade"
    )))
$$;
COMMENT ON FUNCTION sluice.drop_stream_table(text, boolean) IS
'Drops a stream table and its definition; its history stays.
cascade: also drop the stream tables that read it, and what DROP TABLE ... CASCADE drops. Only for the owner of all of them. Locks: as DROP TABLE.';

CREATE FUNCTION _sluice.changeable_settings()
RETURNS jsonb
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_object_agg(s.name, current_setting(s.name))
    FROM pg_settings AS s
    WHERE s.context IN ('user', 'superuser') AND s.name !~ '^(search_path|transaction_.*)$'
$$;
COMMENT ON FUNCTION _sluice.changeable_settings() IS
    'The settings that SQL of another owner could change in this session; search_path aside, which every function of ours pins for itself';

CREATE FUNCTION _sluice.restore_settings(_settings jsonb)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT set_config(e.key, e.value, false)
    FROM jsonb_each_text(_settings) AS e
    JOIN jsonb_each_text(_sluice.changeable_settings()) AS now ON now.key = e.key AND now.value <> e.value
$$;
COMMENT ON FUNCTION _sluice.restore_settings(jsonb) IS 'Puts settings back that differ from the argument';

CREATE FUNCTION _sluice.await_run(_node _sluice.node)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_callers CONSTANT text := current_setting('lock_timeout');
    v_longest CONSTANT interval := COALESCE(_node.lock_timeout, _sluice.interval_setting('lock_timeout'));
BEGIN
    IF v_callers = '0' OR v_callers::interval > v_longest THEN
        PERFORM set_config('lock_timeout', ceil(extract(epoch FROM v_longest) * 1000)::text, true);
    END IF;
    PERFORM pg_advisory_xact_lock(_sluice.lock_class('node'), _node.pgt_id::integer);
    PERFORM set_config('lock_timeout', v_callers, true);
EXCEPTION
    WHEN lock_not_available THEN
        RAISE EXCEPTION USING
            ERRCODE = 'lock_not_available',
            MESSAGE = format('could not refresh stream table "%s" because a run of it is in progress', _sluice.node_name(_node)),
            DETAIL = 'The wait for it is bounded by lock_timeout: the shortest of the node''s or the setting, and the session''s.',
            HINT = 'sluice.queue() shows the run.';
END;
$$;
COMMENT ON FUNCTION _sluice.await_run(_sluice.node) IS
    'Takes the node''s lock until the end of the transaction; waits for a run in progress, at most as long as a run waits for a lock, and then raises 55P03';

CREATE FUNCTION _sluice.refuse_while_draining(_name text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_end CONSTANT text := CASE WHEN _sluice.control_database() IS NOT NULL
        THEN _sluice.control('drain_end', jsonb_build_object('_db_oid', _sluice.database_oid())) #>> '{}' END;
BEGIN
    IF v_end IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('cannot refresh stream table "%s" while the database drains or is drained', _name),
            HINT = format('End the drain with %s, or pass force => true.', v_end);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.refuse_while_draining(text) IS
    'Raises 55000 while a drain of the database or of the server is in force';

CREATE FUNCTION _sluice.do_refresh_stream_table(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node CONSTANT _sluice.node := _sluice.find_own_node(_caller, _arguments);
    v_forced CONSTANT boolean := COALESCE((_arguments ->> 'force')::boolean, false);
    v_settings jsonb;
    v_outcome text;
BEGIN
    -- Before the lock, since a drain waits for it: calls that are refused must not hold the drain up.
    PERFORM _sluice.refuse_while_draining(_arguments ->> 'name') WHERE NOT v_forced;
    PERFORM _sluice.await_run(v_node);
    -- And under it: a drain that is requested from here on waits for us, and an earlier one is seen.
    PERFORM _sluice.refuse_while_draining(_arguments ->> 'name') WHERE NOT v_forced;
    v_settings := _sluice.changeable_settings();
    SELECT p.outcome INTO v_outcome
    FROM _sluice.perform(gen_random_uuid(), v_node.pgt_id, clock_timestamp(), 1, 'manual', NULL) AS p;
    PERFORM _sluice.restore_settings(v_settings);
    RETURN to_jsonb(v_outcome);
END;
$$;

CREATE FUNCTION sluice.refresh_stream_table(name text, force boolean DEFAULT false)
RETURNS text
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_path CONSTANT text := pg_catalog.current_setting('search_path');
    v_outcome text;
BEGIN
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('refresh_stream_table', pg_catalog.jsonb_build_object(
        'kinds', ARRAY['stream_table'], 'name', name,
        'relid', _sluice.relation_of(name), 'force', force
    ))
    RETURNING result OPERATOR(pg_catalog.#>>) '{}' INTO v_outcome;
    -- The owner's functions may have changed it; no pinned function can put it back.
    IF pg_catalog.textne(v_path, pg_catalog.current_setting('search_path')) THEN
        PERFORM pg_catalog.set_config('search_path', v_path, false);
    END IF;
    RETURN v_outcome;
END;
$$;
COMMENT ON FUNCTION sluice.refresh_stream_table(text, boolean) IS
'Refreshes a stream table now, in the caller''s transaction and with its owner''s rights; returns the outcome.
force: also while the database drains or is drained, which is an error otherwise. Waits for a run of the same node in progress, for lock_timeout at the most (the node''s or the setting). Only for its owner. Makes deferred constraints of the transaction immediate.';

CREATE FUNCTION _sluice.do_explain_stream_table(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node CONSTANT _sluice.node := _sluice.find_own_node(_caller, _arguments);
BEGIN
    RETURN jsonb_build_array(
        jsonb_build_array('mode', 'full'),
        jsonb_build_array('reason', CASE WHEN v_node.refresh_mode = 'full' THEN 'refresh_mode is full' ELSE v_node.mode_reason END),
        jsonb_build_array('query', v_node.query),
        jsonb_build_array('delta SQL', _sluice.difference_statement(v_node.relid, v_node.query)),
        jsonb_build_array('sources', (
            SELECT string_agg(d.relid::text, ', ' ORDER BY d.relid::text) FROM _sluice.dependency AS d WHERE d.pgt_id = v_node.pgt_id
        )),
        jsonb_build_array('schedule', v_node.schedule),
        jsonb_build_array('lag', clock_timestamp() - (
            SELECT s.last_success_at FROM _sluice.node_state AS s WHERE s.pgt_id = v_node.pgt_id
        )),
        jsonb_build_array('next fire', v_node.next_fire_at::text)
    );
END;
$$;

CREATE FUNCTION sluice.explain_stream_table(name text)
RETURNS TABLE (property text, value text)
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_result jsonb;
BEGIN
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('explain_stream_table', pg_catalog.jsonb_build_object(
        'kinds', ARRAY['stream_table'], 'name', name, 'relid', _sluice.relation_of(name)
    ))
    RETURNING result INTO v_result;
    RETURN QUERY
    SELECT
        pg_catalog.jsonb_array_element_text(e.value, 0),
        pg_catalog.jsonb_array_element_text(e.value, 1)
    FROM pg_catalog.jsonb_array_elements(v_result) AS e;
END;
$$;
COMMENT ON FUNCTION sluice.explain_stream_table(text) IS
'How a stream table is refreshed and why so: mode, reason, SQL, sources, lag, next fire. Only for its owner. Takes no lock.';

CREATE FUNCTION _sluice.do_bulk_create(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.settle(
        ARRAY(
            SELECT n.pgt_id FROM _sluice.node AS n
            WHERE _arguments -> 'pgt_ids' @> to_jsonb(n.pgt_id) AND n.next_fire_at IS NULL
                AND _sluice.owns(_caller, _sluice.node_owner(n))
        ),
        true
    );
    RETURN NULL;
END;
$$;

CREATE FUNCTION sluice.bulk_create(definitions jsonb)
RETURNS TABLE (name text, pgt_id bigint)
LANGUAGE sql VOLATILE
AS $$
    SELECT
        pg_catalog.jsonb_extract_path_text(e.value, 'name'),
        pg_catalog.jsonb_extract_path(e.value, 'pgt_id')::bigint
    FROM pg_catalog.jsonb_array_elements(_sluice.unwrap(_sluice.invoke(
        'bulk_create', pg_catalog.jsonb_build_object(
            -- As text: its length is checked before it is read.
            'session', _sluice.session_settings(), 'definitions', definitions::pg_catalog.text
        )
    ))) AS e
$$;
COMMENT ON FUNCTION sluice.bulk_create(jsonb) IS
'Creates many stream tables, all or none.
definitions: an array of objects whose keys are the arguments of create_stream_table; a later one may read an earlier one. At most max_bulk_definitions and max_bulk_bytes. Needs the right to call create_stream_table too.';

-- A dropped relation takes its definition along, whoever drops it and however.
CREATE FUNCTION _sluice.forget_dropped_relations()
RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM _sluice.node AS n
    USING pg_event_trigger_dropped_objects() AS o
    WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0 AND n.relid = o.objid;
    IF FOUND THEN
        PERFORM _sluice.settle('{}', true);
    END IF;
    DELETE FROM _sluice.watermark AS w
    USING pg_event_trigger_dropped_objects() AS o
    WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0 AND w.relid = o.objid;
    DELETE FROM _sluice.watermark_group_source AS s
    USING pg_event_trigger_dropped_objects() AS o
    WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0 AND s.relid = o.objid;
END;
$$;
CREATE EVENT TRIGGER sluice_forget_dropped_relations ON sql_drop
    EXECUTE FUNCTION _sluice.forget_dropped_relations();
-- Also where session_replication_role is replica.
ALTER EVENT TRIGGER sluice_forget_dropped_relations ENABLE ALWAYS;
