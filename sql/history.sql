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
