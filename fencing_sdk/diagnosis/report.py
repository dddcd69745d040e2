"""What a diagnosis returns: findings, measurements, and the numbers that fit what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fencing_sdk._values.reports import Finding, Severity
from fencing_sdk._values.timing import DEFAULT_TTL, MAX_TTL, Timing

_PAUSES_IN_BUFFER = 3
_RENEWALS_IN_INTERVAL = 4
_MANY = 1000
_FIFTH = 5
"""The safety buffer is a fifth of the ttl by default, and so is the interval: a quarter of the rest."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured. Times are in seconds. None: it could not be measured."""

    seconds: float
    """For how long."""
    loop_pause: float
    """The longest pause of the event loop."""
    process_pause: float
    """The longest pause of the process."""
    clock_source: str | None
    """The clock from which the kernel counts."""
    renewals: int
    """How many renewals of the scratch lock were timed."""
    renewal_p50: float | None
    renewal_p99: float | None
    renewal_max: float | None
    clock_difference: float | None
    """How far the store's clock is ahead of this machine's."""
    clock_drift: float | None
    """How much faster the store's clock runs than this machine's, as a fraction."""
    tokens: tuple[int, ...]
    """The tokens of the self-test, in the order of the grants."""
    handed_on: float | None
    """
    Seconds from the release by one connection to the grant to a waiter of the other.

    The shortest of up to three times, because one that is late is measured again.
    """
    loss_noticed: float | None
    """
    Seconds until the store notified a holder that its grant was taken away; None also where stores send no notice.
    """

    @property
    def longest_pause(self) -> float:
        """The longest pause of the event loop or of the process."""
        return max(self.loop_pause, self.process_pause)


@dataclass(frozen=True, slots=True)
class Advice:
    """The numbers of a lock that fit what was measured."""

    ttl: float
    safety_buffer: float
    heartbeat_interval: float
    arithmetic: tuple[str, ...]
    """How each number was found, a line for each."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What this process and this store can promise, and what to change."""

    findings: tuple[Finding, ...]
    """The worst come first."""
    measurements: Measurements
    advice: Advice

    @property
    def worst(self) -> Severity | None:
        """The highest severity of all findings; None without any."""
        return max((finding.severity for finding in self.findings), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis in types that JSON knows; severities are words."""
        plain = asdict(self)
        for finding in plain["findings"]:
            finding["severity"] = str(finding["severity"])
        return plain


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort *findings*, the worst first, and drop those that are there twice."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: -finding.severity))


def advise(measured: Measurements) -> Advice:
    """
    Choose the shortest ttl, from the default on, whose default buffer and interval fit what was measured.

    The safety buffer takes three of the longest pauses, and the interval four of the slowest renewals.
    """
    pause, renewal = measured.longest_pause, measured.renewal_max or 0.0  # 0.0: the store was not reached
    for_pauses, for_renewals = _FIFTH * _PAUSES_IN_BUFFER * pause, _FIFTH * _RENEWALS_IN_INTERVAL * renewal
    ttl = min(MAX_TTL, float(-(-max(DEFAULT_TTL, for_pauses, for_renewals) // 1)))
    timing = Timing.build(ttl=ttl)
    numbers = timing.ttl, timing.safety_buffer, timing.heartbeat_interval
    of_pauses = f"15 x the longest pause ({pause:.3f} s) = {for_pauses:.2f} s,\n"
    largest = f"the largest of {DEFAULT_TTL:g} s (the default),\n{of_pauses}"
    if measured.renewal_max is None:
        ground = f"{largest}and no renewal was measured"
        return Advice(*numbers, (ground, "ttl / 5", "(ttl - safety_buffer) / 4"))
    return Advice(
        *numbers,
        (
            f"{largest}20 x the slowest renewal ({renewal:.3f} s) = {for_renewals:.2f} s",
            f"ttl / 5, which is {_times(timing.safety_buffer, pause)} the longest pause",
            f"(ttl - safety_buffer) / 4, which is {_times(timing.heartbeat_interval, renewal)} the slowest renewal",
        ),
    )


def _times(length: float, part: float) -> str:
    return f"{length / part:.0f} x" if length < _MANY * part else f"over {_MANY} x"
