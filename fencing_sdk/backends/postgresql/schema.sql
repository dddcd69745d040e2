-- Lines of tickets in the schema :"schema". A ticket that has a token holds its name. The rules: fencing_sdk/abc/line.py.
--
-- Who changes a line has locked the row of its name, and reads the clock after that. A keep locks tickets alone: so who
-- passes over a dead ticket deletes it, and takes one whose row is locked for living, because its owner is keeping it.
-- Who gives back locks the line only if others are in it: so a draw locks those who hold against deletion.
--
-- Bodies name no schema. A function that a client calls has its own search_path, which the caller's settings cannot
-- change, and the functions that it calls run under the same one. But SET costs as much as an UPDATE of a row: draw and
-- give_back decide the common case without, and name the schema of every table, function and operator there.

CREATE TABLE IF NOT EXISTS :"schema".fencing_line (
    name text COLLATE "C" PRIMARY KEY,
    last bigint NOT NULL CHECK (last < 9007199254740992)   -- the last token; of the name '': the highest of deleted rows
) WITH (fillfactor = 50);                                  -- room for the next version of a row in its own page

CREATE TABLE IF NOT EXISTS :"schema".fencing_ticket (
    name    text COLLATE "C" NOT NULL,
    number  bigint GENERATED ALWAYS AS IDENTITY,           -- of one name: in the order of arrival
    owner   text NOT NULL,
    mode    text NOT NULL,
    width   integer NOT NULL,
    label   text,
    channel text,                                          -- of its client
    token   bigint,
    permit  integer,
    dies    timestamptz NOT NULL,
    longest bigint NOT NULL,                               -- microseconds: the longest life it was ever asked for
    since   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended   text,                                          -- an operator's reason: it is in the line no longer
    PRIMARY KEY (name, number)                             -- no other index: a row comes and goes with each acquisition
) WITH (fillfactor = 50);

-- A snapshot of a whole transaction would show the line as it was before the row was locked. A server that no longer
-- takes writes must not answer from what it remembers. And a token must be on disk before the client gets it, even if
-- the role or the database is set up with a weaker synchronous_commit.
CREATE OR REPLACE FUNCTION :"schema".fencing_check() RETURNS void
LANGUAGE plpgsql AS $fencing$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'fencing needs READ COMMITTED' USING ERRCODE = 'FS002';
    ELSIF current_setting('transaction_read_only') = 'on' THEN
        RAISE EXCEPTION 'fencing needs a server that takes writes' USING ERRCODE = 'read_only_sql_transaction';
    ELSIF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
END $fencing$;

