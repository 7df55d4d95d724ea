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
