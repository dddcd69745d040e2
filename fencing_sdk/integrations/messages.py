"""
The token in gRPC metadata and in the headers of messages, where names are lower case.

    await stub.Book(request, metadata=current_metadata())
    await producer.send(topic, body, headers=[(key, text.encode()) for key, text in current_metadata()])
"""

from __future__ import annotations

from collections.abc import Iterable

from fencing_sdk._lease import current_token
from fencing_sdk._values.token import ACCEPTED_HEADERS, Token, parse_one_token, token_metadata

__all__ = ["current_metadata", "token_of"]

_NAME, _OLD_NAME = (name.lower() for name in ACCEPTED_HEADERS)


def current_metadata(name: str | None = None) -> tuple[tuple[str, str], ...]:
    """
    The pairs that carry the token of the innermost lock, or of the lease on *name*: also of a permit or a reader.

    A message may lie in a queue for a day. It carries the number that was good when it was sent;
    the guard where it is worked on decides.

    Raises:
        NoLeaseError: this code does not run under such a lock.
        LeaseLostError: it does, and the lease is over.
    """
    return token_metadata(current_token(name))


def token_of(pairs: Iterable[tuple[str, str | bytes]]) -> Token | None:
    """
    The token in the metadata of a call or the headers of a message, to be admitted by a guard.

    Raises:
        ConfigurationError: it is not a token, a name came twice, or ``fencing-token`` and ``x-fencing-token`` disagree.
            Do not do the work.
    """
    found: dict[str, list[str]] = {_NAME: [], _OLD_NAME: []}
    for key, value in pairs:
        if (name := key.lower()) in found:
            found[name].append(value.decode("latin-1") if isinstance(value, bytes) else value)
    return parse_one_token(found[_NAME], found[_OLD_NAME])
