-- Times are microseconds of the boot clock, and mean nothing in another boot: each row says which one it is of.

BEGIN IMMEDIATE;

-- Only what is held. A row that has expired counts for nothing, whether it is deleted or not.
CREATE TABLE IF NOT EXISTS fencing_lock (
    name     TEXT PRIMARY KEY,
    owner    TEXT NOT NULL,
    token    INTEGER NOT NULL,
    boot     TEXT NOT NULL,
    renewed  INTEGER NOT NULL,
    expires  INTEGER NOT NULL,
    metadata TEXT,
    mode     TEXT NOT NULL DEFAULT 'lock'  -- or 'writer'
) WITHOUT ROWID;

-- Permits and readers. While a name has any, its row in fencing_lock has the owner '' and ends with the last of them.
CREATE TABLE IF NOT EXISTS fencing_share (
    name     TEXT NOT NULL,
    owner    TEXT NOT NULL,
    token    INTEGER NOT NULL,
    boot     TEXT NOT NULL,
    renewed  INTEGER NOT NULL,
    expires  INTEGER NOT NULL,
    metadata TEXT,
    mode     TEXT NOT NULL,
    permits  INTEGER,
    permit   INTEGER,
    PRIMARY KEY (name, owner)
) WITHOUT ROWID;

-- The last token, of all names together: a row apart, so that nothing that happens to a lock can lower it.
CREATE TABLE IF NOT EXISTS fencing_token (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    last INTEGER NOT NULL
);
INSERT OR IGNORE INTO fencing_token (only, last) VALUES (1, 0);

-- The waiters, in order of arrival. wakeup_socket.py tells how they are woken, signs_of_life.py what slot is for.
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
    mode    TEXT NOT NULL DEFAULT 'lock',
    permits INTEGER,                     -- of a waiter for a permit: how many there are
    since   INTEGER NOT NULL DEFAULT 0,  -- when it joined
    metadata TEXT,
    UNIQUE (name, owner)
);
CREATE INDEX IF NOT EXISTS fencing_waiter_line ON fencing_waiter (name, number);
CREATE INDEX IF NOT EXISTS fencing_waiter_group ON fencing_waiter (waiter_group);

-- What an operator wrote about the grants that it ended, until the holder has read it.
CREATE TABLE IF NOT EXISTS fencing_revoked (
    name    TEXT NOT NULL,
    owner   TEXT NOT NULL,
    boot    TEXT NOT NULL,
    expires INTEGER NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (name, owner)
) WITHOUT ROWID;

-- The sockets of the clients that are to hear of revocations (losses.py).
CREATE TABLE IF NOT EXISTS fencing_listener (
    socket  TEXT PRIMARY KEY,
    boot    TEXT NOT NULL,
    network TEXT NOT NULL
) WITHOUT ROWID;

COMMIT;
