"""The error for a server of Redis that cannot be reached, among those of the driver."""

from __future__ import annotations

from redis.exceptions import ConnectionError as RedisConnectionError

from fencing_sdk.backends._shared.error_translation import NoConnectionError


class UnreachableError(NoConnectionError, RedisConnectionError):
    """No server answers at the given addresses. It is one of the driver's errors as well."""
