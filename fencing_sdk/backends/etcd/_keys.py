"""
What is kept for a lock: one key for each of those who hold it or stand in line for it.

    fencing/invoices%2F42/9f8a01c2...    ->  {"metadata": "batch 7"}

The key ends with a digest of the owner id, so that id itself never leaves the process. Whoever has
the key that was created first holds the lock, all others wait in the order of their keys.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache

from fencing_sdk._etcd.json_codec import Entry, UnreadableError
from fencing_sdk._values.claim import Claim, Holder
from fencing_sdk._values.names import safe_segment
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["DEFAULT_PREFIX", "Keys", "check_prefix", "holder", "value_of"]

DEFAULT_PREFIX = "fencing/"
_PREFIX = re.compile(r"[!-~]{1,256}")
_DIGEST = 32
"""Hex digits of the SHA-256 of the owner id: as many bits as that has. The first eight are the public holder."""

_UNTOLD = b'{"metadata":null}'


class Keys:
    """The names of keys below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()

    def line(self, name: str) -> tuple[bytes, bytes]:
        """The first key of a lock, and the first behind its last."""
        return _line(self.prefix, name)

    def own(self, claim: Claim) -> bytes:
        """The key of one acquisition."""
        return _line(self.prefix, claim.name)[0] + _digest(claim.owner)


@lru_cache(maxsize=1024)  # an acquisition and its release need each several times
def _line(prefix: bytes, name: str) -> tuple[bytes, bytes]:
    folder = prefix + safe_segment(name).encode("ascii")
    return folder + b"/", folder + b"0"  # the character behind the slash; a segment has neither


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
    """What the key of *claim* says; read by people and by `inspect`."""
    if claim.metadata is None:
        return _UNTOLD
    return json.dumps({"metadata": claim.metadata}, separators=(",", ":")).encode()


def holder(name: str, entry: Entry, remaining: float) -> Holder:
    """
    Who holds *name*.

    Raises:
        UnreadableError: the key is none of ours.
    """
    digest = entry.key.rpartition(b"/")[2].decode(errors="replace")
    try:
        metadata = json.loads(entry.value).get("metadata")
    except (ValueError, AttributeError, RecursionError):
        metadata = b""
    if not (metadata is None or isinstance(metadata, str)):
        msg = "the key of the lock has a value that no lock has; another program writes below the prefix"
        raise UnreadableError(msg)
    return Holder(name, entry.created, digest[:8], remaining, metadata)
