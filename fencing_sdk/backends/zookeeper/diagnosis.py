"""
What ZooKeeper's servers tell of themselves, by four-letter words, and what of that breaks a promise.

A word is a connection of its own, which the server closes after its answer. Servers know `srvr` by default; the
others have to be allowed by ``4lw.commands.whitelist``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fencing_sdk._values.findings import Finding, error, is_local, note, warning
from fencing_sdk.backends.zookeeper.connection.driver import ZooKeeperSettings
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import ALL_CLIENTS

_LIMIT = 3.0
_LONGEST_ANSWER = 1 << 20
_OLDEST = (3, 5)
_FEWEST = 3
_MEMBER = re.compile(r"^server\.\d+=(?!.*:observer)", re.MULTILINE)
_TOLERANCE = 1.05


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The session for locks of one ttl: seconds of the ttl, and of the timeouts that were asked for and granted."""

    ttl: float
    asked: float
    granted: float | None


@dataclass(frozen=True, slots=True)
class ZooKeeperFacts:
    """One server: its answers to two words. An answer that did not come is None."""

    address: str
    served: str | None
    configuration: str | None

    @property
    def serving(self) -> bool:
        """Whether it belongs to a majority."""
        return self.served is not None and "Mode:" in self.served

    @property
    def members(self) -> int:
        """How many members vote, as far as it tells; 0 if it does not."""
        return len(_MEMBER.findall(self.configuration or ""))


async def diagnose_servers(settings: ZooKeeperSettings, session: SessionFacts) -> list[Finding]:
    """Ask every server, and judge what they tell."""
    hosts = settings.places
    facts = await asyncio.gather(*(_ask(host, settings) for host in hosts))
    findings = [*_hosts(facts), *_versions(facts), *_ensemble(facts), *_words(facts)]
    return [*findings, *_session(session), *_access(settings, hosts)]


async def _ask(host: str, settings: ZooKeeperSettings) -> ZooKeeperFacts:
    served = await _say("srvr", host, settings)
    return ZooKeeperFacts(host, served, None if served is None else await _say("conf", host, settings))


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


def _hosts(facts: Sequence[ZooKeeperFacts]) -> Iterator[Finding]:
    some_serve = any(each.serving for each in facts)
    for each in facts:
        if each.serving:
            continue
        what = f"{each.address}: no answer" if each.served is None else f"{each.address}: it serves no clients"
        mend = "start the server, or correct its address or the firewall"
        mend = mend if each.served is None else "start a majority of the ensemble, and look at the server's log"
        reason = "one more loss, and no lock may be taken" if some_serve else "no lock can be taken"
        yield (warning if some_serve else error)("zookeeper.host", what, reason, mend)


def _versions(facts: Sequence[ZooKeeperFacts]) -> Iterator[Finding]:
    for each in facts:
        match = re.search(r"Zookeeper version: (\d+)\.(\d+)", each.served or "")
        if match and (int(match[1]), int(match[2])) < _OLDEST:
            what = f"{each.address}: version {match[1]}.{match[2]}"
            yield error("zookeeper.version", what, "containers need ZooKeeper 3.5", "upgrade the ensemble")


def _ensemble(facts: Sequence[ZooKeeperFacts]) -> Iterator[Finding]:
    alone = any("Mode: standalone" in (each.served or "") for each in facts)
    members = 1 if alone else max((each.members for each in facts), default=0)
    if not members:
        return
    if members < _FEWEST:
        what, reason = f"the ensemble has {members} voting members", "no lock can be taken while one is down"
        yield warning("zookeeper.ensemble", what, reason, "run three or five servers: server.1=..., server.2=...")
    elif members % 2 == 0:
        what = f"the ensemble has {members} voting members"
        yield note("zookeeper.ensemble", what, "it survives no more losses than with one fewer", "run three or five")
    if len(facts) < members:
        what = f"the URL names {len(facts)} of {members} members"
        yield note("zookeeper.hosts", what, "if those are down, this client is too", "name every member in the URL")


def _words(facts: Sequence[ZooKeeperFacts]) -> Iterator[Finding]:
    silent = [each.address for each in facts if each.serving and "whitelist" in (each.configuration or "whitelist")]
    if silent:
        what, reason = f"conf is not allowed on {', '.join(silent)}", "the size of the ensemble was not checked"
        yield note("zookeeper.words", what, reason, "4lw.commands.whitelist=srvr,conf in zoo.cfg")


def _session(session: SessionFacts) -> Iterator[Finding]:
    granted, asked = session.granted, session.asked
    if granted is None:
        return
    if granted * _TOLERANCE < asked:
        what = f"a lock of {session.ttl:g} s needs a session of {asked:.1f} s, and gets one of {granted:g} s"
        mend = f"maxSessionTimeout={1000 * asked:.0f} in zoo.cfg, or a ttl of {granted / asked * session.ttl:.1f} s"
        yield warning("zookeeper.session", what, "leases are shorter than asked for, and lost sooner", mend)
    elif granted > asked * _TOLERANCE:
        what = f"a lock of {session.ttl:g} s needs a session of {asked:.1f} s, and gets one of {granted:g} s"
        mend = f"minSessionTimeout={1000 * asked:.0f} and a smaller tickTime in zoo.cfg, or a longer ttl"
        yield warning("zookeeper.session", what, "the lock of a dead holder stays taken for so long", mend)


def _access(settings: ZooKeeperSettings, hosts: Sequence[str]) -> Iterator[Finding]:
    if settings.acl is ALL_CLIENTS:
        what, mend = "the nodes of locks are open to all clients", "zk://user:password@..., with acl=creator"
        yield note("zookeeper.authentication", what, "any client that reaches a server can delete locks", mend)
    if settings.tls is None and not all(is_local(host.rpartition(":")[0]) for host in hosts):
        what, mend = "the connections are not encrypted", "secureClientPort in zoo.cfg, and tls=true here"
        yield note("zookeeper.tls", what, "the network sees passwords and what is locked", mend)
