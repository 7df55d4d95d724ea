-- Generated from sql/ by "make script". Change it there.
\echo Use "CREATE EXTENSION pg_sluice" to load this file. \quit

-- sql/schemas.sql

-- The two schemas. Users call and read what is in "sluice"; "_sluice" is private: its objects may
-- change in any release.

CREATE SCHEMA sluice;
COMMENT ON SCHEMA sluice IS 'pg_sluice: functions and views for users';

CREATE SCHEMA _sluice;
COMMENT ON SCHEMA _sluice IS 'pg_sluice: private tables and functions, not for users';

-- sql/errors.sql

-- How an error that Python decided on reaches the user: PL/Python alone can't raise a clean message,
-- so it returns a record and this PL/pgSQL frame raises it.

CREATE FUNCTION _sluice.unwrap(_result jsonb)
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_error CONSTANT jsonb := _result -> 'error';
BEGIN
    IF v_error IS NULL THEN
        RETURN _result -> 'value';
    END IF;
    -- A NULL option in USING is an error of its own, hence the four forms.
    IF v_error ? 'detail' AND v_error ? 'hint' THEN
        RAISE EXCEPTION USING
            ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message',
            DETAIL = v_error ->> 'detail', HINT = v_error ->> 'hint';
    ELSIF v_error ? 'detail' THEN
        RAISE EXCEPTION USING
            ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message',
            DETAIL = v_error ->> 'detail';
    ELSIF v_error ? 'hint' THEN
        RAISE EXCEPTION USING
            ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message',
            HINT = v_error ->> 'hint';
    END IF;
    RAISE EXCEPTION USING ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message';
END;
$$;
COMMENT ON FUNCTION _sluice.unwrap(jsonb) IS
    'The value in a result of a PL/Python function; raises the error record in it, if there is one';

-- sql/settings.sql

-- Settings: one definition each, a value for the whole server (scope "cluster") and, where the
-- scope allows it, one for a database, which wins. The server's values are kept in the control
-- database; the leader copies them into every member, so that reading a setting stays local.

CREATE VIEW _sluice.setting_definition AS
SELECT d.name, d.type, d.default_value, d.min_value, d.max_value, d.unit, d.scope, d.description
FROM (VALUES
    ('max_workers', 'integer', '4', '0', '64', NULL, 'cluster',
        'Workers on the whole server at the most. 0 runs every node on the leader, one after the other.'),
    ('database_quota', 'integer', '0', '0', '64', NULL, 'cluster',
        'Workers for one database while others wait. 0 shares the limit evenly.'),
    ('scheduler_interval', 'interval', '1 s', '100 ms', '60 s', 's', 'cluster',
        'Longest time between two ticks of a database.'),
    ('max_scheduler_connections', 'integer', '16', '0', '1000', NULL, 'cluster',
        'Databases that keep a connection of the scheduler. Others are connected to for each tick, and new nodes there are noticed within ten scheduler_intervals.'),
    ('lease_ttl', 'interval', '15 s', '1 s', '5 min', 's', 'cluster',
        'Time after which a leader that stopped renewing its lease is replaced.'),
    ('worker_start_timeout', 'interval', '10 s', '100 ms', '5 min', 's', 'cluster',
        'Time that a worker has to connect before its slot is taken back.'),
    ('worker_idle_timeout', 'interval', '30 s', '0 s', '1 h', 's', 'cluster',
        'Time after which a worker without work gives its slot back.'),
    ('connection_reserve', 'integer', '5', '0', '1000', NULL, 'cluster',
        'Connections of the server that workers leave to others.'),
    ('refresh_timeout', 'interval', '5 min', '1 ms', '24 h', 's', 'database',
        'Deadline of one run; a node can have its own.'),
    ('lock_timeout', 'interval', '5 s', '1 ms', '10 min', 's', 'database',
        'Longest wait for one lock in a run; a node can have its own.'),
    ('refresh_work_mem', 'bytes', '64 MB', '64 kB', '8 GB', 'bytes', 'database',
        'work_mem of a run.'),
    ('drain_timeout', 'interval', '60 s', '0 s', '1 h', 's', 'database',
        'How long drain() waits when it is given no timeout.'),
    ('pause_timeout', 'interval', '30 s', '0 s', '1 h', 's', 'database',
        'How long pause() waits when it is given no timeout.'),
    ('max_consecutive_errors', 'integer', '3', '1', '100', NULL, 'database',
        'Failures in a row after which a node is suspended.'),
    ('retry_backoff_base', 'interval', '1 s', '100 ms', '1 h', 's', 'database',
        'Wait before the first retry; doubled for each further one.'),
    ('retry_backoff_cap', 'interval', '5 min', '100 ms', '24 h', 's', 'database',
        'Longest wait before a retry.'),
    ('max_query_bytes', 'bytes', '64 kB', '1 kB', '1 MB', 'bytes', 'database',
        'Longest query or command that is accepted.'),
    ('max_parse_depth', 'integer', '64', '8', '256', NULL, 'database',
        'Deepest nesting of the parsed query of a stream table.'),
    ('max_parse_nodes', 'integer', '5000', '100', '50000', NULL, 'database',
        'Largest number of nodes in the parsed query of a stream table.'),
    ('max_query_sources', 'integer', '32', '1', '128', NULL, 'database',
        'Largest number of relations that a stream table reads, through views too.'),
    ('max_bulk_definitions', 'integer', '100', '1', '1000', NULL, 'database',
        'Largest number of definitions in one bulk_create().'),
    ('max_bulk_bytes', 'bytes', '1 MB', '1 kB', '8 MB', 'bytes', 'database',
        'Largest argument of bulk_create().'),
    ('max_pause_nodes', 'integer', '100', '1', '1000', NULL, 'cluster',
        'Largest number of nodes in one pause().'),
    ('max_pause_entries', 'integer', '1000', '1', '10000', NULL, 'cluster',
        'Largest number of paused nodes in a database.'),
    ('max_queue_depth', 'integer', '10000', '1', '100000', NULL, 'cluster',
        'Largest number of queued runs of a database; what is due beyond it stays due.'),
    ('history_retention', 'interval', '30 d', '1 s', '10 y', 's', 'database',
        'Age at which history rows and closed alerts are deleted.'),
    ('maintenance_batch', 'integer', '500', '1', '10000', 'rows', 'database',
        'Rows that one step of upkeep deletes at the most.')
) AS d (name, type, default_value, min_value, max_value, unit, scope, description);

CREATE TABLE _sluice.setting (
    scope text NOT NULL CONSTRAINT setting_scope_check CHECK (scope IN ('cluster', 'database')),
    name text NOT NULL,
    value text NOT NULL,
    CONSTRAINT setting_pkey PRIMARY KEY (scope, name)
);
SELECT pg_catalog.pg_extension_config_dump('_sluice.setting', '');

CREATE FUNCTION _sluice.setting_quantity(_type text, _value text)
RETURNS numeric
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE _type
        WHEN 'integer' THEN _value::integer
        WHEN 'interval' THEN extract(epoch FROM _value::interval)
        WHEN 'bytes' THEN pg_size_bytes(_value)
    END
$$;
COMMENT ON FUNCTION _sluice.setting_quantity(text, text) IS
    'A setting''s text as a number: an integer, seconds, or bytes';

CREATE VIEW _sluice.effective_setting AS
SELECT
    d.name,
    d.type,
    COALESCE(own.value, shared.value, d.default_value) AS value,
    d.default_value,
    d.min_value,
    d.max_value,
    d.unit,
    d.scope,
    d.description
FROM _sluice.setting_definition AS d
LEFT JOIN _sluice.setting AS own ON own.name = d.name AND own.scope = 'database'
LEFT JOIN _sluice.setting AS shared ON shared.name = d.name AND shared.scope = 'cluster';

CREATE FUNCTION _sluice.setting(_name text)
RETURNS numeric
LANGUAGE sql STABLE STRICT SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.setting_quantity(e.type, e.value) FROM _sluice.effective_setting AS e WHERE e.name = _name
$$;
COMMENT ON FUNCTION _sluice.setting(text) IS
    'The value in force in this database, as a number: an integer, seconds, or bytes';

CREATE FUNCTION _sluice.settings_in_force()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_object_agg(e.name, _sluice.setting_quantity(e.type, e.value))
    FROM _sluice.effective_setting AS e
$$;
COMMENT ON FUNCTION _sluice.settings_in_force() IS 'All settings as the leader reads them, as numbers';

CREATE FUNCTION _sluice.check_setting(_name text, _value text, _cluster boolean)
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_definition _sluice.setting_definition%ROWTYPE;
    v_quantity numeric;
BEGIN
    SELECT * INTO v_definition FROM _sluice.setting_definition AS d WHERE d.name = _name;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_object',
            MESSAGE = format('unrecognized setting %s', COALESCE('"' || _name || '"', 'NULL')),
            HINT = 'The view sluice.settings lists all settings.';
    END IF;
    IF v_definition.scope = 'cluster' AND NOT _cluster THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('setting "%s" can only be set for the whole server', _name),
            HINT = 'Pass cluster => true.';
    END IF;
    IF _value IS NULL THEN
        RETURN;
    END IF;
    BEGIN
        v_quantity := _sluice.setting_quantity(v_definition.type, _value);
    EXCEPTION
        WHEN data_exception THEN
            RAISE EXCEPTION USING
                ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('invalid value for setting "%s": "%s"', _name, _value),
                HINT = CASE v_definition.type
                    WHEN 'integer' THEN 'The value is a whole number.'
                    WHEN 'interval' THEN 'The value is an interval such as ''30 s'' or ''5 min''.'
                    ELSE 'The value is a size such as ''64 MB''.'
                END;
    END;
    IF v_quantity NOT BETWEEN _sluice.setting_quantity(v_definition.type, v_definition.min_value)
        AND _sluice.setting_quantity(v_definition.type, v_definition.max_value)
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format(
                '%s is outside the valid range for setting "%s" (%s .. %s)',
                _value, _name, v_definition.min_value, v_definition.max_value
            );
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.check_setting(text, text, boolean) IS
    'Raises an error unless the setting exists, may be set in that scope, and the value is within its bounds';

CREATE FUNCTION _sluice.store_setting(_scope text, _name text, _value text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.check_setting(_name, _value, _scope = 'cluster');
    IF _value IS NULL THEN
        DELETE FROM _sluice.setting AS s WHERE s.scope = _scope AND s.name = _name;
    ELSE
        INSERT INTO _sluice.setting (scope, name, value) VALUES (_scope, _name, _value)
        ON CONFLICT (scope, name) DO UPDATE SET value = EXCLUDED.value;
    END IF;
    PERFORM pg_notify('sluice_wake', '');
END;
$$;
COMMENT ON FUNCTION _sluice.store_setting(text, text, text) IS
    'Stores a checked value for this database or, in the control database, for the server; NULL restores the default';

CREATE FUNCTION _sluice.cluster_settings()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_object_agg(s.name, s.value), '{}') FROM _sluice.setting AS s WHERE s.scope = 'cluster'
$$;
COMMENT ON FUNCTION _sluice.cluster_settings() IS 'The server''s values, as copied into the members';

CREATE FUNCTION _sluice.copy_cluster_settings(_settings jsonb)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.setting AS s WHERE s.scope = 'cluster' AND NOT _settings ? s.name;
    INSERT INTO _sluice.setting (scope, name, value)
    SELECT 'cluster', e.key, e.value FROM jsonb_each_text(_settings) AS e
    ON CONFLICT (scope, name) DO UPDATE SET value = EXCLUDED.value WHERE setting.value <> EXCLUDED.value;
$$;
COMMENT ON FUNCTION _sluice.copy_cluster_settings(jsonb) IS
    'Makes the member''s copy of the server''s values equal to the argument';

-- sql/nodes.sql

-- What is scheduled in this database, and how the nodes hang together.

