"""
One term of an election: a lease that the loop has got, and the block that works under it.

The block is that of a lock, with a scope of its own inside. The lock's scope cancels the body when the lease is lost.
The inner one cancels it when the term is to end although the lease is held, so that the body cleans up under a lease
that is still renewed, and the lock is given back after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from fencing_sdk._engine.cancellation import PlainScope, paced_scope
from fencing_sdk._engine.engine import Engine
from fencing_sdk._lease import AnyLease, Lease, state_of
from fencing_sdk._lock import Lock, enter_with
from fencing_sdk._values import forks
from fencing_sdk._values.observers import logger
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import LeaseLostError, UsageError, shown


class Term(Protocol):
    """A block under the lead, of a task or of a thread."""

    @property
    def lease(self) -> AnyLease:
        """Its lease."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether the body was asked to end although the lease is held."""
        ...

    def stop(self) -> None:
        """Ask the body to end."""
        ...


@dataclass(slots=True)
class ElectionRoles:
    """What one process does in an election."""

    terms: dict[Term, None] = field(default_factory=dict)
    """The blocks whose lock was not given back."""
    candidacies: set[object] = field(default_factory=set)
    """Loops that wait for the lead."""
    silent: bool = False
    """Whether the store has not answered them for a ttl."""


class ElectionState:
    """What an election, its loops and their terms know of each other."""

    __slots__ = ("__weakref__", "_roles", "drain", "engine", "name")

    def __init__(self, name: str, engine: Callable[[], Engine], drain: float) -> None:
        self.name = name
        self.engine = engine
        self.drain = drain
        """Seconds for which a body may go on when the client drains."""
        self._roles: dict[int, ElectionRoles] = {}

    @property
    def here(self) -> ElectionRoles:
        """The roles of this process: a forked child has none of its parent's."""
        roles = self._roles.get(forks.here())
        return self._roles.setdefault(forks.here(), ElectionRoles()) if roles is None else roles

    def heard(self) -> None:
        """The store has answered a candidate that another process leads."""
        self.here.silent = False

    @property
    def leading(self) -> bool:
        """Whether this process leads at this moment, by the clock."""
        return any(term.lease.held for term in tuple(self.here.terms))


class ElectionTerm(Uncopied):
    """
    The lead of this process, for as long as its lease is held: ``async with term as lease``, at once and once.

    The body is cancelled when the lead is lost, when the election resigns, and when the client drains. These ends are
    no errors: the loop goes on. Everything else that the body raises leaves as it is.
    """

    __slots__ = ("_block",)

    def __init__(self, block: TermBlock) -> None:
        self._block = block

    def __repr__(self) -> str:
        return f"<ElectionTerm of {self.lease!r}>"

    @property
    def lease(self) -> Lease:
        """The lease of the term."""
        return self._block.lease

    async def __aenter__(self) -> Lease:
        self._block.enter()
        return self.lease

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._block.leave(raised, traceback)


class TermBlock:
    """What an `ElectionTerm` does, and how the loop and the election end it."""

    __slots__ = (
        "_election",
        "_forfeited",
        "_forfeiting",
        "_forget",
        "_lock",
        "_loop",
        "_scope",
        "_timer",
        "lease",
        "stopped",
    )

    def __init__(self, election: ElectionState, lock: Lock, lease: Lease) -> None:
        self._election = election
        self._lock = lock
        self.lease = lease
        """The lease of the term."""
        self.stopped = False
        """Whether the body was asked to end although the lease is held."""
        self._scope: PlainScope | None = None
        self._forfeited: str | None = None  # when it should have been entered, once it was given back
        self._forget: Callable[[], object] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(lease.ttl, self._forfeit, "within one ttl", context=Context())
        election.here.terms[self] = None

    def enter(self) -> None:
        """
        Begin the block.

        Raises:
            UsageError: it has begun before, or its lease was given back.
        """
        if self._forfeited is not None:
            raise not_entered(self._election, self._forfeited, "async with")
        if self._scope is not None or self not in self._election.here.terms:
            msg = f"a term of election {shown(self._election.name)} is entered once, and in its loop"
            raise UsageError(msg)
        draining = self._election.engine().draining
        self._timer.cancel()
        enter_with(self._lock, self.lease)
        self._scope = paced_scope(state_of(self.lease).timing.safety_buffer / 2)
        self._scope.__enter__()
        self._forget = draining.on_begin(self._on_drain)
        if self.stopped:
            self._scope.cancel()

    async def leave(self, raised: BaseException | None, traceback: TracebackType | None) -> bool:
        """End the block and give the lock back; return whether *raised* was nothing but the end of the term."""
        self._forget()
        self._timer.cancel()
        end = self._close_scope(raised)
        try:
            await self._lock.__aexit__(None if end is None else type(end), end, None if end is None else traceback)
        except LeaseLostError as error:
            end = error
        finally:
            self._election.here.terms.pop(self, None)
        if end is None or is_end_of(self.lease, end):
            return True
        if end is not raised:
            raise end
        return False

    def stop(self) -> None:
        """Ask the body to end. The lease is held, and renewed, until it has."""
        self.stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def check_entered(self) -> None:
        """
        Give back a term that was not entered when the loop goes on.

        Raises:
            UsageError: it was not, and its body would have run without the lead.
        """
        if self._scope is None:
            self._timer.cancel()
            self._election.here.terms.pop(self, None)
            self._forfeited = self._forfeited or "before its loop went on"
            await self.lease.release()
            raise not_entered(self._election, self._forfeited, "async with")

    def left_behind(self) -> None:
        """Give back a term that is not entered in this turn of the event loop: its loop was left. From any thread."""
        if self._scope is None and self in self._election.here.terms:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._forfeit, "before its loop was left", context=Context())

    def _on_drain(self) -> None:
        if self._election.drain > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._election.drain, self.stop, context=Context())
        else:
            self.stop()

    def _forfeit(self, when: str) -> None:
        """Give back a term that is not entered: the loop was left, or does something else first."""
        if self._scope is not None or self not in self._election.here.terms:
            return
        self._timer.cancel()
        self._forfeited = when
        name = shown(self._election.name)
        logger.warning("a term of election %s was not entered %s; its lock is given back", name, when)
        self._election.here.terms.pop(self, None)
        self._forfeiting = self._loop.create_task(self.lease.release(), context=Context())

    def _close_scope(self, raised: BaseException | None) -> BaseException | None:
        """Close the inner scope and return what is still on its way out; a cancellation from outside is."""
        scope = self._scope
        assert scope is not None  # __aenter__ made it
        try:
            swallowed = scope.__exit__(None if raised is None else type(raised), raised, None)
        except RuntimeError:  # another scope is inside, or this is another task: the lock says so
            scope.give_up()
            return raised
        except BaseException as rest:  # noqa: BLE001  (the part of a group that was not ours; it leaves)
            return rest
        return None if swallowed else raised


def not_entered(election: ElectionState, when: str, how: str) -> UsageError:
    """Say *when* a term should have been entered, and was not."""
    return UsageError(
        f"a term of election {shown(election.name)} was not entered {when}, so its lock was given back; "
        f"write '{how} term as lease:' as the first line of the loop"
    )


def is_end_of(lease: AnyLease, error: BaseException) -> bool:
    """Whether *error* says nothing but that this very lease is over."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_end_of(lease, one) for one in error.exceptions)
    own = (lease.name, state_of(lease).number)
    return isinstance(error, LeaseLostError) and (error.name, error.token) == own
