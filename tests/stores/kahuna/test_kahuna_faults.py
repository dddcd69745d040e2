"""What goes wrong between a client and a Kahuna cluster, and what the holder and the waiters see of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from inside import LAST_CALL, BootClock
from kahuna_faults import NO_ANSWERS, NO_TOKENS, UNSETTLED
from kahuna_server import HOST, KahunaServer
from required_program import require_program
from stays import answered
from throwaway_certificates import Certificates, make_certificates

from fencing_sdk import LockClient
from fencing_sdk._http import requests
from fencing_sdk.abc import Busy, Claim, Gone, Place, Seen
from fencing_sdk.backends import kahuna as kahuna_room
from fencing_sdk.backends.kahuna import KahunaBackend, from_url
from fencing_sdk.errors import (
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
)

pytest_plugins = ["kahuna_fixtures"]


PATIENCE = 20.0

LOST = {
    "reset": ("drop", ""),
    "cut": ("truncate", ""),
    "endless": ("endless", ""),
    **{f"http-{status}": ("status", status) for status in (408, 429, 500, 502, 503, 504)},
    **{f"type-{kind}": ("body", json.dumps({"type": kind, "fencingToken": 0})) for kind in (*UNSETTLED, 101)},
    **{f"body-{number}": ("body", body) for number, body in enumerate(NO_ANSWERS)},
    **{f"token-{number}": ("body", f'{{"type":0{token}}}') for number, token in enumerate(NO_TOKENS)},
    "unfit-yes": ("body", '{"type":2,"fencingToken":0}'),
    "unfit-no": ("body", '{"type":102}'),
}
"""Answers that leave open whether the lock was granted."""


@contextlib.asynccontextmanager
async def backend_on(
    server: KahunaServer | str, *, first: int | None = None, **options: object
) -> AsyncIterator[KahunaBackend]:
    """A backend, which asks the node *first* at first; by default any."""
    url = server if isinstance(server, str) else server.url
    backend = from_url(url, **options if "connect_timeout" in url else {"connect_timeout": PATIENCE} | options)
    if first is not None and isinstance(server, KahunaServer):
        ports = [*server.ports[first:], *server.ports[:first]]
        backend._cluster._endpoints._order.sort(key=lambda node: ports.index(int(node.origin.rpartition(":")[2])))
    try:
        async with asyncio.timeout(PATIENCE):
            yield backend
    finally:
        await backend.aclose()


async def granted(backend: KahunaBackend, claim: Claim) -> Place:
    place = await backend.draw(claim)
    assert isinstance(place, Place), place
    return place


async def holder(backend: KahunaBackend, name: str) -> Seen | None:
    ((*seen,),) = await backend.tickets([name])
    return seen[0] if seen else None


async def kept(backend: KahunaBackend, *claims: Claim) -> list[type]:
    """Keep these tickets, and return the kinds of the answers."""
    return [type(answer) for answer in await backend.keep([(claim, 0) for claim in claims])]


async def free(backend: KahunaBackend, name: str) -> None:
    """Wait until *name* has no holder."""
    while await holder(backend, name) is not None:  # noqa: ASYNC110  (the store wakes no waiter)
        await asyncio.sleep(0.01)


# What an answer means


@pytest.mark.parametrize("trouble", LOST)
async def test_a_grant_whose_answer_says_nothing_is_unknown(
    kahuna_server: KahunaServer, kahuna: KahunaBackend, trouble: str
):
    """It is neither taken for a grant nor for a refusal, and a retry finds it."""
    act, value = LOST[trouble]
    kahuna_server.fault(act, value, call="try-lock")
    claim = Claim("a", 60.0)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(BackendUnavailableError) as raised:
            await kahuna.draw(claim)
    assert raised.value.operation == "acquire"
    assert claim.owner not in f"{raised.value!r} {raised.value.__cause__!r}"
    kahuna_server.heal()
    grant = await granted(kahuna, claim)
    assert grant.token == 0
    await kahuna.give_back(claim)
    assert (await granted(kahuna, Claim("a", 60.0))).token == 1


async def test_a_release_in_time_that_is_answered_after_the_ttl_shows_no_loss(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    claim = Claim("a", 2.0)
    await granted(kahuna, claim)
    kahuna_server.fault("answer", call="try-unlock", delay=2.1)
    assert await kahuna.give_back(claim) is None


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 415])
async def test_what_no_other_try_changes_is_refused(kahuna_server: KahunaServer, kahuna: KahunaBackend, status: int):
    kahuna_server.fault("status", status, apply=False)
    with pytest.raises(BackendRefusedError):
        await kahuna.draw(Claim("a", 60.0))
    assert len(kahuna_server.seen()) == 1


@pytest.mark.parametrize(("act", "value"), [("status", "404"), ("body", '{"type":100}')])
async def test_what_was_answered_with_must_retry_is_not_refused_later(
    kahuna_server: KahunaServer, kahuna: KahunaBackend, act: str, value: str
):
    """The first request may still be carried out, so a caller that gives up must release."""
    kahuna_server.fault("body", '{"type":101}', call="try-lock", times=1)
    kahuna_server.fault(act, value, call="try-lock", apply=False)
    with pytest.raises(BackendUnavailableError):
        await kahuna.draw(Claim("a", 60.0))


async def test_invalid_input_is_refused(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    with pytest.raises(BackendRefusedError, match=r"1\.0\.7"):
        await kahuna.draw(Claim("a", 60.0, owner=""))


async def test_a_redirect_is_followed_nowhere(kahuna_server: KahunaServer, kahuna_cluster: KahunaServer):
    """It would carry the owner id, which may release the lock, to another host."""
    kahuna_server.fault("redirect", f"http://{HOST}:{kahuna_cluster.ports[0]}/v1/locks/try-lock", apply=False)
    async with backend_on(kahuna_server) as backend:
        with pytest.raises(BackendRefusedError, match="redirect"):
            await backend.draw(Claim("a", 60.0))
    assert not kahuna_cluster.seen()


async def test_a_no_of_another_node_is_no_no_after_a_lost_request(kahuna_cluster: KahunaServer):
    """The lost request is carried out late, after the holder has released: a caller that gives up must release."""
    holder, claim = Claim("a", 60.0), Claim("a", 60.0)
    async with backend_on(kahuna_cluster, first=0) as backend:
        await granted(backend, holder)
        kahuna_cluster.fault("drop", node=0, times=1, late=0.3)
        with pytest.raises(BackendUnavailableError, match="may still be carried out"):
            await backend.draw(claim)
        assert {request["node"] for request in kahuna_cluster.seen("try-lock")} == {0, 1}


# Since when a grant runs


async def test_a_look_while_a_change_is_replicated_is_answered(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    """The server says WaitingForReplication to it, for as long as that takes, and then who holds the lock."""
    kahuna_server.replication(0.04)
    claim = Claim("a", 60.0)
    acquiring = asyncio.create_task(kahuna.draw(claim))
    found = [await holder(kahuna, "a") for _ in range(20)]
    assert isinstance(await acquiring, Place)
    assert [seen.holder for seen in found if seen][-1:] == [claim.holder]


async def test_a_grant_that_was_found_again_is_restarted(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    """It is unknown since when the grant runs, so it is extended, and a rival waits for a whole ttl from then on."""
    clock, claim = BootClock(), Claim("a", 1.0)
    kahuna_server.fault("drop", call="try-lock", times=1)
    began = clock.now()
    with pytest.raises(BackendUnavailableError):
        await kahuna.draw(claim)
    await asyncio.sleep(0.5)
    sent_at = clock.now()
    if (await granted(kahuna, claim)).token == 0:  # else the machine was so slow that the first grant had expired
        while isinstance(await kahuna.draw(Claim("a", 60.0)), Busy):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert clock.now() >= sent_at + 1.0 - 0.02
    else:
        assert clock.now() >= began + 1.0 - 0.02


async def test_a_request_carried_out_after_a_refusal_does_not_prolong_the_deadline(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    """MustRetry, then Busy, then granted behind our back: the next try finds a grant of unknown age."""
    first, claim = Claim("a", 60.0), Claim("a", 60.0)
    await granted(kahuna, first)
    kahuna_server.fault("body", '{"type":101}', call="try-lock", times=1, late=2.0)  # after the release below
    assert isinstance(await kahuna.draw(claim), Busy)
    await kahuna.give_back(first)
    while (found := await holder(kahuna, "a")) is None or found.holder != claim.holder:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (await granted(kahuna, claim)).token == 1
    assert len(kahuna_server.seen("try-extend")) == 1


async def test_a_grant_that_ended_meanwhile_is_not_taken(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    """The lock is answered for as ours and gone when its ttl is to be restarted."""
    claim = Claim("a", 60.0)
    kahuna_server.fault("drop", call="try-lock", times=1)
    with pytest.raises(BackendUnavailableError):
        await kahuna.draw(claim)
    kahuna_server.fault("body", '{"type":102}', call="try-extend", apply=False, times=1)
    with pytest.raises(BackendUnavailableError, match="ended meanwhile"):
        await kahuna.draw(claim)
    assert (await granted(kahuna, claim)).token == 0


async def test_a_grant_whose_ttl_cannot_be_restarted_is_not_left_behind(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    """A refusal would end the acquisition without a release."""
    claim = Claim("a", 60.0)
    kahuna_server.fault("drop", call="try-lock", times=1)
    with pytest.raises(BackendUnavailableError):
        await kahuna.draw(claim)
    kahuna_server.fault("status", 404, call="try-extend", apply=False)
    with pytest.raises(BackendUnavailableError):
        await kahuna.draw(claim)


# Leases


async def test_a_request_that_is_carried_out_late_is_released(
    kahuna_server: KahunaServer, kahuna: KahunaBackend, monkeypatch: pytest.MonkeyPatch
):
    """Long after the caller has given up, and after the first release found nothing."""
    give_back, seen, releases = kahuna.give_back, asyncio.Event(), 0

    async def give_back_in_turn(claim: Claim, *, after: float) -> Gone | None:
        """The first time before the request is carried out, and then not before that was seen."""
        nonlocal releases
        releases += 1
        if releases > 1:
            await seen.wait()
        return await give_back(claim, after=after)

    monkeypatch.setattr(kahuna, "give_back", give_back_in_turn)
    async with LockClient(kahuna) as locks, asyncio.timeout(PATIENCE):
        kahuna_server.fault("drop", call="try-lock", times=1, late=1.5)
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=60, wait=0).acquire()
        while await holder(kahuna, "a") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        seen.set()
        await free(kahuna, "a")


async def test_a_short_lease_does_not_lose_a_refusal_to_the_question_that_follows_it(
    kahuna_server: KahunaServer, kahuna: KahunaBackend, monkeypatch: pytest.MonkeyPatch
):
    """The engine waits for the answer for less than half a ttl. A longer one stands here for a short one."""
    monkeypatch.setattr(kahuna_room, "_LOOK_LIMIT", 60.0)
    monkeypatch.setattr(LAST_CALL, 60.0)
    await granted(kahuna, Claim("a", 60.0))
    async with LockClient(kahuna) as locks, asyncio.timeout(PATIENCE):
        kahuna_server.fault("hang", call="get-info", apply=False)
        assert await locks.lock("a", ttl=10).try_acquire() is None
        kahuna_server.heal()


@pytest.mark.every_loop
async def test_a_waiter_is_told_when_the_holder_s_grant_ends(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    await granted(kahuna, Claim("a", 40.0))
    outcome = await kahuna.draw(Claim("a", 60.0))
    assert isinstance(outcome, Busy)
    assert outcome.look_after is not None
    assert 20 < outcome.look_after <= 40.2


async def test_a_waiter_is_never_told_to_come_back_at_once(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    """Clocks differ: a holder whose end seems to have passed is still there, and the waiter must pause."""
    await granted(kahuna, Claim("a", 40.0))
    heard = {"type": 4, "owner": "YQ==", "expires": {"n": 1, "l": 1, "c": 0}, "fencingToken": 0}
    kahuna_server.fault("body", heard, call="get-info")
    outcome = await kahuna.draw(Claim("a", 60.0))
    assert isinstance(outcome, Busy)
    assert outcome.look_after is not None
    assert 0.05 <= outcome.look_after <= 0.1


# Many renewals


async def test_one_claim_without_an_answer_stops_no_other(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    claims = [Claim(f"batch/{number}", 60.0) for number in range(40)]
    for claim in claims:
        await granted(kahuna, claim)
    kahuna_server.fault("status", 500, call="try-extend", times=1)
    answers = await kept(kahuna, *claims, Claim("free", 60.0))
    assert answers[-1] in {Gone, type(None)}
    assert answers.count(type(None)) == 1
    assert answers.count(Place) >= 39


@pytest.mark.every_loop
async def test_one_claim_that_hangs_stops_no_other(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    """The answers of the others are not lost with it, if they come within an eighth of the ttl."""
    claims = [Claim(f"batch/{number}", 20.0) for number in range(24)]
    for claim in claims:
        await granted(kahuna, claim)
    kahuna_server.fault("hang", call="try-extend", times=1)
    async with asyncio.timeout(PATIENCE):
        answers = await kept(kahuna, *claims)
    assert [answers.count(kind) for kind in (Place, type(None))] == [23, 1]


async def test_no_claim_with_an_answer_is_an_error(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    kahuna_server.fault("status", 500, call="try-extend")
    with pytest.raises(BackendUnavailableError) as raised:
        await kept(kahuna, *(Claim(f"batch/{number}", 60.0) for number in range(40)))
    assert raised.value.operation == "renew"


# What is sent


@pytest.mark.every_loop
async def test_each_call_is_one_request_on_one_connection(
    kahuna_server: KahunaServer, kahuna: KahunaBackend, no_blocking_calls: None
):
    claim = Claim("a", 1.2345)
    await granted(kahuna, claim)
    await kept(kahuna, claim)
    await kahuna.give_back(claim)
    requests = kahuna_server.seen()
    assert [request["call"] for request in requests] == ["try-lock", "try-extend", "try-unlock"]
    assert len({request["peer"] for request in requests}) == 1
    assert {b64decode(request["owner"]).decode() for request in requests} == {claim.owner}
    assert {request["durability"] for request in requests} == {1}
    assert [request.get("expiresMs") for request in requests] == [1235, 1235, None]


# Several nodes


@pytest.mark.every_loop
async def test_a_node_that_refuses_connections_is_followed_by_the_next(
    kahuna_cluster: KahunaServer, monkeypatch: pytest.MonkeyPatch
):
    """In the same call; and the one that answered is asked first from then on."""
    monkeypatch.setattr("fencing_sdk.backends.kahuna.cluster.PATIENCE", PATIENCE)  # ask no other because one is slow
    kahuna_cluster.down(0)
    async with backend_on(kahuna_cluster, first=0) as backend:
        claim = Claim("a", 6000.0)
        await granted(backend, claim)
        kahuna_cluster.up(0)
        await kept(backend, claim)
        assert [request["node"] for request in kahuna_cluster.seen()] == [1, 1]
        kahuna_cluster.down(1)
        assert await kept(backend, claim) == [Place]
        assert kahuna_cluster.seen()[-1]["node"] == 2


async def test_an_error_of_all_nodes_is_one_error(kahuna_cluster: KahunaServer):
    for number in range(3):
        kahuna_cluster.down(number)
    async with backend_on(kahuna_cluster) as backend:
        with pytest.raises(BackendUnavailableError, match="none of 3 nodes"):
            await backend.draw(Claim("a", 60.0))


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    require_program("openssl")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[KahunaServer]:
    folder = tmp_path_factory.mktemp("kahuna-tls")
    with KahunaServer(folder, certificate=str(certificates.certificate), key=str(certificates.key)) as server:
        yield server


@pytest.mark.every_loop
async def test_tls_checks_the_certificate_against_the_authority(tls_server: KahunaServer, certificates: Certificates):
    tls_server.reset()
    async with backend_on(tls_server, ca=certificates.authority) as backend:
        assert (await granted(backend, Claim("a", 60.0))).token == 0
        assert await kept(backend) == []


async def test_certificates_that_are_replaced_are_used_for_new_connections(certificates: Certificates, tmp_path: Path):
    made = make_certificates(tmp_path)
    server = KahunaServer(tmp_path, certificate=str(made.certificate), key=str(made.key))
    with server:
        async with backend_on(server, ca=made.authority) as backend:
            await granted(backend, Claim("a", 60.0))
            await asyncio.to_thread(server.kill)
            made.authority.write_text("half of a file")
            with pytest.raises(BackendUnavailableError):  # over the connection that is open
                await backend.draw(Claim("b", 60.0))
            with pytest.raises(BackendUnavailableError, match=r"ca must .*authority\.pem' cannot be read"):
                await backend.draw(Claim("b", 60.0))
            await asyncio.to_thread(make_certificates, tmp_path)  # of another authority, under the same names
            await asyncio.to_thread(server.start)
            await answered(lambda: granted(backend, Claim("b", 60.0)))


async def test_an_aiohttp_that_connects_otherwise_keeps_the_certificates_it_read_first(
    tls_server: KahunaServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
):
    tls_server.reset()
    monkeypatch.delattr(requests._Connector, "_get_ssl_context")
    async with backend_on(tls_server, ca=certificates.authority) as backend:
        await granted(backend, Claim("a", 60.0))


async def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server: KahunaServer):
    tls_server.reset()
    async with backend_on(tls_server) as backend:
        with pytest.raises(BackendRefusedError, match="certificate"):
            await backend.draw(Claim("a", 60.0))
    assert not tls_server.seen()


async def test_plain_text_to_a_tls_port_and_tls_to_a_plain_one_fail(
    tls_server: KahunaServer, kahuna_server: KahunaServer, certificates: Certificates
):
    plain = tls_server.url.replace("kahuna+https", "kahuna")
    tls = kahuna_server.url.replace("kahuna", "kahuna+https")
    async with backend_on(plain) as one, backend_on(tls, ca=certificates.authority) as other:
        for backend in (one, other):
            with pytest.raises(BackendError):
                await backend.draw(Claim("a", 60.0))


@pytest.mark.every_loop
async def test_a_node_that_accepts_and_says_nothing_does_not_eat_the_limit(
    tls_server: KahunaServer, certificates: Certificates
):
    """The handshake belongs to the connection, which has a limit of its own."""
    tls_server.reset()
    with socket.create_server((HOST, 0)) as mute:
        endpoints = [f"{HOST}:{mute.getsockname()[1]}", f"{HOST}:{tls_server.ports[0]}"]
        backend = KahunaBackend(endpoints, tls=True, ca=certificates.authority, connect_timeout=2)
        async with asyncio.timeout(PATIENCE):
            assert (await granted(backend, Claim("a", 60.0))).token == 0
        await backend.aclose()


# Loops and processes


async def test_a_loop_that_goes_on_closes_its_own_connections(kahuna_server: KahunaServer):
    backend = from_url(kahuna_server.url)
    claim = Claim("a", 60.0)
    await granted(backend, claim)
    pool = backend._nodes.pool._current
    assert pool is not None

    async def elsewhere() -> None:
        assert await kept(backend, claim) == [Place]
        await backend.aclose()

    await asyncio.to_thread(asyncio.run, elsewhere())
    async with asyncio.timeout(PATIENCE):
        while not pool.session.closed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await kept(backend, claim) == [Place]
    await backend.aclose()


@pytest.mark.parametrize("loop", ["own", "inherited"])
def test_a_forked_child_opens_connections_of_its_own(kahuna_server: KahunaServer, loop: str):
    """Parent and child go on with the same object, and neither disturbs the other's connections."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).parents[1] / "store_fork.py"), loop, kahuna_server.url],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert json.loads(done.stdout) == {"child": "Place", "parent": "Place"}
    first, second, *child, after = (request["peer"] for request in kahuna_server.seen())
    assert first == second == after
    assert after not in child
    assert len(child) == 2


async def test_a_long_answer_is_not_read_to_its_end(
    kahuna_server: KahunaServer, kahuna: KahunaBackend, monkeypatch: pytest.MonkeyPatch
):
    """One that says how long it is, and one that does not."""
    monkeypatch.setattr(kahuna._nodes, "_body_limit", 1000)
    kahuna_server.fault("body", '{"type":0,"fencingToken":0}' + " " * 2000)
    with pytest.raises(BackendUnavailableError, match="longer"):
        await kahuna.draw(Claim("a", 60.0))


async def test_a_client_that_cannot_reach_its_cluster_says_so_when_it_opens(kahuna_server: KahunaServer):
    kahuna_server.fault("status", 404, apply=False)
    async with backend_on(kahuna_server) as backend:
        with pytest.raises(BackendRefusedError):
            async with LockClient(backend):
                pytest.fail("opened")
