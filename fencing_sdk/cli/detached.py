"""
``fencing hold``, ``renew`` and ``release``: a lock that no process carries, for steps that are processes of their own.

    hold: taken, or held by this ticket already     0
    hold: another holder has it                     75
    renew: it is held still                         0
    renew: the ticket stands for nothing            76
    release: given back, or over before             0
    another command uses the ticket                 75
    the ticket cannot be written                    74, nothing was taken
    store unavailable                               69, the ticket is good until its deadline
    bad usage                                       2
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fencing_sdk._client import LockClient
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.claim import Holder, check_name, in_namespace
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.reports import harmless, read_facts
from fencing_sdk._values.timing import patience
from fencing_sdk._values.token import ENV_DEADLINE, ENV_HOLDER, ENV_TOKEN
from fencing_sdk.cli._options import ChosenStore, StoreOptions, state_folder
from fencing_sdk.cli._streams import Exit, say, write_out
from fencing_sdk.cli._ticket_file import TicketFile, TicketFileError
from fencing_sdk.errors import AcquireError, BackendError, ConfigurationError, TicketRefusedError, shown

_STREAM = "-"
_Work = Callable[[LockClient, LeaseTicket | None], Awaitable[int]]


@dataclass(slots=True)
class DetachedLock:
    """One lock, and the place of its ticket: a file, a standard stream, or a file of this user for each holder."""

    name: str | None
    """The name in the store, with its namespace. None: the one that the ticket has."""
    ticket: str | None
    holder: str | None
    where: StoreOptions
    as_json: bool = False
    quiet: bool = False
    _file: TicketFile | None = None

    def __post_init__(self) -> None:
        if self.holder == "":
            msg = "--holder is empty; is the variable in it not set?"
            raise ConfigurationError(msg)
        if (self.ticket is None) == (self.holder is None) or (self.holder and self.name is None):
            msg = "say whose lock it is by LOCK --holder ID, or by --ticket FILE; who gives the same is the same holder"
            raise ConfigurationError(msg)
        if self.name is not None:
            check_name(self.name)

    def hold(self, *, ttl: float, wait: float | None, label: str | None) -> int:
        """Take the lock, or renew it if the ticket holds it, and return the exit code."""
        patience(wait)  # before the ticket is there
        if self.ticket == _STREAM and self.as_json:
            msg = "--ticket - prints the ticket and nothing else; leave --json out"
            raise ConfigurationError(msg)

        async def work(locks: LockClient, known: LeaseTicket | None) -> int:
            if (task := asyncio.current_task()) is not None:  # a job of CI that is stopped leaves no line behind
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            name = known.name if known is not None else self.name or ""
            if known is not None and known.token is not None:
                with contextlib.suppress(TicketRefusedError):
                    return self._held(await locks.renew(known, ttl=ttl), taken=False)
                known = None  # a late request of the former owner must not reach the next lease
            if known is None:
                known = locks.detached(name, ttl=ttl, label=self._about() if label is None else label)
                if self._file is not None:
                    self._file.write(known)
            try:
                return self._held(await locks.take(replace(known, ttl=ttl), wait=wait), taken=True)
            except AcquireError:
                self._forget()
                return await self._taken(locks, name)
            except asyncio.CancelledError:
                await locks.release(known)
                self._forget()
                raise

        try:
            return self._with_ticket(work, wait)
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM

    def renew(self, *, ttl: float | None) -> int:
        """Start the ttl of the lock anew, which is the question for it too, and return the exit code."""

        async def work(locks: LockClient, known: LeaseTicket | None) -> int:
            assert known is not None
            try:
                return self._held(await locks.renew(known, ttl=ttl), taken=False)
            except TicketRefusedError as error:
                return self._not_held(Exit.LOST, str(error))

        return self._with_ticket(work, without=Exit.LOST)

    def release(self) -> int:
        """Give the lock back if the ticket holds it, and return the exit code."""

        async def work(locks: LockClient, known: LeaseTicket | None) -> int:
            assert known is not None
            await locks.release(known)
            self._forget()
            return self._not_held(0, "")

        return self._with_ticket(work, without=0)

    def _with_ticket(self, work: _Work, wait: float | None = 0.0, *, without: int | None = None) -> int:
        """Do *work* while no other command uses the ticket. *without*: the exit code if there is none."""
        store = self.where.found()
        if store is None:
            return Exit.UNAVAILABLE
        try:
            self._file = self._place(store)
            with contextlib.nullcontext() if self._file is None else self._file.alone(wait):
                known = self._read(only_from_file=without is None)
                if known is None and without is not None:
                    return self._not_held(without, "there is no ticket, so nothing is held")
                namespace = "" if known is None else known.namespace
                return store.ask(lambda locks: work(locks, known), namespace=namespace, wait=wait or 0.0)
        except TicketFileError as error:
            return self._not_held(error.code, f"{error}; nothing was done")

    def _place(self, store: ChosenStore) -> TicketFile | None:
        if self.ticket is not None:
            return None if self.ticket == _STREAM else TicketFile(self.ticket)
        import hashlib  # noqa: PLC0415  (it loads OpenSSL, and a ticket in a file of its own needs no digest)

        relative = store.url.startswith("sqlite:///") and not store.url.startswith("sqlite:////")
        parts = (os.getcwd() if relative else "", store.url, self.name or "", self.holder or "")  # noqa: PTH109
        try:
            folder = state_folder() / "tickets"
            folder.mkdir(mode=0o700, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            msg = f"no folder for the tickets of holders ({error}); set XDG_STATE_HOME, or give --ticket FILE"
            raise TicketFileError(msg, Exit.OUTPUT) from error
        return TicketFile(str(folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]))

    def _read(self, *, only_from_file: bool) -> LeaseTicket | None:
        known = None
        if self._file is not None:
            known = self._file.read()
        elif sys.stdin is not None and not only_from_file:
            known = LeaseTicket.load(sys.stdin.buffer.read().decode("ascii", "replace"))
        if known is not None and self.name not in {None, in_namespace(known.namespace, known.name)}:
            msg = f"the ticket is one of lock {shown(known.name)}; another lock needs a ticket of its own"
            raise ConfigurationError(msg)
        return known

    def _forget(self) -> None:
        if self._file is not None:
            self._file.forget()

    def _about(self) -> str:
        ticket = "fencing hold" if self._file is None else f"ticket {self._file.path.name}"
        return harmless(f"{self.holder or ticket} on {os.uname().nodename}")

    def _held(self, ticket: LeaseTicket, *, taken: bool) -> int:
        if self._file is not None:
            try:
                self._file.write(ticket)
            except TicketFileError as error:  # what stands there has the same owner
                say(f"{error}; the ticket that is there stays good")
        if self._file is None and taken:
            write_out(f"{ticket.dump()}\n")
        elif self.as_json:
            times = {"ttl": ticket.ttl, "until": ticket.until, "left": ticket.until - wall_seconds()}
            fields = {"lock": in_namespace(ticket.namespace, ticket.name), "held": True, "taken": taken}
            fields |= {"token": ticket.token, "holder": ticket.token and ticket.token.holder, **times}
            write_out(json.dumps(fields | {"ticket": _STREAM if self._file is None else str(self._file.path)}) + "\n")
        elif not self.quiet:
            token = ticket.token
            assert token is not None  # it is held
            write_out(f"{ENV_TOKEN}={token:d}\n{ENV_HOLDER}={token.holder}\n{ENV_DEADLINE}={ticket.until:.3f}\n")
        return 0

    def _not_held(self, code: int, problem: str, by: Sequence[Mapping[str, object]] = ()) -> int:
        if self.as_json:
            fields = {"lock": self.name, "held": False, "problem": problem or None, "by": by}
            write_out(json.dumps(fields) + "\n")
        elif problem and (not self.quiet or code == Exit.OUTPUT):
            say(problem)
        return code

    async def _taken(self, locks: LockClient, name: str) -> int:
        from fencing_sdk.cli.operate import as_fields, readable, span  # noqa: PLC0415  (for a refusal alone)

        holders: Sequence[Holder] = ()
        with contextlib.suppress(BackendError):  # report the refusal without them
            holders = await locks.holders(name)
        problems = [
            f"lock {shown(holder.name)} is held by {holder.id} (token {holder.token}) for {span(holder.held_for)}, "
            f"{span(holder.remaining)} left: {readable(read_facts(holder).summary)}".removesuffix(": ")
            for holder in holders
        ]
        problem = "; ".join(problems) or f"lock {shown(name)} was held a moment ago"
        return self._not_held(Exit.TAKEN, problem, [as_fields(holder) for holder in holders])
