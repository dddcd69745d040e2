"""``fencing init``: what a store needs is made, or shown, before the first lock."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import anyio

from fencing_sdk._values.token_wire import ENV_URL
from fencing_sdk.abc import SupportsFounding, SupportsSchema
from fencing_sdk.backends import from_url
from fencing_sdk.cli._store import StoreOptions
from fencing_sdk.cli._streams import say, write_out
from fencing_sdk.cli.run import Exit
from fencing_sdk.errors import BackendError, ConfigurationError

_PATIENCE = 30.0
"""Seconds: a table that others read and write is not created at once."""


def prepare(where: StoreOptions, *, sql: bool) -> int:
    """
    Create the tables of the store that is named, or print them as *sql*; return the exit code.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    store = where.named()
    if store is None:
        msg = f"--url is missing, and {ENV_URL} is not set; write: fencing init --url postgresql://host/database"
        raise ConfigurationError(msg)
    backend = from_url(store.url)
    if isinstance(backend, SupportsFounding):
        return _found(backend)
    if not isinstance(backend, SupportsSchema):
        say(f"nothing to do: {store.url.partition('://')[0]}:// needs no tables, or makes them by itself")
        return 0
    if sql:
        write_out(f"{backend.schema_sql()}\n")  # for a migration: fencing init --sql > 0042_locks.sql
        return 0
    try:
        asyncio.run(_create(backend))
    except BackendError as error:
        say(f"nothing was created: {error}")
        return Exit.UNAVAILABLE
    except TimeoutError:
        say(f"nothing was created: no answer within {_PATIENCE:g} s")
        return Exit.UNAVAILABLE
    say("the store is ready")
    return 0


def _found(backend: SupportsFounding) -> int:
    async def found() -> str:
        async with aclosing(backend):
            return await backend.found()

    try:
        say(asyncio.run(found()))
    except BackendError as error:
        say(f"nothing was founded: {error}")
        return Exit.UNAVAILABLE
    return 0


async def _create(backend: SupportsSchema) -> None:
    async with aclosing(backend):
        with anyio.fail_after(_PATIENCE):
            await backend.create_schema()
