"""
Locks for the processes of one machine, in one SQLite file: no server, and no dependency.

    connect("sqlite:///locks.db")               # relative to the working directory
    connect("sqlite:////var/lib/app/locks.db")  # absolute

Tokens: hybrid by default, kept in the file. Clock: the machine's boot clock, read under the
file's write lock. Waiters: first come, first served, across processes, rung by a datagram.

    __init__.py  the backend, its options and its URL
    lines.py     what the thread does with the open file, and the lines in it
    schema.sql   the tables
    file.py      one connection to the file: transactions, patience, and the errors of SQLite
    thread.py    the one thread that touches SQLite, and forks
    sockets.py   the datagrams that ring in another process
    file_system.py  what the file is on, for the warning of an opening and for the doctor
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.clock import BootClock, boot_identity, wall_ticks
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import logger
from fencing_sdk._values.url import option_names, split_url
from fencing_sdk.abc import ALL_MODES, Bell, Kept
from fencing_sdk.abc.line import Line, TokenSource
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.bells import Bells, bell_key, message_of_end
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.tokens import token_source
from fencing_sdk.backends.sqlite.file import SYNCHRONOUS, LockFile, busy, translated
from fencing_sdk.backends.sqlite.file_system import NETWORK, file_system_of
from fencing_sdk.backends.sqlite.lines import LineFile, Message, Step
from fencing_sdk.backends.sqlite.sockets import BellSocket, open_bell_socket, send_datagram
from fencing_sdk.backends.sqlite.thread import SqlThread
from fencing_sdk.errors import ConfigurationError, shown

T = TypeVar("T")

__all__ = ["SqliteBackend", "from_url"]


class SqliteBackend(Uncopied):
    """
    A lock service in a file, shared by every process that names the same one.

    Not for network file systems, and not across machines. Processes must see the same boot clock:
    containers with a time namespace of their own do not exclude each other, only their tokens do.

    Args:
        path: The file, created when missing; its folder is not, and ``~`` is not expanded. A relative
            path counts from the working directory at the first call.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with a new file.

        synchronous: ``"full"``, or ``"normal"``, which saves an fsync per grant and may forget the
            last grants in a power failure (not in a crash of the process).

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    modes = ALL_MODES
    rings = True

    def __init__(self, path: str | os.PathLike[str], *, tokens: str = "hybrid", synchronous: str = "full") -> None:
        if synchronous not in tuple(SYNCHRONOUS):
            msg = f"synchronous must be 'full' or 'normal', got {shown(synchronous)}"
            raise ConfigurationError(msg)
        self._path = _checked_path(path)
        self._durable, self._hybrid = synchronous != "normal", tokens != "counter"
        self._busy = threading.Event()
        opener = _Opener(self._path, synchronous, token_source(tokens, wall_ticks), self._busy)
        self._sql = SqlThread(opener)
        self._errors_of = partial(ErrorTranslation, partial(translated, self._path))
        self._bells = Bells()
        self._socket: BellSocket | None = None

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._ask("open", lambda _: None)

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        address = self._address()

        def step(line: Line, now: float) -> Place | Busy:
            return line.draw(claim, now, only_if_it_holds=only_if_it_holds, address=address)

        return await self._run("acquire", claim.name, step, claim.owner, draws=True)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        """See `fencing_sdk.abc.Backend.keep`."""
        order = sorted(range(len(tickets)), key=lambda at: tickets[at][0].name)  # each line is read once
        steps = [(tickets[at][0].name, partial(_keep, *tickets[at])) for at in order]
        asked_by = {bell_key(claim.owner) for claim, _ in tickets}
        answers = await self._carry_out("renew", steps, asked_by, urgent=True)
        places = dict(zip(order, answers, strict=True))
        return [places[at] for at in range(len(tickets))]

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        return await self._run("release", claim.name, lambda line, now: line.give_back(claim.owner, now, after))

    async def pass_on(self, claim: Claim, heir: Claim) -> Place | Gone:
        """See `fencing_sdk.abc.PassesOn.pass_on`."""
        address = self._address()

        def step(line: Line, now: float) -> Place | Gone:
            return line.pass_on(claim.owner, heir, now, address)

        return await self._run("transfer", claim.name, step, heir.owner, draws=True)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        over = await self._run("revoke", name, lambda line, now: line.end(token, reason, now))
        _send([(str(row.address), message_of_end(row, reason)) for row in over if row.address])
        return bool(over)

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        return await self._carry_out("inspect", [(name, Line.seen) for name in names], ())

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        page = await self._ask("list", partial(LineFile.names, prefix=prefix, after=cursor or "", limit=limit))
        found = [name for name in page if name.startswith(prefix)]
        return found, page[-1] if len(found) == limit else None

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._bells.add(claim, bell)

    async def aclose(self) -> None:
        """See `fencing_sdk.abc.Backend.aclose`."""
        bell_socket, self._socket = self._socket, None
        if bell_socket is not None:
            bell_socket.close()
        closed = self._sql.close()
        if closed is not None:
            await asyncio.wrap_future(closed)

    def _address(self) -> str:
        """Name the socket at which this client hears of its tickets; "" where there is none."""
        if self._socket is None or not self._socket.is_current:
            if self._socket is not None:
                self._socket.close()
            self._socket = open_bell_socket(self._bells.hear)
        return "" if self._socket is None else self._socket.name

    async def _run(
        self, operation: str, name: str, step: Callable[[Line, float], T], asked_by: str = "", *, draws: bool = False
    ) -> T:
        (answer,) = await self._carry_out(operation, [(name, step)], {bell_key(asked_by)}, draws=draws)
        return answer

    async def _carry_out(
        self,
        operation: str,
        steps: Sequence[Step[T]],
        asked_by: Collection[str],
        *,
        draws: bool = False,
        urgent: bool = False,
    ) -> Sequence[T]:
        """Carry out *steps*, and ring for the tickets that hold by them, except those of the askers."""
        answers, messages = await self._ask(operation, partial(LineFile.run, steps=steps, draws=draws), urgent=urgent)
        _send([message for message in messages if message[1].partition(" ")[0] not in asked_by])
        return answers

    async def _ask(self, operation: str, do: Callable[[LineFile], T], *, urgent: bool = False) -> T:
        with self._errors_of(operation):
            try:
                return await asyncio.wrap_future(self._sql.submit(do, urgent=urgent))
            except asyncio.CancelledError as error:
                if self._busy.is_set():
                    error.__cause__ = busy(self._path, operation)
                raise


