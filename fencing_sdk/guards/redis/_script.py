"""
Lua with the check in front of it: one script, and so one step at the server.

Arguments travel beside the text, never in it, so none can become code.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path

from fencing_sdk.errors import ConfigurationError


class Script:
    """A body that runs when the check accepts the token. Its value is the second item of the reply."""

    __slots__ = ("sha", "text")

    def __init__(self, body: str) -> None:
        self.text = f"do {_check()} end local function body() {body}\nend\nreturn {{1, body()}}"
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def check_body(body: object) -> str:
    """
    Return *body* if it can follow the check. Its syntax is the server's to judge.

    Raises:
        ConfigurationError: it is no text, or wants to be the first line.
    """
    if not isinstance(body, str):
        msg = f"body must be Lua as a str, not {type(body).__name__}"
        raise ConfigurationError(msg)
    if body.lstrip().startswith("#!"):
        msg = "body must not begin with a '#!' line: the check stands in front of it"
        raise ConfigurationError(msg)
    try:
        body.encode()
    except UnicodeEncodeError:
        msg = "body has a lone surrogate, which is no Lua"
        raise ConfigurationError(msg) from None
    return body


def own_script(name: str) -> Script:
    """The script of this folder's ``name.lua``."""
    return Script(_read(name))


@cache
def _check() -> str:
    lines = (line.strip() for line in _read("check").splitlines())
    return " ".join(line for line in lines if line and not line.startswith("--"))


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text(encoding="utf-8")
