"""Who may connect to ZooKeeper and how a client shows who it is; who may touch the nodes, and what the sessions are."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import digest_md5
import pytest
from event_log import CLOCK
from fault_proxy import FaultProxy
from local_ports import free_port
from patience import until
from throwaway_certificates import make_certificates
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper
from zookeeper_stage import granted, kept, tickets_of

from fencing_sdk import connect
from fencing_sdk.abc import Busy, Claim, Gone, Place
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.backends.zookeeper.driver import Dial, KazooDriver, NodeEnds, ZooKeeperSettings
from fencing_sdk.backends.zookeeper.session import MOST_SESSIONS
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, ConfigurationError

pytest_plugins = ["zookeeper_fixtures"]


# Who may connect to ZooKeeper, who may touch the nodes, and what the sessions are.


SECRET = "hunter2"


@pytest.fixture
def root():
    return fresh_root()


@pytest.fixture
async def opened():
    """Make backends that are closed after the test."""
    backends = []

    def make(url: str, **options: object) -> ZooKeeperBackend:
        backends.append(from_url(url, **options))
        return backends[-1]

    yield make
    for backend in backends:
        await backend.aclose()


# Logins.


async def test_only_the_login_that_made_the_nodes_may_touch_them(zookeeper_server, root, opened):
    address = zookeeper_server.address
    ours = opened(f"zk://app:{SECRET}@{address}{root}")
    assert (await ours.draw(Claim("a", 20.0))).token is not None
    for stranger in (opened(f"zk://app:wrong@{address}{root}"), opened(f"zk://{address}{root}")):
        with pytest.raises(BackendRefusedError, match="root"):
            await stranger.draw(Claim("b", 20.0))
        with pytest.raises(BackendRefusedError):
            await stranger.tickets(["a"])
    same = opened(f"zk://app:{SECRET}@{address}{root}")
    assert isinstance(await same.draw(Claim("a", 20.0), only_if_it_holds=True), Busy)


async def test_a_password_is_in_no_log(zookeeper_server, root, opened, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(1, "kazoo")
    backend = opened(f"zk://app:{SECRET}@{zookeeper_server.address}{root}")
    claim = Claim("a", 20.0)
    await backend.draw(claim)
    await backend.give_back(claim)
    assert SECRET not in caplog.text
    assert SECRET not in repr(vars(backend))


# Sessions.


async def test_locks_of_one_ttl_share_a_session_and_the_number_of_sessions_is_bounded(zookeeper_url, opened):
    backend = opened(zookeeper_url)
    claims = [Claim(f"a/{number}", 20.0 + number % 12) for number in range(60)]
    for claim in claims:
        assert (await backend.draw(claim)).token is not None
    sessions = {own.session for own in tickets_of(backend)}
    assert len(sessions) == MOST_SESSIONS
    assert all(own.session.lease >= own.claim.ttl for own in tickets_of(backend) if own.claim.ttl <= 27)
    assert all(isinstance(answer, Place) for answer in await kept(backend, *claims))


async def test_a_session_is_half_as_long_again_as_the_ttl_that_it_is_for(zookeeper_url, opened):
    """The server may not know of the last third of a session's signs of life."""
    backend = opened(zookeeper_url)
    assert (await backend.draw(Claim("a", 4.0))).ttl is None
    assert backend._sessions.of(4.0).timeout == pytest.approx(6.0, abs=0.01)


async def test_a_ttl_that_the_server_does_not_allow_is_granted_as_far_as_it_does(start_zookeeper, opened):
    server = start_zookeeper(settings=["maxSessionTimeout=9000"])
    backend, claim = opened(server.url), Claim("a", 60.0)
    assert (await backend.draw(claim)).ttl == pytest.approx(6.0)
    ((answer,)) = await kept(backend, claim)
    assert answer.ttl == pytest.approx(6.0)


