"""RedisGuard on one server: the contract, and what one script with the check in front promises."""

import ast
import asyncio
import itertools
import pickle
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ports import HOST, free_port
from patience import until
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisClusterException, ResponseError
from valkey.asyncio import Valkey

from fencing_sdk import (
    BackendRefusedError,
    ConfigurationError,
    StaleTokenError,
    Token,
    connect,
)
from fencing_sdk.guards import admitted
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.redis._scripts import WORDS_LIMIT
from fencing_sdk.testing.suites import GuardSuite

pytest_plugins = ["redis_fixtures"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")
PAGE = (Path(__file__).parent.parent.parent / "docs" / "guards.md").read_text()


# The contract, through every kind of client and every kind of write.


class RedisSuite(GuardSuite):
    several = True

    @pytest.fixture
    async def guard(self, redis_server):
        self.server = redis_server
        async with self.opened() as guard:
            yield guard

    @asynccontextmanager
    async def opened(self):
        async with RedisGuard(self.server.url) as guard:
            yield guard

    async def write(self, guard, resource, token, value):
        await guard.execute(resource, token, ("SET", guard.key(resource, "value"), value))

    async def write_all(self, guard, tokens, values):
        await guard.execute_all(tokens, *(("SET", guard.key(name, "value"), value) for name, value in values.items()))

    async def read(self, guard, resource):
        return self.server.ask("GET", guard.key(resource, "value"))

    def reopen(self, guard):
        return self.opened()


class TestCommandsThroughAUrl(RedisSuite): ...


class TestALuaBodyThroughAClientThatDecodes(RedisSuite):
    @asynccontextmanager
    async def opened(self):
        async with Redis.from_url(self.server.url, decode_responses=True, protocol=2) as client:
            yield RedisGuard(client, prefix="app:fences")

    async def write(self, guard, resource, token, value):
        body = "redis.call('SET', KEYS[1], ARGV[1])"
        await guard.script(body).run(resource, token, keys=[guard.key(resource, "value")], args=[value])


class TestSetThroughValkeysClient(RedisSuite):
    @asynccontextmanager
    async def opened(self):
        client = Valkey.from_url(self.server.url)
        yield RedisGuard(client)
        await client.aclose()

    async def write(self, guard, resource, token, value):
        await guard.set(resource, token, guard.key(resource, "value"), value)


@pytest.fixture
async def client(redis_server):
    async with Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def guard(client):
    return RedisGuard(client)


# The decision, in Lua.

TOKENS = [Token(value, holder) for value in (0, 1, 2**53 - 2, 2**53 - 1) for holder in (None, "a", "b")]


def values(token):
    return None if token is None else (int(token), token.holder)


def decided(token, fence):
    try:
        return values(admitted("r", token, fence))
    except StaleTokenError as error:
        return error.token, error.fence, error.conflict


async def decided_by_lua(guard, server, token, fence):
    server.ask("DEL", "fence:{r}")
    if fence is not None:
        server.ask("SET", "fence:{r}", f"{fence:d}" if fence.holder is None else f"{fence:d} {fence.holder}")
    try:
        await guard.raise_to("r", token)
    except StaleTokenError as error:
        assert values(await guard.highest("r")) == values(fence)
        return error.token, error.fence, error.conflict
    return values(await guard.highest("r"))


async def test_lua_decides_as_admitted_does(guard, redis_server):
    for token, fence in itertools.product(TOKENS, [None, *TOKENS]):
        assert await decided_by_lua(guard, redis_server, token, fence) == decided(token, fence), (token, fence)


token_values = st.integers(0, 2**53 - 1) | st.integers(0, 3)
tokens = st.builds(Token, token_values, st.none() | st.text("0123456789abcdef", min_size=1, max_size=64))
pairs = st.tuples(tokens, st.none() | tokens) | tokens.flatmap(  # so near that they may be taken for one another
    lambda fence: st.tuples(
        st.builds(Token, st.integers(max(0, fence - 1), min(fence + 1, 2**53 - 1)), st.sampled_from([None, "a", "b"])),
        st.just(fence),
    )
)


def test_lua_decides_as_admitted_does_whatever_the_token(redis_server):
    with asyncio.Runner() as runner:
        guard = RedisGuard(redis_server.url)

        @given(pairs)
        @settings(max_examples=200, deadline=None)
        def agree(pair):
            assert runner.run(decided_by_lua(guard, redis_server, *pair)) == decided(*pair)

        agree()
        runner.run(guard.aclose())


# Check and commands are one step.


async def test_replies_are_the_servers_in_the_order_of_the_commands(guard):
    key = guard.key("a", "hash")
    replies = await guard.execute(
        *("a", NEW, ("HSET", key, "n", 1), ("HINCRBY", key, "n", 41), ("HGETALL", key)),
        *(("HGET", key, "absent"), ("SET", guard.key("a", "s"), "x"), ("hget", key, "n"), ("PING",)),
    )
    assert replies == [1, 42, [b"n", b"42"], None, b"OK", b"42", b"PONG"]


async def test_a_refused_write_runs_none_of_its_commands(guard, redis_server):
    await guard.raise_to("a", NEW)
    body = guard.script("redis.call('SET', KEYS[1], 'stale') return 'ran'")
    for write in (
        guard.execute("a", OLD, ("SET", "x", "1"), ("RPUSH", "y", "1"), ("DEL", "fence")),
        guard.set("a", OLD, "x", "1"),
        body.run("a", OLD, keys=["x"]),
    ):
        with pytest.raises(StaleTokenError) as refusal:
            await write
        assert (refusal.value.token, refusal.value.fence) == (33, 34)
        assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)
    assert redis_server.ask("KEYS", "*") == ["fence:{a}"]
    assert redis_server.ask("GET", "fence:{a}") == "34 bbbbbbbb"


