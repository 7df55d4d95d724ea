-- Alerts: when each is announced, and how often. Each test gives the clock.
\ir setup.psql
SELECT plan(38);

-- The channel's own transaction rules make a test of what arrives impossible here; see test_alerts.py.
CREATE FUNCTION pg_temp.at(_seconds double precision) RETURNS timestamptz LANGUAGE sql AS $$
    SELECT timestamptz '2024-01-01' + make_interval(secs => _seconds)
$$;
-- What is announced at that time, as "event severity"; it is then marked so.
CREATE FUNCTION pg_temp.announce(_seconds double precision) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_told text;
    v_seqs bigint[];
    v_versions text[];
BEGIN
    SELECT string_agg(concat_ws(' ', a ->> 'event', a ->> 'severity', extract(epoch FROM (a ->> 'at')::timestamptz - pg_temp.at(0))::integer), ', ' ORDER BY p.n),
        array_agg(p.seq), array_agg(p.version)
    INTO v_told, v_seqs, v_versions
    FROM _sluice.pending_alerts(pg_temp.at(_seconds)) WITH ORDINALITY AS p (seq, version, alert, n)
    CROSS JOIN LATERAL (SELECT convert_from(p.alert, 'UTF8')::jsonb AS a) AS j;
    PERFORM _sluice.emit_alerts(pg_temp.at(_seconds), v_seqs, v_versions, array_fill('{}'::bytea, ARRAY[COALESCE(cardinality(v_seqs), 0)]));
    RETURN v_told;
END;
$$;
CREATE FUNCTION pg_temp.open(_seconds double precision, _event text DEFAULT 'test') RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.open_alert(_event, 'critical', NULL, 'n', 'it "failed"', '{"sqlstate": "XX000"}');
    UPDATE _sluice.alert SET opened_at = pg_temp.at(_seconds) WHERE event = _event AND closed_at IS NULL;
$$;
CREATE FUNCTION pg_temp.close(_seconds double precision, _event text DEFAULT 'test') RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.close_alert(_event, NULL, 'n');
    UPDATE _sluice.alert SET closed_at = pg_temp.at(_seconds) WHERE event = _event AND closed_at > pg_temp.at(1000000);
$$;
CREATE FUNCTION pg_temp.pending() RETURNS boolean LANGUAGE sql AS 'SELECT has_alerts FROM _sluice.tick(10, ''{}'')';

SELECT _sluice.store_setting('database', 'alert_reminder_interval', '100 s') \g /dev/null

-- Opened, reminded, closed
SELECT is(pg_temp.announce(0), NULL, 'nothing is open, nothing is announced');
SELECT is(pg_temp.pending(), false, 'and a tick says so');
SELECT pg_temp.open(0) \g /dev/null
SELECT is((SELECT last_emitted_at FROM sluice.alerts), NULL, 'who opens an alert only writes it');
SELECT is(pg_temp.pending(), true, 'a tick says that there is something to announce');
SELECT is(pg_temp.announce(3), 'test critical 0', 'it is announced, with the time at which it was opened');
SELECT is((SELECT last_emitted_at FROM sluice.alerts), pg_temp.at(3), 'the view says when that was');
SELECT is(pg_temp.pending(), false, 'a tick asks for no more');
SELECT pg_temp.open(0) \g /dev/null
SELECT is(pg_temp.announce(99.9), NULL, 'once, however often the condition is found, and until a reminder is due');
SELECT is(pg_temp.announce(100), 'test critical 100', 'a reminder, an interval after it was opened');
SELECT is(pg_temp.announce(199), NULL, 'no other before the next point of that grid');
SELECT is(pg_temp.announce(250), 'test critical 250', 'a late one');
SELECT is(pg_temp.announce(299), NULL, 'takes the place of no other');
SELECT is(pg_temp.announce(300), 'test critical 300', 'which comes at its own time');
SELECT is(pg_temp.announce(1234), 'test critical 1234', 'of those that nobody could be told of there is one');
SELECT is(pg_temp.announce(1233.5), NULL, 'a clock that goes back a little reminds of nothing');
SELECT is(pg_temp.announce(910), 'test critical 910', 'one that was set back does at once');
SELECT is(pg_temp.announce(950), NULL, 'and from then on');
SELECT is(pg_temp.announce(1000), 'test critical 1000', 'as ever');
SELECT pg_temp.close(1500) \g /dev/null
SELECT is(pg_temp.pending(), true, 'a tick says that there is something to announce again');
SELECT is(pg_temp.announce(1501), 'test info 1500', 'the end is announced, as information, with its time');
SELECT is(pg_temp.announce(99999), NULL, 'once');

