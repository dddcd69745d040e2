-- Tables and functions of the PostgreSQL backend, in the schema :"schema".
--
-- These functions make every decision, for each mode: a lock or a writer holds a name alone, readers and permits share
-- it. Each statement in them takes its own snapshot: a function first locks the row of the name and then reads its line
-- of waiters, so that a release and a waiter that joins meanwhile see each other. The order is always the same: the
-- row, the shares, the line. Functions read clock_timestamp() after they have locked the row.
--
-- Bodies name no schema. A function that a client calls has its own search_path, which the caller's settings cannot
-- change, and the functions that it calls run under the same one. But SET costs as much as an UPDATE of a row: acquire
-- and release decide the common case without, and name the schema of every table, function and operator there.
-- A function whose arguments or answers change gets another name, so that an older client finds the one that it knows.

-- One row for each name. It stays when the name is free, because its token is the last one granted.
CREATE TABLE IF NOT EXISTS :"schema".fencing_lock (
    name       text COLLATE "C" PRIMARY KEY,
    owner      text,                          -- NULL: free. '': shared, and fencing_share has the owners
    token      bigint NOT NULL CHECK (token < 9007199254740992),
    expires_at timestamptz NOT NULL,          -- of the share that lasts longest, if it is shared
    mode       text,
    label      text
) WITH (fillfactor = 50);                     -- room for the next version of a row in its own page

-- What each reader has, and each owner of a permit. Shares of a name whose row has another owner are over.
CREATE TABLE IF NOT EXISTS :"schema".fencing_share (
    name       text COLLATE "C" NOT NULL,
    owner      text NOT NULL,
    token      bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    mode       text NOT NULL,
    permits    integer,                       -- how many there are, by this owner's claim
    permit     integer,
    label      text,
    PRIMARY KEY (name, owner)
) WITH (fillfactor = 50);

-- The floor: the highest token of all deleted rows, because a new row must begin above it. And how far the sweep got.
CREATE TABLE IF NOT EXISTS :"schema".fencing_floor (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    token    bigint NOT NULL,
    swept_to text COLLATE "C" NOT NULL,
    swept_at timestamptz NOT NULL
);
INSERT INTO :"schema".fencing_floor (token, swept_to, swept_at) VALUES (0, '', '-infinity') ON CONFLICT DO NOTHING;

-- The line of each name: its waiters in the order of their arrival, and how to wake them. A crash of the server empties
-- the table; a waiter joins again with its next try.
CREATE UNLOGGED TABLE IF NOT EXISTS :"schema".fencing_waiter (
    number   bigint NOT NULL,                 -- no sequence: a failover breaks a sequence of an unlogged table
    name     text COLLATE "C" NOT NULL,
    owner    text NOT NULL,
    seen     timestamptz NOT NULL,            -- last sign of life
    since    timestamptz NOT NULL DEFAULT clock_timestamp(),
    channel  text NOT NULL,                   -- of the waiter's client
    word     text NOT NULL,                   -- the waiter's ticket, which NOTIFY sends
    mode     text NOT NULL,
    permits  integer,
    label    text,
    PRIMARY KEY (name, number),
    UNIQUE (name, owner)
) WITH (fillfactor = 50);

-- What an operator wrote about the grants that it ended, for their holders. Renewals look there only when they are
-- refused. A crash of the server empties the table: then they are just refused.
CREATE UNLOGGED TABLE IF NOT EXISTS :"schema".fencing_revoked (
    name   text COLLATE "C" NOT NULL,
    owner  text NOT NULL,
    until  timestamptz NOT NULL,
    reason text NOT NULL,
    PRIMARY KEY (name, owner)
);

-- A snapshot of a whole transaction would show the line as it was before the row was locked. And a server that no
-- longer takes writes must not answer from what it remembers, because another server may have granted locks since.
CREATE OR REPLACE FUNCTION :"schema".fencing_check() RETURNS void
LANGUAGE plpgsql AS $fencing$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'fencing needs READ COMMITTED' USING ERRCODE = 'FS002';
    END IF;
    IF current_setting('transaction_read_only') = 'on' THEN
        RAISE EXCEPTION 'fencing needs a server that takes writes' USING ERRCODE = 'read_only_sql_transaction';
    END IF;
END $fencing$;

-- A grant or renewal must be on disk before the client gets the answer, even if the role or the database is set up
-- with a weaker synchronous_commit.
CREATE OR REPLACE FUNCTION :"schema".fencing_durable(p_before text) RETURNS void
LANGUAGE plpgsql AS $fencing$
BEGIN
    PERFORM set_config('synchronous_commit', CASE p_before WHEN 'remote_apply' THEN p_before ELSE 'on' END, true);
END $fencing$;

