"""The part of a client for operators: its own state, the locks of all clients, revocations and a diagnosis."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING
from weakref import WeakSet

from fencing_sdk._engine.draining import Draining
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._values.claim import Holder, Waiting, check_name, in_namespace
from fencing_sdk._values.reports import Status
from fencing_sdk._values.timing import DEFAULT_TTL, Seconds, check_ttl, seconds
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.abc import Backend, Guard, SupportsListing, SupportsRevoking, SupportsShares
from fencing_sdk.errors import ConfigurationError, UnsupportedError, UsageError, shown

if TYPE_CHECKING:
    from fencing_sdk.diagnosis import Diagnosis
    from fencing_sdk.recipes.election import ElectionState

PAGE = 200
"""Holders in one page of a listing."""
_REASON_LIMIT = 200
"""Characters of an operator's reason."""
_OVER = 5.0
_LONGEST_DIAGNOSIS = 3600.0


class OperatingClient(ABC):
    """What `LockClient` inherits: it brings the backend, the namespace and the engine."""

    _backend: Backend
    _namespace: str
    _engine: Engine | None
    _open_wait: float | None

    def _opened(self) -> Engine:
        if self._engine is None:
            msg = "this client is not open; enter it first: async with locks"
            raise UsageError(msg)
        return self._engine

    @cached_property
    def _elections(self) -> WeakSet[ElectionState]:
        """Elections this client is a candidate in."""
        return WeakSet()

    def status(self) -> Status:
        """
        Return the state of this client, for health endpoints. It does not ask the store.

        Do not use leadership as readiness: only one ready process leads.
        """
        if self._engine is None:
            return Status(open=False)
        return self._engine.status(sorted(election.name for election in tuple(self._elections) if election.leading))

    async def all_holders(self, pattern: str = "*") -> AsyncIterator[Holder]:
        """
        Yield the holders of all locks of this store and namespace whose names match, page by page, in any order.

        A lock that is held all the time appears at least once. One that changes hands meanwhile may appear twice, or
        not at all. Readers of one name, and holders of its permits, appear one by one.

        Args:
            pattern: A shell pattern, such as ``report/*`` or ``seats/4?``. The store searches for
                the text before its first ``*``, ``?`` or ``[``.

        Raises:
            ConfigurationError: *pattern* cannot match any name.
            UnsupportedError: the store cannot list.
            BackendError: it did not answer, or refused.
            UsageError: the client is not open.
        """
        backend, engine = self._backend, self._opened()
        if not isinstance(backend, SupportsListing):
            raise _unsupported(backend, "list what is held")
        namespace = f"{self._namespace}:" if self._namespace else ""
        check_name(pattern, parameter="pattern")
        prefix = namespace + re.split(r"[*?[]", pattern, maxsplit=1)[0]
        cursor: str | None = None
        while True:
            page = await engine.ask("list", lambda: backend.list_holders(prefix, cursor, PAGE))
            for holder in page.holders:
                if fnmatchcase(name := holder.name.removeprefix(namespace), pattern):
                    yield replace(holder, name=name)
            if (cursor := page.cursor) is None:
                return

    async def holders(self, name: str) -> Sequence[Holder]:
        """
        Return all holders of *name*: several if they share it as readers or permits, empty if it is free.

        Raises:
            InvalidNameError: *name* names no lock.
            BackendError: the store did not answer, or refused.
            UsageError: the client is not open.
        """
        engine, store_name = self._opened(), in_namespace(self._namespace, check_name(name))
        if isinstance(self._backend, SupportsShares):
            found = await engine.holders(store_name)
        else:
            found = [] if (only := await engine.inspect(store_name)) is None else [only]
        return [replace(holder, name=name) for holder in found]

    async def waiters(self, name: str) -> Sequence[Waiting]:
        """
        Return the waiters for *name*, in the order of the line. An answer may be outdated when it arrives.

        Raises:
            InvalidNameError: *name* names no lock.
            UnsupportedError: the store cannot list.
            BackendError: it did not answer, or refused.
            UsageError: the client is not open.
        """
        backend, engine = self._backend, self._opened()
        store_name = in_namespace(self._namespace, check_name(name))
        if not isinstance(backend, SupportsListing):
            raise _unsupported(backend, "list who waits")
        return await engine.ask("list", lambda: backend.list_waiters(store_name))

    async def revoke(self, name: str, *, token: int, reason: str) -> bool:
        """
        Take *name* away from the holder that has this *token*, and pass the *reason* on to it.

        The holder's work is cancelled with `LossReason.REVOKED`: at once where the store pushes, else at the next
        renewal.
        Guards refuse a process that does not hear of it as soon as the next holder has written, because the next token
        is higher. A later holder is never hit: its token differs.

        Args:
            name: The lock's name.

            token: The token of the grant, from `inspect` or `all_holders`. All readers who share it lose the
                lock.

            reason: What the holder finds in the ``detail`` of `LeaseLostError` and in the event `Lost`: up to 200
                printable characters. Not a place for secrets.

        Returns:
            True if the grant was taken away. False if no grant has this token: it was released, has expired, has gone
            to another holder, or never existed.

        Raises:
            InvalidNameError: *name* names no lock.
            ConfigurationError: *token* or *reason* cannot work.
            UnsupportedError: the store cannot take a grant away.
            BackendUnavailableError: it did not answer; the grant may be over. Look, then try again with the same token.
            BackendRefusedError: it refused.
            UsageError: the client is not open.
        """
        backend, engine = self._backend, self._opened()
        store_name = in_namespace(self._namespace, check_name(name))
        number, text = check_token(token), check_reason(reason)
        if not isinstance(backend, SupportsRevoking):
            raise _unsupported(backend, "take a grant away")
        return await engine.ask("revoke", lambda: backend.revoke(store_name, number, text))

    async def diagnose(
        self,
        *,
        over: Seconds = _OVER,
        ttl: Seconds = DEFAULT_TTL,
        other: OperatingClient | None = None,
        guards: Sequence[Guard] = (),
    ) -> Diagnosis:
        """
        Check whether this process and its store keep the promises: ``fencing doctor`` as a function.

        It takes, hands on and releases a scratch lock, and renews it ten times a second. It reports no event. The store
        may be down, slow or read-only: that is a finding. The client need not be open; close one that was not
        afterwards.

        Args:
            over: Seconds for which pauses and renewals are measured, at most an hour. The store's settings and the
                self-test take a second or so more, and at most a minute if the store does not answer.

            ttl: Seconds of the locks in use, by which the measurements are judged.

            other: A second client of the same store, to which the self-test hands the lock on. Without it, two owners
                on one connection do.

            guards: Guards that the self-test examines, with tokens of its own. It raises one fence in each, that of a
                scratch resource, and none that protects data, as ``fences`` of a lock do.

        Returns:
            The findings, the worst first, and the timing of a lock that fits what was measured.

        Raises:
            ConfigurationError: an argument cannot work.
        """
        from fencing_sdk.diagnosis import examine  # noqa: PLC0415  (loaded by the few programs that call it)

        return await examine(
            self._backend,
            other=_backend_of(other),
            guards=_checked(guards),
            namespace=self._namespace,
            over=seconds(over, "over", high=_LONGEST_DIAGNOSIS),
            ttl=check_ttl(ttl),
        )


