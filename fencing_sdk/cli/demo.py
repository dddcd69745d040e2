"""
``fencing demo``: a worker is frozen while it holds a lock, and writes when it is too late.

The demo runs twice. Two processes add money to one account: each reads the balance and writes the
new one. The first is stopped by SIGSTOP between its read and its write, its lease expires, the second
takes over. Without a guard the late write destroys the second one's; with a guard it is refused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fencing_sdk._values.drivers import check_python
from fencing_sdk._values.token import ENV_RECORD
from fencing_sdk.cli._demo_picture import Line, draw
from fencing_sdk.cli._demo_run import ACCOUNT, BANK, RECORDING, DemoRun, DemoRunError, TooBusyError
from fencing_sdk.cli._streams import check_output
from fencing_sdk.errors import ConfigurationError, shown

A, B = "worker A", "worker B"
BEFORE, BY_A, BY_B = 100, 10, 5
"""The balance at the start, and what each worker adds."""
_TTLS = (2.0, 4.0, 8.0)
"""Seconds of the leases: short ones first, longer ones where the machine is too busy to renew those."""
_COLOURS = {A: "cyan", B: "magenta"}
_TITLES = {False: "Without a guard", True: "With a guard"}


def show(console: Console, svg: Path | None) -> int:
    """Run both halves, print what happens and what it showed; return 0 if it showed what it should."""
    check_python("fencing demo")
    if not hasattr(signal, "SIGSTOP"):
        msg = "the demo freezes a process with SIGSTOP, which this system does not have"
        raise ConfigurationError(msg)
    kept = os.environ.get(ENV_RECORD)
    for file in (svg, kept):
        if file:
            check_output(Path(file))
    with _leaving_on_signals() as go_on, tempfile.TemporaryDirectory(prefix="fencing-demo-") as folder:
        recording = Path(folder) / RECORDING
        try:
            found = [_half(console, recording, go_on, guarded=guarded) for guarded in (False, True)]
        except DemoRunError as error:
            console.print(f"The demo failed: {error}.", style="red", markup=False, highlight=False)
            return 1
        code = _conclude(console, found)
        if kept:
            _write(Path(kept), "ab", recording.read_bytes())
            console.print(f"Recorded in {kept}", markup=False, highlight=False)
        if svg is not None:
            picture = draw([(_TITLES[one.guarded], one.outcome, one.lines) for one in found])
            _write(svg, "wb", picture.encode())
            console.print(f"Drawn from the recording: {svg}", markup=False, highlight=False)
    return code


def _half(console: Console, recording: Path, go_on: Callable[[], None], *, guarded: bool) -> Evidence:
    """One run, again with longer leases where the machine was too busy; its recording is kept."""
    console.print(Text(f"\n{_TITLES[guarded]}", style="bold"))
    for ttl in _TTLS:
        room = recording.parent / f"{'guarded' if guarded else 'unguarded'}-{ttl:g}"
        room.mkdir()
        try:
            evidence = _play(room, _EventPrinter(console).show, go_on, ttl=ttl, guarded=guarded)
        except TooBusyError:
            console.print(f"This machine is too busy for leases of {ttl:g} s. Once more.", highlight=False)
        else:
            _write(recording, "ab", (room / RECORDING).read_bytes())
            return evidence
    msg = "the machine is too busy to renew a lease"
    raise DemoRunError(msg)


def _play(
    room: Path, show: Callable[[Line], None], go_on: Callable[[], None], *, ttl: float, guarded: bool
) -> Evidence:
    open_account(room / BANK)
    with DemoRun(room, ttl=ttl, guarded=guarded, show=show, go_on=go_on) as run:
        run.record("run", title=_TITLES[guarded])
        run.start(A, amount=BY_A)
        run.start(B, amount=BY_B)
        run.wait_for(A, "ready")
        run.wait_for(B, "ready")
        run.prompt(A)  # to ask for the lock
        run.wait_for(A, "read")
        run.prompt(B)
        run.wait_for(B, "acquiring")
        run.wait_for(A, "renewed", count=2)
        run.freeze(A)
        run.prompt(A)  # to write; it will hear that when it is resumed
        run.wait_for(B, "renewed", count=2)
        run.prompt(B)  # to write
        run.wait_for(B, "write_accepted")
        run.wait_for(B, "renewed", count=3)
        run.resume(A)
        run.prompt(A)  # to leave, in case its thread is faster than the cancellation
        run.wait_for_end(A)
        run.prompt(B)  # to leave
        run.wait_for_end(B)
        evidence = Evidence(guarded, tuple(run.lines), run.balance())
        run.record("outcome", text=evidence.outcome)
    return evidence


def open_account(bank: Path) -> None:
    """Make the database that is to be protected."""
    with contextlib.closing(sqlite3.connect(bank)) as connection, connection:
        connection.execute("CREATE TABLE account (name TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        connection.execute("INSERT INTO account VALUES (?, ?)", (ACCOUNT, BEFORE))


class _EventPrinter:
    """Prints recorded events as sentences, with the seconds since the first one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start: float | None = None
        self._losers: set[str] = set()

    def show(self, line: Line) -> None:
        """Print one event, if there is something to say about it."""
        actor, sentence = str(line.get("lane", line["actor"])), _SENTENCES.get(line["kind"])
        if line["kind"] == "lost":
            self._losers.add(actor)
        if sentence is None or (line["kind"] == "released" and actor in self._losers):
            return  # a lease that was lost is released too, which changes nothing
        self._start = line["t"] if self._start is None else self._start
        text = Text(f"{line['t'] - self._start:6.2f} s  ")
        text.append(f"{actor:<10}", style=_COLOURS.get(actor, "yellow"))
        text.append(sentence(line), style={"write_refused": "bold green", "raised": "bold"}.get(line["kind"], ""))
        self._console.print(text, soft_wrap=True)


