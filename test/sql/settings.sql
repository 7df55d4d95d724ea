-- Settings: what configure() takes, in which scope, and which value is in force.
\ir setup.psql
SELECT plan(36);

CREATE FUNCTION pg_temp.configure_error(_arguments text) RETURNS text LANGUAGE sql AS $$
    SELECT pg_temp.error_of('SELECT sluice.configure(' || _arguments || ')')
$$;
CREATE FUNCTION pg_temp.value(_name text) RETURNS text LANGUAGE sql AS 'SELECT value FROM sluice.settings WHERE name = _name';

-- Definitions
SELECT is_empty(
    $$SELECT name, value, "default" FROM sluice.settings WHERE value <> "default"$$, 'at first every setting has its default'
);
SELECT is_empty(
    $$SELECT d.name FROM _sluice.setting_definition AS d
      WHERE _sluice.setting_quantity(d.type, d.default_value) NOT BETWEEN _sluice.setting_quantity(d.type, d.min_value)
        AND _sluice.setting_quantity(d.type, d.max_value)$$,
    'every default is within its bounds'
);
SELECT is_empty(
    $$SELECT name FROM sluice.settings WHERE description IS NULL OR description NOT LIKE '%.' OR scope NOT IN ('cluster', 'database')$$,
    'each has a scope and a description'
);
SELECT results_eq(
    $$SELECT name, "default", min, max, unit, scope FROM sluice.settings WHERE name IN
        ('max_workers', 'lease_ttl', 'refresh_work_mem', 'max_query_bytes', 'history_retention', 'max_consecutive_errors', 'lock_timeout')
      ORDER BY name COLLATE "C"$$,
    $$VALUES ('history_retention', '30 d', '1 s', '10 y', 's', 'database'), ('lease_ttl', '15 s', '1 s', '5 min', 's', 'cluster'),
        ('lock_timeout', '5 s', '1 ms', '10 min', 's', 'database'), ('max_consecutive_errors', '3', '1', '100', NULL, 'database'),
        ('max_query_bytes', '64 kB', '1 kB', '1 MB', 'bytes', 'database'), ('max_workers', '4', '0', '64', NULL, 'cluster'),
        ('refresh_work_mem', '64 MB', '64 kB', '8 GB', 'bytes', 'database')$$,
    'defaults and bounds as documented'
);

