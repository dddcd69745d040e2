"""What a watch of etcd tells, to holders and to waiters: an answer that is not understood is no deletion."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from patience import until

from fencing_sdk._etcd.json_codec import Entry
from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._values.claim import Claim
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends.etcd import EtcdBackend, from_url, losses, waiters
from fencing_sdk.backends.etcd.shared_leases import HeldKey, SharedLease
from fencing_sdk.backends.etcd.waiters import EtcdWaiter
from fencing_sdk.backends.etcd.watch_answers import KeyDeletion, read_watch_answer
from fencing_sdk.errors import BackendError

Answer = dict[str, Any]
CLAIM = Claim("a", 60.0)
KEY = b"fencing/a/0123"
TEXT = b64encode(KEY).decode()
GONE = {"type": "DELETE", "kv": {"key": TEXT, "mod_revision": "9"}}
SPOILT: list[Answer] = [
    {"events": 5},
    {"events": {"type": "DELETE"}},
    {"events": [5]},
    {"events": ["DELETE"]},
    {"events": [{"type": 1, "kv": GONE["kv"]}]},
    {"events": [{"type": "DELETED", "kv": GONE["kv"]}]},
    {"events": [{"type": "DELETE"}]},
    {"events": [{"type": "DELETE", "kv": []}]},
    {"events": [{"type": "DELETE", "kv": {"mod_revision": "9"}}]},
    {"events": [{"type": "DELETE", "kv": {"key": "!", "mod_revision": "9"}}]},
    {"events": [{"type": "DELETE", "kv": {"key": 5, "mod_revision": "9"}}]},
    {"events": [{"type": "DELETE", "kv": {"key": TEXT}}]},
    {"events": [{"type": "DELETE", "kv": {"key": TEXT, "mod_revision": "x"}}]},
    {"events": [{"type": "DELETE", "kv": {"key": TEXT, "mod_revision": "-9"}}]},
    {"events": [GONE, 5]},
    {"canceled": "no"},
    {"canceled": True, "watch_id": "x"},
]
HARMLESS: list[Answer] = [
    {},
    {"created": True, "header": {"revision": "9"}},
    {"events": []},
    {"events": [{"kv": {"key": TEXT, "mod_revision": "9"}}]},
    {"events": [{"type": "PUT", "kv": {"key": TEXT, "mod_revision": "9"}}]},
    {"events": [{"type": "DELETE", "kv": {"key": b64encode(b"other").decode(), "mod_revision": "9"}}]},
    {"canceled": False, "watch_id": "-1"},
]


@pytest.mark.parametrize("answer", SPOILT, ids=str)
def test_what_is_not_understood_is_an_error(answer: Answer):
    with pytest.raises(UnreadableAnswerError):
        read_watch_answer(answer)


def test_what_is_understood_is_read_watch_answer():
    assert read_watch_answer({"events": [GONE, {"type": "PUT"}]}).deletions == [KeyDeletion(KEY, 9)]
    assert read_watch_answer({"canceled": True, "watch_id": "3"})[:2] == (3, True)
    assert read_watch_answer({"watch_id": "3"}) == (3, False, [], 0)
    assert read_watch_answer({"events": [GONE, {"type": "PUT"}, {"type": "PUT"}]}).puts == 2


@pytest.mark.parametrize("answer", SPOILT, ids=str)
async def test_a_holder_keeps_its_lease_and_hears_of_its_end_on_the_next_stream(answer: Answer, quick: None):
    streams = Streams([answer], [{"events": [GONE]}])
    lost = await holding(streams, lambda: streams.opened == 2)
    assert lost == [CLAIM]
    assert streams.lost_at_opening == [0, 0]


@pytest.mark.parametrize("answer", SPOILT, ids=str)
async def test_a_waiter_looks_again_and_is_woken_by_the_next_stream(answer: Answer, quick: None):
    streams = Streams([answer], [{"events": [GONE]}])
    assert await waiting(streams, 3) == [1, 2, 3]


@pytest.mark.parametrize("answer", HARMLESS, ids=str)
async def test_what_says_nothing_of_the_own_key_ends_no_stream(answer: Answer, quick: None):
    streams = Streams([answer, {"events": [GONE]}])
    assert await holding(streams, lambda: streams.opened == 1) == [CLAIM]
    assert streams.said == 2
    streams = Streams([answer, {"events": [GONE]}])
    assert await waiting(streams, 2) == [1, 2]
    assert streams.opened == 1
    assert streams.said == (1 if answer.get("events") else 2)  # after any change within its watch, a waiter looks again


class Streams:
    """Streams that say this, one after the other, and then nothing."""

    def __init__(self, *answers: list[Answer]) -> None:
        self._answers = list(answers)
        self.opened = 0
        self.said = 0
        self.lost: list[Claim] = []
        self.lost_at_opening: list[int] = []

    @asynccontextmanager
    async def __call__(self, operation: str, *_: object) -> AsyncIterator[AsyncIterator[Answer]]:
        self.opened += 1
        self.lost_at_opening.append(len(self.lost))
        try:
            yield self._say(self._answers.pop(0) if self._answers else [])
        except ValueError as error:  # as the gateway has it
            raise BackendError("EtcdBackend", operation, f"{error}") from error

    async def _say(self, answers: list[Answer]) -> AsyncIterator[Answer]:
        for answer in answers:
            self.said += 1
            yield answer
        await asyncio.Event().wait()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_MOMENT", 0.0)
    monkeypatch.setattr(losses, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(losses, "_SILENCE", 3600.0)  # a stream ends because of what it said
    monkeypatch.setattr(waiters, "_FIRST_PAUSE", 0.001)


def backend_with(streams: Streams) -> EtcdBackend:
    backend = from_url("etcd://one")
    backend._gateway.stream = streams  # type: ignore[method-assign, assignment]
    return backend


async def holding(streams: Streams, opened: Callable[[], bool]) -> list[Claim]:
    """Hold a lock until it is lost; who was told."""
    backend = backend_with(streams)
    notice: LossNotice = lambda claim, *_: streams.lost.append(claim)  # noqa: E731
    backend.on_loss(notice)
    lease = backend._leases._leases[61] = SharedLease(1, 61, 0.0)
    backend._leases.remember(lease, HeldKey(KEY, 60.0, 7, 7, backend._leases.now(), 7))
    backend._losses.granted(KEY, CLAIM)
    await until(lambda: streams.lost, what="the holder is told")
    assert opened()
    await backend.aclose()
    return streams.lost


async def waiting(streams: Streams, looks: int) -> list[int]:
    """Wait behind a key; how often it was looked who is before, until so many looks."""
    backend, looked = backend_with(streams), []

    async def predecessor(*_: object) -> tuple[Entry | None, int]:
        looked.append(len(looked) + 1)
        before = Entry(KEY, b"", 5, 5, 1) if len(looked) < looks else None
        return before, 8

    backend._requests.predecessor = predecessor  # type: ignore[method-assign]
    waiter: EtcdWaiter = backend._waiters.add(CLAIM, 7)
    async with asyncio.timeout(20):
        await waiter.wait()
    await backend._waiters.remove(waiter)
    await backend.aclose()
    return looked
