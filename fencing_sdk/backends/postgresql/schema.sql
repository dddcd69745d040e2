-- Tables and functions of the PostgreSQL backend, in the schema :"schema".
--
-- These functions make every decision. Each statement in them takes its own snapshot: a function first locks the row
-- of the lock and then reads its line of waiters, so that a release and a waiter that joins meanwhile see each other.
-- The order is always the same: the lock's row, then the line. Functions read clock_timestamp() after they have locked
-- the row.
--
-- Bodies name no schema: each function has its own search_path, which the caller's settings cannot change. The two that
-- have none, because SET costs as much as an UPDATE of a row, name the schema of every table, function and operator.
-- A function whose arguments or answers change gets a new number, so that an older client finds the one that it knows.
-- A call of one function by another costs as much as an UPDATE of a row, too. So the functions that every lock calls,
-- acquire and release, look by themselves whether another function has something to do.

-- One row for each lock. It stays when the lock is free, because its token is the last one granted.
CREATE TABLE IF NOT EXISTS :"schema".fencing_lock (
    name       text COLLATE "C" PRIMARY KEY,
    owner      text,                          -- NULL: free
    token      bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    metadata   text
) WITH (fillfactor = 50);                     -- room for the next version of a row in its own page

-- The floor: the highest token of all deleted rows, because a new row must begin above it. And how far the sweep got.
CREATE TABLE IF NOT EXISTS :"schema".fencing_floor (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    token    bigint NOT NULL,
    swept_to text COLLATE "C" NOT NULL,
    swept_at timestamptz NOT NULL
);
INSERT INTO :"schema".fencing_floor (token, swept_to, swept_at) VALUES (0, '', '-infinity') ON CONFLICT DO NOTHING;

-- The line of each lock: its waiters in the order of their arrival, and how to wake them. A crash of the server empties
-- the table; a waiter joins again with its next try.
CREATE UNLOGGED TABLE IF NOT EXISTS :"schema".fencing_waiter (
    number  bigint NOT NULL,                  -- no sequence: a failover breaks a sequence of an unlogged table
    name    text COLLATE "C" NOT NULL,
    owner   text NOT NULL,
    seen    timestamptz NOT NULL,             -- last sign of life
    channel text NOT NULL,                    -- of the waiter's client
    word    text NOT NULL,                    -- the waiter's ticket, which NOTIFY sends
    PRIMARY KEY (name, number),
    UNIQUE (name, owner)
) WITH (fillfactor = 50);

