"""
``fencing run``: a command under a lock, for cron and the shell.

    command ends                       its exit code, or 128 + n after signal n
    lock taken, or the ticket in use   75, nothing was run
    lease lost                         the command and what it started are stopped, 76
    the ticket stands for nothing      76, nothing was run
    the ticket cannot be written       74
    store unavailable                  69, nothing was run
    bad usage                          2
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal, Unpack

import anyio

from fencing_sdk._arguments import LockOptions
from fencing_sdk._client import LockClient, enter
from fencing_sdk._connect import connect
from fencing_sdk._lease import Lease, PermitLease, state_of
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Holder, new_owner
from fencing_sdk._values.clock import BootClock, wall_seconds
from fencing_sdk._values.drivers import check_python
from fencing_sdk._values.reports import NOTHING_KNOWN, facts_about_command, harmless, read_facts, say_kept
from fencing_sdk._values.timing import DEFAULT_TTL, seconds
from fencing_sdk._values.token import (
    ENV_AROUND,
    ENV_DEADLINE,
    ENV_HOLDER,
    ENV_LOCK,
    ENV_PERMIT,
    ENV_TOKEN,
    ENV_URL,
    ENV_URL_FILE,
    ENV_WITHHELD,
    Token,
    format_token,
)
from fencing_sdk.cli._child import SEEN, TO_THE_COMMAND, TO_THE_GROUP, Child
from fencing_sdk.cli._metrics_file import MetricsFile, Result
from fencing_sdk.cli._options import ChosenStore, StoreOptions
from fencing_sdk.cli._streams import Exit, say
from fencing_sdk.cli._ticket_file import TicketFile, TicketFileError
from fencing_sdk.errors import (
    AcquireError,
    BackendError,
    ConfigurationError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    TicketRefusedError,
    UnsupportedError,
    shown,
)

if TYPE_CHECKING:
    from fencing_sdk.recipes.jobs import AtLeastOn

OnLoss = Literal["term", "kill", "warn"]

_DEATH_SIGNAL = {"term": signal.SIGTERM, "kill": signal.SIGKILL, "warn": 0}
_SIGNALLED = 128
_OF_ONE_RUN = frozenset({ENV_URL, ENV_URL_FILE, ENV_WITHHELD, ENV_PERMIT})
"""Variables that a command does not inherit from the commands around it."""


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A command, what to do when its lease is lost, and how much to say about it."""

    command: Sequence[str]
    on_loss: OnLoss
    at_least: float = 0.0
    """Seconds from the grant for which the lock stays taken, although the command has ended."""
    at_least_on: AtLeastOn = "success"
    permits: int | None = None
    """Number of those who may hold the lock together, each with a number of its own."""
    shared: bool = False
    """True if the lock is held together with all who share it."""
    exclusive: bool = False
    """True if it is held alone, in one line with those who share it."""
    metrics_file: Path | None = None
    pass_url: bool = False
    """True if the command may know the store of its lock."""
    quiet: bool = False
    verbose: bool = False
    ticket: str | None = None
    """The file of a ticket whose lease the command goes on with, and is detached to at the end."""

    @property
    def program(self) -> str:
        """The command's name alone: its folder is long, and its arguments may hold passwords."""
        return harmless(PurePath(self.command[0]).name or self.command[0])

    def lock(self, locks: LockClient, name: str, options: LockOptions) -> Lock:
        """Describe the lock that is held while the command runs, if it does not come from a ticket."""
        if self.permits is not None:
            return locks.semaphore(name, permits=self.permits, **options)
        if self.shared:
            return locks.rwlock(name, **options).reader
        return locks.rwlock(name, **options).writer if self.exclusive else locks.lock(name, **options)


@dataclass(frozen=True, slots=True)
class PassedTicket:
    """The ticket that a command goes on with, and its heir: the one that the file gets when the command has ended."""

    file: TicketFile
    ticket: LeaseTicket
    heir: LeaseTicket


def run_job(job: CommandRun, lock_name: str, *, where: StoreOptions, **options: Unpack[LockOptions]) -> int:
    """
    Run *job* under the lock, or the lease of its ticket, which no other command uses meanwhile; return the exit code.

    Without a ``label`` among the *options*, others see where the job runs and since when.
    """
    store = where.found()
    if store is None:
        return Exit.UNAVAILABLE
    label = options.get("label")
    if label is None:
        label = facts_about_command(job.program)
    if job.at_least:
        label = say_kept(label, job.at_least, seconds(options.get("ttl", DEFAULT_TTL), "ttl"))
    options["label"] = label
    if job.ticket is None:
        return asyncio.run(supervise(job, lock_name, store=store, **options))
    file = TicketFile(job.ticket)
    try:
        with file.alone():
            ticket = file.read()
            if ticket is None:
                say(f"there is no ticket in {shown(job.ticket)}; nothing was run")
                return Exit.LOST
            passed = PassedTicket(file, ticket, replace(ticket, owner=new_owner(), token=None, until=0.0))
            file.draft(passed.heir)  # now: at the end, the disk may be full
            return asyncio.run(supervise(job, ticket.name, store=store, passed=passed, **options))
    except TicketFileError as error:
        say(f"{error}; nothing was run")
        return error.code


