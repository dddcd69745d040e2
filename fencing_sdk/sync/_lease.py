"""
A lease in the hands of a thread: what `fencing_sdk.Lease` says, calls that wait, and the ``with`` that releases it.

The handler of a signal may raise between any two steps of Python: also on the first step into the end of a block,
before anything was released. So a block belongs to an object that the ``with`` statement alone refers to: the
``__exit__`` that it looks up, which is another one for each statement. When the statement lets go of it, for whatever
reason, what was not released by then is released in the background.

An `ExitStack` looks ``__exit__`` up at the class. A block of it has no owner, and is found by its thread.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from fencing_sdk._lease import AnyLease, end_block, pop, push, state_of
from fencing_sdk._lease import Lease as TaskLease
from fencing_sdk._lease_state import LeaseState, raise_end
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk.errors import ConfigurationError, LossReason, UsageError, shown
from fencing_sdk.recipes.multilock import release_all
from fencing_sdk.sync._bridge import ClosedMeanwhileError, LoopThread, this_thread

R = TypeVar("R")
H = TypeVar("H", bound="Lease | Mapping[str, Lease]")

Bridge = Callable[[], LoopThread]
"""Returns the bridge of this process: a forked child has another one. It keeps its client from being dropped."""

LossCallback = Callable[[LossReason], object]
"""Called in a thread of its own with the reason of the loss."""


class Block:
    """One ``with``: what it holds, and how that is released."""

    __slots__ = ("_among", "_owner", "begun", "current", "ending", "held", "thread")

    def __init__(self, among: list[Block]) -> None:
        self._among = among
        self._owner: weakref.ref[object] | None = None
        self.thread = this_thread()
        self.begun = False
        self.current = True
        """True if its leases are those of the code that runs in it. A plain handle's is not."""
        self.held: Lease | Mapping[str, Lease] | None = None
        self.ending: Callable[[], object] | None = None
        """Called when the block is left or dropped. Idempotent."""
        among.append(self)

    def own_by(self, owner: object) -> None:
        """Drop the block when *owner* is gone."""
        self._owner = weakref.ref(owner, self.drop)

    def leases(self) -> tuple[Lease, ...]:
        """Return the leases of the block, in the order in which they were taken."""
        if self.held is None:
            return ()
        return (self.held,) if isinstance(self.held, Lease) else tuple(self.held.values())

    def hold(self, take: Callable[[], H]) -> H:
        """Hold what *take* returns, and make its leases current, in the order in which they were taken."""
        try:
            held = self.held = take()
            for lease in self.leases():
                self.thread.inside.append(state_of(lease))
                push(lease)
        except BaseException:
            self.drop()
            raise
        return held

    def leave(self, raised: BaseException | None) -> None:
        """
        End the block, whose body *raised*: release everything, the last lease first, and say what was lost.

        Raises:
            LeaseLostError: a lease is over, and the body raised nothing of its own.
        """
        try:
            if isinstance(self.held, Lease):
                self._leave(self.held, None, raised, None)
            else:
                blocks = contextlib.ExitStack()  # each lease sees what the one inside it raised
                for lease in self.leases():
                    blocks.push(partial(self._leave, lease))
                blocks.__exit__(None if raised is None else type(raised), raised, None)
        except BaseException:
            self.drop()
            raise
        self._end()

    def _leave(self, lease: Lease, _: object, raised: BaseException | None, __: object) -> None:
        _ = lease.lost_reason  # the clock, once more: a body that finished too late was not covered
        self._forget(lease)
        lease._release(raised)  # noqa: SLF001
        raise_end(state_of(lease), raised)

    def drop(self, _: object = None) -> None:
        """Release in the background what is still held, and end the block. Idempotent."""
        for lease in self.leases():
            lease._let_go()  # noqa: SLF001
            self._forget(lease)
        self._end()

    def _end(self) -> None:
        if self.ending is not None:
            self.ending()
        if self in self._among:
            self._among.remove(self)
        self._owner = None

    def _forget(self, lease: Lease) -> None:
        pop(lease)
        if (state := state_of(lease)) in self.thread.inside:
            self.thread.inside.remove(state)


def begin(blocks: list[Block], *, current: bool = True) -> Block:
    """Return the block of the ``with`` that this thread is about to enter."""
    thread = this_thread()
    expected = [block for block in blocks if block.thread is thread and not block.begun]
    block = expected[-1] if expected else Block(blocks)
    block.begun, block.current = True, current
    return block


class _OwnedExit(Generic[R]):
    """An ``__exit__`` that is another object for each ``with``, and owns its block."""

    def __init__(self, leave: Callable[[Any, Block, BaseException | None], R]) -> None:
        self._leave = leave

    def __get__(self, entered: Any, _: object) -> Callable[..., R]:
        if entered is None:
            return partial(self._end, None)
        block = Block(entered._blocks)  # noqa: SLF001
        leaving = partial(self._end, block, entered)  # no frame refers to it, so that a traceback does not keep it
        block.own_by(leaving)
        return leaving

    def _end(self, block: Block | None, entered: Any, _: object, raised: BaseException | None, __: object) -> R:
        return self._leave(entered, _left(entered, block if block is not None and block.begun else None), raised)


