"""
Permits, readers and writers: who holds beside whom, and with which token.

The nodes of a name are one line. A client creates its node and looks:

    reader   only readers' nodes are ahead    its token is the phase in the folder's data. The first reader writes it:
                                              the last transaction by which a node came or went. The next writer
                                              removes it
    writer   no node is ahead                 it replaces its node by one that does not wait, and ends the phase, in
                                              one transaction: that is its token
    permit   fewer nodes than there are       it replaces its node by one with the lowest number that none of those
             permits are ahead, all of        has: that transaction is its token
             permits with their numbers

A node that is created later is behind, and a node that is replaced keeps its place. So a claim whose turn has come
keeps its turn while its node is there, and the transaction by which it is granted fails without that node.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from weakref import WeakKeyDictionary

from fencing_sdk._values.claim import LOCK, READER, WRITER, Mode, Permit
from fencing_sdk._values.shared_call import SharedBatches, ask_by_name
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import NoNodeError
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession
from fencing_sdk.backends.zookeeper.nodes import READER_NODE, LineNode
from fencing_sdk.backends.zookeeper.own_nodes import OwnNode
from fencing_sdk.backends.zookeeper.requests import Recipe

__all__ = ["PERMITS", "ShareGrants", "holding", "rival_of"]

_READERS = 1000
"""Readers that are granted together."""


class _Permits(Enum):
    ALL = auto()


PERMITS = _Permits.ALL
"""What the first waiter for a permit waits for: that any of the permits is given back."""


def rival_of(mode: Mode, line: Sequence[LineNode], position: int) -> LineNode | _Permits | None:
    """
    Which node of the line the one at *position* waits for; None: its turn has come, or it was granted.

    A reader waits for the last node ahead that is not a reader's, a permit for the last waiter ahead.
    """
    ahead = line[:position]
    if mode == READER:
        return next((node for node in reversed(ahead) if node.kind != READER_NODE), None)
    if not isinstance(mode, Permit):
        return ahead[-1] if ahead else None
    if line[position].permit is not None:
        return None
    waiting = next((node for node in reversed(ahead) if node.permit is None), None)
    return waiting or (PERMITS if len(ahead) >= mode.of else None)


def holding(line: Sequence[LineNode]) -> list[LineNode]:
    """The nodes of holders: those from the first on that are of one mode and do not wait."""
    held: list[LineNode] = []
    for node in line:
        alone = node.mode in {LOCK.word, WRITER.word}
        if node.waits or (held and (alone or node.mode != held[0].mode)):
            break
        held.append(node)
    return held


class ShareGrants:
    """The step by which a claim whose turn has come is granted."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._phases: WeakKeyDictionary[ZooKeeperSession, SharedBatches[OwnNode, int]] = WeakKeyDictionary()

    def _phases_of(self, session: ZooKeeperSession) -> SharedBatches[OwnNode, int]:
        if (batches := self._phases.get(session)) is None:

            async def join(name: str, readers: list[OwnNode]) -> list[int]:
                """One of the readers that are granted at the same moment begins the phase, and all have its token."""
                return [await self._join_phase(session, name, readers)] * len(readers)

            batches = SharedBatches(
                lambda readers: ask_by_name(readers, lambda reader: reader.claim.name, join), _READERS, one_by_one=True
            )
            self._phases[session] = batches
        return batches

    async def grant(self, own_node: OwnNode, line: Sequence[LineNode], position: int) -> None:
        """
        Let *own_node* be the node of a grant, with its token and its number.

        Raises:
            NoNodeError: the node has gone.
        """
        claim, node = own_node.claim, line[position]
        if claim.mode == READER:
            own_node.token = await self._phases_of(own_node.session).ask(own_node)
            return
        if node.waits:
            permit = _lowest_free(claim.mode, line[:position])
            found = await self._recipe.write_grant(
                own_node.session, claim, node, permit=permit, ends_phase=claim.mode == WRITER
            )
            own_node.path, own_node.token, own_node.born = found
            own_node.permit = permit
        else:
            own_node.permit = node.permit

    async def _join_phase(self, session: ZooKeeperSession, name: str, readers: Sequence[OwnNode]) -> int:
        for reader in readers:
            phase = await self._recipe.phase(session, name)
            token = phase.token
            if token is None:
                with suppress(NoNodeError):  # this reader has gone, and the next one may be there
                    token = await self._recipe.begin_phase(session, name, phase, reader.path)
            if token is not None:
                return token
        token = (await self._recipe.phase(session, name)).token
        if token is None:
            raise NoNodeError
        return token


def _lowest_free(mode: Mode, ahead: Sequence[LineNode]) -> int | None:
    taken = {node.permit for node in ahead}
    return next(free for free in range(mode.of) if free not in taken) if isinstance(mode, Permit) else None
