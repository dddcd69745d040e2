"""
What happens in one history, decided before anything runs: which client wants which lock, and which faults happen.

A script is a value. It is made from a seed, can be printed, made smaller and played again. Only
latencies and back-offs are drawn while it plays, from the same seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from fencing_sdk._values.timing import DRIFT
from fencing_sdk.errors import ConfigurationError, shown

THEMES = ("calm", "pauses", "network", "cancellation", "store", "clocks", "line", "everything")
"""What a script concentrates on. Eight seeds in a row have one of each."""
BODIES = ("write", "write", "write", "sleep", "raise", "zombie", "handle", "stubborn", "hang")


PERMITS = 2
"""How many permits a semaphore has."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One client wants one lock, and does something under it."""

    client: int
    at: float
    name: str
    body: str
    lasts: float
    wait: float | None
    fenced: bool
    mode: str = "lock"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a moment. Which fields mean something depends on its kind."""

    at: float
    kind: str
    who: int = -1
    """A client, or a visit for cancellations; -1 is the store."""
    lasts: float = 0.0
    operation: str | None = None
    way: str | None = None
    times: int | None = None
    turn: int = 0
    """Cancel after so many turns of the event loop."""


@dataclass(frozen=True, slots=True)
class Script:
    """A history to be played."""

    seed: int
    theme: str = "calm"
    ttl: float = 3.0
    buffer: float | None = None
    """The safety buffer as a part of the ttl; None for the default."""
    rates: tuple[float, ...] = (1.0, 1.0)
    """Of the clients' clocks, and of the store's as the last one."""
    tokens: str = "counter"
    polls: bool = False
    """Whether the store has no line and rings no bell, so that waiters ask again."""
    horizon: float = 8.0
    """Seconds after which nothing goes wrong any more."""
    visits: tuple[Visit, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.rates) - 1

    @property
    def safety_buffer(self) -> float | None:
        """The safety buffer of every lock, in seconds; None for the default."""
        return None if self.buffer is None else self.buffer * self.ttl

    @property
    def names(self) -> tuple[str, ...]:
        """Every lock that a client wants, in order of appearance."""
        return tuple(dict.fromkeys(visit.name for visit in self.visits))

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Script:
        """
        Read what `to_json` wrote.

        Raises:
            ConfigurationError: it is not a script.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["rates"] = tuple(fields["rates"])
            fields["visits"] = tuple(Visit(**visit) for visit in fields["visits"])
            fields["faults"] = tuple(Fault(**fault) for fault in fields["faults"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            msg = f"not a script of a simulation: {shown(text)}"
            raise ConfigurationError(msg) from error

    def without(self, *, visit: int | None = None, fault: int | None = None) -> Script:
        """The same with less in it. Cancellations of visits that are gone go with them."""
        visits, faults = list(self.visits), list(self.faults)
        if fault is not None:
            del faults[fault]
        if visit is not None:
            del visits[visit]
            faults = [_renumbered(one, visit) for one in faults if one.kind != "cancel" or one.who != visit]
        return replace(self, visits=tuple(visits), faults=tuple(faults))


def _renumbered(fault: Fault, gone: int) -> Fault:
    return replace(fault, who=fault.who - 1) if fault.kind == "cancel" and fault.who > gone else fault


def write_script(seed: int) -> Script:
    """Write the script of *seed*: the same for ever, on every machine."""
    dice = random.Random(seed)
    theme = THEMES[seed % len(THEMES)]
    dice.random()  # with this stream every control is caught within its number of seeds
    clients = dice.choice((2, 2, 3))
    ttl = 20.0 if theme == "cancellation" else dice.choice((1.0, 2.0, 3.0))
    horizon = dice.uniform(4.0, 8.0)
    script = Script(
        seed=seed,
        theme=theme,
        ttl=ttl,
        buffer=dice.choice((None, None, None, 0.05)),
        rates=tuple(1 + dice.uniform(-0.49, 0.49) * DRIFT for _ in range(clients + 1)),
        tokens=dice.choice(("counter", "hybrid")) if theme != "store" else "hybrid",
        polls=theme != "line" and dice.random() < 0.3,
        horizon=horizon,
        visits=tuple(_visit(dice, theme, clients, horizon, ttl) for _ in range(dice.randint(4, 8))),
    )
    makers = _MAKERS[theme]
    faults = [dice.choice(makers)(dice, script) for _ in range(dice.randint(2, 7))] if makers else []
    return replace(script, faults=tuple(sorted(filter(_admissible(faults), faults), key=lambda fault: fault.at)))


def write_share_script(seed: int) -> Script:
    """The script of *seed*, with permits in the place of one lock and readers and writers in that of the other."""
    dice = random.Random(f"shares {seed}")
    script = write_script(seed)
    pool = dice.choice(script.names)
    visits = tuple(
        replace(visit, mode="permit" if visit.name == pool else dice.choice(("reader", "reader", "writer")))
        for visit in script.visits
    )
    return replace(script, visits=visits)


def write_election_script(seed: int) -> Script:
    """The script of *seed*, with terms of elections in the place of most locks, and clients that drain."""
    dice = random.Random(f"elections {seed}")
    script = write_script(seed)
    visits = tuple(
        replace(visit, mode="term", wait=None) if visit.body != "handle" and dice.random() < 0.7 else visit
        for visit in script.visits
    )
    drains = [
        Fault(_when(dice, script), "drain", _who(dice, script), script.ttl * dice.choice((0.0, 0.3, 1.5)))
        for _ in range(dice.randint(1, 2))
    ]
    faults = tuple(sorted((*script.faults, *drains), key=lambda fault: fault.at))
    return replace(script, visits=visits, faults=faults)


def _admissible(faults: list[Fault]) -> Callable[[Fault], bool]:
    """Keep what a store may do: the clock of hybrid tokens is not set back *and* the last token lost."""
    forgets = any(fault.kind == "forget_all" for fault in faults)
    return lambda fault: not (forgets and fault.kind == "step_tokens" and fault.lasts < 0)


def _visit(dice: random.Random, theme: str, clients: int, horizon: float, ttl: float) -> Visit:
    return Visit(
        client=dice.randrange(clients),
        at=dice.uniform(0.0, horizon * 0.7),
        name=dice.choice(("a", "a", "a", "b")),
        body=dice.choice(BODIES),
        lasts=dice.choice((0.0, 0.2, 0.6, 1.6)) * min(ttl, 2.0) * dice.uniform(0.5, 1.5),
        wait=None if theme == "calm" else dice.choice((None, None, 0.0, 2.0)),
        fenced=dice.random() < 0.5,
    )


def _who(dice: random.Random, script: Script) -> int:
    return dice.randrange(script.clients)


def _when(dice: random.Random, script: Script) -> float:
    return dice.uniform(0.0, script.horizon * 0.9)


def _pause(dice: random.Random, script: Script) -> Fault:
    kind = dice.choice(("freeze", "freeze", "suspend", "stall", "stall"))
    lasts = script.ttl * dice.choice((0.1, 0.7, 1.1, 1.6))
    return Fault(_when(dice, script), kind, _who(dice, script), lasts)


def _crash(dice: random.Random, script: Script) -> Fault:
    return Fault(_when(dice, script), "crash", _who(dice, script))


_CALLS = ("acquire", "acquire", "renew", "release", "write", "raise_to", None)


def _messages(dice: random.Random, script: Script) -> Fault:
    """Lose, delay or double a few messages of one kind."""
    return Fault(
        at=_when(dice, script),
        kind=dice.choice(("lose", "lose", "late", "late", "double")),
        who=_who(dice, script),
        lasts=script.ttl * dice.choice((0.05, 0.3, 0.7, 1.3)),
        operation=dice.choice(_CALLS),
        way=dice.choice(("request", "reply")),
        times=dice.choice((1, 1, 2, 4)),
    )


def _cut(dice: random.Random, script: Script) -> Fault:
    """Partition one client, or one direction of its link: half-open."""
    lasts = script.ttl * dice.choice((0.2, 0.6, 1.2))
    way = dice.choice((None, "request", "reply"))
    return Fault(_when(dice, script), "cut", _who(dice, script), lasts, way=way)


def _cancel(dice: random.Random, script: Script) -> Fault:
    return Fault(0.0, "cancel", dice.randrange(len(script.visits)), turn=dice.choice((0, 1, 2, 3, 4, 6, 9, 15, 30)))


def _late_acquire(dice: random.Random, script: Script) -> Fault:
    """The request that a cancelled acquisition leaves on its way."""
    lasts = dice.choice((0.01, 0.5, 2.0))
    return Fault(
        _when(dice, script), "late", _who(dice, script), lasts, "acquire", dice.choice(("request", "reply")), 1
    )


def _outage(dice: random.Random, script: Script) -> Fault:
    kind = dice.choice(("down", "refuse"))
    return Fault(_when(dice, script), kind, lasts=script.ttl * dice.choice((0.1, 0.25, 0.8)))


def _restart(dice: random.Random, script: Script) -> Fault:
    """A restart that keeps everything, one that loses the grants, one that loses the counter too."""
    kinds = ("restart", "restart", "forget_grants", "forget_all") if script.tokens == "hybrid" else ("restart",)
    return Fault(_when(dice, script), dice.choice(kinds), lasts=dice.uniform(0.05, 0.5))


def _revoke(dice: random.Random, script: Script) -> Fault:
    """An operator who looks at a lock, and takes it away at once or later: another client may have it by then."""
    at = _when(dice, script)
    later = script.ttl * (0.0, 0.02, 0.4, 1.2)[int(at * 1000) % 4]
    return Fault(at, "revoke", lasts=later, operation=dice.choice(script.names))


def _step(dice: random.Random, script: Script) -> Fault:
    """Step the store's clock (expiry by a wall clock), its token clock, or a client's wall clock."""
    kind = dice.choice(("step", "step_tokens", "step_client", "step_client"))
    back = dice.choice((-1, 1))
    return Fault(_when(dice, script), kind, _who(dice, script), back * dice.uniform(0.2, 2.0) * script.ttl)


_Maker = Callable[[random.Random, Script], Fault]
_MAKERS: dict[str, tuple[_Maker, ...]] = {
    "calm": (),
    "pauses": (_pause, _pause, _crash),
    "network": (_messages, _messages, _cut),
    "cancellation": (_cancel, _cancel, _late_acquire),
    "store": (_outage, _outage, _restart, _revoke),
    "clocks": (_step, _pause),
    "line": (_messages, _pause, _cancel, _restart),
    "everything": (_pause, _messages, _cut, _cancel, _outage, _restart, _revoke, _step, _crash),
}
