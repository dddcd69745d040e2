"""The bell: a datagram with the right word wakes, everything else does nothing."""

import asyncio
import socket
import sys

import pytest

from fencing_sdk._values.claim import Claim, Held
from fencing_sdk.backends.sqlite import SqliteBackend, _waiters
from fencing_sdk.backends.sqlite._bell import Bell, Place, hang_bell, ring

pytestmark = pytest.mark.every_loop


@pytest.fixture
async def bell():
    made = hang_bell()
    assert made is not None
    yield made
    made.close()


async def settled(bell: Bell) -> None:
    """Wait until everything that was sent to *bell* has been read."""
    woken = asyncio.Event()
    last = Place(bell.name)
    bell.expect(last.word, woken.set)
    assert ring(last)
    async with asyncio.timeout(10):
        await woken.wait()
    bell.forget(last.word)


async def test_the_right_word_wakes_the_one_who_expects_it(bell: Bell):
    woken: list[str] = []
    places = [Place(bell.name) for _ in range(3)]
    for number, place in enumerate(places):
        bell.expect(place.word, lambda number=number: woken.append(f"waiter {number}"))
    assert ring(places[1])
    await settled(bell)
    assert woken == ["waiter 1"]


async def test_strangers_and_late_words_wake_nobody(bell: Bell):
    woken: list[str] = []
    place = Place(bell.name)
    bell.expect(place.word, lambda: woken.append("woken"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"1", b"\xff\x00", b"x" * 5000):
            stranger.sendto(noise, b"\0fencing-sdk/" + bell.name.encode())
    bell.forget(place.word)
    assert ring(place)
    await settled(bell)
    assert woken == []


async def test_a_bell_that_is_gone_is_known_to_be_gone():
    made = hang_bell()
    assert made is not None
    place = Place(made.name)
    assert ring(place)
    made.close()
    assert not ring(place)


async def test_a_bell_that_is_full_is_not_taken_for_gone():
    full = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with full:
        full.bind(b"\0fencing-sdk/full")
        assert all(ring(Place("full")) for _ in range(2000))


async def test_one_without_a_bell_is_not_taken_for_gone():
    assert ring(Place(""))


async def test_words_cannot_be_guessed(bell: Bell):
    words = {Place(bell.name).word for _ in range(100)}
    assert len(words) == 100
    assert all(len(word) == 32 for word in words)


async def test_without_such_sockets_waiters_stand_in_line_and_learn_from_the_timer(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(_waiters, "LINE_POLL", 0.05)
    backend = SqliteBackend(tmp_path / "locks.db")
    holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
    await backend.acquire(holder)
    async with backend.queue(waiter) as turn, asyncio.timeout(20):
        assert isinstance(await backend.acquire(waiter), Held)
        await backend.release(holder)
        assert isinstance(await backend.acquire(Claim("a", 60.0)), Held), "the line is kept without bells too"
        await turn.wait()
        assert not isinstance(await backend.acquire(waiter), Held)
    await backend.aclose()


async def test_one_socket_serves_every_waiter_of_a_backend_and_closes_with_it(tmp_path):
    backend = SqliteBackend(tmp_path / "locks.db")
    async with backend.queue(Claim("a", 60.0)):
        bell = backend._waiters._bell
        async with backend.queue(Claim("b", 60.0)), backend.queue(Claim("a", 60.0)):
            assert backend._waiters._bell is bell
    assert bell is not None
    await backend.aclose()
    assert not ring(Place(bell.name))
