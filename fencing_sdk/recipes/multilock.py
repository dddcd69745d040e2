"""
Several locks, held together or not at all.

    async with locks.multilock("accounts/1", "accounts/7", wait=5, fences=[ledger]) as held:
        async with pool.acquire() as connection, connection.transaction():
            await ledger.admit_all(connection, held.tokens)

They are acquired one after the other, in the order of their names in the store, so that two callers which need the same
locks never wait for each other in a circle. A caller that gets one late releases the ones before it: by its
patience, which all of them share, or because one of those was lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Generic, TypeVar

from fencing_sdk._lease import AnyLease, Lease, held_here
from fencing_sdk._lock import Lock, enter
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.token import Token
from fencing_sdk.errors import AcquireTimeoutError, ConfigurationError, shown

L = TypeVar("L", bound=AnyLease)

_NO_PATIENCE_LEFT = 1e-9
"""Seconds to wait when the patience is over: 0 would mean that the caller asked for one try."""


class HeldLeases(Mapping[str, L], Uncopied, Generic[L]):
    """The leases of several locks, by the names of the locks, in the order of their names."""

    __slots__ = ("_leases",)

    def __init__(self, leases: Mapping[str, L]) -> None:
        self._leases = dict(leases)

    def __getitem__(self, name: str) -> L:
        return self._leases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self._leases.values()))}>"

    @property
    def tokens(self) -> dict[str, Token]:
        """
        The fencing token of each lock, by its name: what ``admit_all`` of a guard takes. Read it at the last moment.

        Raises:
            LeaseLostError: one of the leases is over. Every read compares the clock with the deadlines.
        """
        return {name: lease.token for name, lease in self._leases.items()}

    def check(self) -> None:
        """
        Do nothing while every lease is held.

        Raises:
            LeaseLostError: one of the leases is over; the error names it.
        """
        for lease in self._leases.values():
            lease.check()


class HeldLocks(HeldLeases[Lease]):
    """
    The leases of a `MultiLock` that is held, by the names of the locks, in the order of their names.

    ``held["accounts/7"].token`` is the token of one lock, ``held.tokens`` those of all.
    """

    __slots__ = ()


class MultiLock(Uncopied):
    """
    Several locks, described. Nothing is sent until ``async with`` enters it. Made by `LockClient.multilock`.

    The body is cancelled when one of the locks is lost, and `LeaseLostError` names that one. The others are released.
    """

    __slots__ = ("_clock", "_locks", "_wait")

    def __init__(self, locks: Sequence[Lock], wait: float | None, clock: Clock) -> None:
        self._locks = locks
        self._wait = wait
        self._clock = clock

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which the locks are acquired."""
        return tuple(lock.name for lock in self._locks)

    def __repr__(self) -> str:
        return f"<MultiLock {', '.join(map(shown, self.names))}>"

    async def __aenter__(self) -> HeldLocks:
        take = partial(enter, under=held_here())  # not those that it takes: its body has not begun
        return HeldLocks(await self._take_all(take, lambda lock, _: lock))

    async def _take_all(
        self, take: Callable[..., Awaitable[Lease]], held_by: Callable[[Lock, Lease], AbstractAsyncContextManager[Any]]
    ) -> dict[str, Lease]:
        """Take the locks in order. If one cannot be taken, release those already taken, by leaving *held_by*."""
        began, wait = self._clock.now(), self._wait
        leases: dict[str, Lease] = {}
        async with AsyncExitStack() as taken:
            for lock in self._locks:
                if self._wait:
                    wait = max(_NO_PATIENCE_LEFT, began + self._wait - self._clock.now())
                try:
                    lease = leases[lock.name] = await take(lock, wait=wait)
                except AcquireTimeoutError as error:
                    raise AcquireTimeoutError(error.name, self._clock.now() - began) from None
                taken.push_async_exit(held_by(lock, lease))
            taken.pop_all()  # held from here on: the caller leaves them
        return leases

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        held = AsyncExitStack()  # every lock pairs the exit with its own entry, so nothing is kept here
        for lock in self._locks:
            held.push_async_exit(lock)
        return await held.__aexit__(kind, raised, traceback)


async def acquire_all(multilock: MultiLock) -> dict[str, Lease]:
    """
    Take all locks of *multilock* as plain handles. For this package alone: the caller releases every one of them.

    Raises:
        LeaseLostError: one was lost during the wait for the others.
    """
    leases = await multilock._take_all(Lock.acquire, lambda _, lease: lease)  # noqa: SLF001  (the one door to it)
    try:
        for lease in leases.values():
            lease.check()
    except BaseException:
        await release_all(leases.values())
        raise
    return leases


async def release_all(handles: Iterable[Lease]) -> None:
    """Release plain handles, the last one first."""
    for handle in reversed(list(handles)):
        await handle.release()


def check_names(names: Iterable[object], fences: object) -> list[str]:
    """
    Return the *names* in the order in which every client acquires them.

    The store has them in a namespace, a prefix that all of them share and that does not change their order.

    Raises:
        ConfigurationError: the names are missing or in a list, one of them occurs twice, or a fence has a resource of
            its own.
    """
    names = tuple(names)
    if len(names) == 1 and isinstance(names[0], Iterable) and not isinstance(names[0], str):
        msg = "multilock() takes each name as an argument of its own; pass multilock(*names)"
        raise ConfigurationError(msg)
    checked = sorted(check_name(name) for name in names)
    if not checked:
        msg = "multilock() needs names, such as multilock('accounts/1', 'accounts/7')"
        raise ConfigurationError(msg)
    for name, following in pairwise(checked):
        if name == following:
            msg = f"multilock() has the name {shown(name)} twice; each lock is held once, so pass it once"
            raise ConfigurationError(msg)
    if isinstance(fences, Sequence) and any(isinstance(fence, tuple) for fence in fences):
        msg = (
            "fences of multilock() must be guards without a resource: the tokens of two locks cannot be compared, so "
            "each lock raises the fence of the resource that is named like it"
        )
        raise ConfigurationError(msg)
    return checked
