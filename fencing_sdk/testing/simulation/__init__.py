"""
Histories of a simulated world, made from seeds.

The real client runs in processes that freeze and crash, behind a network that loses, delays and
doubles, in front of a store that restarts and forgets.

    python -m fencing_sdk.testing.simulation --histories 10000

One seed is one history, byte for byte. What it did is judged by `fencing_sdk.testing.history`, and
a seed that breaks a promise is printed with the smallest script that still breaks it.
"""

from __future__ import annotations

from fencing_sdk.testing.simulation._campaign import Campaign, play_seeds, run_campaign
from fencing_sdk.testing.simulation._control import Control
from fencing_sdk.testing.simulation._controls import all_controls
from fencing_sdk.testing.simulation._play import History, play
from fencing_sdk.testing.simulation._script import Fault, Script, Visit, write_script
from fencing_sdk.testing.simulation._shrink import shrink

__all__ = [
    "Campaign",
    "Control",
    "Fault",
    "History",
    "Script",
    "Visit",
    "all_controls",
    "play",
    "play_seeds",
    "run_campaign",
    "shrink",
    "write_script",
]
