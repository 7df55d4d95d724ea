-- The one door from users' rights to the private tables. A user inserts a command into this view. The
-- first trigger runs with the user's rights and stamps the row with who that is, whatever was given;
-- the second runs with the extension's rights, where nothing else would tell it who asks.
--
-- What a command does is in _sluice.do_<command>(caller, arguments). A caller needs EXECUTE on the
-- public function of that name.

CREATE VIEW _sluice.request AS
SELECT NULL::text AS command, NULL::jsonb AS arguments, NULL::jsonb AS result, NULL::name AS caller
WHERE false;
COMMENT ON VIEW _sluice.request IS 'Insert a command as its caller; RETURNING result gives its result';

CREATE FUNCTION _sluice.stamp_caller()
RETURNS trigger
LANGUAGE plpgsql SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.caller := CURRENT_USER;
    RETURN NEW;
END;
$$;
COMMENT ON FUNCTION _sluice.stamp_caller() IS 'Writes down the role that inserts; must stay SECURITY INVOKER';

CREATE FUNCTION _sluice.handle_request()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_function CONSTANT oid := (
        SELECT p.oid FROM pg_proc AS p
        WHERE p.pronamespace = 'sluice'::regnamespace AND p.proname = NEW.command AND p.prokind = 'f'
    );
BEGIN
    IF v_function IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_function',
            MESSAGE = format('command "%s" does not exist', NEW.command);
    END IF;
    IF NOT has_function_privilege(NEW.caller, v_function, 'EXECUTE') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for function %s', NEW.command);
    END IF;
    EXECUTE format('SELECT _sluice.%I($1, $2)', 'do_' || NEW.command)
    INTO NEW.result USING NEW.caller, NEW.arguments;
    RETURN NEW;
END;
$$;
COMMENT ON FUNCTION _sluice.handle_request() IS 'Checks the caller''s privilege and carries the command out';

-- Triggers of one event fire in the order of their names.
CREATE TRIGGER a_stamp_caller INSTEAD OF INSERT ON _sluice.request
    FOR EACH ROW EXECUTE FUNCTION _sluice.stamp_caller();
CREATE TRIGGER b_handle_request INSTEAD OF INSERT ON _sluice.request
    FOR EACH ROW EXECUTE FUNCTION _sluice.handle_request();

CREATE FUNCTION _sluice.owns(_caller name, _owner oid)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(pg_has_role(_caller, _owner, 'USAGE'), false)
$$;
COMMENT ON FUNCTION _sluice.owns(name, oid) IS 'Whether a role has the rights of an owner';

CREATE FUNCTION _sluice.relation_of(_name text)
RETURNS bigint
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    RETURN pg_catalog.to_regclass(_name)::oid::bigint;
EXCEPTION
    -- A job's name need not be an identifier.
    WHEN syntax_error OR invalid_name OR feature_not_supported OR invalid_parameter_value THEN
        RETURN NULL;
END;
$$;
COMMENT ON FUNCTION _sluice.relation_of(text) IS
    'The OID of the relation of that name in the caller''s search_path, hence without a pinned one; NULL when there is none';

CREATE FUNCTION _sluice.find_node(_arguments jsonb)
RETURNS _sluice.node
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_name CONSTANT text := _arguments ->> 'name';
    v_relid CONSTANT oid := (_arguments ->> 'relid')::oid;
    v_kinds CONSTANT jsonb := COALESCE(_arguments -> 'kinds', '["stream_table", "matview", "job"]');
    v_nodes _sluice.node[];
BEGIN
    IF v_name IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'name must not be null';
    END IF;
    v_nodes := ARRAY(
        SELECT n FROM _sluice.node AS n
        WHERE v_kinds ? n.kind AND (n.job_name = v_name OR n.relid = v_relid)
    );
    IF cardinality(v_nodes) = 1 THEN
        RETURN v_nodes[1];
    ELSIF cardinality(v_nodes) > 1 THEN
        RAISE EXCEPTION USING
            ERRCODE = 'ambiguous_parameter',
            MESSAGE = format('name "%s" is ambiguous', v_name),
            DETAIL = 'It is the name of a job and of a relation.',
            HINT = 'Qualify the relation with its schema.';
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'undefined_object',
        MESSAGE = format(
            '%s "%s" does not exist',
            CASE WHEN jsonb_array_length(v_kinds) = 1 THEN
                CASE v_kinds ->> 0 WHEN 'stream_table' THEN 'stream table' WHEN 'job' THEN 'job' ELSE 'scheduled materialized view' END
            ELSE 'node' END,
            v_name
        ),
        HINT = 'The view sluice.nodes lists what is scheduled in this database.';
