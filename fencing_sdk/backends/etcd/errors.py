"""
Which error of the contract leaves this backend.

Failures of requests are translated by `fencing_sdk._etcd.errors`. An answer that cannot be read says nothing about
what etcd has done, so it counts as lost: the outcome is unknown.
"""

from __future__ import annotations

from fencing_sdk.errors import BackendUnavailableError

__all__ = ["BACKEND", "unreadable"]

BACKEND = "EtcdBackend"


def unreadable(operation: str, error: Exception) -> BackendUnavailableError:
    """Translate the error of reading an answer, for `ErrorTranslation`."""
    return BackendUnavailableError(BACKEND, operation, str(error))
