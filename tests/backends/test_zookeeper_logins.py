"""How a client shows ZooKeeper who it is: by a certificate, or by SASL; and what it says when it is not believed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import digest_md5
import pytest
from fault_proxy import FaultProxy
from kazoo.client import KazooClient
from local_ports import free_port
from patience import until
from throwaway_certificates import make_certificates
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper
from zookeeper_stage import granted

from fencing_sdk import connect
from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, ConfigurationError

pytest_plugins = ["zookeeper_fixtures"]

LIMIT = 60.0


async def refusal(backend: ZooKeeperBackend) -> BackendRefusedError:
    """What the backend is told in the end; a busy server may not get as far as that within its first connections."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                await backend.acquire(Claim("a", 300.0))
            except BackendUnavailableError:
                continue
            except BackendRefusedError as error:
                return error
            finally:
                await backend.aclose()


# Certificates.


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
    ours = f"&certfile={made.client_certificate}&keyfile={made.client_key}"
    backend = from_url(f"{url}&ca={made.authority}{ours}&connect_timeout=5")
    assert isinstance(await backend.acquire(Claim("a", 300.0)), Grant)
    without, strangers, trusting_nobody = await asyncio.gather(
        refusal(from_url(f"{url}&ca={made.authority}")),
        refusal(
            from_url(f"{url}&ca={made.authority}&certfile={strange.client_certificate}&keyfile={strange.client_key}")
        ),
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
    assert await backend.renew([Claim("a", 300.0)]) == [Renewal.TAKEN_OVER]
    await plain.aclose()
    await asyncio.to_thread(server.kill)
    renewed = await asyncio.to_thread(make_certificates, tmp_path)  # of another authority, under the same names
    store.write_bytes(renewed.key.read_bytes() + renewed.certificate.read_bytes())
    await asyncio.to_thread(server.start)
    await granted(backend, Claim("b", 20.0))
    await backend.aclose()


# SASL.


PROVIDER = "authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider"


def allowing(folder: Path) -> str:
    """The option by which a server knows two users."""
    jaas = folder / "jaas.conf"
    module = "org.apache.zookeeper.server.auth.DigestLoginModule"
    jaas.write_text(f'Server {{ {module} required user_app="hunter2" user_other="hunter3"; }};')
    return f"-Djava.security.auth.login.config={jaas}"


@pytest.fixture(scope="module")
def _sasl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """A server that knows two users by SASL, and nobody else may have a session."""
    require_zookeeper()
    jvm = [allowing(tmp_path_factory.mktemp("sasl"))]
    with ZooKeeperServer(settings=[PROVIDER, "sessionRequireClientSASLAuth=true"], jvm=jvm) as server:
        yield server


@pytest.fixture
def sasl_address(_sasl_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch) -> str:
    digest_md5.install(monkeypatch)
    return _sasl_server.address


def by_sasl(address: str, root: str, user: str = "app", password: str = "hunter2") -> ZooKeeperBackend:
    return from_url(f"zk://{address}{root}", sasl={"mechanism": "DIGEST-MD5", "username": user, "password": password})


async def test_a_login_by_sasl_owns_its_nodes(sasl_address):
    root = fresh_root()
    ours, theirs = by_sasl(sasl_address, root), by_sasl(sasl_address, root, "other", "hunter3")
    assert isinstance(await ours.acquire(Claim("a", 300.0)), Grant)
    with pytest.raises(BackendRefusedError, match="has no right to do this below the root"):
        await theirs.acquire(Claim("b", 20.0))

    def look() -> list[str]:
        options = {"mechanism": "DIGEST-MD5", "username": "app", "password": "hunter2"}
        client = KazooClient(sasl_address, sasl_options=options)
        client.start()
        (node,) = client.get_children(f"{root}/a")
        found = [entry.id for path in (root, f"{root}/a/{node}") for entry in client.get_acls(path)[0]]
        client.stop()
        client.close()
        return [f"{entry.scheme}:{entry.id}" for entry in found]

    assert await asyncio.to_thread(look) == ["sasl:app"] * 2
    await ours.aclose()
    await theirs.aclose()


async def test_a_wrong_password_is_refused_by_sasl(sasl_address):
    assert "SASL" in str(await refusal(by_sasl(sasl_address, fresh_root(), password="hunter1")))


async def test_a_wrong_password_is_refused_where_sessions_need_no_login(start_zookeeper, tmp_path, monkeypatch):
    digest_md5.install(monkeypatch)
    server = start_zookeeper(settings=[PROVIDER], jvm=[allowing(tmp_path)])
    refused = await refusal(by_sasl(server.address, fresh_root(), password="hunter1"))
    assert "the server refuses the login" in str(refused)
    backend = by_sasl(server.address, fresh_root())
    assert isinstance(await backend.acquire(Claim("a", 300.0)), Grant)
    await backend.aclose()


async def test_a_server_that_hangs_up_on_every_login_refuses_it(sasl_address, monkeypatch):
    """Some say nothing else to a wrong password."""
    loop, prove = asyncio.get_running_loop(), digest_md5.SASLClient._prove

    def break_always(self: digest_md5.SASLClient, realm: str, nonce: str) -> str:
        asyncio.run_coroutine_threadsafe(hold_and_cut(), loop).result()
        return prove(self, realm, nonce)

    async def hold_and_cut() -> None:
        proxy.blackhole()
        loop.call_later(0.1, hang_up)

    def hang_up() -> None:
        proxy.cut()
        proxy.heal()

    async with FaultProxy(int(sasl_address.rpartition(":")[2])) as proxy:
        monkeypatch.setattr(digest_md5.SASLClient, "_prove", break_always)
        refused = await refusal(by_sasl(f"127.0.0.1:{proxy.port}", fresh_root()))
    assert "the server refuses the login" in str(refused)


async def test_a_client_without_a_login_hears_that_the_server_wants_one(sasl_address):
    assert "SASL" in str(await refusal(from_url(f"zk://{sasl_address}{fresh_root()}")))


async def test_a_login_that_cannot_be_made_is_refused_and_ends_no_thread_with_a_traceback(sasl_address, capfd):
    backend = from_url(f"zk://{sasl_address}", sasl={"mechanism": "CRAM-MD5"})
    assert "the login by SASL failed" in str(await refusal(backend))
    assert "Traceback" not in capfd.readouterr().err


async def test_sasl_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kazoo\[sasl\]'"):
        connect("zk://localhost", sasl={"mechanism": "DIGEST-MD5", "username": "app", "password": "hunter2"})


async def test_a_connection_that_breaks_in_the_middle_of_a_login_is_no_refused_login(sasl_address, monkeypatch):
    """The session goes on by way of the next connection, and the lease with it."""
    loop, broken = asyncio.get_running_loop(), asyncio.Event()
    prove = digest_md5.SASLClient._prove

    def break_once(self: digest_md5.SASLClient, realm: str, nonce: str) -> str:
        if not broken.is_set():
            asyncio.run_coroutine_threadsafe(hold_and_cut(), loop).result()
        return prove(self, realm, nonce)

    async def hold_and_cut() -> None:
        broken.set()
        proxy.blackhole()
        loop.call_later(0.3, proxy.cut)

    async with FaultProxy(int(sasl_address.rpartition(":")[2])) as proxy:
        backend = by_sasl(f"127.0.0.1:{proxy.port}", fresh_root())
        claim = Claim("a", 60.0)
        grant = await backend.acquire(claim)
        session = backend._sessions.of(60.0)
        monkeypatch.setattr(digest_md5.SASLClient, "_prove", break_once)
        proxy.cut()
        await asyncio.wait_for(broken.wait(), LIMIT)
        with pytest.raises(BackendUnavailableError):
            await backend.acquire(Claim("b", 60.0))
        proxy.cut()
        proxy.heal()
        await until(lambda: session.connections == 2 or session.error, what="another connection")
        assert session.error is None
        assert await backend.renew([claim]) == [Renewal.RENEWED]
        assert await backend.acquire(claim) == grant
        await backend.release(claim)
        await backend.aclose()
