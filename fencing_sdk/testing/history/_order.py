"""
Is there an order of the store's operations in which it behaved as one lock?

The search of Wing and Gong (1993) with the memory of Lowe (2017): take any operation that began
before every other one that is left has ended, apply it to the model, go back when it does not fit. The
model is a lease: a grant may end by itself, but not before its ttl has passed since it was touched
last. Operations without an answer may take effect at any later time, or never.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from fencing_sdk.testing.history._facts import Facts, RecordedCall
from fencing_sdk.testing.history._verdict import Report

_LARGEST = 40
"""Calls of one lock up to which an order is looked for."""
_STEPS = 20_000
_DRIFT = 0.05
"""Fraction by which the store's clock may run fast; the search must not accuse it wrongly."""


class _State(NamedTuple):
    """The holder of the lock, the moment from which its ttl counts at the earliest, and the last token."""

    holder: str = ""
    token: int = -1
    """Of the grant that lasts; -1 where its answer was lost."""
    touched: float = -math.inf
    ttl: float = 0.0
    last: int = -1


def check_order(facts: Facts, report: Report) -> None:
    """Look for an order of the calls about each lock of a small history."""
    if facts.store_was_changed:
        return
    by_name: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in facts.calls:
        by_name[call.name].append(call)
    for name, calls in by_name.items():
        if len(calls) > _LARGEST or any(call.repeated or call.mode != "lock" for call in calls):
            continue
        found = _orderable(calls)
        if found is not None:
            report.saw("ordered")
        if found is False:
            report.found("P1", "no_order", calls[0].asked, f"no order explains the {len(calls)} calls about {name}")


def _orderable(calls: list[RecordedCall]) -> bool | None:
    """Return whether an order exists; None when the search took too long."""
    everything = (1 << len(calls)) - 1
    sure = sum(1 << number for number, call in enumerate(calls) if call.answered < math.inf)
    stack = [(everything, _State())]
    seen = {stack[0]}
    for _ in range(_STEPS):
        if not stack:
            return False
        left, state = stack.pop()
        if not left & sure:
            return True
        horizon = min(calls[n].answered for n in range(len(calls)) if left >> n & 1)
        for number, call in enumerate(calls):
            if not left >> number & 1 or call.asked > horizon:
                continue
            rest = left & ~(1 << number)
            for after in _outcomes(call, state):
                if (rest, after) not in seen:
                    seen.add((rest, after))
                    stack.append((rest, after))
    return None


def _outcomes(call: RecordedCall, state: _State) -> list[_State]:
    """The states in which the lock may be after *call*; none when its answer does not fit."""
    may_be_free = not state.holder or call.answered >= state.touched + state.ttl * (1 - _DRIFT)
    mine = state.holder == call.holder
    if call.operation == "acquire":
        return _acquired(call, state, mine=mine, may_be_free=may_be_free)
    if call.operation == "renew":
        renewed = [state._replace(touched=call.asked)] if mine else []
        refused = [state] if not mine or may_be_free else []
        return _answered(call, "renewed", renewed, refused)
    if call.operation == "release":
        return [state._replace(holder="")] if mine else [state]
    return [state]


def _acquired(call: RecordedCall, state: _State, *, mine: bool, may_be_free: bool) -> list[_State]:
    granted = []
    known = call.token is not None and call.token == state.token
    if mine and (call.token is None or known or (state.token < 0 and call.token > state.last)):
        token = state.token if call.token is None else call.token
        granted.append(state._replace(token=token, touched=call.asked, last=max(state.last, token)))
    if may_be_free and (call.token is None or call.token > state.last):
        token = -1 if call.token is None else call.token
        granted.append(_State(call.holder, token, call.asked, call.ttl, max(state.last, token)))
    refused = [state]  # a free lock may be kept for the next waiter in line
    return _answered(call, "granted", granted, refused)


def _answered(call: RecordedCall, yes: str, if_yes: list[_State], if_no: list[_State]) -> list[_State]:
    if call.answered == math.inf or call.outcome in {"unknown", ""}:
        return [*if_yes, *if_no]
    return if_yes if call.outcome == yes else if_no
