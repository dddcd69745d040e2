"""
A guard inside etcd: fence, check and your operations in one transaction, so in one step.

    guard = EtcdGuard("etcd://localhost:2379")
    await guard.execute("seats/42", lease.token, put("seats/42/who", "Ada"))

Or the comparison alone, for a transaction of your own with a client of your own:

    body["compare"].append(guard.comparison("seats/42", lease.token))

A fence is a key, ``fence/seats%2F42``, whose value is the token as in a header: ``34;holder="9f8a01c2"``.
"""

from __future__ import annotations

import os
import re
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from fencing_sdk._etcd import json_codec
from fencing_sdk._etcd.gateway import RANGE, TXN
from fencing_sdk._etcd.json_codec import Entry, Json, UnreadableError, compared, entries, ranged, responses, txn
from fencing_sdk._etcd.opening import make_gateway, parts_of
from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import check_name, safe_segment
from fencing_sdk._values.wire import check_token, format_token, parse_token
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import Reports, admitted

__all__ = ["EtcdGuard", "delete", "put"]

_WHO = "EtcdGuard"
_URL = re.compile(r"etcd(\+https)?://[^\x00-\x20\x7f?#]+")
_PREFIX = re.compile(r"[!-~]{1,256}")
_TRIES = 100
_REMEMBERED = 4096
"""Fences whose last state is kept, so that a write of the same holder needs one request."""


class _Fence(NamedTuple):
    """What is known of a fence: the token, and the revision of its key; 0 when there is none."""

    token: Token | None
    modified: int


class _Work(NamedTuple):
    """What the caller wants to be done with the check."""

    operations: Sequence[Json] = ()
    compare: Sequence[Json] = ()
    once: bool = False


