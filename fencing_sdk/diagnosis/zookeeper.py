"""
What ZooKeeper's servers report of themselves, by four-letter words, and what of that breaks a promise.

A word is a connection of its own, which the server closes after its answer. Servers know `srvr` by default; the
others have to be allowed by ``4lw.commands.whitelist``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fencing_sdk._values.reports import Finding, is_local
from fencing_sdk.backends.zookeeper import ZooKeeperBackend
from fencing_sdk.backends.zookeeper.connection.driver import ZooKeeperSettings
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import ALL_CLIENTS
from fencing_sdk.diagnosis.checks import (
    ERROR,
    NOTE,
    WARNING,
    Check,
    Group,
    StoreDiagnosis,
    host_down,
    judged,
    majority,
    open_to_all,
    unencrypted,
)

_LIMIT = 3.0
_LONGEST_ANSWER = 1 << 20
_MEMBER = re.compile(r"^server\.\d+=(?!.*:observer)", re.MULTILINE)
_TOLERANCE = 1.05
_LENGTHS = "a lock of {it.ttl:g} s needs a session of {it.asked:.1f} s, and gets one of {it.granted:g} s"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server: its answers to two words. An answer that did not come is None."""

    address: str
    served: str | None
    configuration: str | None = None

    @property
    def serving(self) -> bool:
        """True if it belongs to a majority."""
        return self.served is not None and "Mode:" in self.served

    @property
    def version(self) -> tuple[int, ...]:
        """Of the server; empty if it does not report it."""
        match = re.search(r"Zookeeper version: (\d+)\.(\d+)", self.served or "")
        return tuple(map(int, match.groups())) if match else ()


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


class EnsembleFacts:
    """All servers together."""

    def __init__(self, settings: ZooKeeperSettings, servers: Sequence[ServerFacts]) -> None:
        self.is_open = settings.acl is ALL_CLIENTS
        self.exposed = settings.tls is None and not all(is_local(each.address.rpartition(":")[0]) for each in servers)
        asked = ((each.address, each.configuration or "whitelist") for each in servers if each.serving)
        self.silent = ", ".join(address for address, configuration in asked if "whitelist" in configuration)


def group_of(servers: Sequence[ServerFacts]) -> Group:
    """Return the sizes of the ensemble, as far as the servers report them."""
    voters = max((len(_MEMBER.findall(each.configuration or "")) for each in servers), default=0)
    if any("Mode: standalone" in (each.served or "") for each in servers):
        voters = 1
    return Group(voters, voters, len(servers))


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
OF_SERVER: tuple[Check[ServerFacts], ...] = (
    Check("zookeeper.version", ERROR, lambda it: it.version and it.version < (3, 5),
        "version {it.version[0]}.{it.version[1]}", "containers need ZooKeeper 3.5", "upgrade the ensemble"),
)
MAJORITY = majority(
    "zookeeper.ensemble", "zookeeper.hosts", "ensemble", "run three or five servers: server.1=..., server.2=..."
)
OF_SESSION: tuple[Check[SessionFacts], ...] = (
    Check("zookeeper.session", WARNING, lambda it: it.granted and it.granted * _TOLERANCE < it.asked,
        _LENGTHS, "leases are shorter than asked for, and lost sooner",
        "maxSessionTimeout={it.asked_ms:.0f} in zoo.cfg, or a ttl of {it.possible_ttl:.1f} s"),
    Check("zookeeper.session", WARNING, lambda it: it.granted > it.asked * _TOLERANCE,
        _LENGTHS, "the lock of a dead holder stays taken for so long",
        "minSessionTimeout={it.asked_ms:.0f} and a smaller tickTime in zoo.cfg, or a longer ttl"),
)
OF_ENSEMBLE: tuple[Check[EnsembleFacts], ...] = (
    Check("zookeeper.words", NOTE, lambda it: it.silent,
        "conf is not allowed on {it.silent}", "the size of the ensemble was not checked",
        "4lw.commands.whitelist=srvr,conf in zoo.cfg"),
    open_to_all("zookeeper.authentication", lambda it: it.is_open, "the nodes of locks are open to all clients",
        "zk://user:password@..., with acl=creator"),
    unencrypted("zookeeper.tls", lambda it: it.exposed, "secureClientPort in zoo.cfg, and tls=true here",
        seen="passwords and what is locked"),
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
        servers = await asyncio.gather(*(_ask(host, settings) for host in settings.places))
        findings = [_down(each, servers) for each in servers if not each.serving]
        findings += [finding for each in servers for finding in judged(OF_SERVER, each, each.address)]
        findings += judged(MAJORITY, group_of(servers)) + judged(OF_ENSEMBLE, EnsembleFacts(settings, servers))
        return findings + judged(OF_SESSION, SessionFacts(ttl, session.asked, granted))


def _down(server: ServerFacts, servers: Sequence[ServerFacts]) -> Finding:
    what, fix = "it serves no clients", "start a majority of the ensemble, and look at the server's log"
    if server.served is None:
        what, fix = "no answer", "start the server, or correct its address or the firewall"
    fatal = not any(each.serving for each in servers)
    return host_down("zookeeper.host", f"{server.address}: {what}", fix, fatal=fatal)


async def _ask(host: str, settings: ZooKeeperSettings) -> ServerFacts:
    served = await _say("srvr", host, settings)
    return ServerFacts(host, served, None if served is None else await _say("conf", host, settings))


async def _say(word: str, host: str, settings: ZooKeeperSettings) -> str | None:
    """The answer of a server to a four-letter word; None if there is none in time."""
    address, _, port = host.rpartition(":")
    with suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(_LIMIT):
            reader, writer = await asyncio.open_connection(
                address.strip("[]"), int(port), ssl=settings.tls and settings.tls()
            )
            try:
                writer.write(word.encode())
                answer = b""
                while len(answer) < _LONGEST_ANSWER and (data := await reader.read(65536)):
                    answer += data
            finally:
                writer.transport.abort()
            return answer.decode(errors="replace")
    return None
