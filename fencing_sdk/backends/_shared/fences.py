"""Fences that are raised in the transaction of a grant, where a store keeps both: see ``abc._powers.SupportsFence``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.token import Token
from fencing_sdk.abc import Guard
from fencing_sdk.abc._powers import TransactionalGuard
from fencing_sdk.errors import BackendRefusedError, shown

Fences = Sequence[tuple[Guard, str]]
"""Each guard, and the resource whose fence it raises."""
FENCE_PATIENCE = 1.0
"""Seconds to wait for a transaction that holds a fence. Then other acquisitions have their turn before the next try."""
_NOTE = "fencing_sdk: "
"""How a guard's own note on a driver's error begins. The message of the server is never repeated."""


class FenceRaising:
    """
    Raises the fences of a store's grants.

    Args:
        backend: What errors call the store.

        code_of: The code of a driver's error.

        missing: Codes of a statement about a schema, table or column that is missing, has another type, or is not
            permitted. The guard's are missing then, because the grant has found those of the locks.
    """

    def __init__(self, backend: str, code_of: Callable[[Exception], object], missing: Collection[object]) -> None:
        self._backend = backend
        self._code_of = code_of
        self._missing = missing

    async def raise_all(self, transaction: object, claim: Claim, fences: Fences, token: int) -> None:
        """
        Raise *fences* to the *token* that was granted to *claim*, in the *transaction* of the grant.

        Raises:
            StaleTokenError: a fence is higher already.
            BackendRefusedError: a guard lacks its table, its schema or a permission.
            Exception: any other error of the driver or the guard.
        """
        for guard, resource in fences:
            raised = Token(token, claim.holder)
            try:
                transactional = cast("TransactionalGuard", guard)
                await transactional.raise_in(transaction, resource, raised, wait=FENCE_PATIENCE)
            except Exception as error:
                code = self._code_of(error)
                if code not in self._missing:
                    raise
                notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
                why = "; ".join(notes) or "its table, its schema or a permission is missing"
                detail = f"the guard cannot raise the fence of {shown(resource)}: {why} ({code})"
                raise BackendRefusedError(self._backend, "acquire", detail) from error