async def test_a_write_is_one_round_trip(proxy, redis_server):
    async with RedisGuard(proxy.url) as guard:
        await guard.set("a", OLD, "x", 1)
        del proxy.requests[:]
        await guard.execute("a", NEW, ("SET", "x", 1), ("INCR", "n"))
        assert proxy.commands == ["EVALSHA"]


async def test_scripts_that_vanish_are_sent_again(guard, redis_server):
    async def flush():
        for _ in range(30):
            await redis_server.command("SCRIPT", "FLUSH")

    async def write(writer):
        for _ in range(50):
            await guard.execute("a", NEW, ("INCR", "n"))
            await guard.raise_to("a", NEW)

    await asyncio.gather(flush(), *map(write, range(4)))
    assert redis_server.ask("GET", "n") == "200"


# What fails at the server.


async def test_the_first_command_that_fails_ends_it_and_the_fence_stays(guard, redis_server):
    redis_server.ask("SET", "text", "x")
    with pytest.raises(ResponseError, match="WRONGTYPE") as error:
        await guard.execute("a", NEW, ("SET", "before", 1), ("HSET", "text", "f", 1), ("SET", "after", 1))
    assert [redis_server.ask("GET", key) for key in ("before", "text", "after")] == ["1", "x", None]
    (note,) = error.value.__notes__
    assert "command 2 of 3, HSET, failed" in note
    assert await guard.highest("a") == NEW


async def test_a_server_without_memory_writes_nothing_and_lets_the_holder_delete(start_redis):
    server = start_redis(maxmemory_policy="noeviction")
    async with RedisGuard(server.url) as guard:
        await guard.set("a", OLD, "x", "value")
        server.ask("CONFIG", "SET", "maxmemory", "1")
        for token in (OLD, NEW):
            with pytest.raises(OutOfMemoryError):
                await guard.execute("a", token, ("SET", "y", 1))
        with pytest.raises(OutOfMemoryError):
            await guard.raise_to("a", NEW)
        assert await guard.highest("a") == OLD
        assert (server.ask("GET", "x"), server.ask("GET", "y")) == ("value", None)
        assert await guard.execute("a", OLD, ("GETDEL", "x")) == [b"value"]


async def test_the_commands_on_the_page_are_all_that_a_user_needs(start_redis):
    allowed = "+eval +evalsha +get +set"
    server = start_redis(user=[f"app on >secret ~fence:* ~{{a}}:* resetchannels -@all +hello {allowed} +incr"])
    for protocol in (2, 3):
        url = server.url.replace("//", "//app:secret@") + f"?protocol={protocol}"
        async with RedisGuard(url) as guard:
            for token in (OLD, OLD, NEW):
                await guard.raise_to("a", token)
                await guard.execute("a", token, ("INCR", guard.key("a", "n")))
            assert await guard.highest("a") == NEW
            with pytest.raises(StaleTokenError):
                await guard.execute("a", OLD, ("INCR", guard.key("a", "n")))
        server.ask("DEL", "fence:{a}")
    for command in allowed.replace("+", "").split():
        assert f"`{command}`" in PAGE, "the page does not say so"


