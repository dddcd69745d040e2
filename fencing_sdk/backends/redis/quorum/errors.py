"""The errors of a quorum: those of the backend for one Redis, by another name."""

from __future__ import annotations

from functools import partial

from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.redis.errors import translated as translated_by_redis
from fencing_sdk.errors import BackendError

BACKEND = "RedisQuorumBackend"


def translated(operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*."""
    return renamed(translated_by_redis(operation, error))


def renamed(error: BackendError) -> BackendError:
    """Return *error* as one of the quorum: a connection to a node does not know what it is for."""
    if error.backend == BACKEND:
        return error
    named = type(error)(BACKEND, error.operation, error.detail)
    named.__cause__ = error.__cause__
    return named


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
