"""
What a Kahuna remembers, written from the contract and from recorded answers; no Kahuna code.

Two tables of locks and two of values, one for each durability: what a request answers, how tokens and revisions grow,
what replication keeps busy and what a restart remembers. Knows no HTTP and no nodes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from kahuna_wire import (
    BUSY,
    DELETED,
    EPHEMERAL,
    ERRORED,
    EXTENDED,
    GOT,
    INVALID_OWNER,
    LOCK_CALLS,
    LOCK_DOES_NOT_EXIST,
    LOCKED,
    MUST_RETRY,
    NO_SUCH_KEY,
    NOT_SET,
    PERSISTENT,
    SET,
    UNLOCKED,
    VALUE_GOT,
    WAITING_FOR_REPLICATION,
    Fields,
    any_answer,
    invalid,
    lock_answer,
    value_answer,
)

_TRIES = 3
_PAUSE = 0.001
_XX, _NX, _COMPARE_VALUE, _COMPARE_REVISION = 4, 8, 16, 32

_LATE: set[asyncio.Task[None]] = set()


@dataclass(frozen=True, slots=True)
class Lock:
    """One lock. It stays when it is released, and so does its token."""

    token: int = -1
    owner: str = ""
    expires: int = 0
    held: bool = False

    def lives(self, now: int) -> bool:
        return self.held and self.expires >= now


@dataclass(frozen=True, slots=True)
class Value:
    """One key. Its revisions go on growing when it is deleted or expires."""

    revision: int = -1
    value: str | None = None
    expires: int = 0
    modified: int = 0

    def lives(self, now: int) -> bool:
        return self.value is not None and (not self.expires or self.expires >= now)


Record = Lock | Value


class Decision(NamedTuple):
    """An answer, and what has to be replicated before it is given."""

    answer: Fields
    change: Record | None = None


@dataclass(slots=True)
class Tables:
    """All records of both durabilities, as one node knows them."""

    locks: tuple[dict[str, Lock], dict[str, Lock]] = field(default_factory=lambda: ({}, {}))
    values: tuple[dict[str, Value], dict[str, Value]] = field(default_factory=lambda: ({}, {}))
    history: dict[tuple[int, str, int], str | None] = field(default_factory=dict)

    def copy(self) -> Tables:
        return copy.deepcopy(self)

    def put(self, durability: int, name: str, record: Record) -> None:
        if isinstance(record, Lock):
            self.locks[durability][name] = record
        else:
            self.values[durability][name] = record
            self.history[durability, name, record.revision] = record.value

    def decide(self, call: str, fields: Fields, now: int) -> Decision:
        """What *call* answers and changes."""
        durability = durability_of(fields)
        if call in LOCK_CALLS:
            return _decide_lock(call, self.locks[durability].get(fields["resource"], Lock()), fields, now)
        value = self.values[durability].get(fields["key"], Value())
        if call in {"try-get", "try-exists"} and fields.get("revision", 0) >= 0:
            return self._old_revision(call, fields, durability)
        return _decide_value(call, value, fields, now)

    def _old_revision(self, call: str, fields: Fields, durability: int) -> Decision:
        revision = fields.get("revision", 0)
        old = self.history.get((durability, fields["key"], revision))
        if old is None:
            return Decision(value_answer(call, NO_SUCH_KEY))
        return Decision(value_answer(call, VALUE_GOT, revision, value=old))


def durability_of(fields: Fields) -> int:
    """Numbers that are neither are kept beside the persistent ones."""
    return EPHEMERAL if fields.get("durability", EPHEMERAL) == EPHEMERAL else PERSISTENT


def _decide_lock(call: str, lock: Lock, fields: Fields, now: int) -> Decision:
    if call == "get-info":
        if not lock.lives(now):
            return Decision(lock_answer(call, LOCK_DOES_NOT_EXIST))
        return Decision(lock_answer(call, GOT, lock.token, owner=lock.owner, expires=lock.expires))
    owner, end = fields["owner"], now + fields.get("expiresMs", 0)
    if call == "try-lock":
        if not lock.lives(now):
            return Decision(lock_answer(call, LOCKED, lock.token + 1), Lock(lock.token + 1, owner, end, held=True))
        mine = lock.owner == owner  # the same token again, and the expiry stays
        return Decision(lock_answer(call, LOCKED, lock.token) if mine else lock_answer(call, BUSY))
    if not lock.held or (call == "try-extend" and not lock.lives(now)):
        return Decision(lock_answer(call, LOCK_DOES_NOT_EXIST))
    if lock.owner != owner:
        return Decision(lock_answer(call, INVALID_OWNER))
    if call == "try-extend":
        return Decision(lock_answer(call, EXTENDED, lock.token), Lock(lock.token, owner, end, held=True))
    return Decision(lock_answer(call, UNLOCKED), Lock(lock.token, owner, lock.expires))


def _decide_value(call: str, value: Value, fields: Fields, now: int) -> Decision:
    lives = value.lives(now)
    if call == "try-set":
        if not _may_set(value, fields, lives=lives):
            shown = {"revision": value.revision, "modified": value.modified} if lives else {"revision": -1}
            return Decision(value_answer(call, NOT_SET, **shown))
        ms = fields.get("expiresMs", 0)
        change = Value(value.revision + 1, fields["value"], now + ms if ms else 0, now)
        return Decision(value_answer(call, SET, change.revision), change)
    if not lives:
        return Decision(value_answer(call, NO_SUCH_KEY))
    if call == "try-delete":
        return Decision(value_answer(call, DELETED, value.revision + 1), Value(value.revision + 1, modified=now))
    heard = {"value": value.value, "expires": value.expires, "modified": value.modified}
    return Decision(value_answer(call, VALUE_GOT, value.revision, **heard))


def _may_set(value: Value, fields: Fields, *, lives: bool) -> bool:
    flags, present = fields.get("flags", 0), value.value if lives else None
    if (flags & _NX and lives) or (flags & _XX and not lives):
        return False
    if flags & _COMPARE_VALUE and (present or "") != (fields.get("compareValue") or ""):
        return False
    return not flags & _COMPARE_REVISION or fields.get("compareRevision", 0) == value.revision


@dataclass(slots=True)
class Habits:
    """What a real Kahuna does while a change is replicated. Each can be switched off, and the last one on."""

    replication: float = 0.001
    """Seconds that a persistent change needs; a slow disk needs more."""
    info_waits: bool = True
    """`get-info` answers 10 meanwhile."""
    regrant_hides: bool = True
    """While a lock that was released is granted again, its new owner is told 102 by extend and unlock."""
    grants_in_error: float = 0.0
    """How probable it is that the first grant of a name is answered with 99, and made all the same."""


Propose = Callable[[float], Awaitable[None]]
"""Replicate a change, which needs the seconds given; what comes back means that a majority has it."""


@dataclass(slots=True)
class KahunaStore:
    """The records on which a majority agrees."""

    journal: Path | None = None
    habits: Habits = field(default_factory=Habits)
    tables: Tables = field(default_factory=Tables)
    _replicating: set[tuple[bool, str]] = field(default_factory=set)

    def load(self) -> None:
        """Remember what was persistent before the restart."""
        if self.journal is not None and self.journal.exists():
            for line in self.journal.read_text(encoding="ascii").splitlines():
                name, values = json.loads(line)
                self.tables.put(PERSISTENT, name, (Lock if "owner" in values else Value)(**values))

    def clear(self) -> None:
        """Forget everything."""
        self.tables = Tables()
        if self.journal is not None:
            self.journal.unlink(missing_ok=True)

    @staticmethod
    def now() -> int:
        return int(time.time() * 1000)

    async def answer(self, call: str, fields: Fields, propose: Propose = asyncio.sleep) -> Fields:
        """Carry out one request that was read."""
        refusal = invalid(call, fields)
        if refusal is not None:
            return refusal
        record = (call in LOCK_CALLS, fields["resource" if call in LOCK_CALLS else "key"])
        if durability_of(fields) == PERSISTENT:
            busy = await self._while_replicating(call, fields, record)
            if busy is not None:
                return busy
        decision = self.tables.decide(call, fields, self.now())
        if decision.change is None:
            return decision.answer
        if durability_of(fields) == EPHEMERAL:
            self.tables.put(EPHEMERAL, record[1], decision.change)
            return decision.answer
        commit = self._commit(record, decision.change, propose)
        first = isinstance(decision.change, Lock) and decision.change.token == 0 and call == "try-lock"
        if first and random.random() < self.habits.grants_in_error:
            later = asyncio.get_running_loop().create_task(commit)
            _LATE.add(later)
            later.add_done_callback(_LATE.discard)
            return any_answer(call, ERRORED)
        await commit
        return decision.answer

    async def _while_replicating(self, call: str, fields: Fields, record: tuple[bool, str]) -> Fields | None:
        """What is answered while another change of the same record is on its way; None when it has arrived."""
        for _ in range(_TRIES):
            if record not in self._replicating:
                return None
            if call == "get-info":
                return any_answer(call, WAITING_FOR_REPLICATION) if self.habits.info_waits else None
            old = self.tables.locks[PERSISTENT].get(record[1]) if record[0] else None
            if call in {"try-extend", "try-unlock"} and old and not old.held and self.habits.regrant_hides:
                return any_answer(call, LOCK_DOES_NOT_EXIST)
            await asyncio.sleep(_PAUSE)
        return any_answer(call, MUST_RETRY) if record in self._replicating else None

    async def _commit(self, record: tuple[bool, str], change: Record, propose: Propose) -> None:
        self._replicating.add(record)
        try:
            await propose(self.habits.replication)
            if self.journal is not None:
                with self.journal.open("a", encoding="ascii") as journal:
                    journal.write(json.dumps([record[1], asdict(change)]) + "\n")
            self.tables.put(PERSISTENT, record[1], change)
        finally:
            self._replicating.discard(record)
