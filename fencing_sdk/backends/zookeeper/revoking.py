"""
Takes grants away, and tells their holders why.

One transaction deletes the node of the holder, by its path and version, and writes a note for it into the folder; for
readers the nodes of all who share the token, and their phase ends. A path belongs to one grant, so a successor is
never hit; the version of the folder lets no two operators write at the same time. The deletion reaches the next
waiter and the holder by the watches that both have anyway, and the holder then reads the note.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import READER, Claim
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession
from fencing_sdk.backends.zookeeper.errors import BACKEND
from fencing_sdk.backends.zookeeper.nodes import mark_of, noted, phase_of, read_notes, read_token, with_phase
from fencing_sdk.backends.zookeeper.requests import Read, Recipe
from fencing_sdk.backends.zookeeper.shares import holding
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperRevocations"]

_TRIES = 5
"""Times that a lock is looked at while it goes from hand to hand, or while other operators write notes."""


class ZooKeeperRevocations:
    """Revokes for one backend."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    async def revoke(self, session: ZooKeeperSession, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        folder = self._recipe.paths.folder(name)
        for _ in range(_TRIES):
            if not (held := holding(await self._recipe.look(session, name))):
                return False
            paths = [self._recipe.paths.node(name, node) for node in held]
            *nodes, kept = await self._recipe.read_all(session, [*paths, folder])
            if kept is None or all(node is None for node in nodes):
                continue
            phase = phase_of(kept[0]) if held[0].mode == READER.word else None
            victims = {
                node.mark: Read(path, *read)
                for node, path, read in zip(held, paths, nodes, strict=True)
                if read is not None and (phase or read_token(*read)) == token
            }
            if not victims:
                return False
            note = noted(kept[0], victims, reason)
            if phase is not None:
                note = with_phase(note, None)
            if await self._recipe.end(session, list(victims.values()), Read(folder, *kept), note):
                return True
        raise BackendUnavailableError(BACKEND, "revoke", "the lock changes whenever it is looked at")

    async def reasons(self, session: ZooKeeperSession, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were taken away; None where no operator did it."""
        await session.ready()
        folders = await self._recipe.read_all(session, [self._recipe.paths.folder(claim.name) for claim in claims])
        return [
            None if folder is None else read_notes(folder[0]).get(mark_of(claim.owner))
            for claim, folder in zip(claims, folders, strict=True)
        ]
