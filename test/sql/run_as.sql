-- _sluice.run_as(): an owner's SQL has the owner's rights, whatever it does to get others.
\ir setup.psql
SELECT plan(28);

CREATE ROLE sluice_test_owner;
CREATE ROLE sluice_test_other;
GRANT CREATE ON SCHEMA public TO sluice_test_owner;
CREATE TABLE seen (who name, what text);
GRANT ALL ON seen TO PUBLIC;
CREATE FUNCTION pg_temp.run(_command text) RETURNS bigint LANGUAGE sql AS $$
    SELECT _sluice.run_as('sluice_test_owner'::regrole, 'public', _command, false)
$$;
CREATE FUNCTION pg_temp.seen() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s %s', who, what), ', ' ORDER BY what, who) FROM seen
$$;
CREATE FUNCTION pg_temp.barrier() RETURNS text LANGUAGE sql AS $$
    SELECT 'sluice_run_as_' || 'sluice_test_owner'::regrole::oid
$$;

SET LOCAL ROLE sluice_test_owner;
CREATE FUNCTION note(_what text) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.seen VALUES (current_user, _what);
    RETURN 1;
END;
$$;
CREATE FUNCTION climb() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RESET ROLE; END; $$;
CREATE TABLE late (n integer);
CREATE FUNCTION note_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM public.note('trigger ' || NEW.n);
    RETURN NULL;
END;
$$;
CREATE CONSTRAINT TRIGGER note_late AFTER INSERT ON late
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note_late();
RESET ROLE;

-- What a run is given
SELECT pg_temp.run($$SELECT note('plain')$$) \g /dev/null
SELECT is(pg_temp.seen(), 'sluice_test_owner plain', 'the command runs as its owner');
SELECT is(current_user::text, 'postgres', 'and the session is itself again');
SELECT is(
    _sluice.run_as('sluice_test_owner'::regrole, 'public', 'INSERT INTO seen VALUES (NULL, ''a''), (NULL, ''b'')', false), 2::bigint,
    'it gives the number of rows of the last command'
);
SELECT is(
    _sluice.run_as('sluice_test_owner'::regrole, 'public', 'SELECT 42', true), 42::bigint,
    'or the number that the command itself gives'
);
TRUNCATE seen;
CREATE TABLE secret (a integer);
SELECT throws_ok($$SELECT pg_temp.run('SELECT * FROM secret')$$, '42501', 'permission denied for table secret', 'what the owner may not read, it may not');
CREATE SCHEMA apart;
GRANT ALL ON SCHEMA apart TO sluice_test_owner;
SELECT _sluice.run_as('sluice_test_owner'::regrole, 'apart', 'CREATE TABLE placed ()', false) \g /dev/null
SELECT has_table('apart', 'placed', 'names resolve in the search_path that is given');
SELECT is(current_setting('search_path'), '"$user", public', 'which ends with the run');
SELECT ok(
    NOT has_function_privilege('sluice_test_other', (SELECT p.oid FROM pg_proc AS p WHERE p.proname = pg_temp.barrier()), 'EXECUTE'),
    'nobody else can use the function it runs in'
);

-- Getting another role
SELECT throws_ok(
    $$SELECT pg_temp.run('RESET ROLE')$$, '42501', 'cannot set parameter "role" within security-definer function', 'RESET ROLE'
);
SELECT throws_ok(
    $$SELECT pg_temp.run('SET ROLE postgres')$$, '42501', 'cannot set parameter "role" within security-definer function', 'SET ROLE'
);
SELECT throws_ok(
    $$SELECT pg_temp.run('SET SESSION AUTHORIZATION DEFAULT')$$,
    '42501', 'cannot set parameter "session_authorization" within security-definer function', 'SET SESSION AUTHORIZATION'
);
SELECT throws_ok(
    $$SELECT pg_temp.run('SELECT set_config(''role'', ''postgres'', false)')$$,
    '42501', 'cannot set parameter "role" within security-definer function', 'set_config()'
);
SELECT throws_ok(
    $$SELECT pg_temp.run('SELECT climb()')$$,
    '42501', 'cannot set parameter "role" within security-definer function', 'a function that does it'
);

-- Acting after the run, with the session's rights
SELECT pg_temp.run('INSERT INTO late VALUES (1)') \g /dev/null
SELECT is(pg_temp.seen(), 'sluice_test_owner trigger 1', 'a deferred trigger runs before the run ends');
TRUNCATE seen;
SELECT pg_temp.error_of($$SELECT pg_temp.run('DECLARE held CURSOR WITH HOLD FOR SELECT note(''held'')')$$) \g /dev/null
SELECT is_empty(
    $$SELECT c.name FROM pg_cursors AS c WHERE c.statement LIKE '%note%' AND c.name = 'held'$$,
    'no cursor is left that the server would run at commit'
);
DECLARE mine CURSOR WITH HOLD FOR SELECT 1;
SELECT pg_temp.run('SELECT 1') \g /dev/null
SELECT is((SELECT count(*) FROM pg_cursors WHERE name = 'mine'), 1::bigint, 'the session''s own stay');
SELECT pg_temp.run('CLOSE mine; DECLARE mine CURSOR WITH HOLD FOR SELECT note(''held'')') \g /dev/null
SELECT is_empty($$SELECT c.name FROM pg_cursors AS c WHERE c.statement LIKE '%note%' AND c.name = 'mine'$$, 'unless the command has made them its own');
CLOSE ALL;

