"""What goes wrong between a client and one etcd, and deletions that are carried out late."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdCluster, b64
from etcd_stage import ask_first, backend_on, count_of_keys, granted, keep_no_lease_alive_first, keys
from event_log import CLOCK
from fault_proxy import FaultProxy
from patience import until
from stays import Stay, opened, staying

from fencing_sdk import LockClient, LossReason
from fencing_sdk.abc import Busy, Claim, Grant, Renewal
from fencing_sdk.backends.etcd import EtcdBackend, from_url
from fencing_sdk.backends.etcd.line import Standing
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.events import Renewed

pytest_plugins = ["etcd_fixtures"]
pytestmark = pytest.mark.usefixtures("no_blocking_calls")


# What goes wrong between a client and one etcd, and what holders and waiters see of it.


FORK = Path(__file__).parents[1] / "store_fork.py"
TAKEN_AWAY = {LossReason.REFUSED, LossReason.REVOKED}
"""By a heartbeat or by a notice, whichever comes first."""


# The client stands still


# Something happens behind the holder's back


async def test_a_renewal_is_refused_when_the_key_is_gone_although_its_lease_lives(etcd: EtcdBackend, etcd_server):
    """A keep-alive alone proves nothing about a lock."""
    claims = [Claim(f"a/{number}", 600.0) for number in range(130)]
    for claim in claims:
        await granted(etcd, claim)
    await asyncio.to_thread(etcd_server.delete, "fencing/a%2F77/")
    await granted(etcd, Claim("b", 10.0))
    outcomes = await etcd.renew(claims)
    assert [number for number, outcome in enumerate(outcomes) if outcome is not Renewal.RENEWED] == [77]
    assert outcomes[77] is Renewal.REFUSED


async def test_a_key_that_was_deleted_and_made_again_by_a_late_request_is_not_the_grant(etcd: EtcdBackend, etcd_server):
    """Its revision is another one: another holder may have had the lock in between."""
    claim = Claim("a", 10.0)
    token = await granted(etcd, claim)
    (key,) = (await asyncio.to_thread(etcd_server.keys)).items()
    await asyncio.to_thread(etcd_server.delete, "fencing/a/")
    await etcd_server.command("kv/put", {"key": b64(key[0]), "value": key[1]["value"], "lease": key[1]["lease"]})
    assert list(await etcd.renew([claim])) == [Renewal.REFUSED]
    assert list(await etcd.renew([claim])) == [Renewal.REFUSED]
    async with backend_on(etcd_server.url) as rival, asyncio.timeout(20):
        other = Claim("a", 10.0)
        while isinstance(outcome := await rival.acquire(other), Busy):
            await asyncio.sleep(0.1)
            await etcd.renew([claim])
            await granted(etcd, Claim(f"b/{CLOCK.now()}", 10.0))
        assert outcome.token > token


# Locks share leases


async def test_a_claim_that_nobody_renews_ends_although_its_lease_is_kept_alive(etcd: EtcdBackend, etcd_server):
    left, kept = Claim("left", 3.5), Claim("kept", 3.5)
    token = await granted(etcd, left)
    await granted(etcd, kept)
    async with asyncio.timeout(20), backend_on(etcd_server.url) as rival:
        while isinstance(outcome := await rival.acquire(Claim("left", 30.0)), Busy):
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            await asyncio.sleep(0.1)
        assert isinstance(outcome, Grant)
        assert outcome.token > token
        assert list(await etcd.renew([left, kept])) == [Renewal.TAKEN_OVER, Renewal.RENEWED]


async def test_a_claim_past_its_ttl_is_not_revived_by_a_lease_that_others_kept_alive(etcd: EtcdBackend):
    left, kept = Claim("left", 3.5), Claim("kept", 3.5)
    await granted(etcd, left)
    await granted(etcd, kept)
    stop = CLOCK.now() + 3.5
    while CLOCK.now() < stop + 0.01:
        assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
        await asyncio.sleep(0.05)
    assert (await etcd.renew([left]))[0] is Renewal.REFUSED


async def test_a_request_that_arrives_long_after_it_was_given_up_leaves_nothing_behind(etcd_server: EtcdCluster):
    """Another lock keeps the lease alive, so the late key would hold its lock for ever."""
    port = etcd_server.members[0].port
    async with FaultProxy(port) as slow, backend_on(f"etcd://127.0.0.1:{slow.port},127.0.0.1:{port}") as backend:
        kept = Claim("kept", 12.0)
        await granted(backend, kept)
        ask_first(backend._gateway, slow.port)
        slow.blackhole()
        slow.lose_ends()  # etcd would drop the request of a client that is known to be gone
        late, before = Claim("late", 12.0), slow.bytes_up
        keep_no_lease_alive_first(backend)
        acquiring = asyncio.create_task(backend.acquire(late))
        await until(lambda: slow.bytes_up > before, within=20)
        await asyncio.sleep(0.2)  # for the rest of it
        acquiring.cancel()
        await asyncio.wait((acquiring,))
        await backend.release(late)
        assert await keys(etcd_server, "late") == []
        slow.heal()
        for _ in range(200):
            if await keys(etcd_server, "late"):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the request did not arrive late")
        for _ in range(200):
            assert list(await backend.renew([kept])) == [Renewal.RENEWED]
            if not await keys(etcd_server, "late"):
                break
            await asyncio.sleep(0.1)
        assert await keys(etcd_server, "late") == []


async def test_a_release_that_was_not_confirmed_is_made_good_with_the_next_keep_alives(etcd_server: EtcdCluster):
    port = etcd_server.members[0].port
    async with FaultProxy(port) as network, backend_on(f"etcd://127.0.0.1:{network.port}") as backend:
        kept, released = Claim("kept", 30.0), Claim("released", 30.0)
        for claim in (kept, released):
            await granted(backend, claim)
        network.refuse()
        network.cut()
        with pytest.raises(BackendUnavailableError):
            await backend.release(released)
        network.heal()
        async with asyncio.timeout(20):
            while await keys(etcd_server, "released"):
                assert list(await backend.renew([kept])) == [Renewal.RENEWED]
                await asyncio.sleep(0.1)


async def test_a_release_that_finds_no_key_is_refused_although_etcd_is_away_for_the_next_question(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """The engine repeats a release that fails, and a repeated one shows no loss."""
    port = etcd_server.members[0].port
    async with FaultProxy(port) as network, backend_on(f"etcd://127.0.0.1:{network.port}") as backend:
        claim = Claim("a", 30.0)
        await granted(backend, claim)
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        ask = backend._line.standings

        async def ask_in_vain(operation: str, claims: list[Claim]) -> list[Standing]:
            network.refuse()
            network.cut()
            return await ask(operation, claims)

        monkeypatch.setattr(backend._line, "standings", ask_in_vain)
        assert await backend.release(claim) is Renewal.REFUSED


async def test_a_release_that_was_sent_to_two_members_shows_no_loss(etcd_server: EtcdCluster):
    """The first member has deleted the key without an answer, so the next one finds no key."""
    port = etcd_server.members[0].port
    async with FaultProxy(port) as deaf, backend_on(f"etcd://127.0.0.1:{deaf.port},127.0.0.1:{port}") as backend:
        claim = Claim("a", 30.0)
        await granted(backend, claim)
        ask_first(backend._gateway, deaf.port)
        deaf.half_open()
        before = deaf.bytes_up
        assert await backend.release(claim) is None
        assert deaf.bytes_up > before
        assert await keys(etcd_server, "a") == []


@pytest.mark.parametrize("left", ["place", "lock"])
async def test_what_was_left_while_etcd_did_not_answer_is_deleted_at_the_closing(
    etcd_server: EtcdCluster, left: str, monkeypatch: pytest.MonkeyPatch
):
    """No keep-alive will make it good any more, and its lease lasts for ten minutes."""
    monkeypatch.setattr("fencing_sdk.backends.etcd.LEAVING", 20.0)  # a machine may stand still
    port = etcd_server.members[0].port
    async with backend_on(etcd_server.url) as rival, FaultProxy(port) as network:
        async with backend_on(f"etcd://127.0.0.1:{network.port}") as backend:
            claim = Claim("a", 600.0)
            if left == "place":
                await granted(rival, Claim("a", 600.0))
                async with backend._in_line(claim):
                    network.refuse()
                    network.cut()
            else:
                await granted(backend, claim)
                network.refuse()
                network.cut()
                with pytest.raises(BackendUnavailableError):
                    await backend.release(claim)
            expected = 2 if left == "place" else 1
            assert len(await keys(etcd_server, "a")) == expected
            network.heal()
        assert len(await keys(etcd_server, "a")) == expected - 1


async def test_a_thousand_locks_of_one_ttl_cost_a_handful_of_keep_alives(etcd_server: EtcdCluster):
    async with opened(etcd_server.url) as (locks, log):
        leases = []
        for start in range(0, 1000, 100):
            several = (
                locks.lock(f"many/{number}", ttl=600, heartbeat_interval=2) for number in range(start, start + 100)
            )
            leases += await asyncio.gather(*(lock.acquire() for lock in several))
        begun, before = len(log.of(Renewed)), await asyncio.to_thread(etcd_server.calls, "LeaseKeepAlive")
        await until(lambda: len(log.of(Renewed)) >= begun + 1000, within=90)
        spent = await asyncio.to_thread(etcd_server.calls, "LeaseKeepAlive") - before
        shared = len(await asyncio.to_thread(etcd_server.leases))
        assert all(lease.held for lease in leases)
    assert spent <= 20, spent
    assert shared == 1


# Answers get lost


async def test_an_acquisition_whose_answer_was_lost_finds_its_own_grant(etcd_server, etcd_proxy: FaultProxy):
    async with backend_on(f"etcd://127.0.0.1:{etcd_proxy.port}") as backend:
        claim = Claim("a", 30.0)
        await granted(backend, Claim("warm", 30.0))
        etcd_proxy.half_open()
        keep_no_lease_alive_first(backend)
        acquiring = asyncio.create_task(backend.acquire(claim))
        await count_of_keys(etcd_server, "a", 1)
        etcd_proxy.cut()
        with pytest.raises(BackendUnavailableError):
            await acquiring
        etcd_proxy.heal()
        (key,) = (await asyncio.to_thread(etcd_server.keys, "fencing/a/")).values()
        assert await granted(backend, claim) == int(key["create_revision"])
        assert len(await keys(etcd_server, "a")) == 1


async def test_a_refusal_after_a_lost_request_is_no_refusal(etcd_server, etcd_proxy: FaultProxy):
    """The request may still arrive, and find the lock free: a caller that gives up has to release."""
    url = f"etcd://127.0.0.1:{etcd_proxy.port},127.0.0.1:{etcd_server.members[0].port}"
    async with backend_on(url) as backend, backend_on(etcd_server.url) as rival:
        await granted(rival, Claim("a", 30.0))
        await granted(backend, Claim("warm", 30.0))
        ask_first(backend._gateway, etcd_proxy.port)
        etcd_proxy.blackhole()
        claim = Claim("a", 30.0)
        before = etcd_proxy.bytes_up
        keep_no_lease_alive_first(backend)
        acquiring = asyncio.create_task(backend.acquire(claim))
        await until(lambda: etcd_proxy.bytes_up > before, what="the request is sent")
        etcd_proxy.cut()
        with pytest.raises(BackendUnavailableError):
            await acquiring
        assert isinstance(await backend.acquire(claim), Busy)
        etcd_proxy.heal()


# Other loops, other processes


def test_a_fork_makes_a_lease_of_its_own(etcd_server: EtcdCluster):
    """If it kept the lease of its parent alive, the locks of a parent that died would never be free."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FORK), "own", etcd_server.url], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"child": "RENEWED", "parent": "RENEWED"}
    leases = {key.split("/")[1]: kv["lease"] for key, kv in etcd_server.keys().items()}
    assert leases["child"] != leases["first"]


