"""What the etcd backend decides without a server: JSON, keys, leases, pending deletes, options."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence

import pytest

from fencing_sdk._etcd.answers import read_answer
from fencing_sdk._etcd.errors import LeaseNotFoundError, error_of_failures
from fencing_sdk._etcd.gateway import GatewayReply
from fencing_sdk._etcd.json_codec import Entry, decoded, entries, number, responses
from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome
from fencing_sdk._values.claim import Claim, holder_of
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.shared_call import SharedBatches, SharedCall, ask_by_name
from fencing_sdk._values.timing import MAX_DRIFT, MAX_TTL
from fencing_sdk.backends.etcd import from_url
from fencing_sdk.backends.etcd.keys import EtcdKeys, holder_of_key
from fencing_sdk.backends.etcd.pending_deletes import LATE_ARRIVAL, PendingDeletes
from fencing_sdk.backends.etcd.shared_leases import SharedLease, SharedLeases
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError
from fencing_sdk.testing.backend_promises.names import ODD_NAMES


@pytest.mark.parametrize(
    "fields",
    [
        {"kvs": 5},
        {"kvs": [5]},
        {"kvs": [{}]},
        {"kvs": [{"key": "YQ==", "create_revision": "x", "mod_revision": "1"}]},
        {"kvs": [{"key": "YQ==", "create_revision": True, "mod_revision": "1"}]},
        {"kvs": [{"key": "!", "create_revision": "1", "mod_revision": "1"}]},
        {"kvs": [{"key": "YQ==", "create_revision": "0", "mod_revision": "1"}]},
    ],
)
def test_what_is_no_list_of_keys_is_not_read_as_one(fields):
    with pytest.raises(UnreadableAnswerError):
        entries(fields)


def test_numbers_are_texts_and_zero_is_left_out():
    assert [number({"TTL": "7"}, "TTL"), number({"TTL": 7}, "TTL"), number({}, "TTL")] == [7, 7, 0]
    assert decoded("YQ==") == b"a"
    with pytest.raises(UnreadableAnswerError):
        responses({"responses": [{}]}, 2)


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"null", b"<html>", b"\xff", b"[" * 100_000])
def test_what_is_no_answer_of_etcd_says_nothing(body):
    with pytest.raises(UnreadableAnswerError):
        read_answer(body, 200)
    with pytest.raises(RequestFailedError) as rejected:
        read_answer(body, 404)
    assert rejected.value.outcome is RequestOutcome.REJECTED


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
    entry = Entry(key, b'{"metadata":"x"}', 7, 7, 1)
    assert holder_of_key("a", entry, 5.0).holder == holder_of(claim.owner)


@pytest.mark.parametrize("value", [b"", b"5", b"[]", b'{"metadata":5}', b"\xff"])
def test_a_key_of_another_program_is_not_shown_as_a_holder(value):
    with pytest.raises(UnreadableAnswerError):
        holder_of_key("a", Entry(b"fencing/a/b", value, 7, 7, 1), 5.0)


def test_a_field_of_another_version_is_passed_over():
    value = b'{"metadata": "worker 3", "of_another_version": [1]}'
    assert holder_of_key("a", Entry(b"fencing/a/" + b"b" * 32, value, 7, 7, 1), 5.0).metadata == "worker 3"


@pytest.mark.parametrize(("granted", "ttl"), [(1, 0.05), (1, 0.5), (2, 1.0), (16, 15.0), (15, 15.0), (1, 5.0)])
def test_an_older_keep_alive_serves_only_whom_it_keeps_for_a_whole_ttl(granted: int, ttl: float):
    """At every drift that the engine allows, the lease lives for the ttl from the beginning of the call."""
    lease = SharedLease(1, granted, 0.0)
    started = 1000.0
    sent_at = lease.keep_alive_needed_since(ttl, started)
    for drift in (0.0, 0.01, MAX_DRIFT):
        assert sent_at + granted * (1 - drift) >= started + min(ttl, granted) * (1 - drift)


def test_a_key_is_deleted_once_and_one_that_may_return_for_a_while():
    pending = PendingDeletes()
    pending.add(b"plain", 0.0)
    pending.add(b"returning", 0.0, may_return=True)
    assert set(pending.due(0.0)) == {b"plain", b"returning"}
    assert pending.due(0.1) == {}
    for key in (b"plain", b"returning"):
        pending.confirmed(key, 0.1)
    assert b"plain" not in pending
    assert set(pending.due(10.0)) == {b"returning"}
    pending.confirmed(b"returning", LATE_ARRIVAL + 1)
    assert b"returning" not in pending


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


@pytest.mark.parametrize("ttl", [0.05, 15.0, MAX_TTL])
def test_every_ttl_makes_a_lease_of_whole_seconds_that_is_longer(ttl: float):
    assert BootClock().now() > 0
    backend = from_url("etcd://localhost")
    asked = []

    async def grant(_operation: str, seconds: int) -> tuple[int, int]:
        asked.append(seconds)
        return 1, seconds

    backend._requests.grant_lease = grant
    asyncio.run(backend._leases.fresh("acquire", ttl, backend._leases.now()))
    assert asked[0] >= ttl + 0.5
    assert asked[0] <= ttl + 1.5
