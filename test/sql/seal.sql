-- _sluice.seal(): after it nothing of an owner is left for COMMIT, which has the session's rights.
\ir setup.psql
SELECT plan(20);

CREATE ROLE sluice_test_owner;
CREATE ROLE sluice_test_admin SUPERUSER;
GRANT CREATE ON SCHEMA public TO sluice_test_owner;
CREATE TABLE seen (who name, what text);
GRANT ALL ON seen TO PUBLIC;

SET LOCAL ROLE sluice_test_owner;
-- Each row has the trigger put itself off and come back, until the fourth: the tables where it writes, the setting where it only speaks.
CREATE TABLE late (n integer);
CREATE FUNCTION note_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    SET CONSTRAINTS ALL DEFERRED;
    INSERT INTO public.seen VALUES (current_user, NEW.n);
    IF NEW.n < 4 THEN
        INSERT INTO public.late VALUES (NEW.n + 1);
    END IF;
    RETURN NULL;
END;
$$;
CREATE CONSTRAINT TRIGGER note_late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note_late();
CREATE FUNCTION say(_what text) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.set_config('test.said', concat_ws(', ', NULLIF(current_setting('test.said', true), ''), current_user || ' ' || _what), true);
    RETURN 1;
END;
$$;
CREATE TABLE quiet (n integer);
CREATE FUNCTION say_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    SET CONSTRAINTS ALL DEFERRED;
    PERFORM public.say(NEW.n::text);
    IF NEW.n < 2 THEN
        INSERT INTO public.quiet VALUES (NEW.n + 1);
    ELSIF NEW.n = 3 THEN
        INSERT INTO public.quiet VALUES (8);
    ELSIF NEW.n = 8 THEN
        EXECUTE 'DECLARE held CURSOR WITH HOLD FOR SELECT public.say(''held'')';
    ELSIF NEW.n = 4 THEN
        INSERT INTO public.quiet VALUES (9);
    ELSIF NEW.n = 9 THEN
        PERFORM pg_catalog.set_config('transaction_read_only', 'off', true);
    END IF;
    RETURN NULL;
END;
$$;
CREATE CONSTRAINT TRIGGER say_late AFTER INSERT ON quiet DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION say_late();
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
RESET ROLE;

-- What a command, its seal and the commit do: who was seen doing what, or the error. SET CONSTRAINTS, with
-- the session's rights, stands for the commit. All of it is undone.
CREATE FUNCTION pg_temp.sealed(
    _command text, _owner text DEFAULT 'sluice_test_owner', _after text DEFAULT 'SET CONSTRAINTS ALL IMMEDIATE'
)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_seen text;
    v_error text;
BEGIN
    PERFORM set_config('test.said', '', true);
    BEGIN
        PERFORM _sluice.run_as(_owner::regrole, 'public', _command, false);
        PERFORM _sluice.seal(_owner::regrole);
        EXECUTE _after;
        v_seen := concat_ws(
            '; ', (SELECT string_agg(format('%s %s', who, what), ', ' ORDER BY what) FROM seen), NULLIF(current_setting('test.said', true), ''),
            (SELECT string_agg('cursor ' || c.name, ', ') FROM pg_cursors AS c WHERE c.is_holdable)
        );
        RAISE EXCEPTION USING ERRCODE = 'TEST1';
    EXCEPTION
        WHEN SQLSTATE 'TEST1' THEN
            RETURN v_seen;
        WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS v_error = MESSAGE_TEXT;
            RETURN SQLSTATE || ': ' || v_error;
    END;
END;
$$;

-- An owner that is no superuser
SELECT is(pg_temp.sealed('INSERT INTO seen VALUES (current_user, ''plain'')'), 'sluice_test_owner plain', 'an ordinary command stands');
SELECT is(pg_temp.sealed('INSERT INTO late VALUES (4)'), 'sluice_test_owner 4', 'and a deferred trigger');
SELECT is(
    pg_temp.sealed('INSERT INTO late VALUES (3)'), '25006: cannot execute INSERT in a read-only transaction',
    'one that it defers again and that writes is an error'
);
SELECT is(pg_temp.sealed('INSERT INTO late VALUES (1)'), '25006: cannot execute INSERT in a read-only transaction', 'however often it does');
SELECT is(
    pg_temp.sealed('INSERT INTO quiet VALUES (1)'), 'sluice_test_owner 1, sluice_test_owner 2', 'one that only reads runs as the owner'
);
SELECT is(pg_temp.sealed('INSERT INTO quiet VALUES (3)'), 'sluice_test_owner 3, sluice_test_owner 8', 'and leaves no cursor for the commit');
SELECT matches(pg_temp.sealed('INSERT INTO quiet VALUES (4)'), '^25001: ', 'it can''t lift the seal');
SELECT is(
    pg_temp.sealed('SELECT 1', _after => 'INSERT INTO seen VALUES (NULL, ''after'')'), '25006: cannot execute INSERT in a read-only transaction',
    'after the seal nobody writes'
);