-- Of what comes and goes unseen both are told
SELECT pg_temp.open(2000), pg_temp.close(2001) \g /dev/null
SELECT is(pg_temp.announce(2002), 'test critical 2000, test info 2001', 'one that was closed before it was announced: beginning and end, in this order');
SELECT is(pg_temp.announce(99999), NULL, 'once');
SELECT pg_temp.open(3000, 'a'), pg_temp.open(3000, 'b') \g /dev/null
SELECT is(pg_temp.announce(3000), 'a critical 3000, b critical 3000', 'in the order in which they were opened');
SELECT pg_temp.close(3001, 'a') \g /dev/null
SELECT is(pg_temp.announce(3100), 'a info 3001, b critical 3100', 'an end and a reminder');
SELECT _sluice.close_alert('b', NULL, 'n') \g /dev/null
UPDATE _sluice.alert SET closed_at = NULL, last_emitted_at = now() + interval '1 day' WHERE event = 'b';
SELECT _sluice.close_alert('b', NULL, 'n') \g /dev/null
SELECT ok((SELECT closed_at > last_emitted_at FROM sluice.alerts WHERE event = 'b'), 'a clock that is set back loses no end');
DELETE FROM _sluice.alert;

-- The same number of reminders, however often one looks
CREATE FUNCTION pg_temp.announcements(_interval double precision, _until double precision) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint := 0;
BEGIN
    DELETE FROM _sluice.alert;
    PERFORM pg_temp.open(0);
    FOR n IN 0 .. floor(_until / _interval) LOOP
        v_count := v_count + (pg_temp.announce(n * _interval) IS NOT NULL)::integer;
    END LOOP;
    RETURN v_count;
END;
$$;
SELECT is(pg_temp.announcements(0.05, 370), 4::bigint, 'three reminders, one each 100 s, in 370 s with a tick every 50 ms');
SELECT is(pg_temp.announcements(1, 370), 4::bigint, 'with one every second');
SELECT is(pg_temp.announcements(70, 370), 4::bigint, 'and with one every 70 s');
DELETE FROM _sluice.alert;

-- A full queue of notifications
CREATE OR REPLACE FUNCTION _sluice.can_notify() RETURNS boolean LANGUAGE sql AS 'SELECT false';
SELECT pg_temp.open(0) \g /dev/null
SELECT is(pg_temp.announce(0), NULL, 'while the server''s queue of notifications is full nothing is announced');
SELECT is(pg_temp.pending(), true, 'it stays pending');
CREATE OR REPLACE FUNCTION _sluice.can_notify() RETURNS boolean LANGUAGE sql AS 'SELECT true';
SELECT is(pg_temp.announce(500), 'test critical 0', 'and is announced later');

-- What an announcement is made of
UPDATE _sluice.alert SET last_emitted_at = NULL, pgt_id = 5;
SELECT is(
    (SELECT convert_from(alert, 'UTF8')::jsonb - 'seq' FROM _sluice.pending_alerts(pg_temp.at(0))),
    jsonb_build_object(
        'event', 'test', 'severity', 'critical', 'database', current_database(), 'node', 'n', 'pgt_id', 5,
        'at', pg_temp.at(0), 'message', 'it "failed"', 'detail', '{"sqlstate": "XX000"}'::text
    ),
    'who, where, when and what'
);
SELECT is((SELECT seq FROM _sluice.pending_alerts(now())), (SELECT seq FROM sluice.alerts), 'and its number');
DELETE FROM _sluice.alert;

-- A node that is gone
SELECT sluice.schedule('job', 'manual', 'SELECT 1') AS job \gset
SELECT _sluice.open_alert('suspended', 'critical', :job, 'job', 'm') \g /dev/null
SELECT sluice.unschedule('job') \g /dev/null
SELECT is((SELECT closed_at IS NOT NULL FROM sluice.alerts), true, 'takes its alerts along');
CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('st', 'SELECT id FROM src', 'manual') AS st \gset
SELECT _sluice.open_alert('suspended', 'critical', :st, 'st', 'm') \g /dev/null
DROP TABLE st;
SELECT is((SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE pgt_id = :st), true, 'also a table that is dropped by hand');

-- However many are closed, and whether or not the server knows that: a look is at the index.
INSERT INTO _sluice.alert (event, severity, pgt_id, message, closed_at, last_emitted_at)
SELECT 'old', 'info', g, 'm', now(), now() FROM generate_series(1, 5000) AS g;
CREATE FUNCTION pg_temp.plan() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_plan jsonb;
BEGIN
    EXECUTE 'EXPLAIN (FORMAT JSON) SELECT true FROM _sluice.unannounced_alert AS u ORDER BY u.opened_at LIMIT 1' INTO v_plan;
    RETURN jsonb_path_query_first(v_plan, '$.**."Index Name"') #>> '{}';
END;
$$;
SELECT is(pg_temp.plan(), 'alert_unannounced_idx', 'without statistics');
ANALYZE _sluice.alert;
SELECT is(pg_temp.plan(), 'alert_unannounced_idx', 'and with them');
\ir finish.psql
