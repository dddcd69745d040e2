"""What etcd refuses, and how it is told: credentials, permissions, certificates, space."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, EtcdError, StartEtcd, b64
from etcd_stage import backend_on, granted
from serving import serving
from stays import answered, opened, staying
from throwaway_certificates import Certificates, make_certificates

from fencing_sdk import Renewed
from fencing_sdk.abc import Claim, Renewal
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError
from fencing_sdk.guards.etcd import EtcdGuard

pytest_plugins = ["etcd_fixtures"]

PASSWORD = "hunter2@/:,"
QUOTED = "hunter2%40%2F%3A%2C"


@pytest.fixture
def secured(start_etcd: StartEtcd) -> EtcdCluster:
    return with_login(start_etcd())


def with_login(cluster: EtcdCluster) -> EtcdCluster:
    cluster.enable_auth(user="locker", password=PASSWORD)
    return cluster


def login(cluster: EtcdCluster, user: str = "locker", password: str = QUOTED) -> str:
    return cluster.url.replace("etcd://", f"etcd://{user}:{password}@")


async def refused(url: str, **options: str) -> BackendRefusedError:
    async with backend_on(url, **options) as backend:
        with pytest.raises(BackendRefusedError) as caught:
            await backend.open()
    said = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in said
    return caught.value


async def test_a_user_limited_to_the_prefix_holds_locks_and_waits(secured: EtcdCluster):
    async with opened(login(secured)) as (locks, _):
        async with staying(locks.lock("a", ttl=10)) as stay:
            waiting = asyncio.create_task(locks.lock("a", wait=20).acquire())
            await asyncio.sleep(0.2)
            await stay.end()
            await (await waiting).release()


async def test_a_token_that_expired_is_made_again(start_etcd: StartEtcd):
    """etcd forgets a token that was not used for a second; the heartbeat is slower than that."""
    url = login(with_login(start_etcd(auth_token_ttl=1)))
    async with opened(url) as (locks, log), staying(locks.lock("a", ttl=20, heartbeat_interval=2.5)) as stay:
        await log.seen(Renewed)
        await stay.end()


async def test_tokens_that_a_restart_forgot_and_roles_that_changed_cost_nothing(secured: EtcdCluster):
    claims = [Claim(f"a/{number}", 30.0) for number in range(20)]
    async with backend_on(login(secured)) as backend:
        await asyncio.gather(*(granted(backend, claim) for claim in claims))
        await asyncio.to_thread(secured.kill)
        await asyncio.to_thread(secured.start)
        assert set(await backend.renew(claims)) == {Renewal.RENEWED}
        secured.login_as_root()
        await secured.command("auth/role/add", {"name": "another"})
        assert set(await backend.renew(claims)) == {Renewal.RENEWED}


async def test_many_calls_at_once_log_in_once(secured: EtcdCluster):
    """A login costs etcd a password hash, which is made to be slow."""
    before = secured.calls("Authenticate")
    async with backend_on(login(secured)) as backend:
        await asyncio.gather(*(backend.inspect(f"a/{number}") for number in range(20)))
    assert secured.calls("Authenticate") == before + 1


async def test_credentials_that_are_wrong_or_missing_are_refused_without_repeating_them(secured: EtcdCluster):
    assert "wrong user or password" in str(await refused(login(secured, password="hunter2")))
    assert "wrong user or password" in str(await refused(login(secured, user="nobody")))
    assert "user and a password" in str(await refused(secured.url))
    options = {"user": "locker", "password": "hunter2"}
    assert "wrong user or password" in str(await refused(secured.url, **options))


async def test_keys_outside_of_the_role_are_refused(secured: EtcdCluster):
    assert "role" in str(await refused(login(secured), prefix="elsewhere/"))
    async with EtcdGuard(login(secured)) as guard:
        with pytest.raises(BackendRefusedError, match="role"):
            await guard.raise_to("a", 1)
    async with EtcdGuard(login(secured), prefix="fencing/fences/") as guard:
        await guard.raise_to("a", 1)


async def test_credentials_where_etcd_asks_for_none_do_no_harm(etcd_server: EtcdCluster):
    async with backend_on(login(etcd_server)) as backend:
        await granted(backend, Claim("a", 10.0))


async def test_certificates_of_both_sides_are_checked(start_etcd: StartEtcd, etcd_certificates: Certificates):
    made = etcd_certificates
    cluster = start_etcd(tls=made)
    port = cluster.members[0].tls_port
    mine = {"ca": str(made.authority), "cert": str(made.client_certificate), "key": str(made.client_key)}
    async with backend_on(f"etcd+https://localhost:{port}", **mine) as backend:
        claim = Claim("a", 10.0)
        await granted(backend, claim)
        assert list(await backend.renew([claim])) == [Renewal.RENEWED]
    async with EtcdGuard(f"etcd+https://localhost:{port}", **mine) as guard:
        await guard.raise_to("a", 1)
    told = f"localhost:{port}: the server's certificate is not trusted; name its authority with ca="
    assert told in str(await refused(f"etcd+https://localhost:{port}"))
    plain = cluster.members[0].port
    for url, options, told in (
        (f"etcd+https://localhost:{port}", {"ca": mine["ca"]}, f"localhost:{port}"),
        (f"etcd://localhost:{port}", {}, f"localhost:{port}: .*does it want TLS|With TLS, write etcd\\+https://"),
        (f"etcd+https://localhost:{plain}", mine, f"no connection to localhost:{plain} .*does it speak TLS"),
    ):
        async with backend_on(url, **options) as backend:
            with pytest.raises(BackendError, match=told):
                await backend.open()


async def test_certificates_that_are_replaced_are_used_for_new_connections(start_etcd: StartEtcd, tmp_path: Path):
    made = make_certificates(tmp_path)
    cluster = start_etcd(tls=made)
    url = f"etcd+https://localhost:{cluster.members[0].tls_port}"
    mine = {"ca": str(made.authority), "cert": str(made.client_certificate), "key": str(made.client_key)}
    async with backend_on(url, **mine) as backend, EtcdGuard(url, **mine) as guard:
        await granted(backend, Claim("a", 60.0))
        await guard.raise_to("a", 1)
        await asyncio.to_thread(cluster.kill)
        await asyncio.to_thread(make_certificates, tmp_path)  # of another authority, under the same names
        await asyncio.to_thread(cluster.start)
        await answered(lambda: granted(backend, Claim("b", 60.0)))
        await guard.raise_to("a", 2)


async def test_an_etcd_whose_space_is_used_up_keeps_and_frees_what_is_held_and_grants_nothing(start_etcd: StartEtcd):
    cluster = start_etcd(quota_backend_bytes=1_000_000)
    async with backend_on(cluster.url) as backend:
        held, wanted = Claim("held", 30.0), Claim("wanted", 30.0)
        await granted(backend, held)
        with pytest.raises(EtcdError, match="space"):
            for number in range(100):
                await cluster.command("kv/put", {"key": b64(f"x{number}"), "value": b64("x" * 100_000)})
        with pytest.raises(BackendUnavailableError, match="NOSPACE"):
            await backend.acquire(wanted)
        assert list(await backend.renew([held])) == [Renewal.RENEWED]
        await backend.release(held)
        assert await backend.inspect("held") is None
        for number in range(100):
            await cluster.command("kv/deleterange", {"key": b64(f"x{number}")})
        await asyncio.to_thread(cluster.compact)
        await cluster.command("maintenance/defragment")
        member = (await cluster.command("maintenance/status"))["header"]["member_id"]
        await cluster.command("maintenance/alarm", {"action": "DEACTIVATE", "memberID": member, "alarm": "NOSPACE"})
        async with asyncio.timeout(20):
            await granted(backend, wanted)


async def test_what_is_no_etcd_is_refused(etcd_server: EtcdCluster):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\nConnection: close\r\n\r\nNot Found")
        await writer.drain()
        writer.close()

    async with serving(answer) as port:
        assert "is this the client port of an etcd" in str(await refused(f"etcd://127.0.0.1:{port}"))
        url = f"etcd://127.0.0.1:{port},{etcd_server.hosts}"
        async with backend_on(url) as backend:
            await granted(backend, Claim("a", 10.0))
