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