def _left(entered: Any, block: Block | None) -> Block:
    """
    Return the *block* that is left: where it is not known, the last one that this thread has begun.

    Raises:
        UsageError: another thread has begun it. It is released, also if it is the only one that can be meant.
    """
    thread, begun = this_thread(), [block for block in entered._blocks if block.begun]  # noqa: SLF001
    mine = [block for block in begun if block.thread is thread]
    block = mine[-1] if block is None and mine else block
    if block is not None and (block.thread is thread or not block.current):
        return block
    if block is not None or len(begun) == 1:  # it would be renewed for ever
        block = block or begun[0]
        for lease in block.leases():
            lease.release()
        block.drop()
    msg = (
        f"{shown(entered)} is left by a thread that did not enter it; use the plain handle there: "
        "with lock.acquire() as lease"
    )
    raise UsageError(msg)


def owned(
    leave: Callable[[Any, Block, BaseException | None], R],
) -> Callable[[Any, type[BaseException] | None, BaseException | None, TracebackType | None], R]:
    """Make an ``__exit__`` that owns its block, from a method that ends the block and takes what the body raised."""
    return cast("Callable[..., R]", _OwnedExit(leave))


def leave_block(_: object, block: Block, raised: BaseException | None) -> None:
    """End the *block*, and do nothing else."""
    block.leave(raised)


class Lease(AnyLease):
    """
    A lock that a thread holds, until its deadline.

    The client's own thread renews it, also while this one computes or blocks. When it is lost, nothing stops the
    code that runs: every read of `token` raises then, and so do `check` and the end of the ``with``. Safe to use
    from any thread. A plain handle may be left to a block: ``with lock.acquire() as lease`` releases it at the end.
    """

    __slots__ = ("_blocks", "_bridge", "_handle")

    def __init__(self, handle: TaskLease, bridge: Bridge) -> None:
        super().__init__(state_of(handle))
        self._handle = handle
        self._bridge = bridge
        self._blocks: list[Block] = []

    def __enter__(self) -> Self:
        if self._state.released:
            raise self._state.loss()
        begin(self._blocks, current=False).held = self
        return self

    __exit__ = owned(leave_block)

    def wait_lost(self, timeout: Seconds | None = None) -> LossReason | None:
        """
        Wait until the lease is over, at most *timeout* seconds; return why it was lost.

        None means that it was released, or that it is still held: look at `held`.
        """
        limit = None if timeout is None else seconds(timeout, "timeout")
        if self.held and limit != 0:
            with contextlib.suppress(ClosedMeanwhileError):
                self._bridge().call(partial(_over, self._state, limit), only=self._state.loop)
        return self.lost_reason

    def on_lost(self, callback: LossCallback) -> None:
        """
        Have *callback* called with the reason when the lease is lost, in a thread of its own, within milliseconds.

        It is not called for a lease that is released in time. What it raises is logged.

        Raises:
            ConfigurationError: *callback* is not a plain callable.
        """
        given: object = callback
        if not callable(given) or inspect.iscoroutinefunction(given):
            msg = f"on_lost() takes a plain function, which gets the reason, not {shown(given)}"
            raise ConfigurationError(msg)
        state, bridge = self._state, self._bridge()

        def call() -> None:
            try:
                callback(cast("LossReason", state.lost_reason))
            except Exception:  # noqa: BLE001  (of the user's, and no other thread waits for it)
                logger.exception("a callback of on_lost failed")

        def tell() -> None:
            if state.lost_reason is not None:
                bridge.call_aside(call)

        async def watch() -> None:
            await state.wait_lost()
            tell()

        try:
            bridge.watch(watch, state.loop)
        except ClosedMeanwhileError:
            tell()

    def renew(self) -> None:
        """Renew now, besides the heartbeat. Errors are those of `fencing_sdk.Lease.renew`."""
        self.check()
        try:
            self._bridge().call(self._handle.renew, only=self._state.loop)
        except ClosedMeanwhileError:
            raise self._state.loss() from None

    def release(self) -> None:
        """Release the lock. Idempotent and bounded, as `fencing_sdk.Lease.release`, whose errors it has."""
        self._release(None)

    def detach(self, keep: Seconds | None = None) -> LeaseTicket:
        """End the lease here without a release, and return its ticket: as `fencing_sdk.Lease.detach`."""
        self.check()
        try:
            return self._bridge().call(
                partial(self._handle.detach, keep), undo=self._state.keeper.release_ticket, only=self._state.loop
            )
        except ClosedMeanwhileError:
            raise self._state.loss() from None

    def _release(self, raised: BaseException | None) -> None:
        with contextlib.suppress(ClosedMeanwhileError):  # whatever closed the client has released it
            self._bridge().call(partial(end_block, self._handle, raised), only=self._state.loop)

    def _let_go(self) -> None:
        """Have the loop release the lock, unless that was done. Nothing waits for it."""
        state = self._state
        if not state.released and state.pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed, which released it
                state.loop.call_soon_threadsafe(_abandon, self._handle)  # which lives until then: else it warns


class PermitLease(Lease):
    """A permit of a `Semaphore` that is held, until its deadline."""

    __slots__ = ()

    @property
    def permit(self) -> int:
        """The number of the permit: from 0 to below the number of permits. No other holder has it at the same time."""
        return self._state.permit or 0


async def release_leases(*leases: Lease | None) -> None:
    """Undo an acquisition whose thread was interrupted. For this package alone."""
    await release_all(lease._handle for lease in leases if lease is not None)  # noqa: SLF001  (the one door to it)


def _abandon(handle: TaskLease) -> None:
    state = state_of(handle)
    state.keeper.abandon(state)


async def _over(state: LeaseState, limit: float | None) -> None:
    with move_on_after(limit):
        await state.wait_lost()
