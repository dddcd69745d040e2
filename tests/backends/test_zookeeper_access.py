"""Who may connect to ZooKeeper, who may touch the nodes, and what the sessions are."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from importlib.metadata import version

import pytest
from event_log import CLOCK
from kazoo.client import KazooClient
from kazoo.protocol.connection import ConnectionHandler
from kazoo.security import Permissions, make_digest_acl
from patience import until
from zookeeper_server import fresh_root

from fencing_sdk import connect
from fencing_sdk._values.claim import Claim, Grant, Held, Renewal
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.backends.zookeeper.connection.sessions import MOST_SESSIONS
from fencing_sdk.errors import BackendRefusedError

pytest_plugins = ["zookeeper_fixtures"]

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
    assert isinstance(await ours.acquire(Claim("a", 20.0)), Grant)
    for stranger in (opened(f"zk://app:wrong@{address}{root}"), opened(f"zk://{address}{root}")):
        with pytest.raises(BackendRefusedError, match="root"):
            await stranger.acquire(Claim("b", 20.0))
        with pytest.raises(BackendRefusedError):
            await stranger.inspect("a")
    same = opened(f"zk://app:{SECRET}@{address}{root}")
    assert isinstance(await same.acquire(Claim("a", 20.0)), Held)


async def test_an_acl_of_kazoo_is_given_to_every_node(zookeeper_server, root, opened):
    acl = [make_digest_acl("app", SECRET, all=True), make_digest_acl("auditor", "x", read=True)]
    backend = opened(f"zk://app:{SECRET}@{zookeeper_server.address}{root}", acl=acl)
    await backend.acquire(Claim("a", 20.0))

    def look() -> list[set[int]]:
        client = KazooClient(zookeeper_server.address, auth_data=[("digest", f"app:{SECRET}")])
        client.start()
        (node,) = client.get_children(f"{root}/a")
        paths = (root, f"{root}/a", f"{root}/a/{node}")
        found = [{entry.perms for entry in client.get_acls(path)[0]} for path in paths]
        client.stop()
        client.close()
        return found

    assert await asyncio.to_thread(look) == [{Permissions.ALL, Permissions.READ}] * 3


async def test_a_password_is_in_no_log(zookeeper_server, root, opened, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(1, "kazoo")
    backend = opened(f"zk://app:{SECRET}@{zookeeper_server.address}{root}")
    claim = Claim("a", 20.0)
    await backend.acquire(claim)
    await backend.release(claim)
    assert SECRET not in caplog.text
    assert SECRET not in repr(vars(backend))


# Sessions.


async def test_locks_of_one_ttl_share_a_session_and_the_number_of_sessions_is_bounded(zookeeper_url, opened):
    backend = opened(zookeeper_url)
    claims = [Claim(f"a/{number}", 20.0 + number % 12) for number in range(60)]
    for claim in claims:
        assert isinstance(await backend.acquire(claim), Grant)
    sessions = {own_node.session for own_node in backend._own_nodes.all()}
    assert len(sessions) == MOST_SESSIONS
    assert all(
        own_node.session.lease >= own_node.claim.ttl
        for own_node in backend._own_nodes.all()
        if own_node.claim.ttl <= 27
    )
    assert await backend.renew(claims) == [Renewal.RENEWED] * 60


async def test_a_session_is_half_as_long_again_as_the_ttl_that_it_is_for(zookeeper_url, opened):
    """The server may not know of the last third of a session's signs of life."""
    backend = opened(zookeeper_url)
    grant = await backend.acquire(Claim("a", 4.0))
    assert isinstance(grant, Grant)
    assert grant.ttl is None
    assert backend._sessions.of(4.0).timeout == pytest.approx(6.0, abs=0.01)


async def test_a_ttl_that_the_server_does_not_allow_is_granted_as_far_as_it_does(start_zookeeper, opened):
    server = start_zookeeper(settings=["maxSessionTimeout=9000"])
    grant = await opened(server.url).acquire(Claim("a", 60.0))
    assert isinstance(grant, Grant)
    assert grant.ttl == pytest.approx(6.0)


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
        async with locks.lock("a", wait=20):  # what was refused is given back, in the background
            pass


async def test_a_thousand_watched_locks_are_renewed_by_one_request(zookeeper_url, opened):
    backend = opened(zookeeper_url)
    claims = [Claim(f"a/{number}", 60.0) for number in range(300)]
    await asyncio.gather(*(backend.acquire(claim) for claim in claims))
    await until(lambda: all(own_node.surely_there for own_node in backend._own_nodes.all()), what="all are watched")
    session = backend._sessions.of(60.0)
    asked: list[object] = []
    send = session.call
    session.call = lambda request: asked.append(request) or send(request)
    assert await backend.renew(claims) == [Renewal.RENEWED] * 300
    assert len(asked) == 1


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
    await backend.acquire(Claim("a", 60.0))
    await backend.acquire(Claim("b", 40.0))
    zookeeper_server.pause()
    try:
        async with asyncio.timeout(60):
            await backend.aclose()
    finally:
        zookeeper_server.resume()


def test_a_backend_goes_on_in_another_loop(zookeeper_url):
    """Also when the first loop ended without closing it: the same session, the same grants."""
    backend = from_url(zookeeper_url)
    claim = Claim("a", 20.0)
    grant = asyncio.run(backend.acquire(claim))
    assert isinstance(grant, Grant)

    async def again() -> None:
        assert await backend.renew([claim]) == [Renewal.RENEWED]
        assert await backend.acquire(claim) == grant
        await backend.release(claim)
        await backend.aclose()

    asyncio.run(again())


# A driver that has changed inside.


def without(kind: type, attribute: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.delattr(kind, attribute)


def with_other(kind: type, attribute: str, other: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(kind, attribute, other)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (with_other(KazooClient, "__init__", lambda self, *, hosts: None), "TypeError"),
        (without(ConnectionHandler, "_connect"), "AttributeError"),
        (without(ConnectionHandler, "_read_response"), "AttributeError"),
        (without(KazooClient, "_call"), "AttributeError"),
        (with_other(KazooClient, "_call", lambda self, *, request: None), "TypeError"),
        (
            with_other(ConnectionHandler, "_connect", lambda self, *_: self.client._session_callback("CONNECTED")),
            "TypeError",
        ),
    ],
    ids=["arguments", "connect", "answers", "requests", "a request's arguments", "what connecting returns"],
)
async def test_a_driver_that_has_changed_inside_is_refused_by_its_version(
    zookeeper_url, opened, monkeypatch, change, error
):
    change(monkeypatch)
    backend = opened(zookeeper_url)
    with pytest.raises(BackendRefusedError) as refused:
        await backend.acquire(Claim("a", 20.0))
    assert str(refused.value).endswith(
        f"failed: kazoo {version('kazoo')} has changed inside ({error}); fencing_sdk works with kazoo>=2.11,<2.12"
    )
    await backend.aclose()
    names = ("zk_loop", "fencing-zookeeper")
    await until(
        lambda: not any(name in thread.name for thread in threading.enumerate() for name in names),
        what="no thread is left",
    )
