"""
The processes of one run of the demo, and the recording that they write together.

This module is also the worker, which takes the lock, reads the balance, thinks, and writes the new balance:

    python -m fencing_sdk.cli._demo_run ACTOR AMOUNT FOLDER TTL guarded|unguarded

Each line on its standard input is one step: to ask for the lock, to end the thinking, to leave. The demo decides when:
every step waits for an event that a worker recorded. Only the lease of the frozen worker takes real time. No process
is left behind, also when the run fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from fencing_sdk._connect import connect
from fencing_sdk._lease import Lease
from fencing_sdk._recording import Recorder
from fencing_sdk._values.observers import keep_off_console
from fencing_sdk._values.token import ENV_RECORD
from fencing_sdk.errors import LeaseLostError, StaleTokenError
from fencing_sdk.guards.sql import SqlGuard

ACCOUNT = "account/7"
LOCKS, BANK, RECORDING = "locks.db", "bank.db", "recording.jsonl"
GUARDED, UNGUARDED = "guarded", "unguarded"

PATIENCE = 30.0
"""Seconds to wait for one event; a busy machine needs some of them."""
_POLL = 0.01
_MODULE = "fencing_sdk.cli._demo_run"


class DemoRunError(Exception):
    """A run that cannot go on: a worker died, or what had to happen did not."""


class TooBusyError(DemoRunError):
    """A worker that was not frozen lost its lease: the machine did not let it renew in time."""


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
                async with locks.lock(ACCOUNT, ttl=ttl, wait=2 * PATIENCE, fences=fences) as lease:
                    await asyncio.to_thread(self.deposit, lease)
                    await asyncio.to_thread(sys.stdin.readline)
            except LeaseLostError as error:
                self.recorder.record("raised", error=type(error).__name__, text=str(error))

    def deposit(self, lease: Lease) -> None:
        """Read, think, write. A thread, so the cancellation that ends the lease does not reach it."""
        token = lease.token  # while it is valid; an honest zombie does not look again
        with contextlib.closing(sqlite3.connect(self.folder / BANK, isolation_level=None)) as bank:
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


class DemoRun:
    """
    A folder, a recording, and some workers, which write through a guard if *guarded*.

    *show* gets every recorded line. *go_on* is called again and again while the run waits; an error of it ends the run.
    """

    def __init__(
        self,
        room: Path,
        *,
        ttl: float,
        guarded: bool,
        show: Callable[[dict[str, Any]], None],
        go_on: Callable[[], None],
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self._room = room
        self._ttl = ttl
        self._guarded = guarded
        self._show = show
        self._go_on = go_on
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._recorder = Recorder(room / RECORDING, actor="demo")
        self._recording = (room / RECORDING).open("rb")
        self._unfinished = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.kill()  # also a frozen one
        for worker in self._workers.values():
            with worker:  # closes its pipe and waits for it
                pass
        self._recording.close()
        self._recorder.close()

    def record(self, kind: str, **fields: object) -> None:
        """Write something down that the workers cannot know."""
        self._recorder.record(kind, **fields)
        self._read()

    def start(self, actor: str, *, amount: int) -> None:
        """Start a worker that adds *amount* to the account."""
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # it shall import what we imported
        environment = {key: value for key, value in os.environ.items() if key != ENV_RECORD} | {"PYTHONPATH": path}
        guarded = GUARDED if self._guarded else UNGUARDED
        command = [sys.executable, "-P", "-m", _MODULE, actor, str(amount), str(self._room), str(self._ttl), guarded]
        # A process group of its own: Ctrl-C is for the demo, which then ends its workers.
        self._workers[actor] = subprocess.Popen(  # noqa: S603  (our own module)
            command, stdin=subprocess.PIPE, env=environment, process_group=0
        )

    def prompt(self, actor: str) -> None:
        """Send a worker to its next step. One that is frozen finds the message when it is resumed."""
        pipe = self._workers[actor].stdin
        assert pipe is not None  # started with one
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, which the next wait reports
            pipe.write(b"\n")
            pipe.flush()

    def wait_for(self, actor: str, kind: str, *, count: int = 1) -> None:
        """Wait until *actor* has recorded *count* events of this *kind*."""
        self._wait(lambda: self.count(actor, kind) >= count, f"{kind} by {actor}")

    def wait_for_end(self, actor: str) -> None:
        """Wait until a worker has ended, and ended well."""
        self._wait(lambda: self._workers[actor].poll() is not None, f"the end of {actor}")

    def count(self, actor: str, *kinds: str) -> int:
        """Number of events of these *kinds* that are recorded for *actor*."""
        return sum(line["kind"] in kinds and line.get("lane", line.get("actor")) == actor for line in self.lines)

    def freeze(self, actor: str) -> None:
        """
        Freeze a worker between two renewals.

        If the frozen worker held SQLite's write lock on the file of locks, it would stop the
        other worker too, which is not what the demo shows.
        """
        while True:
            renewals = self.count(actor, "renewed")
            self._stop(actor)
            if self._service_answers():
                break
            self._workers[actor].send_signal(signal.SIGCONT)
            self.wait_for(actor, "renewed", count=renewals + 1)
        self.record("frozen", lane=actor)
        self._check_leases()

    def resume(self, actor: str) -> None:
        """Let a frozen worker go on."""
        self.record("resumed", lane=actor)
        self._workers[actor].send_signal(signal.SIGCONT)

    def balance(self) -> int:
        """Return the balance in the database."""
        with contextlib.closing(sqlite3.connect(self._room / BANK)) as bank:
            ((balance,),) = bank.execute("SELECT balance FROM account")
        return int(balance)

    def _stop(self, actor: str) -> None:
        worker = self._workers[actor]
        worker.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(worker.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            worker.returncode = os.waitstatus_to_exitcode(status)
            self._check_alive()

    def _service_answers(self) -> bool:
        with contextlib.closing(sqlite3.connect(self._room / LOCKS, timeout=0.2, isolation_level=None)) as file:
            try:
                file.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            file.execute("ROLLBACK")
            return True

    def _wait(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            self._go_on()
            self._read()
            if happened():
                return
            self._check_alive()
            self._check_leases()
            if time.monotonic() >= end:
                msg = f"{what} did not happen within {PATIENCE:g} s"
                raise DemoRunError(msg)
            time.sleep(_POLL)

    def _check_alive(self) -> None:
        for actor, worker in self._workers.items():
            if worker.poll() not in {None, 0}:
                msg = f"{actor} failed with exit code {worker.returncode}"
                raise DemoRunError(msg)

    def _check_leases(self) -> None:
        frozen = set()
        for line in self.lines:
            if line["kind"] == "frozen":
                frozen.add(line["lane"])
            elif line["kind"] == "lost" and line["actor"] not in frozen:
                msg = f"{line['actor']} lost its lease without being frozen"
                raise TooBusyError(msg)

    def _read(self) -> None:
        *finished, self._unfinished = (self._unfinished + self._recording.read()).split(b"\n")
        for raw in finished:
            line = json.loads(raw)
            self.lines.append(line)
            self._show(line)


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
