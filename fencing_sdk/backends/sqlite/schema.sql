-- Times are seconds of the boot clock, and mean nothing in another boot: each row says which one it is of.

BEGIN IMMEDIATE;

-- One row for each name that has tickets: the line as JSON, see lines.py.
CREATE TABLE IF NOT EXISTS fencing_line (
    name TEXT PRIMARY KEY,
    boot TEXT NOT NULL,
    dies REAL NOT NULL,  -- when the last ticket dies, and the last reason is forgotten
    line TEXT NOT NULL
) WITHOUT ROWID;

-- The last token, of all names together: a row apart, so that nothing that happens to a lock can lower it.
CREATE TABLE IF NOT EXISTS fencing_token (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    last INTEGER NOT NULL
);
INSERT OR IGNORE INTO fencing_token (only, last) VALUES (1, 0);

COMMIT;
