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
