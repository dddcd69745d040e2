"""The fifteen failure modes of distributed locks: each has tests here that fail when its protection is taken out."""

import re
from collections import Counter
from pathlib import Path

MODES = {
    1: "work goes on after the lease is gone",
    2: "a hung renewal hides the expiry",
    3: "one error ends the heartbeat for ever",
    4: "a blocked event loop loses the lease and nobody notices",
    5: "a cancelled or unanswered acquisition leaves an orphan lock",
    6: "a cancelled or failed release loses the handle, or hides the body's error",
    7: "a renewal outlives the release",
    8: "somebody else's lock is released, or one's own cannot be",
    9: "a token goes back or starts again",
    10: "the order of tokens is not the order of grants, or a token is read again later",
    11: "nothing checks the token, or the check is a step of its own",
    12: "an unknown outcome is taken for a loss or for a success",
    13: "waiters leak, starve, herd or spin",
    14: "clocks are compared across machines, or trusted to be right",
    15: "settings that cannot be safe are accepted",
}


def test_every_failure_mode_has_tests_that_name_it():
    named = re.compile(r'def test_mode_(\d\d)_\w+\([^)]*\):\n    """(\d+): ')
    found = Counter()
    for path in Path(__file__).parent.glob("test_fm_*.py"):
        for name, promise in named.findall(path.read_text()):
            assert int(name) == int(promise)
            found[int(name)] += 1
    assert found.keys() == MODES.keys()
