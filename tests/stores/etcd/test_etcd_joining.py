"""What the etcd backend decides: without a server, and while a claim joins the line in the middle of an attempt."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from etcd_server import EtcdCluster
from etcd_stage import count_of_keys, granted, keys
from inside import holder_of
from patience import until

from fencing_sdk._etcd import (
    GatewayReply,
    LeaseNotFoundError,
    encoded,
    error_of_failures,
    read_answer,
)
from fencing_sdk._http.requests import RequestFailedError, RequestOutcome
from fencing_sdk._values.tasks import SharedBatches, SharedCall, ask_by_name
from fencing_sdk._values.timing import DRIFT
from fencing_sdk.abc import Busy, Claim, Renewal
from fencing_sdk.backends.etcd import EtcdBackend, from_url
from fencing_sdk.backends.etcd.keys import EtcdKeys, LineKey
from fencing_sdk.backends.etcd.leases import PendingDeletes, SharedLease, SharedLeases
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError
from fencing_sdk.testing.promises.grants import ODD_NAMES
from fencing_sdk.testing.promises.under_test import in_line

pytest_plugins = ["etcd_fixtures"]


# What the etcd backend decides without a server: JSON, keys, leases, pending deletes, options.


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
def test_an_error_is_told_by_its_code_in_every_version_of_the_gateway(body, status, outcome):
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


def test_the_owner_id_is_in_no_key():
    claim = Claim("a", 10.0)
    key = EtcdKeys("fencing/").own(claim)
    assert claim.owner.encode() not in key
    assert LineKey(key, b'{"label":"x"}', 7, 7, 1).holder("a", 5.0).id == holder_of(claim.owner)


def test_a_field_of_another_version_is_passed_over():
    value = b'{"label": "worker 3", "of_another_version": [1]}'
    assert LineKey(b"fencing/a/" + b"b" * 32, value, 7, 7, 1).holder("a", 5.0).label == "worker 3"


@pytest.mark.parametrize(("granted", "ttl"), [(1, 0.05), (1, 0.5), (2, 1.0), (16, 15.0), (15, 15.0), (1, 5.0)])
def test_an_older_keep_alive_serves_only_whom_it_keeps_for_a_whole_ttl(granted: int, ttl: float):
    """With or without drift, the lease lives for the ttl from the beginning of the call."""
    lease = SharedLease(1, granted, 0.0)
    started = 1000.0
    sent_at = lease.keep_alive_needed_since(ttl, started)
    for drift in (0.0, DRIFT):
        assert sent_at + granted * (1 - drift) >= started + min(ttl, granted) * (1 - drift)


def test_a_key_that_is_wanted_again_counts_if_it_was_created_after_every_deletion_of_it():
    pending = PendingDeletes()
    assert not pending.may_delete(b"a", 5)
    pending.add(b"a", 1.0, may_return=True)
    assert pending.may_delete(b"a", 5)
    pending.cancel(b"a", 0.5, 7)
    assert b"a" in pending, "it was added later"
    pending.cancel(b"a", 1.0, 7)
    assert b"a" not in pending
    assert pending.may_delete(b"a", 7)
    assert not pending.may_delete(b"a", 8)
    pending.add(b"a", 2.0)
    pending.confirmed(b"a", 2.0)
    assert not pending.may_delete(b"a", 7), "no deletion is under way any more"


async def test_a_deletion_is_not_tried_again_when_its_owner_has_come_back():
    """The next try would reach what was put since."""
    sent, answers = [], [asyncio.get_running_loop().create_future() for _ in range(2)]
    leases = leases_that_delete(sent, answers)
    leases.pending_deletes.add(b"a", leases.now(), may_return=True)
    paying = asyncio.create_task(leases.delete_pending("queue", [b"a"]))
    settling = asyncio.create_task(leases.finish_deleting("acquire", b"a"))
    await asyncio.sleep(0)
    answers[1].set_result([])
    await settling
    answers[0].set_result(None)
    await paying
    assert sent == [[b"a"]] * 2


async def test_a_delete_that_is_added_while_another_finishes_is_sent_again():
    sent, answers = [], [asyncio.get_running_loop().create_future() for _ in range(2)]
    leases = leases_that_delete(sent, answers)
    leases.pending_deletes.add(b"a", leases.now(), may_return=True)
    settling = asyncio.create_task(leases.finish_deleting("acquire", b"a"))
    await asyncio.sleep(0.01)
    leases.pending_deletes.add(b"a", leases.now(), may_return=True)
    answers[0].set_result([])
    await asyncio.sleep(0)
    assert b"a" in leases.pending_deletes
    answers[1].set_result([])
    await settling
    assert sent == [[b"a"]] * 2
    assert b"a" not in leases.pending_deletes


@pytest.mark.parametrize("by", ["joining", "leaving"])
async def test_a_key_that_another_deletion_may_have_deleted_was_not_gone_for_sure(by: str):
    """A release is under way when its claim joins the line, or leaves it, and is carried out after that deletion."""
    sent, answers = [], [asyncio.get_running_loop().create_future() for _ in range(2)]
    leases = leases_that_delete(sent, answers)
    leases.pending_deletes.add(b"a", leases.now(), may_return=True, sending=True)
    releasing = asyncio.create_task(leases.delete_pending("release", [b"a"]))
    await asyncio.sleep(0.01)
    if by == "leaving":
        leases.pending_deletes.add(b"a", leases.now(), may_return=True, sending=True)
    other = asyncio.create_task(
        leases.finish_deleting("queue", b"a") if by == "joining" else leases.delete_pending("queue", [b"a"])
    )
    await asyncio.sleep(0)
    answers[0].set_result([b"a"])
    assert await releasing == []
    answers[1].set_result([])
    await other
    assert sent == [[b"a"]] * 2


async def test_a_key_that_no_other_deletion_has_reached_was_gone_for_sure():
    sent, answers = [], [asyncio.get_running_loop().create_future()]
    leases = leases_that_delete(sent, answers)
    leases.pending_deletes.add(b"a", leases.now(), may_return=True, sending=True)
    answers[0].set_result([b"a"])
    assert await leases.delete_pending("release", [b"a"]) == [b"a"]


def leases_that_delete(sent: list[list[bytes]], answers: list[asyncio.Future[list[bytes] | None]]) -> SharedLeases:
    """Each deletion has the next of the answers."""
    backend = from_url("etcd://localhost")

    async def delete(_operation: str, keys: list[bytes]) -> list[bytes] | None:
        sent.append(keys)
        return await answers[len(sent) - 1]

    backend._requests.delete = delete
    return backend._leases


async def test_how_far_etcd_has_come_is_not_read_out_of_nonsense():
    backend = from_url("etcd://localhost")
    headers = [{"revision": "7"}, {"revision": "3"}, {"revision": "x"}, {"revision": str(2**60)}, 5, None]

    async def call(*_: object, **__: object) -> GatewayReply:
        return GatewayReply({"header": headers.pop(0)}, earlier_unknown=False)

    backend._gateway.call = call
    for _ in range(len(headers)):
        await backend._requests.delete("release", [b"a"])
    assert backend._requests.highest_revision == 7


async def test_a_call_that_serves_many_goes_on_until_the_last_of_them_has_gone():
    going, cancelled = asyncio.Event(), asyncio.Event()

    async def call() -> int:
        try:
            await going.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 7

    shared = SharedCall(call, 5.0)
    assert shared.can_join(5.0)
    assert not shared.can_join(5.1)
    one, two = (asyncio.create_task(shared.join()) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait((one,))
    assert not cancelled.is_set()
    two.cancel()
    await asyncio.sleep(0)
    assert not shared.can_join(5.0), "who joins a call that is being cancelled would be cancelled too"
    await asyncio.wait((two,))
    await asyncio.wait_for(cancelled.wait(), 20)


async def test_what_is_asked_in_one_turn_of_the_loop_is_one_call():
    asked: list[list[int]] = []

    async def ask(questions: Sequence[int]) -> list[int]:
        asked.append(list(questions))
        await asyncio.sleep(0)
        return [10 * question for question in questions]

    batches = SharedBatches(ask, 3)
    assert await asyncio.gather(*map(batches.ask, range(5))) == [0, 10, 20, 30, 40]
    assert asked == [[0, 1, 2], [3, 4]]
    gone, stays = (asyncio.create_task(batches.ask(number)) for number in (5, 6))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == 60
    alone = asyncio.create_task(batches.ask(7))
    await asyncio.sleep(0)
    alone.cancel()
    assert await batches.ask(8) == 80
    assert asked[2] == [5, 6]
    assert asked[3][-1] == 8
    assert await asyncio.gather(*map(batches.ask, (1, 2, 1, 1, 2, 3))) == [10, 20, 10, 10, 20, 30]
    assert asked[4:] == [[1, 2, 3]]


async def test_questions_about_several_names_are_asked_by_name_and_answered_in_the_order_given():
    asked = {}

    async def ask(name: str, questions: list[str]) -> list[str]:
        asked[name] = questions
        return [question.upper() for question in questions]

    questions = ["b1", "a1", "b2", "c1", "a2", "b3"]
    assert await ask_by_name(questions, lambda question: question[0], ask) == ["B1", "A1", "B2", "C1", "A2", "B3"]
    assert asked == {"b": ["b1", "b2", "b3"], "a": ["a1", "a2"], "c": ["c1"]}


# An attempt to take a lock in etcd goes on while its claim joins the line: neither undoes the other.


async def test_a_grant_that_comes_before_the_answer_to_joining_is_kept_when_the_line_is_left(etcd: EtcdBackend):
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    stand, stood = etcd._line.join, asyncio.Event()

    async def answered_late(*arguments: Any) -> Any:
        await stand(*arguments)
        stood.set()
        await asyncio.Event().wait()

    etcd._line.join = answered_late
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await stood.wait()
    await etcd.release(holder)
    token = await granted(etcd, claim)
    joining.cancel()
    await asyncio.wait((joining,))
    found = await etcd.inspect("a")
    assert found is not None
    assert found.token == token


async def test_nothing_is_granted_while_the_own_key_is_being_deleted(etcd: EtcdBackend):
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    line, free, deleting = etcd._line, asyncio.Event(), asyncio.Event()
    take, stand = line.take, line.join

    async def taken_later(*arguments: Any) -> Any:
        await free.wait()
        return await take(*arguments)

    async def lost(*arguments: Any) -> Any:
        await stand(*arguments)
        raise BackendUnavailableError("EtcdBackend", "queue", "the answer was lost")

    async def deleted_later(*_: Any) -> None:
        deleting.set()
        await asyncio.Event().wait()

    line.take, line.join = taken_later, lost
    asking = asyncio.create_task(etcd.acquire(claim))
    await asyncio.sleep(0.05)
    await etcd.release(holder)
    etcd._requests.delete = deleted_later
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await deleting.wait()
    free.set()
    with pytest.raises(BackendUnavailableError):
        await asking
    await asyncio.wait((joining,))


async def test_a_grant_that_comes_between_two_requests_to_leave_the_line_is_kept(
    etcd: EtcdBackend, monkeypatch: pytest.MonkeyPatch
):
    """The answer to joining is lost, and the first deletion fails late; another claim would get the lock as well."""
    monkeypatch.setattr("fencing_sdk.backends.etcd.LEAVING", 60.0)
    claim, join, delete = Claim("a", 10.0), etcd._line.join, etcd._requests.delete
    leaving, failing = asyncio.Event(), asyncio.Event()

    async def lost(*arguments: Any) -> Any:
        await join(*arguments)
        raise BackendUnavailableError("EtcdBackend", "queue", "the answer was lost")

    async def fails_at_first(*arguments: Any) -> Any:
        if leaving.is_set():
            return await delete(*arguments)
        leaving.set()
        await failing.wait()
        raise BackendUnavailableError("EtcdBackend", "queue", "the connection broke")

    etcd._line.join, etcd._requests.delete = lost, fails_at_first
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await leaving.wait()
    token = await granted(etcd, claim)
    failing.set()
    await asyncio.wait((joining,))
    assert isinstance(joining.exception(), BackendUnavailableError)
    found = await etcd.inspect("a")
    assert found is not None
    assert found.token == token
    assert await etcd.release(claim) is None


async def test_a_leaving_that_is_cancelled_while_the_line_is_joined_leaves_no_ghost(etcd: EtcdBackend):
    """The end of a loop does that, and `KeptPlace` after a while. A ghost would refuse every try of this client."""
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    join, asked, free, over = etcd._line.join, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def asked_late(*arguments: Any) -> Any:
        asked.set()
        try:
            await free.wait()
            return await join(*arguments)
        finally:
            over.set()

    etcd._line.join = asked_late
    place = etcd.stand(claim, lambda *_: None, hand_over=False)
    await asked.wait()
    leaving = place.leave()
    assert leaving is not None
    await asyncio.sleep(0)  # from here on it waits for the answer to its joining
    leaving.cancel()
    await asyncio.wait((leaving,))
    free.set()
    await over.wait()
    for _ in range(5):
        await asyncio.sleep(0)  # what has joined is entered
    await etcd.release(holder)
    assert not etcd._waiters.any_for("a")
    await granted(etcd, Claim("a", 10.0))


@pytest.mark.parametrize("held_back", ["turn", "join"])
async def test_a_try_that_goes_on_while_its_claim_leaves_the_line_puts_no_key_again(
    etcd: EtcdBackend, etcd_server: EtcdCluster, held_back: str
):
    """A client that closes leaves its lines while tries are under way: they find the key gone, and joined again."""
    holder, claim = Claim("a", 10.0), Claim("a", 10.0)
    await granted(etcd, holder)
    asked, free = asyncio.Event(), asyncio.Event()
    call = getattr(etcd._line, held_back)

    async def delivered_late(*arguments: Any) -> Any:
        asked.set()
        await free.wait()
        return await call(*arguments)

    async with in_line(etcd, claim):
        setattr(etcd._line, held_back, delivered_late)
        if held_back == "join":
            etcd_server.ask("kv/deleterange", {"key": encoded(etcd._keys.own(claim))})
        trying = asyncio.create_task(etcd.acquire(claim))
        await asked.wait()
    revision = etcd._requests.highest_revision
    free.set()
    assert isinstance(await trying, Busy)
    assert len(await keys(etcd_server, "a")) == 1
    if held_back == "turn":
        assert etcd._requests.highest_revision == revision, "it was not even put"


def delivered_late(call: Any, free: asyncio.Event, sent: list[asyncio.Task[Any]]) -> Any:
    """*call* as requests that are carried out once *free* is set, although their callers have given up."""

    async def deliver(*arguments: Any) -> Any:
        await free.wait()
        return await call(*arguments)

    async def send(*arguments: Any) -> Any:
        sent.append(asyncio.create_task(deliver(*arguments)))
        return await asyncio.shield(sent[-1])

    return send


async def stay_in_line(backend: EtcdBackend, claim: Claim) -> None:
    async with backend._in_line(claim):
        await asyncio.Event().wait()


async def test_a_joining_that_arrives_after_its_waiter_was_cancelled_leaves_no_place_in_the_line(
    etcd: EtcdBackend, etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """A busy etcd may carry out a request that was given up after the deletion: all behind it would wait for a ttl."""
    for limit in ("_JOINING", "LEAVING"):  # the answer comes soon, unless the machine stands still
        monkeypatch.setattr(f"fencing_sdk.backends.etcd.{limit}", 60.0)
    holder, claim = Claim("a", 60.0), Claim("a", 60.0)
    await granted(etcd, holder)
    join, free = etcd._line.join, asyncio.Event()
    late: list[asyncio.Task[Any]] = []
    etcd._line.join = delivered_late(join, free, late)
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await until(lambda: late, what="the request is sent")
    joining.cancel()
    await asyncio.wait((joining,), timeout=0.3)  # long enough for a deletion that does not wait
    free.set()
    await asyncio.wait((joining, *late))
    assert len(await keys(etcd_server, "a")) == 1


async def test_an_attempt_beside_an_answered_joining_is_deleted_when_it_arrives_long_after_the_release(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """That joining was answered says nothing of the attempt; another lock keeps the lease of the late key alive."""
    holder, claim, kept = Claim("a", 60.0), Claim("a", 60.0), Claim("kept", 60.0)
    await granted(etcd, kept)
    await granted(etcd, holder)
    take, stand, free, stood = etcd._line.take, etcd._line.join, asyncio.Event(), asyncio.Event()
    late: list[asyncio.Task[Any]] = []

    async def answered_late(*arguments: Any) -> Any:
        standing = await stand(*arguments)
        await stood.wait()
        return standing

    etcd._line.take, etcd._line.join = delivered_late(take, free, late), answered_late
    joining = asyncio.create_task(stay_in_line(etcd, claim))
    await count_of_keys(etcd_server, "a", 2)
    asking = asyncio.create_task(etcd.acquire(claim))
    await until(lambda: late, what="the attempt is sent")
    stood.set()
    await until(lambda: etcd._waiters.find(claim), what="joining is answered")
    for task in (asking, joining):
        task.cancel()
        await asyncio.wait((task,))
    await etcd.release(claim)
    await etcd.release(holder)
    await count_of_keys(etcd_server, "a", 0)
    free.set()
    await asyncio.wait(late)
    await count_of_keys(etcd_server, "a", 1)
    async with asyncio.timeout(20):
        while await keys(etcd_server, "a"):
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            await asyncio.sleep(0.05)