-- Values
SELECT is(pg_temp.configure_error($$'refresh_timeout', '90 s'$$), NULL, 'an interval');
SELECT is(_sluice.setting('refresh_timeout'), 90::numeric, 'is in force at once');
SELECT is(pg_temp.value('refresh_timeout'), '90 s', 'and shown as it was given');
SELECT is(pg_temp.configure_error($$'refresh_work_mem', '1 GB'$$), NULL, 'a size');
SELECT is(_sluice.setting('refresh_work_mem'), 1073741824::numeric, 'in bytes');
SELECT is(pg_temp.configure_error($$'max_consecutive_errors', '100'$$), NULL, 'a number, at its very bound');
SELECT is(pg_temp.configure_error($$'max_consecutive_errors', NULL$$), NULL, 'NULL');
SELECT is(_sluice.setting('max_consecutive_errors'), 3::numeric, 'restores the default');
SELECT is(
    pg_temp.configure_error($$'max_consecutive_errors', '101'$$),
    '22023: 101 is outside the valid range for setting "max_consecutive_errors" (1 .. 100)', 'above its bound'
);
SELECT is(
    pg_temp.configure_error($$'max_consecutive_errors', '0'$$),
    '22023: 0 is outside the valid range for setting "max_consecutive_errors" (1 .. 100)', 'below it'
);
SELECT is(
    pg_temp.configure_error($$'lock_timeout', '11 min'$$),
    '22023: 11 min is outside the valid range for setting "lock_timeout" (1 ms .. 10 min)', 'too long an interval'
);
SELECT is(
    pg_temp.configure_error($$'lock_timeout', '-1 s'$$),
    '22023: -1 s is outside the valid range for setting "lock_timeout" (1 ms .. 10 min)', 'a negative one'
);
SELECT is(
    pg_temp.configure_error($$'refresh_work_mem', '9 GB'$$),
    '22023: 9 GB is outside the valid range for setting "refresh_work_mem" (64 kB .. 8 GB)', 'too large a size'
);
SELECT is(
    pg_temp.configure_error($$'max_consecutive_errors', '2.5'$$),
    E'22023: invalid value for setting "max_consecutive_errors": "2.5"\nHINT: The value is a whole number.', 'not a whole number'
);
SELECT is(
    pg_temp.configure_error($$'max_consecutive_errors', '99999999999'$$),
    E'22023: invalid value for setting "max_consecutive_errors": "99999999999"\nHINT: The value is a whole number.', 'no integer at all'
);
SELECT is(
    pg_temp.configure_error($$'refresh_timeout', 'soon'$$),
    E'22023: invalid value for setting "refresh_timeout": "soon"\nHINT: The value is an interval such as ''30 s'' or ''5 min''.', 'not an interval'
);
SELECT is(
    pg_temp.configure_error($$'refresh_work_mem', 'much'$$),
    E'22023: invalid value for setting "refresh_work_mem": "much"\nHINT: The value is a size such as ''64 MB''.', 'not a size'
);
SELECT is(
    pg_temp.configure_error($$'refresh_timout', '1 s'$$),
    E'42704: unrecognized setting "refresh_timout"\nHINT: The view sluice.settings lists all settings.', 'an unknown setting'
);
SELECT is(
    pg_temp.configure_error($$NULL, '1'$$), E'42704: unrecognized setting NULL\nHINT: The view sluice.settings lists all settings.', 'NULL for a name'
);
SELECT is(
    pg_temp.configure_error($$'max_workers', '2'$$),
    E'22023: setting "max_workers" can only be set for the whole server\nHINT: Pass cluster => true.', 'a setting of the server, for a database'
);
SELECT results_eq(
    'SELECT scope, name, value FROM _sluice.setting ORDER BY name',
    $$VALUES ('database', 'refresh_timeout', '90 s'), ('database', 'refresh_work_mem', '1 GB')$$,
    'after all these errors nothing else is stored'
);

-- Precedence
SELECT _sluice.copy_cluster_settings('{"lock_timeout": "7 s", "max_workers": "3", "refresh_timeout": "8 s"}') \g /dev/null
SELECT is(_sluice.setting('lock_timeout'), 7::numeric, 'the server''s value wins over the default');
SELECT is(_sluice.setting('refresh_timeout'), 90::numeric, 'and the database''s over the server''s');
SELECT sluice.configure('refresh_timeout', NULL) \g /dev/null
SELECT is(_sluice.setting('refresh_timeout'), 8::numeric, 'which comes back when that goes');
SELECT is(_sluice.cluster_settings(), '{"lock_timeout": "7 s", "max_workers": "3", "refresh_timeout": "8 s"}'::jsonb, 'the server''s values');
SELECT _sluice.copy_cluster_settings('{"max_workers": "5"}') \g /dev/null
SELECT results_eq(
    $$SELECT _sluice.setting('lock_timeout'), _sluice.setting('max_workers'), _sluice.setting('refresh_work_mem')$$,
    'VALUES (5::numeric, 5::numeric, 1073741824::numeric)',
    'a copy takes away what is gone, and no value of the database'
);
SELECT is((_sluice.settings_in_force() ->> 'max_workers'), '5', 'all of them, as the leader reads them');

-- For the whole server, at once
SELECT is(pg_temp.configure_error($$'max_workers', '65', cluster => true$$),
    '22023: 65 is outside the valid range for setting "max_workers" (0 .. 64)', 'cluster => true has the same bounds');
SELECT is(pg_temp.configure_error($$'max_workers', '2', cluster => true$$), NULL, 'cluster => true stores in the control database');
SELECT results_eq(
    $$SELECT "limit", ingredient, value, binding FROM sluice.effective_limit() WHERE binding$$,
    $$VALUES (2, 'max_workers', 2, true)$$,
    'where it is in force at once'
);
SELECT is(pg_temp.configure_error($$'max_workers', NULL, cluster => true$$), NULL, 'NULL restores the default there');
SELECT is((SELECT value FROM sluice.effective_limit() WHERE ingredient = 'max_workers'), 4, 'too');
\ir finish.psql
