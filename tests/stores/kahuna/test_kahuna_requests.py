"""What may be written in a URL, what requests say and answers mean, without a server; and two clients of one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest
from kahuna_server import KahunaServer
from stays import answered
from tenacity import wait_fixed

from fencing_sdk import LeaseLostError, LockClient, LossReason, connect
from fencing_sdk._http.nodes import Endpoints
from fencing_sdk.abc import Busy, Claim, Gone, Place
from fencing_sdk.backends.kahuna import KahunaBackend, from_url
from fencing_sdk.backends.kahuna.cluster import KahunaAnswer, body_of, read_nodes
from fencing_sdk.errors import ConfigurationError, UnsupportedError

pytest_plugins = ["kahuna_fixtures"]


# What may be written in a URL or passed to the backend, and which node is asked first. Nothing is sent here.


@pytest.mark.parametrize(
    "url",
    [
        "kahuna://",
        "kahuna:///",
        "kahuna://h1,",
        "kahuna://,h1",
        "kahuna://h1:",
        "kahuna://h1:0",
        "kahuna://h1:65536",
        "kahuna://h1:x",
        "kahuna://h1 h2",
        "kahuna://[::1",
        "kahuna://[zz]",
        "kahuna://h1/path",
        "kahuna://h1?durability=ephemeral",
        "kahuna://h1?connect_timeout=0",
        "kahuna://h1?connect_timeout=nan",
        "kahuna://h1?connect_timeout=x",
        "kahuna://h1?tls=true",
        "kahuna://h1?ca=/etc/ssl/ca.pem",
        "kahuna+https://h1?verify=off",
        "kahuna+https://h1?ca=/",
        "kahuna://h1#h2",
    ],
)
def test_a_url_that_cannot_work_is_refused_when_it_is_read(url: str):
    with pytest.raises(ConfigurationError):
        from_url(url)


@pytest.mark.parametrize(
    "url", ["kahuna://me:s3cret@h1", "kahuna://h1:s3cret", "kahuna://s3cret,h2:0", "kahuna://[s3cret]"]
)
def test_what_may_be_a_password_is_not_repeated(url: str):
    """Kahuna has none, so a URL with one is an error."""
    with pytest.raises(ConfigurationError) as raised:
        from_url(url)
    assert "s3cret" not in f"{raised.value!r} {raised.value.__cause__!r} {raised.value.__context__!r}"


def test_the_memory_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Endpoints, "NAMES", 3)
    endpoints = read_nodes(["a", "b"], tls=False)
    a, b = endpoints.in_turn()
    for name in ("1", "2", "3", "1", "4"):
        endpoints.mark_answered(b, name)
    assert [endpoints.in_turn(name)[0] for name in "1234"] == [b, a, b, b]


# What requests say and answers mean, without a server.


NOW = 1_790_000_000.25
DATE = "Mon, 21 Sep 2026 14:13:20 GMT"
"""The second in which NOW lies."""


def info(**fields: object) -> KahunaAnswer:
    owner = b64encode(b"owner-1").decode()
    heard = {"type": 4, "owner": owner, "expires": {"n": 1, "l": int(NOW * 1000) + 5000, "c": 0}, "fencingToken": 7}
    return KahunaAnswer.read(json.dumps(heard | fields).encode(), DATE)


def sent(body: bytes) -> dict[str, object]:
    return json.loads(body)


def test_durability_is_sent_as_a_number_with_every_request():
    """A server that is told nothing keeps a lock in memory alone."""
    claim = Claim("a", 1.0)
    for body in (body_of("a", claim, ttl=1.0), body_of("a", claim), body_of("a")):
        assert sent(body)["durability"] == 1


@pytest.mark.parametrize(("ttl", "milliseconds"), [(1.0, 1000), (0.0501, 51), (1.0001, 1001), (86_400.0, 86_400_000)])
def test_a_ttl_is_rounded_up_to_whole_milliseconds(ttl: float, milliseconds: int):
    assert sent(body_of("a", Claim("a", ttl), ttl=ttl))["expiresMs"] == milliseconds


@pytest.mark.parametrize("label", [None, "", "batch 7", "two\nlines", "\N{LOCK}" * 1024])
def test_owner_and_label_travel_together_and_come_apart_again(label: str | None):
    claim = Claim("a", 1.0, label=label)
    seen = info(owner=sent(body_of("a", claim, ttl=1.0))["owner"]).seen(NOW)
    assert (seen.holder, seen.label) == (claim.holder, label)
    assert sent(body_of("a", claim, ttl=1.0))["owner"] == sent(body_of("a", claim))["owner"]


@pytest.mark.parametrize(
    ("ours", "remaining"),
    [
        (0.25, 5.0),  # as the server's
        (1.9, 3.35),  # still possible: its Date header is that old
        (-3600.0, 5.25),  # ours is slow by an hour: the server's second counts from its beginning
        (3600.0, 3.25),  # ours is fast: its latest moment
    ],
)
def test_our_clock_counts_as_long_as_the_server_s_does_not_contradict_it(ours: float, remaining: float):
    assert info().remaining(NOW - 0.25 + ours) == pytest.approx(remaining)


def test_the_first_token_is_0():
    assert KahunaAnswer.read(b'{"type":0,"fencingToken":0}').token == 0


# Two clients: what the engine makes of a store without a line.


PATIENCE = 30.0


@contextlib.asynccontextmanager
async def client_of(server: KahunaServer) -> AsyncIterator[LockClient]:
    async with asyncio.timeout(PATIENCE), connect(server.url) as locks:
        yield locks


async def test_a_waiter_asks_until_the_lock_is_free(kahuna_server: KahunaServer):
    """It looks once for the end of the holder's grant, and tries from then on."""
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        before = len(kahuna_server.seen())
        waiter = asyncio.create_task(locks.lock("a", backoff=wait_fixed(0.02)).acquire())
        while len(kahuna_server.seen("try-lock")) <= 10:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert not waiter.done()
        await holder.release()
        lease = await waiter
        assert lease.token == 1
        await lease.release()
        calls = [request["call"] for request in kahuna_server.seen()[before:]]
        assert calls.count("get-info") == 1


