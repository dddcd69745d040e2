"""What a dial hands over is open, logged in and complete; what it does not hand over is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import ssl
import sys
import traceback
from collections.abc import AsyncIterator

import hiredis
import pytest
import redis.asyncio
import redis.exceptions
import valkey.asyncio
from local_ports import HOST, free_port
from redis.credentials import CredentialProvider
from redis_links import PATIENCE, Ears, ask, client_info, dialer, dialled, until_nobody_is_connected
from redis_server import RedisServer, version_of
from serving import serving

import fencing_sdk.backends.redis.connection.dial as dial_module
from fencing_sdk import connect
from fencing_sdk._engine import engine
from fencing_sdk.backends.redis import RedisBackend
from fencing_sdk.backends.redis.connection.dial import UnreachableError
from fencing_sdk.backends.redis.options import servers_of_client
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

pytest_plugins = ["redis_fixtures"]


@pytest.fixture(params=["tcp", "tls", "unix"])
def road(request, start_redis, certificates) -> tuple[RedisServer, str]:
    """A server, and the URL of one way to it."""
    if request.param == "tls":
        server = start_redis(tls=certificates)
        return server, f"{server.tls_url}?ssl_ca_certs={certificates.authority}"
    server = start_redis()
    return server, f"unix://{server.socket_path}?" if request.param == "unix" else f"{server.url}?"


@pytest.mark.every_loop
async def test_the_protocol_gets_what_the_server_says_and_redis_py_nothing(road):
    server, url = road
    async with dialled(f"{url}&db=3") as (link, ears):
        gc.collect()  # what is left of redis-py's objects must neither warn nor close
        info = await client_info(link, ears)
        assert (info["resp"], info["db"], info["name"]) == ("3", "3", "fencing-sdk")
        assert link.version == version_of(server.binary)
        assert not link.cluster
        assert not ears.made
        assert await ask(link, ears, "ECHO", "x" * 1_000_000) == b"x" * 1_000_000
    await until_nobody_is_connected(server)


@pytest.mark.every_loop
async def test_the_protocol_hears_of_the_end_of_the_connection(road):
    server, url = road
    async with dialled(url) as (_, ears):
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(PATIENCE):
            await ears.lost.wait()


@pytest.mark.every_loop
async def test_a_dial_that_is_cancelled_leaves_no_connection(road):
    server, url = road
    place = dialer(url)
    for turns in range(0, 60, 2):
        ears = Ears()
        dialling = asyncio.create_task(place.dial(ears))
        for _ in range(turns):
            await asyncio.sleep(0.0002)
        dialling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await dialling).transport.close()
            await ears.lost.wait()
        del dialling
    gc.collect()
    await until_nobody_is_connected(server)


@pytest.mark.every_loop
async def test_a_dial_that_is_cancelled_ends_at_once_although_the_server_is_silent(road):
    server, url = road
    place = dialer(f"{url}&socket_connect_timeout=600")
    server.pause()
    for turns in range(60):
        dialling = asyncio.create_task(place.dial(Ears()))
        for _ in range(turns):
            await asyncio.sleep(0)
        dialling.cancel()
        await asyncio.wait([dialling], timeout=PATIENCE)
        assert dialling.cancelled()
    server.resume()
    gc.collect()
    await until_nobody_is_connected(server)


@pytest.mark.slow
@pytest.mark.every_loop
@pytest.mark.parametrize("secret", ["app:hunter2", "nobody:secret", ":hunter2", ""])
async def test_a_login_that_is_refused_is_told_on_every_road_and_leaves_no_connection(road, secret):
    server, url = road
    await server.command("ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all")
    await server.command("ACL", "SETUSER", "default", ">another")
    place = dialer(url.replace("://", f"://{secret}@", 1))
    with pytest.raises(redis.exceptions.AuthenticationError) as refused:
        await place.dial(Ears())
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
    del refused
    gc.collect()
    await until_nobody_is_connected(server)


async def test_a_password_that_the_server_does_not_want_does_no_harm(redis_server):
    """As in redis-py with RESP3, and as in its predecessor with none."""
    async with dialled(redis_server.url.replace("://", "://:needless@")) as (link, ears):
        assert await ask(link, ears, "PING") == b"PONG"


async def test_a_server_without_resp3_is_refused_in_our_words(start_redis):
    server = start_redis(rename_command=['HELLO ""'])
    with pytest.raises(BackendRefusedError, match=r"6\.2"):
        await dialer(server.url).dial(Ears())
    await until_nobody_is_connected(server)


@pytest.mark.parametrize(("said", "usable"), [("6.0.20", False), ("5.9.103", False), ("6.2.0", True), ("12.0", True)])
async def test_the_version_counts_as_numbers(said, usable):
    async with scripted(hello(version=said)) as url:
        if usable:
            async with dialled(url) as (link, _):
                assert link.version == tuple(map(int, said.split(".")))
        else:
            with pytest.raises(BackendRefusedError, match=r"6\.2"):
                await dialer(url).dial(Ears())


@pytest.mark.every_loop
async def test_a_server_that_is_silent_costs_the_connect_timeout(road):
    server, url = road
    place = dialer(f"{url}&socket_connect_timeout=0.2")
    server.pause()
    try:
        with pytest.raises(
            UnreachableError, match=r"no connection to .* \(no answer within 0\.2 s(; does it speak TLS\?)?\)"
        ):
            await place.dial(Ears())
    finally:
        server.resume()
    await until_nobody_is_connected(server)


SECRET = "hunter2"


async def complaint(url: str) -> str:
    """What is said to a user whose client does not open; no password is, not even in the causes."""
    with pytest.raises(BackendUnavailableError) as unavailable:
        async with connect(url):
            pytest.fail("it opened")
    error: BaseException | None = unavailable.value
    while error is not None:
        assert SECRET not in repr(error) + str(error)
        error = error.__cause__ or error.__context__
    return str(unavailable.value)


@pytest.mark.every_loop
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_port_where_nobody_listens_is_told_with_its_host(host):
    port = free_port()
    said = await complaint(f"redis://app:{SECRET}@{host}:{port}")
    # A machine without IPv6 has another reason for that address.
    reason = "Cannot assign requested address|Connection refused" if ":" in host else "Connection refused"
    assert re.fullmatch(
        rf"RedisBackend: open failed: no connection to {re.escape(host)}:{port} \(({reason})\)", said
    ), said


@pytest.mark.every_loop
async def test_a_host_that_has_no_address_is_told_with_the_reason():
    said = await complaint(f"redis://app:{SECRET}@no-such-host.invalid:6380")
    reasons = "Name or service not known|Temporary failure in name resolution|No address associated with hostname"
    assert re.fullmatch(rf".*no connection to no-such-host\.invalid:6380 \(({reasons})\)", said), said


async def test_a_server_that_is_silent_is_told_before_the_patience_of_the_client_ends():
    assert dial_module.CONNECT_TIMEOUT < engine._CALL_LIMIT
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        said = await complaint(f"redis://app:{SECRET}@{HOST}:{port}?socket_connect_timeout=0.1")
    assert f"no connection to {HOST}:{port} (no answer within 0.1 s)" in said


async def test_a_server_that_hangs_up_is_told_with_the_reason():
    async with hanging_up() as port:
        said = await complaint(f"redis://app:{SECRET}@{HOST}:{port}")
    assert re.search(
        rf"no connection to {HOST}:{port} \((the connection was closed|Connection reset by peer); is it Redis, ", said
    ), said


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"220 mail ready\r\n"]
)
async def test_what_is_no_redis_is_told_by_its_address(answer):
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await reader.read()
        writer.close()

    async with serving(speak) as port:
        said = await complaint(f"redis://app:{SECRET}@{HOST}:{port}")
    assert f"no connection to {HOST}:{port} (the peer does not speak the protocol of Redis)" in said


@contextlib.asynccontextmanager
async def hanging_up() -> AsyncIterator[int]:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with serving(hang_up) as port:
        yield port


# TLS


async def test_a_certificate_for_another_host_is_refused_unless_told_otherwise(start_redis, certificates):
    server = start_redis(tls=certificates)
    url = f"rediss://127.0.0.2:{server.tls_port}?ssl_ca_certs={certificates.authority}"
    await server.command("CONFIG", "SET", "bind", "127.0.0.1 127.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        await dialer(url).dial(Ears())
    async with dialled(f"{url}&ssl_check_hostname=false") as (link, ears):
        assert await ask(link, ears, "PING") == b"PONG"


async def test_trust_can_be_switched_off(start_redis, certificates):
    server = start_redis(tls=certificates)
    async with dialled(f"{server.tls_url}?ssl_cert_reqs=none") as (link, ears):
        assert await ask(link, ears, "PING") == b"PONG"


async def test_a_client_certificate_is_shown(start_redis, certificates):
    server = start_redis(tls=certificates)
    await server.command("CONFIG", "SET", "tls-auth-clients", "yes")
    url = f"{server.tls_url}?ssl_ca_certs={certificates.authority}"
    with pytest.raises((BackendRefusedError, redis.exceptions.ConnectionError, OSError)):  # as the alert comes or not
        await dialer(url).dial(Ears())
    shown = f"{url}&ssl_certfile={certificates.client_certificate}&ssl_keyfile={certificates.client_key}"
    async with dialled(shown) as (link, ears):
        assert await ask(link, ears, "PING") == b"PONG"


async def test_certificates_are_not_read_in_the_event_loop(start_redis, certificates, monkeypatch):
    server = start_redis(tls=certificates)
    context, in_loop = ssl.create_default_context, []

    def watched(*args, **kwargs):
        with contextlib.suppress(RuntimeError):
            in_loop.append(asyncio.get_running_loop())
        return context(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", watched)
    async with dialled(f"{server.tls_url}?ssl_ca_certs={certificates.authority}"):
        assert in_loop == []


# The moment of the takeover, with servers that do what a real one does only by accident


@contextlib.asynccontextmanager
async def scripted(*answers: bytes, then_close: bool = False) -> AsyncIterator[str]:
    """A server that says ``+OK`` to everything before HELLO, and to that what the script says."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader(notEnoughData=gone)
        while data := await reader.read(65536):
            parser.feed(data)
            while (command := parser.gets()) is not gone:
                writer.write(b"+OK\r\n" if command[0] != b"HELLO" else b"".join(answers))
                if command[0] == b"HELLO" and then_close:
                    writer.close()
        writer.close()
        gone.set()

    async with serving(serve) as port:
        yield f"redis://{HOST}:{port}"
        async with asyncio.timeout(PATIENCE):
            await gone.wait()  # the client has hung up, whatever became of the dial


