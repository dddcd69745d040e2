"""Permits, readers and writers in every state that they can reach, and what breaks without each of their rules."""

import pytest
from campaigns import amount
from line_model import LineModel
from share_model import Mishaps, ShareModel
from state_search import explore

LIMIT = 3_000_000
EVERYTHING = Mishaps(pauses=1, kills=1, replies=1, wakeups=1)

TABLE = {
    **{f"wake-ups alone, {kinds}": ShareModel(kinds) for kinds in ("WWW", "RRW", "RWR", "RRWW", "PPP", "PPPP", "PPPW")},
    "two rounds, RRW": ShareModel("RRW", rounds=2),
    "two rounds, PPP": ShareModel("PPP", rounds=2),
    "cancelled waiters, RRW": ShareModel("RRW", mishaps=Mishaps(cancellations=2)),
    "cancelled waiters, PPPP": ShareModel("PPPP", mishaps=Mishaps(cancellations=amount(2, short=1))),
    **{
        f"every mishap, {kinds}": ShareModel(kinds, mishaps=EVERYTHING, timers=True)
        for kinds in ("RW", "WW", "PP", *amount(("WRR", "RWW", "PPP", "PPW"), short=()))
    },
    **{
        f"readers woken {together} at a time, {kinds}": ShareModel(kinds, together=together)
        for together in (1, 2)
        for kinds in ("WRR", *amount(("RWRR", "WRRR", "RWWR", "WRRRR", "RWRRW"), short=()))
    },
    "readers woken together in two rounds": ShareModel(amount("WRR", short="WR"), rounds=2, together=2),
    "readers woken together, cancelled": ShareModel(
        amount("RWRR", short="RWR"), together=2, mishaps=Mishaps(cancellations=1)
    ),
    "readers woken together, every mishap": ShareModel(
        amount("WRR", short="WR"), together=2, mishaps=EVERYTHING, timers=True
    ),
    "two pauses in two rounds": ShareModel(amount("WRW", short="RW"), rounds=2, mishaps=Mishaps(pauses=2), timers=True),
}
TABLE_BROKEN = {
    "no chain of wake-ups": ("P8", ShareModel("WRR", broken="no chain of wake-ups")),
    "waking only when empty": ("P8", ShareModel("PPPP", broken="waking only when empty")),
    "no chain behind readers that were woken together": (
        "P8",
        ShareModel("WRR", together=1, broken="no chain of wake-ups"),
    ),
    "out of turn past a writer": ("P8", ShareModel("WWR", together=1, broken="out of turn past a writer")),
    "numbers are given again": ("P8", ShareModel("RWR", together=1, broken="numbers are given again")),
    "a later reader opens nothing": ("P8", ShareModel("WRRR", together=2, broken="a later reader opens nothing")),
    "no second try": ("P8", ShareModel("WW", broken="no second try")),
    "left in silence": ("P8", ShareModel("WRR", mishaps=Mishaps(cancellations=1), broken="left in silence")),
    "a token for each reader": ("P", ShareModel("RR", timers=True, broken="a token for each reader")),
    "one fence for the pool": ("P3", ShareModel("PP", timers=True, broken="one fence for the pool")),
    "the highest tokens": ("P3", ShareModel("PPP", rounds=2, timers=True, broken="the highest tokens")),
    "early expiry": ("P1", ShareModel("WW", timers=True, broken="early expiry")),
}
LINE = {
    **{
        f"watches alone, {kinds}": LineModel(kinds)
        for kinds in ("RRW", "RWW", "PPP", "PPW", *amount(("RRWW", "PPPP"), short=()))
    },
    **{
        f"cancelled, {kinds}": LineModel(kinds, mishaps=Mishaps(cancellations=1))
        for kinds in ("RRW", "RWR", "PP", "PPP")
    },
    **{
        f"pause and kill, {kinds}": LineModel(kinds, mishaps=Mishaps(pauses=amount(2, short=1), kills=1))
        for kinds in amount(("RRW", "RWW", "PPP"), short=("RW", "PP"))
    },
    **{
        f"one fence for all modes, {kinds}": LineModel(kinds, permits=1, one_fence=True, mishaps=Mishaps(pauses=1))
        for kinds in ("RLR", "WRL", "RPR", *amount(("RLRW", "PRLR", "WRLP"), short=()))
    },
    "one fence for permits in two rounds": LineModel(
        "PP", permits=1, rounds=2, one_fence=True, mishaps=Mishaps(pauses=1)
    ),
    "pause in two rounds": LineModel(amount("RRW", short="RW"), rounds=2, mishaps=Mishaps(pauses=1)),
}
LINE_BROKEN = {
    "a phase is drawn": ("P3", LineModel("WRL", broken="a phase is drawn")),
    **{
        f"a phase outlives {kind}": (
            "P3",
            LineModel(f"R{kind}R", permits=1, one_fence=True, broken=f"a phase outlives {kind}"),
        )
        for kind in "LWP"
    },
    "drawn without a look at the own key": (
        "P",
        LineModel("RWW", mishaps=Mishaps(pauses=1), broken="drawn without a look at the own key"),
    ),
    "a reader watches the key before it": ("P8", LineModel("WRR", broken="a reader watches the key before it")),
    "a number beside a waiter": ("P1", LineModel("PP", broken="a number beside a waiter")),
    "a permit watches the key before it": ("P8", LineModel("PPP", broken="a permit watches the key before it")),
}


@pytest.mark.parametrize("scope", TABLE)
def test_no_state_of_a_table_breaks_a_promise(scope):
    outcome = explore(TABLE[scope], LIMIT)
    assert not outcome.broken, (outcome.broken, outcome.way)
    assert outcome.exhausted


@pytest.mark.parametrize("broken", TABLE_BROKEN)
def test_every_rule_of_a_table_is_needed(broken):
    promise, model = TABLE_BROKEN[broken]
    outcome = explore(model, LIMIT)
    assert outcome.broken.startswith(promise), outcome
    assert 2 <= len(outcome.way) <= 25


@pytest.mark.parametrize("scope", LINE)
def test_no_state_of_a_line_of_keys_breaks_a_promise(scope):
    outcome = explore(LINE[scope], LIMIT)
    assert not outcome.broken, (outcome.broken, outcome.way)
    assert outcome.exhausted


@pytest.mark.parametrize("broken", LINE_BROKEN)
def test_every_rule_of_a_line_of_keys_is_needed(broken):
    promise, model = LINE_BROKEN[broken]
    outcome = explore(model, LIMIT)
    assert outcome.broken.startswith(promise), outcome
    assert 2 <= len(outcome.way) <= 25
