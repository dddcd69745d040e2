"""
Lua scripts with the check in front: the server runs check and body as one atomic step.

Arguments are sent beside the text of a script, so they cannot become code.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path

from fencing_sdk.errors import ConfigurationError


class CheckedScript:
    """A script whose body runs if the check accepts the token. The second item of the reply is the body's value."""

    __slots__ = ("sha", "text")

    def __init__(self, body: str) -> None:
        self.text = f"do {_check()} end local function body() {body}\nend\nreturn {{1, body()}}"
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def checked_body(body: object) -> str:
    """
    Return *body* if it can follow the check. The server checks its syntax.

    Raises:
        ConfigurationError: it is no text, or begins with a line that must be the first of a script.
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
        msg = "body has a lone surrogate, which cannot be sent"
        raise ConfigurationError(msg) from None
    return body


def script_of_file(name: str) -> CheckedScript:
    """Read ``name.lua`` of this folder, and put the check in front."""
    return CheckedScript(_read(name))


@cache
def _check() -> str:
    lines = (line.strip() for line in _read("check").splitlines())
    return " ".join(line for line in lines if line and not line.startswith("--"))


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text(encoding="utf-8")
