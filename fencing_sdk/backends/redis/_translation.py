"""
From what Redis and its driver raise to the two errors of the contract.

Refused is what another try will not change *and* what surely granted nothing, because the engine
then stops without a release. Everything else, known or not, is unavailable: its outcome is
unknown until somebody asks again. Decided by class and by the code of an error reply; the text of
a driver's error may hold a URL, so it is never repeated.
"""

from __future__ import annotations

import ssl
from functools import partial

import redis.exceptions as driver
from redis.asyncio.sentinel import MasterNotFoundError

from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.redis._dial import BACKEND
from fencing_sdk.backends.redis._node import UnconfirmedError
from fencing_sdk.backends.redis._pipe import PipeError, ReplyError
from fencing_sdk.backends.redis._unreachable import UnreachableError
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

Verdict = tuple[type[BackendError], str]

CODES: dict[str, Verdict] = {
    # Another try may help.
    "LOADING": (BackendUnavailableError, "the server is loading its data"),
    "BUSY": (BackendUnavailableError, "the server is busy with a script"),
    "READONLY": (BackendUnavailableError, "the server is a replica; who is the master is asked anew"),
    "MASTERDOWN": (BackendUnavailableError, "the server is a replica whose master is down"),
    "CLUSTERDOWN": (BackendUnavailableError, "the cluster does not serve all slots"),
    "TRYAGAIN": (BackendUnavailableError, "the slot is moving"),
    "NOREPLICAS": (BackendUnavailableError, "too few replicas are connected for the server to accept writes"),
    "MISCONF": (BackendUnavailableError, "the server cannot save its data"),
    "OOM": (BackendUnavailableError, "the server has reached its maxmemory"),
    # It will not.
    "NOAUTH": (BackendRefusedError, "the server wants a password"),
    "WRONGPASS": (BackendRefusedError, "wrong user or password"),
    "NOPERM": (BackendRefusedError, "the user may not run the scripts; see the page of the backend for its rules"),
    "WRONGTYPE": (BackendRefusedError, "a key of the lock holds something else; set another prefix"),
    "TOKENRANGE": (BackendRefusedError, "the next token would not fit into 53 bits; is the server's clock right?"),
    "ERR": (BackendRefusedError, "it is older than Redis 6.2, a permission is missing, or a key holds something else"),
}

CLASSES: tuple[tuple[type[Exception], Verdict], ...] = (
    (UnconfirmedError, (BackendUnavailableError, "too few replicas confirmed it")),
    (PipeError, (BackendUnavailableError, "the connection broke")),
    (driver.AuthenticationWrongNumberOfArgsError, CODES["WRONGPASS"]),
    (driver.AuthenticationError, CODES["WRONGPASS"]),
    (driver.NoPermissionError, CODES["NOPERM"]),
    (driver.BusyLoadingError, CODES["LOADING"]),
    (driver.ReadOnlyError, CODES["READONLY"]),
    (driver.ClusterDownError, CODES["CLUSTERDOWN"]),
    (ssl.SSLCertVerificationError, (BackendRefusedError, "the server's certificate is not trusted")),
    (FileNotFoundError, (BackendRefusedError, "a file that the URL or the client names does not exist")),
    (MasterNotFoundError, (BackendUnavailableError, "no Sentinel knows a master that is up; is the service right?")),
    (driver.ResponseError, (BackendRefusedError, "the server refuses the login; does the database exist?")),
    (driver.ConnectionError, (BackendUnavailableError, "no connection to the server")),
    (OSError, (BackendUnavailableError, "no connection to the server")),
)

_UNKNOWN: Verdict = (BackendUnavailableError, "Redis failed")


def translated(operation: str, error: Exception) -> BackendError:
    """Make the error of the contract for *error*, most specific first."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, UnreachableError):
        return BackendUnavailableError(BACKEND, operation, str(error))
    kind, hint = _verdict(error)
    word = error.code if isinstance(error, ReplyError) else type(error).__name__
    return kind(BACKEND, operation, f"{hint} ({word})")


def _verdict(error: BaseException) -> Verdict:
    if isinstance(error, ReplyError):
        return CODES.get(error.code, _UNKNOWN)
    if type(error) is driver.ResponseError and (known := CODES.get(str(error).partition(" ")[0])) is not None:
        return known
    for kind, verdict in CLASSES:
        if isinstance(error, kind):
            inner = error.__cause__
            return verdict if inner is None or verdict[0] is BackendRefusedError else _refusal(inner) or verdict
    return _UNKNOWN


def _refusal(error: BaseException) -> Verdict | None:
    """What the cause of a connection error says, where it says that another try will not help."""
    verdict = _verdict(error)
    if isinstance(error, ReplyError) and error.code != "NOPERM":
        return None  # WAIT has failed, which a demoted master says as well
    return verdict if verdict[0] is BackendRefusedError else None


our_errors = partial(ErrorTranslation, translated)
"""``with our_errors("acquire")``: whatever the driver raises comes out as an error of the contract."""
