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
