"""
Lua scripts with the check in front: the commands and keys that they take, and what they answer.

The server runs check and body as one atomic step. Arguments are sent beside the text of a script, so they cannot become
code. The keys of a resource's fence and of its data share one hash tag:

    fence:{seats/42}       the fence, in the slot of every key with {seats/42} in it
    {seats/42}:row         guard.key("seats/42", "row")
    passenger:{seats/42}   a key that the user has named

A cluster hashes the text between the first ``{`` and the next ``}``. So braces and percent signs in a name are
percent-encoded: no two resources share a fence.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha1
from typing import TypeAlias, cast

from fencing_sdk._values.drivers import packed_text
from fencing_sdk._values.token import Token, token_of_parts
from fencing_sdk.errors import BackendRefusedError, ConfigurationError, shown
from fencing_sdk.guards import refusal

_SLOTS = 16_384
_ESCAPES = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def tag(resource: str) -> str:
    """The hash tag of *resource*, with its braces."""
    return f"{{{resource.translate(_ESCAPES)}}}"


def fence_key(prefix: str, resource: str) -> bytes:
    """The one key of the fence, the same for clients of every encoding."""
    return f"{prefix}:{tag(resource)}".encode()


def slot(key: bytes) -> int:
    """The slot of a cluster that *key* belongs to."""
    _, opened, rest = key.partition(b"{")
    tagged, closed, _ = rest.partition(b"}")
    return crc_hqx(tagged if opened and closed and tagged else key, 0) % _SLOTS


def check_slots(fences: Mapping[str, bytes], keys: Sequence[bytes]) -> None:
    """Refuse fences, by resource, and *keys* that a cluster would keep apart from the first fence."""
    (resource, fence), *others = fences.items()
    for other, another in others:
        if slot(another) != slot(fence):
            msg = (
                f"the fences of {shown(resource)} and {shown(other)} are in different slots of the cluster, so no "
                "script can check both and write: call admit_all(tokens), then execute(...) for each resource"
            )
            raise ConfigurationError(msg)
    for key in keys:
        if slot(key) != slot(fence):
            msg = (
                f"key {shown(key)} is in another slot of the cluster than the fence of {shown(resource)}; "
                f"name it guard.key({shown(resource)}, ...) or let it carry {shown(tag(resource))}"
            )
            raise ConfigurationError(msg)


Argument: TypeAlias = str | bytes | bytearray | memoryview | int | float
"""The types that Redis drivers send unchanged."""
Command: TypeAlias = Sequence[Argument]
"""The words of a command, such as ``("HSET", "{seats/42}:row", "who", "Ada")``."""

WORDS_LIMIT = 5_000
"""Words of one command. Lua cannot unpack 8,000, and would fail only after the commands before it have run."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)

_ALL = {
    *("DEL", "UNLINK", "EXISTS", "TOUCH", "MGET", "PFCOUNT", "PFMERGE"),
    *("SDIFF", "SINTER", "SUNION", "SDIFFSTORE", "SINTERSTORE", "SUNIONSTORE"),
}
_EVERY_SECOND = {"MSET", "MSETNX"}
_FIRST_TWO = {"COPY", "GEOSEARCHSTORE", "LCS", "LMOVE", "RENAME", "RENAMENX", "RPOPLPUSH", "SMOVE", "ZRANGESTORE"}
_NONE = {"ECHO", "PING", "PUBLISH", "TIME"}
_ELSEWHERE = {
    *("BITOP", "BLMOVE", "BLMPOP", "BLPOP", "BRPOP", "BRPOPLPUSH", "BZMPOP", "BZPOPMAX", "BZPOPMIN"),
    *("EVAL", "EVALSHA", "FCALL", "GEORADIUS", "GEORADIUSBYMEMBER", "JSON.MGET", "JSON.MSET", "LMPOP", "MEMORY"),
    *("MIGRATE", "MSETEX", "OBJECT", "SINTERCARD", "SORT", "TS.MADD", "XGROUP", "XINFO", "XREAD", "XREADGROUP"),
    *("ZDIFF", "ZDIFFSTORE", "ZINTER", "ZINTERCARD", "ZINTERSTORE", "ZMPOP", "ZUNION", "ZUNIONSTORE"),
}


