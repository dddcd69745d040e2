"""The proxy makes each fault, and passes on all else."""

import asyncio
import contextlib

import pytest
import redis
from fault_proxy import FaultProxy, Link
from patience import until
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

pytest_plugins = ["redis_fixtures"]


@contextlib.asynccontextmanager
async def client(url, *, patience=20.0, **options):
    """A client with one connection that tries once and gives up after *patience*."""
    retry = Retry(NoBackoff(), 0)
    driver = Redis.from_url(
        url, socket_timeout=patience, single_connection_client=True, retry=retry, decode_responses=True, **options
    )
    async with driver:
        yield driver


@pytest.mark.every_loop
@pytest.mark.parametrize("protocol", [2, 3])
async def test_what_is_not_at_fault_passes_and_is_counted(proxy, redis_server, protocol):
    async with client(proxy.url, protocol=protocol) as driver:
        await driver.set("binary", b"\r\n$3\r\n\x00" * 50_000)
        async with driver.pipeline() as pipe:
            await pipe.set("n", 1).get("n").execute()
        assert proxy.commands[-4:] == ["MULTI", "SET", "GET", "EXEC"]
        assert proxy.requests[-2] == (b"GET", b"n")
        assert (proxy.accepted, proxy.connections) == (2, 2)
        assert await redis_server.command("STRLEN", "binary") == 350_000 == await driver.strlen("binary")
        assert proxy.bytes_up > 350_000
        assert proxy.bytes_down > 0
    await until(lambda: proxy.connections == 0, what="the client has left")


async def test_in_a_black_hole_a_client_waits_until_its_patience_ends(proxy, redis_server):
    async with client(proxy.url, patience=1.0) as driver:
        await driver.ping()
        proxy.blackhole()
        with pytest.raises(redis.TimeoutError):
            await driver.incr("n")
        assert await redis_server.command("EXISTS", "n") == 0


async def test_what_was_held_back_arrives_late_from_a_client_that_gave_up(proxy, redis_server):
    async with client(proxy.url, patience=1.0) as driver:
        await driver.ping()
        proxy.blackhole()
        with pytest.raises(redis.TimeoutError):
            await driver.incr("n")
    proxy.heal()
    await until(lambda: redis_server.ask("GET", "n") == "1", what="the command arrives")


async def test_half_open_delivers_requests_alone(proxy, redis_server):
    async with client(proxy.url, patience=1.0) as driver:
        await driver.ping()
        proxy.half_open()
        with pytest.raises(redis.TimeoutError):
            await driver.incr("n")
    await until(lambda: redis_server.ask("GET", "n") == "1", what="the command arrives")


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_lost_reply_is_lost_after_the_command_was_executed(proxy, redis_server, protocol):
    async with client(proxy.url, protocol=protocol) as driver:
        lost = proxy.lose_replies(of="INCR")
        await driver.set("other", "passes")
        with pytest.raises(redis.ConnectionError):
            await driver.incr("n")
        await lost
        assert redis_server.ask("GET", "n") == "1"
        assert await driver.incr("n") == 2


async def test_a_lost_request_is_never_executed(proxy, redis_server):
    async with client(proxy.url) as driver:
        await driver.ping()
        lost = proxy.lose_requests(of="INCR")
        with pytest.raises(redis.ConnectionError):
            await driver.incr("n")
        await lost
        assert redis_server.ask("EXISTS", "n") == 0


async def test_replies_before_the_lost_one_arrive(proxy, redis_server):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    lost = proxy.lose_replies(of="marked")
    writer.write(b"".join(b"*2\r\n$4\r\nINCR\r\n$6\r\n%b\r\n" % key for key in (b"before", b"marked", b"behind")))
    await lost
    assert await reader.read() == b":1\r\n"
    assert redis_server.ask("GET", "marked") == "1"
    writer.close()
    await writer.wait_closed()


async def test_pushes_are_not_taken_for_the_reply(proxy, redis_server):
    """A message that arrives between a request and its reply does not make the request look executed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n")
    writer.write(b"*2\r\n$9\r\nSUBSCRIBE\r\n$4\r\nnews\r\n")
    await reader.readuntil(b"news\r\n:1\r\n")
    writer.write(b"*4\r\n$6\r\nCLIENT\r\n$8\r\nTRACKING\r\n$2\r\nON\r\n$5\r\nBCAST\r\n")
    assert await reader.readline() == b"+OK\r\n"
    lost = proxy.lose_replies(of="empty")
    writer.write(b"*3\r\n$5\r\nBLPOP\r\n$5\r\nempty\r\n$1\r\n0\r\n")
    await until(lambda: "cmd=blpop" in redis_server.ask("CLIENT", "LIST"), what="the command arrives")
    redis_server.ask("PUBLISH", "news", "paper")
    await reader.readuntil(b"paper\r\n")
    redis_server.ask("SET", "tracked", 1)
    await reader.readuntil(b"tracked\r\n")
    assert not lost.done()
    redis_server.ask("RPUSH", "empty", "no more")
    await lost
    assert b"no more" not in await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_delay_makes_everything_late_and_keeps_the_order(proxy):
    async with client(proxy.url, patience=1.0) as driver:
        await driver.ping()
        proxy.delay(replies=30)
        with pytest.raises(redis.TimeoutError):
            await driver.ping()
    proxy.delay(requests=0.05, replies=0.05)
    async with client(proxy.url) as driver:
        start = asyncio.get_running_loop().time()
        assert [await driver.incr("n") for _ in range(3)] == [1, 2, 3]
        assert asyncio.get_running_loop().time() - start >= 0.3


@pytest.mark.every_loop
async def test_cut_resets_connections_and_lets_new_ones_in(proxy):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"*1\r\n$4\r\nPING\r\n")
    assert await reader.readline() == b"+PONG\r\n"
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await until(lambda: proxy.connections == 0, what="the connection is gone")
    async with client(proxy.url) as driver:
        assert await driver.ping()
    assert proxy.accepted == 2


@pytest.mark.every_loop
async def test_refuse_takes_no_connections_until_it_heals(proxy):
    async with client(proxy.url) as driver:
        await driver.ping()
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            async with client(proxy.url):
                pass
        assert await driver.ping()
        proxy.heal()
        proxy.refuse()
        proxy.heal()
        async with client(proxy.url) as another:
            assert await another.ping()


async def test_a_dead_server_shows_through_the_proxy(start_redis):
    server = start_redis()
    async with FaultProxy(server.port) as proxy, client(proxy.url) as driver:
        await driver.ping()
        server.kill()
        with pytest.raises(redis.ConnectionError):
            await driver.ping()
        server.start()
        assert await driver.ping()


async def test_tls_passes_unread(start_redis, certificates):
    server = start_redis(tls=certificates)
    async with FaultProxy(server.tls_port) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        async with client(url, ssl_ca_certs=str(certificates.authority)) as driver:
            assert await driver.echo("\r\n" * 1000) == "\r\n" * 1000
            assert proxy.commands == []
            proxy.cut()
            with pytest.raises(redis.ConnectionError):
                await driver.ping()


async def test_a_connection_that_is_made_for_a_client_that_is_gone_is_closed(redis_server):
    """The client leaves while its other half is made, and a black hole swallows the word of it."""
    async with FaultProxy(redis_server.port) as proxy:
        proxy.blackhole()
        link = Link(proxy)
        link.client_lost()
        assert link not in proxy.links
        await link.connect()
        assert link.server is not None
    assert link.server is None
