"""From the errors of kazoo to those of the contract, by class: see `fencing_sdk.backends._shared.error_translation`."""

from __future__ import annotations

import ssl
from functools import partial

import kazoo.exceptions as driver

from fencing_sdk._http.tls import distrust, wants_certificate
from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    NoConnectionError,
    Verdict,
    verdict_by_class,
)
from fencing_sdk.backends.zookeeper.connection.driver import BACKEND
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = ["BACKEND", "our_errors", "translated"]

CLASSES: tuple[tuple[type[Exception], Verdict], ...] = (
    (
        driver.NoAuthError,
        (BackendRefusedError, "the login has no right to do this below the root; see 'acl' and its login"),
    ),
    (driver.AuthFailedError, (BackendRefusedError, "the server refuses the login")),
    (driver.SessionClosedRequireSaslError, (BackendRefusedError, "the server wants a login by SASL that it knows")),
    (driver.SASLException, (BackendRefusedError, "the login by SASL failed")),
    (driver.InvalidACLError, (BackendRefusedError, "the server cannot use the acl; creator needs a user or SASL")),
    (driver.QuotaExceededError, (BackendRefusedError, "the quota of the root is used up")),
    (driver.NoChildrenForEphemeralsError, (BackendRefusedError, "the root is a node that cannot have children")),
    (driver.ConnectionClosedError, (BackendUnavailableError, "the connection broke")),
    (driver.SessionExpiredError, (BackendUnavailableError, "the session has expired; the next call opens another")),
    (driver.ConnectionLoss, (BackendUnavailableError, "the connection broke")),
    (driver.SessionMovedError, (BackendUnavailableError, "the session is on another connection")),
    (driver.NotReadOnlyCallError, (BackendUnavailableError, "the server has no majority")),
    (driver.ThrottledOpError, (BackendUnavailableError, "the server is overloaded")),
    (NoConnectionError, (BackendUnavailableError, "no connection to a server")),
    (OSError, (BackendUnavailableError, "no connection to a server")),
)

_UNTRUSTED: Verdict = (BackendRefusedError, "the server wants another certificate of the client; see cert=")
_UNKNOWN: Verdict = (BackendUnavailableError, "ZooKeeper failed")


def translated(operation: str, error: Exception) -> BackendError:
    """Make the error of the contract for *error*."""
    if isinstance(error, BackendError):
        return error
    kind, hint = _verdict(error)
    cause = error.__cause__
    if isinstance(error, NoConnectionError) and isinstance(cause, Exception):
        refusal = _verdict(cause)
        if refusal[0] is BackendUnavailableError:
            return BackendUnavailableError(BACKEND, operation, str(error))
        kind, hint = refusal
        return kind(BACKEND, operation, f"{hint} ({type(cause).__name__})")
    return kind(BACKEND, operation, f"{hint} ({type(error).__name__})")


def _verdict(error: Exception) -> Verdict:
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendRefusedError, distrust(error, "ca")
    if wants_certificate(error):
        return _UNTRUSTED
    return verdict_by_class(error, CLASSES, _UNKNOWN)


our_errors = partial(ErrorTranslation, translated)
"""``with our_errors("acquire")``: the errors of the driver leave as errors of the contract."""