_SENTENCES: dict[str, Callable[[Line], str]] = {
    "acquiring": lambda _: "asks for the lock",
    "acquired": lambda line: f"holds the lock: token {line['token']}, lease of {line['ttl']:g} s",
    "fence_raised": lambda line: f"raises the guard's fence: every token below {line['token']} is refused from now on",
    "read": lambda line: f"reads: {line['text']}",
    "renewed": lambda _: "renews its lease",
    "frozen": lambda _: "is FROZEN by SIGSTOP, between its read and its write",
    "resumed": lambda _: "is resumed by SIGCONT; its thread, which nothing can cancel, goes on to the write",
    "renewal_late": lambda line: f"notices that its heartbeat is {line['late']:.1f} s late",
    "raised": lambda line: f"{line['error']}: {line['text']}",
    "write_accepted": lambda line: f"writes with token {line['token']}: {line['text']}. Accepted",
    "write_refused": lambda line: (
        f"writes with token {line['token']}: {line['text']}. REFUSED, the guard has seen {line['fence']}"
    ),
    "released": lambda _: "releases the lock",
    "outcome": lambda line: f"{line['text']}.",
}


def _conclude(console: Console, found: Sequence[Evidence]) -> int:
    console.print()
    table = Table("", *(_TITLES[evidence.guarded] for evidence in found))
    for question, answer in _ANSWERS.items():
        table.add_row(question, *(answer(evidence) for evidence in found))
    console.print(table)
    missing = [f"{_TITLES[evidence.guarded].lower()}: {claim}" for evidence in found for claim in evidence.missing]
    for claim in missing:
        console.print(f"NOT shown, {claim}.", style="red", highlight=False, soft_wrap=True)
    if not missing:
        console.print(f"Shown: {_LESSON}", highlight=False, soft_wrap=True)
    return 1 if missing else 0


_LESSON = "a lock alone does not protect the data. Its token does, checked where the write happens."
_FATES = {BEFORE + BY_A: f"B's {BY_B} are lost", BEFORE + BY_B: f"B's {BY_B} are safe"}
_ANSWERS: dict[str, Callable[[Evidence], str]] = {
    "B takes over while A is frozen": lambda e: f"token {e.token(B)} after {e.token(A)}" if e.taken_over else "no",
    "A notices as soon as it runs": lambda e: "LeaseLostError" if e.noticed else "no",
    "A's late write": lambda e: e.late_write,
    f"balance: {BEFORE}, A +{BY_A}, B +{BY_B}": lambda e: f"{e.balance}: {_FATES.get(e.balance, 'unexpected')}",
}