# Deletions in etcd that are carried out late: a key that the same claim has put again is none of theirs.


class Post:
    """The requests of a backend that delete and put nothing; those held back arrive when `deliver` is called."""

    def __init__(self, backend: EtcdBackend) -> None:
        self.deletions = 0
        self.to_hold_back: float = 0
        """How many of the next deletions."""
        self._call = backend._gateway.call
        self._delivered = asyncio.Event()
        self._late: list[asyncio.Task[Any]] = []
        backend._gateway.call = self._pass  # type: ignore[method-assign]

    async def _pass(self, operation: str, path: str, body: dict[str, Any], **options: bool) -> Any:
        if "delete" not in (sent := json.dumps(body)) or "request_put" in sent:
            return await self._call(operation, path, body, **options)
        self.deletions += 1
        if self.to_hold_back < 1:
            return await self._call(operation, path, body, **options)
        self.to_hold_back -= 1
        self._late.append(asyncio.create_task(self._deliver(operation, path, body, **options)))
        return await asyncio.shield(self._late[-1])  # a caller that is cancelled does not take the request back

    async def _deliver(self, *request: Any, **options: bool) -> Any:
        await self._delivered.wait()
        return await self._call(*request, **options)

    @property
    def held_back(self) -> int:
        return len(self._late)

    async def deliver(self) -> None:
        """See all that was held back carried out."""
        self._delivered.set()
        await asyncio.wait(self._late)


