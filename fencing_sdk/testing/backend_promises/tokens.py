"""Tokens: a later grant of a name has a higher one, also after expiry, clean-up and restart."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, aclosing

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.abc import Backend
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import NAME, BackendUnderTest, Reopen


class TokenPromises(BackendUnderTest):
    """Growth, for ever."""

    async def test_tokens_grow_after_a_release(self, backend: Backend) -> None:
        """The number outlives the record of the grant."""
        tokens = [await self._taken_and_released(backend) for _ in range(5)]
        self.assert_rising(tokens)

    async def test_tokens_grow_after_an_expiry(self, backend: Backend) -> None:
        """A holder that died is followed by a higher number."""
        first = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        assert await self.granted(backend, self.claim()) > first

    async def test_tokens_grow_when_the_same_owner_comes_after_its_expiry(self, backend: Backend) -> None:
        """The same owner id gets a new number: another holder may have had the lock in between."""
        claim = self.claim(ttl=self.ttl)
        first = await self.granted(backend, claim)
        await self.expire(self.ttl)
        assert await self.granted(backend, claim) > first

    async def test_tokens_grow_after_a_clean_up(self, backend: Backend) -> None:
        """The store may delete released and expired grants, but never the last number."""
        expired = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        await self.purge(backend)
        released = await self._taken_and_released(backend)
        await self.purge(backend)
        self.assert_rising([expired, released, await self.granted(backend, self.claim())])

    async def test_tokens_grow_after_a_restart(self, backend: Backend, reopen: Reopen) -> None:
        """Neither released nor expired numbers come again from the restarted store."""
        released = await self._taken_and_released(backend)
        expired = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        async with aclosing(await self.restart(backend, reopen)) as restarted:
            self.assert_rising([released, expired, await self.granted(restarted, self.claim())])

    async def test_tokens_grow_after_many_restarts(self, backend: Backend, reopen: Reopen) -> None:
        """Also when a restart follows at once, and when nothing happened in between."""
        async with AsyncExitStack() as opened:
            tokens = [await self._taken_and_released(backend)]
            for _ in range(3):
                backend = await opened.enter_async_context(aclosing(await self.restart(backend, reopen)))
                backend = await opened.enter_async_context(aclosing(await self.restart(backend, reopen)))
                tokens.append(await self._taken_and_released(backend))
        self.assert_rising(tokens)

    @needs("survives_restart")
    async def test_grants_survive_a_restart(self, backend: Backend, reopen: Reopen) -> None:
        """The holder goes on, with its token; a rival is still refused."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        async with aclosing(await self.restart(backend, reopen)) as restarted:
            await self.refused(restarted, self.claim())
            assert await self.renewed(restarted, claim) is Renewal.RENEWED
            assert await self.granted(restarted, claim) == token

    async def test_tokens_grow_across_clients(self, backend: Backend, reopen: Reopen) -> None:
        """The number is the store's: clients that take turns see one rising row."""
        async with aclosing(reopen()) as other:
            tokens = [await self._taken_and_released(client) for client in (backend, other) * 4]
        self.assert_rising(tokens)

    async def test_tokens_grow_for_each_name(self, backend: Backend) -> None:
        """Names that take turns do not disturb each other's growth."""
        tokens: dict[str, list[int]] = {"a": [], "b": [], "a/b": []}
        for _, name in itertools.product(range(4), tokens):
            tokens[name].append(await self._taken_and_released(backend, name))
        for row in tokens.values():
            self.assert_rising(row)

    async def test_two_grants_never_share_a_token(self, backend: Backend, reopen: Reopen) -> None:
        """Many rivals of two clients, all at once: every number is given once, in the order of the grants."""
        tokens: list[int] = []

        async def rival(client: Backend) -> None:
            claim = self.claim()
            await self.freed_soon(client, claim)
            tokens.append(await self.granted(client, claim))
            await client.release(claim)

        async with aclosing(reopen()) as other, asyncio.TaskGroup() as rivals:
            for client in (backend, other) * 10:
                rivals.create_task(rival(client))
        assert len(tokens) == 20
        self.assert_rising(tokens)

    async def test_inspect_and_retries_show_the_token_of_the_grant(self, backend: Backend) -> None:
        """There is one number for a grant, wherever it is shown."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        assert await self.granted(backend, claim) == token
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert holder.token == token

    async def _taken_and_released(self, backend: Backend, name: str = NAME) -> int:
        claim: Claim = self.claim(name)
        token = await self.granted(backend, claim)
        await backend.release(claim)
        return token
