"""What the etcd backend decides without a server: words, keys, leases, debts, options."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from fencing_sdk._etcd.answers import Fate, MemberError, read_line
from fencing_sdk._etcd.gateway import Reply
from fencing_sdk._etcd.json_codec import Entry, UnreadableError, decoded, entries, number, responses
from fencing_sdk._etcd.shared_call import SharedCall
from fencing_sdk._values.claim import Claim, holder_of
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.timing import MAX_DRIFT, MAX_TTL
from fencing_sdk.backends.etcd import from_url
from fencing_sdk.backends.etcd._debts import STRAY, Debts
from fencing_sdk.backends.etcd._keys import Keys, holder
from fencing_sdk.backends.etcd._leases import Leases, SharedLease
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
    with pytest.raises(UnreadableError):
        entries(fields)


def test_numbers_are_texts_and_zero_is_left_out():
    assert [number({"TTL": "7"}, "TTL"), number({"TTL": 7}, "TTL"), number({}, "TTL")] == [7, 7, 0]
    assert decoded("YQ==") == b"a"
    with pytest.raises(UnreadableError):
        responses({"responses": [{}]}, 2)


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"null", b"<html>", b"\xff", b"[" * 100_000])
def test_what_is_no_answer_of_etcd_says_nothing(body):
    with pytest.raises(UnreadableError):
        read_line(body, 200)
    with pytest.raises(MemberError) as rejected:
        read_line(body, 404)
    assert rejected.value.fate is Fate.REJECTED


@pytest.mark.parametrize(
    ("body", "status", "fate"),
    [
        ({"error": "x", "code": 3}, 400, Fate.REJECTED),
        ({"error": "x", "code": 8}, 429, Fate.UNSENT),
        ({"error": "x", "code": 14}, 503, Fate.LOST),
        ({"error": "x", "code": 2}, 500, Fate.LOST),
        ({"code": 7, "message": "x", "details": []}, 403, Fate.REJECTED),
        ({"error": {"grpc_code": 14, "message": "x"}}, 200, Fate.LOST),
        ({"error": {"code": 16}}, 200, Fate.REJECTED),
    ],
)
def test_an_error_is_told_by_its_code_in_every_version_of_the_gateway(body, status, fate):
    with pytest.raises(MemberError) as told:
        read_line(json.dumps(body).encode(), status)
    assert told.value.fate is fate


def test_the_lines_of_two_names_never_overlap():
    keys = Keys("fencing/")
    lines = [keys.line(name) for name in (*ODD_NAMES, "a", "a/", "a0", "a/0", "a//")]
    for (begin, end), (other, _) in itertools.permutations(set(lines), 2):
        assert not begin <= other < end


def test_the_owner_id_is_in_no_key():
    claim = Claim("a", 10.0)
    key = Keys("fencing/").own(claim)
    assert claim.owner.encode() not in key
    entry = Entry(key, b'{"metadata":"x"}', 7, 7, 1)
    assert holder("a", entry, 5.0).holder == holder_of(claim.owner)


@pytest.mark.parametrize("value", [b"", b"5", b"[]", b'{"metadata":5}', b"\xff"])
def test_a_key_of_another_program_is_not_shown_as_a_holder(value):
    with pytest.raises(UnreadableError):
        holder("a", Entry(b"fencing/a/b", value, 7, 7, 1), 5.0)


@pytest.mark.parametrize(("granted", "ttl"), [(1, 0.05), (1, 0.5), (2, 1.0), (16, 15.0), (15, 15.0), (1, 5.0)])
def test_an_older_keep_alive_serves_only_whom_it_keeps_for_a_whole_ttl(granted: int, ttl: float):
    """At every drift that the engine allows, the lease lives for the ttl from the beginning of the call."""
    lease = SharedLease(1, granted, 0.0)
    started = 1000.0
    sent_at = lease.needed_since(ttl, started)
    for drift in (0.0, 0.01, MAX_DRIFT):
        assert sent_at + granted * (1 - drift) >= started + min(ttl, granted) * (1 - drift)


def test_debts_are_paid_once_and_those_that_may_come_back_for_a_while():
    debts = Debts()
    debts.owe(b"plain", 0.0)
    debts.owe(b"stray", 0.0, stray=True)
    assert set(debts.due(0.0)) == {b"plain", b"stray"}
    assert debts.due(0.1) == {}
    for key in (b"plain", b"stray"):
        debts.paid(key, 0.1)
    assert b"plain" not in debts
    assert set(debts.due(10.0)) == {b"stray"}
    debts.paid(b"stray", STRAY + 1)
    assert b"stray" not in debts


def test_a_key_that_is_wanted_again_counts_if_it_was_created_after_every_deletion_of_it():
    debts = Debts()
    assert not debts.doomed(b"a", 5)
    debts.owe(b"a", 1.0, stray=True)
    assert debts.doomed(b"a", 5)
    debts.waive(b"a", 0.5, 7)
    assert b"a" in debts, "it is owed since later"
    debts.waive(b"a", 1.0, 7)
    assert b"a" not in debts
    assert debts.doomed(b"a", 7)
    assert not debts.doomed(b"a", 8)
    debts.owe(b"a", 2.0)
    debts.paid(b"a", 2.0)
    assert not debts.doomed(b"a", 7), "nothing is on its way any more"


async def test_a_deletion_is_not_tried_again_when_its_owner_has_come_back():
    """The next try would reach what was put since."""
    sent, answers = [], [asyncio.get_running_loop().create_future() for _ in range(2)]
    leases = leases_that_delete(sent, answers)
    leases.debts.owe(b"a", leases.now(), stray=True)
    paying = asyncio.create_task(leases.pay("queue", [b"a"]))
    settling = asyncio.create_task(leases.settle("acquire", b"a"))
    await asyncio.sleep(0)
    answers[1].set_result(True)
    await settling
    answers[0].set_result(False)
    await paying
    assert sent == [[b"a"]] * 2


async def test_what_is_owed_again_while_it_is_settled_is_deleted_again():
    sent, answers = [], [asyncio.get_running_loop().create_future() for _ in range(2)]
    leases = leases_that_delete(sent, answers)
    leases.debts.owe(b"a", leases.now(), stray=True)
    settling = asyncio.create_task(leases.settle("acquire", b"a"))
    await asyncio.sleep(0.01)
    leases.debts.owe(b"a", leases.now(), stray=True)
    answers[0].set_result(True)
    await asyncio.sleep(0)
    assert b"a" in leases.debts
    answers[1].set_result(True)
    await settling
    assert sent == [[b"a"]] * 2
    assert b"a" not in leases.debts


def leases_that_delete(sent: list[list[bytes]], answers: list[asyncio.Future[bool]]) -> Leases:
    """Each deletion has the next of the answers."""
    backend = from_url("etcd://localhost")

    async def delete(_operation: str, keys: list[bytes]) -> bool:
        sent.append(keys)
        return await answers[len(sent) - 1]

    backend._calls.delete = delete
    return backend._leases


async def test_how_far_etcd_has_come_is_not_read_out_of_nonsense():
    backend = from_url("etcd://localhost")
    headers = [{"revision": "7"}, {"revision": "3"}, {"revision": "x"}, {"revision": str(2**60)}, 5, None]

    async def call(*_: object) -> Reply:
        return Reply({"header": headers.pop(0)}, after_loss=False)

    backend._gateway.call = call
    for _ in range(len(headers)):
        await backend._calls.delete("release", [b"a"])
    assert backend._calls.seen == 7


async def test_a_call_that_serves_many_goes_on_until_the_last_of_them_has_gone():
    going, cancelled = asyncio.Event(), asyncio.Event()

    async def call() -> int:
        try:
            await going.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 7

    flight = SharedCall(call, 5.0)
    assert flight.takes(5.0)
    assert not flight.takes(5.1)
    one, two = (asyncio.create_task(flight.join()) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait((one,))
    assert not cancelled.is_set()
    two.cancel()
    await asyncio.wait((two,))
    await asyncio.wait_for(cancelled.wait(), 20)


@pytest.mark.parametrize("ttl", [0.05, 15.0, MAX_TTL])
def test_every_ttl_makes_a_lease_of_whole_seconds_that_is_longer(ttl: float):
    assert BootClock().now() > 0
    backend = from_url("etcd://localhost")
    asked = []

    async def grant(_operation: str, seconds: int) -> tuple[int, int]:
        asked.append(seconds)
        return 1, seconds

    backend._calls.grant_lease = grant
    asyncio.run(backend._leases.fresh("acquire", ttl, backend._leases.now()))
    assert asked[0] >= ttl + 0.5
    assert asked[0] <= ttl + 1.5