def hello(**fields: str) -> bytes:
    """The answer to HELLO."""
    heard = {"server": "redis", "version": "7.0.15", "mode": "standalone", "role": "master"} | fields
    lines = [f"+{word}" for pair in heard.items() for word in pair]
    return "\r\n".join([f"%{len(heard) + 1}", "+proto", ":3", *lines, ""]).encode()


@pytest.mark.every_loop
async def test_what_comes_with_the_last_reply_is_not_dropped_silently():
    async with scripted(hello(), b">1\r\n+surprise\r\n") as url:
        with pytest.raises(redis.exceptions.ConnectionError):
            await dialer(url).dial(Ears())


@pytest.mark.parametrize("harm", ["eof", "reset", "bytes", "half a reply", "closing"])
async def test_a_connection_that_ends_or_speaks_before_the_takeover_is_not_taken(redis_server, harm):
    """On one loop or another each of these can come between the last reply and the takeover."""
    place = dialer(redis_server.url)
    connection = place.server.connection()
    await connection.connect()
    reader, transport = connection._reader, connection._writer.transport
    harms = {
        "eof": reader.feed_eof,
        "reset": lambda: reader.set_exception(ConnectionResetError()),
        "bytes": lambda: reader.feed_data(b"+"),
        "half a reply": lambda: connection._parser._reader.feed(b"+"),
        "closing": transport.abort,
    }
    harms[harm]()
    with pytest.raises(redis.exceptions.ConnectionError):
        dial_module._take_over(connection, Ears())
    await dial_module._abort(connection)
    await until_nobody_is_connected(redis_server)


