"""
The line of a name in a store of nodes: who holds, what a waiter waits for, and with which token and number it holds.

A store of nodes has watches, and counts what it creates: etcd, ZooKeeper. Each claim puts one node, which ends with a
lease or a session. The nodes of a name are one line, in the order in which they were created. A claim is granted when

    lock     no node is ahead
    writer
    reader   only readers' nodes are ahead    its token is the *phase*, which the first reader begins with the number
                                              of its own node
    permit   fewer nodes than there are       it writes into its node the lowest number that none of those has
             permits are ahead, all of
             permits with their numbers

A node that is created later is behind. So a claim whose turn has come keeps its turn while its node is there, and the
step by which it is granted has to compare just that.

Tokens are places in the line, so they grow with every grant, of whatever mode. Readers that hold together share the
place of one of them: the others of the line are before or behind all of them. That lasts until another mode is granted.
So each such grant ends the phase, if there is one: a number that was drawn later would be above those in the line.

So the node of a lock or a writer holds from the moment when it is the first, before its owner has asked again: lists
show it as a holder, and a revocation ends it. A permit holds once its number is written, and readers once their phase
has begun, with all other readers behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol, TypeVar

from fencing_sdk._values.claim import READER, Mode, Permit, Renewal

__all__ = ["PERMITS", "Node", "Permits", "holding", "holds", "refusal", "rival_of"]


class Node(Protocol):
    """One node of a line."""

    @property
    def shared(self) -> str:
        """``reader`` or ``permit``; nothing for a lock and a writer, which hold alone."""
        ...

    @property
    def permit(self) -> int | None:
        """The number of a permit that was granted."""
        ...


N = TypeVar("N", bound=Node)


class Permits(Enum):
    """See `PERMITS`."""

    ALL = auto()


PERMITS = Permits.ALL
"""The rival of the first waiter for a permit: the release of any of the permits."""


def rival_of(mode: Mode, ahead: Sequence[N]) -> N | Permits | None:
    """
    Return what a claim without a grant waits for, whose node is or will be behind *ahead*; None: its turn has come.

    A reader waits for the last node ahead that is not a reader's, a permit for the last one that has no number.

    Args:
        mode: Of the claim.

        ahead: The nodes ahead, in their order. A store may leave out those in front, of those that *mode* waits for,
            as long as the last one is there; for a permit as many as there are permits have to be there.
    """
    if mode == READER:
        return next((node for node in reversed(ahead) if node.shared != READER.word), None)
    if not isinstance(mode, Permit):
        return ahead[-1] if ahead else None
    waiting = next((node for node in reversed(ahead) if node.permit is None), None)
    return waiting or (PERMITS if len(ahead) >= mode.of else None)


def holds(mode: Mode, own: N, ahead: Sequence[N]) -> bool:
    """Return whether the node of a claim is one that may have been granted. Of a reader, its phase has to be there."""
    return own.permit is not None or (not isinstance(mode, Permit) and rival_of(mode, ahead) is None)


def holding(line: Sequence[N], *, phase: bool) -> list[N]:
    """Return the nodes of those who hold, of the whole *line*; *phase*: its readers have begun one."""
    held: list[N] = []
    for node in line:
        kind = node.shared
        if held and (not kind or kind != held[0].shared):
            break
        if (kind == READER.word and not phase) or (kind == "permit" and node.permit is None):
            break
        held.append(node)
    return held


def refusal(mode: Mode, *, others: bool) -> Renewal:
    """Return why a claim of this *mode* has lost its grant: another one is first, if there are *others* in the line."""
    return Renewal.TAKEN_OVER if others and not mode.shared else Renewal.REFUSED