class EtcdGuard:
    """
    Keeps fences beside the data in etcd, and runs transactions that only a current token gets in.

    A write is sent once. When its answer is lost, `BackendUnavailableError` leaves and nobody knows
    whether it happened; the same holder may try again, which `raise_to` does by itself.

    Not promised: anything about writes that go around the guard; that a restored backup knows the
    fences that were raised after it was taken.

    Args:
        url: ``etcd://[user:password@]host:2379,host:2379``, or ``etcd+https://``.

        prefix: What the keys of fences begin with.

        ca: As for the backend, like *cert*, *key* and *ssl_context*.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent yet.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "fence/",
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if not _matches(_URL, url):
            msg = "url must look like 'etcd://host:2379', without a query; pass options as arguments"
            raise ConfigurationError(msg)
        if not _matches(_PREFIX, prefix):
            msg = f"prefix must be 1 to 256 printable ASCII characters without spaces, got {shown(prefix)}"
            raise ConfigurationError(msg)
        endpoints, said = parts_of(url, {})
        self._gateway = make_gateway(_WHO, endpoints, ca=ca, cert=cert, key=key, ssl_context=ssl_context, **said)
        self._prefix = prefix.encode()
        self._reports = Reports(observers)
        self._known: OrderedDict[str, _Fence] = OrderedDict()

    def fence_key(self, resource: str) -> str:
        """
        The key of the fence of *resource*: to be read by anybody, and written by the guard alone.

        Raises:
            ConfigurationError: *resource* is not one.
        """
        return self._key(check_name(resource, parameter="resource")).decode()

    def _key(self, resource: str) -> bytes:
        return self._prefix + safe_segment(resource).encode("ascii")

    def comparison(self, resource: str, token: int) -> Json:
        """
        A comparison for a transaction of your own: nobody has raised the fence since it was raised to *token*.

        It holds after `raise_to` with this very token, as ``fences=[guard]`` does at the acquisition,
        until a later holder raises the fence. It is in the words of the JSON gateway; for a gRPC
        client: the value of `fence_key` equals the token as text.

        Raises:
            ConfigurationError: *resource* or *token* is not one.
        """
        key = self._key(check_name(resource, parameter="resource"))
        return compared(key, "VALUE", "EQUAL", format_token(check_token(token)).encode())

    async def execute(
        self, resource: str, token: int, *operations: Json, compare: Sequence[Json] = ()
    ) -> list[Json] | None:
        """
        Check *token* and carry out *operations*, as one transaction; return their answers.

        Args:
            resource: Whose fence is asked.

            token: As ``lease.token``.

            operations: From `put` and `delete`, or as the JSON gateway takes them in ``success``.

            compare: Comparisons of your own. Where one does not hold, nothing is written and None is returned.

        Raises:
            StaleTokenError: the resource has seen a later token; nothing was written.
            ConfigurationError: *resource* or *token* is not one.
            BackendUnavailableError: nobody knows whether it happened.
            BackendRefusedError: etcd will not do this.
        """
        return await self._write("execute", resource, token, _Work(operations, compare, once=True))

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        await self._write("raise_to", resource, token, _Work())
        self._reports.raised(resource, check_token(token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        return (await self._read("highest", check_name(resource, parameter="resource"))).token

    async def _write(self, operation: str, resource: str, token: int, work: _Work) -> list[Json] | None:
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        format_token(checked)  # as in a header, or the text of a fence could be read in two ways
        with self._reports.of_refusals(checked):
            fence = self._known.get(resource)
            if fence is None or (fence.token is not None and checked < fence.token):
                fence = await self._read(operation, resource)  # a refusal is never made from memory
            for _ in range(_TRIES):
                wanted = admitted(resource, checked, fence.token)
                answer = await self._transact(operation, resource, fence, wanted, work)
                if not isinstance(answer, _Fence):
                    return answer
                if answer == fence:
                    return None  # a comparison of the caller's
                fence = self._learn(resource, answer)
        raise BackendUnavailableError(_WHO, operation, f"the fence was raised {_TRIES} times meanwhile")

    async def _transact(
        self, operation: str, resource: str, fence: _Fence, wanted: Token, work: _Work
    ) -> list[Json] | _Fence:
        """Write if the fence is still as it was; else tell how it is."""
        key = self._key(resource)
        raising = [] if _same(wanted, fence.token) else [json_codec.put(key, format_token(wanted).encode())]
        body = txn(
            compare=[compared(key, "MOD", "EQUAL", fence.modified), *work.compare],
            success=[*raising, *work.operations],
            failure=[ranged(key)],
        )
        fields, _ = await self._gateway.call(operation, TXN, body, once=work.once)
        try:
            if fields.get("succeeded") is not True:
                return self._fence_of(entries(responses(fields, 1)[0]), operation)
            answers = responses(fields, len(raising) + len(work.operations))
            if raising:
                self._learn(resource, _Fence(wanted, json_codec.number(fields["header"], "revision")))
        except (UnreadableError, KeyError, TypeError) as error:
            raise BackendUnavailableError(_WHO, operation, str(error)) from error
        return answers[len(raising) :]

    async def _read(self, operation: str, resource: str) -> _Fence:
        body = ranged(self._key(resource))["request_range"]
        fields, _ = await self._gateway.call(operation, RANGE, body)
        try:
            return self._learn(resource, self._fence_of(entries(fields), operation))
        except UnreadableError as error:
            raise BackendUnavailableError(_WHO, operation, str(error)) from error

    def _fence_of(self, found: Sequence[Entry], operation: str) -> _Fence:
        if not found:
            return _Fence(None, 0)
        try:
            return _Fence(parse_token(found[0].value.decode("ascii", "replace")), found[0].modified)
        except ConfigurationError as error:
            detail = f"the value of {shown(found[0].key)} is no fence; set another prefix"
            raise BackendRefusedError(_WHO, operation, detail) from error

    def _learn(self, resource: str, fence: _Fence) -> _Fence:
        self._known[resource] = fence
        self._known.move_to_end(resource)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return fence

    async def aclose(self) -> None:
        """Close the connections."""
        await self._gateway.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None


def _same(token: Token, fence: Token | None) -> bool:
    return fence is not None and token == fence and token.holder == fence.holder


def put(key: str | bytes, value: str | bytes) -> Json:
    """An operation that writes *key*, of text or bytes."""
    return json_codec.put(_bytes(key, "key"), _bytes(value, "value"))


def delete(key: str | bytes) -> Json:
    """An operation that deletes *key*."""
    return json_codec.delete(_bytes(key, "key"))


def _bytes(text: object, parameter: str) -> bytes:
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    if isinstance(text, bytes):
        return text
    msg = f"{parameter} must be a str or bytes, not {type(text).__name__}"
    raise ConfigurationError(msg)