-- The token that follows p_last. A hybrid one counts ten microseconds, so that it has 15 digits until 2286. It costs no call: the planner puts its expression where it is called.
CREATE OR REPLACE FUNCTION :"schema".fencing_token(p_last bigint, p_hybrid boolean, p_now timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $fencing$
    SELECT greatest(p_last OPERATOR(pg_catalog.+) 1, CASE WHEN p_hybrid THEN
        floor(extract(epoch FROM p_now) OPERATOR(pg_catalog.*) 100000)::bigint END)
$fencing$;

-- Whether a waiter whose last sign of life was at p_seen has its place. It loses the place after three seconds, and if
-- that moment is more than three seconds in the future: the clock was set back since. It costs no call, either.
CREATE OR REPLACE FUNCTION :"schema".fencing_lives(p_seen timestamptz, p_now timestamptz) RETURNS boolean
LANGUAGE sql STABLE AS $fencing$
    SELECT p_seen > p_now - interval '3 seconds' AND p_seen <= p_now + interval '3 seconds'
$fencing$;

-- Lock the row of a name, and insert it first if it is missing; forget its shares that are over. Return who holds the
-- name (NULL: it is free, '': the owners of shares), and its last token. Read the floor after the insertion, not
-- before: the insertion waits for a sweep that is deleting the row, and that sweep raises the floor.
CREATE OR REPLACE FUNCTION :"schema".fencing_row(p_name text, OUT owner text, OUT token bigint)
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_expires_at timestamptz;
    v_now timestamptz;
    v_shared boolean;
BEGIN
    LOOP
        SELECT l.owner, l.token, l.expires_at INTO owner, token, v_expires_at
          FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO fencing_lock (name, token, expires_at) VALUES (p_name, -1, clock_timestamp())
            ON CONFLICT DO NOTHING;
    END LOOP;
    IF token < 0 THEN
        UPDATE fencing_lock l SET token = f.token FROM fencing_floor f WHERE l.name = p_name
            RETURNING l.token INTO STRICT token;
    END IF;
    v_now := clock_timestamp();
    IF v_expires_at <= v_now THEN owner := NULL; END IF;
    v_shared := coalesce(owner = '', false);
    DELETE FROM fencing_share s WHERE s.name = p_name AND (s.expires_at <= v_now OR NOT v_shared);
END $fencing$;

-- Put a waiter at the end of the line. One that has its place keeps it, and gives a sign of life.
CREATE OR REPLACE FUNCTION :"schema".fencing_stand(
    p_name text, p_owner text, p_channel text, p_word text, p_mode text, p_permits integer, p_label text
) RETURNS void
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    INSERT INTO fencing_waiter AS w (number, name, owner, seen, channel, word, mode, permits, label)
        SELECT coalesce(max(number), 0) + 1, p_name, p_owner, v_now, p_channel, p_word, p_mode, p_permits, p_label
          FROM fencing_waiter WHERE name = p_name
        ON CONFLICT (name, owner) DO UPDATE
        SET seen = v_now, channel = EXCLUDED.channel, word = EXCLUDED.word,
            number = CASE WHEN fencing_lives(w.seen, v_now) THEN w.number ELSE EXCLUDED.number END;
END $fencing$;

-- Seconds for which the first waiter ahead of an owner may be silent; NULL: no waiter is ahead, it is the owner's turn.
-- A reader does not wait for readers. An owner that has no place, or has lost it, stands behind all.
CREATE OR REPLACE FUNCTION :"schema".fencing_rival(p_name text, p_owner text, p_mode text) RETURNS double precision
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN (
        SELECT extract(epoch FROM w.seen - v_now) + 3 FROM fencing_waiter w
         WHERE w.name = p_name AND w.owner <> p_owner AND fencing_lives(w.seen, v_now)
           AND NOT (p_mode = 'reader' AND w.mode = 'reader')
           AND w.number < coalesce((
               SELECT m.number FROM fencing_waiter m
                WHERE m.name = p_name AND m.owner = p_owner AND fencing_lives(m.seen, v_now)
           ), 9223372036854775807)
         ORDER BY w.number LIMIT 1
    );
END $fencing$;

-- Seconds until a grant in p_mode fits beside what is held; NULL: it fits now. The calling function has locked the row.
CREATE OR REPLACE FUNCTION :"schema".fencing_full(p_name text, p_mode text, p_permits integer)
RETURNS double precision
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_row record;
    v_held record;
BEGIN
    SELECT l.owner, l.expires_at INTO v_row FROM fencing_lock l
     WHERE l.name = p_name AND l.owner IS NOT NULL AND l.expires_at > v_now;
    IF NOT FOUND THEN RETURN NULL; END IF;
    IF v_row.owner = '' AND p_mode IN ('reader', 'permit') THEN
        SELECT bool_and(s.mode = p_mode) AND (p_mode = 'reader' OR count(*) < p_permits) AS room,
               min(s.expires_at) AS first
          INTO v_held FROM fencing_share s WHERE s.name = p_name AND s.expires_at > v_now;
        IF coalesce(v_held.room, true) THEN RETURN NULL; END IF;
        RETURN extract(epoch FROM v_held.first - v_now);
    END IF;
    RETURN extract(epoch FROM v_row.expires_at - v_now);
END $fencing$;

-- Notify the waiter at the head of the line, if there is room for it. If it is a reader, so are all readers among the
-- first 64 waiters that have none of another kind ahead. After the grants of p_entered readers the line is so much
-- shorter: those that were not among the first 64 before are notified, and the head once more. Return whether the head
-- was notified. The calling function has locked the row.
CREATE OR REPLACE FUNCTION :"schema".fencing_wake(p_name text, p_entered integer) RETURNS boolean
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_head record;
BEGIN
    LOOP
        SELECT * INTO v_head FROM fencing_waiter w WHERE w.name = p_name ORDER BY w.number LIMIT 1;
        IF NOT FOUND THEN RETURN false; END IF;
        EXIT WHEN fencing_lives(v_head.seen, v_now);
        DELETE FROM fencing_waiter w WHERE w.name = p_name AND NOT fencing_lives(w.seen, v_now);
    END LOOP;
    IF fencing_full(p_name, v_head.mode, v_head.permits) IS NOT NULL THEN RETURN false; END IF;
    PERFORM pg_notify(v_head.channel, v_head.word);
    IF v_head.mode = 'reader' THEN
        PERFORM pg_notify(w.channel, w.word) FROM (
            SELECT f.channel, f.word, row_number() OVER line AS place, bool_and(f.mode = 'reader') OVER line AS open
              FROM (SELECT * FROM fencing_waiter WHERE name = p_name ORDER BY number LIMIT 64) f
            WINDOW line AS (ORDER BY f.number)
        ) w WHERE w.open AND w.place > greatest(1, 64 - coalesce(p_entered, 64));
    END IF;
    RETURN true;
END $fencing$;

-- After a share has ended or was renewed: let the row last as long as the others, or free it.
CREATE OR REPLACE FUNCTION :"schema".fencing_settle(p_name text) RETURNS void
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_last timestamptz;
BEGIN
    SELECT max(s.expires_at) INTO v_last FROM fencing_share s WHERE s.name = p_name AND s.expires_at > v_now;
    UPDATE fencing_lock l
       SET owner = CASE WHEN v_last IS NULL THEN NULL ELSE '' END, expires_at = coalesce(v_last, v_now)
     WHERE l.name = p_name AND l.owner = '';
END $fencing$;

-- Grant, repeat an earlier grant to the same owner, or refuse: then the token is NULL.
-- A waiter gives its channel. The try is its sign of life. If it was silent for too long, it joins the end of the line.
CREATE OR REPLACE FUNCTION :"schema".fencing_decide(
    p_name text, p_owner text, p_micros bigint, p_label text, p_hybrid boolean, p_mode text, p_permits integer,
    p_channel text, p_word text, OUT granted bigint, OUT seconds_left double precision, OUT permit integer
)
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_commit text := current_setting('synchronous_commit');
    v_shares boolean := p_mode IN ('reader', 'permit');
    v_now timestamptz := clock_timestamp();
    v_owner text;
    v_token bigint;
    v_expires_at timestamptz;
    v_line boolean;
BEGIN
    PERFORM fencing_check();

    -- While it has to wait, most calls end here: without locking the row, and without waiting for disk.
    SELECT l.owner, l.expires_at INTO v_owner, v_expires_at FROM fencing_lock l WHERE l.name = p_name;
    IF v_owner <> p_owner AND v_expires_at > v_now AND NOT (v_shares AND v_owner = '') THEN
        seconds_left := extract(epoch FROM v_expires_at - v_now);
        IF p_channel IS NULL THEN RETURN; END IF;
    ELSIF p_channel IS NOT NULL THEN
        seconds_left := fencing_rival(p_name, p_owner, p_mode);
    END IF;
    IF seconds_left IS NOT NULL THEN
        PERFORM set_config('synchronous_commit', 'off', true);
        UPDATE fencing_waiter w SET seen = v_now
         WHERE w.name = p_name AND w.owner = p_owner AND fencing_lives(w.seen, v_now);
        IF FOUND THEN RETURN; END IF;
        seconds_left := NULL;
    END IF;

    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM fencing_durable(v_commit);
    END IF;
    SELECT r.owner, r.token INTO v_owner, v_token FROM fencing_row(p_name) r;
    v_expires_at := clock_timestamp() + p_micros * interval '1 microsecond';
    IF v_owner = p_owner THEN
        UPDATE fencing_lock l SET expires_at = v_expires_at WHERE l.name = p_name;
        granted := v_token;
        RETURN;
    END IF;
    IF v_owner = '' THEN
        UPDATE fencing_share s SET expires_at = v_expires_at WHERE s.name = p_name AND s.owner = p_owner
            RETURNING s.token, s.permit INTO granted, permit;
        IF FOUND THEN
            PERFORM fencing_settle(p_name);
            RETURN;
        END IF;
    END IF;
    IF v_owner IS NOT NULL THEN seconds_left := fencing_full(p_name, p_mode, p_permits); END IF;
    v_line := EXISTS (SELECT FROM fencing_waiter w WHERE w.name = p_name);
    IF v_line AND seconds_left IS NULL THEN seconds_left := fencing_rival(p_name, p_owner, p_mode); END IF;
    IF seconds_left IS NOT NULL THEN
        IF p_channel IS NOT NULL THEN
            PERFORM fencing_stand(p_name, p_owner, p_channel, p_word, p_mode, p_permits, p_label);
        END IF;
        RETURN;
    END IF;

    IF p_mode = 'permit' THEN permit := 0; END IF;
    IF p_mode = 'reader' AND v_owner = '' THEN    -- readers who hold together have one token
        SELECT max(s.token) INTO granted FROM fencing_share s WHERE s.name = p_name;
    ELSIF p_mode = 'permit' AND v_owner = '' THEN -- the lowest free number: the first that is not at its place
        SELECT coalesce(min(t.place) FILTER (WHERE t.permit <> t.place), count(*)) INTO permit FROM (
            SELECT s.permit, row_number() OVER (ORDER BY s.permit) - 1 AS place FROM fencing_share s
             WHERE s.name = p_name
        ) t;
    END IF;
    granted := coalesce(granted, fencing_token(v_token, p_hybrid, clock_timestamp()));
    UPDATE fencing_lock l
       SET owner = CASE WHEN v_shares THEN '' ELSE p_owner END, token = greatest(l.token, granted), mode = p_mode,
           label = CASE WHEN v_shares THEN NULL ELSE p_label END,
           expires_at = greatest(v_expires_at, CASE WHEN v_owner = '' THEN l.expires_at END)
     WHERE l.name = p_name;
    IF v_shares THEN
        INSERT INTO fencing_share (name, owner, token, expires_at, mode, permits, permit, label)
            VALUES (p_name, p_owner, granted, v_expires_at, p_mode, p_permits, permit, p_label);
    END IF;
    IF v_line THEN
        DELETE FROM fencing_waiter w WHERE w.name = p_name AND w.owner = p_owner;
        IF v_shares THEN PERFORM fencing_wake(p_name, 1); END IF;
    END IF;
END $fencing$;

-- As fencing_decide, for a lock or a writer that does not wait. It asks fencing_decide unless the name is free, its
-- line is empty and its row can be locked at once.
CREATE OR REPLACE FUNCTION :"schema".fencing_acquire(
    p_name text, p_owner text, p_micros bigint, p_label text, p_hybrid boolean, p_mode text,
    OUT granted bigint, OUT seconds_left double precision, OUT permit integer
)
LANGUAGE plpgsql AS $fencing$
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
       AND pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'
       AND (pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'on'
            OR pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'remote_apply')
    THEN
        PERFORM FROM :"schema".fencing_lock l
          WHERE l.name OPERATOR(pg_catalog.=) p_name AND l.token OPERATOR(pg_catalog.>=) 0
            AND (l.owner IS NULL OR l.expires_at OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp())
            FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE :"schema".fencing_lock l
               SET owner = p_owner, label = p_label, mode = p_mode,
                   token = :"schema".fencing_token(l.token, p_hybrid, pg_catalog.clock_timestamp()),
                   expires_at = pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+)
                       (p_micros OPERATOR(pg_catalog.*) interval '1 microsecond')
             WHERE l.name OPERATOR(pg_catalog.=) p_name AND NOT EXISTS (
                 SELECT FROM :"schema".fencing_waiter w WHERE w.name OPERATOR(pg_catalog.=) p_name
             )
            RETURNING l.token INTO granted;
            IF granted IS NOT NULL THEN RETURN; END IF;
        END IF;
    END IF;
    SELECT d.granted, d.seconds_left, d.permit INTO granted, seconds_left, permit FROM :"schema".fencing_decide(
        p_name, p_owner, p_micros, p_label, p_hybrid, p_mode, NULL, NULL, NULL
    ) d;
