"""A WSGI application whose client, and with PRELOADED=1 a lease, are made when it is imported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fencing_sdk.sync import Lease, connect

locks = connect(os.environ["FENCING_URL"])
turns = Path(os.environ["TURNS"])
kept: list[Lease] = []
parent = locks.lock("the parent's", ttl=300).acquire() if os.environ.get("PRELOADED") else None
if parent is not None:
    # A child that is forked in C while another thread runs Python waits for that thread for ever, inside Python. The
    # thread of the client sleeps once it has begun to listen for losses.
    time.sleep(2)


def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    answer = {"/turn": turn, "/keep": keep, "/parent": tell_parent}[environ["PATH_INFO"]]()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [answer.encode()]


def turn() -> str:
    """Write down that a turn begins and ends, under the lock; return by which process."""
    with locks.lock("turn", ttl=60, wait=60) as lease, turns.open("a") as file:
        file.write(f"in {lease.token}\n")
        file.flush()
        time.sleep(0.002)
        file.write(f"out {lease.token}\n")
    return str(os.getpid())


def keep() -> str:
    """Hold a lock for as long as the process lives."""
    kept.append(locks.lock("kept", ttl=300).acquire())
    return str(kept[0].token)


def tell_parent() -> str:
    """What this process thinks of the lease that its parent took before the fork."""
    if parent is None:
        return "no parent"
    parent.release()  # does nothing here
    return f"held: {parent.held}, {parent.lost_reason}"
