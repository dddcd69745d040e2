"""Which store a command uses: the one that an option or the environment names, or else a file of this user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from fencing_sdk._connect import read_url_file, store_of_environment
from fencing_sdk._values.token_wire import ENV_URL, ENV_URL_FILE, ENV_WITHHELD
from fencing_sdk.cli._streams import say
from fencing_sdk.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ChosenStore:
    """A store that was found."""

    url: str = field(repr=False)
    variables: Mapping[str, str] = field(repr=False)
    """What names it to another program."""
    named: bool = True
    """False for the file of this user, which every command finds without being given its name."""

    @property
    def warning(self) -> str:
        """What a reader has to know of a store that was not named; empty for one that was."""
        if self.named:
            return ""
        names = f"--url, --url-file, {ENV_URL} or {ENV_URL_FILE}"
        return f"no store is named by {names}: these are the locks of this user on this machine alone, in {self.url}"

    def passed(self, *, on: bool) -> Mapping[str, str]:
        """Return the variables for a command that runs under a lock of this store, which it may know if *on*."""
        if on:
            return self.variables
        return {ENV_WITHHELD: "1"} if self.named else {}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options that name a store.

    Args:
        url: Where locks are kept. Default: $FENCING_URL, else a file of this user on this machine.

        url_file: A file that has the URL as its only line: a place for a password. Default: $FENCING_URL_FILE.
    """

    url: str | None = field(default=None, repr=False)
    url_file: Path | None = None

    def named(self) -> ChosenStore | None:
        """
        Return the store that an option or else the environment names.

        Raises:
            ConfigurationError: two are named; a file cannot be read, or has no URL; the URL is kept from this command.
        """
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
        """
        Return the store that is named, or else the file in which this user keeps locks on this machine.

        Raises:
            ConfigurationError: as `named`.
            OSError: the folder of that file cannot be made.
            RuntimeError: it is not known where this user is at home.
        """
        if found := self.named():
            return found
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        folder = (state if state.is_absolute() else Path.home() / ".local" / "state") / "fencing"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        url = f"sqlite:///{quote(os.fsencode(folder / 'locks.db'))}"
        return ChosenStore(url, {ENV_URL: url}, named=False)


def _in_file(path: Path, url: str) -> ChosenStore:
    """A store whose URL another program reads from the same file too, unless that is a pipe, which is empty by now."""
    return ChosenStore(url, {ENV_URL_FILE: str(path.absolute())} if path.is_file() else {ENV_URL: url})
