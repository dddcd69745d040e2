"""
Translates errors of Redis and its driver to the two errors of the contract.

`BackendRefusedError` needs both: another try cannot help, *and* nothing was granted, because the engine then stops
without a release. Every other error, known or not, is `BackendUnavailableError`: the outcome of the request is
unknown until the next request. The class and the code of an error reply decide. The text of a driver's error is never
repeated, because it may quote a URL.
"""

from __future__ import annotations

import ssl
from functools import partial

import redis.exceptions as driver
from redis.asyncio.sentinel import MasterNotFoundError

from fencing_sdk._http.tls import distrust
from fencing_sdk.backends._shared.error_translation import ErrorTranslation, Verdict
from fencing_sdk.backends.redis.connection.dial import BACKEND, ReplicaError, UnreachableError
from fencing_sdk.backends.redis.connection.node import UnconfirmedError
from fencing_sdk.backends.redis.connection.pipe import PipeError, ReplyError, named_command
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

_RULES = "see the rules on the backend's page"
CODES: dict[str, Verdict] = {
    # Another try may help.
    "LOADING": (BackendUnavailableError, "the server is loading its data"),
    "BUSY": (BackendUnavailableError, "the server is busy with a script"),
    "READONLY": (BackendUnavailableError, "a replica grants no locks; the next call looks for the master again"),
    "MASTERDOWN": (BackendUnavailableError, "the server is a replica whose master is down"),
    "CLUSTERDOWN": (BackendUnavailableError, "the cluster does not serve all slots"),
    "TRYAGAIN": (BackendUnavailableError, "the slot is moving"),
    "NOREPLICAS": (BackendUnavailableError, "too few replicas are connected for the server to accept writes"),
    "MISCONF": (BackendUnavailableError, "the server cannot save its data"),
    "OOM": (BackendUnavailableError, "the server has reached its maxmemory"),
    # Another try cannot help.
    "DENIED": (
        BackendRefusedError,
        "the server is in protected mode, and accepts only its own machine; give it a password (requirepass)",
    ),
    "NOAUTH": (BackendRefusedError, "the server requires a password"),
    "WRONGPASS": (BackendRefusedError, "wrong user or password"),
    "NOPERM": (BackendRefusedError, f"the user may not use a command or a key; ACL LOG names it; {_RULES}"),
    "WRONGTYPE": (BackendRefusedError, "a key of the lock holds something else; set another prefix"),
    "TOKENRANGE": (BackendRefusedError, "the next token would not fit into 53 bits; is the server's clock right?"),
    "NOCOMMAND": (BackendRefusedError, "the server does not know a command; was it renamed or disabled?"),
    "ERR": (
        BackendRefusedError,
        "the server refuses a command of a script; does a key of the lock hold something else?",
    ),
}

CLASSES: tuple[tuple[type[Exception], Verdict], ...] = (
    (UnconfirmedError, (BackendUnavailableError, "too few replicas confirmed the write")),
    (PipeError, (BackendUnavailableError, "the connection broke")),
    (driver.AuthenticationWrongNumberOfArgsError, CODES["WRONGPASS"]),
    (driver.AuthenticationError, CODES["WRONGPASS"]),
    (driver.NoPermissionError, CODES["NOPERM"]),
    (driver.BusyLoadingError, CODES["LOADING"]),
    (driver.ReadOnlyError, CODES["READONLY"]),
    (driver.ClusterDownError, CODES["CLUSTERDOWN"]),
    (driver.MaxConnectionsError, (BackendUnavailableError, "the server has no connection left; see its maxclients")),
    (MasterNotFoundError, (BackendUnavailableError, "no Sentinel knows a running master; is the service right?")),
    (
        driver.ResponseError,
        (BackendRefusedError, "the server refuses the first commands of a connection; does the database exist?"),
    ),
    (driver.ConnectionError, (BackendUnavailableError, "no connection to the server")),
    (OSError, (BackendUnavailableError, "no connection to the server")),
)

_UNKNOWN: Verdict = (BackendUnavailableError, "Redis failed")


def translated(operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*. A code counts more than a class."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, UnreachableError | ReplicaError):
        return BackendUnavailableError(BACKEND, operation, str(error))
    kind, hint = _verdict(error)
    command = error.command if isinstance(error, ReplyError) else ""
    if isinstance(error, driver.NoPermissionError):  # of the login
        command = named_command(str(error))
    if command and isinstance(error, ReplyError) and error.code == "NOCOMMAND":
        hint = f"the server does not know '{command}'; was it renamed or disabled?"
    elif command:
        hint = f"the user may not run '{command}'; {_RULES}"
    cause = error.code if isinstance(error, ReplyError) else type(error).__name__
    return kind(BACKEND, operation, f"{hint} ({cause})")


LOGIN_REPLIES = {
    "DB index is out of range": "the server has no database of that number; its setting 'databases' says how many",
    "SELECT is not allowed in cluster mode": "a server of a cluster has database 0 alone",
}
"""What servers say of a database that they do not have: the code of both is ERR."""


def _verdict(error: BaseException) -> Verdict:
    if isinstance(error, ReplyError):
        return CODES.get(error.code, _UNKNOWN)
    if isinstance(error, driver.ResponseError):
        for reply, hint in LOGIN_REPLIES.items():
            if reply in str(error):
                return BackendRefusedError, hint
    if type(error) is driver.ResponseError and (known := CODES.get(str(error).partition(" ")[0])) is not None:
        return known
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendRefusedError, distrust(error, "ssl_ca_certs")
    for kind, verdict in CLASSES:
        if isinstance(error, kind):
            inner = error.__cause__
            return verdict if inner is None or verdict[0] is BackendRefusedError else _refusal(inner) or verdict
    return _UNKNOWN


def _refusal(error: BaseException) -> Verdict | None:
    """The verdict on the cause of a connection error, if another try cannot help."""
    verdict = _verdict(error)
    if isinstance(error, ReplyError) and error.code != "NOPERM":
        return None  # the reply to WAIT; a demoted master sends such replies too
    return verdict if verdict[0] is BackendRefusedError else None


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
