"""
The arguments of a command: its words, its options, and the store that an option or the environment names.

A command that names no store uses a file of this user.
"""
# ruff: noqa: PLC0415  (what cron starts every minute loads no more than its command needs)

from __future__ import annotations

import argparse
import asyncio
import inspect
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from fencing_sdk._client import LockClient, enter
from fencing_sdk._connect import connect, read_url_file, store_of_environment
from fencing_sdk._values.token import ENV_URL, ENV_URL_FILE, ENV_WITHHELD
from fencing_sdk.cli._streams import Exit, say, write_out
from fencing_sdk.errors import BackendError, ConfigurationError, LeaseLostError, UnsupportedError, shown

_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_DURATION = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit in _UNITS), re.ASCII)
"""The units in falling order and each once, so that ``5m1h`` and ``5m5m`` are not durations."""


class HelpShown(Exception):  # noqa: N818  (no error)
    """The caller asked for the help, which is on the screen now."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """On 80 columns: to find out how many there are would take longer than the rest of the start."""

    def __init__(self, prog: str, **others: Any) -> None:
        super().__init__(prog, **others, max_help_position=26, width=80)


class Arguments(argparse.ArgumentParser):
    """
    The arguments of one *command*: words, and options before, between and after them; behind ``--`` all are words.

    argparse reads the options. What it leaves are the words, which may then be any number, wherever they stand.
    """

    def __init__(self, command: Callable[[Sequence[str]], int], usage: str, words: Mapping[str, str]) -> None:
        described = "".join(f"\n  {word:<24}{about}" for word, about in words.items())
        super().__init__(
            usage=f"fencing {usage}",
            description=f"{(inspect.getdoc(command) or '')}\n{described}".rstrip(),
            formatter_class=_Help,
            add_help=False,
            allow_abbrev=False,
        )
        self._names = list(words)
        self._durations: set[str] = set()
        self._once: list[str] = []
        self._shown = self.add_argument_group("Parameters")
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)

    def flag(self, name: str, about: str) -> None:
        self._shown.add_argument(name, action="store_true", help=about)

    def option(self, name: str, about: str, **kinds: Any) -> None:
        self._shown.add_argument(name, help=about, **kinds)
        if kinds.get("action") != "append":
            self._once.append(name)

    def duration(self, name: str, about: str, default: float | None = None, *, forever: bool = False) -> None:
        read = _patience if forever else parse_duration
        self._shown.add_argument(name, help=about, type=read, default=default, metavar="TIME")
        self._durations.add(name)
        self._once.append(name)

    def store(self) -> None:
        self.option("--url", "Where locks are kept. Default: $FENCING_URL, else a file of this user on this machine.")
        about = "A file that has the URL as its only line: a place for a password. Default: $FENCING_URL_FILE."
        self.option("--url-file", about, type=Path, metavar="FILE")

    def read(self, arguments: Sequence[str], *, least: int = 0, most: int = 0) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, with the store of those that have one as ``where``, and from *least* to *most* words."""
        end = arguments.index("--") if "--" in arguments else len(arguments)
        joined: list[str] = []
        for word in arguments[:end]:
            if joined and joined[-1] in self._durations:
                joined[-1] += f"={word}"  # so that the message to `--ttl -3s` is about the value
            else:
                joined.append(word)
        names = [word.partition("=")[0] for word in joined]
        if twice := [name for name in self._once if names.count(name) > 1]:
            self.error(f"{twice[0]} occurs more than once")
        given, words = self.parse_known_args(joined)
        for word in words:
            if word.startswith("-") and word != "-":
                self.error(f"unknown option {shown(word.partition('=')[0])}")
        words += arguments[end + 1 :]
        if hasattr(given, "url_file"):
            given.where = StoreOptions(given.url, given.url_file)
            from fencing_sdk.backends import BUILTIN

            scheme, colon, _ = words[0].partition("://") if words else ("", "", "")
            if colon and (scheme in BUILTIN or scheme.partition("+")[0] in BUILTIN):  # nothing is held under a URL
                command = self.usage.split()[1] if self.usage else ""
                self.error(f"{scheme}://... is the URL of a store; write: fencing {command} --url {scheme}://...")
        if not least <= len(words) <= most:
            problem = f"{self._names[len(words)]} is missing" if len(words) < least else "too many arguments"
            self.error(f"{problem}; write: {self.usage}")
        return given, words

    def print_help(self, file: object = None) -> NoReturn:  # noqa: ARG002  (argparse's own)
        """Show the help: argparse would take a closed pipe for a success."""
        write_out(self.format_help())
        raise HelpShown

    def error(self, message: str) -> NoReturn:
        """Refuse in one line what is wrong, as every command does."""
        said, ignored, _ = message.removeprefix("argument ").partition("ignored explicit argument")
        _, required, missing = said.partition("the following arguments are required: ")
        said = f"{missing} is missing; write: {self.usage}" if required else said
        raise ConfigurationError(f"{said}it takes no value" if ignored else said)


