"""
What a lease remembers of the transactions that its token has gone into, while they are open.

A write under a lock has to be committed before the lock is given back. The next holder reads right afterwards, and a
commit that comes later leaves it with the old row. A transaction does not show when it will be committed, so the lease
looks for open ones when it is given back, and refuses those that were open at its grant where these can be seen.

A transaction that has admitted the token before it wrote may end later. Its fence stays locked until the commit, so the
`admit` of the next holder waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fencing_sdk.errors import UsageError, shown

looks: list[Callable[[], tuple[object, ...]]] = []
"""What returns the transactions that are open in this thread: appended by integrations that can see them."""


class _Noted(NamedTuple):
    transaction: object
    """Kept, so that no other object gets its id."""
    is_open: Callable[[], bool]
    admitted: bool


class OpenWrites:
    """The transactions of one lease. A resource notes its own from any thread."""

    __slots__ = ("_noted", "older")

    def __init__(self, older: tuple[object, ...] = ()) -> None:
        self.older = older
        """The transactions that were open at the grant."""
        self._noted: dict[int, _Noted] = {}

    def note(self, transaction: object, is_open: Callable[[], bool], *, admitted: bool) -> None:
        """Note that the token was written in *transaction*, or *admitted*. The first note about a transaction stays."""
        for key, noted in list(self._noted.items()):
            if not noted.is_open():
                self._noted.pop(key, None)
        self._noted.setdefault(id(transaction), _Noted(transaction, is_open, admitted))

    def has_admitted(self, transaction: object) -> bool:
        """Return whether *transaction* has admitted the token before it wrote."""
        noted = self._noted.get(id(transaction))
        return noted is not None and noted.admitted

    def are_open(self) -> bool:
        """Return whether a transaction is open that has written the token without admitting it first."""
        return any(not noted.admitted and noted.is_open() for noted in list(self._noted.values()))


def late_commit(name: str, token: int) -> UsageError:
    """Return the error that refuses a write: of a row, or under a lock of this *name*."""
    return UsageError(
        f"a transaction that writes {shown(name)} with token {token:d} would be committed after the lock is given "
        "back, when the next holder has read the old row; take the lock outside and begin the transaction inside of it "
        "(Django: with locks.lock(...), transaction.atomic(durable=True)), or admit the token by SqlGuard in the "
        "transaction before it reads"
    )