END $fencing$;

-- As fencing_decide, or fencing_acquire without a channel; a grant also raises fences. All of it is one statement, so
-- that a client which freezes keeps nothing locked. p_raise has the statement of each fence's guard. Its parameters are
-- the resource, the token, the holder and the lock_timeout, and it returns the token and the holder of the fence then.
-- FS003: a fence cannot be raised; FS004: it is higher. The detail is JSON: which fence of them, and why.
CREATE OR REPLACE FUNCTION :"schema".fencing_acquire_fenced(
    p_name text, p_owner text, p_micros bigint, p_label text, p_hybrid boolean, p_mode text, p_channel text,
    p_word text, p_holder text, p_resources text[], p_raise text[], p_patience text,
    OUT granted bigint, OUT seconds_left double precision, OUT permit integer
)
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_token bigint;
    v_holder text;
BEGIN
    IF p_channel IS NULL THEN
        SELECT d.granted, d.seconds_left INTO granted, seconds_left
          FROM :"schema".fencing_acquire(p_name, p_owner, p_micros, p_label, p_hybrid, p_mode) d;
    ELSE
        SELECT d.granted, d.seconds_left INTO granted, seconds_left FROM :"schema".fencing_decide(
            p_name, p_owner, p_micros, p_label, p_hybrid, p_mode, NULL, p_channel, p_word
        ) d;
    END IF;
    IF granted IS NULL THEN RETURN; END IF;
    FOR i IN 1 .. pg_catalog.cardinality(p_raise) LOOP
        BEGIN
            EXECUTE p_raise[i] INTO STRICT v_token, v_holder USING p_resources[i], granted, p_holder, p_patience;
        EXCEPTION WHEN undefined_table OR invalid_schema_name OR insufficient_privilege OR undefined_column
            OR datatype_mismatch THEN
            RAISE EXCEPTION 'a fence cannot be raised'
                USING ERRCODE = 'FS003',
                      DETAIL = pg_catalog.json_build_array(i OPERATOR(pg_catalog.-) 1, SQLSTATE);
        END;
        IF v_token OPERATOR(pg_catalog.>) granted OR v_holder OPERATOR(pg_catalog.<>) p_holder THEN
            RAISE EXCEPTION 'a fence is higher' USING ERRCODE = 'FS004', DETAIL = pg_catalog.json_build_array(
                i OPERATOR(pg_catalog.-) 1, granted, v_token
            );
        END IF;
    END LOOP;
