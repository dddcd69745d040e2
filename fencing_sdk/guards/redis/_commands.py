"""The commands of the caller: checked before they are sent, and the keys that they touch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from fencing_sdk.errors import ConfigurationError, shown

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


def check_commands(commands: Sequence[object]) -> list[Command]:
    """
    Return *commands* if each is a name and its arguments.

    Raises:
        ConfigurationError: one of them is not, or there are no commands.
    """
    if not commands:
        msg = "there is no command to execute; raise_to() raises the fence without one"
        raise ConfigurationError(msg)
    return [_check_command(command) for command in commands]


def check_arguments(arguments: Iterable[object], what: str) -> list[Argument]:
    """
    Return *arguments* if each is text, bytes or a number.

    Raises:
        ConfigurationError: one of them is not. The driver would report it only when it sends it.
    """
    checked: list[Argument] = []
    for argument in arguments:
        if isinstance(argument, bool) or not isinstance(argument, str | bytes | bytearray | memoryview | int | float):
            msg = f"{what} must be str, bytes, int or float, not {type(argument).__name__}"
            raise ConfigurationError(msg)
        checked.append(argument)
    return checked


def packed(commands: Sequence[Command]) -> list[Argument]:
    """Join the words of all *commands*, each command with their number first, as ``execute.lua`` reads them."""
    return [word for command in commands for word in (len(command), *command)]


def keys_of(commands: Sequence[Command]) -> list[Argument]:
    """
    Find the keys that *commands* touch.

    Raises:
        ConfigurationError: the name of a command does not tell which of its words are keys.
    """
    return [key for command in commands for key in _keys(command)]


def _keys(command: Command) -> Sequence[Argument]:
    name, arguments = str(command[0]).upper(), command[1:]
    if name in _ALL:
        return arguments
    if name in _EVERY_SECOND:
        return arguments[::2]
    if name in _ELSEWHERE:
        msg = f"the guard cannot tell which words of {name} are keys; name those of all commands with keys=[...]"
        raise ConfigurationError(msg)
    return arguments[: 0 if name in _NONE else 2 if name in _FIRST_TWO else 1]


def _check_command(command: object) -> Command:
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