async def test_what_the_user_did_not_set_follows_the_longest_session_of_the_server(start_zookeeper):
    server = start_zookeeper(settings=["maxSessionTimeout=9000"])
    async with connect(server.url) as locks:
        asked_at = CLOCK.now()
        async with locks.lock("a", ttl=60) as lease:
            assert lease.ttl == pytest.approx(6.0)
            left = lease.remaining
            assert left <= 4.74
            assert CLOCK.now() + left > asked_at + 4.7
            await lease.renew()
            assert lease.remaining <= 4.74
        async with locks.lock("a", ttl=60, safety_buffer=1, heartbeat_interval=1) as lease:
            assert lease.remaining <= 4.94
        with pytest.raises(
            BackendRefusedError, match=r"grants less: heartbeat_interval=2 was set for ttl=60.*leave it"
        ):
            await locks.lock("a", ttl=60, heartbeat_interval=2).acquire()
        with pytest.raises(BackendRefusedError, match=r"grants less: safety_buffer=6 was set for ttl=60.*leave it out"):
            await locks.lock("a", ttl=60, safety_buffer=6).acquire()
        async with locks.lock("a", wait=20):  # what was refused is released, in the background
            pass


async def test_a_thousand_watched_tickets_are_kept_by_one_request(zookeeper_url, opened):
    backend, holder = opened(zookeeper_url), opened(zookeeper_url)
    claims = [Claim(f"a/{number}", 60.0) for number in range(300)]
    waiting = [Claim("b", 60.0) for _ in range(30)]
    await holder.draw(Claim("b", 60.0))
    await asyncio.gather(*(backend.draw(claim) for claim in claims + waiting))
    places = await kept(backend, *claims, *waiting)
    await until(lambda: backend._sessions.of(5.0).connected, what="the session of those who wait is connected")
    for _ in range(3):  # those who wait move to the session of waiters, whose nodes are watched from then on
        await kept(backend, *claims, *waiting)
    asked: list[object] = []
    for session in (backend._sessions.of(60.0), backend._sessions.of(5.0)):
        send = session.call
        session.call = lambda request, _send=send: asked.append(request) or _send(request)
    answers = await kept(backend, *claims, *waiting)
    assert [answer.token for answer in answers] == [place.token for place in places]
    assert len(asked) == 2, "one for each session"


async def test_closing_leaves_no_thread_and_no_connection_behind(zookeeper_url):
    before = set(threading.enumerate())  # a thread of another test may be about to end
    async with connect(zookeeper_url) as locks:
        for ttl in (20, 30):
            async with locks.lock("a", ttl=ttl):
                pass
        assert set(threading.enumerate()) - before
    await until(lambda: not set(threading.enumerate()) - before, what="the threads end")


async def test_closing_is_bounded_although_the_server_hangs(zookeeper_server, zookeeper_url):
    backend = from_url(zookeeper_url)
    await backend.draw(Claim("a", 60.0))
    await backend.draw(Claim("b", 40.0))
    zookeeper_server.pause()
    try:
        async with asyncio.timeout(60):
            await backend.aclose()
    finally:
        zookeeper_server.resume()


LIMIT = 60.0


