"""
A guard inside Kahuna: fence and data in one value, which is replaced by revision.

    guard = KahunaGuard("kahuna://kahuna1:2070,kahuna2:2070,kahuna3:2070")
    await guard.write("seats/42", lease.token, b"Ada")

Each write reads the value, compares the tokens, and replaces the value if its revision is still the one that was read.
If another write was first, it begins again.

No script of the server is used: in a script, the check and the write are two steps. See docs/backends/kahuna.md.
"""

from __future__ import annotations

import os
import ssl
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from fencing_sdk._http.tls import tls_context
from fencing_sdk._kahuna import NodeClient, nodes_of_url
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.token import Token, check_token, format_token
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import StoreGuard, admitted, check_place, check_token_of, one_at_a_time
from fencing_sdk.guards.kahuna._revisions import (
    GUARD,
    FencedValue,
    KahunaValues,
    Pauses,
    Replacement,
    ValueAnswer,
    read_nodes,
    read_revision,
)

__all__ = ["KahunaGuard"]

_DATA_LIMIT = 2**19
"""Bytes of data: half of the largest value that was tried on a real server."""
_BODY_LIMIT = 4 * _DATA_LIMIT
_LONGEST_CALL = 15.0
"""The time limit of a call in seconds: three times what a cluster needs to replace a leader."""


class KahunaGuard(StoreGuard):
    """
    Keeps fence and data of each resource in one value of Kahuna, and replaces it only with a current token.

    A write whose outcome is unknown at first is settled by reading the value. Where that is not possible for 15 s,
    `BackendUnavailableError` is raised, and the write may have been carried out or may still be. The same holder may
    write again.

    Not promised: anything about writes that go around the guard; that `read` sees the last write, if the node that
    answers is cut off from the others; anything after an operator deletes the value, because the fence goes with it.

    Args:
        url: ``kahuna://host:2070,host:2070``, or ``kahuna+https://host:2071``.

        prefix: The beginning of every key.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        ssl_context: For client certificates and the like, instead of *ca*.

        connect_timeout: Seconds to wait for a node to accept the connection, before the guard asks the next one.

        connections: The most calls that are under way at once, to all nodes together.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent yet.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "guarded/",
        ca: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout: float = 1.0,
        connections: int = 32,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(observers)
        check_place(url, prefix, schemes=r"kahuna(?:\+https)?", example="kahuna://host:2070,host:2070")
        endpoints, tls = nodes_of_url(url)
        nodes = NodeClient(
            ValueAnswer.read,
            body_limit=_BODY_LIMIT,
            tls=tls_context(tls=tls, scheme="kahuna+https", ca=ca, context=ssl_context),
            connect_timeout=connect_timeout,
            connections=connections,
        )
        self._values = KahunaValues(nodes, read_nodes(endpoints, tls=tls))
        self._prefix = prefix

    def key(self, resource: str) -> str:
        """
        The key of the value of *resource*. Any client may read it; only the guard writes it.

        Raises:
            ConfigurationError: *resource* cannot be the name of a resource.
        """
        return self._prefix + check_name(resource, parameter="resource")

    async def write(self, resource: str, token: int, data: bytes) -> None:
        """
        Check *token* and write *data*, in one step.

        Raises:
            StaleTokenError: the resource has seen a later token; nothing was written.
            ConfigurationError: *resource* cannot be the name of a resource, *token* no token, or *data* no bytes or
                more than 512 KiB.
            BackendUnavailableError: the outcome is unknown.
            BackendRefusedError: Kahuna rejects the request, or another program has written the value.
        """
        checked = _checked(data)
        await self._replace("write", resource, token, lambda _: checked)

    async def update(self, resource: str, token: int, change: Callable[[bytes | None], bytes]) -> bytes:
        """
        Check *token* and replace the data by ``change(data)``, in one step; return what was written.

        *change* is called again with newer data, and the token is checked again, when another write was first.
        Its argument is None before the first write. It must not await, and must have no effects of its own.

        Raises:
            StaleTokenError: as `write`, like all other errors, and those that *change* raises.
        """
        written = await self._replace("update", resource, token, lambda data: _checked(change(data)))
        assert written is not None  # what was checked is bytes
        return written

    async def read(self, resource: str) -> bytes | None:
        """
        Return the data; None before the first write.

        Raises:
            ConfigurationError: *resource* cannot be the name of a resource.
            BackendUnavailableError: no node can be reached, or no node has answered for 15 s.
            BackendRefusedError: another program has written the value.
        """
        value = await self._present("read", resource)
        return None if value is None else value.data

    async def admit_all(self, tokens: Mapping[str, int]) -> NoReturn:  # noqa: ARG002
        """
        Refuse: each resource is a value of its own, and no step of Kahuna's compares and replaces several.

        Raises:
            UnsupportedError: always. Write one value that holds all of it.
        """
        raise one_at_a_time(self)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stay as they are."""
        await self._replace("raise_to", resource, token, lambda data: data)
        self._reports.raised(check_token_of(resource, token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        value = await self._present("highest", resource)
        return None if value is None else value.fence

    async def _present(self, operation: str, resource: str) -> FencedValue | None:
        """Read for its own sake, not for a write."""
        key, pauses = self.key(resource), Pauses(_LONGEST_CALL)
        return (await read_revision(self._values, operation, key, pauses, for_write=False)).value

    async def _replace(
        self, operation: str, resource: str, token: int, change: Callable[[bytes | None], bytes | None]
    ) -> bytes | None:
        """Replace the value until it is done, refused, or given up. Return the data."""
        key, checked = self.key(resource), check_token(token)
        format_token(checked)  # refuses a token whose text in the value could be read in two ways
        pauses = Pauses(_LONGEST_CALL)
        with self._reports.of_refusals(checked):
            while True:
                before = await read_revision(self._values, operation, key, pauses)
                fence, data = (None, None) if before.value is None else (before.value.fence, before.value.data)
                value = FencedValue(admitted(resource, checked, fence), change(data), uuid.uuid4().hex[:16])
                if await Replacement(self._values, operation, key, pauses, before=before, value=value).run():
                    return value.data
                if pauses.over:
                    raise BackendUnavailableError(GUARD, operation, "other writes were first, for all of 15 s")
                await pauses.sleep()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._values.aclose()


def _checked(data: object) -> bytes:
    if not isinstance(data, bytes):
        msg = f"data must be bytes, not {type(data).__name__}"
        raise ConfigurationError(msg)
    if len(data) > _DATA_LIMIT:
        msg = f"data must have at most {_DATA_LIMIT} bytes, got {len(data)}; keep the rest elsewhere"
        raise ConfigurationError(msg)
    return data