END $fencing$;

-- What a renewal or release of an owner without a grant returns: 'x' another owner holds the name alone, 's' others
-- share it, '0' it is free.
CREATE OR REPLACE FUNCTION :"schema".fencing_refusal(p_owner text, p_expires_at timestamptz, p_now timestamptz)
RETURNS text LANGUAGE sql STABLE AS $fencing$
    SELECT CASE WHEN p_owner IS NULL OR p_expires_at <= p_now THEN '0' WHEN p_owner = '' THEN 's' ELSE 'x' END
$fencing$;

-- Restart the ttl of every grant that has not expired. Return one character for each claim, in order: '1' renewed,
-- '?' another transaction keeps the row locked, or a refusal. This never creates or revives a grant. Locked rows are
-- skipped, unless there is patience: that many milliseconds to wait for all of them together.
CREATE OR REPLACE FUNCTION :"schema".fencing_renew(
    p_names text[], p_owners text[], p_micros text[], p_patience integer
) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_name text;
    v_mine text[];
    v_now timestamptz;
    v_renewed text[];
BEGIN
    PERFORM fencing_check();
    PERFORM fencing_durable(current_setting('synchronous_commit'));
    IF p_patience > 0 THEN
        PERFORM set_config('lock_timeout', p_patience || 'ms', true);
        FOR v_name IN SELECT DISTINCT n FROM unnest(p_names) n ORDER BY n LOOP
            BEGIN
                PERFORM FROM fencing_lock l WHERE l.name = v_name FOR UPDATE;
                v_mine := array_append(v_mine, v_name);
            EXCEPTION WHEN lock_not_available THEN
                PERFORM set_config('lock_timeout', '1ms', true);
            END;
        END LOOP;
    ELSE
        SELECT array_agg(name) INTO v_mine FROM (
            SELECT name FROM fencing_lock WHERE name = ANY (p_names) ORDER BY name FOR UPDATE SKIP LOCKED
        ) locked;
    END IF;
    v_now := clock_timestamp();
    WITH renewed AS (
        UPDATE fencing_lock l SET expires_at = v_now + c.micros::bigint * interval '1 microsecond'
          FROM unnest(p_names, p_owners, p_micros) AS c (name, owner, micros)
         WHERE l.name = c.name AND l.owner = c.owner AND l.expires_at > v_now AND l.name = ANY (v_mine)
        RETURNING l.owner || l.name AS claim
    )
    SELECT array_agg(claim) INTO v_renewed FROM renewed;
    IF v_renewed IS NULL OR cardinality(v_renewed) < cardinality(p_names) THEN
        WITH renewed AS (
            UPDATE fencing_share s SET expires_at = v_now + c.micros::bigint * interval '1 microsecond'
              FROM unnest(p_names, p_owners, p_micros) AS c (name, owner, micros), fencing_lock l
             WHERE s.name = c.name AND s.owner = c.owner AND s.expires_at > v_now AND s.name = ANY (v_mine)
               AND l.name = s.name AND l.owner = '' AND l.expires_at > v_now
            RETURNING s.name, s.owner || s.name AS claim, s.expires_at
        ), kept AS (
            UPDATE fencing_lock l SET expires_at = greatest(l.expires_at, last.expires_at)
              FROM (SELECT r.name, max(r.expires_at) AS expires_at FROM renewed r GROUP BY r.name) last
             WHERE l.name = last.name
        )
        SELECT v_renewed || array_agg(r.claim) INTO v_renewed FROM renewed r;
    END IF;
    RETURN (
        SELECT string_agg(
            CASE
                WHEN r.claim IS NOT NULL THEN '1'
                WHEN l.name IS NOT NULL AND m.name IS NULL THEN '?'
                ELSE fencing_refusal(l.owner, l.expires_at, v_now)
            END, '' ORDER BY c.place)
          FROM unnest(p_names, p_owners) WITH ORDINALITY AS c (name, owner, place)
          LEFT JOIN fencing_lock l ON l.name = c.name
          LEFT JOIN unnest(v_mine) AS m (name) ON m.name = c.name
          LEFT JOIN unnest(v_renewed) AS r (claim) ON r.claim = c.owner || c.name
    );
