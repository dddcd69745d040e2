"""The part of a client for operators: how it stands itself, the locks of all clients, and to take one away."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from operator import index
from weakref import WeakSet

from fencing_sdk._engine.draining import Draining
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._values.claim import TOKEN_LIMIT, Holder, Waiting
from fencing_sdk._values.client_status import Status
from fencing_sdk._values.names import check_name, in_namespace
from fencing_sdk.abc import Backend, SupportsListing, SupportsRevoking, SupportsShares
from fencing_sdk.diagnosis.client import DiagnosableClient
from fencing_sdk.errors import ConfigurationError, UnsupportedError, UsageError, shown
from fencing_sdk.recipes.election_term import ElectionState

PAGE = 200
"""Holders that are asked for at once."""
_REASON_LIMIT = 200
"""Characters of an operator's reason."""


class OperatingClient(DiagnosableClient):
    """What `LockClient` inherits: it brings the backend, the namespace and the engine."""

    _engine: Engine | None
    _open_wait: float | None

    def _opened(self) -> Engine:
        if self._engine is None:
            msg = "this client is not open; enter it first: async with client"
            raise UsageError(msg)
        return self._engine

    @cached_property
    def _elections(self) -> WeakSet[ElectionState]:
        """What this process stands for, as long as it does."""
        return WeakSet()

    def status(self) -> Status:
        """
        Tell how this client stands: for health endpoints. Nothing is asked of the store.

        To lead an election is not to be ready: of the processes that are, one leads.
        """
        if self._engine is None:
            return Status(open=False)
        return self._engine.status(sorted(election.name for election in tuple(self._elections) if election.leading))

    async def held(self, pattern: str = "*") -> AsyncIterator[Holder]:
        """
        Yield the holders of all locks of this store and namespace whose names match, page by page, in any order.

        A lock that is held all the time is told at least once. One that changes hands meanwhile may be told twice,
        or not at all. Readers of one name, and holders of its permits, are told one by one.

        Args:
            pattern: As a shell matches file names: ``report/*``, ``seats/4?``. The store searches for
                the text before its first ``*``, ``?`` or ``[``.

        Raises:
            ConfigurationError: *pattern* can match no name.
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
            page = await engine.ask("list", lambda: backend.list_held(prefix, cursor, PAGE))
            for holder in page.holders:
                if fnmatchcase(name := holder.name.removeprefix(namespace), pattern):
                    yield replace(holder, name=name)
            if (cursor := page.cursor) is None:
                return

    async def holders(self, name: str) -> Sequence[Holder]:
        """
        Tell all who hold *name*: none, the one that `inspect` tells, or those who share it as readers or permits.

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
        Tell who waits for *name*, in the order of the line. An answer may be outdated when it arrives.

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
        Take *name* away from the holder that has this *token*, and tell it the *reason*.

        The holder's work is cancelled with `LossReason.REVOKED`: at once where the store pushes, else at the next
        renewal.
        A process that does not hear of it is refused by guards as soon as the next holder has written, because
        the next token is higher. A later holder is never hit: its token differs.

        Args:
            name: The lock's name.

            token: The token of the grant, as `inspect` or `held` told it. All readers who share it lose the lock.

            reason: What the holder is told, in the ``detail`` of `LeaseLostError` and in the event `Lost`: up to 200
                printable characters. Not a place for secrets.

        Returns:
            Whether a grant was taken away. False: none has this token, because it was released, has expired, or
            has gone to another holder.

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
        number, told = check_token(token), check_reason(reason)
        if not isinstance(backend, SupportsRevoking):
            raise _unsupported(backend, "take a grant away")
        return await engine.ask("revoke", lambda: backend.revoke(store_name, number, told))


def _unsupported(backend: Backend, what: str) -> UnsupportedError:
    return UnsupportedError(f"{backend_name(backend)} cannot {what}: its store has no call for that")


def check_token(token: object) -> int:
    """Return *token* if it can be one."""
    try:
        number = index(token)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(token, bool) or not 0 <= number < TOKEN_LIMIT:
        msg = f"token must be the number that inspect() or held() told, from 0 to below 2**53, not {shown(token)}"
        raise ConfigurationError(msg)
    return number


def check_reason(reason: object) -> str:
    """Return *reason* if an operator may give it to a holder."""
    if not isinstance(reason, str) or not reason.strip() or len(reason) > _REASON_LIMIT or not reason.isprintable():
        msg = f"reason must be a text of 1 to {_REASON_LIMIT} printable characters for the holder, not {shown(reason)}"
        raise ConfigurationError(msg)
    return reason


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
