-- Generated from sql/ by "make script". Change it there.
\echo Use "CREATE EXTENSION pg_sluice" to load this file. \quit

-- sql/schemas.sql

-- The schemas. Users call and read what is in "sluice"; the others are private: their objects may
-- change in any release.

CREATE SCHEMA sluice;
COMMENT ON SCHEMA sluice IS 'pg_sluice: functions and views for users';

CREATE SCHEMA _sluice;
COMMENT ON SCHEMA _sluice IS 'pg_sluice: private tables and functions, not for users';

-- Users' calls pass through "_sluice", so all may use it. Who can name a table can lock it, with PREPARE
-- as any statement would that writes: privileges on the table are looked at when it is executed.
CREATE SCHEMA _sluice_locks;
COMMENT ON SCHEMA _sluice_locks IS 'pg_sluice: what is locked as a whole. Nobody may use it, so that nobody holds its locks';

-- sql/names.sql

-- Names of databases and roles. Databases of all encodings share them, so the server knows them by their
-- bytes, and what one database wrote can be no text in another. Whoever takes such a name for text fails,
-- a client when it decodes it; PL/Python then even crashes the server.
--
-- In a database in SQL_ASCII it is the same with all names, also those of nodes. And in WIN1252, EUC_TW and
-- others there are a few that can't be sent to a client in UTF-8: a node can be given one by renaming it.
--
-- chr(92) is a backslash, whatever standard_conforming_strings is.

CREATE FUNCTION _sluice.raw_name(_name text)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN decode(replace(_name, chr(92), repeat(chr(92), 2)), 'escape');
END;
$$;
COMMENT ON FUNCTION _sluice.raw_name(text) IS
    'The bytes of the name of a database or role, by which to connect to it from whatever database';

CREATE FUNCTION _sluice.shown_name(_name text)
RETURNS text
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_raw CONSTANT bytea := _sluice.raw_name(_name);
BEGIN
    IF encode(v_raw, 'escape') <> replace(_name, chr(92), repeat(chr(92), 2)) THEN
        BEGIN
            -- It goes to clients in UTF-8. In SQL_ASCII anything is a text; other encodings take some
            -- characters that UTF-8 is not known to have.
            PERFORM convert(v_raw, replace(getdatabaseencoding(), 'SQL_ASCII', 'UTF8'), 'UTF8');
        EXCEPTION
            WHEN character_not_in_repertoire OR untranslatable_character THEN
                RETURN encode(v_raw, 'escape');
        END;
    END IF;
    RETURN _name;
END;
$$;
COMMENT ON FUNCTION _sluice.shown_name(text) IS
    'The name of a database, a role or a node as a text of this database that clients can read: as it is, or where its bytes are none in this encoding or have no equivalent in UTF-8, these in octal, as \351';

CREATE FUNCTION _sluice.here()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.shown_name(current_database())
$$;
COMMENT ON FUNCTION _sluice.here() IS 'The name of this database, to be shown';

CREATE FUNCTION _sluice.control_database()
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.shown_name(current_setting('cron.database_name', true))
$$;
COMMENT ON FUNCTION _sluice.control_database() IS
    'The database that pg_cron works from; NULL when the server has not loaded pg_cron';

CREATE FUNCTION _sluice.database_name(_db_oid oid)
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.shown_name(d.datname) FROM pg_database AS d WHERE d.oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.database_name(oid) IS 'The present name of a database, to be shown; NULL when it is gone';

-- sql/clock.sql

-- The clock of the server can be set back: a machine was resumed with a wrong time, or NTP steps it. What
-- was written before then lies in the future, and whoever compares it with the clock would wait for that.

CREATE FUNCTION _sluice.latest_past(_now timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN _now + interval '1 s';
END;
$$;
COMMENT ON FUNCTION _sluice.latest_past(timestamptz) IS
    'What is on record as having happened later than this, a clock wrote that has been set back since. Less than a second is no matter: who waits for it does not wait long';

CREATE FUNCTION _sluice.began_before(_backend_start timestamptz, _moment timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN _backend_start < _moment OR _backend_start > _sluice.latest_past(clock_timestamp());
END;
$$;
COMMENT ON FUNCTION _sluice.began_before(timestamptz, timestamptz) IS
    'Whether a session is older than something that is done in it, and so no later one under the same number. One that began in the future did so before the clock was set back';

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

CREATE FUNCTION _sluice.parse_address(_address text, OUT host text, OUT port integer)
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Without backslashes, which standard_conforming_strings decides about.
    v_parts CONSTANT text[] := regexp_match(
        _address, '^(?:(localhost)|([0-9]+(?:[.][0-9]+){3})|[[]([0-9a-fA-F.]*:[0-9a-fA-F:.]*)[]]):([0-9]{1,5})$'
    );
BEGIN
    IF _address = 'off' THEN
        RETURN;
    END IF;
    host := CASE WHEN v_parts[1] IS NOT NULL THEN '127.0.0.1' ELSE host(COALESCE(v_parts[2], v_parts[3])::inet) END;
    port := v_parts[4]::integer;
    IF host IS NULL OR port NOT BETWEEN 1 AND 65535 THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('"%s" is no address to listen on', _address);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.parse_address(text) IS
    'The IP address and port of an address to listen on; NULLs for off. A data exception (class 22) where it is none';

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
    ('recovery_successes', 'integer', '3', '1', '100', NULL, 'database',
        'Successes in a row after which a remedy is eased by one step.'),
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
    ('alert_reminder_interval', 'interval', '15 min', '1 s', '30 d', 's', 'database',
        'Time after which an alert that is still open is announced again.'),
    ('history_rows', 'integer', '10000', '0', '10000000', 'rows', 'database',
        'History rows of one node; the oldest beyond it are deleted. 0 means no limit.'),
    ('maintenance_batch', 'integer', '500', '1', '10000', 'rows', 'database',
        'Rows that one step of upkeep, a transaction, deletes at the most.'),
    ('maintenance_budget', 'interval', '50 ms', '1 ms', '1 s', 's', 'database',
        'Time that upkeep of the whole server takes out of each scheduler_interval, unless runs write more history than it deletes then; no step takes much longer.'),
    ('metrics_listen', 'address', 'off', NULL, NULL, NULL, 'cluster',
        'Where /metrics and /healthz are served over HTTP, as in 127.0.0.1:9188; off: nowhere. There is no authentication.'),
    ('metrics_timeout', 'interval', '5 s', '100 ms', '60 s', 's', 'cluster',
        'Longest time that the collection for a scrape takes.')
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
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN CASE _type
        WHEN 'integer' THEN _value::integer
        WHEN 'interval' THEN extract(epoch FROM _value::interval)
        WHEN 'bytes' THEN pg_size_bytes(_value)
        WHEN 'address' THEN (_sluice.parse_address(_value)).port
    END;
END;
$$;
COMMENT ON FUNCTION _sluice.setting_quantity(text, text) IS
    'A setting''s text as a number: an integer, seconds, bytes, or the port of an address';

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
LANGUAGE plpgsql STABLE STRICT SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT _sluice.setting_quantity(e.type, e.value) FROM _sluice.effective_setting AS e WHERE e.name = _name
    );
END;
$$;
COMMENT ON FUNCTION _sluice.setting(text) IS
    'The value in force in this database, as a number: an integer, seconds, or bytes';

CREATE FUNCTION _sluice.interval_setting(_name text)
RETURNS interval
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN make_interval(secs => _sluice.setting(_name)::double precision);
END;
$$;
COMMENT ON FUNCTION _sluice.interval_setting(text) IS 'The value in force of a setting that is an interval';

CREATE FUNCTION _sluice.settings_in_force()
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT jsonb_object_agg(e.name, _sluice.setting_quantity(e.type, e.value))
        FROM _sluice.effective_setting AS e
    );
END;
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
                    WHEN 'address' THEN 'The value is ''off'', or an IP address or localhost with a port, such as ''127.0.0.1:9188'' or ''[::1]:9188''.'
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
    IF _name = 'metrics_listen' THEN
        PERFORM _sluice.arrange_endpoint();
    END IF;
    PERFORM _sluice.wake();
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
    -- How long ago its last success may have begun; NULL: what its schedule lets expect.
    max_lag interval CONSTRAINT node_max_lag_check CHECK (max_lag > '0'::interval),
    status text NOT NULL DEFAULT 'active'
        CONSTRAINT node_status_check CHECK (status IN ('active', 'suspended', 'quarantined')),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When the node runs next: its grid, or earlier a retry of the fire "retry_of".
    next_fire_at timestamptz,
    -- The last step on the grid: where it goes on when the schedule can't be read any more.
    fire_step interval,
    -- The fire that was queued last.
    fired_at timestamptz,
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
    -- The remedy for runs that were out of memory, in bytes (NULL: none), and the successes in a row under it.
    work_mem bigint,
    successes integer NOT NULL DEFAULT 0,
    -- The first fire that was skipped since sources were out of step.
    gated_since timestamptz,
    -- Totals since the node was made, for metrics: they outlive history. Runs by outcome.
    runs jsonb NOT NULL DEFAULT '{}',
    run_seconds double precision NOT NULL DEFAULT 0,
    rows_changed bigint NOT NULL DEFAULT 0
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
    'Derived from node and dependency by _sluice.settle(). A table of its own, so that defining a node in a long transaction locks no row that runs of other nodes write';
SELECT pg_catalog.pg_extension_config_dump('_sluice.graph', '');

CREATE FUNCTION _sluice.downstream(_pgt_ids bigint[])
RETURNS SETOF bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE downstream AS (
        SELECT d.pgt_id
        FROM _sluice.node AS n
        JOIN _sluice.dependency AS d ON d.relid = n.relid
        WHERE n.pgt_id = ANY (_pgt_ids)
        UNION
        SELECT d.pgt_id
        FROM downstream AS w
        JOIN _sluice.node AS n ON n.pgt_id = w.pgt_id
        JOIN _sluice.dependency AS d ON d.relid = n.relid
    )
    SELECT w.pgt_id FROM downstream AS w
$$;
COMMENT ON FUNCTION _sluice.downstream(bigint[]) IS 'The nodes that read these, directly or through others';

CREATE FUNCTION _sluice.column_signature(_relid regclass)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
AS $$
BEGIN
    RETURN (
        SELECT string_agg(
            format('%s %s%s', a.attnum, format_type(a.atttypid, a.atttypmod), ' collation ' || NULLIF(a.attcollation, 0)::regcollation),
            ', ' ORDER BY a.attnum
        )
        FROM pg_attribute AS a
        WHERE a.attrelid = _relid AND a.attnum > 0 AND NOT a.attisdropped
    );
END;
$$;
COMMENT ON FUNCTION _sluice.column_signature(regclass) IS
    'The columns of a table by number, type and collation: what must not change under a stream table, unlike their names';

CREATE FUNCTION _sluice.node_name(_node _sluice.node)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET quote_all_identifiers = off
AS $$
DECLARE
    v_name CONSTANT text := COALESCE(_node.job_name, _node.relid::text);
BEGIN
    -- Elsewhere a name can be one that clients can't read, and one must not stop the scheduling of all.
    RETURN CASE WHEN getdatabaseencoding() = 'UTF8' THEN v_name ELSE _sluice.shown_name(v_name) END;
END;
$$;
COMMENT ON FUNCTION _sluice.node_name(_sluice.node) IS
    'The name that history, queue and alerts carry: a job''s name, or a relation''s qualified name';

CREATE FUNCTION _sluice.node_owner(_node _sluice.node)
RETURNS oid
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN COALESCE(_node.job_owner::oid, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = _node.relid));
END;
$$;
COMMENT ON FUNCTION _sluice.node_owner(_sluice.node) IS
    'The role whose rights a run has; NULL when the relation is gone';

-- Advisory locks of pg_sluice are two-key locks; the first key is the class. Whoever can connect can take
-- them, so those that are left hold up one database: docs/security.md says what. A run needs its lock
-- before its snapshot, and before it looks at a row.
CREATE FUNCTION _sluice.lock_class(_purpose text)
RETURNS integer
LANGUAGE sql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE _purpose
        WHEN 'node' THEN 1936748802     -- second key pgt_id: one run of a node, by whatever path
        WHEN 'catalog' THEN 1936748803  -- definitions change one after the other
    END
$$;
COMMENT ON FUNCTION _sluice.lock_class(text) IS 'First key of the advisory locks that pg_sluice takes';

CREATE VIEW _sluice.node_lock AS
SELECT l.pid, l.database AS db_oid, l.objid::bigint AS pgt_id
FROM pg_catalog.pg_locks AS l
WHERE l.locktype = 'advisory'
    AND l.classid = _sluice.lock_class('node')::oid
    AND l.objsubid = 2
    AND l.granted;
COMMENT ON VIEW _sluice.node_lock IS 'The locks of nodes that are held on this server: who runs what, by whatever path';

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
    -- What the run was under since earlier ones had failed.
    remedy text,
    pid integer
);
CREATE INDEX history_pgt_id_started_at_idx ON _sluice.history (pgt_id, started_at);
CREATE INDEX history_ended_at_idx ON _sluice.history (ended_at);
-- Forbids that a transactional job runs twice for one fire.
CREATE UNIQUE INDEX history_job_fire_key ON _sluice.history (pgt_id, due_at)
    WHERE kind = 'job' AND outcome IN ('succeeded', 'no_change');

-- sql/alerts.sql

-- Conditions that somebody should look at. An open one is a row without closed_at.
--
-- Whoever finds one writes the row, and no more: a notification in the transaction of a run would fail
-- its commit when the server's queue of notifications is full. The leader announces what is pending, in
-- a transaction of its own.
--
--   (none) --open_alert--> open --close_alert--> closed
--   pending: not emitted since it was opened, or since it was closed; and open when a reminder is due

CREATE TABLE _sluice.alert (
    seq bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT alert_pkey PRIMARY KEY,
    event text NOT NULL,
    severity text NOT NULL CONSTRAINT alert_severity_check CHECK (severity IN ('info', 'warning', 'critical')),
    -- What it is about: a node, or in the control database a database.
    node text,
    pgt_id bigint,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at timestamptz,
    -- NULL: not announced yet.
    last_emitted_at timestamptz,
    message text NOT NULL,
    detail jsonb
);
-- Forbids that one condition is open twice.
CREATE UNIQUE INDEX alert_open_key ON _sluice.alert (event, COALESCE(pgt_id::text, node, ''))
    WHERE closed_at IS NULL;
CREATE INDEX alert_closed_at_idx ON _sluice.alert (closed_at) WHERE closed_at IS NOT NULL;
-- Empty but for moments, so that a tick asks for next to nothing.
CREATE INDEX alert_unannounced_idx ON _sluice.alert (opened_at)
    WHERE last_emitted_at IS NULL OR last_emitted_at < closed_at;

CREATE VIEW _sluice.unannounced_alert AS
SELECT a.opened_at, a.xmin::text AS version, a AS alert
FROM _sluice.alert AS a
WHERE a.last_emitted_at IS NULL OR a.last_emitted_at < a.closed_at;
COMMENT ON VIEW _sluice.unannounced_alert IS
    'What was opened or closed and is not announced yet. To be read in the order of opened_at, with a limit: for anything else the planner takes the table for full of them, and does not look at their index';