END $fencing$;

-- End the owner's grant and wake the head of the line. If a waiter was woken, the release does not wait for disk: it
-- gets there with the grant that follows at once. Otherwise it is as durable as the database is set up, because a
-- release that a crash undoes blocks the name for a ttl.
-- Return '1' if that has ended a grant; else what a renewal would have. An owner that holds nothing does not wait for a
-- row that another transaction has locked.
CREATE OR REPLACE FUNCTION :"schema".fencing_give_back(p_name text, p_owner text) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_now timestamptz;
    v_row record;
    v_held boolean;
BEGIN
    PERFORM fencing_check();
    SELECT l.owner, l.expires_at INTO v_row FROM fencing_lock l
     WHERE l.name = p_name AND l.owner IN (p_owner, '') FOR UPDATE;
    v_now := clock_timestamp();
    IF NOT FOUND THEN
        SELECT l.owner, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name;
        RETURN fencing_refusal(v_row.owner, v_row.expires_at, v_now);
    END IF;
    IF v_row.owner = p_owner THEN
        v_held := v_row.expires_at > v_now;
        UPDATE fencing_lock l SET owner = NULL, mode = NULL, label = NULL, expires_at = v_now WHERE l.name = p_name;
    ELSE
        DELETE FROM fencing_share s WHERE s.name = p_name AND s.owner = p_owner
            RETURNING s.expires_at > v_now INTO v_held;
        IF NOT FOUND THEN RETURN fencing_refusal(v_row.owner, v_row.expires_at, v_now); END IF;
        PERFORM fencing_settle(p_name);
    END IF;
    IF fencing_wake(p_name, NULL) THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
    IF v_held THEN RETURN '1'; END IF;
    RETURN CASE WHEN v_row.owner = p_owner THEN '0' ELSE fencing_refusal(v_row.owner, v_row.expires_at, v_now) END;
END $fencing$;

-- As fencing_give_back, for a lock or a writer. It asks fencing_give_back unless the line is empty and the row can be
-- locked at once.
CREATE OR REPLACE FUNCTION :"schema".fencing_release(p_name text, p_owner text) RETURNS text
LANGUAGE plpgsql AS $fencing$
DECLARE
    v_held boolean;
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
       AND pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'
    THEN
        SELECT l.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() INTO v_held
          FROM :"schema".fencing_lock l
          WHERE l.name OPERATOR(pg_catalog.=) p_name AND l.owner OPERATOR(pg_catalog.=) p_owner FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE :"schema".fencing_lock l
               SET owner = NULL, mode = NULL, label = NULL, expires_at = pg_catalog.clock_timestamp()
             WHERE l.name OPERATOR(pg_catalog.=) p_name AND NOT EXISTS (
                 SELECT FROM :"schema".fencing_waiter w WHERE w.name OPERATOR(pg_catalog.=) p_name
             );
            IF FOUND THEN RETURN CASE WHEN v_held THEN '1' ELSE '0' END; END IF;
        END IF;
    END IF;
    RETURN :"schema".fencing_give_back(p_name, p_owner);
