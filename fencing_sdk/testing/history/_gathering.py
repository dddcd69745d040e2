"""
Lines in, facts out: what each kind of line adds to what is known about a run. This is the one reader of recordings.

Lines are untrusted input; one without a number that its kind always has is an error, one of an
unknown kind is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.testing.history._facts import (
    Facts,
    Line,
    RecordedAccess,
    RecordedCall,
    RecordedLease,
    RecordedWait,
    Rhythm,
    StoreGrant,
    Trouble,
)

_LIMIT = 2**53
"""No token reaches it, and no moment in seconds: far below, sums and differences stay finite."""
OF_ACTORS = {
    *("acquiring", "not_acquired", "acquired", "renewed", "lost", "released", "frozen", "resumed"),
    *("read", "fence_raised", "write_accepted", "write_refused", "stale_rejected"),
}
"""Kinds of lines that show what an actor did."""


def gather(lines: Iterable[Line]) -> list[Facts]:
    """
    Put the lines of a recording together, one `Facts` for each run in it. A line ``run`` begins one.

    Raises:
        ConfigurationError: an event lacks something that its kind always has.
    """
    gatherers = [_Gatherer()]
    for line in sorted(lines, key=lambda line: float(line["t"])):
        if line["kind"] == "run" and gatherers[-1].begun:
            gatherers.append(_Gatherer())
        gatherers[-1].add(line)
    return [gatherer.finish() for gatherer in gatherers if gatherer.begun]


class PendingAcquisition(NamedTuple):
    """An acquisition that has not ended."""

    start: float
    first: float
    """When its caller began, where earlier grants to the same caller came too late."""


class _Gatherer:
    def __init__(self) -> None:
        self.facts = Facts()
        self.begun = False
        self._leases: dict[tuple[str, str, int], RecordedLease] = {}
        self._by_holder: dict[tuple[str, str], RecordedLease] = {}
        self._by_token: dict[tuple[str, int], RecordedLease] = {}
        self._grants: dict[tuple[str, str], StoreGrant] = {}
        self._calls: dict[str, RecordedCall] = {}
        self._frozen: dict[str, float] = {}
        self._pending: dict[tuple[str, str, str], PendingAcquisition] = {}
        self._going_on: dict[tuple[str, str], float] = {}  # since when, of those whose grant came too late

    def add(self, line: Line) -> None:
        step = _STEPS.get(str(line["kind"]))
        if step is None:
            return
        try:
            at = float(line["t"])
            if not self.begun:
                self.begun = True
                self.facts.start = at
            self.facts.end = at  # they come in order
            actor = str(line.get("lane", line.get("actor", "?")))
            if line["kind"] in OF_ACTORS:
                self.facts.actors.setdefault(actor)
                self.facts.first, self.facts.last = min(self.facts.first, at), at
            step(self, line, at, actor)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            place = getattr(line, "where", "")  # set when the line was read from a file
            where = f"{place}: " if place else ""
            msg = f"{where}a recorded event of kind {shown(line['kind'])} is incomplete: {_wrong(error)}"
            raise ConfigurationError(msg) from error

    def finish(self) -> Facts:
        facts = self.facts
        facts.troubles += [Trouble("frozen", since, math.inf, actor) for actor, since in self._frozen.items()]
        facts.waits += [
            RecordedWait(actor, name, pending.first, None, granted=False)
            for (actor, name, _), pending in self._pending.items()
        ]
        broken = [trouble for trouble in facts.troubles if trouble.what in {"forgot", "stepped"}]
        for grant in facts.grants:
            grant.excused |= any(grant.start <= trouble.end and trouble.start <= grant.end for trouble in broken)
        return facts

    # What the SDK records by itself.

    def _on_run(self, line: Line, _at: float, _actor: str) -> None:
        self.facts.title = str(line.get("title", ""))
        self.facts.declared = bool(line.get("declared", False))
        if "heartbeat_interval" in line:
            buffer, interval = float(line["safety_buffer"]), float(line["heartbeat_interval"])
            self.facts.rhythm = Rhythm(buffer, interval, float(line["drift"]))

    def _on_outcome(self, line: Line, _at: float, _actor: str) -> None:
        self.facts.outcome = str(line.get("text", ""))

    def _on_acquiring(self, line: Line, at: float, actor: str) -> None:
        name, holder = str(line["name"]), str(line.get("holder", ""))
        self._pending[actor, name, holder] = PendingAcquisition(at, self._going_on.pop((actor, name), at))

    def _on_not_acquired(self, line: Line, at: float, actor: str) -> None:
        name, holder = str(line["name"]), str(line.get("holder", ""))
        if line.get("reason") == "too_late":  # the caller goes on with another holder id
            pending = self._pending.pop((actor, name, holder), PendingAcquisition(at, at))
            self._going_on[actor, name] = pending.first
        else:
            self._answer((actor, name, holder), at - _waited(line), at, granted=False)

    def _on_acquired(self, line: Line, at: float, actor: str) -> None:
        name, token, holder = str(line["name"]), _token(line, "token"), str(line.get("holder") or "")
        asked = self._answer((actor, name, holder), at - _waited(line), at, granted=True)
        holder = holder or f"{actor} {token}"
        deadline, ttl = _seconds(line, "deadline"), _seconds(line, "ttl")
        max_hold = line.get("max_hold")
        lease = RecordedLease(actor, name, token, holder, asked, at, ttl, deadline)
        lease.max_hold = None if max_hold is None else float(max_hold)
        lease.mode, lease.permit, lease.permits = _mode(line), _number(line, "permit"), _number(line, "permits")
        self.facts.leases.append(lease)
        self._leases[actor, name, token] = self._by_holder[name, holder] = self._by_token[actor, token] = lease

    def _on_renewed(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            if at > lease.deadline:
                lease.revived = at
            lease.deadline = _seconds(line, "deadline")
            lease.renewals.append(at)

    def _on_lost(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.lost, lease.reason = at, str(line.get("reason", ""))

    def _on_released(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.released, lease.kept = at, bool(line.get("kept_for"))

    def _on_fence_raised(self, line: Line, at: float, actor: str) -> None:
        lease = self._lease(line, actor)
        if lease is not None and lease.mode == "reader":  # to a guard all readers of one token are one holder
            line = {**line, "holder": None}
        self.facts.accesses.append(_access(line, at, actor, accepted=True, write=False))

    # What workers, resources and harnesses record.

    def _on_entered(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.entered, lease.fences = at, tuple(map(str, line.get("fences", ())))

    def _on_stale_rejected(self, line: Line, at: float, actor: str) -> None:
        if "resource" in line and "token" in line:
            self.facts.asides.append(_access(line, at, actor, accepted=False))

    def _on_read(self, line: Line, at: float, actor: str) -> None:
        if "resource" in line and "token" in line:
            self.facts.asides.append(_access(line, at, actor, accepted=True, write=False))
        key = str(line.get("name", line.get("resource"))), str(line.get("holder", ""))
        lease = self._by_holder.get(key)
        if lease is None:
            lease = self._by_token.get((actor, _token(line, "token")))
        if lease is not None:
            lease.reads.append(at)

    def _on_body_ended(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.body_ended, lease.how = at, str(line["how"])

    def _on_left(self, line: Line, _at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            error = line.get("error")
            lease.left, lease.error = True, None if error is None else str(error)
            lease.noted, lease.outer = bool(line.get("noted", False)), bool(line.get("outer", False))

    def _on_write_accepted(self, line: Line, at: float, actor: str) -> None:
        self.facts.accesses.append(_access(line, at, actor, accepted=True))

    def _on_write_refused(self, line: Line, at: float, actor: str) -> None:
        self.facts.accesses.append(_access(line, at, actor, accepted=False))

    # What a store that can be looked into records.

    def _on_granted(self, line: Line, at: float, _actor: str) -> None:
        name, holder = str(line["name"]), str(line["holder"])
        since = min(at, float(line.get("since", at)))
        grant = StoreGrant(name, int(line["token"]), holder, since, float(line["until"]))
        grant.mode, grant.permit = _mode(line), _number(line, "permit")
        self.facts.grants.append(grant)
        self._grants[name, holder] = grant

    def _on_extended(self, line: Line, at: float, _actor: str) -> None:
        if (grant := self._grants.get((str(line["name"]), str(line["holder"])))) is not None:
            if at > grant.end and not any(trouble.what == "stepped" for trouble in self.facts.troubles):
                self.facts.revived.append((at, grant))
            grant.until = float(line["until"])

    def _on_ended(self, line: Line, at: float, _actor: str) -> None:
        grant = self._grants.get((str(line["name"]), str(line["holder"])))
        if grant is not None and grant.ended is None:
            grant.ended, grant.why, grant.by = at, str(line["why"]), str(line.get("by", ""))
            grant.meant = _number(line, "meant")
            grant.excused |= grant.why in {"revoked", "forgotten"}

    def _on_asked(self, line: Line, at: float, actor: str) -> None:
        name, holder = str(line["name"]), str(line["holder"])
        number, operation = str(line["call"]), str(line["operation"])
        call = RecordedCall(number, operation, name, holder, actor, float(line["ttl"]), at, mode=_mode(line))
        self.facts.calls.append(call)
        self._calls[number] = call

    def _on_answered(self, line: Line, at: float, _actor: str) -> None:
        if (call := self._calls.get(str(line["call"]))) is not None:
            token = line.get("token")
            call.answered, call.outcome = at, str(line["outcome"])
            call.token = None if token is None else int(token)

    def _on_repeated(self, line: Line, _at: float, _actor: str) -> None:
        if (call := self._calls.get(str(line["call"]))) is not None:
            call.repeated = True

    # What was done to the run.

    def _on_frozen(self, _line: Line, at: float, actor: str) -> None:
        self._frozen.setdefault(actor, at)

    def _on_resumed(self, _line: Line, at: float, actor: str) -> None:
        if (since := self._frozen.pop(actor, None)) is not None:
            self.facts.troubles.append(Trouble("frozen", since, at, actor))

    def _on_trouble(self, line: Line, at: float, _actor: str) -> None:
        until = line.get("until")
        end = at if until is None else float(until)
        start = float(line.get("since", at))
        self.facts.troubles.append(Trouble(str(line["what"]), start, end, str(line.get("who", ""))))

    def _on_healed(self, line: Line, at: float, _actor: str) -> None:
        self.facts.healed = (at, float(line["within"]))

    def _on_end(self, line: Line, _at: float, _actor: str) -> None:
        self.facts.left_behind = [str(name) for name in line["held"]]

    def _lease(self, line: Line, actor: str) -> RecordedLease | None:
        """The lease *line* is about; None when the recording began after its grant."""
        name, token = str(line["name"]), _token(line, "token")
        lease = self._by_holder.get((name, str(line.get("holder", ""))))  # readers of one actor may share a token
        if lease is not None and (lease.actor, lease.token) == (actor, token):
            return lease
        return self._leases.get((actor, name, token))

    def _answer(self, key: tuple[str, str, str], since: float, at: float, *, granted: bool) -> float:
        """Note that an acquisition ended; return when it began, which is *since* where that was not recorded."""
        pending = self._pending.pop(key, PendingAcquisition(since, since))
        self.facts.waits.append(RecordedWait(key[0], key[1], pending.first, at, granted))
        return pending.start


def _access(line: Line, at: float, actor: str, *, accepted: bool, write: bool = True) -> RecordedAccess:
    holder, fence = line.get("holder"), line.get("fence")
    return RecordedAccess(
        resource=str(line["resource"]),
        token=_token(line, "token"),
        holder=None if holder is None else str(holder),
        low=min(at, float(line.get("sent", at))),
        high=at,
        actor=actor,
        accepted=accepted,
        fence=None if fence is None else _token(line, "fence"),
        write=write,
        text=str(line.get("text", "")),
    )


def _seconds(line: Line, field: str) -> float:
    value = line[field]
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_LIMIT < value < _LIMIT:
        msg = f"{shown(field)} is not such a number"
        raise ValueError(msg)
    return float(value)


def _waited(line: Line) -> float:
    return _seconds(line, "waited") if "waited" in line else 0.0


def _token(line: Line, field: str) -> int:
    value = line[field]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LIMIT:
        msg = f"{shown(field)} is not such a number"
        raise ValueError(msg)
    return value


def _mode(line: Line) -> str:
    return str(line.get("mode") or "lock")


def _number(line: Line, field: str) -> int | None:
    number = line.get(field)
    return None if number is None else int(number)


def _wrong(error: Exception) -> str:
    """Return what a line lacks, or what is wrong with a field: the latter in Python's words, on one line."""
    if isinstance(error, KeyError):
        return f"{shown(error.args[0])} is missing"
    text = str(error)
    return text if text.isprintable() and text.isascii() else shown(text)


_STEPS: dict[str, Callable[[_Gatherer, Line, float, str], None]] = {
    name.removeprefix("_on_"): step for name, step in vars(_Gatherer).items() if name.startswith("_on_")
}
"""What a line of each kind does."""
