"""SqlGuard on PostgreSQL: its table, where it is, and who may use it."""

import asyncio
import contextlib
import subprocess
import sys

import asyncpg
import pytest
from postgresql_ways import opened, sqlstate

from fencing_sdk import ConfigurationError, StaleTokenError, Token, UsageError, connect
from fencing_sdk.guards.sql import SqlGuard

pytest_plugins = ["postgresql_fixtures", "guard_database"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


@pytest.fixture(params=["asyncpg", "psycopg-sync", "session"])
async def way(request, server):
    async with opened(request.param, server.url) as way:
        yield way


@pytest.fixture
async def asyncpg_way(server):
    async with opened("asyncpg", server.url) as way:
        yield way


async def waits(server):
    """Wait until a session waits for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with server.connected() as looking:
        for _ in range(2_000):
            if await looking.fetchval(query):
                return
            await asyncio.sleep(0.01)
    pytest.fail("no session waits")


# The first use.


async def test_the_first_use_creates_the_table_and_spoils_nothing(way, server):
    """What the transaction did before is committed with it."""
    guard = SqlGuard()
    async with way.begin() as transaction:
        await way.put(transaction, "b", "before")
        await way.admit(guard, transaction, "a", NEW)
        await way.put(transaction, "a", "new")
    assert [await way.read(name) for name in "ab"] == ["new", "before"]
    assert await server.value("SELECT token FROM fencing_fence") == 34


async def test_a_table_that_was_rolled_back_is_created_again(way, server):
    """On the same connection, which has seen it: the next transaction is not spoilt either."""
    guard = SqlGuard()
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            async with way.begin() as transaction:
                await way.admit(guard, transaction, "a", NEW)
                await way.admit(guard, transaction, "a", NEW)
                raise ZeroDivisionError
    await way.write(guard, "a", OLD, "old")
    assert await server.value("SELECT token FROM fencing_fence") == 33


@pytest.mark.parametrize("first", ["a guard", "by hand"])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
@pytest.mark.parametrize("level", ["read committed", "serializable"])
async def test_who_comes_second_to_create_it_waits_and_goes_on(first, outcome, level, asyncpg_way, server):
    """Two CREATE TABLE IF NOT EXISTS at once: the second one would fail, and spoil its caller's transaction."""

    async def second():
        async with asyncpg_way.begin(level) as transaction:
            await asyncpg_way.put(transaction, "b", "before")
            await SqlGuard().admit(transaction, "b", 2)

    async with server.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        if first == "a guard":
            await SqlGuard().admit(connection, "a", 1)
        else:
            await connection.execute(SqlGuard().ddl("postgresql"))
        waiting = asyncio.create_task(second())
        await waits(server)
        await getattr(transaction, outcome)()
        await waiting
    assert await asyncpg_way.read("b") == "before"
    assert await server.value("SELECT token FROM fencing_fence WHERE resource = 'b'") == 2


async def test_who_migrates_by_hand_is_told_how(way, server):
    guard = SqlGuard(create=False)
    with pytest.raises(Exception, match="does not exist") as missing:
        await way.write(guard, "a", NEW, "new")
    assert sqlstate(missing.value) == "42P01"
    assert "ddl('postgresql')" in missing.value.__notes__[0]
    await server.execute(guard.ddl("postgresql"))
    await server.execute(guard.ddl("postgresql"))  # twice is once
    await way.write(guard, "a", NEW, "new")
    assert await server.value("SELECT token FROM fencing_fence") == 34


async def test_a_table_that_is_dropped_costs_one_transaction(server):
    """It was there when the connection looked. The next transaction creates it."""
    async with server.connected() as connection:
        guard = SqlGuard()
        for _ in range(2):
            async with connection.transaction():
                await guard.admit(connection, "a", 1)
        await connection.execute("DROP TABLE fencing_fence")
        with pytest.raises(asyncpg.UndefinedTableError):
            async with connection.transaction():
                await guard.admit(connection, "a", 1)
        async with connection.transaction():
            await guard.admit(connection, "a", 2)


@pytest.mark.parametrize("creator", ["another connection", "this very connection"])
async def test_the_table_is_known_after_one_look_at_each_connection(creator, server):
    """A guarded write is one statement more, not two."""
    statements = []
    async with server.connected() as connection:
        guard = SqlGuard(server.url)
        if creator == "another connection":
            await guard.raise_to("a", 0)
        else:
            async with connection.transaction():
                await guard.admit(connection, "a", 0)
                await guard.admit(connection, "a", 0)
        connection.add_query_logger(lambda record: statements.append(record.query))
        for token in range(3):
            async with connection.transaction():
                await guard.admit(connection, "a", token)
    sent = [statement for statement in statements if not statement.startswith(("BEGIN", "COMMIT"))]
    assert len(sent) == 4
    assert "to_regclass" in sent[0]
    assert all(statement.startswith("INSERT") for statement in sent[1:])


# Where it is.


async def test_a_table_may_be_in_a_schema_of_its_own_and_have_a_reserved_name(way, server):
    await server.execute('CREATE SCHEMA "order"')
    await way.write(SqlGuard(table="order.select"), "a", NEW, "new")
    await way.write(SqlGuard(), "a", OLD, "old")
    assert await server.value('SELECT token FROM "order"."select"') == 34
    assert await server.value("SELECT token FROM fencing_fence") == 33


async def test_a_schema_that_does_not_exist_is_not_made(server):
    with pytest.raises(asyncpg.InvalidSchemaNameError) as missing:
        await SqlGuard(server.url, table="nowhere.fence").raise_to("a", 1)
    assert "ddl('postgresql')" in missing.value.__notes__[0]


@pytest.mark.parametrize("there", [True, False], ids=["that exists", "that would be created"])
async def test_a_search_path_that_leads_past_the_raised_fences_is_found_out(there, way, server):
    """The zombie would be judged by another table, in which its token is the highest."""
    guard = SqlGuard(server.url)
    await guard.raise_to("a", NEW)
    await server.execute("CREATE SCHEMA other")
    if there:
        await server.execute("SET search_path = other;" + guard.ddl())
    with pytest.raises(UsageError, match="name the schema"):
        async with way.begin() as transaction:
            await way.execute(transaction, "SET LOCAL search_path = other")
            await way.admit(guard, transaction, "a", OLD)
    guard = SqlGuard(server.url, table="public.fencing_fence")
    await guard.raise_to("a", NEW)
    with pytest.raises(StaleTokenError):
        async with way.begin() as transaction:
            await way.execute(transaction, "SET LOCAL search_path = other")
            await way.admit(guard, transaction, "a", OLD)


async def other_schema(server, guard):
    """Make a schema with a table of fences, as a migration does that runs there."""
    await server.execute("CREATE SCHEMA other; SET search_path = other;" + guard.ddl("postgresql"))


async def admit_on(connection, guard, resource, token, path=None):
    async with connection.transaction():
        if path is not None:
            await connection.execute(f"SET LOCAL search_path = {path}")
        await guard.admit(connection, resource, token)


@pytest.mark.parametrize("together", [True, False], ids=["admit_all", "admit"])
async def test_a_search_path_that_changes_on_a_known_connection_is_found_out(together, way, server):
    """As that of a pooled connection, which is set for each tenant."""
    guard = SqlGuard(server.url)
    await other_schema(server, guard)
    await guard.raise_to("a", NEW)

    async def admit(transaction, resource, token):
        if together:
            await way.admit_all(guard, transaction, {resource: token})
        else:
            await way.admit(guard, transaction, resource, token)

    with pytest.raises(UsageError, match="name the schema"):
        async with way.begin() as transaction:
            for _ in range(8):  # both drivers and the server have the statement ready now
                await admit(transaction, "b", OLD)
            await way.execute(transaction, "SET LOCAL search_path = other")
            await admit(transaction, "a", OLD)
    assert await server.value("SELECT count(*) FROM other.fencing_fence") == 0
    async with way.begin() as transaction:
        await admit(transaction, "a", NEW)


async def raise_on(connection, guard, resource, token, path):
    """Raise a fence in a transaction that is left open."""
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(f"SET LOCAL search_path = {path}")
    await guard.raise_in(connection, resource, token)
    return transaction


@pytest.mark.parametrize("to", ["the beginning", "a savepoint"])
async def test_a_table_whose_creation_is_rolled_back_is_not_the_guards_own(to, server):
    """Nothing was raised, and the table is nowhere."""
    guard = SqlGuard(server.url)
    await server.execute("CREATE SCHEMA other")
    async with server.connected() as connection, contextlib.AsyncExitStack() as outer:
        if to == "a savepoint":
            await outer.enter_async_context(connection.transaction())
        transaction = await raise_on(connection, guard, "a", NEW, "other")
        await transaction.rollback()
        await outer.aclose()
        await admit_on(connection, guard, "a", OLD)
        await guard.raise_to("a", NEW)
        with pytest.raises(StaleTokenError):
            await admit_on(connection, guard, "a", OLD)
    assert await server.value("SELECT to_regclass('other.fencing_fence')::text") is None


async def test_a_guard_with_a_database_raises_fences_in_one_table(server):
    guard = SqlGuard(server.url)
    await other_schema(server, guard)
    async with server.connected() as connection:
        await (await raise_on(connection, guard, "a", NEW, "public")).commit()
        with pytest.raises(UsageError, match="name the schema"):
            await raise_on(connection, guard, "a", NEW, "other")
    assert await server.value("SELECT count(*) FROM other.fencing_fence") == 0


@pytest.mark.parametrize("with_schema", [True, False], ids=["a guard for each", "one without a database"])
async def test_each_tenant_may_have_a_table(with_schema, server):
    guard = SqlGuard()
    guards = {path: SqlGuard(server.url, table=f"{path}.fencing_fence") for path in ("public", "other")}
    await other_schema(server, guard)
    async with server.connected() as connection:
        for token, path in enumerate(("public", "other", "public", "other"), start=1):
            if with_schema:
                guard = guards[path]
            await (await raise_on(connection, guard, "a", token, path)).commit()
            await admit_on(connection, guard, "a", token, path=path)
            with pytest.raises(StaleTokenError):
                await admit_on(connection, guard, "a", token - 1, path=path)
    assert await server.value("SELECT token FROM public.fencing_fence") == 3
    assert await server.value("SELECT token FROM other.fencing_fence") == 4


@pytest.mark.parametrize("table", ["fencing_fence", "public.fencing_fence"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
async def test_a_table_that_was_moved_is_not_made_a_second_time(known, table, server):
    """In its old schema, where a transaction with the old search_path would miss the fences."""
    guard = SqlGuard(server.url, table=table)
    await guard.raise_to("a", NEW)
    async with server.connected() as connection:
        if known:
            await admit_on(connection, guard, "b", OLD)
        await server.execute("CREATE SCHEMA other; ALTER TABLE fencing_fence SET SCHEMA other")
        if known:
            with pytest.raises(asyncpg.UndefinedTableError):
                await admit_on(connection, guard, "a", OLD)
        with pytest.raises(UsageError, match="SqlGuard raises fences in other"):
            await admit_on(connection, guard, "a", OLD)
        await server.execute(guard.ddl("postgresql"))  # by hand
        with pytest.raises(UsageError, match="SqlGuard raises fences in other"):
            await admit_on(connection, guard, "a", OLD)
    assert await server.value("SELECT count(*) FROM public.fencing_fence") == 0


async def test_a_transaction_in_another_database_is_found_out(server):
    guard = SqlGuard(server.url, table="public.fencing_fence")
    await guard.raise_to("a", NEW)
    async with server.connected(database="postgres") as connection:
        with pytest.raises(UsageError, match="pass it the database of your transactions"):
            async with connection.transaction():
                await guard.admit(connection, "a", OLD)


# Who may use it.


@contextlib.asynccontextmanager
async def role(server, *grants):
    """A way for a role that may do nothing else."""
    await server.execute("CREATE ROLE clerk LOGIN; GRANT ALL ON data TO clerk;" + ";".join(grants))
    try:
        async with opened("asyncpg", server.url_as("clerk")) as way:
            yield way
    finally:
        await server.execute("DROP OWNED BY clerk; DROP ROLE clerk")


USAGE = "GRANT USAGE ON SCHEMA public TO clerk"


async def test_what_a_role_needs_is_to_read_insert_and_update(server):
    await server.execute(SqlGuard().ddl("postgresql"))
    async with role(server, USAGE, "GRANT SELECT, INSERT, UPDATE ON fencing_fence TO clerk") as way:
        guard = SqlGuard(way.url)
        await guard.raise_to("a", OLD)
        await way.write(guard, "a", NEW, "new")
        assert await guard.highest("a") == 34


async def test_a_role_that_may_not_create_the_table_is_told_how(server):
    async with role(server, USAGE) as way:
        with pytest.raises(asyncpg.InsufficientPrivilegeError) as denied:
            await way.write(SqlGuard(), "a", NEW, "new")
        assert "ddl('postgresql')" in denied.value.__notes__[0]


# The URL.


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("postgresql://app@db/shop", "app@db:5432/shop"),
        ("postgres://app:secret@DB:5433/shop", "app@db:5433/shop"),
        ("postgresql://a%40b:secret@a,b:7777,[::1]/shop%2F1", "a%40b@a:5432,b:7777,[::1]:5432/shop%2F1"),
        ("postgresql://app@/shop?host=/run/pg&port=6000", "app@%2Frun%2Fpg:6000/shop"),
        ("postgresql://app@%2Frun%2Fpg/shop", "app@%2Frun%2Fpg:5432/shop"),
        ("postgresql:///?host=a,b&port=1,2&user=app&dbname=shop&password=secret", "app@a:1,b:2/shop"),
        ("postgresql://app@db", "app@db:5432/app"),
        ("postgresql://app@/shop", None),
        ("postgresql://app@db/shop?service=x", None),
        ("postgresql://app@db/shop?search_path=x", None),
        ("postgresql://app@db/shop?options=-csearch_path%3Dx", None),
    ],
)
def test_the_guard_tells_which_database_it_means_and_never_the_password(url, database, monkeypatch):
    for name in ("PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    guard = SqlGuard(url)
    assert guard.database == database
    assert "secret" not in repr(guard)
    assert "secret" not in repr(vars(guard))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:sec@ret@host/app",
        "postgresql://me:sec/ret@host/app",
        "postgresql://me:sec?ret@host/app",
        "postgresql://me:sec#ret@host/app",
        "postgresql://host:secret/app",
        "postgresql://me:secret@[::1/app",
        "postgresql://host/app?secret",
        "postgresql://host/app?port=secret",
        "postgresql://a,b/app?host=a,b&port=1,2,3secret",
        "postgresql+asyncpg://me:secret@host/app",
        "mssql://me:secret@host/app",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url):
    with pytest.raises(ConfigurationError) as refusal:
        SqlGuard(url)
    assert "secret" not in str(refusal.value)
    assert "ret" not in str(refusal.value).replace("create_async_engine", "")
    assert refusal.value.__cause__ is refusal.value.__context__ is None


async def test_a_server_that_is_not_there_is_the_drivers_error(unused_tcp_port):
    with pytest.raises(OSError):
        await SqlGuard(f"postgresql://app:secret@127.0.0.1:{unused_tcp_port}/app").raise_to("a", 1)


def test_drivers_are_loaded_by_those_alone_who_use_them():
    code = """
import sys
from fencing_sdk.guards.sql import SqlGuard
SqlGuard(), SqlGuard("app.db")
assert not {"asyncpg", "psycopg", "sqlalchemy", "greenlet"} & sys.modules.keys()
sys.modules["asyncpg"] = None
try:
    SqlGuard("postgresql://host/app")
except ValueError as error:
    assert "pip install 'fencing-sdk[postgresql]'" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Other ways to a server.


async def test_through_a_proxy_that_pools_transactions(pgbouncer, monkeypatch):
    """Connections of many clients take turns at one of the server's: nothing may rely on a session."""
    for token in range(3):
        monkeypatch.setattr(asyncpg.connection, "_uid", 0)  # as in another process: it names its statements alike
        await SqlGuard(pgbouncer.url).raise_to("b", token)
    guards = [SqlGuard(pgbouncer.url) for _ in range(4)]
    for token in range(3):
        await asyncio.gather(*(guard.raise_to("a", token) for guard in guards))
    assert await guards[0].highest("a") == 2
    async with connect(pgbouncer.url) as locks, connect(pgbouncer.url) as others:
        for client in (locks, others, locks):
            async with client.lock("a", fences=[guards[0]]) as lease:
                assert await guards[0].highest("a") == lease.token


async def test_a_standby_is_read_and_not_written_to(postgresql_group):
    primary, standby = (SqlGuard(server.url) for server in (postgresql_group.primary, postgresql_group.standby))
    assert await standby.highest("a") is None
    await primary.raise_to("a", 34)
    await postgresql_group.synced()
    assert await standby.highest("a") == 34
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        await standby.raise_to("a", 35)