-- What it leaves in the session of somebody who refreshes by hand
SET LOCAL ROLE sluice_test_owner;
CREATE FUNCTION meddle() RETURNS integer LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'apart, public', false);
    PERFORM pg_catalog.set_config('work_mem', '99kB', false);
    RETURN 1;
END;
$$;
RESET ROLE;
CREATE TABLE meddled (a integer);
ALTER TABLE meddled OWNER TO sluice_test_owner;
INSERT INTO _sluice.node (kind, relid, query, column_signature, schedule, anchor)
VALUES ('stream_table', 'meddled', 'SELECT public.meddle() AS a', _sluice.column_signature('meddled'), 'manual', now());
SELECT sluice.refresh_stream_table('meddled') AS outcome \gset
SELECT current_setting('search_path') AS path, current_setting('work_mem') AS memory \gset
SET LOCAL search_path = "$user", public;
SELECT is(:'outcome'::text, 'succeeded', 'a query that changes settings refreshes');
SELECT is(:'path'::text, '"$user", public', 'and leaves the search_path of the session alone');
SELECT is(:'memory'::text, '4MB', 'and its other settings');
SET CONSTRAINTS ALL IMMEDIATE;

-- Operators of the owner in a search_path that the owner's SQL leaves behind
SET LOCAL ROLE sluice_test_owner;
CREATE FUNCTION apart.catch(text, text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.seen VALUES (current_user, 'operator');
    RETURN true;
END;
$$;
CREATE OPERATOR apart.= (LEFTARG = text, RIGHTARG = text, FUNCTION = apart.catch);
CREATE FUNCTION apart.catch(bigint, integer) RETURNS boolean LANGUAGE sql AS 'SELECT apart.catch($1::text, $2::text)';
CREATE OPERATOR apart.= (LEFTARG = bigint, RIGHTARG = integer, FUNCTION = apart.catch);
RESET ROLE;
INSERT INTO _sluice.node (kind, job_name, job_owner, job_search_path, command, schedule, anchor)
VALUES ('job', 'catcher', 'sluice_test_owner', 'public', 'SELECT set_config(''search_path'', ''apart, pg_catalog, public'', false)', 'manual', now());
TRUNCATE seen;
SELECT p.outcome FROM _sluice.node AS n, _sluice.perform(md5('1')::uuid, n.pgt_id, '2024-01-01', 1, NULL, NULL) AS p WHERE n.job_name = 'catcher' \gset
SET LOCAL search_path = "$user", public;
SELECT is_empty('SELECT who FROM seen', 'they are never called');
SELECT is((SELECT outcome FROM sluice.history WHERE name = 'catcher'), 'succeeded', 'and the run is on record as it was');

-- Tampering with the function it runs in
CREATE FUNCTION pg_temp.tamper(_statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    TRUNCATE seen;
    PERFORM pg_temp.run(format(_statement, pg_temp.barrier(), _sluice.barrier_body()));
    PERFORM pg_temp.run('SELECT note(''after'')');
    RETURN (
        SELECT pg_temp.seen() || CASE WHEN p.prosecdef AND p.proconfig IS NULL AND p.prosrc = _sluice.barrier_body() THEN '' ELSE ' in a tampered function' END
        FROM pg_proc AS p
        WHERE p.oid = to_regprocedure(format('pg_temp.%I(text, text, boolean)', pg_temp.barrier()))
    );
END;
$$;
SELECT is(
    pg_temp.tamper($$CREATE OR REPLACE FUNCTION pg_temp.%1$I(text, text, boolean) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
        AS 'BEGIN PERFORM public.note(''tampered''); RETURN 1; END'$$),
    'sluice_test_owner after', 'another body is replaced'
);
SELECT is(
    pg_temp.tamper('ALTER FUNCTION pg_temp.%1$I(text, text, boolean) SECURITY INVOKER'),
    'sluice_test_owner after', 'SECURITY INVOKER is'
);
SELECT is(
    pg_temp.tamper('ALTER FUNCTION pg_temp.%1$I(text, text, boolean) SET search_path = apart'),
    'sluice_test_owner after', 'a setting is'
);
SELECT is(
    pg_temp.tamper($$DROP FUNCTION pg_temp.%1$I(text, text, boolean);
        CREATE FUNCTION pg_temp.%1$I(text, text, boolean) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT public.note(''tampered'')::bigint'$$),
    'sluice_test_owner after', 'another language is'
);
SELECT is(
    pg_temp.tamper($$CREATE FUNCTION pg_temp.%1$I(text, text, anyelement) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS %2$L;
        CREATE OR REPLACE FUNCTION pg_temp.%1$I(text, text, boolean) RETURNS bigint LANGUAGE plpgsql SECURITY INVOKER
        AS 'BEGIN PERFORM public.note(''tampered''); RETURN 1; END'$$),
    'sluice_test_owner after', 'a second function of that name with the right body hides no wrong one'
);

-- An owner that is gone
SELECT throws_ok(
    $$SELECT _sluice.run_as(4294967290, 'public', 'SELECT 1', false)$$, '42704', NULL, 'a role that does not exist is said to be unknown'
);
\ir finish.psql
