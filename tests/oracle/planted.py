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

        caught: A part of the message with which the oracle catches it, as a regular expression.

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
        """Return what changes the SQL or Lua that the file's text is a part of."""
        part = (BACKENDS / self.place).read_text(encoding="utf-8")
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
_TABLE = "_shared.lock_table:LockTable"
_SHARES = "_shared.share_table:ShareTable"
MEMORY = (
    Planted("an expired grant lives on", f"{_TABLE}._living", "row.expires <= now", "not row"),
    Planted("permits off by one", "_shared.share_table:fits", "len(held) < mode.of", "len(held) < mode.of - 1"),
    Planted(
        "a token that does not grow",
        f"{_TABLE}._draw_token",
        "self._next_token(self._last_token)",
        "self._last_token or self._next_token(0)",
    ),
    Planted("a silent waiter keeps its place", f"{_TABLE}.head", "waiter.seen + LINE_TTL > now", "waiter"),
    Planted("releasing for another owner", f"{_TABLE}.release", "row.owner != claim.owner", "not row"),
    Planted("the last in line is woken", f"{_TABLE}.head", "next(iter(line.items()))", "list(line.items())[-1]"),
    Planted("a share overtakes waiters", f"{_SHARES}.acquire", "ahead is not None and ahead != claim.owner", "False"),
)
SQLITE = (
    Planted("an expired grant lives on", "sqlite.requests:LockRows._living", " and now < held.expires", ""),
    Planted(
        "a share overtakes waiters",
        "sqlite.share_rows:ShareRows._acquire_share",
        "ahead is not None and ahead.owner != claim.owner",
        "False",
    ),
    Planted(
        "readers with a token each",
        "sqlite.share_rows:ShareRows._acquire_share",
        "shares[0].token if shares and claim.mode == READER else self._draw_token()",
        "self._draw_token()",
        {"a": ("reader", "reader", "lock")},
    ),
    Planted(
        "a silent waiter keeps its place",
        "sqlite.waiter_rows:WaiterRows._silent_at",
        "sign + _TTL",
        "sign + 100 * _TTL",
    ),
    Planted(
        "the last in line is woken", "sqlite.waiter_rows:WaiterRows._first", "ORDER BY number", "ORDER BY number DESC"
    ),
    Planted("a lost reason", "sqlite.operator_rows:OperatorRows._reason", "if found is None", "if True"),
    Planted("releasing for another owner", "sqlite.requests:LockRows._end_grant", " AND owner = :owner", ""),
    Planted(
        "a call that was cut off is not undone",
        "sqlite.connection.file:LockFile.transaction",
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
        "permits off by one",
        _SQL,
        "AND (p_mode = 'reader' OR count(*) < p_permits) AS room",
        "AND (p_mode = 'reader' OR count(*) <= p_permits) AS room",
        _PERMITS,
    ),
    Planted(
        "a reader overtakes a writer",
        _SQL,
        "AND NOT (p_mode = 'reader' AND w.mode = 'reader')",
        "AND p_mode <> 'reader'",
        _READERS,
    ),
    Planted(
        "a silent waiter keeps its place",
        _SQL,
        "SELECT p_seen > p_now - interval '3 seconds' AND p_seen <= p_now + interval '3 seconds'",
        "SELECT true",
        {"a": ("lock", "writer")},
    ),
    Planted(
        "a lost reason",
        _SQL,
        "v_row.expires_at + interval '1 minute', p_reason",
        "v_row.expires_at + interval '1 minute', ''",
        _LOCKS,
    ),
    Planted(
        "the last in line is woken",
        _SQL,
        "FROM fencing_waiter w WHERE w.name = p_name ORDER BY w.number LIMIT 1;",
        "FROM fencing_waiter w WHERE w.name = p_name ORDER BY w.number DESC LIMIT 1;",
        {"a": ("lock", "lock", "writer")},
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
REDIS = (
    Planted(
        "renewing for another owner",
        "redis/renew.lua",
        "elseif string.sub(held, 1, #owner + 1) == owner .. '\\0' then",
        "elseif held ~= '' then",
        _LOCKS,
    ),
    Planted(
        "permits off by one",
        "redis/share.lua",
        "(owner ~= '' and 1 or redis.call('ZCARD', e)) < tonumber(permits)",
        "(owner ~= '' and 1 or redis.call('ZCARD', e)) <= tonumber(permits)",
        {"b": ("permit",)},
    ),
    Planted(
        "a share overtakes waiters",
        "redis/share_acquire_beside.lua",
        "if head and head ~= owner then",
        "if false then",
        {"b": ("reader", "writer", "permit")},
    ),
    Planted(
        "a silent waiter for a lock keeps its place",
        "redis/line.lua",
        "elseif age >= LINE_TTL or age < -LINE_TTL then",
        "elseif false then",
        _LOCKS,
    ),
    Planted(
        "a silent waiter for a share keeps its place",
        "redis/waking_line.lua",
        "if left > 0 and left <= 2 * LINE_TTL then return",
        "if true then return",
        {"b": ("reader", "writer", "permit")},
    ),
    Planted(
        "the last waiter for a share is woken",
        "redis/waking_line.lua",
        "local head = redis.call('ZRANGE', q, 0, 0)[1]",
        "local head = redis.call('ZREVRANGE', q, 0, 0)[1]",
        {"b": ("writer",)},
    ),
    Planted(
        "the last waiter is handed the lock",
        "redis/line.lua",
        "redis.pcall('ZPOPMIN', q)",
        "redis.pcall('ZPOPMAX', q)",
        _LOCKS,
    ),
    Planted(
        "a lost reason",
        "redis/revoke.lua",
        "redis.call('HSET', x, owner, reason)",
        "redis.call('HSET', x, owner, '')",
        _LOCKS,
    ),
    Planted(
        "releasing for another owner",
        "redis/release.lua",
        ".. '\\0' and 1 or -1) or 0",
        ".. '\\0' and 1 or 1) or 0",
        _LOCKS,
    ),
    Planted(
        "a token that does not grow",
        "redis/grant.lua",
        "token, problem = higher + 1,",
        "token, problem = higher,",
        _LOCKS,
    ),
    Planted(
        "numbers in the line are given again",
        "redis/share_join.lua",
        "math.max(tonumber(behind or 0), tonumber(redis.call('HGET', w, '') or 0))",
        "tonumber(behind or 0)",
        {"b": ("reader", "writer")},
    ),
)
QUORUM = (
    Planted(
        "the last in line is woken",
        "redis/waking_line.lua",
        "local head = redis.call('ZRANGE', q, 0, 0)[1]",
        "local head = redis.call('ZREVRANGE', q, 0, 0)[1]",
    ),
    Planted(
        "releasing for another owner",
        "redis/quorum/release.lua",
        "if read_hold(found).owner ~= ARGV[1] then return -1 end",
        "",
    ),
    Planted(
        "renewing for another owner",
        "redis/quorum/renew.lua",
        "elseif held.owner ~= owner then",
        "elseif false then",
    ),
)
ETCD = (
    Planted(
        "permits off by one", "etcd.shares:lowest_free", "len(line) >= mode.of", "len(line) >= mode.of - 1", _PERMITS
    ),
    Planted("a reader overtakes a writer", "etcd.shares:EtcdShares.turn", "if seen.ahead:", "if False:", _READERS),
    Planted("nobody is woken", "etcd.waiters:EtcdWaiters._watch_predecessor", "waiter.wake()", "pass", _LOCKS),
    Planted(
        "a lost reason",
        "etcd.revoking:_read_reason",
        'reason if isinstance(reason, str) else ""',
        '""',
        _LOCKS,
    ),
    Planted(
        "a waiter gets the first number", "etcd.shares:EtcdShares.turn", "lowest_free(mode, seen.ahead)", "0", _PERMITS
    ),
)
ZOOKEEPER = (
    Planted(
        "permits off by one",
        "zookeeper.waiters:rival_of",
        "len(ahead) >= mode.of",
        "len(ahead) >= mode.of - 1",
        _PERMITS,
    ),
    Planted(
        "a reader overtakes a writer", "zookeeper.waiters:rival_of", "if node.kind != READER_NODE", "if False", _READERS
    ),
    Planted(
        "nobody is woken",
        "zookeeper.waiters:ZooKeeperWaitQueue._on_rival_changed",
        "own_node.woken.set()",
        "pass",
        _LOCKS,
    ),
    Planted(
        "a lost reason",
        "zookeeper.revoking:ZooKeeperRevocations.reasons",
        "read_notes(folder[0]).get(mark_of(claim.owner))",
        "None",
        _LOCKS,
    ),
    Planted(
        "readers keep their token over a writer",
        "zookeeper.shares:ShareGrants.grant",
        "if line.noted:",
        "if False:",
        _READERS,
    ),
)