async def test_a_guard_for_a_url_needs_no_resp3(start_redis):
    """Proxies refuse HELLO with texts such as "invalid request", which redis-py 8 sends first by default."""
    async with RedisGuard(start_redis(rename_command=['HELLO ""']).url) as guard:
        await guard.raise_to("a", NEW)
        assert await guard.execute("a", NEW, ("GET", guard.key("a", "n"))) == [None]


async def test_a_refusal_of_resp3_to_a_client_of_the_caller_has_a_note_of_its_own(start_redis):
    server, other = start_redis(rename_command=['HELLO ""']), start_redis()
    async with Redis.from_url(server.url, protocol=3) as refused, Redis.from_url(other.url, protocol=3) as client:
        for call in (RedisGuard(refused).raise_to("a", NEW), RedisGuard(refused).set("a", NEW, "x", 1)):
            with pytest.raises(ResponseError) as raised:
                await call
            assert "protocol=2" in raised.value.__notes__[0]
        with pytest.raises(ResponseError) as raised:
            await RedisGuard(client).execute("a", NEW, ("LPUSH", "x"))
        assert "protocol=2" not in raised.value.__notes__[0]


async def test_what_is_no_fence_lets_nobody_in(guard, redis_server):
    """One grammar: what the script takes for a fence, `highest` does, and what neither has written is none."""
    wrong = (
        "",
        "x",
        "-1",
        "34 zz",
        "34\n",
        "34 aa bb",
        "1.5",
        "34  aa",
        "34aa",
        "34 ",
        "034",
        "34 AA",
        f"34 {'a' * 65}",
    )
    for value in (*wrong, f"{'1' * 20}", f"{2**53}", "9" * 16, f"34 {'a' * 70}"):
        redis_server.ask("SET", "fence:{a}", value)
        for call in (guard.set("a", NEW, "x", 1), guard.raise_to("a", NEW), guard.highest("a")):
            with pytest.raises(BackendRefusedError, match="is not a fence"):
                await call
    redis_server.ask("DEL", "fence:{a}")
    redis_server.ask("RPUSH", "fence:{a}", "34")
    for call in (guard.set("a", NEW, "x", 1), guard.raise_to("a", NEW), guard.highest("a")):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await call
    assert redis_server.ask("EXISTS", "x") == 0


# What fails on the way.


async def test_a_write_whose_answer_is_lost_happened_once(proxy, redis_server):
    """Also with a client that would send everything again."""
    async with Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 3)) as client:
        guard = RedisGuard(client)
        await guard.execute("a", OLD, ("INCR", "n"))
        lost = proxy.lose_replies(of="n")
        with pytest.raises(redis.ConnectionError):
            await guard.execute("a", NEW, ("INCR", "n"))
        await asyncio.wait_for(lost, 20)
        assert redis_server.ask("GET", "n") == "2"
        assert await guard.execute("a", NEW, ("INCR", "n")) == [3]  # the holder itself may go on


async def test_a_guard_asks_again_for_a_fence_whose_answer_is_lost(proxy, redis_server):
    async with RedisGuard(proxy.url) as guard:
        await guard.raise_to("a", OLD)
        lost = proxy.lose_replies(of="fence:{a}")
        await guard.raise_to("a", NEW)
        assert lost.done()
        assert await guard.highest("a") == NEW


async def test_connections_that_were_closed_meanwhile_cost_nothing(guard, client, redis_server):
    """A pool holds connections that the server closed long ago; nothing was sent on them yet."""
    await asyncio.gather(*(guard.execute("a", NEW, ("INCR", "n")) for _ in range(5)))
    redis_server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    pooled = client.connection_pool._available_connections
    await until(lambda: all(connection._reader.at_eof() for connection in pooled), what="the loop has seen it")
    for _ in range(5):
        await guard.execute("a", NEW, ("INCR", "n"))
    assert redis_server.ask("GET", "n") == "10"


