"""One rule of a store, changed in its Python, its SQL or its Lua: what the oracle has to catch."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fencing_sdk import backends
from tests.oracle.histories import Cast

BACKENDS = Path(backends.__file__).parent


@dataclass(frozen=True)
class Planted:
    """
    A change of one rule.

    Args:
        what: The rule that does not hold with it.

        place: Where the text is: ``module:Class.method`` for Python, or a file.

        old: The text that is replaced, which stands there once.

        new: What replaces it.

        cast: The owners that notice it, where it needs certain ones.
    """

    what: str
    place: str
    old: str
    new: str
    cast: Cast = field(default_factory=dict)

    def change(self, text: str) -> str:
        """Return *text* with the change; fail unless it stands there once."""
        if text.count(self.old) != 1:
            pytest.fail(f"{self.what}: {self.old!r} stands {text.count(self.old)} times in {self.place}, and not once")
        return text.replace(self.old, self.new)

    def in_text(self) -> Callable[[str], str]:
        """Return what changes SQL, or a script, that the text stands in; ``file.lua [section]`` names a part of it."""
        file, _, section = self.place.partition(" [")
        part = (BACKENDS / file).read_text(encoding="utf-8")
        if section:
            part = part.split(f"-- [{section}\n", 1)[1].split("\n-- [", 1)[0]
        changed = self.change(part)
        return lambda text: text.replace(part, changed)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace a function of the package by one with the change."""
        owner, function = _found(self.place)
        module = sys.modules[function.__module__]
        source = self.change(textwrap.dedent(inspect.getsource(function)))
        inside = (
            f"def plant(__class__):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}"  # for super()
        )
        flags = __future__.annotations.compiler_flag
        made: dict[str, Any] = {}
        exec(compile(inside, f"<{self.what}>", "exec", flags, dont_inherit=True), vars(module), made)
        monkeypatch.setattr(owner, function.__name__, made["plant"](owner))


def _found(place: str) -> tuple[Any, Callable[..., object]]:
    module, _, path = place.partition(":")
    __import__(owner := f"fencing_sdk.backends.{module}")
    found: Any = sys.modules[owner]
    *parents, name = path.split(".")
    for parent in parents:
        found = getattr(found, parent)
    return found, getattr(found, name)


