"""The part of a client that makes what several owners may hold: semaphores and read/write locks."""
# ruff: noqa: PLC0415  (a recipe is loaded by the method that makes one)

from __future__ import annotations

from abc import ABC, abstractmethod
from types import FunctionType
from typing import TYPE_CHECKING, Unpack

from fencing_sdk._arguments import LockOptions, check_shares
from fencing_sdk._lock import Lock, in_mode
from fencing_sdk._values.claim import READER, WRITER
from fencing_sdk.abc import Backend

if TYPE_CHECKING:
    from fencing_sdk.recipes.shares import ReadWriteLock, Semaphore


class SharingClient(ABC):
    """What `LockClient` inherits: it brings the backend and the locks."""

    _backend: Backend
    _namespace: str

    def __init_subclass__(cls) -> None:
        """Let a TypeError name the class that its reader knows: ``LockClient.semaphore() missing 1 required ...``."""
        super().__init_subclass__()
        for part in cls.__mro__[1:]:
            for name, call in vars(part).items():
                if (
                    isinstance(call, FunctionType)
                    and call.__qualname__ == f"{part.__name__}.{name}"
                    and part is not ABC
                ):
                    call.__qualname__ = f"{cls.__name__}.{name}"

    @abstractmethod
    def lock(self, name: str, **options: Unpack[LockOptions]) -> Lock:
        """See `LockClient.lock`."""

    def semaphore(self, name: str, *, permits: int, **options: Unpack[LockOptions]) -> Semaphore:
        """
        Describe so many permits of *name*, of which each task holds one; nothing is sent until it is entered.

        Args:
            name: What is shared, such as ``"gpu-pool"``. Use it for this semaphore alone.

            permits: How many may be held at the same time: 1 to 1,000.

            **options: As for `lock`. ``fences`` are raised for ``name/permit``, a resource for each permit.

        Raises:
            ConfigurationError: an argument cannot work.
            UnsupportedError: the backend has no permits.
        """
        from fencing_sdk.recipes.shares import Semaphore, check_permits

        check_shares(self._backend, "semaphores")
        return in_mode(self.lock(name, **options), check_permits(name, permits), Semaphore, "semaphore")

    def rwlock(self, name: str, **options: Unpack[LockOptions]) -> ReadWriteLock:
        """
        Describe two locks on *name*: one that many readers hold together, and one that a writer holds alone.

        Args:
            name: What is protected, such as ``"catalog"``. Use it for this lock alone.

            **options: As for `lock`, for both. Readers may ask for different ttls.

        Raises:
            ConfigurationError: an argument cannot work.
            UnsupportedError: the backend has no readers.
        """
        from fencing_sdk.recipes.shares import ReadWriteLock

        check_shares(self._backend, "read/write locks")
        lock = self.lock(name, **options)
        reader, writer = in_mode(lock, READER, Lock, "reader"), in_mode(lock, WRITER, Lock, "writer")
        return ReadWriteLock(self._namespace, reader, writer)
