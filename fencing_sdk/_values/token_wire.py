"""
A token on its way: in an HTTP header, in message metadata, in an environment variable.

The header is an RFC 9651 item, ``Fencing-Token: 34;holder="9f8a01c2"``. Plain digits and the name
``X-Fencing-Token``, which other systems send, are understood too. Whatever else arrives is an
error: a number that is read differently on two sides is no fence.
"""

from __future__ import annotations

import re
from functools import lru_cache

from fencing_sdk._values.claim import TOKEN_LIMIT, Token
from fencing_sdk.errors import ConfigurationError, shown

HEADER = "Fencing-Token"
OLD_HEADER = "X-Fencing-Token"
ACCEPTED_HEADERS = (HEADER, OLD_HEADER)
METADATA_KEY = HEADER.lower()
"""The same name where upper case is refused: gRPC metadata, message headers, ASGI."""

ENV_TOKEN = "FENCING_TOKEN"  # noqa: S105  (the name of a variable; a fencing token is no secret)
ENV_LOCK = "FENCING_LOCK"
ENV_DEADLINE = "FENCING_DEADLINE"
ENV_URL = "FENCING_URL"
ENV_RECORD = "FENCING_RECORD"

_ITEM = re.compile(r'(0|[1-9][0-9]{0,15})(?:;holder="([0-9a-f]{1,64})")?', re.ASCII)
TEXT_LIMIT = 90
"""Characters of the longest item that is read."""


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


def format_token(token: Token) -> str:
    """
    Write *token* as a header value, with its holder where it is known.

    Raises:
        ConfigurationError: `parse_token` would not read it back: a token made by hand with a holder that is none.
    """
    check_token(token)
    return _written(int(token), None if token.holder is None else f"{token.holder}")


def parse_token(text: object) -> Token:
    """
    Read a header value back.

    Raises:
        ConfigurationError: *text* is not plain ASCII digits below 2**53 with an optional holder.
    """
    token = read_token(text) if isinstance(text, str) and len(text) <= TEXT_LIMIT else None
    if token is None:
        msg = f"not a fencing token: {shown(text)}; expected digits such as 34"
        raise ConfigurationError(msg)
    return token


# One holder sends one token many times, so both ways are remembered. The limits bound what a stranger can fill.


@lru_cache(maxsize=512)
def _written(number: int, holder: str | None) -> str:
    text = f"{number:d}" if holder is None else f'{number:d};holder="{holder}"'
    parse_token(text)
    return text


@lru_cache(maxsize=512)
def read_token(text: str) -> Token | None:
    """Read a *text* of at most `TEXT_LIMIT` characters; None when it is no token."""
    match = _ITEM.fullmatch(text)
    return None if match is None or int(match[1]) >= TOKEN_LIMIT else Token(int(match[1]), match[2])


def token_headers(token: Token) -> dict[str, str]:
    """The headers that carry *token* to a resource."""
    return {HEADER: format_token(token)}


def token_metadata(token: Token) -> tuple[tuple[str, str], ...]:
    """The lower-case pairs that carry *token* in gRPC metadata or in the headers of a message."""
    return ((METADATA_KEY, format_token(token)),)
