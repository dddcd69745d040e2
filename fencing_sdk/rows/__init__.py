"""
Leased rows: claim a row of your own table, and finish it only if the claim is still the last one.

    db = row_client("postgresql://localhost/app")
    jobs = db.rows("jobs", where="state = 'queued'", order="priority, id", on_claim="attempts = attempts + 1")

    async with db:
        async for job in jobs:                          # waits for the next row; ends when the client drains
            async with job as lease:                    # renewed; cancelled when lost
                pdf = await render(lease.row["payload"])
                async with pool.acquire() as connection, connection.transaction():
                    await connection.execute("INSERT INTO invoices ...", pdf)
                    await lease.finish(connection, state="done")   # compares and writes; else it rolls back

A row that is leased has two columns more: until when, and under which token. There is no state "in progress" and no
reaper: a row whose lease has run out is a row that can be claimed.

    _client.py      the client, the table, a claim, and the lease of a row
    _table.py       names, the SQL of the user, and the steps in the user's transaction
    _store.py       rows as tickets of a store without a line
    _postgresql.py, _sqlite.py, _mysql.py   the statements of each database
    _url.py         from a URL to a database, and to a store of rows for operators
    _diagnosis.py   the checks of fencing doctor
"""

from __future__ import annotations

from fencing_sdk.rows._client import LeasedRows, RowClient, RowLease, RowTake, row_client
from fencing_sdk.rows._table import schema_sql

__all__ = ["LeasedRows", "RowClient", "RowLease", "RowTake", "row_client", "schema_sql"]