-- The token that follows p_last. A hybrid one counts ten microseconds, so that it has 15 digits until 2286. It costs no
-- call: the planner puts its expression where it is called.
CREATE OR REPLACE FUNCTION :"schema".fencing_token(p_last bigint, p_hybrid boolean, p_now timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $fencing$
    SELECT greatest(p_last OPERATOR(pg_catalog.+) 1, CASE WHEN p_hybrid THEN
        floor(extract(epoch FROM p_now) OPERATOR(pg_catalog.*) 100000)::bigint END)
$fencing$;

-- Lock the row of a name; return its last token. The floor is read after the insertion, which waits for a sweep.
CREATE OR REPLACE FUNCTION :"schema".fencing_lock(p_name text) RETURNS bigint
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_last bigint;
BEGIN
    PERFORM fencing_check();
    LOOP
        SELECT last INTO v_last FROM fencing_line WHERE name = p_name FOR UPDATE;
        IF v_last >= 0 THEN RETURN v_last; END IF;
        INSERT INTO fencing_line VALUES (p_name, -1) ON CONFLICT DO NOTHING;
        UPDATE fencing_line SET last = coalesce((SELECT last FROM fencing_line WHERE name = ''), 0)
         WHERE name = p_name AND last < 0;
    END LOOP;
END $fencing$;

-- Delete the dead, give a token to each ticket that holds now, and ring for it unless its owner asks. The line is locked.
-- It returns the last token.
CREATE OR REPLACE FUNCTION :"schema".fencing_settle(p_name text, p_last bigint, p_owner text, p_hybrid boolean)
RETURNS bigint LANGUAGE plpgsql AS $fencing$
DECLARE
    t record;
    v_first text;
    v_ahead integer := 0;
    v_readers bigint;
    v_taken integer[] := '{}';
    v_last bigint := p_last;
BEGIN
    FOR t IN SELECT * FROM fencing_ticket WHERE name = p_name AND ended IS NULL ORDER BY number LOOP
        IF t.dies <= clock_timestamp() THEN
            DELETE FROM fencing_ticket WHERE name = p_name AND number = (
                SELECT number FROM fencing_ticket
                 WHERE name = p_name AND number = t.number AND dies <= clock_timestamp() FOR UPDATE SKIP LOCKED);
            CONTINUE WHEN FOUND;
        END IF;
        EXIT WHEN v_ahead > 0 AND (t.mode <> v_first OR v_ahead >= t.width);
        IF t.token IS NULL THEN
            t.token := CASE WHEN t.mode = 'reader' THEN v_readers END;
            IF t.token IS NULL THEN
                v_last := fencing_token(v_last, p_hybrid, clock_timestamp());
                t.token := v_last;
            END IF;
            IF t.mode = 'permit' THEN
                t.permit := (SELECT min(n) FROM generate_series(0, t.width - 1) n WHERE n <> ALL (v_taken));
            END IF;
            UPDATE fencing_ticket SET token = t.token, permit = t.permit, since = clock_timestamp()
             WHERE name = p_name AND number = t.number;
            IF t.channel IS NOT NULL AND t.owner IS DISTINCT FROM p_owner THEN
                PERFORM pg_notify(t.channel, concat_ws(
                    ' ', left(encode(sha256(convert_to(t.owner, 'UTF8')), 'hex'), 32), t.token,
                    coalesce(t.permit, -1), t.number));
            END IF;
        END IF;
        v_first := t.mode;
        v_ahead := v_ahead + 1;
        v_readers := t.token;
        v_taken := v_taken || t.permit;
    END LOOP;
    IF v_last > p_last THEN UPDATE fencing_line SET last = v_last WHERE name = p_name; END IF;
    RETURN v_last;
END $fencing$;

-- Where tickets stand, in the order asked for. An answer without a number: it is gone, 'ended' says why, and 'taken'
-- whether another holds the name alone. look_after: only of the first that waits.
CREATE OR REPLACE FUNCTION :"schema".fencing_places(p_names text[], p_owners text[], p_numbers bigint[])
RETURNS TABLE (token bigint, permit integer, number bigint, look_after float8, ended text, taken boolean)
LANGUAGE plpgsql STABLE AS $fencing$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT t.token, t.permit, CASE WHEN t.ended IS NULL THEN t.number END,
           CASE WHEN t.token IS NULL AND NOT EXISTS (
               SELECT FROM fencing_ticket w WHERE w.name = t.name AND w.number < t.number AND w.token IS NULL
                  AND w.ended IS NULL
           ) THEN (
               SELECT extract(epoch FROM CASE WHEN t.mode IN ('reader', 'permit') AND bool_and(h.mode = t.mode)
                   THEN min(h.dies) ELSE max(h.dies) END - clock_timestamp())::float8
                 FROM fencing_ticket h WHERE h.name = t.name AND h.token IS NOT NULL AND h.ended IS NULL
           ) END,
           t.ended,
           EXISTS (SELECT FROM fencing_ticket o WHERE o.name = q.name AND o.mode IN ('lock', 'writer')
                      AND o.token IS NOT NULL AND o.dies > clock_timestamp() AND o.ended IS NULL)
      FROM unnest(p_names, p_owners, p_numbers) WITH ORDINALITY q (name, owner, number, place)
      LEFT JOIN fencing_ticket t ON t.name = q.name AND t.owner = q.owner AND (
           t.ended IS NOT NULL OR (t.dies > clock_timestamp() AND q.number IN (0, t.number)))
     ORDER BY q.place;
END $fencing$;

-- Let tickets live on: never create, revive or shorten one. Tickets are locked in one order by all transactions. Without
-- places[], all hold as before. A line that is locked is settled by who has locked it.
CREATE OR REPLACE FUNCTION :"schema".fencing_keep(
    p_names text[], p_owners text[], p_numbers bigint[], p_micros bigint[], p_hybrid boolean,
    OUT tokens bigint[], OUT permits integer[], OUT numbers bigint[], OUT places jsonb
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v record;
BEGIN
    PERFORM fencing_check();
    PERFORM fencing_live_on(p_names, p_owners, p_numbers, p_micros, false);
    SELECT array_agg(t.token ORDER BY q.place), array_agg(t.permit ORDER BY q.place), array_agg(t.number ORDER BY q.place)
      INTO tokens, permits, numbers
      FROM unnest(p_names, p_owners, p_numbers) WITH ORDINALITY q (name, owner, number, place)
      JOIN fencing_ticket t ON t.name = q.name AND t.owner = q.owner AND t.ended IS NULL AND t.dies > clock_timestamp()
           AND q.number IN (0, t.number);
    IF cardinality(tokens) = cardinality(p_names) AND array_position(tokens, NULL) IS NULL THEN RETURN; END IF;
    FOR v IN SELECT q.name, min(q.owner) AS owner, NULL::bigint AS last FROM unnest(p_names, p_owners) q (name, owner)
              WHERE EXISTS (SELECT FROM fencing_ticket t WHERE t.name = q.name AND t.owner = q.owner
                                           AND t.token IS NULL AND t.ended IS NULL) GROUP BY q.name LOOP
        SELECT l.last INTO v.last FROM fencing_line l WHERE l.name = v.name FOR UPDATE SKIP LOCKED;
        IF FOUND THEN PERFORM fencing_settle(v.name, v.last, v.owner, p_hybrid); END IF;
    END LOOP;
    PERFORM fencing_live_on(p_names, p_owners, p_numbers, p_micros, true);
    SELECT jsonb_agg(to_jsonb(p)) INTO places FROM fencing_places(p_names, p_owners, p_numbers) p;
END $fencing$;

-- Take a sign of life of tickets. One that waits lives for five seconds at most. The rows are joined by what was just
-- locked: a plan for tables that were small once took 19 times as long. p_begun: only those that hold.
CREATE OR REPLACE FUNCTION :"schema".fencing_live_on(
    p_names text[], p_owners text[], p_numbers bigint[], p_micros bigint[], p_begun boolean
) RETURNS void LANGUAGE plpgsql AS $fencing$
BEGIN
    WITH mine AS MATERIALIZED (
        SELECT t.ctid AS row, CASE WHEN t.token IS NULL THEN least(q.micros, 5000000) ELSE q.micros END AS micros
          FROM unnest(p_names, p_owners, p_numbers, p_micros) q (name, owner, number, micros)
          JOIN fencing_ticket t ON t.name = q.name AND t.owner = q.owner AND t.ended IS NULL AND q.number IN (0, t.number)
         WHERE NOT p_begun OR (t.token IS NOT NULL AND t.longest < q.micros)
         ORDER BY t.name, t.number FOR NO KEY UPDATE OF t
    )
    UPDATE fencing_ticket t SET longest = greatest(t.longest, mine.micros), dies = least(
               greatest(t.dies, clock_timestamp() + mine.micros * interval '1 microsecond'),
               clock_timestamp() + greatest(t.longest, mine.micros) * interval '1 microsecond')
      FROM mine WHERE t.ctid = mine.row AND t.dies > clock_timestamp();
END $fencing$;

-- Draw a ticket. number NULL: none was drawn, because it would wait.
CREATE OR REPLACE FUNCTION :"schema".fencing_draw(
    p_name text, p_owner text, p_mode text, p_width integer, p_label text, p_micros bigint, p_channel text,
    p_only boolean, p_hybrid boolean,
    OUT token bigint, OUT permit integer, OUT number bigint, OUT look_after float8
)
LANGUAGE plpgsql AS $fencing$
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
       AND pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'
       AND (pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'on'
            OR pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'remote_apply')
    THEN
        PERFORM FROM :"schema".fencing_line l
          WHERE l.name OPERATOR(pg_catalog.=) p_name AND l.last OPERATOR(pg_catalog.>=) 0 AND NOT EXISTS (
              SELECT FROM :"schema".fencing_ticket t WHERE t.name OPERATOR(pg_catalog.=) p_name
          ) FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE :"schema".fencing_line l
               SET last = :"schema".fencing_token(l.last, p_hybrid, pg_catalog.clock_timestamp())
             WHERE l.name OPERATOR(pg_catalog.=) p_name AND NOT EXISTS (
                 SELECT FROM :"schema".fencing_ticket t WHERE t.name OPERATOR(pg_catalog.=) p_name
             )
            RETURNING l.last INTO token;
            IF FOUND THEN
                IF p_mode OPERATOR(pg_catalog.=) 'permit' THEN permit := 0; END IF;
                INSERT INTO :"schema".fencing_ticket (name, owner, mode, width, label, channel, token, permit, dies, longest)
                VALUES (p_name, p_owner, p_mode, p_width, p_label, p_channel, token, permit,
                        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+)
                            (p_micros OPERATOR(pg_catalog.*) interval '1 microsecond'), p_micros)
                RETURNING fencing_ticket.number INTO number;
                RETURN;
            END IF;
        END IF;
    END IF;
    SELECT j.token, j.permit, j.number, j.look_after INTO token, permit, number, look_after FROM :"schema".fencing_join(
        p_name, p_owner, p_mode, p_width, p_label, p_micros, p_channel, p_only, p_hybrid
    ) j;
END $fencing$;

-- As fencing_draw, where others are in the line.
CREATE OR REPLACE FUNCTION :"schema".fencing_join(
    p_name text, p_owner text, p_mode text, p_width integer, p_label text, p_micros bigint, p_channel text,
    p_only boolean, p_hybrid boolean,
    OUT token bigint, OUT permit integer, OUT number bigint, OUT look_after float8
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_new boolean;
    v_last bigint;
BEGIN
    v_last := fencing_lock(p_name);
    PERFORM FROM fencing_ticket t WHERE t.name = p_name AND t.token IS NOT NULL FOR KEY SHARE;
    PERFORM fencing_live_on(ARRAY[p_name], ARRAY[p_owner], ARRAY[0::bigint], ARRAY[p_micros], false);
    DELETE FROM fencing_ticket t
     WHERE t.name = p_name AND t.owner = p_owner AND (t.dies <= clock_timestamp() OR t.ended IS NOT NULL);
    INSERT INTO fencing_ticket (name, owner, mode, width, label, channel, dies, longest)
    SELECT p_name, p_owner, p_mode, p_width, p_label, p_channel,
           clock_timestamp() + least(p_micros, 5000000) * interval '1 microsecond', least(p_micros, 5000000)
     WHERE NOT EXISTS (SELECT FROM fencing_ticket t WHERE t.name = p_name AND t.owner = p_owner);
    v_new := FOUND;
    PERFORM fencing_settle(p_name, v_last, p_owner, p_hybrid);
    PERFORM fencing_live_on(ARRAY[p_name], ARRAY[p_owner], ARRAY[0::bigint], ARRAY[p_micros], true);
    SELECT p.token, p.permit, p.number, p.look_after INTO token, permit, number, look_after
      FROM fencing_places(ARRAY[p_name], ARRAY[p_owner], ARRAY[0::bigint]) p;
    IF p_only AND v_new AND token IS NULL THEN
        DELETE FROM fencing_ticket t WHERE t.name = p_name AND t.owner = p_owner;
        SELECT NULL, extract(epoch FROM min(h.dies) - clock_timestamp())::float8 INTO number, look_after
          FROM fencing_ticket h WHERE h.name = p_name AND h.token IS NOT NULL AND h.ended IS NULL;
    END IF;
END $fencing$;

-- End a ticket, now or after so many microseconds, under a name that no keep reaches.
CREATE OR REPLACE FUNCTION :"schema".fencing_give_back(
    p_name text, p_owner text, p_after bigint, p_hybrid boolean, OUT was boolean, OUT ended text, OUT taken boolean
)
LANGUAGE plpgsql AS $fencing$
BEGIN
    IF p_after OPERATOR(pg_catalog.=) 0
       AND pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
       AND pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'
    THEN
        DELETE FROM :"schema".fencing_ticket t
         WHERE t.name OPERATOR(pg_catalog.=) p_name AND t.owner OPERATOR(pg_catalog.=) p_owner AND t.ended IS NULL
           AND t.dies OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp();
        was := FOUND;
        IF was AND NOT EXISTS (SELECT FROM :"schema".fencing_ticket t WHERE t.name OPERATOR(pg_catalog.=) p_name) THEN
            RETURN;
        END IF;
    END IF;
    SELECT l.was, l.ended, l.taken INTO was, ended, taken
      FROM :"schema".fencing_leave(p_name, p_owner, p_after, p_hybrid, coalesce(was, false)) l;
END $fencing$;

-- As fencing_give_back, where others are in the line, or there was no such ticket. p_was: it is deleted already.
-- A line that is locked is not waited for where there is no ticket to end: callers that gave up would hold up renewals.
CREATE OR REPLACE FUNCTION :"schema".fencing_leave(
    p_name text, p_owner text, p_after bigint, p_hybrid boolean, p_was boolean,
    OUT was boolean, OUT ended text, OUT taken boolean
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_last bigint;
BEGIN
    was := p_was;
    IF was OR p_after > 0 THEN
        v_last := fencing_lock(p_name);
    ELSE
        PERFORM fencing_check();
        SELECT last INTO v_last FROM fencing_line WHERE name = p_name AND last >= 0 FOR UPDATE SKIP LOCKED;
    END IF;
    IF NOT was AND p_after > 0 THEN
        v_last := fencing_settle(p_name, v_last, p_owner, p_hybrid);
        UPDATE fencing_ticket t SET owner = '-' || p_owner, longest = p_after,
               dies = clock_timestamp() + p_after * interval '1 microsecond'
         WHERE t.name = p_name AND t.owner = p_owner AND t.ended IS NULL AND t.dies > clock_timestamp()
           AND t.token IS NOT NULL AND NOT EXISTS (
               SELECT FROM fencing_ticket p WHERE p.name = p_name AND p.owner = '-' || p_owner AND p.dies > clock_timestamp()
                  AND p.ended IS NULL
           );
        was := FOUND;
    END IF;
    IF NOT was AND v_last IS NOT NULL THEN
        DELETE FROM fencing_ticket t
         WHERE t.name = p_name AND t.owner = p_owner AND t.ended IS NULL AND t.dies > clock_timestamp();
        was := FOUND;
    END IF;
    IF v_last IS NOT NULL THEN PERFORM fencing_settle(p_name, v_last, p_owner, p_hybrid); END IF;
    IF NOT was THEN
        was := EXISTS (SELECT FROM fencing_ticket t
                        WHERE t.name = p_name AND t.owner = '-' || p_owner AND t.dies > clock_timestamp()
                          AND t.ended IS NULL);
        SELECT p.ended, p.taken INTO ended, taken FROM fencing_places(ARRAY[p_name], ARRAY[p_owner], ARRAY[0::bigint]) p;
    END IF;
END $fencing$;

-- Give the place of a ticket that holds to an heir. number NULL: it is gone.
CREATE OR REPLACE FUNCTION :"schema".fencing_pass_on(
    p_name text, p_owner text, p_heir text, p_label text, p_micros bigint, p_channel text, p_hybrid boolean,
    OUT token bigint, OUT permit integer, OUT number bigint, OUT look_after float8, OUT ended text, OUT taken boolean
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_last bigint := fencing_settle(p_name, fencing_lock(p_name), NULL, p_hybrid);
    v_heir text := p_heir;
BEGIN
    UPDATE fencing_ticket t SET owner = p_heir, label = p_label, channel = p_channel, longest = p_micros,
           dies = clock_timestamp() + p_micros * interval '1 microsecond',
           token = CASE WHEN t.mode = 'reader' THEN t.token ELSE fencing_token(v_last, p_hybrid, clock_timestamp()) END
     WHERE t.name = p_name AND t.owner = p_owner AND t.ended IS NULL AND t.dies > clock_timestamp() AND t.token IS NOT NULL
       AND NOT EXISTS (SELECT FROM fencing_ticket h WHERE h.name = p_name AND h.owner = p_heir AND h.ended IS NULL
                          AND h.dies > clock_timestamp())
    RETURNING t.token INTO token;
    IF token > v_last THEN UPDATE fencing_line SET last = token WHERE name = p_name; END IF;
    PERFORM fencing_live_on(ARRAY[p_name], ARRAY[p_heir], ARRAY[0::bigint], ARRAY[p_micros], false);
    IF NOT EXISTS (SELECT FROM fencing_ticket h WHERE h.name = p_name AND h.owner = p_heir) THEN v_heir := p_owner; END IF;
    SELECT p.token, p.permit, p.number, p.look_after, p.ended, p.taken
      INTO token, permit, number, look_after, ended, taken
      FROM fencing_places(ARRAY[p_name], ARRAY[v_heir], ARRAY[0::bigint]) p;
    IF v_heir <> p_heir THEN number := NULL; END IF;
END $fencing$;

-- End what holds with this token, and ring for its owners.
CREATE OR REPLACE FUNCTION :"schema".fencing_end(p_name text, p_token bigint, p_reason text, p_hybrid boolean)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_last bigint := fencing_settle(p_name, fencing_lock(p_name), NULL, p_hybrid);
    v_done boolean := false;
    v record;
BEGIN
    FOR v IN UPDATE fencing_ticket t SET ended = p_reason, dies = t.dies + interval '1 minute'
              WHERE t.name = p_name AND t.token = p_token AND t.ended IS NULL RETURNING t.owner, t.channel LOOP
        v_done := true;
        IF v.channel IS NOT NULL THEN
            PERFORM pg_notify(v.channel, left(encode(sha256(convert_to(v.owner, 'UTF8')), 'hex'), 32) || ' !' || p_reason);
        END IF;
    END LOOP;
    PERFORM fencing_settle(p_name, v_last, NULL, p_hybrid);
    RETURN v_done;
END $fencing$;

-- The living tickets of these names, as JSON: those that hold, then those that wait. No answer if it takes no writes.
CREATE OR REPLACE FUNCTION :"schema".fencing_seen(p_names text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT json_agg(coalesce((
        SELECT json_agg(json_build_array(
                   left(encode(sha256(convert_to(t.owner, 'UTF8')), 'hex'), 8), t.mode, t.width, t.token, t.permit,
                   extract(epoch FROM t.dies - clock_timestamp()), extract(epoch FROM clock_timestamp() - t.since), t.label
               ) ORDER BY t.token IS NULL, t.number)
          FROM fencing_ticket t WHERE t.name = q.name AND t.ended IS NULL AND t.dies > clock_timestamp()
    ), '[]') ORDER BY q.place)::text
      FROM unnest(p_names) WITH ORDINALITY q (name, place), fencing_check()
$fencing$;

CREATE OR REPLACE FUNCTION :"schema".fencing_names(p_prefix text, p_after text, p_limit integer) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT array_agg(name ORDER BY name) FROM (
        SELECT DISTINCT t.name FROM fencing_ticket t
         WHERE t.name >= p_prefix AND left(t.name, length(p_prefix)) = p_prefix AND t.name > p_after
         ORDER BY t.name LIMIT p_limit
    ) page
$fencing$;

-- Delete what has died, and lines that were free for long, whose tokens become the floor. Rows that are locked stay.
CREATE OR REPLACE FUNCTION :"schema".fencing_sweep(p_before bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_count bigint;
BEGIN
    PERFORM fencing_check();
    DELETE FROM fencing_ticket WHERE (name, number) IN (
        SELECT name, number FROM fencing_ticket WHERE dies < clock_timestamp() LIMIT 10000 FOR UPDATE SKIP LOCKED);
    INSERT INTO fencing_line VALUES ('', 0) ON CONFLICT DO NOTHING;
    WITH over AS (
        SELECT l.name FROM fencing_line l WHERE l.name <> '' AND l.last < p_before AND NOT EXISTS (
            SELECT FROM fencing_ticket t WHERE t.name = l.name
        ) LIMIT 10000 FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM fencing_line l USING over WHERE l.name = over.name RETURNING l.last
    ), floor AS (
        UPDATE fencing_line SET last = greatest(last, (SELECT max(last) FROM gone)) WHERE name = ''
    )
    SELECT count(*) INTO v_count FROM gone;
    RETURN v_count;
END $fencing$;