def parse_number(text: str) -> int:
    """Return the whole number in *text*."""
    try:
        return int(text)
    except ValueError as error:
        msg = f"expected a whole number, not {shown(text)}"
        raise argparse.ArgumentTypeError(msg) from error


def _patience(text: str) -> float | None:
    return None if text == "forever" else parse_duration(text, also=", or: forever")


def parse_duration(text: str, *, also: str = "") -> float:
    """Return the seconds that *text* means. *also* ends the list of what is expected."""
    text = text.strip()
    if text and (match := _DURATION.fullmatch(text)):
        return sum(float(number) * unit for number, unit in zip(match.groups("0"), _UNITS.values(), strict=True))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or not text.isascii():
        msg = f"expected a duration such as 90s, 5m or 1h, or a number of seconds{also}, not {shown(text)}"
        raise argparse.ArgumentTypeError(msg)  # of a ValueError, argparse drops the text
    return seconds


@dataclass(frozen=True, slots=True)
class ChosenStore:
    """A store that was found."""

    url: str = field(repr=False)
    variables: Mapping[str, str] = field(repr=False)
    """The variables that name this store to another program."""
    named: bool = True
    """False for the file of this user, which every command finds without being given its name."""

    @property
    def warning(self) -> str:
        """A sentence about a store that was not named; empty for one that was."""
        if self.named:
            return ""
        names = f"--url, --url-file, {ENV_URL} or {ENV_URL_FILE}"
        return f"no store is named by {names}: these are the locks of this user on this machine alone, in {self.url}"

    def passed(self, *, on: bool) -> Mapping[str, str]:
        """Return the variables for a command that runs under a lock of this store, which it may know if *on*."""
        if on:
            return self.variables
        return {ENV_WITHHELD: "1"} if self.named else {}

    def ask(self, work: Callable[[LockClient], Awaitable[int]], *, namespace: str = "", wait: float = 0.0) -> int:
        """Open a client on it, *wait* for one that is away, do *work* and return the exit code."""

        async def asking() -> int:
            async with aclosing(connect(self.url, namespace=namespace, open_wait=wait)) as locks:
                await enter(locks, lazily=True)
                return await work(locks)

        try:
            return asyncio.run(asking())
        except (BackendError, UnsupportedError, LeaseLostError) as error:
            say(str(error))
            return Exit.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options ``--url`` and ``--url-file``."""

    url: str | None = field(default=None, repr=False)
    url_file: Path | None = None

    def named(self) -> ChosenStore | None:
        """Return the store that an option or else the environment names."""
        if self.url is not None and self.url_file is not None:
            msg = "--url and --url-file both name a store; leave one of them out"
            raise ConfigurationError(msg)
        if self.url_file is not None:
            return _in_file(self.url_file, read_url_file(self.url_file, "--url-file", say))
        if self.url == "":
            msg = "--url is empty; is the variable in it not set?"
            raise ConfigurationError(msg)
        if self.url is not None:
            return ChosenStore(self.url, {ENV_URL: self.url})
        variable, url = store_of_environment(say) or ("", "")
        if variable == ENV_URL_FILE:
            return _in_file(Path(os.environ[ENV_URL_FILE]), url)
        return ChosenStore(url, {ENV_URL: url}) if url else None

    def store(self) -> ChosenStore:
        """Return the store that is named, or else the file in which this user keeps locks on this machine."""
        if found := self.named():
            return found
        url = f"sqlite:///{quote(os.fsencode(state_folder() / 'locks.db'))}"
        return ChosenStore(url, {ENV_URL: url}, named=False)

    def found(self) -> ChosenStore | None:
        """
        Return the store for a command that other processes see, after a warning if it was not named.

        None, after a message, if there is no folder for one.

        Raises:
            ConfigurationError: it is in memory.
        """
        try:
            store = self.store()
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            say(f"no folder for the locks ({error}); set {ENV_URL} or XDG_STATE_HOME")
            return None
        if store.url.startswith("memory:"):
            msg = "memory:// locks work only inside one process; use a sqlite:// URL, a server, or no URL"
            raise ConfigurationError(msg)
        if store.warning:
            say(store.warning)
        return store


def state_folder() -> Path:
    """Return the folder in which this user keeps locks and tickets on this machine, which is made if it is missing."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = (state if state.is_absolute() else Path.home() / ".local" / "state") / "fencing"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _in_file(path: Path, url: str) -> ChosenStore:
    """A store whose URL another program reads from the same file too, unless that is a pipe, which is empty by now."""
    return ChosenStore(url, {ENV_URL_FILE: str(path.absolute())} if path.is_file() else {ENV_URL: url})