async def supervise(
    job: CommandRun,
    lock_name: str,
    *,
    store: ChosenStore,
    passed: PassedTicket | None = None,
    **options: Unpack[LockOptions],
) -> int:
    """Run *job* under the lock, or the lease of a ticket that was *passed*, and return the exit code."""
    check_python("fencing run")
    wait, namespace = options.get("wait") or 0, "" if passed is None else passed.ticket.namespace
    locks = connect(store.url, namespace=namespace, open_wait=wait)
    metrics = None if job.metrics_file is None else MetricsFile(job.metrics_file, lock_name)
    watch = Supervision(job, store, metrics, passed)
    try:
        if passed is None:
            lock = job.lock(locks, lock_name, options)
        else:
            options.pop("wait", None)
            lock = locks.resume(passed.ticket, **options)
    except UnsupportedError as error:
        say(f"{error}; nothing was run")
        return Exit.UNAVAILABLE
    result, code = await _outcome(watch, locks, lock, quiet=job.quiet)
    if metrics is not None:
        await metrics.ended(result, code, watch.began, watch.ended)
    return code


async def _outcome(watch: Supervision, locks: LockClient, lock: Lock, *, quiet: bool) -> tuple[Result, int]:
    try:
        async with contextlib.aclosing(locks):
            await enter(locks, lazily=True)  # the wait for the lock is one for the store, too: a signal ends both
            await _check_around(locks, lock.name)
            try:
                await watch.run(lock)
            except TicketRefusedError as error:
                say(f"{error}; nothing was run")
                return Result.SKIP, Exit.LOST
            except AcquireError as error:
                if not quiet:
                    say(_taken(error, lock, await _holder(locks, lock.name)))
                return Result.SKIP, Exit.TAKEN
    except BackendError as error:
        say(f"the lock's store cannot be used, nothing was run: {error}")
        return Result.UNAVAILABLE, Exit.UNAVAILABLE
    except LeaseLostError as error:
        if watch.fate:
            say(f"{error}; {watch.fate}")
        return Result.LOSS, Exit.LOST if watch.fate else watch.code
    return watch.result, watch.code


async def _check_around(locks: LockClient, name: str) -> None:
    """Refuse a lock under which this very process was started, however deep: it would wait for its own end."""
    around = os.environ.get(ENV_AROUND, "").split()
    holders = await locks.holders(name) if around else ()
    if any(format_token(Token(holder.token, holder.id)) in around for holder in holders):
        msg = (
            f"lock {shown(name)} is held by the fencing run around this one, which would wait for itself; "
            "leave the inner one out, or give it a lock of another name"
        )
        raise ConfigurationError(msg)


async def _holder(locks: LockClient, name: str) -> Holder | None:
    try:
        return await locks.inspect(name)
    except BackendError:  # report the refusal without it
        return None


def _taken(error: AcquireError, lock: Lock, holder: Holder | None) -> str:
    from fencing_sdk.recipes.shares import Semaphore  # noqa: PLC0415  (for a refusal alone)

    patience = "" if isinstance(error, LockHeldError) else f" for {error.waited:.3g} s"
    facts = NOTHING_KNOWN if holder is None else read_facts(holder)
    about = f": {shown(facts.text)}" if facts.text and not facts.who else ""
    who, state = facts.who or "another holder", f"; {facts.state}" if facts.state else ""
    sentence = f"lock {shown(error.name)} was held by {who}"
    if isinstance(lock, Semaphore):
        sentence = f"all {lock.permits} permits of {shown(error.name)} were held, one of them by {who}"
    return f"{sentence}{patience}, nothing was run{state}{about}"


