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