async def test_a_cancelled_write_leaves_its_answer_to_nobody(proxy):
    """The only connection of a pool is not handed on with an answer that is still to come."""
    pool = BlockingConnectionPool.from_url(proxy.url, max_connections=1)
    async with Redis.from_pool(pool) as client:
        guard = RedisGuard(client)
        await guard.execute("a", NEW, ("ECHO", "first"))
        proxy.half_open()
        seen = proxy.saw("cancelled")
        write = asyncio.create_task(guard.execute("a", NEW, ("ECHO", "cancelled")))
        await asyncio.wait_for(seen, 20)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        proxy.heal()
        assert await guard.execute("a", NEW, ("ECHO", "next")) == [b"next"]


# Lua of one's own.


async def test_a_body_finds_its_own_keys_and_arguments(guard):
    script = guard.script("return {#KEYS, #ARGV, KEYS[1], KEYS[2], ARGV[1], ARGV[3]}")
    assert await script.run("a", NEW, keys=["k1", "k2"], args=["1", b"\xff", 3]) == [2, 3, b"k1", b"k2", b"1", b"3"]
    assert await script.run("a", NEW) == [0, 0]


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("", None),
        ("return", None),
        ("return false", None),
        ("return nil, 1", None),
        ("return 7", 7),
        ("return {1, {2, {'3'}}}", [1, [2, [b"3"]]]),
        ("return redis.status_reply('FINE')", b"FINE"),
        ("if true then return 'early' end return 'late' -- a comment", b"early"),
        ("local key, token = 'its', 'own' return {key, token}", [b"its", b"own"]),
    ],
)
async def test_the_value_of_a_body_is_returned(guard, body, value):
    assert await guard.script(body).run("a", NEW) == value


async def test_a_body_that_is_no_lua_fails_with_its_own_line(guard, redis_server):
    with pytest.raises(ResponseError, match=r"(?s)ompiling script.*user_script:3:"):
        await guard.script("local x = 1\nlocal y = 2\nlocal = 3\n").run("a", NEW)
    with pytest.raises(ResponseError, match="ompiling script"):
        await guard.script("--[[ a comment that does not end").run("a", NEW)
    assert redis_server.ask("KEYS", "*") == []


async def test_arguments_never_become_code(guard, redis_server):
    evil = "'] redis.call('FLUSHALL') --", 'end"', "]]", "\r\n*1\r\n$8\r\nFLUSHALL\r\n", "'); DROP TABLE fence; --"
    for text in evil:
        await guard.execute("a", NEW, ("SET", text, text), ("APPEND", text, text))
        body = guard.script("return {redis.call('GET', KEYS[1]), ARGV[1]}")
        assert await body.run("a", NEW, keys=[text], args=[text]) == [text.encode() * 2, text.encode()]
    assert redis_server.ask("DBSIZE") == len(evil) + 1


async def test_a_body_cannot_come_before_its_check(guard, redis_server):
    """Not even one whose 'end' closes what it did not open."""
    await guard.raise_to("a", NEW)
    with pytest.raises(StaleTokenError):
        await guard.script("end redis.call('SET', 'x', 1) do local y = 1").run("a", OLD)
    assert redis_server.ask("EXISTS", "x") == 0


# The helpers, and what may be written.


async def test_a_key_may_be_set_for_a_while(guard, redis_server):
    await guard.set("a", NEW, "x", "value", ttl=100)
    assert 90_000 < redis_server.ask("PTTL", "x") <= 100_000
    assert redis_server.ask("GET", "x") == "value"


async def test_bytes_numbers_and_large_values_arrive_as_they_are(guard, client):
    large = bytes(range(256)) * 80_000
    await guard.execute("a", NEW, ("SET", b"\xff{", large), ("SET", 7, 0.1), ("SET", "view", memoryview(b"v\0")))
    assert [await client.get(key) for key in (b"\xff{", "7", "view")] == [large, b"0.1", b"v\0"]
    assert (await guard.execute("a", NEW, ("GET", b"\xff{"))) == [large]
    words = ["w"] * (WORDS_LIMIT - 2)
    assert await guard.execute("a", NEW, *[("RPUSH", "l", *words)] * 20) == [len(words) * n for n in range(1, 21)]


async def test_a_client_that_decodes_gets_text(redis_server):
    for protocol in (2, 3):
        async with Redis.from_url(redis_server.url, decode_responses=True, protocol=protocol) as client:
            guard = RedisGuard(client)
            assert await guard.execute("a", NEW, ("SET", "x", "é"), ("GET", "x")) == ["OK", "é"]
            assert (await guard.highest("a")).holder == NEW.holder
            with pytest.raises(StaleTokenError) as refusal:
                await guard.set("a", Token(34, "c"), "x", 1)
            assert refusal.value.conflict


