"""
Which error of the contract a failure becomes.

A member's error is read by its gRPC code, never by its text. `BackendRefusedError` is for what another try will not
change *and* what surely has done nothing. Everything else is a `BackendUnavailableError`: the outcome is unknown
until etcd is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome, any_unknown
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, shown

__all__ = [
    "INVALID",
    "NOT_NOW",
    "UNAUTHENTICATED",
    "LeaseNotFoundError",
    "error_of_failures",
    "failure_by_code",
]

INVALID, NOT_FOUND, DENIED, EXHAUSTED, NOT_NOW, UNIMPLEMENTED, UNAUTHENTICATED = 3, 5, 7, 8, 9, 12, 16
"""Codes of gRPC."""

_REJECTED, _UNSENT, _UNKNOWN = RequestOutcome.REJECTED, RequestOutcome.UNSENT, RequestOutcome.UNKNOWN
_BY_CODE = {
    INVALID: (_REJECTED, "etcd does not accept the request, or wants a user and a password"),
    NOT_FOUND: (_REJECTED, "the lease does not exist"),
    DENIED: (_REJECTED, "the user may not read and write the keys; see the page of the backend for its role"),
    EXHAUSTED: (_UNSENT, "etcd accepts no more: its space is used up (NOSPACE), or it is overloaded"),
    NOT_NOW: (_REJECTED, "etcd cannot do this in its state"),
    UNIMPLEMENTED: (_REJECTED, "etcd cannot do this; is it 3.4 or newer?"),
    UNAUTHENTICATED: (_REJECTED, "etcd does not accept the token of the login"),
}


class LeaseNotFoundError(BackendUnavailableError):
    """The lease does not exist, so nothing was done. A call with another lease may succeed."""


def failure_by_code(code: int, status: int, message: str) -> RequestFailedError:
    """Read a member's error. After a code that is not in the table, the outcome is unknown."""
    outcome, detail = _BY_CODE.get(code, (_UNKNOWN, f"HTTP {status}"))
    return RequestFailedError(outcome, f"{detail} ({shown(message)})" if message else detail, code)


def error_of_failures(component: str, operation: str, failures: Sequence[RequestFailedError]) -> BackendError:
    """
    Make an error of the failures of all members that were asked.

    There are three cases:

    1. etcd does not know the lease, and no earlier request may still be carried out: `LeaseNotFoundError`.
    2. The request was rejected, and no earlier one may still be carried out: `BackendRefusedError`.
    3. Everything else: `BackendUnavailableError`.
    """
    last, unknown = failures[-1], any_unknown(failures)
    if last.code == NOT_FOUND and not unknown:
        return LeaseNotFoundError(component, operation, last.detail)
    decisive = last if last.code else next((failure for failure in failures if failure.outcome is not _REJECTED), last)
    told = decisive.told_of(operation)
    detail = told if len(failures) == 1 else f"{told} (the last of {len(failures)} members asked)"
    refused = decisive.outcome is _REJECTED and not unknown
    error = (BackendRefusedError if refused else BackendUnavailableError)(component, operation, detail)
    error.__cause__ = decisive
    return error
