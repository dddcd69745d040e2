"""Names, metadata and paths that bite: texts are data, and nothing of the caller's search_path is ever called."""

import asyncio

import pytest
from patience import until
from postgresql_stage import everything_works, nothing_left, refusals, role, waiting
from stays import LONG, PATIENCE, Stay, answered, opened, staying

from fencing_sdk import ConfigurationError, Lost, Renewed

pytest_plugins = ["postgresql_fixtures"]

# Names and metadata that are something else in another language.

BITING = [
    "'; DROP TABLE fencing.fencing_lock; --",
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


async def test_names_and_metadata_are_data_and_nothing_else(postgresql_server):
    server = postgresql_server
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):

        async def live(text: str) -> None:
            async with staying(locks.lock(text, **LONG, metadata=text[:256])) as stay:
                found = await answered(lambda: locks.inspect(text))
                assert (found.name, found.metadata, found.token) == (text, text[:256], stay.token)
                assert await answered(others.lock(text).try_acquire) is None
                waiter = Stay(others.lock(text, ttl=20, wait=PATIENCE))
                await waiting(server, 1, text)
                await until(lambda: [event.name for event in log.of(Renewed)].count(text) > 1)
                await stay.end()
                await waiter.begun()
                await waiter.end()

        async with staying(others.lock("plain", ttl=20)) as plain:
            await asyncio.gather(*map(live, BITING))
            names = [record["name"] for record in await server.fetch("SELECT name FROM fencing.fencing_lock")]
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


@pytest.mark.parametrize("schema", ['we"ird; DROP SCHEMA public; --', "Größe 😀.$fencing$", "'SELECT"])
async def test_a_schema_may_have_any_name(schema, postgresql_server):
    await everything_works(postgresql_server.url, schema=schema)
    found = await postgresql_server.fetch("SELECT nspname FROM pg_namespace WHERE nspname = $1", schema)
    assert len(found) == 1
    assert await postgresql_server.value("SELECT to_regnamespace('fencing')") is None
    assert await postgresql_server.value("SELECT to_regnamespace('public')") is not None


@pytest.mark.parametrize("schema", ["", "x" * 64, "a\0b", "pg_evil", "\ud800"])
async def test_a_schema_that_cannot_be_named_is_refused_when_built(schema, postgresql_server):
    with pytest.raises(ConfigurationError):
        async with opened(postgresql_server.url, schema=schema):
            pytest.fail("it opened")


# A hostile search_path: whatever is called without its schema is the attacker's.

EVIL = """
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE DOMAIN evil.text AS pg_catalog.int4;
CREATE DOMAIN evil.int8 AS pg_catalog.bool;
CREATE DOMAIN evil.float8 AS pg_catalog.date;
CREATE TABLE evil.fencing_lock (name pg_catalog.int4);
CREATE TABLE evil.fencing_waiter (name pg_catalog.int4);
CREATE TABLE evil.fencing_floor (name pg_catalog.int4);
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