-- Temporary tables, which stay writable
SELECT is(
    pg_temp.sealed('CREATE TEMP TABLE scratch (a integer UNIQUE DEFERRABLE)'), '0A000: a run must not leave deferrable constraints on temporary tables',
    'a deferrable constraint on one is refused'
);
SELECT is(
    pg_temp.sealed('CREATE TEMP TABLE scratch (a integer);
        CREATE CONSTRAINT TRIGGER n AFTER INSERT ON scratch DEFERRABLE INITIALLY IMMEDIATE FOR EACH ROW EXECUTE FUNCTION nothing()'),
    '0A000: a run must not leave deferrable constraints on temporary tables', 'and a deferrable trigger'
);
SELECT is(
    pg_temp.sealed('CREATE TEMP TABLE scratch (a integer UNIQUE DEFERRABLE); DROP TABLE scratch'), '', 'not one that is gone'
);
SELECT is(
    pg_temp.sealed('CREATE TEMP TABLE scratch (a integer UNIQUE);
        CREATE TRIGGER n AFTER INSERT ON scratch FOR EACH ROW EXECUTE FUNCTION nothing(); INSERT INTO scratch VALUES (1)'),
    '', 'nor others'
);
SELECT is(pg_temp.sealed('CREATE TABLE lasting (a integer UNIQUE DEFERRABLE)'), '', 'nor those of permanent tables');

-- An owner that is a superuser: the commit has no more rights
SELECT is(
    pg_temp.sealed('INSERT INTO quiet VALUES (1)', 'sluice_test_admin', 'SELECT 1'), 'sluice_test_admin 1', 'nothing is run before its time'
);
SELECT is(pg_temp.sealed('CREATE TEMP TABLE scratch (a integer UNIQUE DEFERRABLE)', 'sluice_test_admin'), '', 'temporary tables are as it likes');
SELECT is(pg_temp.sealed('SELECT 1', 'sluice_test_admin', 'INSERT INTO seen VALUES (NULL, ''after'')'), ' after', 'and writing goes on');

-- Around it
SELECT throws_ok('SELECT _sluice.seal(4294967290)', '42704', NULL, 'a role that does not exist');
INSERT INTO _sluice.node (kind, job_name, job_owner, job_search_path, command, schedule, anchor)
VALUES ('job', 'job', 'sluice_test_owner', 'public', 'INSERT INTO seen VALUES (current_user, ''job'')', 'manual', now());
SELECT results_eq(
    $$SELECT p.outcome, current_setting('transaction_read_only')
      FROM _sluice.node AS n, _sluice.perform(md5('1')::uuid, n.pgt_id, '2024-01-01', 1, NULL, NULL) AS p$$,
    $$VALUES ('succeeded', 'off')$$,
    'perform() leaves the seal to who commits'
);

-- A refresh by hand, in a transaction that goes on and whose commit has the rights of who asked
CREATE TABLE src (n integer);
INSERT INTO src VALUES (1);
GRANT SELECT ON src TO sluice_test_owner;
GRANT EXECUTE ON FUNCTION sluice.create_stream_table TO sluice_test_owner;
SET LOCAL ROLE sluice_test_owner;
SELECT sluice.create_stream_table('t', 'SELECT n FROM src', 'manual', initialize => false) \g /dev/null
CREATE FUNCTION pass_on() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.late VALUES (NEW.n);
    RETURN NULL;
END;
$$;
CREATE TRIGGER pass_on AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION pass_on();
RESET ROLE;
TRUNCATE seen;
SELECT pg_temp.error_of($$SELECT sluice.refresh_stream_table('t')$$) \g /dev/null
SET CONSTRAINTS ALL IMMEDIATE;
SELECT todo('the caller''s commit has the caller''s rights before PostgreSQL 18', 1);
SELECT is_empty($$SELECT who, what FROM seen WHERE who <> 'sluice_test_owner'$$, 'runs nothing of the owner with them, not even what is deferred again');
SELECT is(pg_temp.error_of('INSERT INTO seen VALUES (NULL, ''after'')'), NULL, 'and who refreshes by hand can go on writing');
\ir finish.psql