async def test_a_waiter_gets_the_lock_of_a_holder_that_is_gone(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks, contextlib.aclosing(from_url(kahuna_server.url)) as gone:
        assert isinstance(await gone.draw(Claim("a", 0.5)), Place)
        async with locks.lock("a", wait=20) as lease:
            assert lease.token == 1


async def test_waiters_of_many_tasks_all_get_the_lock(kahuna_server: KahunaServer):
    tokens: list[int] = []

    async def take(locks: LockClient) -> None:
        async with locks.lock("a", backoff=wait_fixed(0.01)) as lease:
            tokens.append(lease.token)

    async with client_of(kahuna_server) as one, client_of(kahuna_server) as other:
        await asyncio.gather(*(take(locks) for locks in (one, other) for _ in range(10)))
    assert tokens == list(range(20))


async def test_a_server_that_is_killed_remembers_what_is_held(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await locks.lock("a", ttl=20).acquire()
        waiter = asyncio.create_task(others.lock("a").acquire())
        await asyncio.to_thread(kahuna_server.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(kahuna_server.start)
        await answered(holder.renew)
        assert not waiter.done()
        await holder.release()
        await (await waiter).release()


async def test_an_operator_ends_a_lease_and_says_why(kahuna_server: KahunaServer):
    """Kahuna pushes nothing, so the holder hears of it at its next renewal."""
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as operator:
        lease = await locks.lock("a", label="batch 7").acquire()
        (holder,) = await operator.holders("a")
        assert (holder.id, holder.label) == (lease.holder, "batch 7")
        assert not await operator.revoke("a", token=holder.token + 1, reason="too old")
        assert await operator.revoke("a", token=holder.token, reason="too old")
        with pytest.raises(LeaseLostError, match="too old") as lost:
            await lease.renew()
        assert lost.value.reason is LossReason.REVOKED
        assert not await operator.holders("a")
        assert not await operator.revoke("a", token=holder.token, reason="too old")


async def test_locks_cannot_be_listed(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks:
        with pytest.raises(UnsupportedError, match="cannot list"):
            _ = [holder async for holder in locks.all_holders()]


async def test_a_keep_under_way_does_not_prolong_what_is_given_back_for_later(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    claim = Claim("a", 60.0)
    await kahuna.draw(claim)
    kahuna_server.fault("answer", call="try-extend", times=1, delay=0.4)
    keeping = asyncio.create_task(kahuna.keep([(claim, 0)]))
    await asyncio.sleep(0.1)
    assert await kahuna.give_back(claim, after=0.5) is None
    (place,) = await keeping
    assert isinstance(place, Place)
    async with asyncio.timeout(PATIENCE):
        while isinstance(await kahuna.draw(Claim("a", 60.0)), Busy):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_what_is_given_back_for_later_is_answered_for_here(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    claim = Claim("a", 60.0)
    place = await kahuna.draw(claim)
    assert isinstance(place, Place)
    for _ in range(2):
        assert await kahuna.give_back(claim, after=60.0) is None
    assert await kahuna.give_back(claim) is None
    assert await kahuna.keep([(claim, place.number)]) == [Gone(taken=True)]
    assert isinstance(await kahuna.draw(claim), Busy)
    assert len(kahuna_server.seen("try-extend")) == 1
    async with contextlib.aclosing(from_url(kahuna_server.url)) as operator:
        assert await operator.end("a", 0, "over")
    again = await kahuna.draw(claim)
    assert isinstance(again, Place)
    assert again.token == 1
