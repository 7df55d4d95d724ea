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
