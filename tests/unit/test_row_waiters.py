"""What a waiter of a store of rows knows without asking the store."""

from __future__ import annotations

import asyncio

from inside import LINE_TTL

from fencing_sdk._values.clock import BootClock
from fencing_sdk.abc import Busy, Claim
from fencing_sdk.backends._shared.row_backend import RowWaiter, WaiterAddress


async def test_after_a_refusal_and_a_look_the_answer_is_known_and_advises_no_long_wait():
    waiter = RowWaiter(Claim("a", 60.0), WaiterAddress(""))
    waiter.refused(Busy(60.0))
    assert waiter.refusal() is None
    waiter.attended(BootClock().now())
    assert waiter.refusal() == Busy(LINE_TTL)


async def test_a_message_counts_more_than_a_look_that_was_made_before_it():
    waiter = RowWaiter(Claim("a", 60.0), WaiterAddress(""))
    waiter.refused(Busy(60.0))
    asked = BootClock().now()
    waiter.wake()
    waiter.attended(asked)
    assert waiter.refusal() is None
    await asyncio.sleep(0.001)
    waiter.attended(BootClock().now())
    assert waiter.refusal() is not None
