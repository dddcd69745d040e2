"""
A worker of ``fencing demo``: takes the lock, reads the balance, thinks, and writes the new balance.

    python -m fencing_sdk.cli._demo_worker ACTOR AMOUNT FOLDER TTL guarded|unguarded

What happens is appended to the recording in the folder. Each line on standard input is one step: to
ask for the lock, to end the thinking, to leave. The demo decides when, so no step sleeps for a fixed time.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fencing_sdk._connect import connect
from fencing_sdk._lease import Lease
from fencing_sdk._recording import Recorder
from fencing_sdk._values.observers import keep_off_console
from fencing_sdk.errors import LeaseLostError, StaleTokenError
from fencing_sdk.guards.sql import SqlGuard

ACCOUNT = "account/7"
LOCKS, BANK, RECORDING = "locks.db", "bank.db", "recording.jsonl"
GUARDED, UNGUARDED = "guarded", "unguarded"
_PATIENCE = 60.0


def url_of(file: Path) -> str:
    """The URL of an SQLite *file*."""
    return f"sqlite:///{quote(str(file.absolute()))}"


@dataclass(frozen=True, slots=True)
class DemoWorker:
    """Adds an amount to the account, under the lock."""

    folder: Path
    amount: int
    guard: SqlGuard | None
    recorder: Recorder

    async def work(self, ttl: float) -> None:
        """Add the amount under the lock. What leaves the ``async with`` is recorded."""
        fences = [] if self.guard is None else [self.guard]
        url = f"{url_of(self.folder / LOCKS)}?tokens=counter"  # 1, 2, 3: easier to read than microseconds
        async with connect(url, observers=[self.recorder]) as locks:
            try:
                async with locks.lock(ACCOUNT, ttl=ttl, wait=_PATIENCE, fences=fences) as lease:
                    await asyncio.to_thread(self.deposit, lease)
                    await asyncio.to_thread(sys.stdin.readline)
            except LeaseLostError as error:
                self.recorder.record("raised", error=type(error).__name__, text=str(error))

    def deposit(self, lease: Lease) -> None:
        """Read, think, write. A thread, so the cancellation that ends the lease does not reach it."""
        token = lease.token  # while it is valid; an honest zombie does not look again
        with closing(sqlite3.connect(self.folder / BANK, isolation_level=None)) as bank:
            ((balance,),) = bank.execute("SELECT balance FROM account WHERE name = ?", (ACCOUNT,))
            self.recorder.record("read", resource=ACCOUNT, token=token, text=f"balance {balance}")
            sys.stdin.readline()
            self._write(bank, token, balance + self.amount)

    def _write(self, bank: sqlite3.Connection, token: int, balance: int) -> None:
        text = f"balance {balance}"
        bank.execute("BEGIN IMMEDIATE")  # check and write: one transaction, or there is no fence
        try:
            if self.guard is not None:
                self.guard.admit_sync(bank, ACCOUNT, token)
            bank.execute("UPDATE account SET balance = ? WHERE name = ?", (balance, ACCOUNT))
        except StaleTokenError as error:
            bank.execute("ROLLBACK")
            self.recorder.record("write_refused", resource=ACCOUNT, token=token, fence=error.fence, text=text)
        else:
            bank.execute("COMMIT")
            self.recorder.record("write_accepted", resource=ACCOUNT, token=token, text=text)


def main(actor: str, amount: str, folder: str, ttl: str, guarded: str) -> None:
    """Play one worker."""
    room = Path(folder)
    guard = SqlGuard(url_of(room / BANK)) if guarded == GUARDED else None
    worker = DemoWorker(room, int(amount), guard, Recorder(room / RECORDING, actor=actor))
    worker.recorder.record("ready")
    sys.stdin.readline()
    asyncio.run(worker.work(float(ttl)))


if __name__ == "__main__":
    keep_off_console()
    main(*sys.argv[1:])
