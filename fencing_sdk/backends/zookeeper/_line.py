"""A claim in the line of its lock: it stands at the end, moves up, and has the lock when nobody is ahead."""

from __future__ import annotations

from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk.backends.zookeeper._nodes import Node, is_of, mark_of
from fencing_sdk.backends.zookeeper._recipe import Found, Recipe
from fencing_sdk.backends.zookeeper._requests import NoNodeError
from fencing_sdk.backends.zookeeper._sessions import Sessions
from fencing_sdk.backends.zookeeper._stakes import Stake, Stakes, key_of
from fencing_sdk.backends.zookeeper._upkeep import Upkeep

__all__ = ["Line"]

_TRIES = 3
"""How often a line that moves meanwhile is looked at."""


class Line:
    """What `Backend.acquire` and `SupportsQueue.queue` do, one call about a claim at a time."""

    def __init__(self, recipe: Recipe, sessions: Sessions, stakes: Stakes, upkeep: Upkeep) -> None:
        self._recipe = recipe
        self._sessions = sessions
        self._stakes = stakes
        self._upkeep = upkeep

    async def acquire(self, claim: Claim) -> Grant | Held:
        """One try; who has a place in the line keeps it, and who has none and is refused leaves no node."""
        async with self._stakes.turn(key_of(claim)):
            return await self._acquire(claim)

    async def _acquire(self, claim: Claim) -> Grant | Held:
        stake = await self._current(claim)
        session = self._sessions.of(claim.ttl) if stake is None else stake.session
        await session.ready()
        try:
            if stake is not None:
                return await self._try(stake, await self._recipe.look(session, claim.name))
            found, line = await self._recipe.stand(session, claim)
            return await self._try(Stake(claim, session, *found), line)
        except BaseException:
            if stake is None:
                self._upkeep.sweep_later(claim, session)
            raise

    async def _current(self, claim: Claim) -> Stake | None:
        """What the claim has in the line and can go on with; what it has there besides is removed."""
        stake = self._stakes.get(key_of(claim))
        if stake is None or not (stake.over or (stake.ends_at is not None and not stake.held)):
            return stake
        stake.finish()
        if stake.session.error is None:
            await stake.session.ready()
            await self._recipe.remove(stake.session, stake.path)
        self._stakes.drop(stake)
        return None

    async def _try(self, stake: Stake, line: list[Node]) -> Grant | Held:
        """Grant if nobody is ahead; whoever has a place keeps it, and whoever has none leaves."""
        claim, session = stake.claim, stake.session
        in_place = self._stakes.get(key_of(claim)) is stake
        if not await self._ahead(stake, line):
            if stake.over:
                raise NoNodeError
            self._stakes.put(stake)
            self._upkeep.granted(stake)
            return Grant(stake.token, ttl=session.lease if session.lease < claim.ttl else None)
        if not in_place:
            await self._recipe.remove(session, stake.path)
        return Held()

    async def _ahead(self, stake: Stake, line: list[Node]) -> bool:
        """Whether somebody is ahead of *stake*; one that has a place then watches the next."""
        claim, session = stake.claim, stake.session
        for _ in range(_TRIES):
            position = await self._find(stake, line)
            if position == 0:
                return False
            if self._stakes.get(key_of(claim)) is not stake:
                return True
            path = self._recipe.paths.node(claim.name, line[position - 1])
            if stake.watched == path:
                return True
            stake.watched = path
            if await self._recipe.watch(session, path, session.watched(self._gone_ahead, stake, path)):
                return True
            stake.watched = ""
            line = await self._recipe.look(session, claim.name)
        stake.woken.set()  # the line moves faster than we look at it
        return True

    def _gone_ahead(self, stake: Stake, path: str, _: object) -> None:
        if stake.watched == path:
            stake.watched = ""
            stake.woken.set()

    async def _find(self, stake: Stake, line: list[Node]) -> int:
        """
        Return the position of our node in the line, and let *stake* be that node.

        Usually it is the one we know. A request whose answer was lost may have left another one
        ahead of it, and that one counts then; or another client has one, with the same claim.
        """
        claim, session = stake.claim, stake.session
        ours = [position for position, node in enumerate(line) if node.mark == mark_of(claim.owner)]
        if not ours:
            stake.finish()
            self._stakes.drop(stake)
            stake.woken.set()
            raise NoNodeError
        first = line[ours[0]]
        for position in ours[1:]:
            await self._recipe.remove(session, self._recipe.paths.node(claim.name, line[position]))
        path = self._recipe.paths.node(claim.name, first)
        if path != stake.path:
            known = is_of(first, session.id)
            found: Found = await (
                self._recipe.find(session, path) if known else self._recipe.adopt(session, claim, first)
            )
            stake.path, stake.token, stake.born = found
        return ours[0]

    async def join(self, claim: Claim) -> Stake:
        """Take a place in the line, or go on with the one that there is."""
        session = self._sessions.of(claim.ttl)
        await session.ready()
        try:
            async with self._stakes.turn(key_of(claim)):
                known = await self._current(claim)
                if known is not None:
                    known.woken.set()
                    return known
                found, line = await self._recipe.stand(session, claim)
                stake = Stake(claim, session, *found)
                self._stakes.put(stake)
                if not await self._ahead(stake, line):
                    stake.woken.set()
                return stake
        except BaseException:
            stray = self._stakes.get(key_of(claim))
            if stray is not None and stray.ends_at is None:
                self._stakes.drop(stray)
            await self._upkeep.leave_unknown(claim, session)
            raise
