"""
APScheduler's blocking scheduler in two processes: at each tick one of them runs the job, and the other one skips it.

Here the two are threads with a client each, so that one file can show them.

Run it: uv run python examples/blocking_scheduler.py
"""

import tempfile
import threading
import time
from pathlib import Path

from apscheduler.schedulers.blocking import BlockingScheduler

from fencing_sdk.sync import Ran, connect, current_token

store = f"sqlite:///{Path(tempfile.mkdtemp())}/locks.db"
ran, skipped = [], []


def process(name: str, scheduler: BlockingScheduler) -> None:
    locks = connect(store)

    @locks.job("nightly", at_least_for=60, max_hold=30)  # the lock stays taken: a late clock does not run it again
    def nightly() -> int:
        return current_token()

    def tick() -> None:
        outcome = nightly()
        (ran if isinstance(outcome, Ran) else skipped).append((name, outcome))

    scheduler.add_job(tick, "interval", seconds=0.2)
    with locks:
        scheduler.start()


schedulers = [BlockingScheduler(timezone="UTC") for _ in range(2)]
threads = [threading.Thread(target=process, args=(f"process {n}", one)) for n, one in enumerate(schedulers)]
for thread in threads:
    thread.start()
while not ran or len(skipped) < 3 or not all(one.running for one in schedulers):
    time.sleep(0.05)
for scheduler in schedulers:
    scheduler.shutdown()
for thread in threads:
    thread.join()
print(ran[0][0], "ran the job under token", ran[0][1].value)
print("the others were skipped:", len(skipped))
assert len(ran) == 1
