"""
Random histories, each a list of steps that a person can read, cut, and paste into a test.

    a/reader0 acquire        the owner asks; again, if it holds, and as a try, if it waits
    a/reader0 join           it stands in the line, and is woken; `stand`: where the store can, it is handed the lock
    a/reader0 leave          it leaves the line
    a/reader0 renew          `renew all` asks for every owner at once
    a/reader0 release
    a/reader0 revoke         by the last token that it was granted
    a/reader0 transfer       its grant passes to another owner of the same mode, where the store can do that
    clock 4                  seconds pass, and no waiter gives a sign of life
    signs 0                  the waiters of this client give signs of life, and try
    reopen 1                 this client closes its connections, unless a waiter of it stands in line
    list                     what is held is listed, page by page

An owner is named by its lock, its mode and a number; even numbers use client 0, odd ones client 1. ``elsewhere`` after
a call lets the other client make it, ``cut 3`` breaks the call off at its third statement.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

MODES = ("lock", "writer", "reader", "permit", "wide")
"""``permit`` is one of two, ``wide`` one of three."""
SHARES = MODES[1:]
Cast = Mapping[str, Sequence[str]]
"""For each name the modes of its owners."""
KNOWN = (
    "a/lock0 acquire; a/lock0 revoke; a/lock0 renew",
    "a/lock2 acquire; reopen 0; a/lock2 revoke",
    "b/permit1 acquire; b/wide2 acquire; clock 25; b/permit1 release",
    "b/writer0 acquire; b/writer0 release; b/writer1 acquire; b/writer0 renew",
    "a/lock0 acquire; a/lock1 join; clock 2.5; signs 1; clock 1; a/lock0 release; a/lock2 acquire; a/lock1 acquire",
    "b/writer3 acquire; b/reader2 join; b/lock3 join; b/lock3 acquire; b/writer3 release; signs 1",
    "c/wide3 join; c/lock0 join; c/wide0 join; c/wide3 acquire; c/lock0 leave",
    (
        "b/writer0 acquire; b/reader0 join; b/reader1 join; b/reader2 join; b/writer0 release; b/reader0 acquire; "
        "b/reader2 leave; b/writer1 join; b/reader3 join; b/reader3 acquire; b/reader1 acquire; b/reader0 release; "
        "b/reader1 release; b/writer1 acquire; b/writer1 release; b/reader3 acquire"
    ),
)
"""What random histories seldom come to, and what they have found."""
_SECONDS = ("1", "2.5", "4", "25", "70")
_CALLS = {
    "acquire": 6,
    "release": 6,
    "join": 5,
    "stand": 2,
    "leave": 2,
    "renew": 2,
    "revoke": 1,
    "transfer": 1,
    "acquire elsewhere": 1,
    "renew elsewhere": 1,
    "release elsewhere": 1,
    "acquire cut": 1,
    "release cut": 1,
}
_OTHERS = {"clock": 4, "signs": 4, "renew all": 1, "reopen": 1, "list": 1}


def histories(seeds: Iterable[int], cast: Cast) -> Iterator[list[str]]:
    """The known histories, and those of the *seeds*."""
    yield from (known.split("; ") for known in KNOWN)
    yield from (history(seed, cast) for seed in seeds)


def history(seed: int, cast: Cast, *, steps: int = 30) -> list[str]:
    """Make the history of a *seed*; most of its owners meet at one name."""
    rng = random.Random(seed)
    names = [rng.choice(list(cast))] * 3 + list(cast)
    owners = [
        f"{(name := rng.choice(names))}/{rng.choice(cast[name])}{rng.randrange(4)}" for _ in range(rng.randint(2, 7))
    ]
    calls, weights = zip(*(_CALLS | _OTHERS).items(), strict=True)

    def step() -> str:
        (call,) = rng.choices(calls, weights)
        match call:
            case "clock":
                return f"clock {rng.choice(_SECONDS)}"
            case "signs" | "reopen":
                return f"{call} {rng.randrange(2)}"
            case "renew all" | "list":
                return str(call)
        return f"{rng.choice(owners)} {call}" + (f" {rng.randint(1, 8)}" if call.endswith("cut") else "")

    return [step() for _ in range(steps)]


async def shrunk(steps: list[str], fails: Callable[[list[str]], Awaitable[object]]) -> list[str]:
    """Leave out every step without which the history still *fails*: first many at once, then one by one."""
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps):
            fewer = steps[:start] + steps[start + size :]
            if await fails(fewer):
                steps = fewer
            else:
                start += size
        size //= 2
    return steps