async def test_the_page_about_it_is_true(redis_server):
    section = PAGE.partition("## On Redis")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    code = "".join(blocks).replace("redis://localhost", redis_server.url)
    page = {"locks": connect("memory://")}
    await eval(compile(code, "guards.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), page)
    assert (len(blocks), page["taken"], page["sold"]) == (2, 1, 1)
    assert redis_server.ask("HGETALL", page["row"]) == ["who", "Ada"]


# Names.


def test_a_key_carries_the_resource_as_its_tag(guard):
    assert guard.key("seats/42", "row") == "{seats/42}:row"
    assert guard.key("{a}%", "{b}") == "{%7Ba%7D%25}:{b}"


# Construction.


async def test_a_clients_owner_closes_it(client):
    async with RedisGuard(client) as guard:
        await guard.raise_to("a", NEW)
        connection = client.connection_pool._available_connections[0]
    assert connection.is_connected
    await guard.raise_to("a", NEW)


async def test_a_guard_that_was_closed_opens_connections_again_and_closes_those_too(redis_server):
    guard = RedisGuard(redis_server.url)
    for token in (NEW, NEW + 1):
        await asyncio.gather(*(guard.set("a", token, "x", 1) for _ in range(5)))
        assert redis_server.ask("CLIENT", "LIST").count("cmd=") > 1
        await guard.aclose()
        await until(lambda: "user=default" not in redis_server.ask("CLIENT", "LIST"), what="they are closed")


async def test_a_url_may_be_a_socket_and_valkeys(redis_server):
    for url in (f"unix://{redis_server.socket_path}", redis_server.url.replace("redis", "valkey")):
        async with RedisGuard(url) as guard:
            await guard.raise_to("a", NEW)


def test_urls_are_read_that_urlsplit_refuses():
    for url in ("redis://u:p@[::1]:2/1?socket_timeout=2", "rediss+cluster://u:p@h1,[::1]:2", "unix:///run/s?db=1"):
        assert RedisGuard(url)


NO_CLIENTS = [None, 7, b"redis://localhost", object(), SimpleNamespace(execute_command=print), Redis, redis]


@pytest.mark.parametrize("client", NO_CLIENTS, ids=lambda client: ascii(client)[:20])
def test_a_guard_refuses_what_is_no_client(client):
    with pytest.raises(ConfigurationError, match=r"redis\.asyncio"):
        RedisGuard(client)


def test_clients_that_block_and_pipelines_are_refused():
    with redis.Redis() as client, pytest.raises(ConfigurationError, match=r"redis\.asyncio"):
        RedisGuard(client)
    with pytest.raises(ConfigurationError, match=r"redis\.asyncio"):
        RedisGuard(Redis().pipeline())


BAD_URLS = [
    *("", "localhost", "http://user:secret@h", "redis+sentinel://user:secret@h", "redis://user:secret@h:port"),
    *("redis://user:secret@h?db=secret", "redis://user:secret@h?nonesuch=1", "redis://user:secret@[h"),
    *("redis+cluster://user:secret@h?nonesuch=1", "redis+cluster://user:secret@h:port", "redis:secret"),
]


@pytest.mark.parametrize("place", ["h1,h2", "h/x", "h/1/2", "h/-1", "h/1_0", "h/\u0663", "h/1?db=2", "h?db=1&db=2"])
def test_a_place_that_the_store_refuses_is_refused_with_the_same_reason(place):
    """Guard and store may stand in one configuration: one URL must not name two databases."""
    for url in (f"redis://user:secret@{place}", f"rediss://user:secret@{place}?ssl_ca_certs=ca.pem"):
        with pytest.raises(ConfigurationError, match=r"url (names|must have|gives)") as error:
            RedisGuard(url)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        *("unix://h/run/s", "unix://", "unix:///", "redis+cluster://", "redis+cluster://h1,h2/3", "redis://h?host=h2"),
        *("redis://user:secret@h?password=secret", "unix:///run/s?path=/run/secret"),
    ],
)
def test_a_server_that_is_named_twice_or_too_little_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"url (names|must look like|gives)") as error:
        RedisGuard(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigurationError, match="url") as error:
        RedisGuard(url)
    assert "secret" not in str(error.value)
    assert (error.value.__cause__, error.value.__context__) == (None, None)


