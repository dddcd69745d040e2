"""
An election for threads: the loop that stands is that of the client, and the body runs in the thread that asked.

    for term in locks.election("scheduler"):
        with term as lease:
            while not term.over:            # lost, resigned, or the client drains
                plan(lease.token)

A thread cannot be cancelled. So a term that is over goes on until its body ends, and its lock is given back after that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from fencing_sdk._values import forks
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import AcquireCancelledError, LeaseLostError, UsageError, shown
from fencing_sdk.recipes.election import Election, ElectionStanding, candidacy_of
from fencing_sdk.recipes.election_term import ElectionState, is_end_of, not_entered
from fencing_sdk.sync._lease import Block, Bridge, SyncLease, begin, give_back, owned
from fencing_sdk.sync._thread_call import Cancel

P = ParamSpec("P")
R = TypeVar("R")


class SyncElectionTerm(Uncopied):
    """
    The lead of this process, for as long as its lease is held: ``with term as lease``, at once and once.

    A `LeaseLostError` that says that this lease is over ends the block without an error, and the loop goes on.
    Everything else that the body raises leaves as it is.
    """

    __slots__ = ("_block", "_blocks")

    def __init__(self, block: SyncTermBlock) -> None:
        self._block = block
        self._blocks: list[Block] = []

    def __repr__(self) -> str:
        return f"<SyncElectionTerm of {self.lease!r}>"

    @property
    def lease(self) -> SyncLease:
        """The lease of the term."""
        return self._block.lease

    @property
    def over(self) -> bool:
        """Whether the body is to end: the lead was lost, the election resigned, or the client drains."""
        return self._block.over

    def __enter__(self) -> SyncLease:
        self._block.enter(self._blocks)
        return self._block.lease

    def _end(self, block: Block, raised: BaseException | None) -> bool:
        return self._block.leave(block, raised)

    __exit__ = owned(_end)


class SyncTermBlock:
    """What a `SyncElectionTerm` does, and how the loop and the election end it."""

    __slots__ = ("_election", "_generation", "entered", "lease", "stopped")

    def __init__(self, election: ElectionState, lease: SyncLease) -> None:
        self._election = election
        self._generation = forks.here()
        self.lease = lease
        """The lease of the term."""
        self.entered = False
        self.stopped = False
        """Whether the election resigned."""

    @property
    def over(self) -> bool:
        """See `SyncElectionTerm.over`."""
        return self.stopped or not self.lease.held or self._election.engine().draining.begun

    @property
    def _inherited(self) -> bool:
        """Whether it is the term of a parent process."""
        return self._generation != forks.here()

    def win(self) -> None:
        """Make it a term of the election, which refers to it from now on. The caller ends it."""
        self._election.here.terms[self] = None

    def stop(self) -> None:
        """Ask the body to end. The lease is held, and renewed, until it has."""
        self.stopped = True

    def enter(self, blocks: list[Block]) -> None:
        """
        Begin the block, as the last of *blocks*.

        Raises:
            UsageError: it has begun before, its lease was given back, or it is the term of a parent process.
        """
        if self.entered:
            msg = f"a term of election {shown(self._election.name)} is entered once"
            raise UsageError(msg)
        if self._inherited:
            msg = (
                f"this term of election {shown(self._election.name)} was begun before a fork, and is the parent's; "
                "go on with the loop in the child"
            )
            raise UsageError(msg)
        if self not in self._election.here.terms:
            raise not_entered(self._election, "before its loop was left", "with")
        block = begin(blocks)
        block.ending = self.end
        try:
            block.held = self.lease
            self.entered = True
            block.enter()
        except BaseException:
            block.drop()
            raise

    def end(self) -> None:
        """It is no term of the election any more."""
        self._election.here.terms.pop(self, None)

    def leave(self, block: Block, raised: BaseException | None) -> bool:
        """End the block and give the lock back; return whether *raised* was nothing but the end of the term."""
        try:
            block.leave(raised)
        except LeaseLostError as error:
            if not is_end_of(self.lease, error):
                raise
        return raised is not None and is_end_of(self.lease, raised)

    def forfeit(self) -> None:
        """Give back a term that was not entered: the loop was left, or went on without it."""
        if not self.entered:
            self.end()
            self.lease.release()

    def check_entered(self) -> None:
        """
        Refuse to go on with the loop after a term that was not entered.

        Raises:
            UsageError: its body would have run without the lead.
        """
        if not self.entered and not self._inherited:
            raise not_entered(self._election, "before its loop went on", "with")


class SyncElection(Uncopied):
    """
    An election for threads, described. Nothing is sent until ``for`` stands in it. Made by `SyncLockClient.election`.

    The loop ends in order when the client drains, or when ``cancel`` is set while it waits. It raises what is no
    outage, as an `Election` for tasks.
    """

    __slots__ = ("_bridge", "_cancel", "_election")

    def __init__(self, bridge: Bridge, election: Election, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._cancel = None if cancel is None else Cancel(cancel, election.name)
        self._election = election

    @property
    def name(self) -> str:
        """What is led, without the client's namespace."""
        return self._election.name

    @property
    def leading(self) -> bool:
        """Whether this process leads at this moment, by the clock."""
        return self._election.leading

    @property
    def standing(self) -> ElectionStanding:
        """How this process stands, for health endpoints."""
        return self._election.standing

    def __repr__(self) -> str:
        return f"<SyncElection {shown(self.name)} {self.standing.value}>"

    def leader(self) -> Holder | None:
        """Tell who leads, here or elsewhere, or None. Errors are those of `Election.leader`."""
        return self._bridge().call(self._election.leader)

    def resign(self) -> None:
        """
        End the term of this process, if it leads: `SyncElectionTerm.over` is true from now on.

        The lock is given back when the body has ended, and the loop stands again, behind those who wait. To leave the
        election, ``break`` out of the loop.

        Raises:
            UsageError: the client is not open.
        """
        self._election.resign()

    def __iter__(self) -> Iterator[SyncElectionTerm]:
        resigned = False
        while (block := self._stand(resigned=resigned)) is not None:
            try:
                block.win()
                yield SyncElectionTerm(block)
            finally:
                block.forfeit()
            block.check_entered()
            resigned = block.stopped

    def _stand(self, *, resigned: bool) -> SyncTermBlock | None:
        """Wait for the lead as this process: a forked child may go on with the loop of its parent."""
        bridge, candidacy = self._bridge(), candidacy_of(self._election)

        async def stood() -> SyncTermBlock | None:
            handle = await candidacy.stand(resigned=resigned)
            lease = None if handle is None else SyncLease(handle, bridge, self._bridge)
            return None if lease is None else SyncTermBlock(candidacy.election, lease)

        try:
            return bridge.call(stood, undo=_give_back, cancel=self._cancel)
        except AcquireCancelledError:
            return None


async def _give_back(block: SyncTermBlock | None) -> None:
    if block is not None:
        await give_back(block.lease)


def as_leader(
    function: Callable[P, R], election_of: Callable[[tuple[object, ...], dict[str, object]], SyncElection]
) -> Callable[P, R | None]:
    """Run *function* as the leader of the election that the arguments of each call name."""

    @functools.wraps(function)
    def elected(*args: P.args, **kwargs: P.kwargs) -> R | None:
        for term in election_of(args, kwargs):
            returned: list[R] = []
            with term as lease:
                returned.append(function(*args, **kwargs))
                lease.check()  # a function that ended too late was not covered: another term
            if returned and lease.lost_reason is None:  # its release may have found that, too
                return returned[0]
        return None

    return elected
