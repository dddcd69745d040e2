"""Redis beside the rules, on a clock that is set by hand: the scripts read it from keys."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable

import pytest
from campaigns import amount
from redis_server import RedisServer
from redis_stage import change_scripts

from fencing_sdk import FencingError
from fencing_sdk.abc import Backend
from fencing_sdk.backends.redis import RedisBackend, from_url, scripts
from fencing_sdk.testing import Comparison

pytest_plugins = ["redis_fixtures"]
HISTORIES = int(os.environ.get("FENCING_TEST_HISTORIES", "0")) or amount(800, short=50)

PLANTED = {
    "permits off by one": ("count < row[WIDTH]", "count <= row[WIDTH]"),
    "a newcomer overtakes waiters": ("if line[WAITS] == 0 and fits(row) then", "if fits(row) then"),
    "readers with a token each": (
        "row[KIND] == 'reader' and line[TOGETHER] and line[SHARED_TOKEN] or draw_token()",
        "draw_token()",
    ),
    "a waiter lives for its whole ttl": ("if not row[TOKEN] then ttl = math.min(ttl, WAITER_TTL) end", ""),
    "the dead hold on": ("return row[DIES] > now", "return true"),
    "a token that does not grow": ("math.max(line[LAST] + 1, ticks)", "math.max(line[LAST], ticks)"),
    "the ticket of another owner is given back": (
        "string.sub(saved, 25, start + 1) == owner .. '\\0A'",
        "string.sub(saved, start, start + 1) == '\\0A'",
    ),
    "a lost reason": ("if one[1] == of and one[2] > now then reason = one[3] end", ""),
    "an heir has the token of the former": ("if row[KIND] ~= 'reader' then row[TOKEN] = draw_token() end", ""),
    "whatever is held is ended": ("if row and row[TOKEN] == token then", "if row then"),
    "a clock that is set back keeps alive": ("row[DIES] = math.min(row[DIES], now + row[LONGEST])", ""),
}


@pytest.fixture
def set_clock(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], object]:
    """Let the scripts read the time from keys: tests may do what scripts must not."""
    change_scripts(
        monkeypatch, scripts, "redis.call('TIME')", "({redis.call('GET', 'clock:s'), redis.call('GET', 'clock:us')})"
    )

    def set_to(seconds: float) -> None:
        whole = math.floor(seconds)
        redis_server.ask_all(["SET", "clock:s", str(whole)], ["SET", "clock:us", str(round((seconds - whole) * 1e6))])

    set_to(500_000.0)
    return set_to


@pytest.fixture
async def stores(redis_server: RedisServer) -> AsyncIterator[list[Backend]]:
    made: list[RedisBackend] = [from_url(redis_server.url, tokens="counter") for _ in range(2)]
    yield list(made)
    for store in made:
        await store.aclose()


async def play(stores: list[Backend], set_clock: Callable[[float], object], seed: int) -> None:
    """
    Play one history.

    Who is kept together with other names settles no line: after a clock that was set back the first waiter may live
    for a second longer than by the rules. So clocks are set back in every other history alone.
    """
    await Comparison(stores, seed, set_clock, sets_back=seed % 2 == 1).play()


@pytest.mark.campaign
async def test_redis_answers_as_the_rules(stores, set_clock):
    for seed in range(HISTORIES):
        await play(stores, set_clock, seed)


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_change_of_redis_is_caught(stores, set_clock, monkeypatch: pytest.MonkeyPatch, planted: str):
    change_scripts(monkeypatch, scripts, *PLANTED[planted])
    with pytest.raises((AssertionError, FencingError)):
        for seed in range(100):
            await play(stores, set_clock, seed)
