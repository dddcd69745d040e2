"""What a listing of many locks asks of the server, and what it keeps of the answers: counted, not timed."""

import gc

from postgresql_stage import sessions
from stays import eventually, opened

from fencing_sdk import Holder
from fencing_sdk._client_operating import PAGE

pytest_plugins = ["postgresql_fixtures"]

LOCKS = 5 * PAGE
SEEDED = """
    INSERT INTO fencing.fencing_lock (name, owner, token, mode, expires_at)
    SELECT 'job/' || lpad(n::text, 6, '0'), 'h' || n || ':secret', n, 'lock', clock_timestamp() + interval '1 hour'
      FROM generate_series(1, $1) n
"""
CALLS = "SELECT funcname, calls FROM pg_stat_user_functions WHERE schemaname = 'fencing'"


def holders_in_memory() -> int:
    return sum(type(found) is Holder for found in gc.get_objects())


async def test_many_locks_are_listed_in_pages_one_of_which_is_in_memory(postgresql_server):
    server = postgresql_server
    await server.execute(f"ALTER DATABASE {server.database} SET track_functions = 'all'")
    async with opened(server.url) as (locks, _):
        async with locks.lock("free"):  # the tables are there
            pass
        await server.fetch(SEEDED, LOCKS)
        gc.collect()
        before, most, names = holders_in_memory(), 0, []
        async for holder in locks.held("job/*"):
            names.append(holder.name)
            if len(names) % PAGE == 1:
                most = max(most, holders_in_memory() - before)
    assert names == [f"job/{number:06}" for number in range(1, LOCKS + 1)]
    assert PAGE <= most <= 2 * PAGE  # a page, and while the next is read the one before

    async def told() -> bool:
        return not await sessions(server)  # a session tells what it called when it ends, at the latest

    await eventually(told, what="the sessions have ended")
    calls = {record["funcname"]: record["calls"] for record in await server.fetch(CALLS)}
    pages = LOCKS // PAGE + 1  # the last is empty
    assert calls["fencing_list"] == calls["fencing_held"] == pages
    assert calls["fencing_check"] == 2 * pages + 1  # and once for the lock, whose name had no row
