-- The two schemas. Users call and read what is in "sluice"; "_sluice" is private: its objects may
-- change in any release.

CREATE SCHEMA sluice;
COMMENT ON SCHEMA sluice IS 'pg_sluice: functions and views for users';

CREATE SCHEMA _sluice;
COMMENT ON SCHEMA _sluice IS 'pg_sluice: private tables and functions, not for users';
