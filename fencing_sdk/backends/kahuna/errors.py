"""
Which error of the contract a failure becomes.

`BackendRefusedError` is for what another try will not change *and* what surely granted nothing. Everything else
is a `BackendUnavailableError`: the outcome is unknown until Kahuna is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome
from fencing_sdk.backends.kahuna.requests import AnswerType, KahunaAnswer
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = ["BACKEND", "error_of_answer", "error_of_failures"]

BACKEND = "KahunaBackend"


def error_of_answer(answer: KahunaAnswer, operation: str) -> BackendError:
    """Make an error of an answer that is not one of the operation's outcomes."""
    if answer.type is AnswerType.INVALID_INPUT and not (answer.earlier_unknown or answer.retried):
        return BackendRefusedError(BACKEND, operation, "InvalidInput; is this a Kahuna older than 1.0.7?")
    type_name = "".join(part.capitalize() for part in answer.type.name.split("_"))
    unknown = ", and an earlier request may still be carried out" if answer.earlier_unknown else ""
    return BackendUnavailableError(BACKEND, operation, f"the answer was {type_name}{unknown}")


def error_of_failures(failures: Sequence[RequestFailedError], operation: str) -> BackendError:
    """Make an error of the failures of all nodes: refused only if every node has rejected the request."""
    decisive = next((failure for failure in failures if failure.outcome is not RequestOutcome.REJECTED), failures[0])
    told = decisive.told_of(operation)
    detail = told if len(failures) == 1 else f"none of {len(failures)} nodes: {told}"
    kind = BackendRefusedError if decisive.outcome is RequestOutcome.REJECTED else BackendUnavailableError
    error = kind(BACKEND, operation, detail)
    error.__cause__ = decisive.__cause__
    return error
