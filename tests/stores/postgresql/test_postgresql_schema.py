"""The tables: created once by many, in any schema, where nothing else is called, and a server that takes no writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import asyncpg
import pytest
from inside import TOKEN_LIMIT
from local_ports import HOST
from patience import until
from postgresql_proxy import PostgresqlProxy
from postgresql_replicas import Replicated
from postgresql_server import PostgresqlServer
from postgresql_stage import LISTENING, everything_works, nothing_left, refusals, role, waiting
from stays import LONG, PATIENCE, Stay, answered, eventually, opened, staying

from fencing_sdk import BackendUnavailableError, connect
from fencing_sdk.abc import LOCK, READER, Busy, Claim, Permit, Place
from fencing_sdk.backends.postgresql import PostgresqlBackend
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.events import Lost, RenewalFailed, Renewed

pytest_plugins = ["postgresql_fixtures"]


# The tables: created once by many, in any schema, and cleaned up without lowering a token.


HOSTILE = ['a"b', "select", "a'; DROP TABLE x; --", "$fencing1$$fencing2$", "Ünder Score", "a.b", ",", "\\", "x" * 63]


@pytest.mark.parametrize("schema", HOSTILE)
async def test_a_schema_may_have_nearly_any_name(schema, postgresql_server):
    async with connect(postgresql_server.url, schema=schema) as locks:
        async with locks.lock("a") as lease:
            await lease.renew()
        found = await postgresql_server.value("SELECT count(*) FROM pg_namespace WHERE nspname = $1", schema)
    assert found == 1


async def test_many_clients_may_create_the_tables_at_once(postgresql_server, patient_postgresql):
    backends = [PostgresqlBackend(postgresql_server.url) for _ in range(12)]
    claims = [Claim("a", 30.0) for _ in backends]
    places = await asyncio.gather(*(each.draw(claim) for each, claim in zip(backends, claims, strict=True)))
    await asyncio.gather(*(backend.aclose() for backend in backends))
    assert sum(place.token is not None for place in places) == 1


async def test_without_create_a_missing_schema_names_the_way_out(postgresql_server):
    async with aclosing(PostgresqlBackend(postgresql_server.url, create=False)) as backend:
        with pytest.raises(BackendRefusedError, match="fencing init"):
            await backend.draw(Claim("a", 30.0))
        await backend.create_schema()
        assert (await backend.draw(Claim("a", 30.0))).token is not None


async def test_tables_dropped_under_a_client_are_created_again(postgresql_server):
    async with aclosing(PostgresqlBackend(postgresql_server.url)) as backend:
        first = await backend.draw(Claim("a", 30.0))
        await postgresql_server.execute("DROP SCHEMA fencing CASCADE")
        second = await backend.draw(Claim("a", 30.0))
    assert first.token < second.token


@pytest.mark.parametrize("known", [False, True])
async def test_a_grant_is_durable_whatever_the_database_says(known, postgresql_server):
    async with aclosing(PostgresqlBackend(postgresql_server.url)) as backend:
        await backend.open()
        if known:  # a line that is there and empty is drawn from by a shorter way
            await backend.draw(claim := Claim("a", 30.0))
            await backend.give_back(claim)
        await postgresql_server.execute(f"ALTER DATABASE {postgresql_server.database} SET synchronous_commit = off")
        claim = Claim("a", 30.0)
        drawing = backend._draw, (claim.name, claim.owner, "lock", 1, None, 30_000_000, "", False, True)
        keeping = backend._keep, ([claim.name], [claim.owner], ["0"], ["60000000"], True)
        async with postgresql_server.connected() as connection:
            for statement, arguments in (drawing, keeping):
                async with connection.transaction():
                    assert await connection.fetchval("SHOW synchronous_commit") == "off"
                    await connection.fetchrow(statement, *arguments)
                    assert await connection.fetchval("SHOW synchronous_commit") == "on"


ALL = 2**62
"""A token below which a sweep forgets every line without tickets."""


async def test_a_sweep_deletes_what_is_free_and_never_lowers_a_token(postgresql_server):
    async with aclosing(PostgresqlBackend(postgresql_server.url, tokens="counter")) as backend:
        for _ in range(3):
            await backend.draw(claim := Claim("a", 30.0))
            await backend.give_back(claim)
        await backend.draw(held := Claim("b", 30.0))
        assert await postgresql_server.value("SELECT fencing.fencing_sweep(3)") == 0
        assert await postgresql_server.value("SELECT fencing.fencing_sweep($1)", ALL) == 1
        assert (await backend.draw(Claim("a", 30.0))).token == 4
        assert (await backend.draw(Claim("new", 30.0))).token == 4
        (place,) = await backend.keep([(held, 0)])
        assert isinstance(place, Place)


async def test_a_draw_that_waits_for_a_sweep_sees_its_floor(postgresql_server):
    """A sweep is deleting the row while a client draws: its token must not be forgotten."""
    async with aclosing(PostgresqlBackend(postgresql_server.url, tokens="counter")) as backend:
        for _ in range(2):
            await backend.draw(claim := Claim("a", 30.0))
            await backend.give_back(claim)
        last = Claim("a", 30.0)
        async with postgresql_server.connected() as connection:
            transaction = connection.transaction()
            await transaction.start()
            assert await connection.fetchval("SELECT fencing.fencing_sweep($1)", ALL) == 1
            asked = asyncio.create_task(backend.draw(last))
            await blocked(postgresql_server, asked)
            await transaction.commit()
        try:
            place = await asked
        except BackendUnavailableError:  # it waited for longer than a call may
            place = await backend.draw(last)
        assert place.token == 3


async def blocked(server, asked):
    """Wait until a session waits for a row, or until the call has failed because it waited for too long."""
    while not asked.done():
        if await server.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            return
    assert isinstance(asked.exception(), Exception), "the call did not have to wait"


async def test_a_draw_waits_for_the_ticket_that_is_being_given_back(postgresql_server):
    """A give_back that has looked at a line with one ticket, and is not committed yet, would miss who joins it."""
    async with aclosing(PostgresqlBackend(postgresql_server.url)) as backend:
        await backend.draw(holder := Claim("a", 30.0))
        waiter = Claim("a", 30.0)
        async with postgresql_server.connected() as connection:
            transaction = connection.transaction()
            await transaction.start()
            was = await connection.fetchrow(backend._give_back, holder.name, holder.owner, 0, True)
            assert was["was"]
            asked = asyncio.create_task(backend.draw(waiter))
            await blocked(postgresql_server, asked)
            await transaction.commit()
        await asyncio.wait([asked])
        if asked.exception() is None:
            assert asked.result().token is not None
        assert (await backend.draw(waiter)).token is not None


@pytest.mark.parametrize("mode", [LOCK, READER, Permit(of=2)], ids=lambda mode: mode.word)
async def test_a_token_that_would_not_fit_is_refused_in_every_mode(mode, postgresql_server):
    async with aclosing(PostgresqlBackend(postgresql_server.url)) as backend:
        await backend.draw(claim := Claim("a", 30.0))
        await backend.give_back(claim)
        await postgresql_server.execute(f"UPDATE fencing.fencing_line SET last = {TOKEN_LIMIT - 1}")
        with pytest.raises(BackendRefusedError, match="53 bits"):
            await backend.draw(Claim("a", 30.0, mode=mode))
        assert await backend.tickets(["a"]) == [[]]


async def test_a_snapshot_from_before_the_row_was_locked_grants_nothing(postgresql_server):
    """In a transaction that is not READ COMMITTED, the line would be seen as it was before."""
    async with aclosing(PostgresqlBackend(postgresql_server.url)) as backend:
        await backend.draw(claim := Claim("a", 30.0))
        await backend.give_back(claim)
        drawing = backend._draw, ("a", claim.owner, "lock", 1, None, 30_000_000, "", False, True)
        for isolation in ("repeatable_read", "serializable"):
            for statement, arguments in (drawing, (backend._give_back, ("a", claim.owner, 0, True))):
                async with postgresql_server.connected() as connection:
                    with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
                        async with connection.transaction(isolation=isolation):
                            await connection.fetchrow(statement, *arguments)


# Names, labels and paths that bite: texts are data, and nothing of the caller's search_path is ever called.


# Names and labels that are something else in another language.

BITING = [
    "'; DROP TABLE fencing.fencing_ticket; --",
    '"; DROP SCHEMA fencing CASCADE; --',
    "\\'; SELECT pg_sleep(60); --",
    "$1 $$ $fencing$ ${x} %s %(name)s {0} :name",
    "E'\\x41' U&'\\0041' /* */ --",
    "'||pg_terminate_backend(pg_backend_pid())||'",
    "😀🔒 é e\u0301 ﷽ \u202e",
    '{"a",NULL} (1,2) [1,2)',
    "\U0010ffff\ufffd\ufeff",
    "n" * 512,
    "€" * 170,
]


async def test_names_and_labels_are_data_and_nothing_else(postgresql_server):
    server = postgresql_server
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):

        async def live(text: str) -> None:
            async with staying(locks.lock(text, **LONG, label=text[:256])) as stay:
                found = await answered(lambda: locks.inspect(text))
                assert (found.name, found.label, found.token) == (text, text[:256], stay.token)
                assert await answered(others.lock(text).try_acquire) is None
                waiter = Stay(others.lock(text, ttl=20, wait=PATIENCE))
                await waiting(server, 1, text)
                await until(lambda: [event.name for event in log.of(Renewed)].count(text) > 1)
                await stay.end()
                await waiter.begun()
                await waiter.end()

        async with staying(others.lock("plain", ttl=20)) as plain:
            await asyncio.gather(*map(live, BITING))
            names = [record["name"] for record in await server.fetch("SELECT name FROM fencing.fencing_line")]
            assert sorted(names) == sorted(["plain", *BITING])
            await plain.end()
        assert log.of(Lost) == []
        assert refusals(log) == []
    await nothing_left(server)


async def test_two_spellings_are_two_names_whatever_the_collation(postgresql_server):
    names = ["é", "e\u0301", "E", "e", "e ", " e", "ß", "ss", "ẞ"]
    async with opened(postgresql_server.url) as (locks, _):
        leases = [await locks.lock(name, wait=PATIENCE, ttl=30).acquire() for name in names]
        for lease in leases:
            await lease.release()
    await nothing_left(postgresql_server)


# A hostile search_path: whatever is called without its schema is the attacker's.

EVIL = """
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE DOMAIN evil.text AS pg_catalog.int4;
CREATE DOMAIN evil.int8 AS pg_catalog.bool;
CREATE DOMAIN evil.float8 AS pg_catalog.date;
CREATE TABLE evil.fencing_line (name pg_catalog.int4);
CREATE TABLE evil.fencing_ticket (name pg_catalog.int4);
CREATE TABLE evil.pg_namespace (nspname pg_catalog.int4);
CREATE FUNCTION evil.trap() RETURNS pg_catalog.text LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''evil ran''; END';
"""
FUNCTIONS = [
    "clock_timestamp() RETURNS timestamptz",
    "now() RETURNS timestamptz",
    "pg_notify(pg_catalog.text, pg_catalog.text) RETURNS void",
    "set_config(pg_catalog.text, pg_catalog.text, bool) RETURNS pg_catalog.text",
    "current_setting(pg_catalog.text) RETURNS pg_catalog.text",
    "to_regprocedure(pg_catalog.text) RETURNS regprocedure",
    "to_regclass(pg_catalog.text) RETURNS regclass",
    "to_regnamespace(pg_catalog.text) RETURNS regnamespace",
    "pg_advisory_xact_lock(bigint) RETURNS void",
    "pg_backend_pid() RETURNS int4",
    "extract(pg_catalog.text, timestamptz) RETURNS numeric",
    "extract(pg_catalog.text, interval) RETURNS numeric",
    "current_database() RETURNS pg_catalog.text",
    "pg_is_in_recovery() RETURNS bool",
    "length(pg_catalog.text) RETURNS int4",
]
OPERATORS = [
    ("=", "pg_catalog.text", "pg_catalog.text", "bool"),
    ("<>", "pg_catalog.text", "pg_catalog.text", "bool"),
    ("=", "name", "pg_catalog.text", "bool"),
    ("=", "name", "name", "bool"),
    (">", "timestamptz", "timestamptz", "bool"),
    ("<=", "timestamptz", "timestamptz", "bool"),
    ("+", "timestamptz", "interval", "timestamptz"),
    ("-", "timestamptz", "timestamptz", "interval"),
    ("*", "bigint", "interval", "interval"),
    ("+", "bigint", "int4", "bigint"),
    (">=", "bigint", "int4", "bool"),
    (">=", "bigint", "bigint", "bool"),
    ("*", "numeric", "int4", "numeric"),
    ("*", "numeric", "numeric", "numeric"),
    ("*", "float8", "interval", "interval"),
    ("||", "pg_catalog.text", "pg_catalog.text", "pg_catalog.text"),
]


def evil_script() -> str:
    lines = [EVIL]
    body = "LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''evil ran''; END'"
    lines += [f"CREATE FUNCTION evil.{signature} {body};" for signature in FUNCTIONS]
    for number, (sign, left, right, result) in enumerate(OPERATORS):
        lines.append(f"CREATE FUNCTION evil.o{number}({left}, {right}) RETURNS {result} {body};")
        lines.append(f"CREATE OPERATOR evil.{sign} (FUNCTION = evil.o{number}, LEFTARG = {left}, RIGHTARG = {right});")
    return "\n".join(lines)


@pytest.mark.parametrize("path", ["evil, pg_catalog, public", "evil, pg_temp, pg_catalog", "''"])
async def test_nothing_in_the_search_path_is_ever_called(path, postgresql_server):
    await postgresql_server.execute(evil_script())
    url = await role(postgresql_server, f"search_path = {path}")
    await everything_works(url)
    await nothing_left(postgresql_server)
    if path != "''":
        async with postgresql_server.connected(user="app") as session:
            with pytest.raises(Exception, match="evil ran"):
                await session.fetchval("SELECT pg_catalog.now() > now()")


# A server that takes no writes and is not a standby, as an old primary that an operator has fenced off. The new primary
# is behind a proxy that makes it answer later, so that a client that takes the first answer takes the wrong server
# every time.


WHY = "default_transaction_read_only"
TOKEN = "SELECT max(token) FROM fencing.fencing_ticket WHERE name = 'a'"
ROWS = "SELECT name, owner, token, dies FROM fencing.fencing_ticket ORDER BY name, number"
ORDERS = pytest.mark.parametrize("old_first", [True, False], ids=["old first", "new first"])


async def set_read_only(server: PostgresqlServer, *, on: bool = True) -> None:
    """Return when new sessions know; those that are open take their time."""
    await server.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
    await server.execute("SELECT pg_reload_conf()")

    async def known() -> bool:
        return await server.value("SHOW transaction_read_only") == ("on" if on else "off")

    await eventually(known, what="new sessions are read-only, or not any more")


@asynccontextmanager
async def slower(group: Replicated, *, old_first: bool = True) -> AsyncIterator[str]:
    """The URL of both servers, of which the standby, or the new primary, answers later."""
    async with PostgresqlProxy(group.standby) as proxy:
        proxy.delay(replies=0.1)
        hosts = [f"{HOST}:{group.primary.port}", f"{HOST}:{proxy.port}"]
        yield f"postgresql://postgres@{','.join(hosts if old_first else hosts[::-1])}/postgres"


# When a connection is opened.


@ORDERS
async def test_an_old_primary_that_is_read_only_is_passed_over(old_first, postgresql_group):
    group = postgresql_group
    async with opened(group.primary.url) as (locks, _), locks.lock("a") as lease:
        first = lease.token
    await group.synced()
    promoted = await group.promote()
    await set_read_only(group.primary)
    assert await group.primary.value("SELECT pg_is_in_recovery()") is False
    before = await group.primary.fetch(ROWS)
    async with slower(group, old_first=old_first) as url, opened(url) as (locks, _):
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert first < lease.token == await promoted.value(TOKEN)
            waiter = Stay(locks.lock("a", wait=PATIENCE), work=0)
            await waiting(promoted, 1)
            await eventually(lambda: _listens_at(promoted), what="the waiter's client listens at the new primary")
        await waiter.over()
        assert waiter.error is None
    await nothing_left(group.primary)
    assert await group.primary.fetch(ROWS) == before


async def _listens_at(server: PostgresqlServer) -> bool:
    return bool(await server.fetch(LISTENING))


async def test_an_old_primary_without_the_tables_says_nothing_about_the_new_one(postgresql_group):
    group = postgresql_group
    promoted = await group.promote()
    await set_read_only(group.primary)
    async with opened(promoted.url) as (locks, _), locks.lock("a"):
        pass
    async with slower(group) as url, opened(url, create=False) as (locks, _), locks.lock("a", wait=PATIENCE):
        pass


async def test_a_role_that_may_only_read_is_told_why(postgresql_server):
    url = await role(postgresql_server, "default_transaction_read_only = on")
    with pytest.raises(BackendUnavailableError, match=WHY):
        async with opened(url):
            pytest.fail("it opened")
    await nothing_left(postgresql_server)


# Later.


async def test_a_holder_and_a_waiter_follow_when_their_server_becomes_read_only(postgresql_group, monkeypatch):
    monkeypatch.setattr("fencing_sdk.backends.postgresql.listener._CHECK_EVERY", 1.0)
    group = postgresql_group
    async with slower(group) as url, opened(url) as (locks, log), opened(url) as (others, _):
        async with staying(locks.lock("a", **LONG | {"ttl": 40.0})) as stay:
            waiter = Stay(others.lock("a", ttl=30), work=0)
            await waiting(group.primary, 1)
            await log.seen(Renewed)
            await group.synced()
            await set_read_only(group.primary)
            await until(lambda: any(WHY in event.error for event in log.of(RenewalFailed)))
            before = await group.primary.fetch(ROWS)
            promoted = await group.promote()
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 2)
            assert await promoted.value(TOKEN) == stay.token
            await waiting(promoted, 1)
            await eventually(lambda: _listens_at(promoted), what="the waiter's client listens at the new primary")
            await stay.end()
        await waiter.over()
        assert waiter.error is None
        assert waiter.token > stay.token
        assert await group.primary.fetch(ROWS) == before
    assert log.of(Lost) == []


@pytest.mark.parametrize("call", ["draw", "keep", "give_back"])
async def test_a_call_that_a_server_refuses_to_write_is_unavailable_and_applied_nowhere(call, postgresql_server):
    server = postgresql_server
    async with aclosing(PostgresqlBackend(server.url)) as backend:
        place = await backend.draw(held := Claim("a", 30.0))
        ask = {
            "draw": lambda: backend.draw(Claim("b", 30.0)),
            "keep": lambda: backend.keep([(held, 0)]),
            "give_back": lambda: backend.give_back(held),
        }
        await backend._connection.ask("SET default_transaction_read_only = on", ())  # as a reload does to this session
        before = await server.fetch(ROWS)
        with pytest.raises(BackendUnavailableError, match=WHY):
            await ask[call]()
        assert await server.fetch(ROWS) == before
        await ask[call]()  # on a new connection
        assert await server.fetch(ROWS) != before
        assert ((await backend.draw(held)).token == place.token) is (call != "give_back")


@pytest.mark.parametrize("call", ["draw", "tickets"])
async def test_what_a_server_that_became_read_only_remembers_is_no_answer(call, postgresql_server):
    """It would show for ever what was true before: that a lock is held, or by whom."""
    async with aclosing(PostgresqlBackend(postgresql_server.url)) as backend:
        await backend.draw(Claim("a", 30.0))
        ask = {
            "draw": lambda: backend.draw(Claim("a", 30.0), only_if_it_holds=True),
            "tickets": lambda: backend.tickets(["a"]),
        }
        await backend._connection.ask("SET default_transaction_read_only = on", ())
        with pytest.raises(BackendUnavailableError, match=WHY):
            await ask[call]()
        answer = await ask[call]()
        assert isinstance(answer, Busy) if call == "draw" else answer != [[]]
