"""What one run of the demo showed, read from its recording and from the database, never assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fencing_sdk.cli._recording_lines import Line

A, B = "worker A", "worker B"
BEFORE, BY_A, BY_B = 100, 10, 5
"""The balance at the start, and what each worker adds."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    One run, looked at afterwards.

    Args:
        guarded: Whether the workers wrote through a guard.

        lines: The recording, in the order of events.

        balance: What the database holds at the end.
    """

    guarded: bool
    lines: Sequence[Line]
    balance: int

    def token(self, actor: str) -> int | None:
        """The token of the lease that *actor* was granted."""
        line = self._find(actor, "acquired")
        return None if line is None else int(line["token"])

    @property
    def late_write(self) -> str:
        """What became of the write of the worker that had been frozen: accepted, refused, or missing."""
        if self._find(A, "write_accepted") is not None:
            return "accepted"
        return "missing" if self._find(A, "write_refused") is None else "refused"

    @property
    def taken_over(self) -> bool:
        """The second worker was granted a higher token while the first was frozen."""
        first, second = self.token(A), self.token(B)
        if first is None or second is None:
            return False
        return first < second and self._in_order((A, "frozen"), (B, "acquired"), (B, "write_accepted"), (A, "resumed"))

    @property
    def honest(self) -> bool:
        """The late write used a token that was read while it was good, and came after the other one's write."""
        write = f"write_{self.late_write}"
        before = self._in_order((A, "acquired"), (A, "read"), (A, "frozen"))
        return before and self._in_order((A, "resumed"), (A, write)) and self._token_of(write) == self.token(A)

    @property
    def noticed(self) -> bool:
        """LeaseLostError left the ``async with`` of the first worker as soon as it could run again."""
        line = self._find(A, "raised")
        return (
            line is not None and line.get("error") == "LeaseLostError" and self._in_order((A, "resumed"), (A, "raised"))
        )

    @property
    def fenced(self) -> bool:
        """The late write had the fate that it has to have, and so had the money."""
        if self.guarded:
            return self.late_write == "refused" and self.balance == BEFORE + BY_B
        return self.late_write == "accepted" and self.balance == BEFORE + BY_A

    @property
    def missing(self) -> list[str]:
        """What the run should have shown and did not."""
        claims = {
            "B took over with a higher token while A was frozen": self.taken_over,
            "A wrote with a token that it had read before it was frozen": self.honest,
            "LeaseLostError reached A": self.noticed,
            "A's late write was refused" if self.guarded else "A's late write destroyed B's": self.fenced,
        }
        return [claim for claim, holds in claims.items() if not holds]

    @property
    def outcome(self) -> str:
        """One sentence on the money."""
        if self.balance == BEFORE + BY_A:
            return f"The late write is accepted: the balance is {self.balance}, B's {BY_B} are lost"
        if self.balance == BEFORE + BY_B:
            return (
                f"The late write is refused: the balance is {self.balance}, and A knows that its {BY_A} are not in it"
            )
        return f"The balance is {self.balance}"

    def _find(self, actor: str, kind: str) -> Line | None:
        for line in self.lines:
            if line["kind"] == kind and line.get("lane", line.get("actor")) == actor:
                return line
        return None

    def _token_of(self, kind: str) -> int | None:
        line = self._find(A, kind)
        return None if line is None else int(line["token"])

    def _in_order(self, *events: tuple[str, str]) -> bool:
        found = [self._find(actor, kind) for actor, kind in events]
        moments = [float(line["t"]) for line in found if line is not None]
        return len(moments) == len(events) and moments == sorted(moments)