CREATE FUNCTION _sluice.can_notify()
RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notification_queue_usage() < 0.9
$$;
COMMENT ON FUNCTION _sluice.can_notify() IS
    'Whether the server''s queue of notifications has room. When it is full, which one idle listener in a transaction can bring about, a commit with a notification fails';

CREATE FUNCTION _sluice.wake()
RETURNS void
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('sluice_wake', '') WHERE _sluice.can_notify()
$$;
COMMENT ON FUNCTION _sluice.wake() IS
    'Has the leader look at this database once the transaction commits. A full queue of notifications costs that, and never the transaction: the leader then looks within a scheduler_interval';

CREATE FUNCTION _sluice.open_alert(
    _event text, _severity text, _pgt_id bigint, _node text, _message text, _detail jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO _sluice.alert (event, severity, pgt_id, node, message, detail)
    VALUES (_event, _severity, _pgt_id, _node, _message, _detail)
    ON CONFLICT (event, COALESCE(pgt_id::text, node, '')) WHERE closed_at IS NULL DO NOTHING;
    IF FOUND THEN
        PERFORM _sluice.wake();
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.open_alert(text, text, bigint, text, text, jsonb) IS
    'Opens a condition, which the leader then announces; does nothing while it is open already';

CREATE FUNCTION _sluice.close_alert(_event text, _pgt_id bigint, _node text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Later than what was announced of it, whatever the clock says: that makes it pending.
    UPDATE _sluice.alert AS a
    SET closed_at = greatest(clock_timestamp(), a.last_emitted_at + interval '1 us')
    WHERE a.event = _event
        AND COALESCE(a.pgt_id::text, a.node, '') = COALESCE(_pgt_id::text, _node, '')
        AND a.closed_at IS NULL;
    IF FOUND THEN
        PERFORM _sluice.wake();
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.close_alert(text, bigint, text) IS
    'Closes an open condition, which the leader then announces once, with the severity info';

CREATE FUNCTION _sluice.close_alerts(_event text)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.close_alert(a.event, a.pgt_id, a.node)
    FROM _sluice.alert AS a
    WHERE a.event = _event AND a.closed_at IS NULL
$$;
COMMENT ON FUNCTION _sluice.close_alerts(text) IS
    'Closes what a database says of itself, also where it was opened under another name of the database';

CREATE FUNCTION _sluice.alert_json(_alert _sluice.alert, _severity text, _at timestamptz)
RETURNS bytea
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT convert_to(
        -- json keeps a string's characters as they are, where jsonb of a database in SQL_ASCII refuses some.
        json_build_object(
            'event', _alert.event,
            'severity', _severity,
            'database', _sluice.here(),
            'node', _alert.node,
            'pgt_id', _alert.pgt_id,
            'at', _at,
            'seq', _alert.seq,
            'message', _alert.message,
            'detail', _alert.detail::text
        )::text,
        -- There any bytes can be in a text, which a client that expects UTF-8 would not be given.
        CASE WHEN getdatabaseencoding() = 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END
    )
$$;
COMMENT ON FUNCTION _sluice.alert_json(_sluice.alert, text, timestamptz) IS
    'An alert as core/alerts.py takes it: JSON in UTF-8, or of whatever bytes a database in SQL_ASCII has';

CREATE FUNCTION _sluice.pending_alerts(_now timestamptz)
RETURNS TABLE (seq bigint, version text, alert bytea)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Of either kind; the rest at the next look.
    v_limit CONSTANT integer := 200;
    v_seconds double precision;
BEGIN
    IF (SELECT true FROM _sluice.unannounced_alert AS u ORDER BY u.opened_at LIMIT 1) IS NULL
        AND NOT EXISTS (SELECT FROM _sluice.alert AS a WHERE a.closed_at IS NULL)
    THEN
        RETURN;
    ELSIF NOT _sluice.can_notify() THEN
        RETURN;
    END IF;
    v_seconds := _sluice.setting('alert_reminder_interval');
    RETURN QUERY
    WITH pending AS (
        (
            SELECT u.alert AS a, u.version
            FROM _sluice.unannounced_alert AS u
            ORDER BY u.opened_at
            LIMIT v_limit
        )
        UNION ALL
        (
            SELECT a, a.xmin::text
            FROM _sluice.alert AS a
            WHERE a.closed_at IS NULL
                -- A point of the grid from opened_at has passed since: as many reminders in the same
                -- time, however often somebody looks.
                -- Where the clock has been set back since, it has passed as well.
                AND (
                    floor(extract(epoch FROM _now - a.opened_at) / v_seconds)
                        > floor(extract(epoch FROM a.last_emitted_at - a.opened_at) / v_seconds)
                    OR a.last_emitted_at > _sluice.latest_past(_now)
                )
            ORDER BY a.last_emitted_at
            LIMIT v_limit
        )
    )
    SELECT (p.a).seq, p.version, _sluice.alert_json(p.a, s.severity, s.at)
    FROM pending AS p
    CROSS JOIN LATERAL (VALUES
        (1, (p.a).severity, (p.a).opened_at, (p.a).last_emitted_at IS NULL),
        (2, (p.a).severity, _now, (p.a).last_emitted_at IS NOT NULL AND (p.a).closed_at IS NULL),
        (3, 'info', (p.a).closed_at, (p.a).closed_at IS NOT NULL)
    ) AS s (step, severity, at, applies)
    WHERE s.applies
    ORDER BY (p.a).seq, s.step;
END;
$$;
COMMENT ON FUNCTION _sluice.pending_alerts(timestamptz) IS
    'What is to be announced, in order: alerts that were opened, that were closed (severity info), and reminders of open ones. version is the row''s, for emit_alerts. Nothing while can_notify() says no';

CREATE FUNCTION _sluice.emit_alerts(_now timestamptz, _seqs bigint[], _versions text[], _payloads bytea[])
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH given AS (
        SELECT g.seq, g.version, g.payload, g.position
        FROM unnest(_seqs, _versions, _payloads) WITH ORDINALITY AS g (seq, version, payload, position)
    ), free AS (
        SELECT a.seq
        FROM _sluice.alert AS a
        JOIN (SELECT DISTINCT g.seq, g.version FROM given AS g) AS d ON d.seq = a.seq
        WHERE a.xmin::text = d.version
        -- Users close alerts in transactions of any length, which nobody is to wait for.
        FOR NO KEY UPDATE OF a SKIP LOCKED
    ), marked AS (
        UPDATE _sluice.alert AS a
        SET last_emitted_at = greatest(_now, a.closed_at)
        FROM free AS f
        WHERE a.seq = f.seq
        RETURNING a.seq
    )
    SELECT pg_notify('sluice_alert', convert_from(o.payload, 'UTF8'))
    FROM (
        SELECT g.payload FROM given AS g JOIN marked AS m ON m.seq = g.seq ORDER BY g.position
    ) AS o
$$;
COMMENT ON FUNCTION _sluice.emit_alerts(timestamptz, bigint[], text[], bytea[]) IS
    'Announces on the channel sluice_alert what was pending, as JSON in UTF-8. An alert that changed since it was read, closed or announced by another session, or that is being changed, is left to the next look';

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
        AND (
            count(w.watermark) < count(*)
            -- No interval is as long as two watermarks can be apart.
            OR extract(epoch FROM max(w.watermark)) - extract(epoch FROM min(w.watermark)) > extract(epoch FROM g.tolerance)
        )
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
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM _sluice.node_state AS s WHERE s.gated_since IS NOT NULL) THEN
        RETURN;
    END IF;
    WITH free AS (
        SELECT s.pgt_id, s.gated_since
        FROM _sluice.node_state AS s
        JOIN _sluice.node AS n ON n.pgt_id = s.pgt_id
        WHERE s.gated_since IS NOT NULL AND _sluice.group_out_of_step(s.pgt_id) IS NULL
        -- Not one that somebody has in a transaction that is open, as in due_nodes().
        FOR NO KEY UPDATE SKIP LOCKED
    ), released AS (
        UPDATE _sluice.node_state AS s SET gated_since = NULL FROM free AS f WHERE s.pgt_id = f.pgt_id
    )
    UPDATE _sluice.node AS n SET retry_at = clock_timestamp(), retry_of = f.gated_since
    FROM free AS f
    WHERE n.pgt_id = f.pgt_id;
END;
$$;
COMMENT ON FUNCTION _sluice.release_gated() IS
    'Makes gated nodes due whose sources have come into step; every tick calls it, and nodes that are not gated cost it nothing. One that somebody has locked in an open transaction is left to the next tick';

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
    PERFORM _sluice.wake();
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
    PERFORM _sluice.wake();
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

-- The doors to the Python package. Each takes arguments, makes one call and returns.
--
-- PL/Python can't tell an error of a statement as it is. What is executed before the package can return a
-- record of it is therefore in defaults of arguments, which are evaluated in the SQL that calls.

CREATE FUNCTION _sluice.package_directory()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('%s/pg_sluice/%s', c.setting, e.extversion)
    FROM pg_config AS c, pg_extension AS e
    WHERE c.name = 'SHAREDIR' AND e.extname = 'pg_sluice'
$$;
COMMENT ON FUNCTION _sluice.package_directory() IS
    'Where "make install" put the Python package of this version of the extension. Asked for at run time, so that it is right after pg_upgrade';

CREATE FUNCTION _sluice.add_package(_directory text)
RETURNS text
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
AS $$
import sys

if _directory not in sys.path:
    loaded = sys.modules.get("pg_sluice")
    if loaded is not None:
        plpy.error(
            "this session has loaded pg_sluice " + loaded.__version__ + ", which is not the installed version",
            sqlstate="55000",
            hint="Connect again.",
        )
    sys.path.insert(0, _directory)
return _directory
$$;
COMMENT ON FUNCTION _sluice.add_package(text) IS
    'Puts a package in front of sys.path; refuses a session that has loaded another version. Not for users: they would have code of their own run';

CREATE FUNCTION _sluice.load_package()
RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.add_package(_sluice.package_directory())
$$;
COMMENT ON FUNCTION _sluice.load_package() IS 'Adds the package of the installed version';

CREATE FUNCTION _sluice.session_settings()
RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    -- The server takes any bytes for a setting that comes with a connection or with the role. This raises
    -- 22021 for what is no text; PL/Python would not say what is wrong.
    SELECT pg_catalog.jsonb_object_agg(
        s, pg_catalog.convert_from(pg_catalog.convert_to(pg_catalog.current_setting(s), 'UTF8'), 'UTF8')
    )
    FROM pg_catalog.unnest(ARRAY[
        'search_path', 'DateStyle', 'IntervalStyle', 'standard_conforming_strings'
    ]) AS s
$$;
COMMENT ON FUNCTION _sluice.session_settings() IS
    'The settings that decide what the caller''s SQL text means, hence with none of them pinned';

CREATE FUNCTION _sluice.invoke(
    _function text, _arguments jsonb, _package text DEFAULT _sluice.load_package()
)
RETURNS jsonb
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
SET DateStyle = 'ISO, MDY'
SET IntervalStyle = 'postgres'
SET standard_conforming_strings = on
SET extra_float_digits = 1
SET quote_all_identifiers = off
AS $$
from pg_sluice.backend import entry

return entry.invoke(plpy, entry.CALLER, _function, _arguments)
$$;
COMMENT ON FUNCTION _sluice.invoke(text, jsonb, text) IS
    'Runs a function of the package with the caller''s rights, under the settings that make what it stores mean the same everywhere; gives {"value": ...} or {"error": ...} for _sluice.unwrap';

CREATE FUNCTION _sluice.invoke_privileged(
    _function text, _arguments jsonb, _package text DEFAULT _sluice.load_package()
)
RETURNS jsonb
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
AS $$
from pg_sluice.backend import entry

return entry.invoke(plpy, entry.PRIVILEGED, _function, _arguments)
$$;
COMMENT ON FUNCTION _sluice.invoke_privileged(text, jsonb, text) IS
    'As _sluice.invoke, for what only the extension''s own SECURITY DEFINER functions may do: control connections and the graph';

CREATE PROCEDURE _sluice.serve(
    _seconds double precision, INOUT _result jsonb, _package text DEFAULT _sluice.load_package()
)
LANGUAGE plpython3u
AS $$
from pg_sluice.leader import endpoint

return [endpoint.serve(plpy, _seconds)]
$$;
COMMENT ON PROCEDURE _sluice.serve(double precision, jsonb, text) IS
    'The endpoint of the metrics, for that many seconds. It commits, so it has no pinned search_path, as _sluice.lead';

CREATE PROCEDURE _sluice.lead(
    _seconds double precision, INOUT _result jsonb, _package text DEFAULT _sluice.load_package()
)
LANGUAGE plpython3u
AS $$
from pg_sluice.leader import process

return [process.lead(plpy, _seconds)]
$$;
COMMENT ON PROCEDURE _sluice.lead(double precision, jsonb, text) IS
    'The leader process, for that many seconds; 0 makes one pass. It commits, so it has no pinned search_path: the package qualifies every name';

-- sql/lease.sql

-- Control database: who leads. One row; its epoch fences every function that changes dispatch state.
--
-- The gate is the lock of a view in the control database. Claims share it; drain, pause and takeover own
-- it. So a claim either commits before a drain request, which then sees the run, or comes after it and
-- sees the request. It is no advisory lock, which is for everybody to take who can connect.

-- A table would be locked by an ANALYZE or VACUUM that names none, until the end of its transaction.
CREATE VIEW _sluice_locks.gate AS SELECT true AS gate;
COMMENT ON VIEW _sluice_locks.gate IS 'Is there to be locked, see _sluice.enter_gate() and _sluice.close_gate()';

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
    -- In the way of nobody who reads it.
    LOCK TABLE _sluice_locks.gate IN EXCLUSIVE MODE
$$;
COMMENT ON FUNCTION _sluice.close_gate() IS
    'Until the end of the transaction no claim commits; waits for those that are under way';

CREATE FUNCTION _sluice.enter_gate(_epoch bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE _sluice_locks.gate IN ROW SHARE MODE;
    -- A statement of its own, whose snapshot is taken behind the gate.
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

CREATE FUNCTION _sluice.is_live(_lease _sluice.lease)
RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _lease.expires_at IS NOT NULL AND _lease.expires_at > clock_timestamp()
        AND _lease.renewed_at <= clock_timestamp() + (_lease.expires_at - _lease.renewed_at)
$$;
COMMENT ON FUNCTION _sluice.is_live(_sluice.lease) IS
    'Whether somebody holds the lease. One that was renewed later than now, by more than its time, was so by a clock that has been set back since: a holder that lives renews it at once, and nobody should wait for it until then';

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
    acquired := NOT _sluice.is_live(v_lease);
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

CREATE FUNCTION _sluice.leader_lives()
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.is_live(l) FROM _sluice.lease AS l
$$;
COMMENT ON FUNCTION _sluice.leader_lives() IS 'Whether somebody holds the lease';

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

-- sql/sessions.sql

-- Control database: sessions, who is there and how those end that are to. A process ID alone names none,
-- since another session can have it by now: it goes with backend_start.

CREATE VIEW _sluice.superuser_session AS
SELECT a.pid, a.backend_start, a.datid, a.application_name
FROM pg_stat_activity AS a
JOIN pg_roles AS r ON r.oid = a.usesysid
WHERE r.rolsuper;
COMMENT ON VIEW _sluice.superuser_session IS
    'Sessions whose application_name counts when it is one of ours: every role can read and copy it';

CREATE FUNCTION _sluice.backend_lives(_pid integer, _backend_start timestamptz)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = _pid AND a.backend_start = _backend_start);
END;
$$;
COMMENT ON FUNCTION _sluice.backend_lives(integer, timestamptz) IS
    'Whether a session is there, and not another one under its number; false for NULLs';

CREATE FUNCTION _sluice.interrupt_backend(_epoch bigint, _pid integer, _since timestamptz, _terminate boolean)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_backend_start timestamptz;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    -- The process ID may be another backend's by now.
    SELECT a.backend_start INTO v_backend_start
    FROM pg_stat_activity AS a
    WHERE a.pid = _pid AND _sluice.began_before(a.backend_start, _since);
    IF FOUND THEN
        PERFORM CASE WHEN _terminate THEN pg_terminate_backend(_pid) ELSE pg_cancel_backend(_pid) END;
    END IF;
    RETURN v_backend_start;
END;
$$;
COMMENT ON FUNCTION _sluice.interrupt_backend(bigint, integer, timestamptz, boolean) IS
    'Cancels what a session of the leader''s executes, or ends the session: a run that it began after _since is past its deadline. Gives the start of that backend, NULL when it is gone';

CREATE FUNCTION _sluice.report_stuck_backend(_epoch bigint, _pid integer, _backend_start timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_database text;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    SELECT _sluice.shown_name(a.datname) INTO v_database
    FROM pg_stat_activity AS a WHERE a.pid = _pid AND a.backend_start = _backend_start;
    IF FOUND THEN
        PERFORM _sluice.open_alert(
            'session_stuck', 'critical', NULL, v_database,
            format('process %s in database "%s" is past its deadline and does not react to its termination', _pid, v_database),
            jsonb_build_object('pid', _pid, 'backend_start', _backend_start)
        );
    END IF;
    RETURN v_database IS NOT NULL;
END;
$$;
COMMENT ON FUNCTION _sluice.report_stuck_backend(bigint, integer, timestamptz) IS
    'Whether a backend that was to end is still there, and then opens an alert: it runs code that never looks for interrupts. Its slot stays taken, and a drain waits for it, for it does run';

CREATE FUNCTION _sluice.close_stuck_backends()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.event = 'session_stuck' AND a.closed_at IS NULL AND NOT _sluice.backend_lives(
        (a.detail ->> 'pid')::integer, (a.detail ->> 'backend_start')::timestamptz
    );
END;
$$;
COMMENT ON FUNCTION _sluice.close_stuck_backends() IS 'Closes the alerts of report_stuck_backend whose backend has ended';

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
            starts_with(a.application_name, 'pg_sluice worker ') AND NOT EXISTS (
                SELECT FROM _sluice.slot AS s
                WHERE a.application_name = _sluice.worker_application_name(s.nonce)
            )
        ) OR substring(a.application_name FROM '^pg_sluice (?:scheduler|job|upkeep) ([0-9]+)$')::numeric < _epoch
    );
