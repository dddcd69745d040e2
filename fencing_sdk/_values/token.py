"""
A fencing token: what it remembers of its lease, and how it travels.

It travels in an HTTP header, in message metadata, and in an environment variable. The header is an RFC 9651 item,
``Fencing-Token: 34;holder="9f8a01c2"``. Plain digits and the name ``X-Fencing-Token``, which other systems send, are
understood too. Whatever else arrives is an error: a number that is read differently on two sides is not a fence.
Three forms share one grammar of number and holder: what we write, the same item as others may write it
(`parse_token`), and the parts that a guard has stored (`token_of_parts`).

A token of a lease in this process also knows the transactions that were open in its thread at the grant, where an
integration can see them: a write in one of these would be committed after the release, when the next holder has read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index
from typing import Self

from fencing_sdk.errors import ConfigurationError, shown

TOKEN_LIMIT = 2**53
"""Tokens stay below this: Lua, JavaScript and JSON compare larger numbers wrongly."""


class Token(int):
    """
    A fencing token: an int that only grows, and that remembers its holder.

    ``holder`` is a short public digest of the owner id, or None where it did not travel along. With it a guard
    distinguishes one holder that writes twice from two holders with one number.
    """

    holder: str | None
    _older: tuple[object, ...] | None = None

    def __new__(cls, value: int, holder: str | None = None) -> Self:
        token = super().__new__(cls, index(value))  # int() would read " 34" and Arabic digits, and cut 3.7 to 3
        token.holder = holder
        return token

    def __reduce__(self) -> tuple[type[Self], tuple[int, str | None]]:
        """Copy and pickle the number and the holder alone: a lease stays in its process."""
        return type(self), (int(self), self.holder)


def token_of_lease(number: int, holder: str | None, older: tuple[object, ...]) -> Token:
    """Return the token of a lease of this process. *older* are the transactions that were open at its grant."""
    token = Token(number, holder)
    token._older = older  # noqa: SLF001  (users have no use for it)
    return token


def older_transactions(token: Token) -> tuple[object, ...] | None:
    """Return the transactions that were open when *token* was granted; None if its lease is held elsewhere."""
    return token._older  # noqa: SLF001  (likewise)


transaction_looks: list[Callable[[], tuple[object, ...]]] = []
"""Return the transactions that are open in this thread: appended by integrations that can see them."""


HEADER = "Fencing-Token"
OLD_HEADER = "X-Fencing-Token"
ACCEPTED_HEADERS = (HEADER, OLD_HEADER)
METADATA_KEY = HEADER.lower()
"""The same name where upper case is refused: gRPC metadata, message headers, ASGI."""

ENV_TOKEN = "FENCING_TOKEN"  # noqa: S105  (the name of a variable; a fencing token is not a secret)
ENV_HOLDER = "FENCING_HOLDER"
ENV_LOCK = "FENCING_LOCK"
ENV_PERMIT = "FENCING_PERMIT"
ENV_AROUND = "FENCING_AROUND"
"""The tokens of all the commands around, as `format_token` writes them, with spaces between them."""
ENV_DEADLINE = "FENCING_DEADLINE"
ENV_URL = "FENCING_URL"
ENV_URL_FILE = "FENCING_URL_FILE"
ENV_WITHHELD = "FENCING_STORE_WITHHELD"
"""Set for a command that gets no URL from the `fencing run` around it, so that it does not take another store."""
ENV_RECORD = "FENCING_RECORD"

_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_HOLDER = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
_WRITTEN = re.compile(r'([0-9]+)(?:;holder="([0-9a-f]+)")?', re.ASCII)
_BARE_ITEM = (
    r'"(?:[ !#-\[\]-~]|\\["\\])*"'  # a string
    r"|-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})"  # a decimal or an integer
    r"|[A-Za-z*][!#-'*+.^_`|~0-9A-Za-z:/-]*"  # a token
    r"|:[A-Za-z0-9+/=]*:|\?[01]|@-?[0-9]{1,15}"  # bytes, a boolean, a date
    r'|%"(?:[ !#$&-~]|%[0-9a-f]{2})*"'  # a display string
)
_PARAMETER = re.compile(rf"; *([a-z*][a-z0-9_.*-]*)(?:=({_BARE_ITEM}))?", re.ASCII)
"""A parameter of RFC 9651, with spaces in front of it and in no other place."""
TEXT_LIMIT = 256
"""Characters of the longest item that is read. A token of ours has up to 90; the rest is for parameters of others."""


def check_token(token: object, parameter: str = "token") -> Token:
    """
    Return *token* as a `Token`, keeping the holder it may carry.

    Raises:
        ConfigurationError: it is not an int from 0 to below 2**53.
    """
    if isinstance(token, bool) or not isinstance(token, int):
        msg = f"{parameter} must be an int such as lease.token, not {type(token).__name__}"
        raise ConfigurationError(msg)
    if not 0 <= token < TOKEN_LIMIT:
        msg = f"{parameter} must be from 0 to below 2**53, got {shown(int(token))}"
        raise ConfigurationError(msg)
    return token if isinstance(token, Token) else Token(token)


def token_of_parts(number: str, holder: str | None) -> Token | None:
    """Read the digits of a *number* and of a *holder*, None where it is unknown; None when they make no token."""
    if not _NUMBER.fullmatch(number) or int(number) >= TOKEN_LIMIT:
        return None
    return Token(int(number), holder) if holder is None or _HOLDER.fullmatch(holder) else None


def conflicting(token: Token, fence: Token) -> bool:
    """Return whether one number came from two holders, both known."""
    return token == fence and token.holder != fence.holder and None not in {token.holder, fence.holder}


def format_token(token: Token) -> str:
    """
    Write *token* as a header value, with its holder where it is known.

    Raises:
        ConfigurationError: it could not be read back: a token made by hand with a holder that is none.
    """
    check_token(token)
    return _written(int(token), None if token.holder is None else f"{token.holder}")


def parse_written(text: str) -> Token:
    """
    Read back what `format_token` has written, and nothing else: a fence is compared as text, too.

    Raises:
        ConfigurationError: *text* was written by another program.
    """
    match = _WRITTEN.fullmatch(text) if len(text) <= TEXT_LIMIT else None
    return _unless_none(match and token_of_parts(match[1], match[2]), text)


def parse_token(text: object) -> Token:
    """
    Read a header value, which others may have written: an item of RFC 9651.

    Its parameters may follow a space, and those that are not ours are ignored.

    Raises:
        ConfigurationError: *text* is not such an item; its number is not plain ASCII digits below 2**53; or its holder
            came twice, or is not 1 to 64 digits of lower-case hex as a string.
    """
    return _unless_none(read_token(text) if isinstance(text, str) and len(text) <= TEXT_LIMIT else None, text)


def parse_one_token(values: Sequence[str], old: Sequence[str] = ()) -> Token | None:
    """
    Return the one token in the *values* of the header and of the *old* one, or None when there is none.

    Raises:
        ConfigurationError: a header came twice or is not a token, or the two disagree.
    """
    if len(values) > 1 or len(old) > 1:
        msg = "the token came more than once"
        raise ConfigurationError(msg)
    found = [parse_token(value) for value in (*values, *old)]
    if len(found) == len(ACCEPTED_HEADERS) and (found[0] != found[1] or conflicting(*found)):
        msg = f"{' and '.join(ACCEPTED_HEADERS)} disagree"
        raise ConfigurationError(msg)
    return next((token for token in found if token.holder is not None), found[0] if found else None)


def _unless_none(token: Token | None, text: object) -> Token:
    if token is None:
        msg = f"not a fencing token: {shown(text)}; expected digits such as 34"
        raise ConfigurationError(msg)
    return token


# One holder sends one token many times, so both ways are remembered. The limits bound what a stranger can fill.


@lru_cache(maxsize=512)
def _written(number: int, holder: str | None) -> str:
    text = f"{number:d}" if holder is None else f'{number:d};holder="{holder}"'
    parse_written(text)
    return text


@lru_cache(maxsize=512)
def read_token(text: str) -> Token | None:
    """Read a *text* of at most `TEXT_LIMIT` characters; None when it is not a token."""
    number, _, _ = text.strip(" ").partition(";")
    rest, holder = text.strip(" ")[len(number) :], None
    while rest:
        match = _PARAMETER.match(rest)
        if match is None:
            return None
        if match[1] == "holder":
            if holder is not None or (match[2] or "")[:1] != '"':
                return None
            holder = match[2][1:-1]
        rest = rest[match.end() :]
    return token_of_parts(number, holder)


def token_headers(token: Token) -> dict[str, str]:
    """The headers that carry *token* to a resource."""
    return {HEADER: format_token(token)}


def token_metadata(token: Token) -> tuple[tuple[str, str], ...]:
    """The lower-case pairs that carry *token* in gRPC metadata or in the headers of a message."""
    return ((METADATA_KEY, format_token(token)),)
