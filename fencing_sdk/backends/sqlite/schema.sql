-- Times are microseconds of the boot clock, and mean nothing in another boot: each row says which one it is of.

BEGIN IMMEDIATE;

-- The grants. A row that has expired counts for nothing, whether it is deleted or not.
CREATE TABLE IF NOT EXISTS fencing_lock (
    name     TEXT NOT NULL,
    owner    TEXT NOT NULL,
    token    INTEGER NOT NULL,
    boot     TEXT NOT NULL,
    since    INTEGER NOT NULL,
    renewed  INTEGER NOT NULL,
    expires  INTEGER NOT NULL,
    label TEXT,
    mode     TEXT NOT NULL,  -- lock, writer, reader or permit
    permits  INTEGER,        -- of a permit: how many there are
    permit   INTEGER,        -- and its number
    PRIMARY KEY (name, owner)
) WITHOUT ROWID;

-- The last token, of all names together: a row apart, so that nothing that happens to a lock can lower it.
CREATE TABLE IF NOT EXISTS fencing_token (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    last INTEGER NOT NULL
);
INSERT OR IGNORE INTO fencing_token (only, last) VALUES (1, 0);

-- The waiters, in order of arrival. waiter_signs.py wakes them, and says what a slot is.
CREATE TABLE IF NOT EXISTS fencing_waiter (
    number  INTEGER PRIMARY KEY,
    name    TEXT NOT NULL,
    owner   TEXT NOT NULL,
    boot    TEXT NOT NULL,
    waiter_group TEXT NOT NULL,
    slot    INTEGER NOT NULL,
    network TEXT NOT NULL,
    socket  TEXT NOT NULL,
    ticket  TEXT NOT NULL,
    mode    TEXT NOT NULL,
    permits INTEGER,
    since   INTEGER NOT NULL,  -- when it joined
    label TEXT,
    UNIQUE (name, owner)
);
CREATE INDEX IF NOT EXISTS fencing_waiter_line ON fencing_waiter (name, number);
CREATE INDEX IF NOT EXISTS fencing_waiter_group ON fencing_waiter (waiter_group);

-- Why grants were ended, for holders that have not read it yet.
CREATE TABLE IF NOT EXISTS fencing_revoked (
    name    TEXT NOT NULL,
    owner   TEXT NOT NULL,
    boot    TEXT NOT NULL,
    expires INTEGER NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (name, owner)
) WITHOUT ROWID;

-- The sockets of the clients that hear of revocations.
CREATE TABLE IF NOT EXISTS fencing_listener (
    socket  TEXT PRIMARY KEY,
    boot    TEXT NOT NULL,
    network TEXT NOT NULL
) WITHOUT ROWID;

COMMIT;