async def watched(cluster: EtcdCluster, count: int) -> None:
    """Wait until so many keys are watched."""
    stop = CLOCK.now() + 20
    while await asyncio.to_thread(cluster.metric, "etcd_debugging_mvcc_watcher_total") != count:
        assert CLOCK.now() < stop, "the watch was not opened, or an old one goes on"
        await asyncio.sleep(0.05)


async def test_a_late_deletion_of_a_place_does_not_end_the_grant_that_came_after_it(etcd_server: EtcdCluster):
    """One of two members gets the request when the claim that left the line holds the lock; the other got it before."""
    port = etcd_server.members[0].port
    async with (
        FaultProxy(port) as slow,
        backend_on(f"etcd://127.0.0.1:{slow.port},127.0.0.1:{port}") as backend,
        backend_on(etcd_server.url) as rival,
    ):
        holder, claim, next_one = (Claim("a", 60.0) for _ in range(3))
        await granted(rival, holder)
        ask_first(backend._gateway, slow.port)
        async with backend._in_line(claim):
            assert isinstance(await backend.acquire(claim), Busy)
            await watched(etcd_server, 1)  # nothing is under way that would be given up for another member
            ask_first(backend._gateway, slow.port)  # it may have been slow to answer
            slow.blackhole()
            slow.lose_ends()  # etcd would drop the request of a client that is known to be gone
        await count_of_keys(etcd_server, "a", 1)
        await rival.release(holder)
        token = await granted(backend, claim)
        answered = slow.bytes_down
        slow.heal()
        await until(lambda: slow.bytes_down > answered, what="the deletion is carried out late")
        found = await rival.inspect("a")
        assert found is not None
        assert found.token == token
        assert list(await backend.renew([claim])) == [Renewal.RENEWED]
        assert isinstance(await rival.acquire(next_one), Busy)