# Clients that a user already has


class Tokens(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return ("app", "secret")


async def test_a_clients_way_to_connect_is_copied_and_the_client_left_alone(start_redis, certificates):
    server = start_redis(tls=certificates, user=["app on >secret ~* +@all"])
    async with redis.asyncio.Redis(
        port=server.tls_port,
        host=HOST,
        db=2,
        ssl=True,
        ssl_ca_certs=str(certificates.authority),
        credential_provider=Tokens(),
        client_name="mine",
        decode_responses=True,
    ) as client:
        before = dict(client.connection_pool.connection_kwargs)
        async with dialled(servers_of_client(client)) as (link, ears):
            info = await client_info(link, ears)
        assert (info["db"], info["name"], info["user"], info["resp"]) == ("2", "mine", "app", "3")
        assert client.connection_pool.connection_kwargs == before
        assert not client.connection_pool._available_connections
        assert await client.ping()
    await until_nobody_is_connected(server)


async def test_clients_of_every_make_dial(start_redis):
    server = start_redis(requirepass="secret")
    clients = [
        redis.asyncio.Redis(port=server.port, password="secret"),
        redis.asyncio.Redis.from_url(server.url, password="secret", protocol=3),
        redis.asyncio.Redis(unix_socket_path=server.socket_path, password="secret"),
        redis.asyncio.Redis(connection_pool=redis.asyncio.BlockingConnectionPool(port=server.port, password="secret")),
        valkey.asyncio.Valkey(port=server.port, password="secret"),
        valkey.asyncio.Valkey(unix_socket_path=server.socket_path, password="secret"),
        redis.Redis(port=server.port, password="secret"),
        redis.Redis(unix_socket_path=server.socket_path, password="secret"),
        valkey.Valkey(port=server.port, password="secret"),
    ]
    for client in clients:
        async with dialled(servers_of_client(client)) as (link, ears):
            assert await ask(link, ears, "PING") == b"PONG"
        assert not getattr(client.connection_pool, "_available_connections", [])
        await client.aclose() if hasattr(client, "aclose") else client.close()


# A driver that has changed inside


def asked_by_us() -> bool:
    """Whether the caller's caller is ours: to itself, a driver that has changed is as it should be."""
    return sys._getframe(2).f_globals["__name__"] == dial_module.__name__


class RenamedWriter(redis.asyncio.Connection):
    def __getattribute__(self, name: str) -> object:
        if name == "_writer" and asked_by_us():
            raise AttributeError(name)
        return super().__getattribute__(name)


class OtherParser(redis.asyncio.Connection):
    async def connect(self) -> None:
        await super().connect()
        self._parser._reader = object()


class OtherCommand(redis.asyncio.Connection):
    async def send_command(self, *words: object, **options: object) -> None:
        if options and asked_by_us():
            raise TypeError("send_command() got an unexpected keyword argument")
        await super().send_command(*words, **options)


class OtherArguments(redis.asyncio.Connection):
    def __init__(self, *, host: str, port: int, protocol: int, retry: object) -> None:
        super().__init__(host=host, port=port, protocol=protocol, retry=retry)


@pytest.mark.parametrize("kind", [RenamedWriter, OtherParser, OtherCommand, OtherArguments])
async def test_a_driver_that_has_changed_inside_is_refused_by_its_version(redis_server, kind):
    pool = redis.asyncio.ConnectionPool(connection_class=redis.asyncio.Connection, port=redis_server.port)
    pool.connection_class = kind
    backend = RedisBackend(redis.asyncio.Redis(connection_pool=pool))
    with pytest.raises(BackendRefusedError) as refused:
        await backend.open()
    kind = type(refused.value.__cause__).__name__
    assert str(refused.value) == (
        f"RedisBackend: connect failed: redis {redis.__version__} has changed inside ({kind}); "
        "fencing_sdk works with redis>=7,<9"
    )
    await backend.aclose()
    await until_nobody_is_connected(redis_server)
