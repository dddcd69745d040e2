"""
Checks ZooKeeper's servers by the four-letter word `srvr`, and the session that locks get.

A word is a connection of its own, which the server closes after its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.zookeeper import ZooKeeperBackend
from fencing_sdk.backends.zookeeper.driver import ZooKeeperSettings
from fencing_sdk.diagnosis.checks import WARNING, Check, StoreDiagnosis, host_down, judged

_LIMIT = 3.0
_LONGEST_ANSWER = 1 << 20
_TOLERANCE = 1.05
_LENGTHS = "a lock of {it.ttl:g} s needs a session of {it.asked:.1f} s, and gets one of {it.granted:g} s"


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The session for locks of one ttl: seconds of the ttl, and of the requested and the granted timeout."""

    ttl: float
    asked: float
    granted: float
    """0.0 without a session."""

    @property
    def asked_ms(self) -> float:
        """The requested timeout, as the servers write it."""
        return 1000 * self.asked

    @property
    def possible_ttl(self) -> float:
        """The ttl that fits the session which was granted."""
        return self.granted / self.asked * self.ttl


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
OF_SESSION: tuple[Check[SessionFacts], ...] = (
    Check("zookeeper.session", WARNING, lambda it: it.granted and it.granted * _TOLERANCE < it.asked,
        _LENGTHS, "leases are shorter than asked for, and lost sooner",
        "maxSessionTimeout={it.asked_ms:.0f} in zoo.cfg, or a ttl of {it.possible_ttl:.1f} s"),
    Check("zookeeper.session", WARNING, lambda it: it.granted > it.asked * _TOLERANCE,
        _LENGTHS, "the lock of a dead holder stays taken for so long",
        "minSessionTimeout={it.asked_ms:.0f} and a smaller tickTime in zoo.cfg, or a longer ttl"),
)
# fmt: on


class ZooKeeperDiagnosis(StoreDiagnosis[ZooKeeperBackend]):
    """The checks of one ensemble."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        self.backend._notice_fork()
        session, settings = self.backend._sessions.of(ttl), self.backend._settings
        with suppress(Exception):  # the servers' own reports show why there is no session
            await session.ready()
        granted = (session.timeout if session.connected else None) or 0.0
        answers = await asyncio.gather(*(_served(host, settings) for host in settings.places))
        fatal = not any("Mode:" in (answer or "") for answer in answers)
        findings = [
            host_down("zookeeper.host", f"{host}: {'no answer' if answer is None else 'no majority'}", fatal=fatal)
            for host, answer in zip(settings.places, answers, strict=True)
            if "Mode:" not in (answer or "")  # a server without a majority answers, and serves no client
        ]
        return findings + judged(OF_SESSION, SessionFacts(ttl, session.asked, granted))


async def _served(host: str, settings: ZooKeeperSettings) -> str | None:
    """Return the answer of *host* to ``srvr``; None if there is none in time."""
    address, _, port = host.rpartition(":")
    with suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(_LIMIT):
            reader, writer = await asyncio.open_connection(
                address.strip("[]"), int(port), ssl=settings.tls and settings.tls()
            )
            try:
                writer.write(b"srvr")
                answer = b""
                while len(answer) < _LONGEST_ANSWER and (data := await reader.read(65536)):
                    answer += data
            finally:
                writer.transport.abort()
            return answer.decode(errors="replace")
    return None
