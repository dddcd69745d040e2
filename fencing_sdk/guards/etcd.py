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
import ssl
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fencing_sdk._etcd import (
    RANGE,
    TXN,
    Entry,
    Json,
    compared,
    entries,
    make_gateway,
    ranged,
    read_url,
    responses,
    txn,
)
from fencing_sdk._etcd import delete as delete_key
from fencing_sdk._etcd import put as put_key
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk._values.claim import check_name, safe_segment
from fencing_sdk._values.token import Token, check_token, format_token, parse_written
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards import StoreGuard, admitted, check_place, check_token_of, check_tokens, is_unchanged

__all__ = ["EtcdGuard", "delete", "put"]

_GUARD = "EtcdGuard"
_TRIES = 100


class _FenceState(NamedTuple):
    """A fence as it was read: the token, and the revision of its key, 0 while there is no key."""

    token: Token | None
    modified: int


class _GuardedWrite(NamedTuple):
    """The caller's part of the transaction that checks the token."""

    operations: Sequence[Json] = ()
    compare: Sequence[Json] = ()
    once: bool = False


class EtcdGuard(StoreGuard):
    """
    Keeps fences beside the data in etcd, and runs transactions that succeed only with a current token.

    A write is sent once. If its answer is lost, it raises `BackendUnavailableError` and the outcome is unknown; the
    same holder may try again, which `raise_to` does by itself.

    Not promised: anything about writes that go around the guard; that a restored backup knows the
    fences that were raised after it was made.

    Args:
        url: ``etcd://[user:password@]host:2379,host:2379``, or ``etcd+https://``.

        prefix: The beginning of every key of a fence.

        ca: As for the backend, like *cert* and *key*; *ssl_context* stands for all of them.

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
        super().__init__(observers)
        check_place(url, prefix, schemes=r"etcd(?:\+https)?", example="etcd://host:2379")
        endpoints, from_url = read_url(url, {})
        self._gateway = make_gateway(_GUARD, endpoints, ca=ca, cert=cert, key=key, ssl_context=ssl_context, **from_url)
        self._prefix = prefix.encode()

    def fence_key(self, resource: str) -> str:
        """
        Return the key of the fence of *resource*. Any client may read it; only the guard writes it.

        Raises:
            ConfigurationError: *resource* cannot be the name of a resource.
        """
        return self._key(check_name(resource, parameter="resource")).decode()

    def _key(self, resource: str) -> bytes:
        return self._prefix + safe_segment(resource).encode("ascii")

    def comparison(self, resource: str, token: int) -> Json:
        """
        Return a comparison for a transaction of your own: the fence stands at *token*.

        It holds from `raise_to` with this very token (``fences=[guard]`` calls it at the acquisition) until a
        later holder raises the fence. The comparison is written as the JSON gateway takes it. With a gRPC
        client, compare the value of `fence_key` with the token as text.

        Raises:
            ConfigurationError: *resource* cannot be the name of a resource, or *token* a token.
        """
        key = self._key(check_name(resource, parameter="resource"))
        return compared(key, "VALUE", "EQUAL", format_token(check_token(token)).encode())

    async def execute(
        self, resource: str, token: int, *operations: Json, compare: Sequence[Json] = ()
    ) -> list[Json] | None:
        """
        Check *token* and carry out *operations*, as one transaction; return their answers.

        Args:
            resource: The resource whose fence is checked.

            token: As ``lease.token``.

            operations: From `put` and `delete`, or as the JSON gateway takes them in ``success``.

            compare: Comparisons of your own. If one does not hold, nothing is written and None is returned.

        Raises:
            StaleTokenError: the resource has seen a later token; nothing was written.
            ConfigurationError: *resource* cannot be the name of a resource, or *token* a token.
            BackendUnavailableError: the outcome is unknown.
            BackendRefusedError: etcd rejects the transaction.
        """
        return await self.execute_all(check_token_of(resource, token), *operations, compare=compare)

    async def execute_all(
        self, tokens: Mapping[str, int], *operations: Json, compare: Sequence[Json] = ()
    ) -> list[Json] | None:
        """
        Check the token of each resource and carry out *operations*, as one transaction.

        etcd allows 128 operations in one, of which each fence that has to be raised takes one (``--max-txn-ops``).

        Args:
            tokens: The token of each resource, such as ``held.tokens`` of a `MultiLock`.

            operations: As for `execute`.

            compare: As for `execute`.

        Raises:
            StaleTokenError: one of the resources has seen a later token, and the error names it; nothing was
                written, and no fence was raised.
            ConfigurationError, BackendUnavailableError, BackendRefusedError: as `execute`.
        """
        return await self._write("execute", check_tokens(tokens), _GuardedWrite(operations, compare, once=True))

    async def admit_all(self, tokens: Mapping[str, int]) -> None:
        """
        Check the token of each resource and raise all their fences, as one transaction: all of them or none.

        From then on, each `comparison` with one of these tokens holds, until a later holder raises that fence.

        Raises:
            StaleTokenError, ConfigurationError, BackendUnavailableError, BackendRefusedError: as `execute_all`.
        """
        checked = check_tokens(tokens)
        await self._write("raise_to", checked, _GuardedWrite())
        self._reports.raised(checked)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        await self.admit_all(check_token_of(resource, token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        key = self._key(check_name(resource, parameter="resource"))
        try:
            found, _ = await self._gateway.call("highest", RANGE, ranged(key)["request_range"])
            return _fence_of(entries(found, Entry), "highest").token
        except UnreadableAnswerError as error:
            raise BackendUnavailableError(_GUARD, "highest", str(error)) from error

    async def _write(self, operation: str, tokens: Mapping[str, Token], write: _GuardedWrite) -> list[Json] | None:
        """
        Write in one transaction, which compares the fences with what they are expected to be.

        The first try expects each to stand at its token, as after an earlier write of the same holder. If one does not,
        the answer has all of them.
        """
        fences: dict[str, _FenceState] | None = None
        with self._reports.of_verdict(tokens):
            for _ in range(_TRIES):
                answer = await self._transact(operation, tokens, fences, write)
                if isinstance(answer, list):
                    return answer
                as_expected = fences == answer or (
                    fences is None and all(is_unchanged(token, answer[name].token) for name, token in tokens.items())
                )
                if as_expected:
                    return None  # a comparison of the caller's did not hold
                fences = answer
        raise BackendUnavailableError(_GUARD, operation, f"the fence was raised {_TRIES} times meanwhile")

    async def _transact(
        self,
        operation: str,
        tokens: Mapping[str, Token],
        fences: Mapping[str, _FenceState] | None,
        write: _GuardedWrite,
    ) -> list[Json] | dict[str, _FenceState]:
        """
        Write if the *fences* stand where they stood, or at the *tokens*. Else return their present state.

        Raises:
            StaleTokenError: one of the *fences* refuses its token.
        """
        keys = {resource: self._key(resource) for resource in tokens}
        raising: list[Json] = []
        unchanged: list[Json] = []
        for resource, token in tokens.items():
            text = format_token(token).encode()  # refuses a token that could be read in two ways
            if fences is None:
                unchanged.append(compared(keys[resource], "VALUE", "EQUAL", text))
                continue
            fence = fences[resource]
            wanted = admitted(resource, token, fence.token)
            unchanged.append(compared(keys[resource], "MOD", "EQUAL", fence.modified))
            if not is_unchanged(wanted, fence.token):
                raising.append(put_key(keys[resource], text))
        body = txn(
            compare=[*unchanged, *write.compare],
            success=[*raising, *write.operations],
            failure=[ranged(key) for key in keys.values()],
        )
        fields, _ = await self._gateway.call(operation, TXN, body, once=write.once)
        try:
            if fields.get("succeeded") is True:
                return responses(fields, len(raising) + len(write.operations))[len(raising) :]
            found = responses(fields, len(tokens))
            return {name: _fence_of(entries(one, Entry), operation) for name, one in zip(tokens, found, strict=True)}
        except UnreadableAnswerError as error:
            raise BackendUnavailableError(_GUARD, operation, str(error)) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._gateway.aclose()


def _fence_of(found: Sequence[Entry], operation: str) -> _FenceState:
    if not found:
        return _FenceState(None, 0)
    try:
        return _FenceState(parse_written(found[0].value.decode("ascii", "replace")), found[0].modified)
    except ConfigurationError as error:
        detail = f"the value of {shown(found[0].key)} is not a fence; set another prefix"
        raise BackendRefusedError(_GUARD, operation, detail) from error


def put(key: str | bytes, value: str | bytes) -> Json:
    """Return an operation that writes *key*, of text or bytes."""
    return put_key(_bytes(key, "key"), _bytes(value, "value"))


def delete(key: str | bytes) -> Json:
    """Return an operation that deletes *key*."""
    return delete_key(_bytes(key, "key"))


def _bytes(text: object, parameter: str) -> bytes:
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    if isinstance(text, bytes):
        return text
    msg = f"{parameter} must be a str or bytes, not {type(text).__name__}"
    raise ConfigurationError(msg)
