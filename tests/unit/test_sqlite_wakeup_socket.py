"""The wake-up socket: a datagram with the right ticket wakes, everything else does nothing."""

import asyncio
import socket
import sys

import pytest

from fencing_sdk._values.claim import Claim, Held
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import waiters as _waiters
from fencing_sdk.backends.sqlite.wakeup_socket import (
    WakeupAddress,
    WakeupSocket,
    new_ticket,
    open_wakeup_socket,
    send_wakeup,
)

pytestmark = pytest.mark.every_loop


class Mailbox(dict[str, asyncio.Event]):
    """The tickets that wake, and the events that they set."""

    def __call__(self, ticket: str) -> None:
        if ticket in self:
            self[ticket].set()

    def expect(self, ticket: str) -> asyncio.Event:
        return self.setdefault(ticket, asyncio.Event())


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
async def wakeup_socket(mailbox: Mailbox):
    made = open_wakeup_socket(mailbox)
    assert made is not None
    yield made
    made.close()


async def settled(wakeup_socket: WakeupSocket, mailbox: Mailbox) -> None:
    """Wait until everything that was sent to the socket has been read."""
    last = WakeupAddress(wakeup_socket.name)
    woken = mailbox.expect(last.ticket)
    assert send_wakeup(last)
    async with asyncio.timeout(10):
        await woken.wait()


async def test_a_ticket_wakes_its_waiter_alone(wakeup_socket: WakeupSocket, mailbox: Mailbox):
    addresses = [WakeupAddress(wakeup_socket.name) for _ in range(3)]
    woken = [mailbox.expect(address.ticket) for address in addresses]
    assert send_wakeup(addresses[1])
    await settled(wakeup_socket, mailbox)
    assert [event.is_set() for event in woken] == [False, True, False]


async def test_strangers_and_late_tickets_wake_no_waiter(wakeup_socket: WakeupSocket, mailbox: Mailbox):
    woken, late = mailbox.expect("1"), WakeupAddress(wakeup_socket.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"2", b"\xff\x00", b"x" * 5000):
            stranger.sendto(noise, b"\0fencing-sdk/" + wakeup_socket.name.encode())
    assert send_wakeup(late)
    await settled(wakeup_socket, mailbox)
    assert not woken.is_set()


async def test_a_socket_that_is_gone_is_known_to_be_gone(mailbox: Mailbox):
    made = open_wakeup_socket(mailbox)
    assert made is not None
    address = WakeupAddress(made.name)
    assert send_wakeup(address)
    made.close()
    assert not send_wakeup(address)


async def test_a_socket_that_is_full_is_not_taken_for_gone():
    full, name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), new_ticket()
    with full:
        full.bind(b"\0fencing-sdk/" + name.encode())
        assert all(send_wakeup(WakeupAddress(name)) for _ in range(2000))


async def test_a_waiter_without_a_socket_is_not_taken_for_gone():
    assert send_wakeup(WakeupAddress(""))


async def test_tickets_cannot_be_guessed(wakeup_socket: WakeupSocket):
    tickets = {WakeupAddress(wakeup_socket.name).ticket for _ in range(100)}
    assert len(tickets) == 100
    assert all(len(ticket) == 32 for ticket in tickets)


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
        assert isinstance(await backend.acquire(Claim("a", 60.0)), Held), "the line is kept without sockets too"
        await turn.wait()
        assert not isinstance(await backend.acquire(waiter), Held)
    await backend.aclose()


async def test_one_socket_serves_every_waiter_of_a_backend_and_closes_with_it(tmp_path):
    backend = SqliteBackend(tmp_path / "locks.db")
    async with backend.queue(Claim("a", 60.0)):
        opened = backend._waiters._socket
        async with backend.queue(Claim("b", 60.0)), backend.queue(Claim("a", 60.0)):
            assert backend._waiters._socket is opened
    assert opened is not None
    await backend.aclose()
    assert not send_wakeup(WakeupAddress(opened.name))