@pytest.mark.parametrize(
    "options",
    [
        *({"prefix": bad} for bad in ("", "a{b", "a}b", "a\n", None, "x" * 513)),
        {"observers": [None]},
    ],
    ids=ascii,
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options)).removesuffix("s")):
        RedisGuard("redis://localhost", **options)


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ([], "no command"),
        (["SET x 1"], "sequence of its words"),
        ([b"SET"], "sequence of its words"),
        ([()], "sequence of its words"),
        ([None], "sequence of its words"),
        ([{"SET": 1}], "sequence of its words"),
        ([("SET x", 1)], "first word"),
        ([(b"SET", "x", 1)], "first word"),
        ([("", "x")], "first word"),
        ([("SET", "x", None)], "arguments of SET must be"),
        ([("SET", "x", True)], "arguments of SET must be"),
        ([("SET", "x", ["y"])], "arguments of SET must be"),
        ([("SET", "x", 1), ("RPUSH", "l", *["w"] * WORDS_LIMIT)], "5000 is the most"),
        ([("BITOP", "AND", "x", "y")], r"keys=\["),
        ([("SET", "fence:{a}", 1)], "is the fence"),
        ([("DEL", "x", b"fence:{a}")], "is the fence"),
    ],
)
async def test_commands_that_cannot_work_are_refused_before_anything_is_sent(guard, redis_server, commands, words):
    with pytest.raises(ConfigurationError, match=words):
        await guard.execute("a", NEW, *commands)
    assert redis_server.ask("DBSIZE") == 0


async def test_keys_and_arguments_of_other_types_are_refused(guard, redis_server):
    script = guard.script("return 1")
    for call in (
        lambda: script.run("a", NEW, keys=[None]),
        lambda: script.run("a", NEW, args=[{}]),
        lambda: guard.execute("a", NEW, ("PING",), keys=[True]),
        lambda: guard.set("a", NEW, "x", 1, ttl=0),
        lambda: guard.raise_to("a", Token(1, "not hex")),
        lambda: guard.set("a", Token(1, "AB"), "x", 1),
    ):
        with pytest.raises(ConfigurationError):
            await call()
    for body in (None, b"return 1", 7, "#!lua flags=no-writes\nreturn 1", "\ud800"):
        with pytest.raises(ConfigurationError, match="body"):
            guard.script(body)
    for name in ("", "a\n", None):
        with pytest.raises(ConfigurationError):
            guard.key("a", name)
    assert redis_server.ask("DBSIZE") == 0


async def test_commands_whose_keys_are_elsewhere_name_them(guard, redis_server):
    redis_server.ask("SET", "x", "\x0f")
    assert await guard.execute("a", NEW, ("BITOP", "NOT", "y", "x"), keys=["x", "y"]) == [1]
    assert await guard.execute("a", NEW, ("MSET", "p", 1, "q", 2), ("RENAME", "p", "r"), ("PUBLISH", "c", "m")) == [
        *(b"OK", b"OK", 0)
    ]


# The driver.


def python(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)


def test_no_driver_is_loaded_before_a_url_asks_for_one():
    code = "import sys, fencing_sdk.guards.redis; print({'redis', 'valkey', 'hiredis'} & sys.modules.keys())"
    assert python(code).stdout == "set()\n"


def test_a_missing_driver_names_the_extra():
    code = """
import sys
sys.modules["redis"] = sys.modules["redis.asyncio"] = None
from fencing_sdk.guards.redis import RedisGuard
RedisGuard("redis://user:secret@h")
"""
    said = python(code).stderr
    assert said.splitlines()[-1].endswith("run: pip install 'fencing-sdk[redis]', or '.[redis]' in a checkout")
    assert "secret" not in said.split("During handling")[-1].splitlines()[-1]


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster"])
async def test_a_server_that_is_not_reached_is_told_with_host_port_and_reason_and_without_the_password(scheme):
    port = free_port()
    reasons = {f"{HOST}:{port}": "connect call failed", "no-such-host.invalid:6380": "name"}
    for address, reason in reasons.items():
        async with RedisGuard(f"{scheme}://app:hunter2@{address}") as guard:
            with pytest.raises((redis.RedisError, RedisClusterException)) as unreachable:
                await guard.raise_to("a", NEW)
        assert address in str(unreachable.value)
        assert reason in str(unreachable.value).lower()
        assert "hunter2" not in str(unreachable.value)