END;
$$;
COMMENT ON FUNCTION _sluice.evict_former_sessions(bigint) IS
    'Ends what sessions of former leaders are left: one that is frozen keeps its workers'' connections open';

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
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    VALUES
        ('max_workers', _sluice.setting('max_workers')::integer),
        ('max_parallel_workers', current_setting('max_parallel_workers')::integer),
        ('hard_maximum', 64),
        ('connections', greatest(0,
            current_setting('max_connections')::integer
            - current_setting('superuser_reserved_connections')::integer
            - COALESCE(current_setting('reserved_connections', true)::integer, 0)
            - _sluice.setting('connection_reserve')::integer
        ));
END;
$$;
COMMENT ON FUNCTION _sluice.limit_ingredients() IS
    'What bounds the number of workers; the least of them is the limit. The one definition, for quotas and for taking slots';

CREATE FUNCTION _sluice.worker_limit()
RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT min(i.value) FROM _sluice.limit_ingredients() AS i);
END;
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
    SELECT NOT _sluice.backend_lives(_slot.pid, _slot.backend_start) AND NOT EXISTS (
        SELECT FROM _sluice.superuser_session AS a
        WHERE a.application_name = _sluice.worker_application_name(_slot.nonce)
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
    IF NOT EXISTS (SELECT FROM _sluice.member AS m WHERE m.db_oid = _db_oid) THEN
        -- It has left, and the leader is about to notice.
        RETURN;
    END IF;
    -- One reservation after the other. By a row: see _sluice_locks for who can lock a table.
    PERFORM FROM _sluice.lease FOR NO KEY UPDATE;
    IF (SELECT count(*) FROM _sluice.slot) >= _sluice.worker_limit() THEN
        RETURN;
    END IF;
    INSERT INTO _sluice.slot AS s (slot, state, db_oid, epoch, deadline)
    SELECT min(n), 'reserved', _db_oid, _epoch,
        clock_timestamp() + _sluice.interval_setting('worker_start_timeout')
    FROM generate_series(1, 64) AS n
    WHERE NOT EXISTS (SELECT FROM _sluice.slot AS taken WHERE taken.slot = n)
    RETURNING s.slot, s.nonce, _sluice.worker_application_name(s.nonce) INTO slot, nonce, application_name;
END;
$$;
COMMENT ON FUNCTION _sluice.reserve_slot(bigint, oid) IS
    'free -> reserved, under the effective limit; NULLs when no slot is free, or the database is no member';

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

CREATE FUNCTION _sluice.reconcile_slots(_epoch bigint)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_freed integer;
    v_now CONSTANT timestamptz := clock_timestamp();
    v_latest CONSTANT timestamptz := _sluice.latest_past(v_now);
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    -- Where the clock has been set back since, a reservation has its time from now on.
    UPDATE _sluice.slot AS s SET since = v_now, deadline = v_now + (s.deadline - s.since)
    WHERE s.since > v_latest;
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

CREATE FUNCTION _sluice.worker_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'slot', n,
        'state', COALESCE(s.state, 'free'),
        'db_oid', s.db_oid::bigint,
        'database', _sluice.shown_name(d.datname),
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
    -- What a former leader's worker ran is another's.
    LEFT JOIN _sluice.queue AS q ON q.slot = n AND q.epoch = s.epoch AND q.state = 'running'
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

-- sql/queue.sql

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

CREATE VIEW _sluice.drain_in_force AS
SELECT d.db_oid, d.requested_by, d.requested_at, d.drained_at
FROM _sluice.drain AS d
WHERE d.stays
    OR d.drained_at IS NOT NULL
    OR EXISTS (
        SELECT FROM _sluice.drain_waiter AS w
        JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid AND a.backend_start = w.backend_start
        WHERE w.db_oid = d.db_oid
    );
COMMENT ON VIEW _sluice.drain_in_force IS
    'The requests without those whose callers all vanished before they were reached. Claims look at the table itself: it is cheaper, and such a request holds them back until the leader has taken it away';

CREATE FUNCTION _sluice.request_drain(
    _db_oid oid, _requested_by text, _pid integer, _backend_start timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    PERFORM _sluice.end_abandoned_drains();
    INSERT INTO _sluice.drain AS d (db_oid, requested_by)
    VALUES (_db_oid, _requested_by)
    -- Locked, so that no resume() takes it away before its waiter is there.
    ON CONFLICT (db_oid) DO UPDATE SET stays = d.stays;
    INSERT INTO _sluice.drain_waiter (db_oid, pid, backend_start)
    VALUES (_db_oid, _pid, _backend_start)
    ON CONFLICT DO NOTHING;
END;
$$;
COMMENT ON FUNCTION _sluice.request_drain(oid, text, integer, timestamptz) IS
    'Asks for a drain, or joins the one in force, for as long as that session waits. Once it has committed no claim of the scope follows';

CREATE FUNCTION _sluice.obstacles(_db_oid oid, _pgt_ids bigint[])
RETURNS TABLE (obstacle text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('run of "%s"', q.name)
    FROM _sluice.queue AS q
    WHERE q.state = 'running' AND _db_oid IN (0, q.db_oid) AND NOT _sluice.is_orphaned(q)
        AND (_pgt_ids IS NULL OR q.pgt_id = ANY (_pgt_ids))
    UNION ALL
    -- A manual refresh holds the node's lock and has no row in the queue; nor has, as far as this goes, a
    -- job whose leader is gone and that goes by another application_name.
    SELECT format('manual refresh by process %s', l.pid)
    FROM _sluice.node_lock AS l
    WHERE _db_oid IN (0, l.db_oid)
        AND (_pgt_ids IS NULL OR l.pgt_id = ANY (_pgt_ids))
        AND NOT EXISTS (
            SELECT FROM _sluice.queue AS q
            WHERE q.state = 'running' AND q.db_oid = l.db_oid AND q.pgt_id = l.pgt_id
                AND NOT _sluice.is_orphaned(q)
        )
$$;
COMMENT ON FUNCTION _sluice.obstacles(oid, bigint[]) IS
    'What still runs of these nodes (NULL: of all) in a database (0: on the server)';

CREATE FUNCTION _sluice.check_drain(_db_oid oid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- resume() and another drain can come while we look.
    v_asked CONSTANT timestamptz := (
        SELECT d.requested_at FROM _sluice.drain_in_force AS d WHERE d.db_oid = _db_oid
    );
BEGIN
    IF v_asked IS NULL THEN
        RETURN NULL;
    ELSIF EXISTS (SELECT FROM _sluice.obstacles(_db_oid, NULL)) THEN
        RETURN false;
    END IF;
    IF NOT pg_is_in_recovery() THEN
        UPDATE _sluice.drain AS d SET drained_at = clock_timestamp()
        WHERE d.db_oid = _db_oid AND d.requested_at = v_asked AND d.drained_at IS NULL;
    END IF;
    RETURN CASE WHEN EXISTS (
        SELECT FROM _sluice.drain AS d WHERE d.db_oid = _db_oid AND d.requested_at = v_asked
    ) THEN true END;
END;
$$;
COMMENT ON FUNCTION _sluice.check_drain(oid) IS
    'NULL: no request. false: something still runs. true: nothing runs and nothing will start; the request then outlives its requester';

CREATE FUNCTION _sluice.keep_drain(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.drain AS d SET stays = true WHERE d.db_oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.keep_drain(oid) IS
    'A call ends without its answer, at its timeout or as it does not wait: the request stays in force without it';

CREATE FUNCTION _sluice.end_abandoned_drains()
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ended bigint;
BEGIN
    DELETE FROM _sluice.drain AS d
    -- The row itself too: one that is reached or kept at this moment is looked at again.
    WHERE NOT d.stays AND d.drained_at IS NULL
        AND NOT EXISTS (SELECT FROM _sluice.drain_in_force AS f WHERE f.db_oid = d.db_oid);
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_abandoned_drains() IS
    'Ends requests that were not reached and that nobody waits for any more; gives how many';

CREATE FUNCTION _sluice.withdraw_drain(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- Calls that join or withdraw at the same time see each other.
    SELECT _sluice.close_gate();
    DELETE FROM _sluice.drain_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
    SELECT _sluice.wake() WHERE _sluice.end_abandoned_drains() > 0;
$$;
COMMENT ON FUNCTION _sluice.withdraw_drain(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: the request goes with the last call that waits for it';

CREATE FUNCTION _sluice.end_drain(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain AS d WHERE d.db_oid = _db_oid;
    SELECT _sluice.wake();
$$;
COMMENT ON FUNCTION _sluice.end_drain(oid) IS 'What resume() does; nothing when no drain is in force';

CREATE FUNCTION _sluice.is_draining(_db_oid oid)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM _sluice.drain_in_force AS d WHERE d.db_oid IN (0, _db_oid))
$$;
COMMENT ON FUNCTION _sluice.is_draining(oid) IS 'Whether a drain of the database or of the server is in force';

CREATE FUNCTION _sluice.drain_end(_db_oid oid)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(
        CASE d.db_oid WHEN 0 THEN 'sluice.resume(cluster => true)' ELSE 'sluice.resume()' END, ' and ' ORDER BY d.db_oid DESC
    )
    FROM _sluice.drain_in_force AS d
    WHERE d.db_oid IN (0, _db_oid)
$$;
COMMENT ON FUNCTION _sluice.drain_end(oid) IS
    'For a hint: the calls that end what drains of the database and of the server are in force; NULL when none is';

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
    FROM _sluice.drain_in_force AS d
    CROSS JOIN LATERAL (
        SELECT count(*) AS active, string_agg(x.obstacle, ', ' ORDER BY x.obstacle) AS waiting_for
        FROM _sluice.obstacles(d.db_oid, NULL) AS x
    ) AS o
    WHERE d.db_oid IN (0, _db_oid)
$$;
COMMENT ON FUNCTION _sluice.drain_rows(oid) IS 'The rows of sluice.drain_status() for a database';

-- sql/pause.sql

-- Control database: paused nodes. Requests come and go as those of a drain do, see drain.sql.

CREATE TABLE _sluice.pause (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Stays though nobody waits for it: it was asked for so, or a call has its answer.
    stays boolean NOT NULL DEFAULT false,
    CONSTRAINT pause_pkey PRIMARY KEY (db_oid, pgt_id)
);

CREATE TABLE _sluice.pause_waiter (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    pid integer NOT NULL,
    backend_start timestamptz NOT NULL,
    CONSTRAINT pause_waiter_pkey PRIMARY KEY (db_oid, pgt_id, pid, backend_start),
    CONSTRAINT pause_waiter_pause_fkey FOREIGN KEY (db_oid, pgt_id) REFERENCES _sluice.pause ON DELETE CASCADE
);
COMMENT ON TABLE _sluice.pause_waiter IS
    'The calls that wait for a node to end its run. A pause that was not reached goes with the last of them';

CREATE VIEW _sluice.pause_in_force AS
SELECT p.db_oid, p.pgt_id, p.name, p.requested_by, p.requested_at
FROM _sluice.pause AS p
WHERE p.stays
    OR EXISTS (
        SELECT FROM _sluice.pause_waiter AS w
        JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid AND a.backend_start = w.backend_start
        WHERE w.db_oid = p.db_oid AND w.pgt_id = p.pgt_id
    );
COMMENT ON VIEW _sluice.pause_in_force IS
    'The paused nodes without those whose callers all vanished before their answer; claims look at the table itself';

CREATE FUNCTION _sluice.end_abandoned_pauses()
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ended bigint;
BEGIN
    DELETE FROM _sluice.pause AS p
    -- The row itself too: one that is reached or kept at this moment is looked at again.
    WHERE NOT p.stays AND NOT EXISTS (
        SELECT FROM _sluice.pause_in_force AS f WHERE f.db_oid = p.db_oid AND f.pgt_id = p.pgt_id
    );
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_abandoned_pauses() IS
    'Ends pauses that were not reached and that nobody waits for any more; gives how many';

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
    PERFORM _sluice.end_abandoned_pauses();
    INSERT INTO _sluice.pause AS p (db_oid, pgt_id, name, requested_by)
    SELECT DISTINCT ON (n.pgt_id) _db_oid, n.pgt_id, n.name, _requested_by
    FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint, name text)
    -- Locked, so that no unpause() takes it away before its waiter is there.
    ON CONFLICT (db_oid, pgt_id) DO UPDATE SET stays = p.stays;
    IF (SELECT count(*) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid) > v_capacity THEN
        RAISE EXCEPTION USING
            ERRCODE = 'configuration_limit_exceeded',
            MESSAGE = 'too many paused nodes',
            DETAIL = format('A database can have %s paused nodes (max_pause_entries).', v_capacity),
            HINT = 'End some with sluice.unpause(), or use sluice.drain() to stop the whole database.';
    END IF;
    INSERT INTO _sluice.pause_waiter (db_oid, pgt_id, pid, backend_start)
    SELECT _db_oid, n.pgt_id, _pid, _backend_start
    FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint)
    ON CONFLICT DO NOTHING;
END;
$$;
COMMENT ON FUNCTION _sluice.request_pause(oid, jsonb, text, integer, timestamptz) IS
    'Pauses all of the nodes or none, or joins the pauses in force, for as long as that session waits. Once it has committed no claim of these nodes follows';

CREATE FUNCTION _sluice.keep_pause(_db_oid oid, _pgt_ids bigint[])
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.pause AS p SET stays = true WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids)
$$;
COMMENT ON FUNCTION _sluice.keep_pause(oid, bigint[]) IS
    'A call ends without its answer, at its timeout or as it does not wait: what it paused stays paused without it';

CREATE FUNCTION _sluice.check_pause(_db_oid oid, _pgt_ids bigint[])
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- unpause() and another pause can come while we look.
    v_latest CONSTANT timestamptz := (
        SELECT max(p.requested_at) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids)
    );
BEGIN
    IF EXISTS (SELECT FROM _sluice.obstacles(_db_oid, _pgt_ids)) THEN
        RETURN CASE WHEN _sluice.are_paused(_db_oid, _pgt_ids) THEN false END;
    END IF;
    UPDATE _sluice.pause AS p SET stays = true
    WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids) AND NOT p.stays AND p.requested_at <= v_latest;
    RETURN CASE WHEN _sluice.are_paused(_db_oid, _pgt_ids) AND NOT EXISTS (
        SELECT FROM _sluice.pause AS p
        WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids) AND p.requested_at > v_latest
    ) THEN true END;
END;
$$;
COMMENT ON FUNCTION _sluice.check_pause(oid, bigint[]) IS
    'NULL: not all of these nodes of the database are paused any more. false: one of them runs. true: none runs and none will start; the pauses then outlive their requester';

CREATE FUNCTION _sluice.are_paused(_db_oid oid, _pgt_ids bigint[])
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (
        SELECT FROM unnest(_pgt_ids) AS n
        WHERE NOT EXISTS (SELECT FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = n)
    )
$$;
COMMENT ON FUNCTION _sluice.are_paused(oid, bigint[]) IS 'Whether each of these nodes has an entry';

CREATE FUNCTION _sluice.withdraw_pause(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- Calls that join or withdraw at the same time see each other.
    SELECT _sluice.close_gate();
    DELETE FROM _sluice.pause_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
    SELECT _sluice.wake() WHERE _sluice.end_abandoned_pauses() > 0;
$$;
COMMENT ON FUNCTION _sluice.withdraw_pause(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: a pause goes with the last call that waits for it';

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
    PERFORM _sluice.wake();
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_pause(oid, bigint[]) IS 'Ends the pause of these nodes; gives how many were paused';

-- sql/endpoint.sql

-- Control database: the session that serves the metrics over HTTP. pg_cron starts it, as it starts the
-- leader, see _sluice.arrange_endpoint().

CREATE FUNCTION _sluice.endpoint_settings(
    OUT host text, OUT port integer, OUT address text, OUT timeout_seconds double precision, OUT version text
)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    SELECT a.host, a.port, e.value INTO host, port, address
    FROM _sluice.effective_setting AS e
    CROSS JOIN _sluice.parse_address(e.value) AS a
    WHERE e.name = 'metrics_listen' AND EXISTS (SELECT FROM _sluice.member);
    timeout_seconds := _sluice.setting('metrics_timeout');
    version := _sluice.extension_version();
END;
$$;
COMMENT ON FUNCTION _sluice.endpoint_settings() IS
    'Where the endpoint listens, how long a collection may take, and the version of the extension. No host: it is off, or there are no members';

CREATE FUNCTION _sluice.record_endpoint(_error text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF _error IS NULL THEN
        PERFORM _sluice.close_alerts('metrics_failed');
    ELSE
        PERFORM _sluice.open_alert('metrics_failed', 'warning', NULL, _sluice.here(), _error);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.record_endpoint(text) IS
    'Opens an alert about an endpoint that cannot listen; NULL closes it: the endpoint listens, or is off';

CREATE TABLE _sluice.endpoint (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT endpoint_pkey PRIMARY KEY
        CONSTRAINT endpoint_singleton_check CHECK (singleton),
    pid integer,
    backend_start timestamptz,
    CONSTRAINT endpoint_identity_check CHECK ((pid IS NULL) = (backend_start IS NULL))
);
COMMENT ON TABLE _sluice.endpoint IS
    'The session that serves. One row; a session that has ended without a word is left in it, and serves no more';
INSERT INTO _sluice.endpoint DEFAULT VALUES;

CREATE FUNCTION _sluice.begin_serving(_pid integer, _backend_start timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_endpoint _sluice.endpoint%ROWTYPE;
BEGIN
    PERFORM _sluice.commit_without_flush();
    SELECT * INTO STRICT v_endpoint FROM _sluice.endpoint FOR NO KEY UPDATE;
    -- What this transaction has seen of the sessions can be older than the one that serves.
    PERFORM pg_stat_clear_snapshot();
    IF _sluice.backend_lives(v_endpoint.pid, v_endpoint.backend_start)
        AND (v_endpoint.pid, v_endpoint.backend_start) IS DISTINCT FROM (_pid, _backend_start)
    THEN
        RETURN false;
    END IF;
    UPDATE _sluice.endpoint AS e SET pid = _pid, backend_start = _backend_start;
    RETURN true;
END;
$$;
COMMENT ON FUNCTION _sluice.begin_serving(integer, timestamptz) IS
    'From its commit on this session serves, and no other until it calls end_serving() or ends; false while another one does';

CREATE FUNCTION _sluice.end_serving(_pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.commit_without_flush();
    UPDATE _sluice.endpoint AS e SET pid = NULL, backend_start = NULL
    WHERE e.pid = _pid AND e.backend_start = _backend_start;
$$;
COMMENT ON FUNCTION _sluice.end_serving(integer, timestamptz) IS 'This session serves no more; nothing when another one does';

CREATE FUNCTION _sluice.endpoint_state()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'address', CASE WHEN s.host IS NOT NULL THEN s.address END,
        'lives', (SELECT _sluice.backend_lives(e.pid, e.backend_start) FROM _sluice.endpoint AS e),
        'entry', _sluice.entry_state('pg_sluice metrics'),
        'error', (SELECT a.message FROM _sluice.alert AS a WHERE a.event = 'metrics_failed' AND a.closed_at IS NULL)
    )
    FROM _sluice.endpoint_settings() AS s
$$;
COMMENT ON FUNCTION _sluice.endpoint_state() IS 'What health_check() says about the endpoint';

CREATE FUNCTION _sluice.endpoint_health(_state jsonb)
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'metrics',
        CASE WHEN s.address IS NULL OR (s.lives AND s.error IS NULL) THEN 'ok' ELSE 'warn' END,
        CASE
            WHEN s.address IS NULL THEN 'not served over HTTP'
            WHEN s.error IS NOT NULL THEN s.error
            WHEN s.lives THEN format('served on %s', s.address)
            ELSE format('not served on %s yet', s.address)
        END,
        CASE
            WHEN s.address IS NULL THEN NULL
            WHEN s.error IS NOT NULL THEN 'It is tried again within a minute; sluice.configure(''metrics_listen'', ..., cluster => true) sets another address.'
            WHEN NOT s.lives AND s.entry <> 'active' THEN format(
                'pg_cron does not start it, since its entry "pg_sluice metrics" is %s; sluice.start() makes it what it should be.', s.entry
            )
            WHEN NOT s.lives THEN 'pg_cron starts it within a minute; otherwise see cron.job_run_details.'
        END
    FROM jsonb_to_record(_state) AS s (address text, lives boolean, entry text, error text)
$$;
COMMENT ON FUNCTION _sluice.endpoint_health(jsonb) IS 'The row of health_check() about the endpoint, from _sluice.endpoint_state()';

CREATE PROCEDURE sluice.serve_metrics(run_for interval DEFAULT '1 hour')
LANGUAGE plpgsql
AS $$
DECLARE
    v_result jsonb;
BEGIN
    CALL _sluice.serve(pg_catalog.date_part('epoch', run_for), v_result);
    PERFORM _sluice.unwrap(v_result);
END;
$$;
COMMENT ON PROCEDURE sluice.serve_metrics(interval) IS
'The endpoint: serves /metrics and /healthz over HTTP for that long, on the address that metrics_listen names, then ends. pg_cron calls it in the control database; must not be called inside a transaction block. Ends at once while another session serves or metrics_listen is off. Where it could not listen, an error (55006, 42501 or 58030) and the alert metrics_failed. Only for superusers.';

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

CREATE VIEW _sluice.cron_entry (jobname, command) AS VALUES
    ('pg_sluice', 'CALL sluice.run()'),
    ('pg_sluice metrics', 'CALL sluice.serve_metrics()');
COMMENT ON VIEW _sluice.cron_entry IS 'Our entries in pg_cron: the leader''s and the endpoint''s';

CREATE FUNCTION _sluice.arrange_entry(_jobname text, _wanted boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_command CONSTANT text := (SELECT e.command FROM _sluice.cron_entry AS e WHERE e.jobname = _jobname);
BEGIN
    -- Where there is no pg_cron, or none any more, there is no entry. start() checks that there is.
    IF to_regclass('cron.job') IS NULL THEN
        RETURN;
    END IF;
    IF NOT _wanted THEN
        PERFORM cron.unschedule(j.jobid) FROM cron.job AS j WHERE j.jobname = _jobname AND j.command = v_command;
        RETURN;
    END IF;
    PERFORM cron.schedule(_jobname, '* * * * *', v_command)
    WHERE NOT EXISTS (SELECT FROM cron.job AS j WHERE j.jobname = _jobname AND j.command = v_command);
    -- It was made with what was so then: a standby or an upgraded server can have another socket or port.
    -- And pg_cron leaves one that somebody has deactivated as it is.
    UPDATE cron.job AS j
    SET nodename = current_setting('cron.host', true), nodeport = current_setting('port')::integer,
        database = current_database(), active = true
    WHERE j.jobname = _jobname
        AND j.command = v_command
        AND (j.nodename, j.nodeport, j.database, j.active) IS DISTINCT FROM (
            current_setting('cron.host', true), current_setting('port')::integer, current_database()::text, true
        );
END;
$$;
COMMENT ON FUNCTION _sluice.arrange_entry(text, boolean) IS
    'Makes a pg_cron entry what it should be: there, active, and leading to this server and database, or not there. Idempotent';

CREATE FUNCTION _sluice.entry_state(_jobname text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_active boolean;
BEGIN
    IF to_regclass('cron.job') IS NOT NULL THEN
        SELECT bool_or(j.active) INTO v_active
        FROM _sluice.cron_entry AS e
        JOIN cron.job AS j ON j.jobname = e.jobname AND j.command = e.command
        WHERE e.jobname = _jobname;
    END IF;
    RETURN CASE WHEN v_active THEN 'active' WHEN NOT v_active THEN 'inactive' ELSE 'missing' END;
END;
$$;
COMMENT ON FUNCTION _sluice.entry_state(text) IS 'Of a pg_cron entry of ours: active, inactive or missing';

CREATE FUNCTION _sluice.arrange_leader()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.arrange_entry('pg_sluice', EXISTS (SELECT FROM _sluice.member))
$$;
COMMENT ON FUNCTION _sluice.arrange_leader() IS 'The pg_cron entry of the leader, while there are members';

CREATE FUNCTION _sluice.leader_entry()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.entry_state('pg_sluice') WHERE EXISTS (SELECT FROM _sluice.member)
$$;
COMMENT ON FUNCTION _sluice.leader_entry() IS 'The state of the leader''s pg_cron entry; NULL while there are no members, who need one';

CREATE FUNCTION _sluice.arrange_endpoint()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_wanted CONSTANT boolean := (SELECT s.host IS NOT NULL FROM _sluice.endpoint_settings() AS s);
BEGIN
    IF NOT v_wanted THEN
        PERFORM _sluice.record_endpoint(NULL);
    END IF;
    PERFORM _sluice.arrange_entry('pg_sluice metrics', v_wanted);
END;
$$;
COMMENT ON FUNCTION _sluice.arrange_endpoint() IS
    'The pg_cron entry of the endpoint, while metrics_listen is set and there are members; closes its alert when there is to be none';

CREATE FUNCTION _sluice.join_database(_db_oid oid, _joined_by text, _version text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_own_version CONSTANT text := _sluice.extension_version();
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
    PERFORM _sluice.arrange_leader();
    PERFORM _sluice.arrange_endpoint();
    PERFORM _sluice.wake();
END;
$$;
COMMENT ON FUNCTION _sluice.join_database(oid, text, text) IS
    'Makes a database a member and sees to the pg_cron entries. Idempotent';

CREATE FUNCTION _sluice.leave_database(_db_oid oid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    DELETE FROM _sluice.member AS m WHERE m.db_oid = _db_oid;
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL AND a.pgt_id IS NULL AND a.node = _sluice.database_name(_db_oid);
    DELETE FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued';
    IF NOT EXISTS (SELECT FROM _sluice.member) THEN
        PERFORM _sluice.arrange_leader();
        PERFORM _sluice.arrange_endpoint();
    END IF;
    PERFORM _sluice.wake();
END;
$$;
COMMENT ON FUNCTION _sluice.leave_database(oid) IS
    'Ends the membership and forgets what was queued; the last one to leave takes the pg_cron entries along. Runs in progress end as usual';

CREATE FUNCTION _sluice.members(_epoch bigint)
RETURNS TABLE (db_oid oid, database text, dbname bytea)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_found boolean;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    PERFORM _sluice.end_abandoned_drains();
    PERFORM _sluice.end_abandoned_pauses();
    PERFORM _sluice.close_stuck_backends();
    -- A dropped database leaves nothing behind.
    DELETE FROM _sluice.member AS m WHERE NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = m.db_oid);
    v_found := FOUND;
    DELETE FROM _sluice.drain AS r WHERE r.db_oid <> 0
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = r.db_oid);
    IF FOUND OR v_found THEN
        -- What can be many rows goes in small steps, and soon.
        UPDATE _sluice.upkeep AS u SET due_at = clock_timestamp() WHERE u.task = 'vanished_databases';
    END IF;
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
        AND a.pgt_id IS NULL
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE _sluice.shown_name(d.datname) = a.node);
    -- Before version 1.6.3 pg_cron ignores who waits for it while a job runs, as this leader always does.
    -- DROP DATABASE waits for every process. A look at its jobs, which this makes it take, lets that go on.
    IF EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.wait_event = 'ProcSignalBarrier') THEN
        UPDATE cron.job AS j SET active = j.active WHERE false;
    END IF;
    RETURN QUERY
    SELECT m.db_oid, _sluice.shown_name(d.datname), _sluice.raw_name(d.datname)
    FROM _sluice.member AS m
    JOIN pg_database AS d ON d.oid = m.db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.members(bigint) IS
    'The databases to schedule, under their present names, as they are shown and as the server knows them; clears away what dropped databases left';

CREATE FUNCTION _sluice.close_database_alerts(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.close_alert(e.event, NULL, _sluice.database_name(_db_oid))
    FROM unnest(ARRAY['database_failed', 'database_version_mismatch']) AS e (event)
$$;
COMMENT ON FUNCTION _sluice.close_database_alerts(oid) IS 'The database is scheduled again';

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

CREATE FUNCTION _sluice.record_failed_tick(_epoch bigint, _db_oid oid, _state text, _error text, _detail jsonb)
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
        format('database "%s" is not scheduled: %s', _sluice.database_name(_db_oid), _error),
        _detail
    );
END;
$$;
COMMENT ON FUNCTION _sluice.record_failed_tick(bigint, oid, text, text, jsonb) IS
    'Health of a database that could not be scheduled; opens an alert in the control database';

CREATE FUNCTION _sluice.database_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'db_oid', m.db_oid::bigint,
        'database', _sluice.shown_name(d.datname),
        'state', m.state,
        'last_tick_at', m.last_tick_at,
        'last_tick_ms', m.last_tick_ms,
        'queued', c.queued,
        'running', c.running,
        'drain', CASE
            WHEN NOT _sluice.is_draining(m.db_oid) THEN NULL
            WHEN NOT EXISTS (SELECT FROM _sluice.obstacles(m.db_oid, NULL)) THEN 'drained'
            ELSE 'draining'
        END,
        'error', COALESCE(m.error, m.spawn_error),
        'failures', m.failures,
        'oldest_queued_at', (
            SELECT min(q.enqueued_at) FROM _sluice.queue AS q WHERE q.db_oid = m.db_oid AND q.state = 'queued'
        ),
        'workers', c.held,
        'paused', (SELECT count(*) FROM _sluice.pause_in_force AS p WHERE p.db_oid = m.db_oid),
        'joined_by', m.joined_by,
        'joined_at', m.joined_at
    ) ORDER BY d.datname), '[]')
    FROM _sluice.member AS m
    JOIN _sluice.queued_by_database() AS c ON c.db_oid = m.db_oid
    LEFT JOIN pg_database AS d ON d.oid = m.db_oid
$$;
COMMENT ON FUNCTION _sluice.database_rows() IS 'The rows of sluice.databases()';

-- sql/upkeep.sql

-- Upkeep: what is past its time goes, in small steps, on a session of its own.
--
-- A task is a row of _sluice.upkeep and a function _sluice.purge_<task>(place, rows, until). A call goes on
-- from its place, deletes at most that many rows and stops at that time. It gives how many it deleted,
-- its new place, and whether it has been through all there is: the pass is over then, and the next one
-- comes after a rest. The tasks take turns, a step each.

CREATE TABLE _sluice.upkeep (
    task text CONSTRAINT upkeep_pkey PRIMARY KEY,
    -- Done in the control database alone.
    in_control boolean NOT NULL,
    -- When it is its turn: at once while a pass is under way, after a rest when one is over.
    due_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- What the task has to remember of the step before, of which it is the only reader.
    place jsonb,
    pass_ms double precision NOT NULL DEFAULT 0,
    deleted bigint NOT NULL DEFAULT 0,
    last_at timestamptz,
    error text
) WITH (fillfactor = 50);
COMMENT ON TABLE _sluice.upkeep IS
    'The tasks of upkeep and how far they are: rows deleted in all, when the last step was, and why it failed if it did';
INSERT INTO _sluice.upkeep (task, in_control) VALUES
    ('history_age', false),
    ('history_rows', false),
    ('alerts', false),
    ('vanished_databases', true),
    ('pg_cron_runs', true);

CREATE VIEW _sluice.due_upkeep AS
SELECT u.*
FROM _sluice.upkeep AS u
WHERE (NOT u.in_control OR _sluice.here() = _sluice.control_database())
    AND (
        u.due_at <= clock_timestamp()
        -- Its last step lies in the future: the clock has been set back since.
        OR COALESCE(u.last_at, u.due_at) > (SELECT _sluice.latest_past(clock_timestamp()))
    );
COMMENT ON VIEW _sluice.due_upkeep IS 'The tasks whose turn it is in this database';

CREATE FUNCTION _sluice.upkeep_is_due()
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM _sluice.due_upkeep);
END;
$$;
COMMENT ON FUNCTION _sluice.upkeep_is_due() IS 'Whether it is some task''s turn in this database';

CREATE FUNCTION _sluice.upkeep(OUT is_due boolean, OUT deleted bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- Whatever statistics say, a step reads what it deletes and no more. What is off costs so much to the
-- planner that it would compile every plan.
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
DECLARE
    -- After a pass that took several steps, and after another one: the tasks then meet at one time in
    -- the minute, which is not when everybody's cron jobs begin.
    v_rest CONSTANT interval := interval '10 s';
    v_long_rest CONSTANT interval := interval '1 min';
    v_meeting CONSTANT timestamptz := timestamptz '2000-01-01 00:00:37+00';
    -- No task takes more than a fiftieth of the time by looking for nothing.
    v_rest_per_pass CONSTANT integer := 50;
    v_longest_rest CONSTANT interval := interval '1 h';
    v_before_retry CONSTANT interval := interval '1 min';
    v_started CONSTANT timestamptz := clock_timestamp();
    v_task _sluice.upkeep%ROWTYPE;
    v_is_over boolean := true;
    v_is_locked boolean := false;
    v_error text;
    v_ms double precision;
BEGIN
    is_due := false;
    deleted := 0;
    SELECT u.* INTO v_task
    FROM _sluice.due_upkeep AS u
    ORDER BY u.due_at, u.task
    LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    BEGIN
        EXECUTE format('SELECT p.place, p.deleted, p.is_over FROM _sluice.%I($1, $2, $3) AS p', 'purge_' || v_task.task)
        INTO STRICT v_task.place, deleted, v_is_over
        USING v_task.place, _sluice.setting('maintenance_batch')::integer,
            v_started + _sluice.interval_setting('maintenance_budget');
    EXCEPTION
        -- Somebody has the table to himself, as VACUUM FULL does: that is no failure.
        WHEN lock_not_available THEN
            v_is_locked := true;
            v_is_over := false;
            deleted := 0;
        -- One task must not stop the others.
        WHEN OTHERS THEN
            v_error := format('%s (%s)', SQLERRM, SQLSTATE);
            v_task.place := NULL;
            deleted := 0;
    END;
    v_ms := 1000 * extract(epoch FROM clock_timestamp() - v_started);
    v_task.pass_ms := v_task.pass_ms + v_ms;
    UPDATE _sluice.upkeep AS u
    SET place = v_task.place,
        pass_ms = CASE WHEN v_is_over THEN 0 ELSE v_task.pass_ms END,
        due_at = CASE
            WHEN v_error IS NOT NULL OR v_is_locked THEN clock_timestamp() + v_before_retry
            WHEN NOT v_is_over THEN clock_timestamp()
            WHEN v_task.pass_ms > v_ms THEN clock_timestamp() + least(
                v_longest_rest, greatest(v_rest, make_interval(secs => v_rest_per_pass * v_task.pass_ms / 1000))
            )
            ELSE date_bin(v_long_rest, clock_timestamp() + v_long_rest, v_meeting)
        END,
        deleted = u.deleted + upkeep.deleted,
        last_at = clock_timestamp(),
        error = v_error
    WHERE u.task = v_task.task;
    IF v_error IS NOT NULL THEN
        PERFORM _sluice.open_alert(
            'upkeep_failed', 'warning', NULL, _sluice.here(),
            format('upkeep of database "%s" failed: %s', _sluice.here(), v_error),
            jsonb_build_object('task', v_task.task)
        );
    ELSIF v_task.error IS NOT NULL AND NOT EXISTS (SELECT FROM _sluice.upkeep AS u WHERE u.error IS NOT NULL) THEN
        PERFORM _sluice.close_alerts('upkeep_failed');
    END IF;
    is_due := _sluice.upkeep_is_due();
END;
$$;
COMMENT ON FUNCTION _sluice.upkeep(OUT boolean, OUT bigint) IS
    'One step of the task whose turn it is: deletes at most maintenance_batch rows and ends within about maintenance_budget. Waits for nobody who holds a row, and for a table no longer than lock_timeout, after which it comes again in a minute. A task that fails is told once, tried again after a minute, and keeps no other from its turn. Gives the rows that it deleted, and whether it is some task''s turn now';

CREATE VIEW _sluice.history_need AS
SELECT h.ctid AS tid, h.pgt_id, h.started_at, h.ended_at,
    n.pgt_id IS NOT NULL AND (
        -- The last run may still be in the queue, and is settled from its row by the next leader.
        h.reason IS DISTINCT FROM 'manual' AND NOT EXISTS (
            SELECT FROM _sluice.history AS newer
            WHERE newer.pgt_id = h.pgt_id AND newer.started_at > h.started_at
                AND newer.reason IS DISTINCT FROM 'manual'
        )
        -- A fire that is in the queue or may be queued again is skipped since its row is there.
        OR COALESCE(
            h.kind = 'job' AND h.outcome IN ('succeeded', 'no_change')
                AND h.due_at >= LEAST(n.fired_at, n.next_fire_at, n.retry_of),
            false
        )
    ) AS needed
FROM _sluice.history AS h
LEFT JOIN _sluice.node AS n ON n.pgt_id = h.pgt_id;
COMMENT ON VIEW _sluice.history_need IS
    'Which rows of history must stay, however old: without them a fire could run twice, or a run that committed count as crashed';

CREATE FUNCTION _sluice.dead_history_rows()
RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_stat_get_dead_tuples('_sluice.history'::regclass)
$$;
COMMENT ON FUNCTION _sluice.dead_history_rows() IS
    'Deleted rows of history that vacuum has not removed yet, about: who reads an index from its start reads them too';

CREATE FUNCTION _sluice.history_start(_place jsonb)
RETURNS timestamptz
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(
        (_place ->> 'ended_at')::timestamptz,
        -- What an earlier pass had to leave waits until vacuum has been there.
        CASE WHEN _sluice.dead_history_rows() > 50000 THEN (_place ->> 'passed')::timestamptz END,
        '-infinity'
    )
$$;
COMMENT ON FUNCTION _sluice.history_start(jsonb) IS 'Where the task history_age goes on from its place';

CREATE FUNCTION _sluice.purge_history_age(
    _place jsonb, _rows integer, _until timestamptz, OUT place jsonb, OUT deleted bigint, OUT is_over boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_before CONSTANT timestamptz := clock_timestamp() - _sluice.interval_setting('history_retention');
    v_from timestamptz := _sluice.history_start(_place);
    v_limit integer;
    v_seen integer;
    v_last timestamptz;
    v_deleted bigint;
BEGIN
    deleted := 0;
    is_over := false;
    LOOP
        v_limit := least(100, _rows - deleted);
        WITH seen AS MATERIALIZED (
            SELECT h.tid, h.ended_at, h.needed
            FROM _sluice.history_need AS h
            WHERE h.ended_at >= v_from AND h.ended_at < v_before
            ORDER BY h.ended_at
            LIMIT v_limit
        ), free AS MATERIALIZED (
            SELECT h.ctid AS tid
            FROM _sluice.history AS h
            WHERE h.ctid = ANY (ARRAY(SELECT s.tid FROM seen AS s WHERE NOT s.needed))
            FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM _sluice.history AS h USING free AS f WHERE h.ctid = f.tid RETURNING 1
        )
        SELECT count(*), max(s.ended_at), (SELECT count(*) FROM gone)
        INTO v_seen, v_last, v_deleted
        FROM seen AS s;
        deleted := deleted + v_deleted;
        IF v_seen < v_limit THEN
            is_over := true;
            place := jsonb_build_object('passed', v_before);
            RETURN;
        END IF;
        -- What stays and ended in one microsecond must not keep the pass there.
        v_from := CASE WHEN v_last > v_from OR v_deleted > 0 THEN v_last ELSE v_from + interval '1 us' END;
        EXIT WHEN deleted >= _rows OR clock_timestamp() >= _until;
    END LOOP;
    place := jsonb_build_object('ended_at', v_from);
END;
$$;
COMMENT ON FUNCTION _sluice.purge_history_age(jsonb, integer, timestamptz, OUT jsonb, OUT bigint, OUT boolean) IS
    'History past history_retention, the oldest first. The place is where the index was left, so that a pass never reads again what it has deleted; nor does the next one while there is much of that';

CREATE FUNCTION _sluice.purge_history_rows(
    _place jsonb, _rows integer, _until timestamptz, OUT place jsonb, OUT deleted bigint, OUT is_over boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_most CONSTANT integer := _sluice.setting('history_rows');
    -- What is older is the other task's.
    v_since CONSTANT timestamptz := clock_timestamp() - _sluice.interval_setting('history_retention');
    v_pgt_id bigint := COALESCE((_place ->> 'pgt_id')::bigint, 9223372036854775807);
    v_before timestamptz := (_place ->> 'started_at')::timestamptz;
    v_kept integer := (_place ->> 'kept')::integer;
    v_limit integer;
    v_seen integer;
    v_last timestamptz;
    v_deleted bigint;
BEGIN
    deleted := 0;
    is_over := v_most = 0;
    IF is_over THEN
        RETURN;
    END IF;
    LOOP
        IF v_before IS NULL THEN
            -- From the end of the index, where each node's newest rows are.
            SELECT h.pgt_id INTO v_pgt_id
            FROM _sluice.history AS h
            WHERE h.pgt_id < v_pgt_id
            ORDER BY h.pgt_id DESC, h.started_at DESC
            LIMIT 1;
            IF NOT FOUND THEN
                is_over := true;
                RETURN;
            END IF;
            v_before := 'infinity';
            v_kept := 0;
        END IF;
        IF v_kept < v_most THEN
            v_limit := least(1000, v_most - v_kept);
            SELECT count(*), min(s.started_at) INTO v_seen, v_last
            FROM (
                SELECT h.started_at FROM _sluice.history AS h
                WHERE h.pgt_id = v_pgt_id AND h.started_at < v_before AND h.started_at >= v_since
                ORDER BY h.started_at DESC
                LIMIT v_limit
            ) AS s;
            v_kept := v_kept + v_seen;
        ELSE
            v_limit := least(100, _rows - deleted);
            WITH seen AS MATERIALIZED (
                SELECT h.tid, h.started_at, h.needed
                FROM _sluice.history_need AS h
                WHERE h.pgt_id = v_pgt_id AND h.started_at < v_before AND h.started_at >= v_since
                ORDER BY h.started_at DESC
                LIMIT v_limit
            ), free AS MATERIALIZED (
                SELECT h.ctid AS tid
                FROM _sluice.history AS h
                WHERE h.ctid = ANY (ARRAY(SELECT s.tid FROM seen AS s WHERE NOT s.needed))
                FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM _sluice.history AS h USING free AS f WHERE h.ctid = f.tid RETURNING 1
            )
            SELECT count(*), min(s.started_at), (SELECT count(*) FROM gone)
            INTO v_seen, v_last, v_deleted
            FROM seen AS s;
            deleted := deleted + v_deleted;
        END IF;
        v_before := CASE WHEN v_seen = v_limit THEN v_last END;
        EXIT WHEN deleted >= _rows OR clock_timestamp() >= _until;
    END LOOP;
    place := jsonb_build_object('pgt_id', v_pgt_id, 'started_at', v_before, 'kept', v_kept);
END;
$$;
COMMENT ON FUNCTION _sluice.purge_history_rows(jsonb, integer, timestamptz, OUT jsonb, OUT bigint, OUT boolean) IS
    'History beyond the newest history_rows rows of each node, one node after the other. The place is where in a node''s rows, counted from the newest, the walk is';

CREATE FUNCTION _sluice.purge_alerts(
    _place jsonb, _rows integer, _until timestamptz, OUT place jsonb, OUT deleted bigint, OUT is_over boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_before CONSTANT timestamptz := clock_timestamp() - _sluice.interval_setting('history_retention');
    v_limit integer;
    v_deleted bigint;
BEGIN
    -- Nothing is left behind, so there is no place.
    place := _place;
    deleted := 0;
    LOOP
        v_limit := least(100, _rows - deleted);
        DELETE FROM _sluice.alert AS a
        WHERE a.ctid = ANY (ARRAY(
            SELECT old.ctid FROM _sluice.alert AS old
            WHERE old.closed_at < v_before AND old.last_emitted_at >= old.closed_at
            ORDER BY old.closed_at
            LIMIT v_limit
            FOR UPDATE SKIP LOCKED
        ));
        GET DIAGNOSTICS v_deleted = ROW_COUNT;
        deleted := deleted + v_deleted;
        is_over := v_deleted < v_limit;
        EXIT WHEN is_over OR deleted >= _rows OR clock_timestamp() >= _until;
    END LOOP;
END;
$$;
COMMENT ON FUNCTION _sluice.purge_alerts(jsonb, integer, timestamptz, OUT jsonb, OUT bigint, OUT boolean) IS
    'Alerts that were closed history_retention ago, once that is announced';

CREATE FUNCTION _sluice.purge_vanished_databases(
    _place jsonb, _rows integer, _until timestamptz, OUT place jsonb, OUT deleted bigint, OUT is_over boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Databases up to here are seen to.
    v_queue oid := COALESCE((_place ->> 'queue')::oid, 0);
    v_pause oid := COALESCE((_place ->> 'pause')::oid, 0);
    v_db_oid oid;
    v_limit integer;
    v_deleted bigint;
BEGIN
    deleted := 0;
    LOOP
        v_limit := least(100, _rows - deleted);
        v_deleted := 0;
        SELECT q.db_oid INTO v_db_oid FROM _sluice.queue AS q
        WHERE q.state = 'queued' AND q.db_oid > v_queue
        ORDER BY q.db_oid
        LIMIT 1;
        IF FOUND THEN
            IF NOT EXISTS (SELECT FROM _sluice.member AS m WHERE m.db_oid = v_db_oid) THEN
                DELETE FROM _sluice.queue AS d
                WHERE d.ctid = ANY (ARRAY(
                    SELECT q.ctid FROM _sluice.queue AS q
                    WHERE q.db_oid = v_db_oid AND q.state = 'queued'
                    LIMIT v_limit
                    FOR UPDATE SKIP LOCKED
                ));
                GET DIAGNOSTICS v_deleted = ROW_COUNT;
            END IF;
            IF v_deleted < v_limit THEN
                v_queue := v_db_oid;
            END IF;
        ELSE
            SELECT p.db_oid INTO v_db_oid FROM _sluice.pause AS p
            WHERE p.db_oid > v_pause
            ORDER BY p.db_oid
            LIMIT 1;
            is_over := NOT FOUND;
            EXIT WHEN is_over;
            IF NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = v_db_oid) THEN
                DELETE FROM _sluice.pause AS d
                WHERE d.ctid = ANY (ARRAY(
                    SELECT p.ctid FROM _sluice.pause AS p
                    WHERE p.db_oid = v_db_oid
                    LIMIT v_limit
                    FOR UPDATE SKIP LOCKED
                ));
                GET DIAGNOSTICS v_deleted = ROW_COUNT;
            END IF;
            IF v_deleted < v_limit THEN
                v_pause := v_db_oid;
            END IF;
        END IF;
        deleted := deleted + v_deleted;
        is_over := false;
        EXIT WHEN deleted >= _rows OR clock_timestamp() >= _until;
    END LOOP;
    place := CASE WHEN NOT is_over THEN jsonb_build_object('queue', v_queue::bigint, 'pause', v_pause::bigint) END;
END;
$$;
COMMENT ON FUNCTION _sluice.purge_vanished_databases(jsonb, integer, timestamptz, OUT jsonb, OUT bigint, OUT boolean) IS
    'In the control database, what can be many rows: queued runs of databases that are no members, and pauses of dropped ones. The few others _sluice.members() takes';

CREATE FUNCTION _sluice.purge_pg_cron_runs(
    _place jsonb, _rows integer, _until timestamptz, OUT place jsonb, OUT deleted bigint, OUT is_over boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_most CONSTANT integer := 100;
    v_before bigint := COALESCE((_place ->> 'before')::bigint, 9223372036854775807);
    v_kept integer := COALESCE((_place ->> 'kept')::integer, 0);
    -- The oldest that this pass keeps; what is below the one of the pass before is gone already.
    v_oldest bigint := (_place ->> 'oldest')::bigint;
    v_floor CONSTANT bigint := COALESCE((_place ->> 'floor')::bigint, 0);
    v_limit integer;
    v_seen integer;
    v_deleted bigint;
BEGIN
    deleted := 0;
    LOOP
        v_limit := least(100, _rows - deleted);
        WITH seen AS MATERIALIZED (
            SELECT r.runid, o.ours, r.status IN ('succeeded', 'failed') AS has_ended,
                v_kept + count(*) FILTER (WHERE o.ours) OVER (ORDER BY r.runid DESC) AS position
            FROM (
                -- Every entry's: there is no index on whose they are.
                SELECT d.runid, d.jobid, d.command, d.status
                FROM cron.job_run_details AS d
                WHERE d.runid < v_before AND d.runid >= v_floor
                ORDER BY d.runid DESC
                LIMIT v_limit
            ) AS r
            CROSS JOIN LATERAL (
                -- Also what a former entry of ours has left: no other one has its number.
                SELECT r.command IN (SELECT e.command FROM _sluice.cron_entry AS e) AND NOT EXISTS (
                    SELECT FROM cron.job AS j
                    WHERE j.jobid = r.jobid AND NOT EXISTS (
                        SELECT FROM _sluice.cron_entry AS e WHERE e.jobname = j.jobname AND e.command = j.command
                    )
                ) AS ours
            ) AS o
        ), gone AS (
            DELETE FROM cron.job_run_details AS d
            WHERE d.runid = ANY (ARRAY(SELECT s.runid FROM seen AS s WHERE s.ours AND s.has_ended AND s.position > v_most))
            RETURNING 1
        )
        SELECT count(*), COALESCE(min(s.runid), v_before), v_kept + count(*) FILTER (WHERE s.ours),
            COALESCE(min(s.runid) FILTER (WHERE s.ours AND (s.position <= v_most OR NOT s.has_ended)), v_oldest),
            (SELECT count(*) FROM gone)
        INTO v_seen, v_before, v_kept, v_oldest, v_deleted
        FROM seen AS s;
        deleted := deleted + v_deleted;
        is_over := v_seen < v_limit;
        EXIT WHEN is_over OR deleted >= _rows OR clock_timestamp() >= _until;
    END LOOP;
    place := CASE
        WHEN is_over THEN jsonb_build_object('floor', v_oldest)
        ELSE jsonb_build_object('before', v_before, 'kept', v_kept, 'oldest', v_oldest, 'floor', v_floor)
    END;
END;
$$;
COMMENT ON FUNCTION _sluice.purge_pg_cron_runs(jsonb, integer, timestamptz, OUT jsonb, OUT bigint, OUT boolean) IS
    'In the control database, pg_cron''s record of the runs of our entries but for the last hundred; never one of a run in progress or of another entry';

CREATE FUNCTION _sluice.upkeep_backlog(OUT rows bigint, OUT is_exact boolean)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_counted CONSTANT integer := 10000;
    v_before CONSTANT timestamptz := clock_timestamp() - _sluice.interval_setting('history_retention');
    v_from CONSTANT timestamptz := (
        SELECT _sluice.history_start(u.place) FROM _sluice.upkeep AS u WHERE u.task = 'history_age'
    );
    v_plan json;
BEGIN
    SELECT count(*) INTO rows
    FROM (
        SELECT FROM _sluice.history_need AS n
        WHERE n.ended_at >= v_from AND n.ended_at < v_before AND NOT n.needed
        ORDER BY n.ended_at
        LIMIT v_counted + 1
    ) AS h;
    is_exact := rows <= v_counted;
    IF NOT is_exact THEN
        EXECUTE format(
            'EXPLAIN (FORMAT JSON) SELECT FROM _sluice.history AS h WHERE h.ended_at >= %L AND h.ended_at < %L', v_from, v_before
        ) INTO v_plan;
        rows := greatest(rows, (v_plan #>> '{0,Plan,Plan Rows}')::bigint);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.upkeep_backlog(OUT bigint, OUT boolean) IS
    'History that is past history_retention and not deleted yet: counted up to ten thousand rows, beyond that as the planner estimates it';

CREATE FUNCTION _sluice.upkeep_health(OUT "check" text, OUT status text, OUT detail text, OUT hint text)
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'upkeep', c.status,
        concat_ws('; ',
            CASE WHEN b.rows = 0 THEN 'nothing waits' ELSE format(
                '%s%s rows of history are past their retention', CASE WHEN NOT b.is_exact THEN 'about ' END, b.rows
            ) END,
            (
                SELECT format('%s rows deleted so far, the last step at %s', sum(u.deleted), max(u.last_at))
                FROM _sluice.upkeep AS u WHERE u.last_at IS NOT NULL
                HAVING count(*) > 0
            ),
            (
                SELECT string_agg(format('%s failed: %s', u.task, u.error), '; ' ORDER BY u.task)
                FROM _sluice.upkeep AS u WHERE u.error IS NOT NULL
            )
        ),
        CASE WHEN c.status <> 'ok' THEN c.hint END
    FROM _sluice.upkeep_backlog() AS b
    CROSS JOIN LATERAL (
        SELECT 'warn', 'What failed is tried again every minute.'
        WHERE EXISTS (SELECT FROM _sluice.upkeep AS u WHERE u.error IS NOT NULL)
        UNION ALL
        SELECT 'warn', 'No step was made for five minutes: see whether a leader schedules this database.'
        WHERE b.rows > 0 AND EXISTS (
            SELECT FROM _sluice.upkeep AS u
            WHERE u.task = 'history_age' AND u.due_at < clock_timestamp() - interval '5 min'
        )
        UNION ALL
        SELECT 'warn', 'They are being deleted. Raise maintenance_budget when they do not become fewer.'
        WHERE NOT b.is_exact
        UNION ALL
        SELECT 'ok', NULL
        LIMIT 1
    ) AS c (status, hint)
$$;
COMMENT ON FUNCTION _sluice.upkeep_health() IS
    'The row of sluice.health_check(): progress, tasks that fail, a backlog, and one that nobody works off';

-- sql/tick.sql

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

-- sql/stream_tables.sql

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
        kind, relid, schedule, anchor, "concurrently", priority, lock_timeout, refresh_timeout, max_lag
    )
    VALUES (
        'matview', v_relid, _arguments ->> 'schedule', clock_timestamp(),
        (_arguments ->> 'concurrently')::boolean, (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval,
        (_arguments ->> 'max_lag')::interval
    )
    ON CONFLICT (relid) DO UPDATE
    SET schedule = EXCLUDED.schedule, anchor = EXCLUDED.anchor, "concurrently" = EXCLUDED."concurrently",
        priority = EXCLUDED.priority, lock_timeout = EXCLUDED.lock_timeout,
        refresh_timeout = EXCLUDED.refresh_timeout, max_lag = EXCLUDED.max_lag,
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
    refresh_timeout interval DEFAULT NULL,
    max_lag interval DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('schedule_refresh', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', matview, 'schedule', schedule, 'concurrently', "concurrently", 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout, 'max_lag', max_lag
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.schedule_refresh(text, text, boolean, integer, interval, interval, interval) IS
'Refreshes an existing materialized view on a schedule; called again it changes the schedule. sluice.unschedule() ends it.
concurrently: without blocking readers, where the view has contents and a unique index over plain columns of all rows; plainly otherwise. max_lag: when health_check() calls it late, see there. Only for its owner. Returns its pgt_id.';

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
        PERFORM _sluice.unwrap(_sluice.invoke_privileged('check_login', jsonb_build_object(
            'role', _sluice.shown_name(_caller), 'user', encode(_sluice.raw_name(_caller), 'hex')
        )));
    END IF;
    INSERT INTO _sluice.node AS n (
        kind, job_name, job_owner, job_search_path, command, transactional, schedule, anchor,
        catch_up, priority, lock_timeout, refresh_timeout, watermark_group, max_lag
    )
    VALUES (
        'job', v_name, quote_ident(_caller)::regrole, _arguments #>> '{session,search_path}', _arguments ->> 'command',
        (_arguments ->> 'transactional')::boolean, _arguments ->> 'schedule', clock_timestamp(),
        (_arguments ->> 'catch_up')::integer, (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval,
        _arguments ->> 'watermark_group', (_arguments ->> 'max_lag')::interval
    )
    ON CONFLICT (job_name) DO UPDATE
    SET job_owner = EXCLUDED.job_owner, job_search_path = EXCLUDED.job_search_path,
        command = EXCLUDED.command, transactional = EXCLUDED.transactional,
        schedule = EXCLUDED.schedule, anchor = EXCLUDED.anchor, catch_up = EXCLUDED.catch_up,
        priority = EXCLUDED.priority, lock_timeout = EXCLUDED.lock_timeout,
        refresh_timeout = EXCLUDED.refresh_timeout, watermark_group = EXCLUDED.watermark_group,
        max_lag = EXCLUDED.max_lag,
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
    watermark_group text DEFAULT NULL,
    max_lag interval DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('schedule', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', job_name, 'schedule', schedule, 'command', command, 'transactional', transactional,
        'catch_up', catch_up, 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout,
        'watermark_group', watermark_group, 'max_lag', max_lag
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.schedule(text, text, text, boolean, integer, integer, interval, interval, text, interval) IS
'Runs SQL on a schedule, with the caller''s rights and search_path; called again it changes the job. Returns its pgt_id.
transactional: the command runs in one transaction with its history row, exactly once for each fire. false: at top level, for VACUUM, CALL with COMMIT and the like, at least once; for an owner who is no superuser the server must let the scheduler connect as that role. catch_up: how many missed fires run after downtime, the latest ones. priority: -100 to 100. lock_timeout, refresh_timeout: for this job instead of the settings. watermark_group: runs only while that group''s sources are in step. max_lag: when health_check() calls it late, see there.';

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

-- sql/scheduler.sql

-- Joining and leaving, the leader, and what they need.

CREATE FUNCTION _sluice.database_oid()
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());
END;
$$;
COMMENT ON FUNCTION _sluice.database_oid() IS 'The OID of this database, which keys all state in the control database';

CREATE FUNCTION _sluice.extension_version()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'pg_sluice'
$$;
COMMENT ON FUNCTION _sluice.extension_version() IS 'The version of the extension in this database';

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

CREATE FUNCTION _sluice.commit_without_flush()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT set_config('synchronous_commit', 'off', true)
$$;
COMMENT ON FUNCTION _sluice.commit_without_flush() IS
    'This transaction''s commit waits for no flush and no standby: a crash may undo it until something is flushed that is committed later';

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
'Everything that start() needs, one row each: pg_cron, its version and mode, the connections it and the scheduler make, settings that would end a long session; and whether pg_cron has an active entry for the leader, which start() sees to. Changes nothing.';

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
        UPDATE _sluice.upkeep AS u
        SET place = NULL, due_at = clock_timestamp(), deleted = 0, last_at = NULL, error = NULL;
        UPDATE _sluice.node_state AS s
        SET consecutive_errors = 0, work_mem = NULL, successes = 0, gated_since = NULL, last_run_at = NULL, last_outcome = NULL,
            runs = '{}', run_seconds = 0, rows_changed = 0;
        UPDATE _sluice.node AS n
        SET fired_at = NULL, retry_at = NULL, retry_of = NULL,
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
    SELECT _sluice.unwrap(_sluice.invoke_privileged('start', jsonb_build_object('user', _sluice.shown_name(session_user))))
$$;
COMMENT ON FUNCTION sluice.start() IS
'Makes this database a member, so that its nodes are scheduled, and sees to the pg_cron entry in the control database, and to that of the metrics where metrics_listen is set; it also activates them and brings them up to date with the server''s cron.host and port. Takes effect at once, whether or not the calling transaction commits. Idempotent. In a copy that was made from a template of a member it also makes the nodes its own, as part of the transaction: their errors, alerts and history are cleared and their grids begin anew. An error names the first failed check of preflight(), but for the one of the entry.';

CREATE FUNCTION sluice.stop()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.control('leave_database', jsonb_build_object('_db_oid', _sluice.database_oid()))
$$;
COMMENT ON FUNCTION sluice.stop() IS
'Ends the scheduling of this database at once: queued runs are forgotten, running ones end as usual, and the scheduler''s connections go within a tick. The last member to stop takes the pg_cron entries along. Idempotent.';

CREATE PROCEDURE sluice.run(run_for interval DEFAULT '1 hour')
LANGUAGE plpgsql
AS $$
DECLARE
    v_result jsonb;
BEGIN
    CALL _sluice.lead(pg_catalog.date_part('epoch', run_for), v_result);
    PERFORM _sluice.unwrap(v_result);
END;
$$;
COMMENT ON PROCEDURE sluice.run(interval) IS
'The leader: schedules all member databases for that long, then ends. Where a run takes longer it goes on scheduling until there is a moment without long runs, however late that is. ''0'' makes one pass over all members, runs what is due, and ends. pg_cron calls it in the control database; must not be called inside a transaction block. A second leader waits one lease (lease_ttl) for the first to lapse and ends if it does not. Only for superusers.';

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

-- sql/health.sql

-- How it all fares, in rows that a monitoring check can read.

CREATE FUNCTION _sluice.late_nodes()
RETURNS TABLE (pgt_id bigint, name text, lag interval, bound interval, is_given boolean)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT l.pgt_id, l.name, l.lag, l.bound, l.is_given
    FROM (
        SELECT n.pgt_id, _sluice.node_name(n) AS name,
            clock_timestamp() - COALESCE(s.last_success_at, n.created_at) AS lag,
            -- Where none is given: two fires missed, and a minute for the run.
            COALESCE(n.max_lag, 3 * n.fire_step + interval '1 min') AS bound,
            n.max_lag IS NOT NULL AS is_given
        FROM _sluice.node AS n
        LEFT JOIN _sluice.node_state AS s ON s.pgt_id = n.pgt_id
        WHERE n.max_lag IS NOT NULL OR n.status = 'active'
    ) AS l
    WHERE l.lag > l.bound
$$;
COMMENT ON FUNCTION _sluice.late_nodes() IS
    'Nodes whose last successful run began longer ago than their max_lag (is_given) or, without one, than their schedule lets expect';

CREATE FUNCTION _sluice.first_ten(_texts text[])
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_to_string(_texts[:10], ', ')
        || CASE WHEN cardinality(_texts) > 10 THEN format(', and %s more', cardinality(_texts) - 10) ELSE '' END
$$;
COMMENT ON FUNCTION _sluice.first_ten(text[]) IS 'As a list that stays readable: the first ten, and how many more there are; NULL for NULL';

CREATE FUNCTION _sluice.control_checks(_health jsonb)
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH control AS MATERIALIZED (
        SELECT r.*,
            r.oldest_queued_at < clock_timestamp() - interval '5 min' AND NOT r.drain AS queue_stands,
            r.queued >= r.max_queue_depth AS queue_is_full,
            -- A tick of the future was by a clock that has been set back since: it says nothing.
            r.last_tick_at > clock_timestamp() - r.tick_bound
                AND r.last_tick_at <= _sluice.latest_past(clock_timestamp()) AS ticks
        FROM jsonb_to_record(_health) AS r (
            leader_pid integer, leader_alive boolean, leader_entry text, member_state text, last_tick_at timestamptz, last_tick_ms numeric,
            failures integer, error text, spawn_error text, tick_bound interval, queued bigint, running bigint,
            oldest_queued_at timestamptz, max_queue_depth bigint, worker_limit integer, stuck text, drain boolean, drain_end text, unscheduled jsonb,
            members bigint, endpoint jsonb
        )
    )
    SELECT 'leader',
        CASE WHEN NOT c.leader_alive THEN 'critical' WHEN c.leader_entry <> 'active' THEN 'warn' ELSE 'ok' END,
        CASE
            WHEN NOT c.leader_alive THEN 'no leader holds the lease'
            ELSE format('process %s leads%s', c.leader_pid, CASE WHEN c.leader_entry <> 'active' THEN ', and none will follow it' END)
        END,
        CASE
            WHEN c.leader_entry <> 'active' THEN format('pg_cron starts none, since its entry "pg_sluice" is %s; sluice.start() makes it what it should be.', c.leader_entry)
            WHEN c.leader_alive THEN NULL
            WHEN c.leader_entry IS NULL THEN 'No database is scheduled; sluice.start() has pg_cron start one.'
            ELSE 'pg_cron starts one within a minute; otherwise see sluice.preflight() and cron.job_run_details.'
        END
    FROM control AS c
    UNION ALL
    SELECT 'members',
        CASE
            WHEN jsonb_path_exists(c.unscheduled, '$[*] ? (@.state != "joining")') THEN 'critical'
            WHEN c.unscheduled IS NOT NULL THEN 'warn'
            ELSE 'ok'
        END,
        COALESCE(
            (
                SELECT string_agg(format('"%s": %s', e ->> 'database', concat_ws(', ', e ->> 'state', e ->> 'error')), '; ')
                FROM jsonb_array_elements(c.unscheduled) AS e
            ),
            format('%s, all scheduled', c.members)
        ),
        CASE WHEN c.unscheduled IS NOT NULL THEN 'See sluice.databases(), and sluice.health_check() in each of them.' END
    FROM control AS c
    -- It is told for the whole server, in its control database.
    WHERE c.members IS NOT NULL
    UNION ALL
    SELECT 'database',
        CASE
            WHEN c.member_state IS NULL OR c.member_state = 'joining' THEN 'warn'
            WHEN c.member_state = 'scheduled' AND c.ticks AND c.spawn_error IS NULL THEN 'ok'
            ELSE 'critical'
        END,
        CASE
            WHEN c.member_state IS NULL THEN 'this database is not scheduled'
            ELSE format(
                '%s, last tick %s%s%s',
                c.member_state,
                COALESCE(c.last_tick_at::text || format(' in %s ms', round(c.last_tick_ms, 1)), 'never'),
                CASE WHEN c.failures > 1 THEN format(', %s failures in a row', c.failures) END,
                ': ' || COALESCE(c.error, c.spawn_error)
            )
        END,
        CASE
            WHEN c.member_state IS NULL THEN 'Call sluice.start().'
            WHEN c.member_state = 'joining' THEN 'The leader takes it up with its next look; otherwise see sluice.preflight().'
            WHEN c.member_state = 'version_mismatch' THEN 'Run ALTER EXTENSION pg_sluice UPDATE here and in the control database.'
            WHEN c.member_state = 'failed' THEN 'It is tried again every five seconds; the alert in the control database has the details, see sluice.alerts there.'
            WHEN NOT COALESCE(c.ticks, false) THEN 'Is there a leader? See sluice.databases() and sluice.preflight().'
            WHEN c.spawn_error IS NOT NULL THEN 'No worker can be started; see sluice.preflight() and sluice.effective_limit().'
        END
    FROM control AS c
    UNION ALL
    SELECT 'workers',
        CASE WHEN c.stuck IS NOT NULL THEN 'critical' WHEN c.worker_limit = 0 THEN 'warn' ELSE 'ok' END,
        CASE
            WHEN c.stuck IS NOT NULL THEN c.stuck
            WHEN c.worker_limit = 0 THEN 'serial mode: the leader runs nodes one after the other'
            ELSE format('up to %s', c.worker_limit)
        END,
        CASE
            WHEN c.stuck IS NOT NULL THEN 'Only the code that it executes can end it, or a restart of the server.'
            WHEN c.worker_limit = 0 THEN 'See sluice.effective_limit() for what binds.'
        END
    FROM control AS c
    UNION ALL
    SELECT 'queue',
        CASE WHEN c.queue_stands OR c.queue_is_full THEN 'warn' ELSE 'ok' END,
        format('%s queued, %s running%s', c.queued, c.running, ', the oldest queued since ' || c.oldest_queued_at),
        CASE
            WHEN c.queue_is_full THEN 'It is full (max_queue_depth), and what is due waits; see sluice.queue() and sluice.workers().'
            WHEN c.queue_stands THEN 'See sluice.queue() and sluice.workers().'
        END
    FROM control AS c
    UNION ALL
    SELECT 'drain',
        CASE WHEN c.drain THEN 'warn' ELSE 'ok' END,
        CASE WHEN c.drain THEN 'a drain is in force' ELSE 'none' END,
        CASE WHEN c.drain THEN format('See sluice.drain_status(); end it with %s.', c.drain_end) END
    FROM control AS c
    UNION ALL
    SELECT e."check", e.status, e.detail, e.hint FROM control AS c CROSS JOIN _sluice.endpoint_health(c.endpoint) AS e
$$;
COMMENT ON FUNCTION _sluice.control_checks(jsonb) IS 'The rows of health_check() that come of health_of()';

CREATE FUNCTION _sluice.member_checks(_is_held boolean, _paused bigint[])
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH stale AS MATERIALIZED (
        SELECT d AS pgt_id FROM _sluice.downstream(_paused) AS d WHERE d <> ALL (_paused)
    ), late AS MATERIALIZED (
        SELECT l.*
        FROM _sluice.late_nodes() AS l
        -- What is held back is late by somebody's will, which other rows tell; a given bound holds all the same.
        WHERE l.is_given
            OR NOT (_is_held OR l.pgt_id = ANY (_paused) OR l.pgt_id IN (SELECT s.pgt_id FROM stale AS s))
    ), oldest AS (
        SELECT o.holder, o.since
        FROM (
            SELECT format('process %s', a.pid) AS holder, a.xact_start AS since
            FROM pg_stat_activity AS a
            WHERE a.datid = _sluice.database_oid() AND a.xact_start IS NOT NULL
            UNION ALL
            SELECT format('prepared transaction "%s"', p.gid), p.prepared
            FROM pg_prepared_xacts AS p
            WHERE p.database = current_database()
        ) AS o
        WHERE o.since < clock_timestamp() - interval '1 h'
        ORDER BY o.since
        LIMIT 1
    )
    SELECT 'pauses',
        CASE WHEN p.paused IS NULL THEN 'ok' ELSE 'warn' END,
        COALESCE('paused: ' || p.paused || COALESCE('; stale for that: ' || p.stale, ''), 'none'),
        CASE WHEN p.paused IS NOT NULL THEN 'sluice.unpause() lets them run.' END
    FROM (
        SELECT
            string_agg(format('"%s"', _sluice.node_name(n)), ', ' ORDER BY n.pgt_id)
                FILTER (WHERE n.pgt_id = ANY (_paused)) AS paused,
            string_agg(format('"%s"', _sluice.node_name(n)), ', ' ORDER BY n.pgt_id)
                FILTER (WHERE n.pgt_id <> ALL (_paused)) AS stale
        FROM _sluice.node AS n
        WHERE n.pgt_id = ANY (_paused) OR n.pgt_id IN (SELECT s.pgt_id FROM stale AS s)
    ) AS p
    UNION ALL
    SELECT 'nodes',
        CASE WHEN bool_or(n.status <> 'active') THEN 'critical' WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        COALESCE(string_agg(
            CASE n.status
                WHEN 'active' THEN format(
                    '"%s" failed %s, with %s', _sluice.node_name(n),
                    CASE s.consecutive_errors WHEN 1 THEN 'once' ELSE format('%s times in a row', s.consecutive_errors) END, s.last_outcome
                )
                ELSE format('"%s" is %s', _sluice.node_name(n), n.status)
            END, ', ' ORDER BY n.pgt_id
        ), 'all can run'),
        NULLIF(concat_ws(
            ' ',
            CASE
                WHEN bool_or(n.status = 'suspended') THEN 'See sluice.history for the reason; sluice.reset() lifts it.'
                WHEN bool_or(n.status = 'active') THEN 'See sluice.history for the reason, and sluice.nodes for the remedy.'
            END,
            -- It was not run with such a value, so history knows nothing of it.
            CASE WHEN bool_or(n.status = 'quarantined') THEN 'See sluice.alerts for the reason; a valid schedule or sluice.reset() ends it.' END
        ), '')
    FROM _sluice.node AS n
    LEFT JOIN _sluice.node_state AS s ON s.pgt_id = n.pgt_id
    WHERE n.status IN ('suspended', 'quarantined') OR s.consecutive_errors > 0
    UNION ALL
    SELECT 'freshness',
        CASE WHEN bool_or(l.is_given) THEN 'critical' WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        COALESCE(
            _sluice.first_ten(array_agg(format(
                '"%s" succeeded %s ago (%s %s)', l.name, date_trunc('second', l.lag),
                CASE WHEN l.is_given THEN 'max_lag' ELSE 'expected within' END, date_trunc('second', l.bound)
            ) ORDER BY l.is_given DESC, l.pgt_id)),
            'no node is late'
        ),
        CASE WHEN count(*) > 0 THEN 'See sluice.history and sluice.queue() for what became of their runs; sluice.run_now() starts one.' END
    FROM late AS l
    UNION ALL
    SELECT 'clock',
        CASE WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        COALESCE(
            'ahead of the clock: ' || _sluice.first_ten(array_agg(
                concat(format('"%s"', a.name), ' waits until ' || a.waits_until) ORDER BY a.waits_until IS NULL, a.pgt_id
            )),
            'no node is ahead of the clock'
        ),
        CASE WHEN count(*) > 0
            THEN 'It was set back. A job waits until its last fire is past, sluice.run_now() runs it before; other nodes go on within a minute.' END
    FROM _sluice.nodes_ahead() AS a
    UNION ALL
    SELECT 'alerts',
        CASE WHEN bool_or(a.severity = 'critical') THEN 'critical' WHEN count(*) > 0 THEN 'warn' ELSE 'ok' END,
        CASE WHEN count(*) > 0
            THEN format('%s open: %s', count(*), string_agg(DISTINCT a.event, ', ' ORDER BY a.event))
            ELSE 'none is open'
        END,
        CASE WHEN count(*) > 0 THEN 'See sluice.alerts; docs/alerts.md says what to do about each.' END
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
    UNION ALL
    SELECT 'notifications',
        CASE WHEN NOT u.can_notify THEN 'critical' WHEN u.usage >= 0.5 THEN 'warn' ELSE 'ok' END,
        format('the server''s queue of notifications is %s %% full', round((100 * u.usage)::numeric))
            || CASE WHEN u.can_notify THEN '' ELSE ', alerts are not announced' END,
        CASE WHEN u.usage >= 0.5 OR NOT u.can_notify
            THEN 'A session that listens stays in a transaction, the oldest in pg_stat_activity; pg_terminate_backend() ends it.' END
    FROM (SELECT pg_notification_queue_usage() AS usage, _sluice.can_notify() AS can_notify) AS u
    UNION ALL
    SELECT 'transactions',
        CASE WHEN o.since IS NULL THEN 'ok' ELSE 'warn' END,
        CASE WHEN o.since IS NULL THEN 'none is old' ELSE format('the one of %s is open since %s', o.holder, o.since) END,
        CASE WHEN o.since IS NOT NULL THEN 'It keeps what others delete; see pg_stat_activity and pg_prepared_xacts, pg_terminate_backend() ends a session.' END
    FROM (SELECT) AS one
    LEFT JOIN oldest AS o ON true
    UNION ALL
    SELECT u."check", u.status, u.detail, u.hint FROM _sluice.upkeep_health() AS u
$$;
COMMENT ON FUNCTION _sluice.member_checks(boolean, bigint[]) IS
    'The rows of health_check() that come of this database itself; _is_held: nothing runs by somebody''s will, _paused: nor do these nodes';

CREATE FUNCTION _sluice.ask_health()
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_message text;
    v_detail text;
    v_hint text;
BEGIN
    RETURN jsonb_build_object(
        'health', _sluice.control('health_of', jsonb_build_object('_db_oid', _sluice.database_oid()))
    );
EXCEPTION
    -- Whatever it is, the rest can be told.
    WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS
            v_message = MESSAGE_TEXT, v_detail = PG_EXCEPTION_DETAIL, v_hint = PG_EXCEPTION_HINT;
        RETURN jsonb_build_object(
            'error', concat_ws(': ', v_message, NULLIF(v_detail, '')),
            'hint', COALESCE(NULLIF(v_hint, ''), 'See sluice.preflight().')
        );
END;
$$;
COMMENT ON FUNCTION _sluice.ask_health() IS 'What health_of() says in the control database, or why it does not answer';

CREATE FUNCTION sluice.health_check()
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    WITH answer AS MATERIALIZED (
        SELECT a -> 'health' AS health, a ->> 'error' AS error, a ->> 'hint' AS hint FROM _sluice.ask_health() AS a
    )
    SELECT 'control',
        CASE WHEN a.error IS NULL THEN 'ok' ELSE 'critical' END,
        COALESCE(a.error, format('the control database "%s" answers', _sluice.control_database())),
        a.hint
    FROM answer AS a
    UNION ALL
    SELECT c."check", c.status, c.detail, c.hint
    FROM answer AS a
    CROSS JOIN LATERAL _sluice.control_checks(a.health) AS c
    WHERE a.error IS NULL
    UNION ALL
    SELECT m."check", m.status, m.detail, m.hint
    FROM answer AS a
    CROSS JOIN LATERAL _sluice.member_checks(
        -- Without an answer nobody knows, and to be late is worth telling.
        a.error IS NULL AND ((a.health ->> 'drain')::boolean OR a.health ->> 'member_state' IS NULL),
        ARRAY(SELECT p.value::bigint FROM jsonb_array_elements_text(NULLIF(a.health -> 'paused', 'null')) AS p)
    ) AS m
$$;
COMMENT ON FUNCTION sluice.health_check() IS
'The state of the scheduler and of this database: one row a check, with ok, warn or critical, the detail, and what to do. For monitoring: SELECT ... WHERE status <> ''ok''.
Called in the control database it also tells of the member databases. It never fails for what it checks: where the control database does not answer, the row "control" says why and the rows about it are left out.
clock: active nodes that fired, ran, failed or were made at a time that lies in the future, since the clock was set back. The scheduler brings them back within a minute, all but jobs, which wait until their last fire is past: each fire of a job runs once.
freshness: a node is late, critical, when its last successful run began longer ago than its max_lag; one without max_lag, warn, after three times its interval and a minute, unless it is paused, drained, suspended or quarantined.';

CREATE FUNCTION _sluice.health_of(_db_oid oid)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'leader_pid', l.pid,
        'leader_alive', _sluice.leader_lives(),
        'leader_entry', _sluice.leader_entry(),
        'member_state', m.state,
        'last_tick_at', m.last_tick_at,
        'last_tick_ms', m.last_tick_ms,
        'failures', m.failures,
        'error', m.error,
        'spawn_error', m.spawn_error,
        -- A database without a connection of its own is looked at within ten intervals.
        'tick_bound', interval '1 min' + 10 * _sluice.interval_setting('scheduler_interval'),
        'queued', q.queued,
        'running', q.running,
        'oldest_queued_at', q.oldest_queued_at,
        'max_queue_depth', _sluice.setting('max_queue_depth'),
        'worker_limit', _sluice.worker_limit(),
        'stuck', (
            SELECT a.message FROM _sluice.alert AS a
            WHERE a.event = 'session_stuck' AND a.closed_at IS NULL AND a.node = _sluice.database_name(_db_oid)
        ),
        'drain', _sluice.is_draining(_db_oid),
        'drain_end', _sluice.drain_end(_db_oid),
        'endpoint', _sluice.endpoint_state(),
        'paused', (SELECT jsonb_agg(p.pgt_id) FROM _sluice.pause_in_force AS p WHERE p.db_oid = _db_oid)
    ) || CASE WHEN _db_oid = _sluice.database_oid() THEN jsonb_build_object(
        'members', (SELECT count(*) FROM _sluice.member),
        'unscheduled', (
            SELECT jsonb_agg(jsonb_build_object(
                'database', _sluice.database_name(o.db_oid), 'state', o.state, 'error', o.error
            ) ORDER BY o.db_oid)
            FROM _sluice.member AS o
            WHERE o.state <> 'scheduled'
        )
    ) ELSE '{}' END
    FROM _sluice.lease AS l
    LEFT JOIN _sluice.member AS m ON m.db_oid = _db_oid
    CROSS JOIN (
        SELECT count(*) FILTER (WHERE r.state = 'queued') AS queued,
            count(*) FILTER (WHERE r.state = 'running') AS running,
            min(r.enqueued_at) FILTER (WHERE r.state = 'queued') AS oldest_queued_at
        FROM _sluice.queue AS r
        WHERE r.db_oid = _db_oid
    ) AS q
$$;
COMMENT ON FUNCTION _sluice.health_of(oid) IS
    'What the control database knows of a member''s health; of itself, also what it knows of the others';

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
    NULLIF(concat_ws('; ',
        CASE WHEN t.work_mem IS NOT NULL THEN format(
            'work_mem %s and no parallel query for %s more successes',
            pg_size_pretty(t.work_mem), greatest(1, r.value::integer - t.successes)
        ) END,
        CASE WHEN n.retry_at IS NOT NULL THEN format('backoff until %s', n.retry_at) END
    ), '') AS remedy,
    CASE WHEN n.kind <> 'job' THEN clock_timestamp() - t.last_success_at END AS lag,
    -- No function of ours: a view's functions need the reader's own privileges.
    pg_get_userbyid(COALESCE(n.job_owner::oid, c.relowner)) AS owner,
    n.priority,
    g.upstream,
    n.max_lag
FROM _sluice.node AS n
LEFT JOIN _sluice.graph AS g ON g.pgt_id = n.pgt_id
LEFT JOIN _sluice.node_state AS t ON t.pgt_id = n.pgt_id
LEFT JOIN pg_class AS c ON c.oid = n.relid
LEFT JOIN pg_namespace AS s ON s.oid = c.relnamespace
LEFT JOIN _sluice.effective_setting AS r ON r.name = 'recovery_successes';
COMMENT ON VIEW sluice.nodes IS
    'What is scheduled in this database. lag: the age of what a stream table or materialized view shows. upstream: the pgt_ids of the nodes that it reads. max_lag: when health_check() calls it late';

CREATE VIEW sluice.history AS
SELECT
    h.run_id, h.pgt_id, h.name, h.kind, h.mode, h.outcome, h.sqlstate, h.message, h.attempt,
    h.due_at, h.started_at, h.ended_at, h.rows_changed, h.reason, h.pid, h.remedy, h.detail, h.context
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

-- sql/metrics.sql

-- Metrics: what core/metrics.py makes the exposition of. Nothing here is counted but when somebody asks;
-- the totals are kept by what records runs.

CREATE FUNCTION _sluice.open_alerts()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_object_agg(a.severity, a.number), '{}')
    FROM (
        SELECT o.severity, count(*) AS number FROM _sluice.alert AS o WHERE o.closed_at IS NULL GROUP BY o.severity
    ) AS a
$$;
COMMENT ON FUNCTION _sluice.open_alerts() IS 'Open alerts of this database by severity';

CREATE FUNCTION _sluice.node_metrics(_limit integer)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH node AS MATERIALIZED (
        SELECT
            -- As in node_name(). In SQL_ASCII the cut can be inside a character, too.
            CASE WHEN getdatabaseencoding() = 'UTF8' THEN l.name ELSE _sluice.shown_name(l.name) END AS name,
            v.kind, v.status, v.consecutive_errors, extract(epoch FROM v.lag) AS lag,
            extract(epoch FROM s.last_success_at) AS last_success, COALESCE(s.runs, '{}') AS runs,
            COALESCE(s.run_seconds, 0) AS run_seconds, COALESCE(s.rows_changed, 0) AS rows_changed,
            row_number() OVER (ORDER BY v.pgt_id) > _limit AS is_beyond
        FROM sluice.nodes AS v
        CROSS JOIN LATERAL (SELECT
            CASE WHEN length(v.name) > 200 THEN format('%s... %s', left(v.name, 200), v.pgt_id) ELSE v.name END
        ) AS l (name)
        LEFT JOIN _sluice.node_state AS s ON s.pgt_id = v.pgt_id
    ), series AS (
        SELECT n.name, n.kind, n.status, n.consecutive_errors, n.lag, n.last_success, n.runs, n.run_seconds, n.rows_changed
        FROM node AS n
        WHERE NOT n.is_beyond
        UNION ALL
        SELECT 'other', 'other', NULL, max(n.consecutive_errors), max(n.lag), min(n.last_success),
            COALESCE((
                SELECT jsonb_object_agg(o.outcome, o.number)
                FROM (
                    SELECT e.key AS outcome, sum(e.value::bigint) AS number
                    FROM node AS b
                    CROSS JOIN jsonb_each_text(b.runs) AS e
                    WHERE b.is_beyond
                    GROUP BY e.key
                ) AS o
            ), '{}'),
            sum(n.run_seconds), sum(n.rows_changed)
        FROM node AS n
        WHERE n.is_beyond
        HAVING count(*) > 0
    )
    SELECT jsonb_build_object(
        'db_oid', _sluice.database_oid(),
        'database', _sluice.here(),
        'alerts', _sluice.open_alerts(),
        'numbers', (
            SELECT COALESCE(jsonb_agg(to_jsonb(c)), '[]')
            FROM (SELECT n.kind, n.status, count(*) AS number FROM node AS n GROUP BY n.kind, n.status) AS c
        ),
        'nodes', (SELECT COALESCE(jsonb_agg(to_jsonb(s)), '[]') FROM series AS s)
    )
$$;
COMMENT ON FUNCTION _sluice.node_metrics(integer) IS
    'This database''s part of the metrics. So many nodes, those that were made first, have series of their own; the others are one, of the name and kind "other": sums, the greatest lag and number of errors, the earliest success. Of a name beyond 200 characters it has these and the pgt_id';

CREATE FUNCTION _sluice.server_metrics()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'version', _sluice.extension_version(),
        'database', _sluice.here(),
        'alerts', _sluice.open_alerts(),
        'leader', _sluice.leader_lives(),
        'epoch', l.epoch,
        'worker_limit', _sluice.worker_limit(),
        'slots', (
            SELECT COALESCE(jsonb_object_agg(s.state, s.number), '{}')
            FROM (SELECT t.state, count(*) AS number FROM _sluice.slot AS t GROUP BY t.state) AS s
        ),
        'members', (
            SELECT COALESCE(jsonb_agg(jsonb_build_object(
                'db_oid', m.db_oid::bigint,
                'database', _sluice.shown_name(d.datname),
                'dbname', encode(_sluice.raw_name(d.datname), 'hex'),
                'state', m.state,
                'failures', m.failures,
                'last_tick', extract(epoch FROM m.last_tick_at),
                'tick_seconds', m.last_tick_ms / 1000,
                'drain', _sluice.is_draining(m.db_oid),
                'paused', (SELECT count(*) FROM _sluice.pause_in_force AS p WHERE p.db_oid = m.db_oid)
            ) ORDER BY m.db_oid), '[]')
            FROM _sluice.member AS m
            JOIN pg_database AS d ON d.oid = m.db_oid
        ),
        'queue', (
            SELECT COALESCE(jsonb_agg(jsonb_build_object(
                -- A run can outlast its database.
                'database', COALESCE(_sluice.database_name(q.db_oid), q.db_oid::text),
                'state', q.state,
                'depth', q.depth,
                'oldest', extract(epoch FROM clock_timestamp() - q.enqueued_at)
            ) ORDER BY q.db_oid), '[]')
            FROM (
                SELECT r.db_oid, r.state, count(*) AS depth, min(r.enqueued_at) AS enqueued_at
                FROM _sluice.queue AS r
                GROUP BY r.db_oid, r.state
            ) AS q
        )
    )
    FROM _sluice.lease AS l
$$;
COMMENT ON FUNCTION _sluice.server_metrics() IS
    'Control database: the part of the metrics that is about the whole server and the scheduling of its members, in one snapshot';

CREATE FUNCTION sluice.metrics()
RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.unwrap(_sluice.invoke_privileged('metrics', '{}')) #>> '{}'
$$;
COMMENT ON FUNCTION sluice.metrics() IS
'The metrics in Prometheus'' text format: the scheduling of the whole server, and the nodes of this database. docs/monitoring.md describes each. Collected by this call, over one connection to the control database.';

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
GRANT EXECUTE ON FUNCTION _sluice.invoke(text, jsonb, text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.unwrap(jsonb) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.load_package() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.name_nodes(text[], text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.relation_of(text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.session_settings() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.setting(text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.check_setting(text, text, boolean) TO PUBLIC;