def _unsupported(backend: Backend, what: str) -> UnsupportedError:
    return UnsupportedError(f"{backend_name(backend)} cannot {what}: its store has no call for that")


def check_token(token: object) -> int:
    """Return *token* if it can be one."""
    try:
        number = index(token)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(token, bool) or not 0 <= number < TOKEN_LIMIT:
        msg = f"token must be the number from inspect() or all_holders(), from 0 to below 2**53, not {shown(token)}"
        raise ConfigurationError(msg)
    return number


def check_reason(reason: object) -> str:
    """Return *reason* if an operator may give it to a holder."""
    if not isinstance(reason, str) or not reason.strip() or len(reason) > _REASON_LIMIT or not reason.isprintable():
        msg = f"reason must be a text of 1 to {_REASON_LIMIT} printable characters for the holder, not {shown(reason)}"
        raise ConfigurationError(msg)
    return reason


def _backend_of(other: object) -> Backend | None:
    if other is None:
        return None
    if not isinstance(other, OperatingClient):
        msg = f"other must be a second client of the same store, not {shown(other)}"
        raise ConfigurationError(msg)
    return other._backend  # noqa: SLF001  (of the same class)


def _checked(guards: object) -> Sequence[Guard]:
    if not isinstance(guards, Sequence) or not all(isinstance(guard, Guard) for guard in guards):
        msg = f"guards must be a list of guards, not {shown(guards)}"
        raise ConfigurationError(msg)
    return guards


async def reach(client: OperatingClient) -> None:
    """
    Ask the store of *client*, which was entered lazily, as ``async with`` does. For this package alone.

    Raises:
        BackendError, UsageError: as `BackendOpening.wait`.
    """
    if client._open_wait is not None:  # noqa: SLF001
        await client._opened().opening.wait()  # noqa: SLF001


def draining_of(client: OperatingClient) -> Draining:
    """Return the drain of *client*, which is open. For this package alone."""
    return client._opened().draining  # noqa: SLF001  (the one door to it)
