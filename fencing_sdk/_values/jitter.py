"""
The random numbers of the package: pauses, and orders in which servers are tried.

They come from a generator of their own. A program that seeds `random` gets the same numbers whether or not a client
works in a background thread meanwhile.
"""

from __future__ import annotations

import os
import random

__all__ = ["JITTER"]

JITTER = random.Random()

if hasattr(os, "register_at_fork"):  # as `random` does, so that parent and child do not pause in step
    os.register_at_fork(after_in_child=JITTER.seed)