def check_command(command: object) -> Command:
    """Return *command* if it is a name and its arguments."""
    if isinstance(command, str | bytes) or not isinstance(command, Sequence) or not command:
        msg = f'a command is a sequence of its words, such as ("SET", key, value), not {shown(command)}'
        raise ConfigurationError(msg)
    name = command[0]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        msg = f"the first word of a command must be its name, such as 'SET', got {shown(name)}"
        raise ConfigurationError(msg)
    if len(command) > WORDS_LIMIT:
        msg = f"{name} has {len(command)} words; {WORDS_LIMIT} is the most, so pass several commands to one execute()"
        raise ConfigurationError(msg)
    return check_arguments(command, f"the arguments of {name}")


def check_arguments(arguments: Iterable[object], what: str) -> list[Argument]:
    """Return *arguments* if each is text, bytes or a number. The driver would refuse others only when it sends them."""
    checked: list[Argument] = []
    for argument in arguments:
        if isinstance(argument, bool) or not isinstance(argument, str | bytes | bytearray | memoryview | int | float):
            msg = f"{what} must be str, bytes, int or float, not {type(argument).__name__}"
            raise ConfigurationError(msg)
        checked.append(argument)
    return checked


def keys_of(command: Command) -> Sequence[Argument]:
    """Find the keys that *command* touches. Refuse one whose name does not show which of its words are keys."""
    name, arguments = str(command[0]).upper(), command[1:]
    if name in _ALL:
        return arguments
    if name in _EVERY_SECOND:
        return arguments[::2]
    if name in _ELSEWHERE:
        msg = f"the guard does not know which words of {name} are keys; name those of all commands with keys=[...]"
        raise ConfigurationError(msg)
    return arguments[: 0 if name in _NONE else 2 if name in _FIRST_TWO else 1]


class CheckedScript:
    """A script whose body runs if the check accepts the token. The second item of the reply is the body's value."""

    __slots__ = ("sha", "text")

    def __init__(self, body: str) -> None:
        self.text = f"do {_check()} end local function body() {body}\nend\nreturn {{1, body()}}"
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


EXECUTE = """
local replies, at = {}, 1
while ARGV[at] do
  local last = at + tonumber(ARGV[at])
  local reply = redis.pcall(unpack(ARGV, at + 1, last))
  replies[#replies + 1] = reply
  if type(reply) == 'table' and reply.err then break end
  at = last + 1
end
return replies"""
"""
The body that runs the caller's commands in order, up to the first that fails. The error is then the last reply.

ARGV: for each command, the number of its words and then the words.
"""


@cache
def _check() -> str:
    """Return the lines of ``check.lua`` as one, so that the line numbers in an error are those of the body."""
    lines = packed_text(__package__, "check.lua").splitlines()
    return " ".join(line for line in map(str.strip, lines) if line and not line.startswith("--"))


_REFUSED, _ACCEPTED = 0, 1


def accepted(tokens: Mapping[str, Token], fences: Sequence[bytes], reply: object) -> object:
    """
    Return the value of a script whose check has accepted the *tokens*, of which each resource has a fence.

    Raises:
        StaleTokenError: the check has refused one.
        BackendRefusedError: the key of the fence holds something that no guard has written.
    """
    verdict, *rest = cast("list[object]", reply)
    if verdict == _ACCEPTED:
        return rest[0] if rest else None
    which = cast("int", rest[-1]) - 1
    if verdict == _REFUSED:
        resource, token = list(tokens.items())[which]
        number, holder = (_text(part) for part in rest[:-1])
        raise refusal(resource, token, Token(int(number), holder or None))
    raise _no_fence(fences[which], "write")


def fence_from(stored: object, key: bytes) -> Token:
    """Read the fence that is *stored* at *key*. Refuse what no guard has written."""
    number, space, holder = _text(stored).partition(" ")
    token = token_of_parts(number, holder if space else None)
    if token is None:
        raise _no_fence(key, "highest")
    return token


def _no_fence(key: bytes, operation: str) -> BackendRefusedError:
    return BackendRefusedError(
        "redis", operation, f"{shown(key)} is not a fence; another program writes there, so set another prefix"
    )


def _text(reply: object) -> str:
    return reply.decode("ascii", "replace") if isinstance(reply, bytes) else cast("str", reply)
