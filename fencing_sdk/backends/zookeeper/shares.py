"""
Permits, readers and writers: who holds beside whom, and with which token.

The nodes of a name are one line. A client creates its node and looks:

    reader   only readers' nodes are ahead    its token is the phase in the folder's data. The first reader writes it:
                                              the transaction that created its own node
    writer   no node is ahead                 as a lock
    permit   fewer nodes than there are       it replaces its node by one with the lowest number that none of those
             permits are ahead, all of        has, and with its token
             permits with their numbers

A node that is created later is behind, and a node that is replaced keeps its place. So a claim whose turn has come
keeps its turn while its node is there, and the transaction by which it is granted fails without that node.

Tokens are places in the line, so they grow with every grant, of whatever mode. Readers that hold together share the
place of one of them: the others of the line are before or behind all of them. That lasts until another mode is granted.
So each such grant ends the phase, if there is one: a number that was drawn later would be above those in the line.
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
from fencing_sdk.backends.zookeeper.errors import BACKEND
from fencing_sdk.backends.zookeeper.nodes import READER_NODE, Line, LineNode
from fencing_sdk.backends.zookeeper.own_nodes import OwnNode
from fencing_sdk.backends.zookeeper.requests import Recipe
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["PERMITS", "ShareGrants", "holding", "rival_of"]

_READERS = 1000
"""Readers that are granted together."""
_TRIES = 5
"""Times that a folder is read while operators write notes into it."""


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

    async def grant(self, own_node: OwnNode, line: Line, position: int) -> None:
        """
        Let *own_node* be the node of a grant, with its token and its number.

        A lock needs this only where the folder has data.

        Raises:
            NoNodeError: the node has gone.
        """
        claim, node = own_node.claim, line[position]
        if claim.mode == READER:
            own_node.token = await self._phases_of(own_node.session).ask(own_node)
            return
        if line.noted:
            await self._end_phase(own_node)
        if isinstance(claim.mode, Permit) and node.waits:
            permit = _lowest_free(claim.mode, line[:position])
            found = await self._recipe.write_number(own_node.session, claim, node, permit=permit, token=own_node.token)
            own_node.path, own_node.token, own_node.born = found
            own_node.permit = permit
        else:
            own_node.permit = node.permit

    async def _end_phase(self, own_node: OwnNode) -> None:
        """No reader begins one while *own_node* is there, because it would have to be ahead."""
        recipe, name = self._recipe, own_node.claim.name
        for _ in range(_TRIES):
            phase = await recipe.phase(own_node.session, name)
            if phase.token is None or await recipe.change_phase(own_node.session, name, phase, None, own_node.path):
                return
        raise BackendUnavailableError(BACKEND, "acquire", "the notes of the lock change whenever they are looked at")

    async def _join_phase(self, session: ZooKeeperSession, name: str, readers: Sequence[OwnNode]) -> int:
        for reader in readers:
            phase = await self._recipe.phase(session, name)
            token = phase.token
            if token is None:
                with suppress(NoNodeError):  # this reader has gone, and the next one may be there
                    if await self._recipe.change_phase(session, name, phase, reader.token, reader.path):
                        token = reader.token
            if token is not None:
                return token
        token = (await self._recipe.phase(session, name)).token
        if token is None:
            raise NoNodeError
        return token


def _lowest_free(mode: Permit, ahead: Sequence[LineNode]) -> int:
    taken = {node.permit for node in ahead}
    return next(free for free in range(mode.of) if free not in taken)
