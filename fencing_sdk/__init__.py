"""Distributed locks for asyncio: leases that cancel the work in time, and tokens that fence it off."""

import importlib
import typing

from fencing_sdk._client import LockClient
from fencing_sdk._connect import connect
from fencing_sdk._lease import AnyLease, Lease, current_lease, current_token
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.reports import Status
from fencing_sdk._values.token import Token
from fencing_sdk.errors import (
    AcquireError,
    AcquireTimeoutError,
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    FencingError,
    InvalidNameError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    StaleTokenError,
    TicketRefusedError,
    UsageError,
)

if typing.TYPE_CHECKING:
    import fencing_sdk.backends
    import fencing_sdk.diagnosis
    import fencing_sdk.events
    import fencing_sdk.recipes
    import fencing_sdk.sync  # noqa: F401  (so that checkers see the attributes that `__getattr__` below returns)

__version__ = "1.0.0rc1"

__all__ = [
    "AcquireError",
    "AcquireTimeoutError",
    "AnyLease",
    "BackendError",
    "BackendRefusedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DrainingError",
    "FencingError",
    "Holder",
    "InvalidNameError",
    "Lease",
    "LeaseLostError",
    "LeaseTicket",
    "Lock",
    "LockClient",
    "LockHeldError",
    "LossReason",
    "StaleTokenError",
    "Status",
    "TicketRefusedError",
    "Token",
    "UsageError",
    "Waiting",
    "connect",
    "current_lease",
    "current_token",
]

_MODULES = ("backends", "diagnosis", "events", "recipes", "sync")
"""Modules that are read as attributes of this one, each of which is imported when it is first read."""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"fencing_sdk.{name}")
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