async def test_work_goes_on_alone_although_the_deletion_of_an_earlier_place_comes_late(etcd_server: EtcdCluster):
    """The answer to joining is lost, so the line is left and joined again; then the lock is granted."""
    backend = from_url(etcd_server.url)
    post, stand, stood = Post(backend), backend._line.join, 0

    async def lost_at_first(*arguments: Any) -> Any:
        nonlocal stood
        stood += 1
        standing = await stand(*arguments)
        if stood == 1:
            post.to_hold_back = 1  # the lock waits for one that is sent again
            raise BackendUnavailableError("EtcdBackend", "queue", "the answer was lost")
        return standing

    backend._line.join = lost_at_first  # type: ignore[method-assign]
    async with opened(etcd_server.url) as (others, _), LockClient(backend) as locks:
        async with staying(others.lock("a", ttl=60)) as first:
            second = Stay(locks.lock("a", ttl=60, heartbeat_interval=0.5))
            await until(lambda: post.held_back, what="the line is left")
            await until(lambda: stood > 1, what="the line is joined again")
            await first.end()
        await second.begun()
        await post.deliver()
        assert await others.lock("a").try_acquire() is None
        assert second.lost is None
        await second.end()


async def test_a_debt_that_is_being_paid_while_its_owner_comes_back_is_not_paid_with_the_new_grant(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    post, claim, kept = Post(etcd), Claim("a", 4.0), Claim("kept", 4.0)
    await granted(etcd, kept)
    await granted(etcd, claim)
    post.to_hold_back = math.inf
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await etcd.release(claim)
    async with asyncio.timeout(20):
        while post.held_back < 2:  # the second one goes along with a keep-alive
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            await asyncio.sleep(0.05)
    post.to_hold_back = 0
    token = await granted(etcd, claim)
    await post.deliver()
    found = await etcd.inspect("a")
    assert found is not None
    assert found.token == token


async def test_a_place_that_was_left_and_taken_again_is_not_deleted_as_a_debt(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """No later waiter is served before it."""
    post, kept = Post(etcd), Claim("kept", 30.0)
    holder, claim, later = (Claim("a", 60.0) for _ in range(3))
    await granted(etcd, holder)
    async with etcd._in_line(claim):
        post.to_hold_back = math.inf
    assert post.held_back
    post.to_hold_back = 0
    async with etcd._in_line(claim) as turn, etcd._in_line(later):
        before = await keys(etcd_server, "a")
        await post.deliver()
        await granted(etcd, kept)
        for _ in range(10):
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            assert isinstance(await etcd.acquire(claim), Busy)
            await asyncio.sleep(0.1)
        assert await keys(etcd_server, "a") == before
        await etcd.release(holder)
        async with asyncio.timeout(20):
            await turn.wait()
        await granted(etcd, claim)


async def test_an_answer_from_before_the_place_was_left_and_taken_again_grants_nothing(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """The key that it tells of was deleted in between."""
    claim, take, taken, free = Claim("a", 60.0), etcd._line.take, asyncio.Event(), asyncio.Event()

    async def answered_late(*arguments: Any) -> Any:
        standing = await take(*arguments)
        taken.set()
        await free.wait()
        return standing

    etcd._line.take = answered_late  # type: ignore[method-assign]
    asking = asyncio.create_task(etcd.acquire(claim))
    await taken.wait()
    async with etcd._in_line(claim):
        pass
    await count_of_keys(etcd_server, "a", 0)
    async with etcd._in_line(claim):
        free.set()
        with pytest.raises(BackendUnavailableError):
            await asking
        token = await granted(etcd, claim)
        found = await etcd.inspect("a")
        assert found is not None
        assert found.token == token


async def test_a_release_that_is_overtaken_by_the_leaving_of_the_line_has_found_no_loss(
    etcd: EtcdBackend, etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """The lock is granted and released before joining is answered, so the same key is deleted by two requests."""
    for limit in ("_JOINING", "LEAVING"):  # the answer comes soon, unless the machine stands still
        monkeypatch.setattr(f"fencing_sdk.backends.etcd.{limit}", 60.0)
    post, claim, join = Post(etcd), Claim("a", 60.0), etcd._line.join
    joined, free = asyncio.Event(), asyncio.Event()

    async def answered_late(*arguments: Any) -> Any:
        standing = await join(*arguments)
        joined.set()
        await free.wait()
        return standing

    async def stay_in_line() -> None:
        async with etcd._in_line(claim):
            await asyncio.Event().wait()

    etcd._line.join = answered_late  # type: ignore[method-assign]
    staying_in_line = asyncio.create_task(stay_in_line())
    await joined.wait()
    await granted(etcd, claim)
    staying_in_line.cancel()
    post.to_hold_back = 1
    releasing = asyncio.create_task(etcd.release(claim))
    await until(lambda: post.held_back, what="the release is sent")
    free.set()
    await asyncio.wait((staying_in_line,))
    assert await keys(etcd_server, "a") == []
    await post.deliver()
    assert await releasing is None


async def test_a_release_costs_one_request_and_finds_what_was_put_without_an_answer(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    post, known, unknown = Post(etcd), Claim("a", 60.0), Claim("b", 60.0)
    await granted(etcd, known)
    await etcd.release(known)
    assert post.deletions == 1
    call = etcd._gateway.call

    async def lost(operation: str, *arguments: Any, **options: bool) -> Any:
        reply = await call(operation, *arguments, **options)
        if operation == "acquire":
            raise BackendUnavailableError("EtcdBackend", operation, "the answer was lost")
        return reply

    etcd._gateway.call = lost  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailableError):
        await etcd.acquire(unknown)
    await count_of_keys(etcd_server, "b", 1)
    await etcd.release(unknown)
    await count_of_keys(etcd_server, "b", 0)
    assert post.deletions <= 3, "one that learns of the key, and one that deletes it"


async def test_a_place_that_a_deletion_on_its_way_may_hit_is_left_for_another(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """A request without an answer has made it, after one deletion and before another."""
    claim, pending = Claim("a", 60.0), etcd._leases.pending_deletes
    key, now = etcd._keys.own(claim), etcd._leases.now()
    async with backend_on(etcd_server.url) as other:
        made = await granted(other, claim)
    pending.add(key, now, may_return=True)
    pending.cancel(key, now, made)
    with pytest.raises(BackendUnavailableError):
        async with etcd._in_line(claim):
            pytest.fail("this place may go at any time")
    async with etcd._in_line(claim):
        assert await granted(etcd, claim) > made
