"""
Translates errors of Redis and its driver to the two errors of the contract.

`BackendRefusedError` needs both: another try cannot help, *and* nothing was granted, because the engine then stops
without a release. Every other error, known or not, is `BackendUnavailableError`: the outcome of the request is
unknown until the next request. The class and the code of an error reply decide. A message has the server's own words
up to the first quote, and no other text of the driver, which may hold a URL.
"""

from __future__ import annotations

import ssl
from functools import partial

import redis.exceptions as driver
from redis.asyncio.sentinel import MasterNotFoundError

from fencing_sdk._http.tls import distrust
from fencing_sdk.backends._shared.error_translation import ErrorTranslation, Verdict, verdict_by_class
from fencing_sdk.backends.redis.connection.dial import BACKEND, ReplicaError, UnreachableError
from fencing_sdk.backends.redis.connection.node import UnconfirmedError
from fencing_sdk.backends.redis.connection.pipe import PipeError, ReplyError, before_quotes, named_command
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

_RULES = "see the rules on the backend's page"
REFUSALS = {
    "DENIED": "the server is in protected mode, and accepts only its own machine; give it a password (requirepass)",
    "NOAUTH": "the server requires a password",
    "WRONGPASS": "wrong user or password",
    "NOPERM": f"the user may not use a command or a key; ACL LOG names it; {_RULES}",
    "WRONGTYPE": "a key of the lock holds something else; set another prefix",
    "TOKENRANGE": "the next token would not fit into 53 bits; is the server's clock right?",
    "NOCOMMAND": "the server does not know a command; was it renamed or disabled?",
    "ERR": "the server refuses a command of a script; does a key of the lock hold something else?",
}
"""The codes that another try cannot change, and what to do."""

_CLASSES: tuple[tuple[type[BaseException], Verdict], ...] = (
    (UnconfirmedError, (BackendUnavailableError, "too few replicas confirmed the write")),
    (PipeError, (BackendUnavailableError, "the connection broke")),
    (driver.AuthenticationWrongNumberOfArgsError, (BackendRefusedError, REFUSALS["WRONGPASS"])),
    (driver.AuthenticationError, (BackendRefusedError, REFUSALS["WRONGPASS"])),
    (driver.NoPermissionError, (BackendRefusedError, REFUSALS["NOPERM"])),
    (driver.BusyLoadingError, (BackendUnavailableError, "the server is loading its data")),
    (driver.MaxConnectionsError, (BackendUnavailableError, "the server has no connection left; see its maxclients")),
    (MasterNotFoundError, (BackendUnavailableError, "no Sentinel knows a running master; is the service right?")),
    (driver.ConnectionError, (BackendUnavailableError, "no connection to the server")),
    (OSError, (BackendUnavailableError, "no connection to the server")),
)
_MAY_PASS = {"BUSY", "LOADING", "MASTERDOWN"}
"""The codes with which a server refuses the first commands of a connection for a while."""
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


def _verdict(error: BaseException) -> Verdict:
    if isinstance(error, ReplyError):
        hint = REFUSALS.get(error.code)
        said = f"the server replied: {error.said}" if error.said else "the server replied with an error"
        may_pass = "the slot is moving" if error.code == "TRYAGAIN" else said
        return (BackendRefusedError, hint) if hint else (BackendUnavailableError, may_pass)
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendRefusedError, distrust(error, "ssl_ca_certs")
    verdict = verdict_by_class(error, _CLASSES, _UNKNOWN)
    if isinstance(error, driver.ResponseError) and verdict is _UNKNOWN:  # of the first commands of a connection
        said = before_quotes(str(error))
        code = said.partition(" ")[0]
        if code in _MAY_PASS or isinstance(error, driver.ReadOnlyError | driver.ClusterDownError):
            return BackendUnavailableError, f"the server replied: {said}"
        return BackendRefusedError, REFUSALS.get(code, f"the server refuses the connection: {said}")
    inner = error.__cause__
    if isinstance(inner, ReplyError) and inner.code != "NOPERM":
        return verdict  # the reply to WAIT; a demoted master sends such replies too
    found = verdict if inner is None or verdict is _UNKNOWN else _verdict(inner)
    return found if found[0] is BackendRefusedError else verdict


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
