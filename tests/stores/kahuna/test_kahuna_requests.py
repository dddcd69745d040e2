"""What may be written in a URL, what requests say and answers mean, without a server; and waiters that ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest
from kahuna_server import KahunaServer
from tenacity import wait_fixed

from fencing_sdk import AcquireTimeoutError, Lease, LockClient, connect
from fencing_sdk._http.nodes import Endpoints
from fencing_sdk.abc import Busy, Claim, Grant
from fencing_sdk.backends._shared.waiters import UnansweredRequests
from fencing_sdk.backends.kahuna import KahunaBackend, from_url
from fencing_sdk.backends.kahuna.cluster import KahunaAnswer, body_of, read_nodes
from fencing_sdk.errors import ConfigurationError

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


def test_unanswered_requests_are_bounded_and_owners_that_go_on_asking_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(UnansweredRequests, "LIMIT", 3)
    unanswered = UnansweredRequests()
    for owner in ("a", "b", "c", "a", "d"):
        unanswered.begin(owner)
    assert unanswered.begin("a")
    assert not unanswered.begin("b")


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
    holder = info(owner=sent(body_of("a", claim, ttl=1.0))["owner"]).holder("a", NOW)
    assert (holder.id, holder.label) == (claim.holder, label)
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


# Waiters of a store that wakes none: those of one client stand in line, and its head asks.


PATIENCE = 30.0


@contextlib.asynccontextmanager
async def client_of(server: KahunaServer) -> AsyncIterator[LockClient]:
    async with asyncio.timeout(PATIENCE), connect(server.url) as locks:
        yield locks


async def waiting(locks: LockClient, count: int, **options: float) -> list[asyncio.Task[Lease]]:
    """So many tasks that wait for "a" one behind the other."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(locks.lock("a", **options).acquire()))
        backend = locks._engine._backend  # type: ignore[union-attr]
        while len(backend._waiters.line._name("a").waiting) < len(tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return tasks


async def test_waiters_of_one_client_are_served_in_the_order_of_their_arrival(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks:
        holder = await locks.lock("a").acquire()
        tasks = await waiting(locks, 5)
        kahuna_server.seen()
        before = len(kahuna_server.seen())
        await holder.release()
        for task in tasks:
            lease = await task
            assert [other.done() for other in tasks[tasks.index(task) + 1 :]].count(True) == 0
            await lease.release()
        calls = [request["call"] for request in kahuna_server.seen()[before:]]
        assert calls == ["try-unlock", *["try-lock", "try-unlock"] * 5], "no request was in vain"


async def test_a_release_in_the_same_client_wakes_the_head_at_once(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks:
        holder = await locks.lock("a", ttl=60).acquire()
        (task,) = await waiting(locks, 1)
        await holder.release()
        async with asyncio.timeout(3.5):  # a waiter that is not woken naps for 3.75 s at least
            await (await task).release()


@pytest.mark.parametrize("how", ["gives up", "is cancelled"])
async def test_a_head_that_leaves_passes_its_place_on(kahuna_server: KahunaServer, how: str):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        (head,) = await waiting(locks, 1, **({"wait": 2.0} if how == "gives up" else {}))
        second = asyncio.create_task(locks.lock("a").acquire())
        if how == "is cancelled":
            await asyncio.sleep(0.05)
            head.cancel()
        with pytest.raises(AcquireTimeoutError if how == "gives up" else asyncio.CancelledError):
            await head
        await holder.release()
        await (await second).release()


async def test_a_lock_that_another_client_releases_is_found(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        tasks = await waiting(locks, 3)
        await holder.release()
        for task in tasks:
            await (await task).release()


async def test_claims_that_ask_together_send_one_request(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    async with contextlib.aclosing(from_url(kahuna_server.url)) as other:
        assert isinstance(await other.acquire(Claim("a", 60.0)), Grant)
    before = len(kahuna_server.seen())
    outcomes = await asyncio.gather(*(kahuna.acquire(Claim("a", 60.0)) for _ in range(10)))
    assert all(isinstance(outcome, Busy) for outcome in outcomes)
    assert [request["call"] for request in kahuna_server.seen()[before:]] == ["try-lock", "get-info"]


async def test_a_claim_does_not_suffer_from_the_end_of_another_that_asks(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    """It was cancelled, so the next one asks for itself."""
    kahuna_server.fault("hang", call="try-lock", times=1, apply=False)
    first = asyncio.create_task(kahuna.acquire(Claim("a", 60.0)))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(kahuna.acquire(Claim("a", 60.0)))
    await asyncio.sleep(0.1)
    first.cancel()
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await second, Grant)


async def test_a_claim_that_may_have_been_granted_asks_although_others_stand_in_line(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    """Its grant would block them."""
    claim = Claim("a", 60.0)
    kahuna_server.fault("drop", call="try-lock", times=1)
    with contextlib.suppress(Exception):
        await kahuna.acquire(claim)
    kahuna.stand(Claim("a", 60.0), lambda *_: None, hand_over=True)
    assert isinstance(await kahuna.acquire(claim), Grant)


async def test_a_claim_that_holds_finds_its_grant_although_others_ask_and_wait(kahuna: KahunaBackend):
    claim, other = Claim("a", 60.0), Claim("a", 60.0)
    assert await kahuna.acquire(claim) == Grant(0, restarted=False)
    outcomes = await asyncio.gather(*(kahuna.acquire(one) for one in (other, claim, other, claim)))
    assert [type(outcome) for outcome in outcomes] == [Busy, Grant, Busy, Grant]
    kahuna.stand(other, lambda *_: None, hand_over=True)
    assert await kahuna.acquire(claim) == Grant(0, restarted=False)


@pytest.mark.parametrize("clients", [1, 5])
async def test_a_lock_that_is_held_for_long_is_asked_for_seldom(kahuna_server: KahunaServer, clients: int):
    """At most 2 requests a second from one client with all its waiters; benchmarks/kahuna.py measures more of it."""
    async with contextlib.AsyncExitStack() as opened:
        holding = await opened.enter_async_context(client_of(kahuna_server))
        rivals = [await opened.enter_async_context(client_of(kahuna_server)) for _ in range(clients)]
        holder = await holding.lock("a", ttl=60).acquire()
        tasks = [task for locks in rivals for task in await waiting(locks, 10 // clients)]
        await asyncio.sleep(1.0)
        before, began = len(kahuna_server.seen()), asyncio.get_running_loop().time()
        await asyncio.sleep(3.0)
        requests = kahuna_server.seen()[before:]
        seconds = asyncio.get_running_loop().time() - began
        assert 0 < len(requests) <= seconds * clients * 2.5
        assert {request["call"] for request in requests} == {"get-info"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await holder.release()


async def test_a_pause_that_was_chosen_is_kept(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        waiter = asyncio.create_task(locks.lock("a", backoff=wait_fixed(0.02)).acquire())
        async with asyncio.timeout(10):  # at the usual pace, it looks twenty times in so long
            while len(kahuna_server.seen("get-info")) <= 40:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await holder.release()
        await (await waiter).release()
