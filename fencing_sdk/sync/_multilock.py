"""Several locks, held together or not at all, by a thread."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import TracebackType

from fencing_sdk._lease import Lease
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.recipes.multilock import HeldLeases, MultiLock, acquire_all, release_all
from fencing_sdk.sync._lease import SyncLease, enter, leave
from fencing_sdk.sync._lock import Bridge


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

    __slots__ = ("_bridge", "_held", "_multilock")

    def __init__(self, bridge: Bridge, multilock: MultiLock) -> None:
        self._bridge = bridge
        self._multilock = multilock
        self._held: SyncHeldLocks | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What the locks protect, in the order in which they are acquired."""
        return self._multilock.names

    def __repr__(self) -> str:
        return f"<SyncMultiLock {', '.join(map(shown, self.names))}>"

    def __enter__(self) -> SyncHeldLocks:
        if self._held is not None:
            msg = "multilock() makes a block that is entered once; call it again for another one"
            raise UsageError(msg)
        bridge = self._bridge()
        handles: dict[str, Lease] = bridge.call(partial(acquire_all, self._multilock), undo=release_all)
        held = self._held = SyncHeldLocks({name: SyncLease(handle, bridge) for name, handle in handles.items()})
        for lease in held.values():
            enter(lease)
        return held

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._held is not None  # __enter__ made it
        blocks = ExitStack()  # each block sees what the one inside it raised
        for lease in self._held.values():
            blocks.push(partial(_leave, lease))
        blocks.__exit__(kind, raised, traceback)


def _leave(
    lease: SyncLease, _: type[BaseException] | None, raised: BaseException | None, __: TracebackType | None
) -> None:
    leave(lease, raised)
