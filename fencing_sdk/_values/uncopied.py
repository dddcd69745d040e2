"""What stands for something that one process holds, and so has no twin: clients, locks, leases, stores and guards."""

from __future__ import annotations

from typing import NoReturn

from fencing_sdk.errors import UsageError

__all__ = ["Uncopied"]


class Uncopied:
    """
    The base of what is neither copied nor pickled.

    A twin of a client would close the first one when it is dropped, that of a lease would give its lock back, and a
    pickled client, backend or guard would carry the password of its store.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """
        Refuse `copy` and `pickle`, which both ask here.

        Raises:
            UsageError: always.
        """
        msg = (
            f"{type(self).__name__} cannot be copied or pickled, because it belongs to this process; share the object "
            "itself between tasks or threads, and let another process make its own: it needs the URL, the name "
            "of the lock, or the token"
        )
        raise UsageError(msg)
