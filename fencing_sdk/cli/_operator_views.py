"""What the operators' commands share: a client for one look, and lock names, times and holders as text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from fencing_sdk._client import LockClient
from fencing_sdk._connect import connect
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.reports import read_facts
from fencing_sdk._values.token import ENV_URL
from fencing_sdk.cli._options import StoreOptions
from fencing_sdk.cli._streams import Exit, say
from fencing_sdk.errors import BackendError, ConfigurationError, UnsupportedError, shown

NUMBERS = ("TOKEN", "HELD", "LEFT", "WAIT")
"""Headings of columns that stand on the right."""


def look(
    where: StoreOptions, work: Callable[[LockClient], Awaitable[int]], *, head: Callable[[str], object] = say
) -> int:
    """
    Open a client on the store that is named, or the default one, do *work* and return the exit code.

    *head* shows the default one: nothing is held there by other users and machines.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    try:
        store = where.store()
    except (OSError, RuntimeError) as error:
        say(f"no folder for the locks ({error}); set {ENV_URL} or XDG_STATE_HOME")
        return Exit.UNAVAILABLE
    if store.url.startswith("memory:"):
        msg = "memory:// locks are known only inside their process; use a sqlite:// URL, a server, or no URL"
        raise ConfigurationError(msg)

    if store.warning:
        head(store.warning)

    async def looking() -> int:
        async with connect(store.url, observers=()) as locks:
            return await work(locks)

    try:
        return asyncio.run(looking())
    except (BackendError, UnsupportedError) as error:
        say(str(error))
        return Exit.UNAVAILABLE


def readable(text: str) -> str:
    """*text* as it is, or escaped if it could move a terminal's cursor: names and labels come from others."""
    return text if text.isprintable() else shown(text)


def span(seconds: float | None) -> str:
    """Seconds as people say them: ``0.4s``, ``12s``, ``3m05s``, ``2h07m``, ``3d04h``; a dash for what is not known."""
    if seconds is None:
        return "-"
    if seconds < _ROUGH:
        return f"{max(seconds, 0.0):.1f}s"
    for name, unit, lesser, part in _UNITS:
        if seconds >= unit:
            return f"{int(seconds // unit)}{name}{int(seconds % unit // part):02d}{lesser}"
    return f"{int(seconds)}s"


_ROUGH = 10.0
"""Seconds from which on tenths do not matter."""
_UNITS = (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1))


def mode_of(one: Holder | Waiting) -> str:
    """How it holds or wants the name: ``lock``, ``reader``, ``permit 3``."""
    permit = one.permit if isinstance(one, Holder) else None
    return one.mode.word if permit is None else f"{one.mode.word} {permit}"


def as_fields(one: Holder | Waiting) -> dict[str, object]:
    """The fields for JSON, with times in seconds."""
    if isinstance(one, Waiting):
        return {
            "holder": one.id,
            "mode": one.mode.word,
            "waiting_for": one.waiting_for,
            "label": one.label,
        }
    return {
        "name": one.name,
        "token": one.token,
        "holder": one.id,
        "mode": one.mode.word,
        "permit": one.permit,
        "remaining": one.remaining,
        "held_for": one.held_for,
        "waiters": one.waiters,
        "label": one.label,
        "kept_until": read_facts(one).kept_until,
    }


def at_a_terminal() -> bool:
    """Return whether a person can answer a question."""
    return os.isatty(0) and os.isatty(1)