_LOCKS: Cast = {"a": ("lock",)}
_PERMITS: Cast = {"a": ("permit",)}
_READERS: Cast = {"a": ("reader", "writer")}
_RULES = "_shared.rules"
_OF_THE_RULES = (
    Planted("permits off by one", f"{_RULES}:fits", "len(held) < mode.of", "len(held) < mode.of - 1"),
    Planted(
        "a newcomer overtakes waiters", f"{_RULES}:acquire", "head is not None and head.owner != claim.owner", "False"
    ),
    Planted(
        "readers with a token each",
        f"{_RULES}:_token_for",
        "mode == READER and held",
        "False",
        {"a": ("reader", "reader", "lock")},
    ),
    Planted("a silent waiter keeps its place", f"{_RULES}:_lives", "now < waiter.silent_at <=", "waiter.silent_at <="),
    Planted("releasing for another owner", f"{_RULES}:_of", "row.owner == owner", "row"),
    Planted("a release wakes nobody", f"{_RULES}:wake_next", "head is not None", "False"),
    Planted("a lost reason", f"{_RULES}:_why_over", "why is not None", "False"),
    Planted(
        "an heir has the token of the former", f"{_RULES}:transfer", "_token_for(rows, mine.mode, held)", "mine.token"
    ),
    Planted(
        "an heir has another number", f"{_RULES}:transfer", "mine.mode, mine.permit,", "mine.mode, None,", _PERMITS
    ),
    Planted("a revocation of whatever is held", f"{_RULES}:revoke", "row.token == token", "row"),
    Planted(
        "a revocation leaves a reader of the phase",
        f"{_RULES}:revoke",
        "row.token == token]",
        "row.token == token][:1]",
        _READERS,
    ),
    Planted("waking while there is no room", f"{_RULES}:wake_next", "_has_room(head.mode, rows.grants())", "True"),
)
MEMORY = (
    *_OF_THE_RULES,
    Planted(
        "who leaves the line wakes no other",
        "memory:MemoryBackend._leave",
        "self._wake_next(waiter.claim.name)",
        "pass",
    ),
    Planted("an expired grant lives on", "_shared.row_table:RowTable.forget_ended", "row.expires <= now", "not row"),
    Planted(
        "a token that does not grow",
        "_shared.row_table:TableRows.next_token",
        "self.table.next_token(self.table.last_token)",
        "self.table.last_token or self.table.next_token(0)",
    ),
    Planted(
        "the last in line is woken", "_shared.row_table:TableRows.line", "line.values()", "list(line.values())[::-1]"
    ),
)
SQLITE = (
    Planted("an expired grant lives on", "sqlite.rows:SqliteRows._grants", " and self._micros < expires", ""),
    Planted(
        "a waiter that gives no sign keeps its place",
        "sqlite.rows:OpenFile.silent_at",
        "sign + int(",
        "sign + 100 * int(",
    ),
    Planted(
        "a call that was cut off is not undone",
        "sqlite.file:LockFile.transaction",
        "self._connection.rollback()",
        "self._connection.commit()",
    ),
)
_SQL = "postgresql/schema.sql"
POSTGRESQL = (
    Planted(
        "renewing an expired grant",
        _SQL,
        "l.owner = c.owner AND l.expires_at > v_now AND l.name = ANY (v_mine)",
        "l.owner = c.owner AND l.name = ANY (v_mine)",
        _LOCKS,
    ),
    Planted(
        "a silent waiter keeps its place",
        _SQL,
        "SELECT p_seen > p_now - interval '3 seconds' AND p_seen <= p_now + interval '3 seconds'",
        "SELECT true",
        {"a": ("lock", "writer")},
    ),
    Planted(
        "releasing for another owner",
        _SQL,
        "l.name OPERATOR(pg_catalog.=) p_name AND l.owner OPERATOR(pg_catalog.=) p_owner FOR UPDATE SKIP LOCKED",
        "l.name OPERATOR(pg_catalog.=) p_name FOR UPDATE SKIP LOCKED",
        _LOCKS,
    ),
    Planted(
        "a token that does not grow",
        _SQL,
        "greatest(p_last OPERATOR(pg_catalog.+) 1,",
        "greatest(p_last,",
        _LOCKS,
    ),
)
MYSQL = (
    Planted(
        "a lock without its row",
        "mysql.store:MysqlStore._step",
        "lock_free=True",
        "lock_free=False",
    ),
    Planted("signs of life are ignored", "mysql.store:_waiter", "(since if seen is None else seen)", "since"),
    Planted("a silent waiter keeps its place", "mysql.store:_waiter", "+ rules.LINE_TTL", "+ 100 * rules.LINE_TTL"),
    Planted(
        "who leaves takes all waiters along",
        "mysql.store:NameRows.changes",
        "DELETE FROM fencing_waiter WHERE name = {name} AND owner = {hexadecimal(owner)}",
        "DELETE FROM fencing_waiter WHERE name = {name}",
    ),
    Planted("a release wakes nobody", "mysql.store:NameRows.changes", "yield message([woken.box]", "([woken.box]"),
)
REDIS = (
    Planted(
        "an heir has the token of the former",
        "redis/operating.lua [transfer]",
        "token = grant(lease, last, kind, heir, ttl, label, true, time)",
        "redis.call('SET', lease, heir .. '\\0' .. token .. '\\0' .. label, 'PX', ttl)",
        _LOCKS,
    ),
    Planted(
        "renewing for another owner",
        "redis/lease.lua [renew]",
        "elseif string.sub(held, 1, #owner + 1) == owner .. '\\0' then",
        "elseif held ~= '' then",
        _LOCKS,
    ),
    Planted(
        "permits off by one",
        "redis/shares.lua [shares]",
        "or 1) < tonumber(permits)",
        "or 1) <= tonumber(permits)",
        {"b": ("permit",)},
    ),
    Planted(
        "a silent waiter keeps its place",
        "redis/line.lua [serve]",
        "elseif not is_alive(age) then",
        "elseif false then",
        _LOCKS | {"b": ("reader", "writer", "permit")},
    ),
    Planted(
        "who leaves the line wakes no other",
        "redis/lease.lua [release in line]",
        "    if not e then return released end",
        "    do return released end",
    ),
    Planted(
        "releasing for another owner",
        "redis/lease.lua [release]",
        ".. '\\0' and 1 or -1) or 0",
        ".. '\\0' and 1 or 1) or 0",
        _LOCKS,
    ),
    Planted(
        "a token that does not grow",
        "redis/lease.lua [grant]",
        "token, problem = higher + 1,",
        "token, problem = higher,",
        _LOCKS,
    ),
)
QUORUM = (
    Planted(
        "releasing for another owner",
        "redis/quorum/holds.lua [release]",
        "if read_hold(found).owner ~= ARGV[1] then return -1 end",
        "",
    ),
    Planted(
        "renewing for another owner",
        "redis/quorum/holds.lua [renew]",
        "elseif held.owner ~= owner then",
        "elseif false then",
    ),
)
ETCD = (
    Planted(
        "a reader overtakes a writer",
        "etcd.line:rival_of",
        "if node.shared != READER.word",
        "if False",
        _READERS,
    ),
    Planted("nobody is woken", "etcd.watches:EtcdWaiters._watch_rival", "waiter.wake()", "pass", _LOCKS),
    Planted(
        "a waiter gets the first number",
        "etcd.line:EtcdLine.turn",
        "free_permit(mode, {key.permit for key in ahead})",
        "free_permit(mode, ())",
        _PERMITS,
    ),
    Planted(
        "readers keep their token over a writer",
        "etcd.line:EtcdLine.turn",
        "if permit is None and not phase:",
        "if permit is None:",
        _READERS,
    ),
)
ZOOKEEPER = (
    Planted(
        "nobody is woken",
        "zookeeper.waiters:ZooKeeperWaitQueue._on_rival_changed",
        "own_node.woken.set()",
        "pass",
        _LOCKS,
    ),
    Planted(
        "readers keep their token over a writer",
        "zookeeper.waiters:ZooKeeperWaitQueue._grant",
        "if line.noted:",
        "if False:",
        _READERS,
    ),
)

KAHUNA = (
    Planted(
        "another owner's grant is renewed",
        "kahuna:KahunaBackend._extend",
        "_RENEWALS.get(answer.type)",
        "Renewal.RENEWED",
    ),
    Planted(
        "a release is not sent",
        "kahuna:KahunaBackend.release",
        "body_of(claim.name, claim)",
        'body_of(claim.name, Claim(claim.name, claim.ttl, "another"))',
    ),
    Planted(
        "every grant has one token",
        "kahuna:KahunaBackend._granted",
        "Grant(token, restarted=restart)",
        "Grant(1, restarted=restart)",
    ),
    Planted(
        "every owner is one",
        "kahuna.cluster:_owner_text",
        'text.encode("utf-8", "surrogatepass")',
        'b"owner"',
    ),
)
