"""Faults between a client and one etcd, and what the backend decides without a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, b64
from etcd_stage import Late, ask_first, backend_on, count_of_keys, granted, keep_no_lease_alive_first, kept, keys
from event_log import CLOCK
from fault_proxy import FaultProxy
from patience import until
from stays import opened

from fencing_sdk._etcd import LeaseNotFoundError, error_of_failures, read_answer
from fencing_sdk._http.requests import RequestFailedError, RequestOutcome
from fencing_sdk.abc import READER, WRITER, Busy, Claim, Gone, Permit, Place
from fencing_sdk.backends import etcd as etcd_backend
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.backends.etcd.keys import EtcdKeys, TicketKey, settled
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError
from fencing_sdk.events import Renewed
from fencing_sdk.testing.promises.verbs import ODD_NAMES

pytest_plugins = ["etcd_fixtures"]
pytestmark = pytest.mark.usefixtures("no_blocking_calls")

FORK = Path(__file__).parents[1] / "store_fork.py"


# Something happens behind the holder's back


async def test_a_ticket_is_gone_when_its_key_is_although_its_lease_lives(etcd: EtcdBackend, etcd_server):
    """A keep-alive alone proves nothing about a ticket."""
    claims = [Claim(f"a/{number}", 600.0) for number in range(130)]
    for claim in claims:
        await granted(etcd, claim)
    await asyncio.to_thread(etcd_server.delete, "fencing/a%2F77/")
    await granted(etcd, Claim("b", 10.0))
    there = await kept(etcd, *claims)
    assert [number for number, each in enumerate(there) if not each] == [77]


async def test_a_key_that_was_deleted_and_made_again_by_a_late_request_is_not_the_ticket(etcd, etcd_server):
    """Its revision is another one: another holder may have had the lock in between."""
    claim = Claim("a", 10.0)
    number = (await etcd.draw(claim)).number
    (key,) = (await asyncio.to_thread(etcd_server.keys)).items()
    await asyncio.to_thread(etcd_server.delete, "fencing/a/")
    await etcd_server.command("kv/put", {"key": b64(key[0]), "value": key[1]["value"], "lease": key[1]["lease"]})
    for _ in range(2):
        (answer,) = await etcd.keep([(claim, number)])
        assert isinstance(answer, Gone)


# Tickets share leases


async def test_a_ticket_that_is_not_kept_ends_although_its_lease_is_kept_alive(etcd: EtcdBackend, etcd_server):
    left, other = Claim("left", 3.5), Claim("kept", 3.5)
    token = await granted(etcd, left)
    await granted(etcd, other)
    async with asyncio.timeout(20), backend_on(etcd_server.url) as rival:
        while isinstance(place := await rival.draw(Claim("left", 30.0), only_if_it_holds=True), Busy):
            assert await kept(etcd, other) == [True]
            await asyncio.sleep(0.1)
        assert place.token is not None
        assert place.token > token
        gone, _ = await etcd.keep([(left, 0), (other, 0)])
        assert gone == Gone(taken=True)


@pytest.mark.parametrize("mode", [READER, Permit(of=2)], ids=lambda mode: mode.word)
async def test_a_draw_that_holds_beside_others_has_its_whole_life(mode, etcd: EtcdBackend, etcd_server):
    """It is put as one that waits, for five seconds."""
    for number in range(3):
        place = await etcd.draw(Claim("a", 60.0, mode=mode))
        (key,) = [
            kv
            for kv in (await asyncio.to_thread(etcd_server.keys, "fencing/a/")).values()
            if int(kv["create_revision"]) == place.number
        ]
        lease = await etcd_server.command("lease/timetolive", {"ID": key["lease"]})
        waits = number == 2 and mode != READER
        assert (place.token is None) == waits
        assert int(lease["grantedTTL"]) == (6 if waits else 61)


async def test_a_ticket_past_its_ttl_is_not_revived_by_a_lease_that_others_kept_alive(etcd: EtcdBackend):
    left, other = Claim("left", 3.5), Claim("kept", 3.5)
    await granted(etcd, left)
    await granted(etcd, other)
    stop = CLOCK.now() + 3.5
    while CLOCK.now() < stop + 0.01:
        assert await kept(etcd, other) == [True]
        await asyncio.sleep(0.05)
    assert await kept(etcd, left) == [False]


@pytest.mark.parametrize("only", [True, False])
async def test_a_draw_that_arrives_long_after_it_was_given_up_leaves_nothing_behind(
    etcd_server: EtcdCluster, only: bool
):
    """Another ticket keeps the lease alive, so the late key would hold its name for ever."""
    port = etcd_server.members[0].port
    async with FaultProxy(port) as slow, backend_on(f"etcd://127.0.0.1:{slow.port},127.0.0.1:{port}") as backend:
        other = Claim("kept", 4.0)
        await granted(backend, other)
        ask_first(backend._gateway, slow.port)
        slow.blackhole()
        slow.lose_ends()  # etcd would drop the request of a client that is known to be gone
        late, before = Claim("late", 4.0), slow.bytes_up
        keep_no_lease_alive_first(backend)
        drawing = asyncio.create_task(backend.draw(late, only_if_it_holds=only))
        await until(lambda: slow.bytes_up > before, within=20)
        await asyncio.sleep(0.2)  # for the rest of it
        drawing.cancel()
        await asyncio.wait((drawing,))
        await backend.give_back(late)
        assert await keys(etcd_server, "late") == []
        slow.heal()
        await count_of_keys(etcd_server, "late", 1)
        async with asyncio.timeout(20):
            while await keys(etcd_server, "late"):
                assert await kept(backend, other) == [True]
                await asyncio.sleep(0.1)


async def test_a_give_back_that_was_not_confirmed_is_made_good_with_the_next_keep_alives(etcd_server: EtcdCluster):
    port = etcd_server.members[0].port
    async with FaultProxy(port) as network, backend_on(f"etcd://127.0.0.1:{network.port}") as backend:
        other, released = Claim("kept", 30.0), Claim("released", 30.0)
        for claim in (other, released):
            await granted(backend, claim)
        network.refuse()
        network.cut()
        with pytest.raises(BackendUnavailableError):
            await backend.give_back(released)
        network.heal()
        async with asyncio.timeout(20):
            while await keys(etcd_server, "released"):
                assert await kept(backend, other) == [True]
                await asyncio.sleep(0.1)


async def test_a_sweep_spares_what_its_owner_has_drawn_again(etcd: EtcdBackend, etcd_server: EtcdCluster):
    """The deletion is carried out late: after a give-back and another draw."""
    claim = Claim("a", 30.0)
    await granted(etcd, claim)
    own = etcd._own[etcd._keys.own(claim)]
    etcd._forget(own)
    late = Late(etcd, lambda body: "LEASE" in json.dumps(body) and not body["compare"])
    sweeping = asyncio.create_task(etcd._leases.sweep(own.lease))
    await until(lambda: late.tasks, what="the deletion is sent")
    await etcd.give_back(claim)
    token = await granted(etcd, claim)
    await late.deliver()
    await sweeping
    ((seen,),) = await etcd.tickets(["a"])
    assert seen.token == token


async def test_a_give_back_that_was_sent_to_two_members_shows_no_loss(etcd_server: EtcdCluster):
    """The first member has deleted the key without an answer, so the next one finds no key."""
    port = etcd_server.members[0].port
    async with FaultProxy(port) as deaf, backend_on(f"etcd://127.0.0.1:{deaf.port},127.0.0.1:{port}") as backend:
        claim = Claim("a", 30.0)
        await granted(backend, claim)
        ask_first(backend._gateway, deaf.port)
        deaf.half_open()
        before = deaf.bytes_up
        assert await backend.give_back(claim) is None
        assert deaf.bytes_up > before
        assert await keys(etcd_server, "a") == []


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
    assert shared <= 2, "one for those who hold, and one for those who wait"


# Answers get lost


async def test_a_draw_whose_answer_was_lost_finds_its_own_ticket(etcd_server, etcd_proxy: FaultProxy):
    async with backend_on(f"etcd://127.0.0.1:{etcd_proxy.port}") as backend:
        claim = Claim("a", 30.0)
        await granted(backend, Claim("warm", 30.0))
        etcd_proxy.half_open()
        keep_no_lease_alive_first(backend)
        drawing = asyncio.create_task(backend.draw(claim, only_if_it_holds=True))
        await count_of_keys(etcd_server, "a", 1)
        etcd_proxy.cut()
        with pytest.raises(BackendUnavailableError):
            await drawing
        etcd_proxy.heal()
        (key,) = (await asyncio.to_thread(etcd_server.keys, "fencing/a/")).values()
        assert await granted(backend, claim) == int(key["create_revision"])
        assert len(await keys(etcd_server, "a")) == 1


async def test_a_refusal_after_a_lost_request_is_no_refusal(etcd_server, etcd_proxy: FaultProxy):
    """The request may still arrive, and find the lock free: a caller that gives up has to give back."""
    url = f"etcd://127.0.0.1:{etcd_proxy.port},127.0.0.1:{etcd_server.members[0].port}"
    async with backend_on(url) as backend, backend_on(etcd_server.url) as rival:
        await granted(rival, Claim("a", 30.0))
        await granted(backend, Claim("warm", 30.0))
        ask_first(backend._gateway, etcd_proxy.port)
        etcd_proxy.blackhole()
        claim = Claim("a", 30.0)
        before = etcd_proxy.bytes_up
        keep_no_lease_alive_first(backend)
        drawing = asyncio.create_task(backend.draw(claim, only_if_it_holds=True))
        await until(lambda: etcd_proxy.bytes_up > before, what="the request is sent")
        etcd_proxy.cut()
        with pytest.raises(BackendUnavailableError):
            await drawing
        assert isinstance(await backend.draw(claim, only_if_it_holds=True), Busy)
        etcd_proxy.heal()


def test_a_fork_makes_a_lease_of_its_own(etcd_server: EtcdCluster):
    """If it kept the lease of its parent alive, the locks of a parent that died would never be free."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FORK), "own", etcd_server.url], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"child": "Place", "parent": "Place"}
    leases = {key.split("/")[1]: kv["lease"] for key, kv in etcd_server.keys().items()}
    assert leases["child"] != leases["first"]


