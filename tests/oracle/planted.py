"""One rule of a store, changed in its Python, its SQL or its Lua: what the oracle has to catch."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.oracle.histories import MODES


@dataclass(frozen=True)
class Planted:
    """
    A change of one rule.

    Args:
        what: The rule that does not hold with it.

        place: Where the text is: ``module:Class.method`` for Python.

        old: The text that is replaced, which stands there once.

        new: What replaces it.

        caught: A part of the message with which the oracle catches it, as a regular expression.

        modes: The modes of the owners that notice it.
    """

    what: str
    place: str
    old: str
    new: str
    caught: str = ""
    modes: Sequence[str] = MODES

    def change(self, text: str) -> str:
        """Return *text* with the change; fail if there is nothing to change."""
        if text.count(self.old) != 1:
            pytest.fail(f"{self.what}: {self.old!r} stands {text.count(self.old)} times in {self.place}, and not once")
        return text.replace(self.old, self.new)

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


_TABLE = "_shared.lock_table:LockTable"
_SHARES = "_shared.share_table:ShareTable"
MEMORY = (
    Planted(
        "an expired grant lives on",
        f"{_TABLE}._living",
        "row.expires <= now",
        "not row",
    ),
    Planted(
        "permits off by one",
        "_shared.share_table:fits",
        "len(held) < mode.of",
        "len(held) < mode.of - 1",
        "a refusal out of turn",
    ),
    Planted(
        "a token that does not grow",
        f"{_TABLE}._draw_token",
        "self._next_token(self._last_token)",
        "self._last_token or self._next_token(0)",
        "did not grow",
    ),
    Planted(
        "a silent waiter keeps its place", f"{_TABLE}.head", "waiter.seen + LINE_TTL > now", "waiter", "out of turn"
    ),
    Planted("releasing for another owner", f"{_TABLE}.release", "row.owner != claim.owner", "not row", "refused"),
    Planted(
        "the last in line is woken",
        f"{_TABLE}.head",
        "next(iter(line.items()))",
        "list(line.items())[-1]",
        "was not woken|turn",
    ),
    Planted(
        "a share overtakes waiters",
        f"{_SHARES}.acquire",
        "ahead is not None and ahead != claim.owner",
        "False",
        "a grant out of turn",
    ),
)
SQLITE = (
    Planted(
        "an expired grant lives on",
        "sqlite.requests:LockRows._living",
        " and now < held.expires",
        "",
    ),
    Planted(
        "a share overtakes waiters",
        "sqlite.share_rows:ShareRows._acquire_share",
        "ahead is not None and ahead.owner != claim.owner",
        "False",
        "a grant out of turn",
    ),
    Planted(
        "readers with a token each",
        "sqlite.share_rows:ShareRows._acquire_share",
        "shares[0].token if shares and claim.mode == READER else self._draw_token()",
        "self._draw_token()",
        "two tokens",
        ("reader", "reader", "lock"),
    ),
    Planted(
        "a silent waiter keeps its place",
        "sqlite.waiter_rows:WaiterRows._silent_at",
        "sign + _TTL",
        "sign + 100 * _TTL",
        "lost its place|out of turn|wait, and",
    ),
    Planted(
        "the last in line is woken",
        "sqlite.waiter_rows:WaiterRows._first",
        "ORDER BY number",
        "ORDER BY number DESC",
        "was not woken|turn",
    ),
    Planted(
        "a lost reason",
        "sqlite.operator_rows:OperatorRows._reason",
        "if found is None",
        "if True",
        "reason .* was lost",
    ),
    Planted(
        "releasing for another owner",
        "sqlite.requests:LockRows._end_grant",
        " AND owner = :owner",
        "",
        "hold, and|not renewed",
    ),
    Planted(
        "a call that was cut off is not undone",
        "sqlite.connection.file:LockFile.transaction",
        "self._connection.rollback()",
        "self._connection.commit()",
        "hold, and|are left|wait in|refused",
    ),
)