-- A snapshot of a whole transaction would show the line as it was before the row was locked. And a server that takes
-- no writes any more must not answer from what it remembers, because another server may have granted locks since.
CREATE OR REPLACE FUNCTION :"schema".fencing_check_v1() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
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
CREATE OR REPLACE FUNCTION :"schema".fencing_durable_v1(p_before text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
BEGIN
    PERFORM set_config('synchronous_commit', CASE p_before WHEN 'remote_apply' THEN p_before ELSE 'on' END, true);
END $fencing$;

-- Lock the row of a lock, and insert it first if it is missing. Read the floor after the insertion, not before: the
-- insertion waits for a sweep that is deleting the row, and that sweep raises the floor.
CREATE OR REPLACE FUNCTION :"schema".fencing_row_v1(
    p_name text, OUT owner text, OUT token bigint, OUT expires_at timestamptz
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
BEGIN
    LOOP
        SELECT l.owner, l.token, l.expires_at INTO owner, token, expires_at
          FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO fencing_lock (name, token, expires_at) VALUES (p_name, -1, clock_timestamp())
            ON CONFLICT DO NOTHING;
    END LOOP;
    IF token < 0 THEN
        UPDATE fencing_lock l SET token = f.token FROM fencing_floor f WHERE l.name = p_name
            RETURNING l.token INTO STRICT token;
    END IF;
END $fencing$;

-- The waiter at the head of the line. Waiters without a sign of life for three seconds are removed. So are waiters
-- whose sign of life is more than three seconds in the future: the clock was set back since. The calling function has
-- locked the lock's row.
CREATE OR REPLACE FUNCTION :"schema".fencing_head_v1(
    p_name text, OUT owner text, OUT channel text, OUT word text, OUT seconds_left double precision
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_seen timestamptz;
BEGIN
    LOOP
        SELECT w.owner, w.channel, w.word, w.seen INTO owner, channel, word, v_seen
          FROM fencing_waiter w WHERE w.name = p_name ORDER BY w.number LIMIT 1;
        IF NOT FOUND THEN RETURN; END IF;
        seconds_left := extract(epoch FROM v_seen - v_now) + 3;
        IF seconds_left > 0 AND seconds_left <= 6 THEN RETURN; END IF;
        DELETE FROM fencing_waiter w WHERE w.name = p_name AND w.seen = v_seen;
        v_now := clock_timestamp();
    END LOOP;
END $fencing$;

-- Notify the waiter at the head of the line. Return whether there is one.
CREATE OR REPLACE FUNCTION :"schema".fencing_wake_v1(p_name text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_head record;
BEGIN
    SELECT h.channel, h.word INTO v_head FROM fencing_head_v1(p_name) h;
    IF v_head.channel IS NULL THEN RETURN false; END IF;
    PERFORM pg_notify(v_head.channel, v_head.word);
    RETURN true;
END $fencing$;

-- Grant, repeat an earlier grant to the same owner, or refuse: then the token is NULL.
-- A waiter gives its channel. The try is its sign of life. If the waiter was removed because it was silent for too
-- long, it joins the end of the line again.
CREATE OR REPLACE FUNCTION :"schema".fencing_acquire_v3(
    p_name text, p_owner text, p_micros bigint, p_metadata text, p_hybrid boolean, p_channel text, p_word text,
    p_mode text, OUT granted bigint, OUT seconds_left double precision
)
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_commit text := current_setting('synchronous_commit');
    v_now timestamptz;
    v_owner text;
    v_token bigint;
    v_expires_at timestamptz;
    v_head record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('transaction_read_only') = 'on'
    THEN PERFORM fencing_check_v1(); END IF;

    -- While another owner holds the lock, most calls end here: without locking the row, and without waiting for disk.
    SELECT l.owner, l.expires_at INTO v_owner, v_expires_at FROM fencing_lock l WHERE l.name = p_name;
    v_now := clock_timestamp();
    IF v_owner <> p_owner AND v_expires_at > v_now THEN
        seconds_left := extract(epoch FROM v_expires_at - v_now);
        IF p_channel IS NULL THEN RETURN; END IF;
        PERFORM set_config('synchronous_commit', 'off', true);
        UPDATE fencing_waiter SET seen = v_now WHERE name = p_name AND owner = p_owner;
        IF FOUND THEN RETURN; END IF;
    END IF;

    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM fencing_durable_v1(v_commit);
    END IF;
    SELECT l.owner, l.token, l.expires_at INTO v_owner, v_token, v_expires_at
      FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    IF NOT FOUND OR v_token < 0 THEN
        SELECT r.owner, r.token, r.expires_at INTO v_owner, v_token, v_expires_at FROM fencing_row_v1(p_name) r;
    END IF;
    v_now := clock_timestamp();
    IF v_owner = p_owner AND v_expires_at > v_now THEN
        UPDATE fencing_lock SET expires_at = v_now + p_micros * interval '1 microsecond' WHERE name = p_name;
        granted := v_token;
        RETURN;
    END IF;
    IF p_channel IS NOT NULL THEN
        INSERT INTO fencing_waiter (number, name, owner, seen, channel, word, metadata, mode)
            SELECT coalesce(max(number), 0) + 1, p_name, p_owner, v_now, p_channel, p_word, p_metadata, p_mode
              FROM fencing_waiter WHERE name = p_name
            ON CONFLICT (name, owner) DO UPDATE SET seen = EXCLUDED.seen;
    END IF;
    IF v_owner IS NOT NULL AND v_expires_at > v_now THEN
        seconds_left := extract(epoch FROM v_expires_at - v_now);
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM fencing_waiter WHERE name = p_name) THEN
        SELECT h.owner, h.seconds_left INTO v_head FROM fencing_head_v1(p_name) h;
        IF v_head.owner <> p_owner THEN
            seconds_left := v_head.seconds_left;
            RETURN;
        END IF;
        DELETE FROM fencing_waiter WHERE name = p_name AND owner = p_owner;
    END IF;

    granted := v_token + 1;
    IF p_hybrid THEN
        granted := greatest(granted, (extract(epoch FROM v_now) * 1000000)::bigint);
    END IF;
    IF granted >= 9007199254740992 THEN
        RAISE EXCEPTION 'the next token would not fit into 53 bits' USING ERRCODE = 'FS001';
    END IF;
    UPDATE fencing_lock
       SET owner = p_owner, token = granted, metadata = p_metadata, mode = p_mode,
           expires_at = v_now + p_micros * interval '1 microsecond'
     WHERE name = p_name;
END $fencing$;

-- Restart the ttl of every grant that has not expired. Return one character for each claim, in order: '1' renewed,
-- '0' gone, 'x' granted to another owner, '?' another transaction keeps the row locked. This never creates or revives
-- a grant. Locked rows are skipped, unless there is patience: that many milliseconds to wait for all of them together.
CREATE OR REPLACE FUNCTION :"schema".fencing_renew_v1(
    p_names text[], p_owners text[], p_micros text[], p_patience integer
) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_name text;
    v_mine text[];
    v_now timestamptz;
    v_renewed text[];
BEGIN
    PERFORM fencing_check_v1();
    PERFORM fencing_durable_v1(current_setting('synchronous_commit'));
    IF p_patience > 0 THEN
        PERFORM set_config('lock_timeout', p_patience || 'ms', true);
        FOR v_name IN SELECT DISTINCT n FROM unnest(p_names) n ORDER BY n LOOP
            BEGIN
                PERFORM 1 FROM fencing_lock WHERE name = v_name FOR UPDATE;
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
        RETURNING l.name
    )
    SELECT array_agg(name) INTO v_renewed FROM renewed;
    RETURN (
        SELECT string_agg(
            CASE
                WHEN l.owner = c.owner AND r.name IS NOT NULL THEN '1'
                WHEN l.name IS NULL THEN '0'
                WHEN m.name IS NULL THEN '?'
                WHEN l.owner <> c.owner AND l.expires_at > v_now THEN 'x'
                ELSE '0'
            END, '' ORDER BY c.place)
          FROM unnest(p_names, p_owners) WITH ORDINALITY AS c (name, owner, place)
          LEFT JOIN fencing_lock l ON l.name = c.name
          LEFT JOIN unnest(v_mine) AS m (name) ON m.name = c.name
          LEFT JOIN unnest(v_renewed) AS r (name) ON r.name = c.name
    );
END $fencing$;

-- End the owner's grant and wake the head of the line. If a waiter was woken, the release does not wait for disk: it
-- gets there with the grant that follows at once. Otherwise it is as durable as the database is set up, because a
-- release that a crash undoes blocks the lock for a ttl.
-- Return '1' if that has ended the grant; else what a renewal would have: '0' gone, 'x' granted to another owner.
CREATE OR REPLACE FUNCTION :"schema".fencing_release_v3(p_name text, p_owner text) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_held boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('transaction_read_only') = 'on'
    THEN PERFORM fencing_check_v1(); END IF;
    UPDATE fencing_lock l SET owner = NULL, metadata = NULL, expires_at = clock_timestamp()
      FROM (SELECT o.expires_at FROM fencing_lock o WHERE o.name = p_name AND o.owner = p_owner FOR UPDATE) former
     WHERE l.name = p_name
    RETURNING former.expires_at > clock_timestamp() INTO v_held;
    IF NOT FOUND THEN RETURN fencing_refused_v1(p_name); END IF;
    IF EXISTS (SELECT FROM fencing_waiter WHERE name = p_name) AND fencing_wake_v1(p_name) THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN CASE WHEN v_held THEN '1' ELSE '0' END;
END $fencing$;

-- What a release of an owner without a grant returns.
CREATE OR REPLACE FUNCTION :"schema".fencing_refused_v1(p_name text) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT CASE WHEN EXISTS (
        SELECT FROM fencing_lock l
         WHERE l.name = p_name AND l.owner IS NOT NULL AND l.expires_at > clock_timestamp()
    ) THEN 'x' ELSE '0' END
$fencing$;

-- The holder of a lock, or NULL if it is free.
CREATE OR REPLACE FUNCTION :"schema".fencing_inspect_v1(
    p_name text, OUT owner text, OUT token bigint, OUT seconds_left double precision, OUT metadata text
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
BEGIN
    PERFORM fencing_check_v1();
    SELECT l.owner, l.token, extract(epoch FROM l.expires_at - clock_timestamp()), l.metadata
      INTO owner, token, seconds_left, metadata
      FROM fencing_lock l WHERE l.name = p_name AND l.owner IS NOT NULL AND l.expires_at > clock_timestamp();
END $fencing$;

-- Delete the rows of locks that have been free for p_seconds, and waiters without a sign of life for a minute. The
-- highest deleted token becomes the floor, in the same transaction. Each sweep looks at up to 10,000 rows, and at most
-- one sweep runs in a minute for all clients together.
CREATE OR REPLACE FUNCTION :"schema".fencing_sweep_v1(p_seconds double precision) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_from text;
    v_to text;
    v_gone integer;
    v_token bigint;
BEGIN
    PERFORM fencing_check_v1();
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
    DELETE FROM fencing_waiter WHERE (name, number) IN (
        SELECT name, number FROM fencing_waiter
         WHERE seen <= v_now - interval '1 minute' FOR UPDATE SKIP LOCKED
    );
    RETURN v_gone;
END $fencing$;

-- Permits and readers, which share a name. While a name is shared, its row in fencing_lock has the owner '' and expires
-- with the share that lasts longest, so that the functions above refuse the lock by what they read anyway. Shares of a
-- name whose row has another owner are over: an operator may have taken the name away. The lock's row is the mutex here too.
CREATE TABLE IF NOT EXISTS :"schema".fencing_share (
    name       text COLLATE "C" NOT NULL,
    owner      text NOT NULL,
    token      bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    metadata   text,
    mode       text NOT NULL,
    permits    integer,                       -- how many there are, as this owner was told
    permit     integer,
    PRIMARY KEY (name, owner)
) WITH (fillfactor = 50);

ALTER TABLE :"schema".fencing_waiter ADD COLUMN IF NOT EXISTS mode text;      -- NULL: a lock
ALTER TABLE :"schema".fencing_waiter ADD COLUMN IF NOT EXISTS permits integer;
ALTER TABLE :"schema".fencing_waiter ADD COLUMN IF NOT EXISTS metadata text;
ALTER TABLE :"schema".fencing_lock ADD COLUMN IF NOT EXISTS mode text;        -- 'writer', or NULL: a lock

-- Whether a share fits beside those that are held. The calling function has locked the lock's row.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_fits_v1(p_name text, p_mode text, p_permits integer) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_owner text;
BEGIN
    SELECT l.owner INTO v_owner FROM fencing_lock l WHERE l.name = p_name AND l.expires_at > v_now;
    IF v_owner IS NULL THEN RETURN true; END IF;
    IF v_owner <> '' OR coalesce(p_mode, 'writer') = 'writer' THEN RETURN false; END IF;
    RETURN (
        SELECT coalesce(bool_and(s.mode = p_mode), true) AND (p_mode = 'reader' OR count(*) < p_permits)
          FROM fencing_share s WHERE s.name = p_name AND s.expires_at > v_now
    );
END $fencing$;

-- Notify the waiter at the head of the line, if there is room for it. If it is a reader, so are all readers among the
-- first 64 waiters that have none of another kind ahead. After the grants of p_entered readers the line is so much
-- shorter: those that were not among the first 64 before are notified, and the head once more.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_wake_v2(p_name text, p_entered integer) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_head record;
BEGIN
    SELECT h.channel, h.word, w.mode, w.permits INTO v_head
      FROM fencing_head_v1(p_name) h JOIN fencing_waiter w ON w.name = p_name AND w.owner = h.owner;
    IF v_head.channel IS NULL OR NOT fencing_share_fits_v1(p_name, v_head.mode, v_head.permits) THEN
        RETURN false;
    END IF;
    PERFORM pg_notify(v_head.channel, v_head.word);
    IF v_head.mode = 'reader' THEN
        PERFORM pg_notify(w.channel, w.word) FROM (
            SELECT f.channel, f.word, row_number() OVER line AS place,
                   bool_and(f.mode IS NOT DISTINCT FROM 'reader') OVER line AS open
              FROM (SELECT * FROM fencing_waiter WHERE name = p_name ORDER BY number LIMIT 64) f
            WINDOW line AS (ORDER BY f.number)
        ) w WHERE w.open AND w.place > greatest(1, 64 - coalesce(p_entered, 64));
    END IF;
    RETURN true;
END $fencing$;

-- After a share has ended: let the row last as long as the others, or free it.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_settle_v1(p_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_last timestamptz;
BEGIN
    SELECT max(s.expires_at) INTO v_last FROM fencing_share s WHERE s.name = p_name AND s.expires_at > v_now;
    UPDATE fencing_lock l
       SET owner = CASE WHEN v_last IS NULL THEN NULL ELSE '' END, expires_at = coalesce(v_last, v_now)
     WHERE l.name = p_name AND l.owner = '';
END $fencing$;

-- As fencing_acquire_v1, for a share. A reader waits for those ahead of it that are no readers.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_acquire_v1(
    p_name text, p_owner text, p_micros bigint, p_metadata text, p_hybrid boolean, p_channel text, p_word text,
    p_mode text, p_permits integer,
    OUT granted bigint, OUT seconds_left double precision, OUT permit integer
)
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_commit text := current_setting('synchronous_commit');
    v_ttl interval := p_micros * interval '1 microsecond';
    v_reader boolean := p_mode = 'reader';
    v_now timestamptz;
    v_row record;
    v_held record;
    v_ahead timestamptz;
    v_line boolean;
    v_shared boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('transaction_read_only') = 'on'
    THEN PERFORM fencing_check_v1(); END IF;

    -- While a waiter has to wait, most calls end here: without locking the row, and without waiting for disk.
    IF p_channel IS NOT NULL THEN
        v_now := clock_timestamp();
        SELECT l.owner, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name;
        IF v_row.owner <> '' AND v_row.expires_at > v_now THEN
            seconds_left := extract(epoch FROM v_row.expires_at - v_now);
        ELSE
            PERFORM FROM fencing_waiter w
              WHERE w.name = p_name AND w.seen BETWEEN v_now - interval '3 seconds' AND v_now + interval '3 seconds'
                AND w.number < (SELECT m.number FROM fencing_waiter m WHERE m.name = p_name AND m.owner = p_owner)
                AND NOT (v_reader AND w.mode IS NOT DISTINCT FROM 'reader') LIMIT 1;
            IF FOUND THEN seconds_left := 3; END IF;
        END IF;
        IF seconds_left IS NOT NULL THEN
            PERFORM set_config('synchronous_commit', 'off', true);
            UPDATE fencing_waiter w SET seen = v_now WHERE w.name = p_name AND w.owner = p_owner;
            IF FOUND THEN RETURN; END IF;
            PERFORM set_config('synchronous_commit', v_commit, true);
            seconds_left := NULL;
        END IF;
    END IF;

    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM fencing_durable_v1(current_setting('synchronous_commit'));
    END IF;
    SELECT l.owner, l.token, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    IF NOT FOUND OR v_row.token < 0 THEN
        SELECT r.owner, r.token, r.expires_at INTO v_row FROM fencing_row_v1(p_name) r;
    END IF;
    v_now := clock_timestamp();
    v_shared := v_row.owner = '' AND v_row.expires_at > v_now;
    IF v_shared THEN
        UPDATE fencing_share s SET expires_at = v_now + v_ttl
         WHERE s.name = p_name AND s.owner = p_owner AND s.expires_at > v_now
        RETURNING s.token, s.permit INTO granted, permit;
        IF FOUND THEN
            PERFORM fencing_share_settle_v1(p_name);
            RETURN;
        END IF;
    END IF;
    DELETE FROM fencing_share s WHERE s.name = p_name AND (s.expires_at <= v_now OR v_shared IS NOT TRUE);
    IF p_channel IS NOT NULL THEN
        INSERT INTO fencing_waiter (number, name, owner, seen, channel, word, metadata, mode, permits)
            SELECT coalesce(max(number), 0) + 1, p_name, p_owner, v_now, p_channel, p_word, p_metadata, p_mode,
                   p_permits
              FROM fencing_waiter WHERE name = p_name
            ON CONFLICT (name, owner) DO UPDATE SET seen = EXCLUDED.seen;
    END IF;
    IF v_row.owner <> '' AND v_row.expires_at > v_now THEN
        seconds_left := extract(epoch FROM v_row.expires_at - v_now);
        RETURN;
    END IF;
    SELECT count(*) AS number, min(s.expires_at) AS first, max(s.token) AS token,
           coalesce(bool_and(s.mode = p_mode), true) AND (v_reader OR count(*) < p_permits) AS room
      INTO v_held FROM fencing_share s WHERE s.name = p_name;
    IF NOT v_held.room THEN
        seconds_left := extract(epoch FROM v_held.first - v_now);
        RETURN;
    END IF;
    v_line := EXISTS (SELECT FROM fencing_waiter w WHERE w.name = p_name);
    IF v_line THEN
        SELECT w.seen INTO v_ahead FROM fencing_waiter w
         WHERE w.name = p_name AND w.owner <> p_owner
           AND w.seen > v_now - interval '3 seconds' AND w.seen <= v_now + interval '3 seconds'
           AND w.number < coalesce(
               (SELECT m.number FROM fencing_waiter m WHERE m.name = p_name AND m.owner = p_owner), 9223372036854775807)
           AND NOT (v_reader AND w.mode IS NOT DISTINCT FROM 'reader')
         ORDER BY w.number LIMIT 1;
        IF FOUND THEN
            seconds_left := 3 + extract(epoch FROM v_ahead - v_now);
            RETURN;
        END IF;
        DELETE FROM fencing_waiter w WHERE w.name = p_name AND w.owner = p_owner;
    END IF;

    IF v_reader AND v_held.number > 0 THEN
        granted := v_held.token;
    ELSE
        granted := v_row.token + 1;
        IF p_hybrid THEN
            granted := greatest(granted, (extract(epoch FROM v_now) * 1000000)::bigint);
        END IF;
        IF granted >= 9007199254740992 THEN
            RAISE EXCEPTION 'the next token would not fit into 53 bits' USING ERRCODE = 'FS001';
        END IF;
    END IF;
    IF p_permits IS NOT NULL THEN             -- the lowest number that none has: the first that is not at its place
        permit := v_held.number;
        IF permit > 0 THEN
            SELECT coalesce(min(t.place), v_held.number) INTO permit FROM (
                SELECT s.permit, row_number() OVER (ORDER BY s.permit) - 1 AS place FROM fencing_share s
                 WHERE s.name = p_name
            ) t WHERE t.permit <> t.place;
        END IF;
    END IF;
    INSERT INTO fencing_share (name, owner, token, expires_at, metadata, mode, permits, permit)
        VALUES (p_name, p_owner, granted, v_now + v_ttl, p_metadata, p_mode, p_permits, permit);
    UPDATE fencing_lock l
       SET owner = '', token = greatest(l.token, granted), metadata = NULL,
           expires_at = CASE WHEN v_shared THEN greatest(l.expires_at, v_now + v_ttl) ELSE v_now + v_ttl END
     WHERE l.name = p_name;
    IF v_line THEN PERFORM fencing_share_wake_v2(p_name, 1); END IF;
END $fencing$;

-- As fencing_renew_v1, for shares: the characters mean the same.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_renew_v1(
    p_names text[], p_owners text[], p_micros text[], p_patience integer
) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_name text;
    v_mine text[];
    v_now timestamptz;
    v_renewed text[];
BEGIN
    PERFORM fencing_check_v1();
    PERFORM fencing_durable_v1(current_setting('synchronous_commit'));
    PERFORM set_config('lock_timeout', greatest(p_patience, 1) || 'ms', true);
    FOR v_name IN SELECT DISTINCT n FROM unnest(p_names) n ORDER BY n LOOP
        BEGIN
            PERFORM 1 FROM fencing_lock WHERE name = v_name FOR UPDATE;
            v_mine := array_append(v_mine, v_name);
        EXCEPTION WHEN lock_not_available THEN
            PERFORM set_config('lock_timeout', '1ms', true);
        END;
    END LOOP;
    v_now := clock_timestamp();
    WITH renewed AS (
        UPDATE fencing_share s SET expires_at = v_now + c.micros::bigint * interval '1 microsecond'
          FROM unnest(p_names, p_owners, p_micros) AS c (name, owner, micros), fencing_lock l
         WHERE s.name = c.name AND s.owner = c.owner AND s.expires_at > v_now AND s.name = ANY (v_mine)
           AND l.name = s.name AND l.owner = '' AND l.expires_at > v_now
        RETURNING s.owner
    )
    SELECT array_agg(owner) INTO v_renewed FROM renewed;
    UPDATE fencing_lock l SET expires_at = greatest(l.expires_at, last.expires_at)
      FROM (
        SELECT s.name, max(s.expires_at) AS expires_at FROM fencing_share s
         WHERE s.name = ANY (v_mine) AND s.owner = ANY (v_renewed) GROUP BY s.name
      ) last WHERE l.name = last.name;
    RETURN (
        SELECT string_agg(
            CASE
                WHEN c.owner = ANY (v_renewed) THEN '1'
                WHEN l.name IS NULL THEN '0'
                WHEN c.name <> ALL (coalesce(v_mine, '{}')) THEN '?'
                WHEN l.owner <> '' AND l.expires_at > v_now THEN 'x'
                ELSE '0'
            END, '' ORDER BY c.place)
          FROM unnest(p_names, p_owners) WITH ORDINALITY AS c (name, owner, place)
          LEFT JOIN fencing_lock l ON l.name = c.name
    );
END $fencing$;

-- As fencing_release_v3, for a share and for a writer.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_release_v2(p_name text, p_owner text) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_owner text;
    v_expires_at timestamptz;
    v_held boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('transaction_read_only') = 'on'
    THEN PERFORM fencing_check_v1(); END IF;
    SELECT l.owner, l.expires_at INTO v_owner, v_expires_at FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    IF v_owner = p_owner THEN
        v_held := v_expires_at > clock_timestamp();
        UPDATE fencing_lock l SET owner = NULL, metadata = NULL, expires_at = clock_timestamp() WHERE l.name = p_name;
    ELSE
        DELETE FROM fencing_share s WHERE s.name = p_name AND s.owner = p_owner
        RETURNING v_owner = '' AND s.expires_at > clock_timestamp() INTO v_held;
        IF NOT FOUND THEN RETURN CASE WHEN v_owner = '' THEN '0' ELSE fencing_refused_v1(p_name) END; END IF;
        IF EXISTS (SELECT FROM fencing_share s WHERE s.name = p_name) THEN
            PERFORM fencing_share_settle_v1(p_name);
        ELSE
            UPDATE fencing_lock l SET owner = NULL, expires_at = clock_timestamp()
             WHERE l.name = p_name AND l.owner = '';
        END IF;
    END IF;
    IF EXISTS (SELECT FROM fencing_waiter w WHERE w.name = p_name) AND fencing_share_wake_v2(p_name, NULL) THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF v_held THEN RETURN '1'; END IF;
    RETURN CASE WHEN v_owner IN ('', p_owner) THEN '0' ELSE fencing_refused_v1(p_name) END;
END $fencing$;

-- Join the end of the line, unless the owner holds the lock or a share. An owner that waits already keeps its place and
-- gets the new channel and ticket.
CREATE OR REPLACE FUNCTION :"schema".fencing_join_v2(
    p_name text, p_owner text, p_channel text, p_word text, p_metadata text, p_mode text, p_permits integer
) RETURNS boolean LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_row record;
BEGIN
    PERFORM fencing_check_v1();
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT * INTO v_row FROM fencing_row_v1(p_name);
    IF v_row.owner = p_owner AND v_row.expires_at > clock_timestamp() OR v_row.owner = '' AND EXISTS (
        SELECT FROM fencing_share s
         WHERE s.name = p_name AND s.owner = p_owner AND s.expires_at > clock_timestamp()
    ) THEN RETURN false; END IF;
    INSERT INTO fencing_waiter (number, name, owner, seen, channel, word, metadata, mode, permits)
        SELECT coalesce(max(number), 0) + 1, p_name, p_owner, clock_timestamp(), p_channel, p_word, p_metadata, p_mode,
               p_permits
          FROM fencing_waiter WHERE name = p_name
        ON CONFLICT (name, owner) DO UPDATE
        SET seen = EXCLUDED.seen, channel = EXCLUDED.channel, word = EXCLUDED.word;
    RETURN true;
END $fencing$;

-- Leave the line, whatever the mode: it may have been the leaving waiter's turn, and those behind a lock or a writer may
-- fit beside those who hold.
CREATE OR REPLACE FUNCTION :"schema".fencing_share_leave_v1(p_name text, p_owner text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
BEGIN
    PERFORM fencing_check_v1();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM 1 FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    DELETE FROM fencing_waiter w WHERE w.name = p_name AND w.owner = p_owner;
    IF NOT FOUND THEN RETURN false; END IF;
    PERFORM fencing_share_wake_v2(p_name, NULL);
    RETURN true;
END $fencing$;

-- As fencing_sweep_v1, and delete the shares that ended so long ago.
CREATE OR REPLACE FUNCTION :"schema".fencing_sweep_v2(p_seconds double precision) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
BEGIN
    DELETE FROM fencing_share WHERE (name, owner) IN (
        SELECT name, owner FROM fencing_share
         WHERE expires_at <= clock_timestamp() - greatest(p_seconds, 60) * interval '1 second'
         LIMIT 10000 FOR UPDATE SKIP LOCKED
    );
    RETURN fencing_sweep_v1(p_seconds);
END $fencing$;

-- What operators ask. When a waiter joined; and what an operator wrote about the grants that it ended, for their holders.
-- Renewals look there only when they are refused. A crash of the server empties the table: then they are just refused.
ALTER TABLE :"schema".fencing_waiter ADD COLUMN IF NOT EXISTS since timestamptz DEFAULT clock_timestamp();
CREATE UNLOGGED TABLE IF NOT EXISTS :"schema".fencing_revoked (
    name   text COLLATE "C" NOT NULL,
    owner  text NOT NULL,
    until  timestamptz NOT NULL,
    reason text NOT NULL,
    PRIMARY KEY (name, owner)
);

-- Who holds each of these names, and how many wait for it: a JSON array in the order of the names. A name has a holder for
-- each share, or the one that holds it alone.
CREATE OR REPLACE FUNCTION :"schema".fencing_held_v2(p_names text[]) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM fencing_check_v1();
    RETURN (
        WITH taken AS (
            SELECT l.name, l.owner, l.token, l.expires_at, l.metadata, l.mode FROM fencing_lock l
             WHERE l.name = ANY (p_names) AND l.owner IS NOT NULL AND l.expires_at > v_now
        ), holder AS (
            SELECT t.name, t.owner, t.token,
                   greatest(extract(epoch FROM t.expires_at - clock_timestamp()), 0)::double precision AS left,
                   t.metadata, coalesce(t.mode, 'lock') AS mode, NULL AS permits, NULL AS permit
              FROM taken t WHERE t.owner <> ''
            UNION ALL
            SELECT s.name, s.owner, s.token,
                   greatest(extract(epoch FROM s.expires_at - clock_timestamp()), 0)::double precision,
                   s.metadata, s.mode, s.permits, s.permit
              FROM fencing_share s JOIN taken t ON t.name = s.name AND t.owner = ''
             WHERE s.name = ANY (p_names) AND s.expires_at > v_now
        ), holders AS (
            SELECT h.name, json_agg(h) AS holders
              FROM (SELECT * FROM holder ORDER BY name, permit, token) h GROUP BY h.name
        ), line AS (
            SELECT w.name, count(*) AS waiters FROM fencing_waiter w
             WHERE w.name = ANY (p_names) AND w.seen BETWEEN v_now - interval '3 seconds' AND v_now + interval '3 seconds'
             GROUP BY w.name
        )
        SELECT json_agg(told ORDER BY told.name) FROM (
            SELECT n.name, (extract(epoch FROM v_now) * 1000000)::bigint AS now,
                   h.holders, coalesce(w.waiters, 0) AS waiters
              FROM unnest(p_names) AS n (name) LEFT JOIN holders h USING (name) LEFT JOIN line w USING (name)
        ) told
    );
END $fencing$;

-- The holders of names from p_prefix on, or after p_after, as fencing_held_v2 tells them. A page reads up to ten times
-- p_limit rows, because most rows may be of free locks, and ends with the name that it read last.
CREATE OR REPLACE FUNCTION :"schema".fencing_list_v1(
    p_prefix text, p_after text, p_limit integer, OUT page text, OUT next text
)
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_from text := coalesce(p_after, p_prefix);
    v_held text[];
BEGIN
    PERFORM fencing_check_v1();
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
    page := fencing_held_v2(v_held);
END $fencing$;

-- What earlier versions asked about one name, as fencing_held_v2 tells it.
CREATE OR REPLACE FUNCTION :"schema".fencing_held_v1(p_name text) RETURNS json
LANGUAGE sql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT fencing_held_v2(ARRAY[p_name])::json -> 0
$fencing$;
CREATE OR REPLACE FUNCTION :"schema".fencing_holders_v1(p_name text) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT fencing_held_v1(p_name) ->> 'holders'
$fencing$;

-- The waiters of one name in the order of the line, as a JSON array.
CREATE OR REPLACE FUNCTION :"schema".fencing_line_v1(p_name text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM fencing_check_v1();
    RETURN (
        SELECT json_agg(json_build_object(
                   'owner', w.owner, 'mode', w.mode, 'permits', w.permits, 'metadata', w.metadata,
                   'waiting', extract(epoch FROM v_now - w.since)::double precision
               ) ORDER BY w.number)
          FROM fencing_waiter w WHERE w.name = p_name
           AND w.seen BETWEEN v_now - interval '3 seconds' AND v_now + interval '3 seconds'
    );
END $fencing$;

-- End every grant of a name that has this token, leave the reason for its holder, wake the head of the line, and
-- tell the clients that hold locks: a digest of the name, on the channel of the schema. The token of the row stays, so
-- the next one is higher.
CREATE OR REPLACE FUNCTION :"schema".fencing_revoke_v2(p_name text, p_token bigint, p_reason text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_row record;
    v_now timestamptz;
BEGIN
    PERFORM fencing_check_v1();
    SELECT l.owner, l.token, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
    v_now := clock_timestamp();
    IF v_row.owner IS NULL OR v_row.expires_at <= v_now THEN RETURN false; END IF;
    DELETE FROM fencing_revoked WHERE (name, owner) IN (
        SELECT name, owner FROM fencing_revoked WHERE until <= v_now FOR UPDATE SKIP LOCKED
    );
    IF v_row.owner <> '' THEN
        IF v_row.token <> p_token THEN RETURN false; END IF;
        UPDATE fencing_lock l SET owner = NULL, metadata = NULL, expires_at = v_now WHERE l.name = p_name;
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
        PERFORM fencing_share_settle_v1(p_name);
    END IF;
    PERFORM fencing_share_wake_v2(p_name, NULL);
    PERFORM pg_notify(
        'fencing_revoked_' || left(encode(sha256(convert_to((current_schemas(false))[2], 'UTF8')), 'hex'), 32),
        encode(sha256(convert_to(p_name, 'UTF8')), 'hex')
    );
    RETURN true;
END $fencing$;

CREATE OR REPLACE FUNCTION :"schema".fencing_revoke_v1(p_name text, p_token bigint, p_reason text) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT fencing_revoke_v2(p_name, p_token, p_reason)
$fencing$;

-- What an operator wrote about grants that a renewal found gone: one text or NULL for each claim, in order.
CREATE OR REPLACE FUNCTION :"schema".fencing_reasons_v1(p_names text[], p_owners text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, :"schema", pg_temp AS $fencing$
    SELECT array_agg(r.reason ORDER BY c.place)
      FROM unnest(p_names, p_owners) WITH ORDINALITY AS c (name, owner, place)
      LEFT JOIN fencing_revoked r ON r.name = c.name AND r.owner = c.owner
$fencing$;

-- As fencing_acquire_v3, which decides unless the lock is free, its line is empty and its row can be locked at once.
CREATE OR REPLACE FUNCTION :"schema".fencing_acquire_v4(
    p_name text, p_owner text, p_micros bigint, p_metadata text, p_hybrid boolean, p_channel text, p_word text,
    p_mode text, OUT granted bigint, OUT seconds_left double precision
)
LANGUAGE plpgsql AS $fencing$
BEGIN
    IF p_channel IS NULL
       AND pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
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
               SET owner = p_owner, metadata = p_metadata, mode = p_mode,
                   token = greatest(l.token OPERATOR(pg_catalog.+) 1, CASE WHEN p_hybrid THEN
                       (extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::bigint END),
                   expires_at = pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+)
                       (p_micros OPERATOR(pg_catalog.*) interval '1 microsecond')
             WHERE l.name OPERATOR(pg_catalog.=) p_name AND NOT EXISTS (
                 SELECT FROM :"schema".fencing_waiter w WHERE w.name OPERATOR(pg_catalog.=) p_name
             )
            RETURNING l.token INTO granted;
            IF granted OPERATOR(pg_catalog.>=) 9007199254740992 THEN
                RAISE EXCEPTION 'the next token would not fit into 53 bits' USING ERRCODE = 'FS001';
            END IF;
            IF granted IS NOT NULL THEN RETURN; END IF;
        END IF;
    END IF;
    SELECT a.granted, a.seconds_left INTO granted, seconds_left FROM :"schema".fencing_acquire_v3(
        p_name, p_owner, p_micros, p_metadata, p_hybrid, p_channel, p_word, p_mode
    ) a;
END $fencing$;

-- As fencing_release_v3, which decides unless the line is empty and the row can be locked at once.
CREATE OR REPLACE FUNCTION :"schema".fencing_release_v4(p_name text, p_owner text) RETURNS text
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
            UPDATE :"schema".fencing_lock l SET owner = NULL, metadata = NULL, expires_at = pg_catalog.clock_timestamp()
             WHERE l.name OPERATOR(pg_catalog.=) p_name AND NOT EXISTS (
                 SELECT FROM :"schema".fencing_waiter w WHERE w.name OPERATOR(pg_catalog.=) p_name
             );
            IF FOUND THEN RETURN CASE WHEN v_held THEN '1' ELSE '0' END; END IF;
        END IF;
    END IF;
    RETURN :"schema".fencing_release_v3(p_name, p_owner);
END $fencing$;

-- As fencing_share_acquire_v1, for readers that have places in the line of one name, all together. Return the token of
-- each that is granted, NULL for each that has to wait, and -1 for each that has no place: that one asks alone.
CREATE OR REPLACE FUNCTION :"schema".fencing_readers_acquire_v1(
    p_name text, p_owners text[], p_micros text[], p_metadata text[], p_hybrid boolean,
    OUT granted bigint[], OUT seconds_left double precision
)
LANGUAGE plpgsql
SET search_path = pg_catalog, :"schema", pg_temp SET lock_timeout = '250ms' AS $fencing$
DECLARE
    v_now timestamptz;
    v_row record;
    v_held record;
    v_before bigint;                          -- the place of the first waiter that is no reader
    v_entered text[];
    v_waiting text[];
    v_token bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('transaction_read_only') = 'on'
    THEN PERFORM fencing_check_v1(); END IF;
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM fencing_durable_v1(current_setting('synchronous_commit'));
    END IF;
    <<entering>>
    BEGIN
        -- While they have to wait, most calls end here: without locking the row.
        v_now := clock_timestamp();
        SELECT l.owner, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name;
        seconds_left := extract(epoch FROM v_row.expires_at - v_now);
        EXIT entering WHEN v_row.owner <> '' AND seconds_left > 0;
        seconds_left := 3;
        SELECT min(w.number) INTO v_before FROM fencing_waiter w
         WHERE w.name = p_name AND w.mode IS DISTINCT FROM 'reader'
           AND w.seen BETWEEN v_now - interval '3 seconds' AND v_now + interval '3 seconds';
        EXIT entering WHEN NOT EXISTS (
            SELECT FROM fencing_waiter w
             WHERE w.name = p_name AND w.owner = ANY (p_owners) AND (v_before IS NULL OR w.number < v_before)
        );

        SELECT l.owner, l.token, l.expires_at INTO v_row FROM fencing_lock l WHERE l.name = p_name FOR UPDATE;
        IF NOT FOUND OR v_row.token < 0 THEN
            SELECT r.owner, r.token, r.expires_at INTO v_row FROM fencing_row_v1(p_name) r;
        END IF;
        v_now := clock_timestamp();
        seconds_left := extract(epoch FROM v_row.expires_at - v_now);
        EXIT entering WHEN v_row.owner <> '' AND seconds_left > 0;
        DELETE FROM fencing_share s
         WHERE s.name = p_name AND (s.expires_at <= v_now OR (v_row.owner = '' AND seconds_left > 0) IS NOT TRUE);
        SELECT min(s.expires_at) AS first, max(s.token) AS token, coalesce(bool_and(s.mode = 'reader'), true) AS room
          INTO v_held FROM fencing_share s WHERE s.name = p_name;
        seconds_left := extract(epoch FROM v_held.first - v_now);
        EXIT entering WHEN NOT v_held.room;
        seconds_left := 3;
        SELECT min(w.number) INTO v_before FROM fencing_waiter w
         WHERE w.name = p_name AND w.mode IS DISTINCT FROM 'reader'
           AND w.seen BETWEEN v_now - interval '3 seconds' AND v_now + interval '3 seconds';
        WITH entered AS (
            DELETE FROM fencing_waiter w
             WHERE w.name = p_name AND w.owner = ANY (p_owners) AND w.mode = 'reader'
               AND (v_before IS NULL OR w.number < v_before)
            RETURNING w.owner
        ) SELECT array_agg(e.owner) INTO v_entered FROM entered e;
        EXIT entering WHEN v_entered IS NULL;

        v_token := v_held.token;
        IF v_token IS NULL THEN
            v_token := v_row.token + 1;
            IF p_hybrid THEN
                v_token := greatest(v_token, (extract(epoch FROM v_now) * 1000000)::bigint);
            END IF;
            IF v_token >= 9007199254740992 THEN
                RAISE EXCEPTION 'the next token would not fit into 53 bits' USING ERRCODE = 'FS001';
            END IF;
        END IF;
        INSERT INTO fencing_share (name, owner, token, expires_at, metadata, mode)
            SELECT p_name, c.owner, v_token, v_now + c.micros::bigint * interval '1 microsecond', c.metadata, 'reader'
              FROM unnest(p_owners, p_micros, p_metadata) AS c (owner, micros, metadata)
             WHERE c.owner = ANY (v_entered);
        UPDATE fencing_lock l SET owner = '', token = greatest(l.token, v_token), metadata = NULL, expires_at = last.at
          FROM (SELECT max(s.expires_at) AS at FROM fencing_share s WHERE s.name = p_name) last WHERE l.name = p_name;
        IF EXISTS (SELECT FROM fencing_waiter w WHERE w.name = p_name) THEN
            PERFORM fencing_share_wake_v2(p_name, cardinality(v_entered));
        END IF;
    END entering;

    IF v_entered IS NULL THEN PERFORM set_config('synchronous_commit', 'off', true); END IF;
    WITH waiting AS (
        UPDATE fencing_waiter w SET seen = v_now WHERE w.name = p_name AND w.owner = ANY (p_owners) RETURNING w.owner
    ) SELECT array_agg(w.owner) INTO v_waiting FROM waiting w;
    granted := (
        SELECT array_agg(
            CASE WHEN c.owner = ANY (v_entered) THEN v_token WHEN c.owner = ANY (v_waiting) THEN NULL ELSE -1 END
            ORDER BY c.place)
          FROM unnest(p_owners) WITH ORDINALITY AS c (owner, place)
    );
END $fencing$;