# Turns that are written


@pytest.mark.parametrize("mode", [READER, Permit(of=2)], ids=lambda mode: mode.word)
async def test_two_clients_that_write_the_same_turns_write_the_same(mode, etcd: EtcdBackend, etcd_server):
    """The one that is late has read the line as it was before; it looks again."""
    writer, claims = Claim("a", 60.0, mode=WRITER), [Claim("a", 60.0, mode=mode) for _ in range(4)]
    async with backend_on(etcd_server.url) as other:
        await granted(other, writer)
        for claim in claims:
            assert (await other.draw(claim)).token is None
        late = Late(other, lambda body: "request_put" in json.dumps(body) and not late.tasks)
        giving = asyncio.create_task(other.give_back(writer))
        await until(lambda: late.tasks, what="the turns are about to be written")
        first, second = (await etcd.keep([(claim, 0) for claim in claims[:2]]))[:2]
        assert await etcd.give_back(claims[0]) is None  # and it was the lowest number, or the token of all
        await late.deliver()
        await giving
        (seen,) = await etcd.tickets(["a"])
        assert seen[0].token == second.token
        assert [each.permit for each in seen] == ([1, 0, None] if mode != READER else [None] * 3)
        assert first.token <= second.token


async def test_more_readers_than_fit_into_a_transaction_hold_together_and_are_ended_together(
    etcd: EtcdBackend, etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """The requests of each step grow with the readers and not with their square: a look reads the whole line."""
    monkeypatch.setattr(etcd_backend, "WAITER_TTL", 60.0)  # else the first may die before the last is there
    number, spent = 150, []

    async def requests() -> int:
        return sum([await asyncio.to_thread(etcd_server.calls, kind) for kind in ("Txn", "Range")])

    async def counted(*works: Awaitable[object]) -> None:
        before = await requests()
        await asyncio.gather(*works)
        spent.append(await requests() - before)

    writer, readers = Claim("a", 60.0, mode=WRITER), [Claim("a", 600.0, mode=READER) for _ in range(number)]
    await granted(etcd, writer)
    await counted(*map(etcd.draw, readers))
    await etcd.give_back(writer)
    places: list[Place] = []

    async def keep() -> None:  # which moves them to the lease for those who hold
        places.extend(await etcd.keep([(reader, 0) for reader in readers]))

    await counted(keep())
    (token,) = {place.token for place in places}
    assert token is not None
    await counted(*map(etcd.give_back, readers[:-1]))
    draws, keeps, returns = spent
    assert draws <= number + 5
    assert keeps <= 20
    assert returns <= number + 20
    await asyncio.gather(*map(etcd.draw, readers[:-1]))
    assert await etcd.end("a", token, "enough")
    assert set(await etcd.keep([(reader, 0) for reader in readers])) == {Gone("enough")}
    assert not await etcd.end("a", token, "again")
    assert await granted(etcd, writer) > token


async def test_among_many_permits_only_those_that_may_hold_are_read(etcd: EtcdBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(etcd_backend, "WAITER_TTL", 60.0)
    claims, found = [Claim("a", 600.0, mode=Permit(3)) for _ in range(60)], []
    await asyncio.gather(*map(etcd.draw, claims))
    read = TicketKey.read
    monkeypatch.setattr(TicketKey, "read", lambda fields: found.append(read(fields)) or found[-1])
    for number, claim in enumerate(claims):
        await etcd.keep([(other, 0) for other in claims[number : number + 3]])
        await etcd.give_back(claim)
    assert len(found) <= 15 * len(claims)


async def test_a_name_in_which_another_program_writes_grants_nothing(etcd: EtcdBackend, etcd_server: EtcdCluster):
    for value in ("", "[]", '{"of":"x"}', '{"mode":"permit","of":2,"permit":-1}', '{"mode":"x"}'):
        body = {"key": b64(f"fencing/a/{32 * '0'}"), "value": b64(value)}
        await asyncio.to_thread(etcd_server.ask, "kv/put", body)
        with pytest.raises(BackendUnavailableError, match="another program"):
            await etcd.draw(Claim("a", 60.0, mode=READER))
        assert len((await etcd.tickets(["a"]))[0]) == 1, "its own, which it has to give back"
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")


async def test_what_other_programs_write_is_in_no_list(etcd: EtcdBackend, etcd_server: EtcdCluster):
    await granted(etcd, Claim("a", 60.0))
    assert await etcd.end("b", await granted(etcd, Claim("b", 60.0)), "a test")  # leaves a note
    for key in ("fencing/", "fencing/x", "fencing/x/y", "fencing/%41/" + 32 * "0", "fencing/a/x"):
        await asyncio.to_thread(etcd_server.ask, "kv/put", {"key": b64(key), "value": b64("x")})
    for _ in range(7):
        await etcd.draw(Claim("c", 60.0))
    for limit in (1, 2, 3, 7, 100):
        found, cursor = [], None
        while True:
            page, cursor = await etcd.names("", cursor, limit)
            found += page
            if cursor is None:
                break
        assert found == ["a", "c"], limit


# Without a server: errors, keys, the rules


@pytest.mark.parametrize(
    ("body", "status", "outcome"),
    [
        ({"error": "x", "code": 3}, 400, RequestOutcome.REJECTED),
        ({"error": "x", "code": 8}, 429, RequestOutcome.UNSENT),
        ({"error": "x", "code": 14}, 503, RequestOutcome.UNKNOWN),
        ({"error": "x", "code": 2}, 500, RequestOutcome.UNKNOWN),
        ({"code": 7, "message": "x", "details": []}, 403, RequestOutcome.REJECTED),
        ({"error": {"grpc_code": 14, "message": "x"}}, 200, RequestOutcome.UNKNOWN),
        ({"error": {"code": 16}}, 200, RequestOutcome.REJECTED),
    ],
)
def test_an_error_is_read_by_its_code_in_every_version_of_the_gateway(body, status, outcome):
    with pytest.raises(RequestFailedError) as failed:
        read_answer(json.dumps(body).encode(), status)
    assert failed.value.outcome is outcome


@pytest.mark.parametrize(("code", "alone"), [(3, BackendRefusedError), (5, LeaseNotFoundError)])
def test_a_rejection_after_a_lost_answer_leaves_the_outcome_unknown(code: int, alone: type[BackendError]):
    """The engine sends no release after a refusal, but the request before it may have been granted."""
    lost = RequestFailedError(RequestOutcome.UNKNOWN, "the answer was lost")
    rejected = RequestFailedError(RequestOutcome.REJECTED, "no", code)
    assert type(error_of_failures("EtcdBackend", "acquire", [rejected])) is alone
    assert type(error_of_failures("EtcdBackend", "acquire", [lost, rejected])) is BackendUnavailableError


def test_the_lines_of_two_names_never_overlap():
    keys = EtcdKeys("fencing/")
    lines = [keys.line(name) for name in (*ODD_NAMES, "a", "a/", "a0", "a/0", "a//")]
    for (begin, end), (other, _) in itertools.permutations(set(lines), 2):
        assert not begin <= other < end


def key_of(claim: Claim, value: str) -> TicketKey:
    key = EtcdKeys("fencing/").own(claim)
    numbers = {"create_revision": "7", "mod_revision": "7", "lease": "1"}
    return TicketKey.read({"key": b64(key), "value": b64(value), **numbers})


def test_the_owner_is_in_no_key():
    claim = Claim("a", 10.0)
    key = key_of(claim, '{"label":"x"}')
    assert claim.owner.encode() not in key.key
    assert settled([key])[0].seen(5.0).holder == claim.holder


def test_a_field_of_another_version_is_passed_over():
    assert key_of(Claim("a", 10.0), '{"label": "worker 3", "of_another_version": [1]}').label == "worker 3"


def test_who_asks_from_outside_gets_no_cursor_of_another_listing():
    backend = EtcdBackend(["localhost"])
    for cursor in ("x", "00", b"fencing0".hex()):
        with pytest.raises(Exception, match="cursor must come from"):
            asyncio.run(backend.names("a", cursor, 5))