async def refusal(backend: ZooKeeperBackend) -> BackendRefusedError:
    """What the backend is told in the end; a busy server may not get as far as that within its first connections."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                await backend.draw(Claim("a", 300.0))
            except BackendUnavailableError:
                continue
            except BackendRefusedError as error:
                return error
            finally:
                await backend.aclose()


# Certificates.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "ciphers"),
    [("TLSv1.2", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"), ("TLSv1.3", "TLS_AES_128_GCM_SHA256")],
)
async def test_client_and_server_check_the_certificates_of_each_other(version, ciphers, start_zookeeper, tmp_path):
    """With TLS 1.3 a client hears only after its own handshake that the server does not want it."""
    made = make_certificates(tmp_path)
    (tmp_path / "strange").mkdir()
    strange = make_certificates(tmp_path / "strange")
    store = tmp_path / "store.pem"
    store.write_bytes(made.key.read_bytes() + made.certificate.read_bytes())
    port = free_port()
    server = start_zookeeper(
        settings=[
            f"secureClientPort={port}",
            "ssl.clientAuth=need",
            f"ssl.protocol={version}",
            f"ssl.enabledProtocols={version}",
            f"ssl.ciphersuites={ciphers}",
            f"ssl.keyStore.location={store}",
            "ssl.keyStore.type=PEM",
            f"ssl.trustStore.location={made.authority}",
            "ssl.trustStore.type=PEM",
        ],
        jvm=["-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory", "-Xmx128m"],
    )
    url = f"zk://localhost:{port}?tls=true"
    ours = f"&cert={made.client_certificate}&key={made.client_key}"
    backend = from_url(f"{url}&ca={made.authority}{ours}&connect_timeout=5")
    assert (await backend.draw(Claim("a", 300.0))).token is not None
    without, strangers, trusting_nobody = await asyncio.gather(
        refusal(from_url(f"{url}&ca={made.authority}")),
        refusal(from_url(f"{url}&ca={made.authority}&cert={strange.client_certificate}&key={strange.client_key}")),
        refusal(from_url(f"{url}{ours}")),
    )
    assert "certificate of the client" in str(without)
    assert "certificate of the client" in str(strangers)
    assert "server's certificate is not trusted; name its authority with ca=" in str(trusting_nobody)
    plain = from_url(f"zk://localhost:{port}")
    with pytest.raises(BackendUnavailableError, match=rf"localhost:{port} \(.*does it want TLS, which is tls=true"):
        await plain.open()
    secret = from_url(f"zk://localhost:{server.port}?tls=true&ca={made.authority}{ours}&connect_timeout=5")
    with pytest.raises(BackendUnavailableError, match=rf"localhost:{server.port} \(.*; does it speak TLS\?"):
        await secret.open()
    await secret.aclose()
    with pytest.raises(ConfigurationError, match=f"ca must .*'{tmp_path}/none.pem' cannot be read"):
        from_url(f"{url}&ca={tmp_path}/none.pem")
    assert await kept(backend, Claim("a", 300.0)) == [Gone(taken=True)]
    await plain.aclose()
    await asyncio.to_thread(server.kill)
    renewed = await asyncio.to_thread(make_certificates, tmp_path)  # of another authority, under the same names
    store.write_bytes(renewed.key.read_bytes() + renewed.certificate.read_bytes())
    await asyncio.to_thread(server.start)
    await granted(backend, Claim("b", 20.0))
    await backend.aclose()


# SASL.


@pytest.fixture(scope="module")
def _sasl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """A server that knows two users by SASL, and nobody else may have a session."""
    require_zookeeper()
    jaas = tmp_path_factory.mktemp("sasl") / "jaas.conf"
    module = "org.apache.zookeeper.server.auth.DigestLoginModule"
    jaas.write_text(f'Server {{ {module} required user_app="{SECRET}" user_other="hunter3"; }};')
    provider = "authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
    jvm = [f"-Djava.security.auth.login.config={jaas}"]
    with ZooKeeperServer(settings=[provider, "sessionRequireClientSASLAuth=true"], jvm=jvm) as server:
        yield server


@pytest.fixture
def sasl_address(_sasl_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch) -> str:
    digest_md5.install(monkeypatch)
    return _sasl_server.address


def by_sasl(address: str, root: str, user: str = "app", password: str = SECRET, **options: str) -> ZooKeeperBackend:
    sasl = {"mechanism": "DIGEST-MD5", "username": user, "password": password}
    return from_url(f"zk://{address}{root}", sasl=sasl, **options)


async def test_a_login_by_sasl_owns_its_nodes(sasl_address, root, caplog):
    caplog.set_level(1)
    ours, theirs = by_sasl(sasl_address, root), by_sasl(sasl_address, root, "other", "hunter3", acl="creator")
    assert (await ours.draw(Claim("a", 300.0))).token is not None
    with pytest.raises(BackendRefusedError, match="has no right to do this below the root"):
        await theirs.draw(Claim("b", 20.0))
    assert SECRET not in caplog.text
    assert SECRET not in repr(vars(ours))
    await ours.aclose()
    await theirs.aclose()


async def test_a_refused_login_by_sasl_is_reported_without_secrets(sasl_address, root, capfd):
    wrong = await refusal(by_sasl(sasl_address, root, password="hunter1"))
    assert "SASL" in str(wrong)
    assert "hunter1" not in "".join(traceback.format_exception(wrong))
    assert "SASL" in str(await refusal(from_url(f"zk://{sasl_address}{root}")))
    unknown = from_url(f"zk://{sasl_address}", sasl={"mechanism": "CRAM-MD5"})
    assert "the login by SASL failed" in str(await refusal(unknown))
    assert "Traceback" not in capfd.readouterr().err


async def test_sasl_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kazoo\[sasl\]'"):
        by_sasl("localhost", "/shop")


async def test_a_connection_that_breaks_in_a_login_ends_no_session(sasl_address, root, monkeypatch):
    """Some servers say nothing else to a wrong password, so several in a row are reported as a refused login."""
    loop, prove, broken = asyncio.get_running_loop(), digest_md5.SASLClient.prove, 0

    def break_first(self: digest_md5.SASLClient, realm: str, nonce: str) -> str:
        nonlocal broken
        if broken < logins:
            broken += 1
            asyncio.run_coroutine_threadsafe(hold_and_cut(), loop).result()
        return prove(self, realm, nonce)

    async def hold_and_cut() -> None:
        proxy.blackhole()
        loop.call_later(0.1, hang_up)

    def hang_up() -> None:
        proxy.cut()
        proxy.heal()

    async with FaultProxy(int(sasl_address.rpartition(":")[2])) as proxy:
        backend, claim, logins = by_sasl(f"127.0.0.1:{proxy.port}", root), Claim("a", 60.0), 0
        place = await backend.draw(claim)
        session = backend._sessions.of(60.0)
        monkeypatch.setattr(digest_md5.SASLClient, "prove", break_first)
        logins = 2
        proxy.cut()
        await until(lambda: session.connections == 2 or session.error, what="another connection")
        assert (broken, session.error) == (2, None)
        assert await kept(backend, claim) == [place]
        await backend.give_back(claim)
        await backend.aclose()
        logins = 10**6
        assert "the server refuses the login" in str(await refusal(by_sasl(f"127.0.0.1:{proxy.port}", root)))


# How long a server has to accept a connection and a session: little at first, where there is another server.


@pytest.fixture
def silent():
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


def _tried(dial: Dial, address) -> float:
    """Connect and wait for the first byte of the handshake; return for how long."""
    with dial.create_connection(address, timeout=60.0) as link:
        started = time.monotonic()
        assert dial.select([link], [], [], 60.0) == ([], [], [])
        return time.monotonic() - started


def test_a_server_that_hangs_has_little_time_until_as_many_tries_have_hung(silent):
    dial = Dial(connect_timeout=5.0, first_timeout=0.05, servers=2, tls=None)
    waits = [_tried(dial, silent) for _ in range(4)]
    assert all(wait < 4 for wait in waits), "the whole limit was 5 s"
    assert min(waits[:2]) >= 0.05
    assert min(waits[2:]) >= 0.1, "all may be slow: each gets twice the time"


def test_a_connection_that_serves_has_the_whole_limit_for_the_rest_of_a_message(silent):
    dial = Dial(connect_timeout=5.0, first_timeout=0.05, servers=3, tls=None)
    _tried(dial, silent)
    dial.serves()
    assert dial._limit_of_try() == 5.0
    assert _tried(dial, silent) < 4, "and the next handshake has little time again"


def test_a_server_that_hung_is_tried_after_all_others_until_it_serves(silent):
    host, port = silent
    settings = ZooKeeperSettings(hosts=[(host, port), (host, 1), (host, 2)], root="/fencing", connect_timeout=1.0)
    driver = KazooDriver(settings, 9.0, None, NodeEnds())
    orders = [driver._client._connection._expand_client_hosts() for _ in range(20)]
    assert len({order[-1][2] for order in orders}) > 1, "the first server is chosen at random"
    _tried(driver._dial, silent)
    orders = [driver._client._connection._expand_client_hosts() for _ in range(20)]
    assert {order[-1][2] for order in orders} == {port}
    driver._dial.serves()
    driver._dial._address = (host, 2)
    driver.hang_up()
    orders = [driver._client._connection._expand_client_hosts() for _ in range(20)]
    assert {order[-1][2] for order in orders} == {2}, "a connection that was silent counts as well"