def _write(to: Path, mode: Literal["ab", "wb"], content: bytes) -> None:
    try:
        with to.open(mode) as file:
            file.write(content)
    except OSError as error:
        msg = f"cannot write {shown(str(to))}: {error.strerror}"
        raise ConfigurationError(msg) from error


@contextlib.contextmanager
def _leaving_on_signals() -> Iterator[Callable[[], None]]:
    """
    Yield what raises once a signal is to end the demo, so that it leaves through every ``finally``.

    The handler itself raises nothing: an error that comes up inside `subprocess`, while it holds the lock with which it
    waits for a child, would leave that lock behind, and the end of the demo would wait for it for ever.
    """
    received: list[int] = []

    def go_on() -> None:
        if received:
            raise SystemExit(128 + received[0])

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield go_on
        go_on()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts of one run, read from its recording and from the database at its end, never assumed."""

    guarded: bool
    lines: Sequence[Line]
    balance: int

    def token(self, actor: str, kind: str = "acquired") -> int | None:
        """The token in the first event of this *kind*, by default the grant, of *actor*."""
        line = self._find(actor, kind)
        return None if line is None else int(line["token"])

    @property
    def late_write(self) -> str:
        """The fate of the write of the worker that had been frozen: accepted, refused, or missing."""
        if self._find(A, "write_accepted") is not None:
            return "accepted"
        return "missing" if self._find(A, "write_refused") is None else "refused"

    @property
    def taken_over(self) -> bool:
        """The second worker was granted a higher token while the first was frozen."""
        first, second = self.token(A), self.token(B)
        if first is None or second is None:
            return False
        return first < second and self._in_order((A, "frozen"), (B, "acquired"), (B, "write_accepted"), (A, "resumed"))

    @property
    def honest(self) -> bool:
        """The late write used a token that was read while it was good, and came after the other one's write."""
        write = f"write_{self.late_write}"
        before = self._in_order((A, "acquired"), (A, "read"), (A, "frozen"))
        return before and self._in_order((A, "resumed"), (A, write)) and self.token(A, write) == self.token(A)

    @property
    def noticed(self) -> bool:
        """LeaseLostError left the ``async with`` of the first worker as soon as it could run again."""
        line = self._find(A, "raised")
        return (
            line is not None and line.get("error") == "LeaseLostError" and self._in_order((A, "resumed"), (A, "raised"))
        )

    @property
    def fenced(self) -> bool:
        """The late write had the fate that it has to have, and so had the money."""
        if self.guarded:
            return self.late_write == "refused" and self.balance == BEFORE + BY_B
        return self.late_write == "accepted" and self.balance == BEFORE + BY_A

    @property
    def missing(self) -> list[str]:
        """The claims that the run did not show."""
        claims = {
            "B took over with a higher token while A was frozen": self.taken_over,
            "A wrote with a token that it had read before it was frozen": self.honest,
            "LeaseLostError reached A": self.noticed,
            "A's late write was refused" if self.guarded else "A's late write destroyed B's": self.fenced,
        }
        return [claim for claim, holds in claims.items() if not holds]

    @property
    def outcome(self) -> str:
        """One sentence on the money."""
        if self.balance == BEFORE + BY_A:
            return f"The late write is accepted: the balance is {self.balance}, B's {BY_B} are lost"
        if self.balance == BEFORE + BY_B:
            return (
                f"The late write is refused: the balance is {self.balance}, and A knows that its {BY_A} are not in it"
            )
        return f"The balance is {self.balance}"

    def _find(self, actor: str, kind: str) -> Line | None:
        for line in self.lines:
            if line["kind"] == kind and line.get("lane", line.get("actor")) == actor:
                return line
        return None

    def _in_order(self, *events: tuple[str, str]) -> bool:
        found = [self._find(actor, kind) for actor, kind in events]
        moments = [float(line["t"]) for line in found if line is not None]
        return len(moments) == len(events) and moments == sorted(moments)
