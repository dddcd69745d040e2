"""
The lock table of a Kahuna cluster, written from the contract alone; no Kahuna code.

What each request answers, when tokens grow, what replication keeps busy and what a restart
remembers. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

LOCKED, BUSY, EXTENDED, UNLOCKED, GOT = 0, 1, 2, 3, 4
WAITING_FOR_REPLICATION, ERRORED, INVALID_INPUT, MUST_RETRY = 10, 99, 100, 101
LOCK_DOES_NOT_EXIST, INVALID_OWNER, ABORTED = 102, 103, 104
EVERY_TYPE = (*range(5), 10, *range(99, 105))

EPHEMERAL, PERSISTENT = 0, 1

_TRIES = 3
_PAUSE = 0.001


@dataclass(slots=True)
class Entry:
    """One lock. It stays when it is released, and so does its token."""

    token: int = -1
    owner: str = ""
    expires: int = 0
    held: bool = False


@dataclass(slots=True)
class KahunaStore:
    """All locks of both durabilities. ``replication`` is the seconds that a persistent change needs."""

    replication_by_default: ClassVar[float] = 0.001
    journal: Path | None = None
    replication: float = replication_by_default
    _tables: tuple[dict[str, Entry], dict[str, Entry]] = field(default_factory=lambda: ({}, {}))
    _replicating: set[str] = field(default_factory=set)

    def load(self) -> None:
        """Remember what was persistent before the restart."""
        if self.journal is not None and self.journal.exists():
            for line in self.journal.read_text(encoding="ascii").splitlines():
                change = json.loads(line)
                resource = change.pop("resource")
                self._tables[PERSISTENT][resource] = Entry(**change)

    def clear(self) -> None:
        """Forget everything."""
        for table in self._tables:
            table.clear()
        if self.journal is not None:
            self.journal.unlink(missing_ok=True)

    async def answer(self, call: str, request: dict[str, object]) -> dict[str, object]:
        """Carry out one request that was read."""
        resource, owner = request.get("resource"), request.get("owner")
        ms, durability = request.get("expiresMs", 0), request.get("durability", EPHEMERAL)
        assert isinstance(ms, int)
        assert durability in {EPHEMERAL, PERSISTENT}
        if (
            not isinstance(resource, str)
            or not resource
            or (call != "get-info" and not owner)
            or (call in {"try-lock", "try-extend"} and ms <= 0)
        ):
            return {"type": INVALID_INPUT}
        for _ in range(_TRIES):
            if durability == EPHEMERAL or resource not in self._replicating:
                break
            await asyncio.sleep(_PAUSE)
        else:
            return {"type": MUST_RETRY}
        entry = self._tables[durability].setdefault(resource, Entry())
        if call == "get-info":
            return self._info(entry)
        changed, answer = self._decide(call, entry, str(owner), ms)
        if changed is not None:
            await self._commit(durability, resource, changed)
        return answer

    def _info(self, entry: Entry) -> dict[str, object]:
        if not self._lives(entry):
            return {"type": LOCK_DOES_NOT_EXIST}
        expires = {"n": 1, "l": entry.expires, "c": 0}
        return {"type": GOT, "owner": entry.owner, "expires": expires, "fencingToken": entry.token}

    def _lives(self, entry: Entry) -> bool:
        return entry.held and entry.expires >= self._now()

    def _now(self) -> int:
        return int(time.time() * 1000)

    def _decide(self, call: str, entry: Entry, owner: str, ms: int) -> tuple[Entry | None, dict[str, object]]:
        if call == "try-lock":
            if self._lives(entry):
                mine = entry.owner == owner  # the same token again, and the expiry stays
                return None, {"type": LOCKED, "fencingToken": entry.token} if mine else {"type": BUSY}
            changed = Entry(entry.token + 1, owner, self._now() + ms, held=True)
            return changed, {"type": LOCKED, "fencingToken": changed.token}
        if not entry.held or (call == "try-extend" and not self._lives(entry)):
            return None, {"type": LOCK_DOES_NOT_EXIST}
        if entry.owner != owner:
            return None, {"type": INVALID_OWNER}
        if call == "try-extend":
            changed = Entry(entry.token, owner, self._now() + ms, held=True)
            return changed, {"type": EXTENDED, "fencingToken": entry.token}
        return Entry(entry.token, owner, entry.expires, held=False), {"type": UNLOCKED}

    async def _commit(self, durability: int, resource: str, changed: Entry) -> None:
        if durability == PERSISTENT:
            self._replicating.add(resource)
            try:
                await asyncio.sleep(self.replication)
            finally:
                self._replicating.discard(resource)
            if self.journal is not None:
                with self.journal.open("a", encoding="ascii") as journal:
                    journal.write(json.dumps({"resource": resource, **asdict(changed)}) + "\n")
        self._tables[durability][resource] = changed