END $fencing$;

-- Join the end of the line, unless the owner holds already. An owner that waits already keeps its place and gets the
-- new channel and ticket.
CREATE OR REPLACE FUNCTION :"schema".fencing_join(
    p_name text, p_owner text, p_channel text, p_word text, p_label text, p_mode text, p_permits integer
) RETURNS boolean LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_owner text;
BEGIN
    PERFORM fencing_check();
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT r.owner INTO v_owner FROM fencing_row(p_name) r;
    IF v_owner = p_owner OR EXISTS (SELECT FROM fencing_share s WHERE s.name = p_name AND s.owner = p_owner) THEN
        RETURN false;
    END IF;
    PERFORM fencing_stand(p_name, p_owner, p_channel, p_word, p_mode, p_permits, p_label);
    RETURN true;
END $fencing$;

-- Leave the line, and wake its head: it may have been the leaving waiter's turn, and those behind a writer may fit
-- beside the readers who hold.
CREATE OR REPLACE FUNCTION :"schema".fencing_leave(p_name text, p_owner text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
BEGIN
    PERFORM fencing_check();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    DELETE FROM fencing_waiter w WHERE w.name = p_name AND w.owner = p_owner;
    IF NOT FOUND THEN RETURN false; END IF;
    PERFORM fencing_wake(p_name, NULL);
    RETURN true;
END $fencing$;

-- Delete the rows of names that have been free for p_seconds, shares that ended so long ago, and waiters without a sign
-- of life for a minute. The highest deleted token becomes the floor, in the same transaction. Each sweep looks at up to
-- 10,000 rows, and at most one sweep runs in a minute for all clients together.
CREATE OR REPLACE FUNCTION :"schema".fencing_sweep(p_seconds double precision) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_from text;
    v_to text;
    v_gone integer;
    v_token bigint;
BEGIN
    PERFORM fencing_check();
    SELECT swept_to INTO v_from FROM fencing_floor
     WHERE swept_at <= v_now - interval '1 minute' OR swept_at > v_now FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN 0; END IF;
    SELECT max(name) INTO v_to FROM (
        SELECT name FROM fencing_lock WHERE name > v_from ORDER BY name LIMIT 10000
    ) page;
    WITH idle AS (
        SELECT name FROM fencing_lock
         WHERE name > v_from AND name <= v_to AND expires_at <= v_now - p_seconds * interval '1 second'
           FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM fencing_lock l USING idle WHERE l.name = idle.name RETURNING l.token
    )
    SELECT count(*), max(token) INTO v_gone, v_token FROM gone;
    UPDATE fencing_floor
       SET token = greatest(token, v_token), swept_to = coalesce(v_to, ''), swept_at = v_now;
    DELETE FROM fencing_share WHERE (name, owner) IN (
        SELECT name, owner FROM fencing_share
         WHERE expires_at <= v_now - greatest(p_seconds, 60) * interval '1 second' LIMIT 10000 FOR UPDATE SKIP LOCKED
    );
    DELETE FROM fencing_waiter WHERE (name, number) IN (
        SELECT name, number FROM fencing_waiter
         WHERE seen <= v_now - interval '1 minute' FOR UPDATE SKIP LOCKED
    );
    DELETE FROM fencing_revoked WHERE (name, owner) IN (
        SELECT name, owner FROM fencing_revoked WHERE until <= v_now LIMIT 10000 FOR UPDATE SKIP LOCKED
    );
    RETURN v_gone;
END $fencing$;

-- Who holds each of these names, and how many wait for it: a JSON array in the order of the names. A name has a holder
-- for each share, or the one that holds it alone.
CREATE OR REPLACE FUNCTION :"schema".fencing_held(p_names text[]) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM fencing_check();
    RETURN (
        WITH taken AS (
            SELECT l.name, l.owner, l.token, l.expires_at, l.label, l.mode FROM fencing_lock l
             WHERE l.name = ANY (p_names) AND l.owner IS NOT NULL AND l.expires_at > v_now
        ), holder AS (
            SELECT t.name, t.owner, t.token,
                   greatest(extract(epoch FROM t.expires_at - clock_timestamp()), 0)::double precision AS left,
                   t.label, t.mode, NULL AS permits, NULL AS permit
              FROM taken t WHERE t.owner <> ''
            UNION ALL
            SELECT s.name, s.owner, s.token,
                   greatest(extract(epoch FROM s.expires_at - clock_timestamp()), 0)::double precision,
                   s.label, s.mode, s.permits, s.permit
              FROM fencing_share s JOIN taken t ON t.name = s.name AND t.owner = ''
             WHERE s.name = ANY (p_names) AND s.expires_at > v_now
        ), holders AS (
            SELECT h.name, json_agg(h) AS holders
              FROM (SELECT * FROM holder ORDER BY name, permit, token) h GROUP BY h.name
        ), line AS (
            SELECT w.name, count(*) AS waiters FROM fencing_waiter w
             WHERE w.name = ANY (p_names) AND fencing_lives(w.seen, v_now)
             GROUP BY w.name
        )
        SELECT json_agg(page ORDER BY page.name) FROM (
            SELECT n.name, (extract(epoch FROM v_now) * 1000000)::bigint AS now,
                   h.holders, coalesce(w.waiters, 0) AS waiters
              FROM unnest(p_names) AS n (name) LEFT JOIN holders h USING (name) LEFT JOIN line w USING (name)
        ) page
    );
END $fencing$;

-- The holders of names from p_prefix on, or after p_after, as fencing_held describes them. A page reads up to ten times
-- p_limit rows, because most rows may be of free locks, and ends with the name that it read last.
CREATE OR REPLACE FUNCTION :"schema".fencing_list(
    p_prefix text, p_after text, p_limit integer, OUT page text, OUT next text
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_from text := coalesce(p_after, p_prefix);
    v_held text[];
BEGIN
    PERFORM fencing_check();
    WITH held AS (
        SELECT array_agg(h.name) AS names FROM (
            SELECT r.name FROM (
                SELECT l.name, l.owner, l.expires_at FROM fencing_lock l
                 WHERE l.name >= v_from AND l.name IS DISTINCT FROM p_after ORDER BY l.name LIMIT p_limit * 10
            ) r WHERE starts_with(r.name, p_prefix) AND r.owner IS NOT NULL AND r.expires_at > v_now
             ORDER BY r.name LIMIT p_limit
        ) h
    )
    SELECT h.names, CASE WHEN cardinality(h.names) = p_limit THEN h.names[p_limit] ELSE (
        SELECT l.name FROM fencing_lock l
         WHERE l.name >= v_from AND l.name IS DISTINCT FROM p_after ORDER BY l.name OFFSET p_limit * 10 - 1 LIMIT 1
    ) END INTO v_held, next FROM held h;
    IF NOT starts_with(next, p_prefix) THEN next := NULL; END IF;
    page := fencing_held(v_held);
END $fencing$;

-- The waiters of one name in the order of the line, as a JSON array.
CREATE OR REPLACE FUNCTION :"schema".fencing_line(p_name text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM fencing_check();
    RETURN (
        SELECT json_agg(json_build_object(
                   'owner', w.owner, 'mode', w.mode, 'permits', w.permits, 'label', w.label,
                   'waiting', extract(epoch FROM v_now - w.since)::double precision
               ) ORDER BY w.number)
          FROM fencing_waiter w WHERE w.name = p_name
           AND fencing_lives(w.seen, v_now)
    );
END $fencing$;

-- End every grant of a name that has this token, leave the reason for its holder, wake the head of the line, and
-- notify the clients that hold locks: a digest of the name, on the channel of the schema. The token of the row stays,
-- so the next one is higher.
CREATE OR REPLACE FUNCTION :"schema".fencing_revoke(p_name text, p_token bigint, p_reason text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_row record;
    v_now timestamptz;
BEGIN
    PERFORM fencing_check();
    SELECT l.owner, l.token, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    v_now := clock_timestamp();
    IF v_row.owner IS NULL OR v_row.expires_at <= v_now THEN RETURN false; END IF;
    IF v_row.owner <> '' THEN
        IF v_row.token <> p_token THEN RETURN false; END IF;
        UPDATE fencing_lock l SET owner = NULL, mode = NULL, label = NULL, expires_at = v_now WHERE l.name = p_name;
        INSERT INTO fencing_revoked (name, owner, until, reason)
            VALUES (p_name, v_row.owner, v_row.expires_at + interval '1 minute', p_reason)
            ON CONFLICT (name, owner) DO UPDATE SET until = EXCLUDED.until, reason = EXCLUDED.reason;
    ELSE
        WITH ended AS (
            DELETE FROM fencing_share s WHERE s.name = p_name AND s.token = p_token AND s.expires_at > v_now
            RETURNING s.owner, s.expires_at
        )
        INSERT INTO fencing_revoked (name, owner, until, reason)
            SELECT p_name, e.owner, e.expires_at + interval '1 minute', p_reason FROM ended e
            ON CONFLICT (name, owner) DO UPDATE SET until = EXCLUDED.until, reason = EXCLUDED.reason;
        IF NOT FOUND THEN RETURN false; END IF;
        PERFORM fencing_settle(p_name);
    END IF;
    PERFORM fencing_wake(p_name, NULL);
    PERFORM pg_notify(
        'fencing_revoked_' || left(encode(sha256(convert_to((current_schemas(false))[2], 'UTF8')), 'hex'), 32),
        encode(sha256(convert_to(p_name, 'UTF8')), 'hex')
    );
    RETURN true;
END $fencing$;

-- Pass the grant of one owner to another, in its mode and with its number, under a token of its own; readers keep theirs.
-- A call that is repeated finds p_to as the owner. If p_of does not hold, refusal is what a renewal returns.
CREATE OR REPLACE FUNCTION :"schema".fencing_transfer(
    p_name text, p_of text, p_to text, p_micros bigint, p_label text, p_hybrid boolean, p_reason text,
    OUT granted bigint, OUT permit integer, OUT refusal text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_row record;
    v_sharer text;
    v_mode text;
    v_now timestamptz;
    v_expires_at timestamptz;
BEGIN
    PERFORM fencing_check();
    PERFORM fencing_durable(current_setting('synchronous_commit'));
    SELECT l.owner, l.token, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    v_now := clock_timestamp();
    v_expires_at := v_now + p_micros * interval '1 microsecond';
    IF v_row.owner = p_to AND v_row.expires_at > v_now THEN
        UPDATE fencing_lock l SET expires_at = v_expires_at WHERE l.name = p_name;
        granted := v_row.token;
        RETURN;
    END IF;
    IF v_row.owner = '' THEN
        SELECT s.owner, s.token, s.permit, s.mode INTO v_sharer, granted, permit, v_mode FROM fencing_share s
         WHERE s.name = p_name AND s.owner IN (p_of, p_to) AND s.expires_at > v_now ORDER BY s.owner <> p_to LIMIT 1;
    END IF;
    IF v_sharer IS NOT NULL THEN
        IF v_sharer = p_of AND v_mode = 'permit' THEN
            granted := fencing_token(v_row.token, p_hybrid, v_now);
        END IF;
        UPDATE fencing_share s SET owner = p_to, token = granted, expires_at = v_expires_at, label = p_label
         WHERE s.name = p_name AND s.owner = v_sharer;
        UPDATE fencing_lock l SET token = greatest(l.token, granted) WHERE l.name = p_name;
        PERFORM fencing_settle(p_name);
        IF v_sharer = p_to THEN RETURN; END IF;
    ELSIF v_row.owner = p_of AND v_row.expires_at > v_now THEN
        granted := fencing_token(v_row.token, p_hybrid, v_now);
        UPDATE fencing_lock l SET owner = p_to, token = granted, expires_at = v_expires_at, label = p_label
         WHERE l.name = p_name;
    ELSE
        refusal := fencing_refusal(v_row.owner, v_row.expires_at, v_now);
        RETURN;
    END IF;
    INSERT INTO fencing_revoked (name, owner, until, reason)
        VALUES (p_name, p_of, v_row.expires_at + interval '1 minute', p_reason)
        ON CONFLICT (name, owner) DO UPDATE SET until = EXCLUDED.until, reason = EXCLUDED.reason;
END $fencing$;

-- What an operator wrote about grants that a renewal found gone: one text or NULL for each claim, in order.
CREATE OR REPLACE FUNCTION :"schema".fencing_reasons(p_names text[], p_owners text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT array_agg(r.reason ORDER BY c.place)
      FROM unnest(p_names, p_owners) WITH ORDINALITY AS c (name, owner, place)
      LEFT JOIN fencing_revoked r ON r.name = c.name AND r.owner = c.owner
$fencing$;

-- As fencing_decide, for readers that have places in the line of one name, all together. Return the token of each that
-- is granted, NULL for each that has to wait, and -1 for each that has no place: that one asks alone.
CREATE OR REPLACE FUNCTION :"schema".fencing_readers(
    p_name text, p_owners text[], p_micros text[], p_label text[], p_hybrid boolean,
    OUT granted bigint[], OUT seconds_left double precision
)
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_now timestamptz;
    v_row record;
    v_entered text[];
    v_waiting text[];
    v_token bigint;
BEGIN
    PERFORM fencing_check();
    <<entering>>
    BEGIN
        -- While they have to wait for a writer, calls end here: without locking the row, and without waiting for disk.
        seconds_left := fencing_full(p_name, 'reader', NULL);
        EXIT entering WHEN seconds_left IS NOT NULL;
        PERFORM fencing_durable(current_setting('synchronous_commit'));
        SELECT * INTO v_row FROM fencing_row(p_name);
        seconds_left := fencing_full(p_name, 'reader', NULL);
        EXIT entering WHEN seconds_left IS NOT NULL;
        seconds_left := 3;
        v_now := clock_timestamp();
        WITH entered AS (
            DELETE FROM fencing_waiter w
             WHERE w.name = p_name AND w.owner = ANY (p_owners) AND w.mode = 'reader' AND w.number < coalesce((
                   SELECT min(o.number) FROM fencing_waiter o
                    WHERE o.name = p_name AND o.mode <> 'reader' AND fencing_lives(o.seen, v_now)
               ), 9223372036854775807)
            RETURNING w.owner
        ) SELECT array_agg(e.owner) INTO v_entered FROM entered e;
        EXIT entering WHEN v_entered IS NULL;

        SELECT max(s.token) INTO v_token FROM fencing_share s WHERE s.name = p_name;
        v_token := coalesce(v_token, fencing_token(v_row.token, p_hybrid, v_now));
        INSERT INTO fencing_share (name, owner, token, expires_at, mode, label)
            SELECT p_name, c.owner, v_token, v_now + c.micros::bigint * interval '1 microsecond', 'reader', c.label
              FROM unnest(p_owners, p_micros, p_label) AS c (owner, micros, label)
             WHERE c.owner = ANY (v_entered);
        UPDATE fencing_lock l
           SET owner = '', token = greatest(l.token, v_token), mode = 'reader', label = NULL, expires_at = last.at
          FROM (SELECT max(s.expires_at) AS at FROM fencing_share s WHERE s.name = p_name) last WHERE l.name = p_name;
        PERFORM fencing_wake(p_name, cardinality(v_entered));
    END entering;

    IF v_entered IS NULL THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
    v_now := clock_timestamp();
    WITH waiting AS (
        UPDATE fencing_waiter w SET seen = v_now
         WHERE w.name = p_name AND w.owner = ANY (p_owners) AND fencing_lives(w.seen, v_now) RETURNING w.owner
    ) SELECT array_agg(w.owner) INTO v_waiting FROM waiting w;
    granted := (
        SELECT array_agg(
            CASE WHEN c.owner = ANY (v_entered) THEN v_token WHEN c.owner = ANY (v_waiting) THEN NULL ELSE -1 END
            ORDER BY c.place)
          FROM unnest(p_owners) WITH ORDINALITY AS c (owner, place)
    );
END $fencing$;