CREATE TABLE _sluice.node (
    pgt_id bigint GENERATED BY DEFAULT AS IDENTITY CONSTRAINT node_pkey PRIMARY KEY,
    kind text NOT NULL CONSTRAINT node_kind_check CHECK (kind IN ('stream_table', 'matview', 'job')),
    -- A relation's owner is read from the catalog at every run; only a job has an owner of its own.
    relid regclass CONSTRAINT node_relid_key UNIQUE,
    job_name text CONSTRAINT node_job_name_key UNIQUE,
    job_owner regrole,
    job_search_path text,
    -- A stream table's defining query in canonical form; a job's command.
    query text,
    -- The table's columns when it was created.
    column_signature text,
    command text,
    transactional boolean NOT NULL DEFAULT true,
    "concurrently" boolean NOT NULL DEFAULT true,
    refresh_mode text NOT NULL DEFAULT 'auto'
        CONSTRAINT node_refresh_mode_check CHECK (refresh_mode IN ('auto', 'full')),
    mode_reason text,
    schedule text NOT NULL,
    anchor timestamptz NOT NULL,
    catch_up integer NOT NULL DEFAULT 1 CONSTRAINT node_catch_up_check CHECK (catch_up BETWEEN 1 AND 1000),
    priority integer NOT NULL DEFAULT 0 CONSTRAINT node_priority_check CHECK (priority BETWEEN -100 AND 100),
    lock_timeout interval,
    refresh_timeout interval,
    status text NOT NULL DEFAULT 'active'
        CONSTRAINT node_status_check CHECK (status IN ('active', 'suspended', 'quarantined')),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When the node runs next: its grid, or earlier a retry of the fire "retry_of".
    next_fire_at timestamptz,
    retry_at timestamptz,
    retry_of timestamptz,
    watermark_group text,
    due_at timestamptz GENERATED ALWAYS AS (
        CASE WHEN status = 'active' THEN COALESCE(retry_at, next_fire_at) END
    ) STORED,
    CONSTRAINT node_kind_columns_check CHECK (
        (kind = 'job') = (job_name IS NOT NULL)
        AND (kind = 'job') = (job_owner IS NOT NULL)
        AND (kind = 'job') = (relid IS NULL)
        AND (kind = 'job' OR watermark_group IS NULL)
        AND (kind = 'stream_table') = (query IS NOT NULL)
        AND (kind = 'job') = (command IS NOT NULL)
    ),
    CONSTRAINT node_retry_check CHECK ((retry_at IS NULL) = (retry_of IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX node_due_at_idx ON _sluice.node (due_at) WHERE due_at IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('_sluice.node', '');
SELECT pg_catalog.pg_extension_config_dump('_sluice.node_pgt_id_seq', '');

CREATE TABLE _sluice.node_state (
    pgt_id bigint CONSTRAINT node_state_pkey PRIMARY KEY
        CONSTRAINT node_state_pgt_id_fkey REFERENCES _sluice.node ON DELETE CASCADE,
    last_run_at timestamptz,
    last_outcome text,
    last_success_at timestamptz,
    consecutive_errors integer NOT NULL DEFAULT 0,
    -- The first fire that was skipped since sources were out of step.
    gated_since timestamptz
) WITH (fillfactor = 50);
CREATE INDEX node_state_gated_idx ON _sluice.node_state (pgt_id) WHERE gated_since IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('_sluice.node_state', '');
COMMENT ON TABLE _sluice.node_state IS
    'What runs left behind; it survives restarts. A table of its own, since a run is REPEATABLE READ and the scheduler moves the node on meanwhile; two runs of a node meet here. No row: it has never run';

CREATE TABLE _sluice.dependency (
    pgt_id bigint NOT NULL
        CONSTRAINT dependency_pgt_id_fkey REFERENCES _sluice.node ON DELETE CASCADE,
    relid regclass NOT NULL,
    CONSTRAINT dependency_pkey PRIMARY KEY (pgt_id, relid)
);
CREATE INDEX dependency_relid_idx ON _sluice.dependency (relid);
COMMENT ON TABLE _sluice.dependency IS
    'The relations that a node''s query reads, directly or through views (the views themselves too)';
SELECT pg_catalog.pg_extension_config_dump('_sluice.dependency', '');

CREATE TABLE _sluice.graph (
    pgt_id bigint CONSTRAINT graph_pkey PRIMARY KEY
        CONSTRAINT graph_pgt_id_fkey REFERENCES _sluice.node ON DELETE CASCADE,
    depth integer NOT NULL,
    upstream bigint[] NOT NULL,
    effective_schedule text
);
COMMENT ON TABLE _sluice.graph IS
    'Derived from node and dependency by _sluice.rebuild_graph(). A table of its own, so that defining a node in a long transaction locks no row that runs of other nodes write';
SELECT pg_catalog.pg_extension_config_dump('_sluice.graph', '');

CREATE FUNCTION _sluice.column_signature(_relid regclass)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
AS $$
    SELECT string_agg(
        format('%s %s%s', a.attnum, format_type(a.atttypid, a.atttypmod), ' collation ' || NULLIF(a.attcollation, 0)::regcollation),
        ', ' ORDER BY a.attnum
    )
    FROM pg_attribute AS a
    WHERE a.attrelid = _relid AND a.attnum > 0 AND NOT a.attisdropped
$$;
COMMENT ON FUNCTION _sluice.column_signature(regclass) IS
    'The columns of a table by number, type and collation: what must not change under a stream table, unlike their names';

CREATE FUNCTION _sluice.node_name(_node _sluice.node)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
AS $$
    SELECT COALESCE(_node.job_name, _node.relid::text)
$$;
COMMENT ON FUNCTION _sluice.node_name(_sluice.node) IS
    'The name that history, queue and alerts carry: a job''s name, or a relation''s qualified name';

CREATE FUNCTION _sluice.node_owner(_node _sluice.node)
RETURNS oid
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(_node.job_owner::oid, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = _node.relid))
$$;
COMMENT ON FUNCTION _sluice.node_owner(_sluice.node) IS
    'The role whose rights a run has; NULL when the relation is gone';

-- Advisory locks of pg_sluice are two-key locks; the first key is the class.
CREATE FUNCTION _sluice.lock_class(_purpose text)
RETURNS integer
LANGUAGE sql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE _purpose
        WHEN 'gate' THEN 1936748801      -- control database: claims share it, drain and takeover own it
        WHEN 'node' THEN 1936748802      -- second key pgt_id: one run of a node, by whatever path
        WHEN 'catalog' THEN 1936748803   -- definitions change one after the other
    END
$$;
COMMENT ON FUNCTION _sluice.lock_class(text) IS 'First key of the advisory locks that pg_sluice takes';

-- sql/history.sql

-- Every attempt to run a node is one row here, whatever its end.

CREATE TABLE _sluice.history (
    run_id uuid CONSTRAINT history_pkey PRIMARY KEY,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    kind text NOT NULL,
    mode text,
    outcome text NOT NULL CONSTRAINT history_outcome_check CHECK (outcome IN (
        'succeeded', 'no_change', 'lock_timeout', 'deadline_exceeded', 'out_of_memory',
        'serialization_failure', 'deadlock', 'resource_exhausted', 'connection_lost',
        'worker_crashed', 'cancelled', 'permanent_error', 'skipped'
    )),
    sqlstate text,
    message text,
    detail text,
    context text,
    attempt integer NOT NULL,
    due_at timestamptz,
    started_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    rows_changed bigint,
    reason text,
    pid integer
);
CREATE INDEX history_pgt_id_started_at_idx ON _sluice.history (pgt_id, started_at);
CREATE INDEX history_ended_at_idx ON _sluice.history (ended_at);
-- Forbids that a transactional job runs twice for one fire.
CREATE UNIQUE INDEX history_job_fire_key ON _sluice.history (pgt_id, due_at)
    WHERE kind = 'job' AND outcome IN ('succeeded', 'no_change');

-- sql/alerts.sql

-- Conditions that somebody should look at. An open one is a row without closed_at.

CREATE TABLE _sluice.alert (
    seq bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT alert_pkey PRIMARY KEY,
    event text NOT NULL,
    severity text NOT NULL CONSTRAINT alert_severity_check CHECK (severity IN ('info', 'warning', 'critical')),
    -- What it is about: a node, or in the control database a database.
    node text,
    pgt_id bigint,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at timestamptz,
    last_emitted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    message text NOT NULL,
    detail jsonb
);
-- Forbids that one condition is open twice.
CREATE UNIQUE INDEX alert_open_key ON _sluice.alert (event, COALESCE(pgt_id::text, node, ''))
    WHERE closed_at IS NULL;
CREATE INDEX alert_closed_at_idx ON _sluice.alert (closed_at) WHERE closed_at IS NOT NULL;

CREATE FUNCTION _sluice.emit_alert(_alert _sluice.alert)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('sluice_alert', jsonb_build_object(
        'event', _alert.event,
        'severity', _alert.severity,
        'database', current_database(),
        'node', left(_alert.node, 200),
        'pgt_id', _alert.pgt_id,
        'at', clock_timestamp(),
        'seq', _alert.seq,
        -- NOTIFY takes less than 8,000 bytes; a character is at most six of them as JSON.
        'message', left(_alert.message, 600),
        'truncated', length(_alert.message) > 600 OR length(_alert.node) > 200
    )::text)
$$;

CREATE FUNCTION _sluice.open_alert(
    _event text, _severity text, _pgt_id bigint, _node text, _message text, _detail jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_alert _sluice.alert%ROWTYPE;
BEGIN
    INSERT INTO _sluice.alert (event, severity, pgt_id, node, message, detail)
    VALUES (_event, _severity, _pgt_id, _node, _message, _detail)
    ON CONFLICT (event, COALESCE(pgt_id::text, node, '')) WHERE closed_at IS NULL DO NOTHING
    RETURNING * INTO v_alert;
    IF FOUND THEN
        PERFORM _sluice.emit_alert(v_alert);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.open_alert(text, text, bigint, text, text, jsonb) IS
    'Opens a condition and announces it on the channel sluice_alert; does nothing while it is open already';

CREATE FUNCTION _sluice.close_alert(_event text, _pgt_id bigint, _node text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_alert _sluice.alert%ROWTYPE;
BEGIN
    UPDATE _sluice.alert AS a SET closed_at = clock_timestamp(), last_emitted_at = clock_timestamp()
    WHERE a.event = _event
        AND COALESCE(a.pgt_id::text, a.node, '') = COALESCE(_pgt_id::text, _node, '')
        AND a.closed_at IS NULL
    RETURNING * INTO v_alert;
    IF FOUND THEN
        v_alert.severity := 'info';
        PERFORM _sluice.emit_alert(v_alert);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.close_alert(text, bigint, text) IS
    'Closes an open condition and announces that once, with the severity info';

-- sql/watermarks.sql

-- Watermarks: how far the load of a source has come. A node whose sources are out of step waits.

CREATE TABLE _sluice.watermark (
    relid regclass CONSTRAINT watermark_pkey PRIMARY KEY,
    watermark timestamptz NOT NULL CONSTRAINT watermark_watermark_check CHECK (isfinite(watermark)),
    advanced_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    advanced_by regrole NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('_sluice.watermark', '');

CREATE TABLE _sluice.watermark_group (
    name text CONSTRAINT watermark_group_pkey PRIMARY KEY,
    tolerance interval NOT NULL
        CONSTRAINT watermark_group_tolerance_check CHECK (tolerance >= interval '0'),
    owner regrole NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('_sluice.watermark_group', '');

CREATE TABLE _sluice.watermark_group_source (
    name text NOT NULL
        CONSTRAINT watermark_group_source_name_fkey REFERENCES _sluice.watermark_group ON DELETE CASCADE,
    relid regclass NOT NULL,
    CONSTRAINT watermark_group_source_pkey PRIMARY KEY (name, relid)
);
SELECT pg_catalog.pg_extension_config_dump('_sluice.watermark_group_source', '');

-- Keyed by database OID: a copy that is made from this database as a template starts without one.
CREATE TABLE _sluice.baseline (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL
        CONSTRAINT baseline_pgt_id_fkey REFERENCES _sluice.node ON DELETE CASCADE,
    relid oid NOT NULL,
    watermark timestamptz NOT NULL,
    CONSTRAINT baseline_pkey PRIMARY KEY (db_oid, pgt_id, relid)
);
COMMENT ON TABLE _sluice.baseline IS
    'The watermarks that a node''s sources had in the snapshot of its last successful run';

CREATE FUNCTION _sluice.sources_of(_pgt_id bigint)
RETURNS TABLE (relid oid)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE reads AS (
        SELECT d.relid::oid AS relid FROM _sluice.dependency AS d WHERE d.pgt_id = _pgt_id
        UNION
        SELECT d.relid::oid
        FROM reads AS r
        JOIN _sluice.node AS n ON n.relid::oid = r.relid
        JOIN _sluice.dependency AS d ON d.pgt_id = n.pgt_id
    )
    SELECT r.relid FROM reads AS r
    UNION
    -- A job reads what its group says.
    SELECT s.relid::oid
    FROM _sluice.node AS n
    JOIN _sluice.watermark_group_source AS s ON s.name = n.watermark_group
    WHERE n.pgt_id = _pgt_id
$$;
COMMENT ON FUNCTION _sluice.sources_of(bigint) IS
    'All relations that a node reads, through views and through other nodes too';

CREATE FUNCTION _sluice.group_out_of_step(_pgt_id bigint)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT g.name
    FROM _sluice.watermark_group AS g
    JOIN _sluice.watermark_group_source AS s ON s.name = g.name
    LEFT JOIN _sluice.watermark AS w ON w.relid = s.relid
    WHERE s.relid::oid IN (SELECT o.relid FROM _sluice.sources_of(_pgt_id) AS o)
        AND (SELECT n.kind <> 'job' OR n.watermark_group = g.name FROM _sluice.node AS n WHERE n.pgt_id = _pgt_id)
    GROUP BY g.name, g.tolerance
    HAVING count(*) > 1
        AND (count(w.watermark) < count(*) OR max(w.watermark) - min(w.watermark) > g.tolerance)
    ORDER BY g.name
    LIMIT 1
$$;
COMMENT ON FUNCTION _sluice.group_out_of_step(bigint) IS
    'A group of which the node reads several sources whose watermarks are missing or further apart than its tolerance; NULL when the node may run';

CREATE FUNCTION _sluice.record_baseline(_pgt_id bigint)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO _sluice.baseline (db_oid, pgt_id, relid, watermark)
    SELECT _sluice.database_oid(), _pgt_id, w.relid, w.watermark
    FROM _sluice.watermark AS w
    WHERE w.relid::oid IN (SELECT o.relid FROM _sluice.sources_of(_pgt_id) AS o)
    ON CONFLICT (db_oid, pgt_id, relid) DO UPDATE SET watermark = EXCLUDED.watermark
$$;
COMMENT ON FUNCTION _sluice.record_baseline(bigint) IS
    'Puts on record to which watermarks a node was refreshed, in the transaction and snapshot of its run';

CREATE FUNCTION _sluice.gate_node(_pgt_id bigint, _due_at timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO _sluice.node_state AS s (pgt_id, gated_since) VALUES (_pgt_id, _due_at)
    ON CONFLICT (pgt_id) DO UPDATE SET gated_since = COALESCE(s.gated_since, EXCLUDED.gated_since)
$$;
COMMENT ON FUNCTION _sluice.gate_node(bigint, timestamptz) IS
    'A fire was skipped since sources are out of step: the node is due as soon as they are in step';

CREATE FUNCTION _sluice.release_gated()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH released AS (
        UPDATE _sluice.node_state AS s SET gated_since = NULL
        FROM (
            SELECT g.pgt_id, g.gated_since FROM _sluice.node_state AS g WHERE g.gated_since IS NOT NULL
        ) AS former
        WHERE s.pgt_id = former.pgt_id AND _sluice.group_out_of_step(s.pgt_id) IS NULL
        RETURNING s.pgt_id, former.gated_since
    )
    UPDATE _sluice.node AS n SET retry_at = clock_timestamp(), retry_of = r.gated_since
    FROM released AS r
    WHERE n.pgt_id = r.pgt_id
$$;
COMMENT ON FUNCTION _sluice.release_gated() IS
    'Makes gated nodes due whose sources have come into step; every tick calls it, and nodes that are not gated cost it nothing';

CREATE FUNCTION _sluice.do_advance_watermark(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_relid CONSTANT oid := (_arguments ->> 'relid')::oid;
    v_watermark CONSTANT timestamptz := (_arguments ->> 'watermark')::timestamptz;
    v_present timestamptz;
BEGIN
    IF _arguments ->> 'name' IS NULL OR v_watermark IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'null_value_not_allowed',
            MESSAGE = CASE WHEN v_watermark IS NULL THEN 'watermark' ELSE 'source' END || ' must not be null';
    END IF;
    IF NOT isfinite(v_watermark) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value', MESSAGE = 'watermark must be finite';
    END IF;
    IF v_relid IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_table',
            MESSAGE = format('relation "%s" does not exist', _arguments ->> 'name');
    END IF;
    IF NOT has_table_privilege(_caller, v_relid, 'INSERT') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for relation %s', v_relid::regclass),
            HINT = 'Advancing a watermark needs the INSERT privilege on its source.';
    END IF;
    INSERT INTO _sluice.watermark AS w (relid, watermark, advanced_by)
    VALUES (v_relid, v_watermark, quote_ident(_caller)::regrole)
    ON CONFLICT (relid) DO UPDATE
    SET watermark = EXCLUDED.watermark, advanced_at = clock_timestamp(), advanced_by = EXCLUDED.advanced_by
    WHERE w.watermark <= EXCLUDED.watermark;
    IF NOT FOUND THEN
        SELECT w.watermark INTO v_present FROM _sluice.watermark AS w WHERE w.relid = v_relid;
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('watermark of relation %s cannot go back', v_relid::regclass),
            DETAIL = format('It is %s, and %s was given.', v_present, v_watermark);
    END IF;
    PERFORM pg_notify('sluice_wake', '');
    RETURN NULL;
END;
$$;

CREATE FUNCTION sluice.advance_watermark(source text, watermark timestamptz)
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('advance_watermark', pg_catalog.jsonb_build_object(
        'name', source, 'relid', _sluice.relation_of(source), 'watermark', watermark
    ))
$$;
COMMENT ON FUNCTION sluice.advance_watermark(text, timestamptz) IS
'Says how far the load of a relation has come, in the transaction that loads it. A watermark never goes back.
Needs the INSERT privilege on the relation. Nodes that wait for it run as soon as the transaction commits. Locks the source''s watermark until then.';

CREATE FUNCTION _sluice.do_create_watermark_group(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_name CONSTANT text := _arguments ->> 'name';
    v_missing text;
    v_count integer;
BEGIN
    IF v_name IS NULL OR _arguments ->> 'tolerance' IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'null_value_not_allowed',
            MESSAGE = CASE WHEN v_name IS NULL THEN 'name' ELSE 'tolerance' END || ' must not be null';
    END IF;
    IF btrim(v_name) = '' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value', MESSAGE = 'name of a watermark group must not be empty';
    END IF;
    IF (_arguments ->> 'tolerance')::interval < interval '0' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value', MESSAGE = 'tolerance must not be negative';
    END IF;
    SELECT s.value ->> 'name' INTO v_missing
    FROM jsonb_array_elements(_arguments -> 'sources') AS s
    WHERE s.value ->> 'relid' IS NULL LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_table', MESSAGE = format('relation "%s" does not exist', v_missing);
    END IF;
    SELECT s.value ->> 'name' INTO v_missing
    FROM jsonb_array_elements(_arguments -> 'sources') AS s
    WHERE NOT has_table_privilege(_caller, (s.value ->> 'relid')::oid, 'INSERT') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = format('permission denied for relation %s', v_missing),
            HINT = 'A watermark group needs the INSERT privilege on its sources.';
    END IF;
    SELECT count(DISTINCT s.value ->> 'relid') INTO v_count FROM jsonb_array_elements(_arguments -> 'sources') AS s;
    IF v_count < 2 THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value', MESSAGE = 'a watermark group needs at least two sources';
    END IF;
    INSERT INTO _sluice.watermark_group (name, tolerance, owner)
    VALUES (v_name, (_arguments ->> 'tolerance')::interval, quote_ident(_caller)::regrole)
    ON CONFLICT (name) DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'duplicate_object', MESSAGE = format('watermark group "%s" already exists', v_name);
    END IF;
    INSERT INTO _sluice.watermark_group_source (name, relid)
    SELECT DISTINCT v_name, (s.value ->> 'relid')::oid FROM jsonb_array_elements(_arguments -> 'sources') AS s;
    RETURN NULL;
END;
$$;

CREATE FUNCTION sluice.create_watermark_group(name text, sources text[], tolerance interval DEFAULT '0')
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('create_watermark_group', pg_catalog.jsonb_build_object(
        'name', name, 'sources', _sluice.name_nodes(sources, 'sources'), 'tolerance', tolerance
    ))
$$;
COMMENT ON FUNCTION sluice.create_watermark_group(text, text[], interval) IS
'Keeps sources in step: a node that reads several of them, directly or through others, runs only while their watermarks are no further apart than the tolerance; until then its fires are skipped with the reason gated, and it runs as soon as they are in step. A source without a watermark is out of step.
Needs the INSERT privilege on the sources. A job is gated by the group that it names. Raises 42710 when the group exists.';

CREATE FUNCTION _sluice.do_drop_watermark_group(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_group _sluice.watermark_group%ROWTYPE;
BEGIN
    IF _arguments ->> 'name' IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'name must not be null';
    END IF;
    PERFORM _sluice.begin_definition();
    SELECT * INTO v_group FROM _sluice.watermark_group AS g WHERE g.name = _arguments ->> 'name';
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_object',
            MESSAGE = format('watermark group "%s" does not exist', _arguments ->> 'name'),
            HINT = 'The view sluice.watermarks lists them.';
    END IF;
    IF NOT _sluice.owns(_caller, v_group.owner) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = format('must be owner of watermark group "%s"', v_group.name);
    END IF;
    IF EXISTS (SELECT FROM _sluice.node AS n WHERE n.watermark_group = v_group.name) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'dependent_objects_still_exist',
            MESSAGE = format('cannot drop watermark group "%s" because jobs name it', v_group.name),
            HINT = 'Schedule them without it first.';
    END IF;
    DELETE FROM _sluice.watermark_group AS g WHERE g.name = v_group.name;
    PERFORM pg_notify('sluice_wake', '');
    RETURN NULL;
END;
$$;

CREATE FUNCTION sluice.drop_watermark_group(name text)
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('drop_watermark_group', pg_catalog.jsonb_build_object('name', name))
$$;
COMMENT ON FUNCTION sluice.drop_watermark_group(text) IS
'Ends the gating by a group; nodes that waited run at once. The watermarks stay. Only for its owner; an error while a job names it.';

CREATE VIEW sluice.watermarks AS
SELECT
    format('%I.%I', n.nspname, c.relname) COLLATE "default" AS source,
    w.watermark,
    w.advanced_at,
    w.advanced_by,
    g.name AS "group",
    g.tolerance
FROM _sluice.watermark AS w
FULL JOIN _sluice.watermark_group_source AS s ON s.relid = w.relid
LEFT JOIN _sluice.watermark_group AS g ON g.name = s.name
JOIN pg_class AS c ON c.oid = COALESCE(s.relid, w.relid)
JOIN pg_namespace AS n ON n.oid = c.relnamespace;
COMMENT ON VIEW sluice.watermarks IS
    'How far each source has come, one row for every group that it belongs to';

-- sql/python.sql

-- The three doors to the Python package. Each takes arguments, makes one call and returns.

CREATE FUNCTION _sluice.package_directory()
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('%s/pg_sluice/%s', c.setting, e.extversion)
    FROM pg_config AS c, pg_extension AS e
    WHERE c.name = 'SHAREDIR' AND e.extname = 'pg_sluice'
$$;
COMMENT ON FUNCTION _sluice.package_directory() IS
    'Where "make install" put the Python package of this version of the extension. Asked for at run time, so that it is right after pg_upgrade';

CREATE FUNCTION _sluice.load_package()
RETURNS void
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
AS $$
import sys

directory = plpy.execute("SELECT _sluice.package_directory() AS directory")[0]["directory"]
if directory not in sys.path:
    loaded = sys.modules.get("pg_sluice")
    if loaded is not None:
        plpy.error(
            "this session has loaded pg_sluice " + loaded.__version__ + ", which is not the installed version",
            sqlstate="55000",
            hint="Connect again.",
        )
    sys.path.insert(0, directory)
$$;
COMMENT ON FUNCTION _sluice.load_package() IS
    'Puts the package of the installed version in front of sys.path; refuses a session that has loaded another version';

CREATE FUNCTION _sluice.session_settings()
RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT pg_catalog.jsonb_object_agg(s, pg_catalog.current_setting(s))
    FROM pg_catalog.unnest(ARRAY[
        'search_path', 'DateStyle', 'IntervalStyle', 'standard_conforming_strings'
    ]) AS s
$$;
COMMENT ON FUNCTION _sluice.session_settings() IS
    'The settings that decide what the caller''s SQL text means, hence with none of them pinned';

CREATE FUNCTION _sluice.invoke(_function text, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
SET DateStyle = 'ISO, MDY'
SET IntervalStyle = 'postgres'
SET standard_conforming_strings = on
SET extra_float_digits = 1
SET quote_all_identifiers = off
AS $$
plpy.execute("SELECT _sluice.load_package()")
from pg_sluice.backend import entry

return entry.invoke(plpy, entry.CALLER, _function, _arguments)
$$;
COMMENT ON FUNCTION _sluice.invoke(text, jsonb) IS
    'Runs a function of the package with the caller''s rights, under the settings that make what it stores mean the same everywhere; gives {"value": …} or {"error": …} for _sluice.unwrap';

CREATE FUNCTION _sluice.invoke_privileged(_function text, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
AS $$
plpy.execute("SELECT _sluice.load_package()")
from pg_sluice.backend import entry

return entry.invoke(plpy, entry.PRIVILEGED, _function, _arguments)
$$;
COMMENT ON FUNCTION _sluice.invoke_privileged(text, jsonb) IS
    'As _sluice.invoke, for what only the extension''s own SECURITY DEFINER functions may do: control connections and the graph';

CREATE PROCEDURE _sluice.lead(_seconds double precision, INOUT _result jsonb)
LANGUAGE plpython3u
AS $$
plpy.execute("SELECT _sluice.load_package()")
from pg_sluice.leader import process

return [process.lead(plpy, _seconds)]
$$;
COMMENT ON PROCEDURE _sluice.lead(double precision, jsonb) IS
    'The leader process, for that many seconds; 0 makes one pass. It commits, so it has no pinned search_path: the package qualifies every name';

-- sql/lease.sql

-- Control database: who leads. One row; its epoch fences every function that changes dispatch state.
--
-- The gate is one advisory lock of the control database. Claims share it; drain, pause and takeover own
-- it. So a claim either commits before a drain request, which then sees the run, or comes after it and
-- sees the request.

CREATE TABLE _sluice.lease (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT lease_pkey PRIMARY KEY
        CONSTRAINT lease_singleton_check CHECK (singleton),
    epoch bigint NOT NULL DEFAULT 0,
    pid integer,
    backend_start timestamptz,
    renewed_at timestamptz,
    expires_at timestamptz,
    CONSTRAINT lease_holder_check CHECK (
        (pid IS NULL) = (backend_start IS NULL) AND (pid IS NULL) = (expires_at IS NULL)
    )
);
INSERT INTO _sluice.lease DEFAULT VALUES;

CREATE FUNCTION _sluice.close_gate()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_advisory_xact_lock(_sluice.lock_class('gate'), 0)
$$;
COMMENT ON FUNCTION _sluice.close_gate() IS
    'Until the end of the transaction no claim commits; waits for those that are under way';

CREATE FUNCTION _sluice.enter_gate(_epoch bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(_sluice.lock_class('gate'), 0);
    PERFORM FROM _sluice.lease AS l WHERE l.epoch = _epoch AND l.expires_at > clock_timestamp();
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'SL001',
            MESSAGE = 'leadership lost',
            DETAIL = format('The lease of epoch %s has ended or another leader holds it.', _epoch);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.enter_gate(bigint) IS
    'Shares the gate until the end of the transaction and raises SL001 unless the lease of that epoch is live. Every function that changes dispatch state begins with it';

CREATE FUNCTION _sluice.acquire_lease(
    _pid integer, _backend_start timestamptz, _ttl double precision,
    OUT acquired boolean, OUT epoch bigint, OUT wait_seconds double precision
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_lease _sluice.lease%ROWTYPE;
BEGIN
    PERFORM _sluice.close_gate();
    SELECT * INTO STRICT v_lease FROM _sluice.lease FOR UPDATE;
    acquired := v_lease.expires_at IS NULL OR v_lease.expires_at <= clock_timestamp();
    IF acquired THEN
        UPDATE _sluice.lease AS l
        SET epoch = l.epoch + 1, pid = _pid, backend_start = _backend_start,
            renewed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => _ttl)
        RETURNING l.epoch INTO epoch;
        wait_seconds := 0;
    ELSE
        epoch := v_lease.epoch;
        wait_seconds := extract(epoch FROM v_lease.expires_at - clock_timestamp());
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.acquire_lease(integer, timestamptz, double precision) IS
    'Takes the lease when nobody holds a live one, under a new epoch; otherwise says how long the present one has to run';

CREATE FUNCTION _sluice.renew_lease(_epoch bigint, _ttl double precision)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.lease AS l
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => _ttl)
    WHERE l.epoch = _epoch;
END;
$$;
COMMENT ON FUNCTION _sluice.renew_lease(bigint, double precision) IS
    'Extends exactly the lease of that epoch; a lapsed one is lost and raises SL001';

CREATE FUNCTION _sluice.release_lease(_epoch bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.lease AS l SET pid = NULL, backend_start = NULL, expires_at = NULL WHERE l.epoch = _epoch;
END;
$$;
COMMENT ON FUNCTION _sluice.release_lease(bigint) IS
    'The clean end of a leader; after an error the lease is left to lapse instead';

-- sql/slots.sql

-- Control database: the worker limit. A row is a slot that is taken; a free slot is no row.
--
--   free --reserve_slot--> reserved --activate_slot--> live --release_slot--> free
--                          reserved --release_slot--> free
--
-- Reserved and live both count. A slot is freed only when no backend carries its identity.

CREATE TABLE _sluice.slot (
    slot integer CONSTRAINT slot_pkey PRIMARY KEY CONSTRAINT slot_slot_check CHECK (slot BETWEEN 1 AND 64),
    state text NOT NULL CONSTRAINT slot_state_check CHECK (state IN ('reserved', 'live')),
    db_oid oid NOT NULL,
    epoch bigint NOT NULL,
    nonce uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT slot_nonce_key UNIQUE,
    deadline timestamptz NOT NULL,
    pid integer,
    backend_start timestamptz,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT slot_identity_check CHECK (
        (state = 'live') = (pid IS NOT NULL) AND (pid IS NULL) = (backend_start IS NULL)
    )
);

CREATE FUNCTION _sluice.limit_ingredients()
RETURNS TABLE (ingredient text, value integer)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    VALUES
        ('max_workers', _sluice.setting('max_workers')::integer),
        ('max_parallel_workers', current_setting('max_parallel_workers')::integer),
        ('hard_maximum', 64),
        ('connections', greatest(0,
            current_setting('max_connections')::integer
            - current_setting('superuser_reserved_connections')::integer
            - COALESCE(current_setting('reserved_connections', true)::integer, 0)
            - _sluice.setting('connection_reserve')::integer
        ))
$$;
COMMENT ON FUNCTION _sluice.limit_ingredients() IS
    'What bounds the number of workers; the least of them is the limit. The one definition, for quotas and for taking slots';

CREATE FUNCTION _sluice.worker_limit()
RETURNS integer
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT min(i.value) FROM _sluice.limit_ingredients() AS i
$$;
COMMENT ON FUNCTION _sluice.worker_limit() IS 'The effective worker limit of the server; 0 means serial mode';

CREATE FUNCTION _sluice.worker_application_name(_nonce uuid)
RETURNS text
LANGUAGE sql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'pg_sluice worker ' || _nonce
$$;
COMMENT ON FUNCTION _sluice.worker_application_name(uuid) IS 'How a worker''s connection carries its nonce';

CREATE FUNCTION _sluice.slot_is_gone(_slot _sluice.slot)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (
        SELECT FROM pg_stat_activity AS a
        WHERE (a.pid = _slot.pid AND a.backend_start = _slot.backend_start)
            OR a.application_name = _sluice.worker_application_name(_slot.nonce)
    )
$$;
COMMENT ON FUNCTION _sluice.slot_is_gone(_sluice.slot) IS 'No backend has the slot''s identity or its nonce';

CREATE FUNCTION _sluice.reserve_slot(
    _epoch bigint, _db_oid oid, OUT slot integer, OUT nonce uuid, OUT application_name text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    LOCK TABLE _sluice.slot IN SHARE ROW EXCLUSIVE MODE;
    IF (SELECT count(*) FROM _sluice.slot) >= _sluice.worker_limit() THEN
        RETURN;
    END IF;
    INSERT INTO _sluice.slot AS s (slot, state, db_oid, epoch, deadline)
    SELECT min(n), 'reserved', _db_oid, _epoch,
        clock_timestamp() + make_interval(secs => _sluice.setting('worker_start_timeout')::double precision)
    FROM generate_series(1, 64) AS n
    WHERE NOT EXISTS (SELECT FROM _sluice.slot AS taken WHERE taken.slot = n)
    RETURNING s.slot, s.nonce, _sluice.worker_application_name(s.nonce) INTO slot, nonce, application_name;
END;
$$;
COMMENT ON FUNCTION _sluice.reserve_slot(bigint, oid) IS
    'free -> reserved, under the effective limit; NULLs when no slot is free';

CREATE FUNCTION _sluice.activate_slot(
    _epoch bigint, _nonce uuid, _pid integer, _backend_start timestamptz
)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_db_oid oid;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.slot AS s
    SET state = 'live', pid = _pid, backend_start = _backend_start, since = clock_timestamp()
    WHERE s.nonce = _nonce AND s.state = 'reserved'
    RETURNING s.db_oid INTO v_db_oid;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE _sluice.member AS m SET spawn_failures = 0, spawn_error = NULL
    WHERE m.db_oid = v_db_oid AND m.spawn_failures > 0;
    IF FOUND THEN
        PERFORM _sluice.close_alert('spawn_failed', NULL, _sluice.database_name(v_db_oid));
    END IF;
    RETURN true;
END;
$$;
COMMENT ON FUNCTION _sluice.activate_slot(bigint, uuid, integer, timestamptz) IS
    'reserved -> live; false when the reservation is no longer there, and then the worker must go';

CREATE FUNCTION _sluice.release_slot(_epoch bigint, _nonce uuid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    DELETE FROM _sluice.slot AS s WHERE s.nonce = _nonce AND _sluice.slot_is_gone(s);
    RETURN NOT EXISTS (SELECT FROM _sluice.slot AS s WHERE s.nonce = _nonce);
END;
$$;
COMMENT ON FUNCTION _sluice.release_slot(bigint, uuid) IS
    'reserved or live -> free, once the worker''s backend is gone; false while it is still there';

CREATE FUNCTION _sluice.record_spawn_failure(_epoch bigint, _db_oid oid, _error text)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_failures integer;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.member AS m SET spawn_failures = m.spawn_failures + 1, spawn_error = _error
    WHERE m.db_oid = _db_oid
    RETURNING m.spawn_failures INTO v_failures;
    PERFORM _sluice.open_alert(
        'spawn_failed', 'critical', NULL, _sluice.database_name(_db_oid),
        format('no worker can be started in database "%s": %s', _sluice.database_name(_db_oid), _error)
    ) WHERE v_failures IS NOT NULL;
    RETURN v_failures;
END;
$$;
COMMENT ON FUNCTION _sluice.record_spawn_failure(bigint, oid, text) IS
    'A worker that did not come about: counted, and announced once until one does; gives the failures in a row';

CREATE FUNCTION _sluice.evict_former_sessions(_epoch bigint)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    RETURN (
        SELECT count(*) FILTER (WHERE pg_terminate_backend(a.pid))
        FROM pg_stat_activity AS a
        WHERE EXISTS (
            SELECT FROM _sluice.slot AS s
            WHERE s.epoch < _epoch AND (
                (a.pid = s.pid AND a.backend_start = s.backend_start)
                OR a.application_name = _sluice.worker_application_name(s.nonce)
            )
        ) OR (
            a.application_name LIKE 'pg\_sluice worker %' AND NOT EXISTS (
                SELECT FROM _sluice.slot AS s
                WHERE a.application_name = _sluice.worker_application_name(s.nonce)
            )
        ) OR substring(a.application_name FROM '^pg_sluice (?:scheduler|job) ([0-9]+)$')::numeric < _epoch
    );
END;
$$;
COMMENT ON FUNCTION _sluice.evict_former_sessions(bigint) IS
    'Ends what sessions of former leaders are left: one that is frozen keeps its workers'' connections open';

CREATE FUNCTION _sluice.reconcile_slots(_epoch bigint)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_freed integer;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    DELETE FROM _sluice.slot AS s
    WHERE _sluice.slot_is_gone(s) AND (
        s.state = 'live'
        -- The present leader itself frees what it reserved. A former one's reservation can belong to a
        -- session that is still starting: such a one has no row in pg_stat_activity yet, but a lock.
        OR (s.epoch < _epoch AND s.deadline < clock_timestamp() AND NOT EXISTS (
            SELECT FROM pg_locks AS l
            WHERE l.locktype = 'virtualxid'
                AND NOT EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = l.pid)
        ))
    );
    GET DIAGNOSTICS v_freed = ROW_COUNT;
    RETURN v_freed;
END;
$$;
COMMENT ON FUNCTION _sluice.reconcile_slots(bigint) IS
    'Frees live slots whose backend is gone, and overdue reservations of former leaders that no backend carries while none is starting';

-- sql/queue.sql

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

-- sql/drain.sql

-- Control database: drain requests. db_oid 0 is the whole server. A request keeps claims out from its
-- commit on; "drained" is decided by looking at what runs, never from a counter.

CREATE TABLE _sluice.drain (
    db_oid oid CONSTRAINT drain_pkey PRIMARY KEY,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Stays though nobody waits for it: it was asked for so, or a call ended at its timeout.
    stays boolean NOT NULL DEFAULT false,
    drained_at timestamptz
);

CREATE TABLE _sluice.drain_waiter (
    db_oid oid NOT NULL CONSTRAINT drain_waiter_db_oid_fkey REFERENCES _sluice.drain ON DELETE CASCADE,
    pid integer NOT NULL,
    backend_start timestamptz NOT NULL,
    CONSTRAINT drain_waiter_pkey PRIMARY KEY (db_oid, pid, backend_start)
);
COMMENT ON TABLE _sluice.drain_waiter IS
    'The calls that wait for a request. One that was not reached goes with the last of them';

CREATE FUNCTION _sluice.request_drain(
    _db_oid oid, _requested_by text, _pid integer, _backend_start timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    INSERT INTO _sluice.drain AS d (db_oid, requested_by, stays)
    VALUES (_db_oid, _requested_by, _pid IS NULL)
    ON CONFLICT (db_oid) DO UPDATE SET stays = d.stays OR EXCLUDED.stays;
    IF _pid IS NOT NULL THEN
        INSERT INTO _sluice.drain_waiter (db_oid, pid, backend_start)
        VALUES (_db_oid, _pid, _backend_start)
        ON CONFLICT DO NOTHING;
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.request_drain(oid, text, integer, timestamptz) IS
    'Asks for a drain, or joins the one in force; a NULL pid asks for one that stays without a waiter. Once it has committed no claim of the scope follows';

CREATE FUNCTION _sluice.drain_obstacles(_db_oid oid)
RETURNS TABLE (obstacle text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('run of "%s"', q.name)
    FROM _sluice.queue AS q
    WHERE q.state = 'running' AND _db_oid IN (0, q.db_oid)
    UNION ALL
    -- A manual refresh holds the node's lock and has no row in the queue.
    SELECT format('manual refresh by process %s', l.pid)
    FROM pg_locks AS l
    WHERE l.locktype = 'advisory'
        AND l.classid = _sluice.lock_class('node')::oid
        AND l.objsubid = 2
        AND l.granted
        AND _db_oid IN (0, l.database)
        AND NOT EXISTS (
            SELECT FROM _sluice.queue AS q
            WHERE q.state = 'running' AND q.db_oid = l.database AND q.pgt_id = l.objid::bigint
        )
$$;
COMMENT ON FUNCTION _sluice.drain_obstacles(oid) IS 'What still runs in the scope of a drain';

CREATE FUNCTION _sluice.check_drain(_db_oid oid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_drained boolean;
BEGIN
    PERFORM FROM _sluice.drain AS d WHERE d.db_oid = _db_oid;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_drained := NOT EXISTS (SELECT FROM _sluice.drain_obstacles(_db_oid));
    IF v_drained THEN
        UPDATE _sluice.drain AS d SET drained_at = clock_timestamp()
        WHERE d.db_oid = _db_oid AND d.drained_at IS NULL;
    END IF;
    RETURN v_drained;
END;
$$;
COMMENT ON FUNCTION _sluice.check_drain(oid) IS
    'NULL: no request. false: something still runs. true: nothing runs and nothing will start; the request then outlives its requester';

CREATE FUNCTION _sluice.keep_drain(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.drain AS d SET stays = true WHERE d.db_oid = _db_oid;
    DELETE FROM _sluice.drain_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
$$;
COMMENT ON FUNCTION _sluice.keep_drain(oid, integer, timestamptz) IS
    'A call has its answer, or ended at its timeout: the request stays in force without it';

CREATE FUNCTION _sluice.end_unwanted_drains()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain AS d
    WHERE NOT d.stays
        AND d.drained_at IS NULL
        AND NOT EXISTS (SELECT FROM _sluice.drain_waiter AS w WHERE w.db_oid = d.db_oid)
$$;
COMMENT ON FUNCTION _sluice.end_unwanted_drains() IS 'Ends requests that were not reached and that nobody waits for any more';

CREATE FUNCTION _sluice.withdraw_drain(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- Calls that join or withdraw at the same time see each other.
    SELECT _sluice.close_gate();
    DELETE FROM _sluice.drain_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
    SELECT _sluice.end_unwanted_drains();
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.withdraw_drain(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: the request goes with the last call that waits for it';

CREATE FUNCTION _sluice.withdraw_abandoned_drains()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain_waiter AS w
    WHERE NOT EXISTS (
        SELECT FROM pg_stat_activity AS a WHERE a.pid = w.pid AND a.backend_start = w.backend_start
    );
    SELECT _sluice.end_unwanted_drains();
$$;
COMMENT ON FUNCTION _sluice.withdraw_abandoned_drains() IS 'As withdraw_drain, for calls whose backend vanished';

CREATE FUNCTION _sluice.end_drain(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain AS d WHERE d.db_oid = _db_oid;
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.end_drain(oid) IS 'What resume() does; nothing when no drain is in force';

CREATE FUNCTION _sluice.drain_in_force(_db_oid oid)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM _sluice.drain AS d WHERE d.db_oid IN (0, _db_oid))
$$;
COMMENT ON FUNCTION _sluice.drain_in_force(oid) IS 'Whether a drain of the database or of the server is requested';

CREATE FUNCTION _sluice.drain_rows(_db_oid oid)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'scope', CASE WHEN d.db_oid = 0 THEN 'cluster' ELSE 'database' END,
        'state', CASE WHEN o.active = 0 THEN 'drained' ELSE 'draining' END,
        'requested_by', d.requested_by,
        'requested_at', d.requested_at,
        'drained_at', d.drained_at,
        'active', o.active,
        'waiting_for', o.waiting_for
    ) ORDER BY d.db_oid), '[]')
    FROM _sluice.drain AS d
    CROSS JOIN LATERAL (
        SELECT count(*) AS active, string_agg(x.obstacle, ', ' ORDER BY x.obstacle) AS waiting_for
        FROM _sluice.drain_obstacles(d.db_oid) AS x
    ) AS o
    WHERE d.db_oid IN (0, _db_oid)
$$;
COMMENT ON FUNCTION _sluice.drain_rows(oid) IS 'The rows of sluice.drain_status() for a database';

-- sql/pause.sql

-- Control database: paused nodes.

CREATE TABLE _sluice.pause (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The call that waits for its answer; NULL once it has it.
    pid integer,
    backend_start timestamptz,
    CONSTRAINT pause_waiter_check CHECK ((pid IS NULL) = (backend_start IS NULL)),
    CONSTRAINT pause_pkey PRIMARY KEY (db_oid, pgt_id)
);

CREATE FUNCTION _sluice.request_pause(
    _db_oid oid, _nodes jsonb, _requested_by text, _pid integer, _backend_start timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_capacity CONSTANT integer := _sluice.setting('max_pause_entries');
BEGIN
    PERFORM _sluice.close_gate();
    INSERT INTO _sluice.pause AS p (db_oid, pgt_id, name, requested_by, pid, backend_start)
    SELECT DISTINCT ON (n.pgt_id) _db_oid, n.pgt_id, n.name, _requested_by, _pid, _backend_start
    FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint, name text)
    -- Who joins a pause that another call still waits for wants it to stay.
    ON CONFLICT (db_oid, pgt_id) DO UPDATE SET pid = NULL, backend_start = NULL;
    IF (SELECT count(*) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid) > v_capacity THEN
        RAISE EXCEPTION USING
            ERRCODE = 'configuration_limit_exceeded',
            MESSAGE = 'too many paused nodes',
            DETAIL = format('A database can have %s paused nodes (max_pause_entries).', v_capacity),
            HINT = 'End some with sluice.unpause(), or use sluice.drain() to stop the whole database.';
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.request_pause(oid, jsonb, text, integer, timestamptz) IS
    'Pauses all of the nodes or none; a NULL pid asks for a pause that stays without a waiter';

CREATE FUNCTION _sluice.keep_pause(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.pause AS p SET pid = NULL, backend_start = NULL
    WHERE p.db_oid = _db_oid AND p.pid = _pid AND p.backend_start = _backend_start
$$;
COMMENT ON FUNCTION _sluice.keep_pause(oid, integer, timestamptz) IS
    'A call has its answer, or ended at its timeout: what it paused stays paused without it';

CREATE FUNCTION _sluice.withdraw_pause(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.pause AS p
    WHERE p.db_oid = _db_oid AND p.pid = _pid AND p.backend_start = _backend_start;
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.withdraw_pause(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: what it paused goes with it';

CREATE FUNCTION _sluice.withdraw_abandoned_pauses()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.pause AS p
    WHERE p.pid IS NOT NULL
        AND NOT EXISTS (
            SELECT FROM pg_stat_activity AS a WHERE a.pid = p.pid AND a.backend_start = p.backend_start
        )
$$;
COMMENT ON FUNCTION _sluice.withdraw_abandoned_pauses() IS 'As withdraw_pause, for calls whose backend vanished';

CREATE FUNCTION _sluice.pause_is_done(_db_oid oid, _pgt_ids bigint[])
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (
        SELECT FROM _sluice.queue AS q
        WHERE q.db_oid = _db_oid AND q.pgt_id = ANY (_pgt_ids) AND q.state = 'running'
    ) AND NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'advisory' AND l.classid = _sluice.lock_class('node')::oid AND l.objsubid = 2
            AND l.granted AND l.database = _db_oid AND l.objid::bigint = ANY (_pgt_ids)
    )
$$;
COMMENT ON FUNCTION _sluice.pause_is_done(oid, bigint[]) IS 'Whether none of these nodes of this database runs';

CREATE FUNCTION _sluice.end_pause(_db_oid oid, _pgt_ids bigint[])
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ended integer;
BEGIN
    DELETE FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids);
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    PERFORM pg_notify('sluice_wake', '');
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_pause(oid, bigint[]) IS 'Ends the pause of these nodes; gives how many were paused';

-- sql/members.sql

-- Control database: which databases are scheduled, and how they fare.

CREATE TABLE _sluice.member (
    db_oid oid CONSTRAINT member_pkey PRIMARY KEY,
    joined_by text NOT NULL,
    joined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    state text NOT NULL DEFAULT 'joining' CONSTRAINT member_state_check CHECK (
        state IN ('joining', 'scheduled', 'failed', 'version_mismatch')
    ),
    last_tick_at timestamptz,
    last_tick_ms double precision,
    failures integer NOT NULL DEFAULT 0,
    spawn_failures integer NOT NULL DEFAULT 0,
    spawn_error text,
    error text
);
COMMENT ON TABLE _sluice.member IS
    'Databases that called sluice.start(). Keyed by OID, so a database made from a template of a member, or recreated under its name, is not one';

CREATE FUNCTION _sluice.join_database(_db_oid oid, _joined_by text, _version text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_own_version CONSTANT text := (SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'pg_sluice');
BEGIN
    IF _version <> v_own_version THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('pg_sluice is at version %s here and at version %s in the control database', _version, v_own_version),
            HINT = 'Run ALTER EXTENSION pg_sluice UPDATE in both.';
    END IF;
    -- The last member to leave meanwhile takes the entry along before we look for it.
    PERFORM _sluice.close_gate();
    INSERT INTO _sluice.member (db_oid, joined_by) VALUES (_db_oid, _joined_by) ON CONFLICT (db_oid) DO NOTHING;
    PERFORM cron.schedule('pg_sluice', '* * * * *', 'CALL sluice.run()')
    WHERE NOT EXISTS (
        SELECT FROM cron.job AS j
        WHERE j.jobname = 'pg_sluice' AND j.command = 'CALL sluice.run()' AND j.active
    );
    PERFORM pg_notify('sluice_wake', '');
END;
$$;
COMMENT ON FUNCTION _sluice.join_database(oid, text, text) IS
    'Makes a database a member and sees to the one pg_cron entry. Idempotent';

CREATE FUNCTION _sluice.leave_database(_db_oid oid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    DELETE FROM _sluice.member AS m WHERE m.db_oid = _db_oid;
    PERFORM _sluice.close_database_alerts(_db_oid);
    PERFORM _sluice.close_alert('spawn_failed', NULL, _sluice.database_name(_db_oid));
    DELETE FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued';
    IF NOT EXISTS (SELECT FROM _sluice.member) THEN
        PERFORM cron.unschedule(j.jobid) FROM cron.job AS j
        WHERE j.jobname = 'pg_sluice' AND j.command = 'CALL sluice.run()';
    END IF;
    PERFORM pg_notify('sluice_wake', '');
END;
$$;
COMMENT ON FUNCTION _sluice.leave_database(oid) IS
    'Ends the membership and forgets what was queued; the last one to leave takes the pg_cron entry along. Runs in progress end as usual';

CREATE FUNCTION _sluice.members(_epoch bigint)
RETURNS TABLE (db_oid oid, database text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    PERFORM _sluice.withdraw_abandoned_drains();
    PERFORM _sluice.withdraw_abandoned_pauses();
    -- A dropped database leaves nothing behind.
    DELETE FROM _sluice.member AS m WHERE NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = m.db_oid);
    DELETE FROM _sluice.queue AS q WHERE q.state = 'queued'
        AND NOT EXISTS (SELECT FROM _sluice.member AS m WHERE m.db_oid = q.db_oid);
    DELETE FROM _sluice.drain AS r WHERE r.db_oid <> 0
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = r.db_oid);
    DELETE FROM _sluice.pause AS p WHERE NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = p.db_oid);
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
        AND a.event IN ('database_failed', 'database_version_mismatch', 'spawn_failed')
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE d.datname = a.node);
    RETURN QUERY
    SELECT m.db_oid, d.datname::text FROM _sluice.member AS m JOIN pg_database AS d ON d.oid = m.db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.members(bigint) IS
    'The databases to schedule, under their present names; clears away what dropped databases left';

CREATE FUNCTION _sluice.database_name(_db_oid oid)
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.datname::text FROM pg_database AS d WHERE d.oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.database_name(oid) IS 'The present name of a database; NULL when it is gone';

CREATE FUNCTION _sluice.close_database_alerts(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.close_alert(e.event, NULL, _sluice.database_name(_db_oid))
    FROM unnest(ARRAY['database_failed', 'database_version_mismatch']) AS e (event)
$$;
COMMENT ON FUNCTION _sluice.close_database_alerts(oid) IS 'The database is scheduled again, or needs not be any more';

CREATE FUNCTION _sluice.record_tick(_epoch bigint, _db_oid oid, _milliseconds double precision)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    PERFORM _sluice.close_database_alerts(_db_oid)
    FROM _sluice.member AS m
    WHERE m.db_oid = _db_oid AND m.state <> 'scheduled';
    UPDATE _sluice.member AS m
    SET state = 'scheduled', last_tick_at = clock_timestamp(), last_tick_ms = _milliseconds,
        failures = 0, error = NULL
    WHERE m.db_oid = _db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.record_tick(bigint, oid, double precision) IS 'Health of a database that was just scheduled';

CREATE FUNCTION _sluice.record_failed_tick(_epoch bigint, _db_oid oid, _state text, _error text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.member AS m SET state = _state, failures = m.failures + 1, error = _error
    WHERE m.db_oid = _db_oid;
    IF NOT FOUND THEN
        -- It has left meanwhile.
        RETURN;
    END IF;
    PERFORM _sluice.open_alert(
        'database_' || _state, 'critical', NULL, _sluice.database_name(_db_oid),
        format('database "%s" is not scheduled: %s', _sluice.database_name(_db_oid), _error)
    );
END;
$$;
COMMENT ON FUNCTION _sluice.record_failed_tick(bigint, oid, text, text) IS
    'Health of a database that could not be scheduled; opens an alert in the control database';

CREATE FUNCTION _sluice.database_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'db_oid', m.db_oid::bigint,
        'database', d.datname,
        'state', m.state,
        'last_tick_at', m.last_tick_at,
        'last_tick_ms', m.last_tick_ms,
        'queued', c.queued,
        'running', c.running,
        'drain', CASE
            WHEN NOT _sluice.drain_in_force(m.db_oid) THEN NULL
            WHEN NOT EXISTS (SELECT FROM _sluice.drain_obstacles(m.db_oid)) THEN 'drained'
            ELSE 'draining'
        END,
        'error', COALESCE(m.error, m.spawn_error)
    ) ORDER BY d.datname), '[]')
    FROM _sluice.member AS m
    JOIN _sluice.queued_by_database() AS c ON c.db_oid = m.db_oid
    LEFT JOIN pg_database AS d ON d.oid = m.db_oid
$$;
COMMENT ON FUNCTION _sluice.database_rows() IS 'The rows of sluice.databases()';

CREATE FUNCTION _sluice.queue_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'run_id', q.run_id,
        'db_oid', q.db_oid::bigint,
        'database', d.datname,
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

CREATE FUNCTION _sluice.worker_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'slot', n,
        'state', COALESCE(s.state, 'free'),
        'db_oid', s.db_oid::bigint,
        'database', d.datname,
        'pid', s.pid,
        'run_id', q.run_id,
        'name', q.name,
        'since', s.since
    ) ORDER BY n), '[]')
    FROM generate_series(1, greatest(
        _sluice.worker_limit(), (SELECT COALESCE(max(t.slot), 0) FROM _sluice.slot AS t)
    )) AS n
    LEFT JOIN _sluice.slot AS s ON s.slot = n
    LEFT JOIN pg_database AS d ON d.oid = s.db_oid
    LEFT JOIN _sluice.queue AS q ON q.slot = n AND q.state = 'running'
$$;
COMMENT ON FUNCTION _sluice.worker_rows() IS 'The rows of sluice.workers()';

CREATE FUNCTION _sluice.limit_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_agg(jsonb_build_object(
        'limit', _sluice.worker_limit(),
        'ingredient', i.ingredient,
        'value', i.value,
        'binding', i.value = _sluice.worker_limit()
    ))
    FROM _sluice.limit_ingredients() AS i
$$;
COMMENT ON FUNCTION _sluice.limit_rows() IS 'The rows of sluice.effective_limit()';

-- sql/tick.sql

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

-- sql/runs.sql

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
    -- A name can be taken over by another cursor, its time can't.
    v_cursors CONSTANT text[] := ARRAY(
        SELECT c.creation_time || c.name FROM pg_cursors AS c WHERE c.is_holdable
    );
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
        WHERE c.is_holdable AND c.creation_time || c.name <> ALL (v_cursors)
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
AS $$
DECLARE
    -- What REFRESH … CONCURRENTLY asks for: contents, and a unique index over plain columns of all rows.
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

CREATE FUNCTION _sluice.record_run(
    _run_id uuid, _node _sluice.node, _mode text, _outcome text, _attempt integer, _due_at timestamptz,
    _started_at timestamptz, _rows bigint, _reason text
)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO _sluice.history (
        run_id, pgt_id, name, kind, mode, outcome, attempt, due_at, started_at, ended_at,
        rows_changed, reason, pid
    )
    VALUES (
        _run_id, _node.pgt_id, _sluice.node_name(_node), _node.kind, _mode, _outcome, _attempt, _due_at,
        _started_at, clock_timestamp(), _rows, _reason, pg_backend_pid()
    )
$$;
COMMENT ON FUNCTION _sluice.record_run(uuid, _sluice.node, text, text, integer, timestamptz, timestamptz, bigint, text) IS
    'The history row of a run that ended without an error';

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
    PERFORM _sluice.record_run(
        _run_id, _node, NULL, 'skipped', _attempt, _due_at, clock_timestamp(), NULL, v_reason
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
BEGIN
    INSERT INTO _sluice.node_state AS s (pgt_id, last_run_at, last_outcome, last_success_at)
    SELECT n.pgt_id, _started_at, _outcome, _started_at
    -- It can have been unscheduled meanwhile.
    FROM _sluice.node AS n WHERE n.pgt_id = _node.pgt_id
    ON CONFLICT (pgt_id) DO UPDATE
    SET last_run_at = EXCLUDED.last_run_at, last_outcome = EXCLUDED.last_outcome,
        last_success_at = EXCLUDED.last_success_at, consecutive_errors = 0;
    IF EXISTS (SELECT FROM _sluice.watermark) THEN
        PERFORM _sluice.record_baseline(_node.pgt_id);
    END IF;
    PERFORM _sluice.record_run(
        _run_id, _node, _mode, _outcome, _attempt, _due_at, _started_at, _rows, _reason
    );
END;
$$;
COMMENT ON FUNCTION _sluice.finish_run(uuid, _sluice.node, text, text, integer, timestamptz, timestamptz, bigint, text) IS
    'A success, in the node''s state and in history';

CREATE FUNCTION _sluice.top_level_command(_run_id uuid, _pgt_id bigint, _due_at timestamptz, _attempt integer)
RETURNS TABLE (command text, search_path text, owner_name text, is_superuser boolean)
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
        SELECT v_node.command, v_node.job_search_path, r.rolname::text, r.rolsuper
        FROM pg_roles AS r
        WHERE r.oid = v_node.job_owner;
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.top_level_command(uuid, bigint, timestamptz, integer) IS
    'What a job with transactional => false executes, and as whom; no row when the fire is skipped or the job is gone';

CREATE FUNCTION _sluice.failures(_pgt_id bigint)
RETURNS integer
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE((SELECT s.consecutive_errors FROM _sluice.node_state AS s WHERE s.pgt_id = _pgt_id), 0)
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

CREATE FUNCTION _sluice.record_failure(
    _run_id uuid, _pgt_id bigint, _due_at timestamptz, _attempt integer, _started_at timestamptz,
    _reason text, _error jsonb, _counts boolean, _retry_seconds double precision
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
        started_at, ended_at, reason, pid
    )
    -- What a job raises can be of any length.
    SELECT _run_id, n.pgt_id, _sluice.node_name(n), n.kind, e.outcome, e.sqlstate,
        left(e.message, 65536), left(e.detail, 65536), left(e.context, 65536), _attempt, _due_at,
        _started_at, clock_timestamp(), _reason, e.pid
    FROM _sluice.node AS n
    CROSS JOIN jsonb_to_record(_error) AS e (
        outcome text, sqlstate text, message text, detail text, context text, pid integer
    )
    WHERE n.pgt_id = _pgt_id
    ON CONFLICT (run_id) DO NOTHING;
    IF NOT FOUND THEN
        -- The node is gone, or the attempt is on record already.
        RETURN;
    END IF;
    INSERT INTO _sluice.node_state AS s (pgt_id, last_run_at, last_outcome, consecutive_errors)
    VALUES (_pgt_id, _started_at, _error ->> 'outcome', _counts::integer)
    ON CONFLICT (pgt_id) DO UPDATE
    SET last_run_at = EXCLUDED.last_run_at, last_outcome = EXCLUDED.last_outcome,
        consecutive_errors = s.consecutive_errors + EXCLUDED.consecutive_errors
    RETURNING s.consecutive_errors INTO v_failures;
    UPDATE _sluice.node AS n
    SET status = CASE
            WHEN _counts AND n.status = 'active' AND v_failures >= _sluice.setting('max_consecutive_errors')
            THEN 'suspended'
            ELSE n.status
        END,
        retry_at = clock_timestamp() + make_interval(secs => _retry_seconds),
        retry_of = CASE WHEN _retry_seconds IS NOT NULL THEN _due_at END
    WHERE n.pgt_id = _pgt_id
    RETURNING * INTO v_node;
    v_name := _sluice.node_name(v_node);
    IF v_node.status = 'suspended' THEN
        PERFORM _sluice.open_alert(
            'suspended', 'critical', _pgt_id, v_name,
            format(
                '"%s" is suspended after %s failures in a row: %s',
                v_name, v_failures, left(_error ->> 'message', 65536)
            ),
            (SELECT jsonb_object_agg(e.key, left(e.value, 65536)) FROM jsonb_each_text(_error) AS e)
        );
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.record_failure(uuid, bigint, timestamptz, integer, timestamptz, text, jsonb, boolean, double precision) IS
    'A failed attempt: one row, one count, the time of its retry (NULL: none), and suspension at the limit. Recording an attempt again does nothing';

-- sql/requests.sql

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

CREATE FUNCTION _sluice.begin_definition()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_advisory_xact_lock(_sluice.lock_class('catalog'), 0)
$$;
COMMENT ON FUNCTION _sluice.begin_definition() IS
    'Definitions change one transaction after the other, so that the graph is whole; runs and ticks never wait for this';

CREATE FUNCTION _sluice.settle(_pgt_ids bigint[], _graph boolean)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.unwrap(_sluice.invoke_privileged(
        'settle', jsonb_build_object('pgt_ids', _pgt_ids, 'graph', _graph)
    ));
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.settle(bigint[], boolean) IS
    'After a change of definitions: puts these nodes on their grid, derives the graph anew where relations are concerned (a cycle is an error that names the path), and wakes the scheduler';

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
    SET anchor = r.anchor, next_fire_at = r.next_fire_at, retry_at = NULL, retry_of = NULL
    FROM jsonb_to_recordset(_rows) AS r (pgt_id bigint, anchor timestamptz, next_fire_at timestamptz)
    WHERE n.pgt_id = r.pgt_id
$$;
COMMENT ON FUNCTION _sluice.store_grid(jsonb) IS 'Puts nodes on a new grid';

-- sql/stream_tables.sql

-- Stream tables: a public function for the caller, and what it asks of the private tables.

CREATE FUNCTION _sluice.difference_statement(_relid regclass, _query text)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format(
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
    ) AS c
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
        lock_timeout, refresh_timeout
    )
    VALUES (
        'stream_table', v_relid, _arguments ->> 'query', _sluice.column_signature(v_relid),
        _arguments ->> 'refresh_mode', 'incremental refresh is not available in this version',
        _arguments ->> 'schedule', clock_timestamp(), (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval
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
    refresh_timeout interval DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('create_stream_table', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', name, 'query', query, 'schedule', schedule, 'refresh_mode', refresh_mode,
        'initialize', initialize, 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.create_stream_table(text, text, text, text, boolean, integer, interval, interval) IS
'Creates a table that is kept equal to a query.
name: the table to create, optionally schema-qualified. query: one SELECT without volatile functions, resolved in the present search_path. schedule: when it is refreshed. refresh_mode: auto or full. initialize: fill it now; otherwise the first run does. priority: -100 to 100, a step is worth ten seconds of waiting. lock_timeout, refresh_timeout: for this node instead of the settings.
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
        status = CASE WHEN v_reschedule AND n.status = 'quarantined' THEN 'active' ELSE n.status END,
        -- A new query shows at the next tick.
        next_fire_at = CASE WHEN _arguments ->> 'query' IS NULL THEN n.next_fire_at ELSE clock_timestamp() END
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
    refresh_timeout interval DEFAULT NULL
)
RETURNS void
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('alter_stream_table', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', name, 'query', query, 'schedule', schedule, 'refresh_mode', refresh_mode,
        'priority', priority, 'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout
    )))
$$;
COMMENT ON FUNCTION sluice.alter_stream_table(text, text, text, text, integer, interval, interval) IS
'Changes what is given of a stream table; NULL leaves a property as it is.
query: must have the same columns; the rows follow at the next run. schedule: starts a new grid now and ends a quarantine. A query that would make the table read itself is refused with the path.
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
    WITH RECURSIVE downstream AS (
        SELECT d.pgt_id FROM _sluice.dependency AS d WHERE d.relid = v_node.relid
        UNION
        SELECT d.pgt_id
        FROM downstream AS w
        JOIN _sluice.node AS n ON n.pgt_id = w.pgt_id
        JOIN _sluice.dependency AS d ON d.relid = n.relid
    )
    SELECT jsonb_agg(n.relid::oid::bigint ORDER BY g.depth DESC) INTO v_dependents
    FROM downstream AS w
    JOIN _sluice.node AS n ON n.pgt_id = w.pgt_id AND n.kind = 'stream_table'
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
cascade: also drop the stream tables that read it, and what DROP TABLE … CASCADE drops. Only for the owner of all of them. Locks: as DROP TABLE.';

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

CREATE FUNCTION _sluice.do_refresh_stream_table(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node CONSTANT _sluice.node := _sluice.find_own_node(_caller, _arguments);
    v_settings jsonb;
    v_outcome text;
BEGIN
    -- The lock first: a drain that is requested from here on waits for it, and an earlier one is seen.
    PERFORM pg_advisory_xact_lock(_sluice.lock_class('node'), v_node.pgt_id::integer);
    IF NOT COALESCE((_arguments ->> 'force')::boolean, false) AND _sluice.control_database() IS NOT NULL
        AND (_sluice.control('drain_in_force', jsonb_build_object('_db_oid', _sluice.database_oid())))::boolean
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('cannot refresh stream table "%s" while the database drains or is drained', _arguments ->> 'name'),
            HINT = 'End the drain with sluice.resume(), or pass force => true.';
    END IF;
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
force: also while the database drains or is drained, which is an error otherwise. Waits for a run of the same node. Only for its owner. Makes deferred constraints of the transaction immediate.';

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
        jsonb_build_array('next fire', v_node.next_fire_at)
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
            'session', _sluice.session_settings(), 'definitions', definitions
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

-- sql/matviews.sql

-- Existing materialized views, refreshed on a schedule.

CREATE FUNCTION _sluice.do_schedule_refresh(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_relid CONSTANT oid := (_arguments ->> 'relid')::oid;
    v_pgt_id bigint;
BEGIN
    PERFORM _sluice.begin_definition();
    SELECT n.pgt_id INTO v_pgt_id FROM _sluice.node AS n WHERE n.relid = v_relid AND n.kind = 'matview';
    IF FOUND THEN
        PERFORM _sluice.find_own_node(_caller, _arguments);
        DELETE FROM _sluice.dependency AS d WHERE d.pgt_id = v_pgt_id;
    ELSE
        PERFORM _sluice.check_owned_relation(_caller, v_relid);
    END IF;
    INSERT INTO _sluice.node AS n (
        kind, relid, schedule, anchor, "concurrently", priority, lock_timeout, refresh_timeout
    )
    VALUES (
        'matview', v_relid, _arguments ->> 'schedule', clock_timestamp(),
        (_arguments ->> 'concurrently')::boolean, (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval
    )
    ON CONFLICT (relid) DO UPDATE
    SET schedule = EXCLUDED.schedule, anchor = EXCLUDED.anchor, "concurrently" = EXCLUDED."concurrently",
        priority = EXCLUDED.priority, lock_timeout = EXCLUDED.lock_timeout,
        refresh_timeout = EXCLUDED.refresh_timeout,
        status = CASE WHEN n.status = 'quarantined' THEN 'active' ELSE n.status END
    RETURNING n.pgt_id INTO v_pgt_id;
    PERFORM _sluice.close_alert('quarantined', v_pgt_id);
    INSERT INTO _sluice.dependency (pgt_id, relid)
    SELECT v_pgt_id, s.value::oid FROM jsonb_array_elements_text(_arguments -> 'sources') AS s;
    PERFORM _sluice.settle(ARRAY[v_pgt_id], true);
    RETURN to_jsonb(v_pgt_id);
END;
$$;

CREATE FUNCTION sluice.schedule_refresh(
    matview text,
    schedule text,
    "concurrently" boolean DEFAULT true,
    priority integer DEFAULT 0,
    lock_timeout interval DEFAULT NULL,
    refresh_timeout interval DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('schedule_refresh', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', matview, 'schedule', schedule, 'concurrently', "concurrently", 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.schedule_refresh(text, text, boolean, integer, interval, interval) IS
'Refreshes an existing materialized view on a schedule; called again it changes the schedule. sluice.unschedule() ends it.
concurrently: without blocking readers, where the view has contents and a unique index over plain columns of all rows; plainly otherwise. Only for its owner. Returns its pgt_id.';

-- sql/jobs.sql

-- SQL jobs.

CREATE FUNCTION _sluice.do_schedule(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_name CONSTANT text := _arguments ->> 'name';
    v_node _sluice.node%ROWTYPE;
    v_pgt_id bigint;
BEGIN
    PERFORM _sluice.begin_definition();
    SELECT * INTO v_node FROM _sluice.node AS n WHERE n.job_name = v_name;
    IF FOUND AND NOT _sluice.owns(_caller, v_node.job_owner) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'duplicate_object',
            MESSAGE = format('job "%s" already exists', v_name),
            DETAIL = 'It belongs to another role.';
    END IF;
    IF _arguments ->> 'watermark_group' IS NOT NULL
        AND NOT EXISTS (SELECT FROM _sluice.watermark_group AS g WHERE g.name = _arguments ->> 'watermark_group')
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_object',
            MESSAGE = format('watermark group "%s" does not exist', _arguments ->> 'watermark_group'),
            HINT = 'Create it with sluice.create_watermark_group().';
    END IF;
    IF NOT (_arguments ->> 'transactional')::boolean
        AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = _caller)
    THEN
        PERFORM _sluice.unwrap(_sluice.invoke_privileged('check_login', jsonb_build_object('role', _caller)));
    END IF;
    INSERT INTO _sluice.node AS n (
        kind, job_name, job_owner, job_search_path, command, transactional, schedule, anchor,
        catch_up, priority, lock_timeout, refresh_timeout, watermark_group
    )
    VALUES (
        'job', v_name, quote_ident(_caller)::regrole, _arguments #>> '{session,search_path}', _arguments ->> 'command',
        (_arguments ->> 'transactional')::boolean, _arguments ->> 'schedule', clock_timestamp(),
        (_arguments ->> 'catch_up')::integer, (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval,
        _arguments ->> 'watermark_group'
    )
    ON CONFLICT (job_name) DO UPDATE
    SET job_owner = EXCLUDED.job_owner, job_search_path = EXCLUDED.job_search_path,
        command = EXCLUDED.command, transactional = EXCLUDED.transactional,
        schedule = EXCLUDED.schedule, anchor = EXCLUDED.anchor, catch_up = EXCLUDED.catch_up,
        priority = EXCLUDED.priority, lock_timeout = EXCLUDED.lock_timeout,
        refresh_timeout = EXCLUDED.refresh_timeout, watermark_group = EXCLUDED.watermark_group,
        status = CASE WHEN n.status = 'quarantined' THEN 'active' ELSE n.status END
    RETURNING n.pgt_id INTO v_pgt_id;
    PERFORM _sluice.close_alert('quarantined', v_pgt_id);
    PERFORM _sluice.settle(ARRAY[v_pgt_id], false);
    RETURN to_jsonb(v_pgt_id);
END;
$$;

CREATE FUNCTION sluice.schedule(
    job_name text,
    schedule text,
    command text,
    transactional boolean DEFAULT true,
    catch_up integer DEFAULT 1,
    priority integer DEFAULT 0,
    lock_timeout interval DEFAULT NULL,
    refresh_timeout interval DEFAULT NULL,
    watermark_group text DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('schedule', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', job_name, 'schedule', schedule, 'command', command, 'transactional', transactional,
        'catch_up', catch_up, 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout,
        'watermark_group', watermark_group
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.schedule(text, text, text, boolean, integer, integer, interval, interval, text) IS
'Runs SQL on a schedule, with the caller''s rights and search_path; called again it changes the job. Returns its pgt_id.
transactional: the command runs in one transaction with its history row, exactly once for each fire. false: at top level, for VACUUM, CALL with COMMIT and the like, at least once; for an owner who is no superuser the server must let the scheduler connect as that role. catch_up: how many missed fires run after downtime, the latest ones. priority: -100 to 100. lock_timeout, refresh_timeout: for this job instead of the settings. watermark_group: runs only while that group''s sources are in step.';

CREATE FUNCTION _sluice.do_unschedule(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_node _sluice.node;
BEGIN
    PERFORM _sluice.begin_definition();
    BEGIN
        v_node := _sluice.find_own_node(_caller, _arguments);
    EXCEPTION
        WHEN undefined_object THEN
            RETURN to_jsonb(false);
    END;
    DELETE FROM _sluice.node AS n WHERE n.pgt_id = v_node.pgt_id;
    PERFORM _sluice.settle('{}', v_node.kind = 'matview');
    RETURN to_jsonb(true);
END;
$$;

CREATE FUNCTION sluice.unschedule(job_name text)
RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO _sluice.request (command, arguments)
    VALUES ('unschedule', pg_catalog.jsonb_build_object(
        'kinds', ARRAY['job', 'matview'], 'name', job_name,
        'relid', _sluice.relation_of(job_name)
    ))
    RETURNING result::boolean
$$;
COMMENT ON FUNCTION sluice.unschedule(text) IS
'Removes a job, or ends the scheduled refresh of a materialized view; false when there is none. A run in progress ends as usual; history stays. Only for its owner.';

-- sql/node_operations.sql

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
            DETAIL = 'A node has one run at a time, and the queue of a database is bounded (max_queue_depth).',
            HINT = 'Call again when the run has ended; sluice.queue() shows it.';
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
'Queues a run of a node at once, whether or not the calling transaction commits; returns its run_id, or that of the run that is queued already. The node must have been committed, and its database started. An error while it runs. Only for its owner.';

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
    UPDATE _sluice.node_state AS s SET consecutive_errors = 0 WHERE s.pgt_id = v_node.pgt_id;
    PERFORM _sluice.close_alert('suspended', v_node.pgt_id);
    PERFORM _sluice.close_alert('quarantined', v_node.pgt_id);
    PERFORM pg_notify('sluice_wake', '');
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

-- sql/scheduler.sql

-- Joining and leaving, the leader, and what they need.

CREATE FUNCTION _sluice.control_database()
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT current_setting('cron.database_name', true)
$$;
COMMENT ON FUNCTION _sluice.control_database() IS
    'The database that pg_cron works from; NULL when the server has not loaded pg_cron';

CREATE FUNCTION _sluice.database_oid()
RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.oid::bigint FROM pg_database AS d WHERE d.datname = current_database()
$$;
COMMENT ON FUNCTION _sluice.database_oid() IS 'The OID of this database, which keys all state in the control database';

CREATE FUNCTION _sluice.control(_function text, _arguments jsonb)
RETURNS jsonb
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.unwrap(_sluice.invoke_privileged(
        'control', jsonb_build_object('function', _function, 'arguments', _arguments)
    ))
$$;
COMMENT ON FUNCTION _sluice.control(text, jsonb) IS
    'Calls a function of _sluice in the control database over a connection of its own: it takes effect at once';

CREATE FUNCTION sluice.preflight()
RETURNS TABLE ("check" text, ok boolean, detail text, hint text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r."check", r.ok, r.detail, r.hint
    FROM jsonb_to_recordset(_sluice.unwrap(_sluice.invoke_privileged('preflight', '{}')))
        AS r ("check" text, ok boolean, detail text, hint text)
$$;
COMMENT ON FUNCTION sluice.preflight() IS
'Everything that start() needs, one row each: pg_cron, its version and mode, the connections it and the scheduler make, settings that would end a long session. Changes nothing.';

CREATE TABLE _sluice.home (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT home_pkey PRIMARY KEY
        CONSTRAINT home_singleton_check CHECK (singleton),
    db_oid oid NOT NULL
);
COMMENT ON TABLE _sluice.home IS 'The database that the nodes, their errors and their history belong to';

CREATE FUNCTION _sluice.rehome()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_former oid;
BEGIN
    SELECT h.db_oid INTO v_former FROM _sluice.home AS h FOR UPDATE;
    IF v_former = _sluice.database_oid() THEN
        RETURN;
    END IF;
    INSERT INTO _sluice.home (db_oid) VALUES (_sluice.database_oid())
    ON CONFLICT (singleton) DO UPDATE SET db_oid = EXCLUDED.db_oid;
    IF v_former IS NOT NULL THEN
        -- A copy made from a template: what its original went through is not its own.
        DELETE FROM _sluice.history;
        DELETE FROM _sluice.alert;
        DELETE FROM _sluice.baseline;
        UPDATE _sluice.node_state AS s
        SET consecutive_errors = 0, gated_since = NULL, last_run_at = NULL, last_outcome = NULL;
        UPDATE _sluice.node AS n
        SET retry_at = NULL, retry_of = NULL,
            status = CASE WHEN n.status IN ('suspended', 'quarantined') THEN 'active' ELSE n.status END;
        PERFORM _sluice.settle(ARRAY(SELECT n.pgt_id FROM _sluice.node AS n), true);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.rehome() IS
    'Makes the nodes this database''s own; in a copy of a member it clears the errors, alerts and history of the original and starts new grids';

CREATE FUNCTION sluice.start()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.rehome();
    SELECT _sluice.unwrap(_sluice.invoke_privileged('start', jsonb_build_object('user', session_user)))
$$;
COMMENT ON FUNCTION sluice.start() IS
'Makes this database a member, so that its nodes are scheduled, and sees to the one pg_cron entry in the control database. Takes effect at once, whether or not the calling transaction commits. Idempotent. In a copy that was made from a template of a member it also makes the nodes its own, as part of the transaction: their errors, alerts and history are cleared and their grids begin anew. An error names the first failed check of preflight().';

CREATE FUNCTION sluice.stop()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.control('leave_database', jsonb_build_object('_db_oid', _sluice.database_oid()))
$$;
COMMENT ON FUNCTION sluice.stop() IS
'Ends the scheduling of this database at once: queued runs are forgotten, running ones end as usual, and the scheduler''s connections go within a tick. The last member to stop takes the pg_cron entry along. Idempotent.';

CREATE PROCEDURE sluice.run(run_for interval DEFAULT '1 hour')
LANGUAGE plpgsql
AS $$
DECLARE
    v_result jsonb;
BEGIN
    IF run_for IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'run_for must not be null';
    END IF;
    -- Since PostgreSQL 17 an interval can be endless.
    IF NOT pg_catalog.isfinite(run_for) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value', MESSAGE = 'run_for must be finite';
    END IF;
    IF run_for OPERATOR(pg_catalog.<) '0'::interval THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value', MESSAGE = 'run_for must not be negative';
    END IF;
    CALL _sluice.lead(pg_catalog.date_part('epoch', run_for), v_result);
    PERFORM _sluice.unwrap(v_result);
END;
$$;
COMMENT ON PROCEDURE sluice.run(interval) IS
'The leader: schedules all member databases for that long, then ends. ''0'' makes one pass over all members, runs what is due, and ends. pg_cron calls it in the control database; must not be called inside a transaction block. A second leader waits one lease (lease_ttl) for the first to lapse and ends if it does not. Only for superusers.';

-- sql/control_operations.sql

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

CREATE FUNCTION sluice.drain(
    timeout interval DEFAULT NULL, "cluster" boolean DEFAULT false, wait boolean DEFAULT true
)
RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.check_setting('drain_timeout', timeout::text, true);
    SELECT _sluice.unwrap(_sluice.invoke_privileged('drain', jsonb_build_object(
        'seconds', COALESCE(extract(epoch FROM timeout), _sluice.setting('drain_timeout')),
        'cluster', "cluster", 'wait', wait, 'user', session_user
    ))) #>> '{}'
$$;
COMMENT ON FUNCTION sluice.drain(interval, boolean, boolean) IS
'Lets no further run start in this database, or with cluster => true on the server, until resume(). Waits up to the timeout (default: drain_timeout) for what runs and returns ''drained'' when nothing does, else ''draining''; in both cases it stays in force. A call that is cancelled before its answer withdraws its request. wait => false returns at once.';

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
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.check_setting('pause_timeout', _arguments ->> 'timeout', true);
    SELECT _sluice.unwrap(_sluice.invoke_privileged('pause', jsonb_build_object(
        'nodes', _sluice.find_nodes(_arguments),
        'seconds', COALESCE(extract(epoch FROM (_arguments ->> 'timeout')::interval), _sluice.setting('pause_timeout')),
        'wait', (_arguments ->> 'wait')::boolean,
        'user', _caller
    )))
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
'Lets no further run of these nodes start until unpause(): all of them or, on an error, none. Waits up to the timeout (default: pause_timeout) for their runs and returns ''paused'', else ''pausing''; it stays in force. A call that is cancelled withdraws what it added. Takes effect at once.';

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
COMMENT ON FUNCTION sluice.queue() IS 'The live runs of the whole server: queued and running. Finished ones are in sluice.history of their database.';

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
    queued bigint, running bigint, drain text, error text
)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.db_oid, r.database, r.state, r.last_tick_at, r.last_tick_ms, r.queued, r.running, r.drain, r.error
    FROM jsonb_to_recordset(_sluice.control('database_rows', '{}')) AS r (
        db_oid oid, database text, state text, last_tick_at timestamptz, last_tick_ms double precision,
        queued bigint, running bigint, drain text, error text
    )
$$;
COMMENT ON FUNCTION sluice.databases() IS 'The member databases of the server and how their scheduling fares.';

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

-- sql/health.sql

-- How it all fares, in rows that a monitoring check can read.

CREATE FUNCTION sluice.health_check()
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    WITH control AS MATERIALIZED (
        SELECT r.*
        FROM jsonb_to_record(_sluice.control('health_of', jsonb_build_object('_db_oid', _sluice.database_oid()))) AS r (
            leader_pid integer, leader_alive boolean, member_state text, last_tick_at timestamptz,
            error text, spawn_error text, tick_bound interval, queued bigint, oldest_queued_at timestamptz,
            worker_limit integer, drain boolean
        )
    )
    SELECT 'leader',
        CASE WHEN c.leader_alive THEN 'ok' ELSE 'critical' END,
        CASE WHEN c.leader_alive THEN format('process %s leads', c.leader_pid) ELSE 'no leader holds the lease' END,
        CASE WHEN NOT c.leader_alive THEN 'pg_cron starts one within a minute; otherwise see sluice.preflight() and cron.job_run_details.' END
    FROM control AS c
    UNION ALL
    SELECT 'database',
        CASE
            WHEN c.member_state = 'scheduled' AND c.last_tick_at > clock_timestamp() - c.tick_bound
                THEN CASE WHEN c.spawn_error IS NULL THEN 'ok' ELSE 'critical' END
            WHEN c.member_state IS NULL THEN 'warn'
            WHEN c.member_state = 'joining' THEN 'warn'
            ELSE 'critical'
        END,
        CASE
            WHEN c.member_state IS NULL THEN 'this database is not scheduled'
            ELSE format('%s, last tick %s%s', c.member_state, COALESCE(c.last_tick_at::text, 'never'), ': ' || COALESCE(c.error, c.spawn_error))
        END,
        CASE WHEN c.member_state IS NULL THEN 'Call sluice.start().' END
    FROM control AS c
    UNION ALL
    SELECT 'workers',
        CASE WHEN c.worker_limit = 0 THEN 'warn' ELSE 'ok' END,
        CASE WHEN c.worker_limit = 0 THEN 'serial mode: the leader runs nodes one after the other' ELSE format('up to %s', c.worker_limit) END,
        CASE WHEN c.worker_limit = 0 THEN 'See sluice.effective_limit() for what binds.' END
    FROM control AS c
    UNION ALL
    SELECT 'queue',
        CASE WHEN c.oldest_queued_at < clock_timestamp() - interval '5 min' AND NOT c.drain THEN 'warn' ELSE 'ok' END,
        format('%s queued%s', c.queued, ', the oldest since ' || c.oldest_queued_at),
        CASE WHEN c.oldest_queued_at < clock_timestamp() - interval '5 min' AND NOT c.drain THEN 'See sluice.queue() and sluice.workers().' END
    FROM control AS c
    UNION ALL
    SELECT 'drain',
        CASE WHEN c.drain THEN 'warn' ELSE 'ok' END,
        CASE WHEN c.drain THEN 'a drain is in force' ELSE 'none' END,
        CASE WHEN c.drain THEN 'See sluice.drain_status(); sluice.resume() ends it.' END
    FROM control AS c
    UNION ALL
    SELECT 'nodes',
        CASE WHEN count(*) = 0 THEN 'ok' ELSE 'critical' END,
        CASE WHEN count(*) = 0 THEN 'all can run'
            ELSE string_agg(format('"%s" is %s', _sluice.node_name(n), n.status), ', ' ORDER BY n.pgt_id) END,
        CASE WHEN count(*) > 0 THEN 'See sluice.history for the reason; sluice.reset() lifts it.' END
    FROM _sluice.node AS n
    WHERE n.status IN ('suspended', 'quarantined')
$$;
COMMENT ON FUNCTION sluice.health_check() IS
'The state of the scheduler and of this database: one row a check, with ok, warn or critical, the detail, and what to do. For monitoring: SELECT … WHERE status <> ''ok''.';

CREATE FUNCTION _sluice.health_of(_db_oid oid)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'leader_pid', l.pid,
        'leader_alive', COALESCE(l.expires_at > clock_timestamp(), false),
        'member_state', m.state,
        'last_tick_at', m.last_tick_at,
        'error', m.error,
        'spawn_error', m.spawn_error,
        -- A database without a connection of its own is looked at within ten intervals.
        'tick_bound', make_interval(secs => 60 + 10 * _sluice.setting('scheduler_interval')::double precision),
        'queued', (SELECT count(*) FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued'),
        'oldest_queued_at', (SELECT min(q.enqueued_at) FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued'),
        'worker_limit', _sluice.worker_limit(),
        'drain', _sluice.drain_in_force(_db_oid)
    )
    FROM _sluice.lease AS l
    LEFT JOIN _sluice.member AS m ON m.db_oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.health_of(oid) IS 'What the control database knows of a member''s health';

-- sql/views.sql

-- What users and dashboards read.

CREATE VIEW sluice.nodes AS
SELECT
    n.pgt_id,
    -- As history, queue and alerts have it.
    COALESCE(
        n.job_name,
        CASE WHEN c.oid IS NOT NULL THEN format('%I.%I', s.nspname, c.relname) COLLATE "default" END,
        n.relid::text
    ) AS name,
    n.kind,
    n.schedule,
    CASE n.kind
        WHEN 'stream_table' THEN n.refresh_mode
        WHEN 'matview' THEN CASE WHEN n.concurrently THEN 'concurrently' ELSE 'full' END
    END AS refresh_mode,
    CASE
        WHEN n.status = 'active' AND (
            (n.kind = 'stream_table' AND t.last_success_at IS NULL)
            OR (n.kind = 'matview' AND NOT c.relispopulated)
        ) THEN 'needs_init'
        ELSE n.status
    END AS status,
    n.next_fire_at,
    t.last_run_at,
    t.last_outcome,
    COALESCE(t.consecutive_errors, 0) AS consecutive_errors,
    CASE WHEN n.retry_at IS NOT NULL THEN format('backoff until %s', n.retry_at) END AS remedy,
    CASE WHEN n.kind <> 'job' THEN clock_timestamp() - t.last_success_at END AS lag,
    -- No function of ours: a view's functions need the reader's own privileges.
    pg_get_userbyid(COALESCE(n.job_owner::oid, c.relowner)) AS owner,
    n.priority,
    g.upstream
FROM _sluice.node AS n
LEFT JOIN _sluice.graph AS g ON g.pgt_id = n.pgt_id
LEFT JOIN _sluice.node_state AS t ON t.pgt_id = n.pgt_id
LEFT JOIN pg_class AS c ON c.oid = n.relid
LEFT JOIN pg_namespace AS s ON s.oid = c.relnamespace;
COMMENT ON VIEW sluice.nodes IS
    'What is scheduled in this database. lag: the age of what a stream table or materialized view shows. upstream: the pgt_ids of the nodes that it reads';

CREATE VIEW sluice.history AS
SELECT
    h.run_id, h.pgt_id, h.name, h.kind, h.mode, h.outcome, h.sqlstate, h.message, h.attempt,
    h.due_at, h.started_at, h.ended_at, h.rows_changed, h.reason, h.pid, h.detail, h.context
FROM _sluice.history AS h;
COMMENT ON VIEW sluice.history IS
    'Every attempt to run a node of this database, for the time of history_retention';

CREATE VIEW sluice.alerts AS
SELECT
    a.seq, a.event, a.severity, a.node, a.pgt_id, a.opened_at, a.closed_at, a.last_emitted_at,
    a.message, a.detail
FROM _sluice.alert AS a;
COMMENT ON VIEW sluice.alerts IS
    'Conditions that somebody should look at; an open one has no closed_at. They are announced on the channel sluice_alert too';

CREATE VIEW sluice.settings AS
SELECT
    e.name, e.value, e.default_value AS "default", e.min_value AS min, e.max_value AS max, e.unit,
    e.scope, e.description
FROM _sluice.effective_setting AS e
ORDER BY e.name;
COMMENT ON VIEW sluice.settings IS
    'The settings in force in this database. scope: database settings can be set for a database and for the server, cluster settings for the server only; see sluice.configure()';

-- sql/privileges.sql

-- Nothing is for everybody but the doors, which give no more than the caller's own rights. What a role
-- may use is granted by the administrator; docs/security.md has the lines.

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA sluice FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA sluice FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA _sluice FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA _sluice FROM PUBLIC;

GRANT USAGE ON SCHEMA sluice TO PUBLIC;
GRANT USAGE ON SCHEMA _sluice TO PUBLIC;
GRANT INSERT (command, arguments), SELECT (result) ON _sluice.request TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.invoke(text, jsonb) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.unwrap(jsonb) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.load_package() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.package_directory() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.name_nodes(text[], text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.relation_of(text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.session_settings() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.setting(text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.check_setting(text, text, boolean) TO PUBLIC;