class _Opener:
    """Opener of the file. It refers to no backend, so that a backend that is dropped ends its thread."""

    def __init__(self, path: str, synchronous: str, next_token: TokenSource, waits: threading.Event) -> None:
        self._path = Path(path)
        self._synchronous = synchronous
        self._next_token = next_token
        self._waits = waits
        self._warned = False

    def __call__(self) -> LineFile:
        self._path = self._path.absolute()  # once: a later change of the working directory moves nothing
        file = LockFile(self._path, synchronous=self._synchronous, clock=BootClock(), busy=self._waits)
        opened = LineFile(file, self._next_token, boot_identity())
        try:
            opened.sweep()
            self._warn()
        except BaseException:
            opened.close()
            raise
        return opened

    def _warn(self) -> None:
        """Log once that the file is where locks do not exclude: nothing fails there, and few run the doctor."""
        kind = "" if self._warned else file_system_of(self._path)
        self._warned = True
        if kind in NETWORK:
            logger.warning(
                "SQLite: %a is on %s: two machines may hold one lock; run fencing doctor", str(self._path), kind
            )


def _keep(claim: Claim, number: int, line: Line, now: float) -> Place | Gone:
    return line.keep(claim, now, number)


def _send(messages: Sequence[Message]) -> None:
    for address, text in messages:
        send_datagram(address, text)


def from_url(url: str, **options: object) -> SqliteBackend:
    """
    Make a backend for ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; see `SqliteBackend`.

    The path is percent-decoded: ``%3F`` is a question mark and ``%23`` a hash.

    Raises:
        ConfigurationError: the URL names no file, or an option is unknown.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(SqliteBackend))
    parts = split_url(url)
    if parts.user is not None or parts.hosts:
        msg = "write sqlite:///relative.db or sqlite:////absolute.db; a file URL has no host, so it needs three slashes"
        raise ConfigurationError(msg)
    return SqliteBackend(unquote(parts.path.removeprefix("/"), errors="surrogateescape"), **chosen)


def _checked_path(path: object) -> str:
    """Return *path* as a text; raise `ConfigurationError` if it names no file."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        msg = f"path must be a str or a pathlib.Path, not {type(path).__name__}"
        raise ConfigurationError(msg)
    if path in {"", ":memory:"}:
        msg = "locks in SQLite need a file, such as sqlite:///locks.db; within one process use memory://"
        raise ConfigurationError(msg)
    if "\0" in path:
        msg = "path has a NUL character"
        raise ConfigurationError(msg)
    return path
