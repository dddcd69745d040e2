"""Several locks, held together or not at all, by a thread."""

from __future__ import annotations

import threading

from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.recipes.multilock import HeldLeases, MultiLock, acquire_all
from fencing_sdk.sync._lease import Block, Bridge, SyncLease, begin, give_back, owned
from fencing_sdk.sync._thread_call import Cancel


class SyncHeldLocks(HeldLeases[SyncLease]):
    """
    The leases of a `SyncMultiLock` that is held, by the names of the locks, in the order of their names.

    ``held["accounts/7"].token`` is the token of one lock, ``held.tokens`` those of all.
    """

    __slots__ = ()


class SyncMultiLock(Uncopied):
    """
    Several locks for a thread, described: ``with locks.multilock("accounts/1", "accounts/7") as held:``.

    Enter it once; call `SyncLockClient.multilock` again for another block. The end of the block raises `LeaseLostError`
    when one of the locks was lost, and names it.
    """

    __slots__ = ("_blocks", "_bridge", "_cancel", "_entered", "_multilock")

    def __init__(self, bridge: Bridge, multilock: MultiLock, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._cancel = None if cancel is None else Cancel(cancel, ", ".join(multilock.names))
        self._multilock = multilock
        self._entered = False
        self._blocks: list[Block] = []

    @property
    def names(self) -> tuple[str, ...]:
        """What the locks protect, in the order in which they are acquired."""
        return self._multilock.names

    def __repr__(self) -> str:
        return f"<SyncMultiLock {', '.join(map(shown, self.names))}>"

    def __enter__(self) -> SyncHeldLocks:
        if self._entered:
            msg = "multilock() makes a block that is entered once; call it again for another one"
            raise UsageError(msg)
        self._entered = True
        block, bridge = begin(self._blocks), self._bridge()

        async def taken() -> SyncHeldLocks:
            handles = await acquire_all(self._multilock)
            return SyncHeldLocks({name: SyncLease(handle, bridge, self._bridge) for name, handle in handles.items()})

        try:
            held = block.held = bridge.call(taken, undo=_give_back, cancel=self._cancel)
            block.enter()
        except BaseException:
            block.drop()
            raise
        return held

    def _end(self, block: Block, raised: BaseException | None) -> None:
        block.leave(raised)

    __exit__ = owned(_end)


async def _give_back(held: SyncHeldLocks) -> None:
    await give_back(*held.values())
