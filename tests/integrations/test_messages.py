"""The token in gRPC metadata and in the headers of messages."""

import pytest

from fencing_sdk import ConfigurationError, LeaseLostError, LockClient
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.integrations.messages import current_metadata, token_of


@pytest.fixture
async def locks():
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        yield locks


async def test_what_is_sent_is_lower_case_and_can_be_read_back(locks):
    async with locks.lock("outer") as outer, locks.lock("inner") as inner:
        assert current_metadata() == (("fencing-token", f'{inner.token};holder="{inner.holder}"'),)
        token = token_of(current_metadata("outer"))
        assert (token, token.holder) == (outer.token, outer.holder)
        assert token_of([(key, value.encode()) for key, value in current_metadata()]) == inner.token


async def test_there_is_nothing_to_send_outside_of_a_lease_or_after_it(locks):
    with pytest.raises(NoLeaseError):
        current_metadata()
    async with locks.lock("a") as lease:
        with pytest.raises(NoLeaseError):
            current_metadata("b")
        await lease.release()
        with pytest.raises(LeaseLostError):
            current_metadata()


@pytest.mark.parametrize("key", ["fencing-token", "Fencing-Token", "x-fencing-token"])
def test_both_names_are_read_in_any_case(key):
    assert token_of([("trace", b"\xff"), (key, "0")]) == 0


def test_both_names_may_agree_as_in_http():
    token = token_of([("Fencing-Token", b"34"), ("x-fencing-token", '34; holder="aa"')])
    assert (token, token.holder) == (34, "aa")


def test_a_message_without_a_token_has_none():
    assert token_of([]) is None
    assert token_of([("fencing_token", "34"), ("token", b"34")]) is None


@pytest.mark.parametrize(
    "pairs",
    [
        [("fencing-token", "34"), ("fencing-token", "34")],
        [("fencing-token", "34"), ("x-fencing-token", "35")],
        [("fencing-token", '34;holder="aa"'), ("x-fencing-token", b'34;holder="bb"')],
        [("x-fencing-token", "34"), ("X-Fencing-Token", "34")],
        [("fencing-token", b"34"), ("Fencing-Token", b"35")],
        [("fencing-token", "34, 35")],
        [("fencing-token", "-1")],
        [("fencing-token", b"")],
        [("fencing-token", b"\xff")],
        [("fencing-token", "\u0663".encode())],
        [("fencing-token", b"9" * 10_000)],
    ],
)
def test_what_is_not_exactly_one_token_is_refused(pairs):
    with pytest.raises(ConfigurationError, match=r"(?i)token"):
        token_of(pairs)
