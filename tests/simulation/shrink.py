"""Makes a failing script small: leaves out every part without which the same rule is still broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet

from tests.simulation.play import History, play
from tests.simulation.script import Script


def shrink(script: Script, rules: AbstractSet[str], player: Callable[[Script], History] = play) -> Script:
    """
    Return the smallest script found that still breaks one of *rules*.

    One visit or fault is left out at a time, until none can be (Zeller's minimizing delta debugging,
    with steps of one: scripts are short).
    """
    while True:
        for smaller in _smaller(script):
            if player(smaller).report.rules & rules:
                script = smaller
                break
        else:
            return script


def _smaller(script: Script) -> Iterator[Script]:
    for fault in reversed(range(len(script.faults))):
        yield script.without(fault=fault)
    if len(script.visits) > 1:
        for visit in reversed(range(len(script.visits))):
            yield script.without(visit=visit)
