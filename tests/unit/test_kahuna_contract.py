"""What requests say and answers mean, without a server."""

import json
from base64 import b64decode, b64encode

import pytest

from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._values.claim import Claim, holder_of
from fencing_sdk.backends.kahuna.requests import AnswerType, KahunaAnswer, RequestWriter

WRITER = RequestWriter("persistent")
NOW = 1_790_000_000.25
DATE = "Mon, 21 Sep 2026 14:13:20 GMT"
"""The second in which NOW lies."""


def info(**fields: object) -> KahunaAnswer:
    owner = b64encode(b"owner-1").decode()
    told = {"type": 4, "owner": owner, "expires": {"n": 1, "l": int(NOW * 1000) + 5000, "c": 0}, "fencingToken": 7}
    return KahunaAnswer.read(json.dumps(told | fields).encode(), DATE)


def sent(body: bytes) -> dict[str, object]:
    return json.loads(body)


def test_durability_is_sent_as_a_number_with_every_request():
    """A server that is told nothing keeps a lock in memory alone."""
    claim = Claim("a", 1.0)
    for durability, number in (("persistent", 1), ("ephemeral", 0)):
        writer = RequestWriter(durability)
        for body in (writer.of_claim(claim), writer.of_release(claim), writer.of_name("a")):
            assert sent(body)["durability"] == number


@pytest.mark.parametrize(("ttl", "milliseconds"), [(1.0, 1000), (0.0501, 51), (1.0001, 1001), (86_400.0, 86_400_000)])
def test_a_ttl_is_rounded_up_to_whole_milliseconds(ttl: float, milliseconds: int):
    assert sent(WRITER.of_claim(Claim("a", ttl)))["expiresMs"] == milliseconds


@pytest.mark.parametrize("metadata", [None, "", "batch 7", "two\nlines", "\N{LOCK}" * 1024])
def test_owner_and_metadata_travel_together_and_come_apart_again(metadata: str | None):
    claim = Claim("a", 1.0, metadata=metadata)
    holder = info(owner=sent(WRITER.of_claim(claim))["owner"]).holder("a", NOW)
    assert (holder.holder, holder.metadata) == (claim.holder, metadata)
    assert sent(WRITER.of_claim(claim))["owner"] == sent(WRITER.of_release(claim))["owner"]


def test_an_owner_without_metadata_is_its_own_bytes():
    assert b64decode(str(sent(WRITER.of_claim(Claim("a", 1.0, owner="abc")))["owner"])) == b"abc"


def test_an_owner_of_another_kind_of_client_has_a_digest_too():
    holder = info(owner=b64encode(b"\xff\x00\xfe").decode()).holder("a", NOW)
    assert holder.holder == holder_of("ff00fe")


def test_what_inspect_shows():
    holder = info().holder("a", NOW)
    assert (holder.name, holder.token, holder.holder) == ("a", 7, holder_of("owner-1"))
    assert holder.remaining == pytest.approx(5.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"owner": None},
        {"owner": ""},
        {"owner": 5},
        {"owner": "no base64!"},
        {"owner": "YWJ"},
        {"expires": None},
        {"expires": 5},
        {"expires": {}},
        {"expires": {"l": None}},
        {"expires": {"l": "5"}},
        {"expires": {"l": 5.0}},
        {"expires": {"l": True}},
        {"expires": {"l": -1}},
        {"expires": {"l": 2**63}},
        {"fencingToken": None},
        {"fencingToken": -1},
        {"fencingToken": 2**53},
        {"fencingToken": "7"},
        {"fencingToken": True},
    ],
    ids=str,
)
def test_an_answer_of_the_wrong_types_tells_nothing(fields: dict[str, object]):
    with pytest.raises(UnreadableAnswerError):
        info(**fields).holder("a", NOW)


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


@pytest.mark.parametrize("date", [None, "", "yesterday", "Mon, 99 Sep 2026 14:13:20 GMT"])
def test_without_a_readable_date_our_clock_counts(date: str | None):
    answer = KahunaAnswer(AnswerType.GOT, info().fields, date)
    assert answer.remaining(NOW + 100) == 0.0


@pytest.mark.parametrize("kind", list(AnswerType))
def test_every_type_of_the_contract_is_known(kind: AnswerType):
    assert KahunaAnswer.read(json.dumps({"type": kind.value}).encode()).type is kind


def test_the_first_token_is_0():
    assert KahunaAnswer.read(b'{"type":0,"fencingToken":0}').token == 0
