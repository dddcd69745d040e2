"""
A script that builds a report in one process at a time. It computes, checks its lease now and then, and ends in order on
a signal.

Run it: uv run python examples/script_report.py
"""

import signal
import sys
import tempfile
from pathlib import Path

from fencing_sdk import AcquireTimeoutError, LeaseLostError
from fencing_sdk.sync import Lease, connect

locks = connect(f"sqlite:///{Path(tempfile.mkdtemp())}/locks.db")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the process is killed, and others wait for one ttl


def build(lease: Lease) -> int:
    total = 0
    for page in range(200):
        total += sum(range(page * 1000))  # no await anywhere: the heartbeat has a thread of its own
        lease.check()  # raises LeaseLostError when another process may have the lock
    return total


try:
    with locks.lock("report/42", ttl=15, wait=5, max_hold=600) as lease:
        print("built under token", lease.token, "->", build(lease))
except AcquireTimeoutError:
    sys.exit("another process builds the report")
except LeaseLostError as error:
    sys.exit(f"another process may be at work: {error}")
