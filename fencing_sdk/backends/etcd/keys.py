"""
What etcd keeps for a lock: one key for each claim that holds the lock or waits for it.

    fencing/invoices%2F42/9f8a01c2...    ->  {"metadata": "batch 7"}

The key ends with a digest of the owner id, so that the id itself never leaves the process. The claim whose key
was created first holds the lock. The others wait in the order in which their keys were created.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache

from fencing_sdk._etcd.json_codec import Entry
from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._values.claim import Claim, Holder
from fencing_sdk._values.names import safe_segment
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["DEFAULT_PREFIX", "EtcdKeys", "check_prefix", "holder_of_key", "value_of"]

DEFAULT_PREFIX = "fencing/"
_PREFIX = re.compile(r"[!-~]{1,256}")
_DIGEST = 32
"""Hex digits of the SHA-256 of the owner id: as many bits as that has. The first eight are the public holder."""

_WITHOUT_METADATA = b'{"metadata":null}'


class EtcdKeys:
    """The names of keys below one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def line(self, name: str) -> tuple[bytes, bytes]:
        """The range of a lock's keys: its begin, and its end, which is not part of it."""
        return _line(self._prefix, name)

    def own(self, claim: Claim) -> bytes:
        """The key of one claim."""
        return _line(self._prefix, claim.name)[0] + _digest(claim.owner)


@lru_cache(maxsize=1024)  # an acquisition and its release need each several times
def _line(prefix: bytes, name: str) -> tuple[bytes, bytes]:
    folder = prefix + safe_segment(name).encode("ascii")
    return folder + b"/", folder + b"0"  # 0 is the character after the slash; a segment contains neither


@lru_cache(maxsize=1024)
def _digest(owner: str) -> bytes:
    return hashlib.sha256(owner.encode()).hexdigest()[:_DIGEST].encode()


def check_prefix(prefix: object) -> str:
    """Return *prefix* if keys can begin with it."""
    if isinstance(prefix, str) and _PREFIX.fullmatch(prefix):
        return prefix
    msg = f"prefix must be 1 to 256 printable ASCII characters without spaces, got {shown(prefix)}"
    raise ConfigurationError(msg)


def value_of(claim: Claim) -> bytes:
    """The value of the claim's key, for `inspect` and for operators."""
    if claim.metadata is None:
        return _WITHOUT_METADATA
    return json.dumps({"metadata": claim.metadata}, separators=(",", ":")).encode()


def holder_of_key(name: str, entry: Entry, remaining: float) -> Holder:
    """
    The holder of *name*, whose key is *entry*.

    Raises:
        UnreadableAnswerError: another program wrote the key.
    """
    digest = entry.key.rpartition(b"/")[2].decode(errors="replace")
    try:
        metadata = json.loads(entry.value).get("metadata")
    except (ValueError, AttributeError, RecursionError):
        metadata = b""
    if not (metadata is None or isinstance(metadata, str)):
        msg = "the key of the lock has a value that no lock has; another program writes below the prefix"
        raise UnreadableAnswerError(msg)
    return Holder(name, entry.created, digest[:8], remaining, metadata)