END;
$$;
COMMENT ON FUNCTION _sluice.find_node(jsonb) IS
    'The node that "name" (a job) or "relid" (what the name is as a relation in the caller''s search_path) means, among "kinds"';

CREATE FUNCTION _sluice.find_own_node(_caller name, _arguments jsonb)
RETURNS _sluice.node
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node CONSTANT _sluice.node := _sluice.find_node(_arguments);
BEGIN
    -- A node whose relation or owner is gone is nobody's; a superuser can clear it away.
    IF NOT _sluice.owns(_caller, _sluice.node_owner(v_node))
        AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = _caller)
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = format('must be owner of "%s"', _arguments ->> 'name');
    END IF;
    RETURN v_node;
END;
$$;
COMMENT ON FUNCTION _sluice.find_own_node(name, jsonb) IS 'As find_node, and raises unless the caller has the owner''s rights';

CREATE FUNCTION _sluice.check_owned_relation(_caller name, _relid oid)
RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM pg_class AS c WHERE c.oid = _relid AND _sluice.owns(_caller, c.relowner);
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = format('must be owner of relation %s', _relid::regclass);
    END IF;
    PERFORM FROM _sluice.node AS n WHERE n.relid = _relid;
    IF FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'duplicate_object',
            MESSAGE = format('relation %s is scheduled already', _relid::regclass);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.check_owned_relation(name, oid) IS
    'Raises unless the caller owns the relation and it is no node yet';

CREATE TABLE _sluice.last_definition (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT last_definition_pkey PRIMARY KEY
        CONSTRAINT last_definition_singleton_check CHECK (singleton),
    xid xid8 NOT NULL
);
COMMENT ON TABLE _sluice.last_definition IS
    'The transaction that changed definitions last, so that one whose snapshot is older fails with 40001: it would check them against what is no longer there';
INSERT INTO _sluice.last_definition (xid) VALUES (pg_catalog.pg_current_xact_id());

CREATE FUNCTION _sluice.begin_definition()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_advisory_xact_lock(_sluice.lock_class('catalog'), 0);
    UPDATE _sluice.last_definition AS l SET xid = pg_current_xact_id() WHERE l.xid <> pg_current_xact_id();
$$;
COMMENT ON FUNCTION _sluice.begin_definition() IS
    'Definitions change one transaction after the other, so that the graph is whole; runs and ticks never wait for this. Raises 40001 where the transaction''s snapshot is older than a change';

CREATE FUNCTION _sluice.settle(_pgt_ids bigint[], _graph boolean)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.unwrap(_sluice.invoke_privileged(
        'settle', jsonb_build_object('pgt_ids', _pgt_ids, 'graph', _graph)
    ));
    -- What is gone is nobody's trouble any more.
    SELECT _sluice.close_alert(a.event, a.pgt_id)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
        AND a.pgt_id IS NOT NULL
        AND NOT EXISTS (SELECT FROM _sluice.node AS n WHERE n.pgt_id = a.pgt_id);
    SELECT _sluice.wake();
$$;
COMMENT ON FUNCTION _sluice.settle(bigint[], boolean) IS
    'After a change of definitions: puts these nodes on their grid, derives the graph anew where relations are concerned (a cycle is an error that names the path), closes the alerts about nodes that are gone, and wakes the scheduler';

CREATE FUNCTION _sluice.store_graph(_rows jsonb)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO _sluice.graph AS g (pgt_id, depth, upstream, effective_schedule)
    SELECT r.pgt_id, r.depth, r.upstream, r.effective_schedule
    FROM jsonb_to_recordset(_rows) AS r (pgt_id bigint, depth integer, upstream bigint[], effective_schedule text)
    ON CONFLICT (pgt_id) DO UPDATE
    SET depth = EXCLUDED.depth, upstream = EXCLUDED.upstream, effective_schedule = EXCLUDED.effective_schedule
    WHERE (g.depth, g.upstream, g.effective_schedule)
        IS DISTINCT FROM (EXCLUDED.depth, EXCLUDED.upstream, EXCLUDED.effective_schedule)
$$;
COMMENT ON FUNCTION _sluice.store_graph(jsonb) IS 'Writes the rows of the graph that differ';

CREATE FUNCTION _sluice.store_grid(_rows jsonb)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.node AS n
    SET anchor = r.anchor, next_fire_at = r.next_fire_at, fire_step = NULL, retry_at = NULL, retry_of = NULL
    FROM jsonb_to_recordset(_rows) AS r (pgt_id bigint, anchor timestamptz, next_fire_at timestamptz)
    WHERE n.pgt_id = r.pgt_id
$$;
COMMENT ON FUNCTION _sluice.store_grid(jsonb) IS 'Puts nodes on a new grid';
