"""
How the generations of one resource are named, and which one follows.

    0000000000000034.00000002.9f8a01c2          third generation of token 34, with data
    0000000000000034.00000000.9f8a01c2.empty    the fence was raised before there was any data

Names sort like generations, so the last one of a plain ``ls`` is the one that counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import safe_segment
from fencing_sdk._values.token_wire import token_of_parts
from fencing_sdk.errors import ConfigurationError, shown

_UNKNOWN_HOLDER = "-"
_EMPTY = ".empty"
_NAME = re.compile(r"([0-9]{16})\.([0-9]{8,})\.([0-9a-f]+|-)(\.empty)?", re.ASCII)

_FOLDER_LIMIT = 180
_FOLDER_KEPT = 140
"""Characters of a long resource name that stay readable; with its digest it is longer than the limit."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One published state of a resource: the fence, and the data that stands under it."""

    token: Token
    number: int
    """Counts the generations of one token, from 0."""
    has_data: bool

    @property
    def order(self) -> tuple[int, int]:
        """The key that generations are sorted by."""
        return int(self.token), self.number

    @property
    def name(self) -> str:
        """The file name."""
        holder = self.token.holder or _UNKNOWN_HOLDER
        return f"{int(self.token):016d}.{self.number:08d}.{holder}{'' if self.has_data else _EMPTY}"


def following(last: Generation | None, fence: Token, *, has_data: bool) -> Generation:
    """The generation after *last*, under *fence*."""
    number = last.number + 1 if last is not None and last.token == fence else 0
    return Generation(fence, number, has_data)


def in_order(names: Iterable[str]) -> list[Generation]:
    """The generations among file *names*, the one that counts last. Other files are ignored."""
    matches = filter(None, map(_NAME.fullmatch, names))
    return sorted(filter(None, map(_parsed, matches)), key=lambda generation: generation.order)


def _parsed(match: re.Match[str]) -> Generation | None:
    token = token_of_parts(match[1].lstrip("0") or "0", None if match[3] == _UNKNOWN_HOLDER else match[3])
    return None if token is None else Generation(token, int(match[2]), match[4] is None)


def folder_of(resource: str) -> str:
    """
    Encode a *resource* name into the name of its folder: one segment, at most 255 characters.

    What is too long is cut and completed by a digest, which makes it longer than every name that
    is not cut: no two resources share a folder.
    """
    segment = safe_segment(resource)
    if len(segment) <= _FOLDER_LIMIT:
        return segment
    return f"{segment[:_FOLDER_KEPT]}~{hashlib.sha256(resource.encode()).hexdigest()}"


def check_holder(token: Token) -> Token:
    """
    Return *token* if its holder can be part of a file name.

    Raises:
        ConfigurationError: it is not a digest such as ``lease.holder``.
    """
    holder: object = token.holder
    if holder is not None and (not isinstance(holder, str) or token_of_parts("0", holder) is None):
        msg = f"the holder of a token must be up to 64 hex digits, such as lease.holder, got {shown(holder)}"
        raise ConfigurationError(msg)
    return token