class Supervision:
    """One command, from the wait for its lock to its end."""

    def __init__(
        self,
        job: CommandRun,
        store: ChosenStore,
        metrics: MetricsFile | None = None,
        passed: PassedTicket | None = None,
    ) -> None:
        self._job = job
        self._passed = passed
        self._store = store
        self._metrics = metrics
        self.began = self.ended = 0.0
        """When the command was started, and when it ended: seconds since 1970."""
        self.result = Result.SKIP
        self.code = 0
        """The exit code, once the command has ended or a signal came before it was started."""
        self.fate = "nothing was run"
        """End of the command by the loss of the lease; empty where it goes on without a lease."""
        self._waiting = anyio.CancelScope()
        self._receive: Callable[[int], None] = self._interrupt

    async def run(self, lock: Lock) -> None:
        """Hold *lock* for as long as the command runs."""
        loop = asyncio.get_running_loop()
        for name in (*TO_THE_GROUP, *TO_THE_COMMAND):
            number = signal.Signals[name]
            if signal.getsignal(number) is not signal.SIG_IGN:  # else nohup, or a shell's background, ignores it
                loop.add_signal_handler(number, self.receive, number)
        with self._waiting:
            async with lock as lease:
                if not self._waiting.cancel_called:
                    await self._run_under(lease)
                    await self._keep(lease)
                if self._passed is not None:
                    await self._detach(lease, self._passed)

    async def _detach(self, lease: Lease, passed: PassedTicket) -> None:
        """Leave the lock to the heir, which gets into the file before the store is asked to keep the lock for it."""
        try:
            passed.file.publish()
            ticket = await state_of(lease).keeper.detach(state_of(lease), passed.heir.ttl, passed.heir)
        except (TicketFileError, BackendError) as error:
            say(f"{error}; the command had ended, and the lock is given back")
            self.code = error.code if isinstance(error, TicketFileError) else Exit.LOST
            return
        with contextlib.suppress(TicketFileError):  # the one that is there has the same owner
            passed.file.write(ticket)

    async def _keep(self, lease: Lease) -> None:
        """Leave the lock to the store, for as long as it has to stay taken after such an end of the command."""
        spoiled = self.code in {Exit.NOT_EXECUTABLE, Exit.NOT_FOUND} or self._job.at_least_on == "success"
        if not self._job.at_least or (self.code and spoiled):
            return
        from fencing_sdk.recipes.jobs import keep  # noqa: PLC0415  (most commands keep no lock)

        try:
            await keep(state_of(lease), self._job.at_least)
        except LeaseLostError as loss:
            say(f"{loss}; the command had ended")
            self.result = Result.LOSS
            self.code = self.code if self._job.on_loss == "warn" else Exit.LOST

    def receive(self, number: int) -> None:
        """Take a signal: forward it, or end the wait."""
        self._receive(number)

    def _interrupt(self, number: int) -> None:
        """A signal that comes while nothing runs yet ends the wait, unless it is meant for the command alone."""
        if signal.Signals(number).name in TO_THE_GROUP:
            self.code = _SIGNALLED + number
            self._waiting.cancel()

    async def _run_under(self, lease: Lease) -> None:
        program = shown(self._job.program)
        started_at = BootClock().now()
        self.began = self.ended = wall_seconds()
        self.result = Result.FAILURE
        self._say(f"lock {shown(lease.resource)} is held with token {lease.token:d}; {program} starts")
        try:
            child = Child(
                self._job.command,
                _environment(lease, self._store.passed(on=self._job.pass_url)),
                death_signal=_DEATH_SIGNAL[self._job.on_loss],
                may_go_on=lambda: self._job.on_loss == "warn" or lease.held,
            )
        except OSError as error:
            say(f"the command cannot be started: {error.strerror}")
            self.code = Exit.NOT_EXECUTABLE
            return
        self._receive = child.forward
        self.fate = "" if self._job.on_loss == "warn" else "the command ended too late"
        try:
            if self._metrics is not None:
                await self._metrics.started(self.began)
            await child.wait()
        finally:
            if child.running:
                await self._lose(child, lease)
            self.code, self.ended = child.code, wall_seconds()
            self.result = Result.FAILURE if self.code else Result.SUCCESS
            took = BootClock().now() - started_at
            self._say(f"{program} has ended with exit code {self.code} after {took:.1f} s")

    def _say(self, line: str) -> None:
        if self._job.verbose:
            say(line)

    async def _lose(self, child: Child, lease: Lease) -> None:
        with anyio.CancelScope(shield=True):  # the lease's own cancellation is what brought us here
            if self._job.on_loss == "warn":
                reason = lease.lost_reason or LossReason.EXPIRED
                say(f"{state_of(lease).loss(reason)}; the command goes on")
                await child.wait()
            else:
                await child.stop(_grace(lease) if self._job.on_loss == "term" else 0.0)
                self.fate = "the command was stopped" if SEEN else "the command and its process group were stopped"
                if detached := child.detached:
                    self.fate += f", but not what it has detached: process {', '.join(map(str, detached))}"


def _grace(lease: Lease) -> float:
    """
    Seconds between SIGTERM and SIGKILL: half of the safety buffer, so that both lie before the store hands on.

    Counted from the deadline at the latest: a supervisor that was frozen beyond it has no time left.
    """
    now, state = BootClock().now(), state_of(lease)
    return min(now, state.deadline) + state.timing.safety_buffer / 2 - now


def _environment(lease: Lease, store: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the command, without the variables of a lock around this one."""
    deadline, token = wall_seconds() + lease.remaining, lease.token
    around = f"{os.environ.get(ENV_AROUND, '')} {format_token(Token(token, lease.holder))}"  # each reader's own
    return {
        **{name: value for name, value in os.environ.items() if name not in _OF_ONE_RUN},
        **store,
        ENV_TOKEN: f"{token:d}",
        ENV_HOLDER: token.holder or "",
        ENV_LOCK: lease.name,
        **({ENV_PERMIT: f"{lease.permit:d}"} if isinstance(lease, PermitLease) else {}),
        ENV_AROUND: around.strip(),
        ENV_DEADLINE: f"{deadline:.3f}",
    }
