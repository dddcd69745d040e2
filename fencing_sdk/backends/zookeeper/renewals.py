"""
ZooKeeperRenewals: one batch of requests for all claims of a session.

Nothing in ZooKeeper has to be prolonged lock by lock: any request keeps the session alive, and the
session keeps its nodes. What a renewal proves is that the leader still knew the session after the
renewal was sent, and that each node is still the one that was granted. One request does that for all watched nodes;
each of the others needs a request of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.backends._shared.node_line import holds, refusal
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession, ZooKeeperSessions
from fencing_sdk.backends.zookeeper.ends import CleanUp
from fencing_sdk.backends.zookeeper.nodes import Key, Line, OwnNode, OwnNodes, is_of, key_of
from fencing_sdk.backends.zookeeper.requests import Recipe

__all__ = ["ZooKeeperRenewals"]

_PATIENCE = 1 / 8
"""Part of a ttl after which those that have an answer wait for the others no longer: more than half an interval."""

Outcomes = dict[Key, Renewal]


class ZooKeeperRenewals:
    """One call of `Backend.renew` after the other, or side by side."""

    def __init__(self, recipe: Recipe, sessions: ZooKeeperSessions, own_nodes: OwnNodes, clean_up: CleanUp) -> None:
        self._recipe = recipe
        self._sessions = sessions
        self._own_nodes = own_nodes
        self._clean_up = clean_up

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """
        Renew all; a session without an answer stops no other one.

        Raises:
            Exception: no claim has an answer; it is what the driver raised for the first.
        """
        outcomes: Outcomes = {}
        groups: dict[ZooKeeperSession, dict[Key, Claim]] = {}
        for claim in claims:
            own_node = self._own_nodes.get(key_of(claim))
            session = self._sessions.of(claim.ttl) if own_node is None else own_node.session
            groups.setdefault(session, {})[key_of(claim)] = claim
        errors = await _side_by_side(
            [self._renew(session, list(group.values()), outcomes) for session, group in groups.items()],
            patience=_PATIENCE * min(claim.ttl for claim in claims) if claims else 0.0,
            enough=lambda: bool(outcomes),
        )
        if errors and not outcomes:
            raise errors[0]
        return [outcomes.get(key_of(claim), Renewal.UNKNOWN) for claim in claims]

    async def _renew(self, session: ZooKeeperSession, claims: list[Claim], outcomes: Outcomes) -> None:
        if session.error is not None:  # its nodes went with it; the next one looks for the holders
            session = self._sessions.of(claims[0].ttl)
        await session.ready()
        asked = {key_of(claim): claim for claim in claims}
        own_nodes = {key: self._own_nodes.get(key) for key in asked}
        held = [
            own_node
            for own_node in own_nodes.values()
            if own_node is not None and own_node.held and own_node.session is session
        ]
        lost = await self._gone(session, held)
        for own_node in held:
            if own_node in lost:
                self._own_nodes.drop(own_node)
            elif own_node.held:
                self._clean_up.renewed(own_node, asked[key_of(own_node.claim)])
                outcomes[key_of(own_node.claim)] = Renewal.REFUSED if own_node.over else Renewal.RENEWED
        rest = [claim for claim in claims if key_of(claim) not in outcomes]
        lines = await self._recipe.look_at_all(session, [claim.name for claim in rest]) if rest else []
        for claim, line in zip(rest, lines, strict=True):
            outcomes[key_of(claim)] = await self._judge(session, claim, line)

    async def _gone(self, session: ZooKeeperSession, held: list[OwnNode]) -> list[OwnNode]:
        """Those whose node has gone, or is another one. Answered by way of the leader, also if there are none."""
        lost = []
        asked = [own_node for own_node in held if not own_node.surely_there]
        while True:
            found = await self._recipe.born(session, [own_node.path for own_node in asked])
            lost += [own_node for own_node, born in zip(asked, found, strict=True) if born != own_node.born]
            held = [own_node for own_node in held if own_node not in asked]
            asked = [
                own_node for own_node in held if not own_node.surely_there
            ]  # something was heard of them meanwhile
            if not asked:
                return lost

    async def _judge(self, session: ZooKeeperSession, claim: Claim, line: Line) -> Renewal:
        """
        What becomes of a claim that has no grant here.

        Its node may be another client's, whose session keeps it alive; a client with the claim may
        renew it, and then has to keep it alive. A node on a session of ours is one that must go.
        """
        position = line.position_of(claim)
        if position is None or not holds(claim.mode, line[position], line[:position]):
            return refusal(claim.mode, others=bool(line))
        if is_of(line[position], session.id) or self._own_nodes.get(key_of(claim)) is not None:
            return Renewal.REFUSED
        found = await self._recipe.adopt(session, claim, line[position])
        own_node = OwnNode(claim, session, *found)
        self._own_nodes.put(own_node)
        self._clean_up.granted(own_node)
        return Renewal.RENEWED


async def _side_by_side(
    works: Iterable[Coroutine[Any, Any, None]], *, patience: float, enough: Callable[[], bool]
) -> list[Exception]:
    """Do all, for *patience* seconds and until there is *enough*; cancel the rest. Return errors."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work) for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, timeout=patience)
        if not enough():
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [end for end in ends if isinstance(end, Exception)]
