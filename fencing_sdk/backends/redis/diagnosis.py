"""
What a Redis store tells of itself: every server, the Sentinels or the cluster around them.

Each server is asked on a connection of its own, so that one that is down, slow, or a replica is a finding, and
the others are still asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from fencing_sdk._values.findings import Finding, error, note, warning
from fencing_sdk.backends.redis.connection.cluster import SLOTS, SlotMap
from fencing_sdk.backends.redis.connection.dial import RedisDialer, ServerDialer, ServerSettings
from fencing_sdk.backends.redis.connection.pipe import ReplyError
from fencing_sdk.backends.redis.connection.sentinel import SentinelDialer, SentinelService
from fencing_sdk.backends.redis.errors import translated
from fencing_sdk.backends.redis.server_checks import judge_server
from fencing_sdk.backends.redis.server_facts import RedisFacts, read_facts

_FEWEST_SENTINELS = 3
_FAILOVER = 0.57
"""Part of the ttl within which a renewal has to succeed again: docs/choosing-a-ttl.md."""


class RedisDiagnosis:
    """
    The checks of one store.

    Args:
        hybrid: Whether tokens survive the loss of the server's data.

        min_replicas: Replicas that the client demands.

        ttl: Seconds of the locks in use.
    """

    def __init__(self, *, hybrid: bool, min_replicas: int, ttl: float) -> None:
        self._hybrid = hybrid
        self._min_replicas = min_replicas
        self._ttl = ttl

    async def of(self, servers: RedisDialer | SlotMap) -> list[Finding]:
        """Every finding about *servers*."""
        if isinstance(servers, SlotMap):
            return await self._of_cluster(servers)
        if isinstance(servers, SentinelDialer):
            return [*await self._of_sentinels(servers.service), *await self._of_master(servers)]
        if isinstance(servers, ServerDialer):
            facts, findings = await _ask_each({servers.server.address: servers.server}, is_fatal=True)
            return findings + self._judge(facts)
        return []

    async def of_quorum(self, dialers: Sequence[RedisDialer]) -> list[Finding]:
        """Every finding about independent servers, of which a majority has to agree."""
        servers = {dialer.server.address: dialer.server for dialer in dialers if isinstance(dialer, ServerDialer)}
        facts, findings = await _ask_each(servers, is_fatal=False)
        return [*findings, *self._judge(facts), *_independent(facts)]

    def _judge(self, facts: Collection[RedisFacts]) -> list[Finding]:
        judged = (judge_server(each, hybrid=self._hybrid, min_replicas=self._min_replicas) for each in facts)
        return [finding for findings in judged for finding in findings]

    async def _of_master(self, dialer: SentinelDialer) -> list[Finding]:
        try:
            address = await dialer.service.master()
        except Exception as failure:  # noqa: BLE001  (what the Sentinels say instead is the finding)
            what = translated("diagnose", failure).detail
            return [error("redis.master", what, "no lock can be taken", "look at SENTINEL MASTERS on each Sentinel")]
        server = dialer.server.at(*address)
        facts, findings = await _ask_each({server.address: server}, is_fatal=True)
        return findings + self._judge(facts)

    async def _of_sentinels(self, service: SentinelService) -> list[Finding]:
        servers = {sentinel.address: sentinel for sentinel in service.sentinels}
        asked = [(address, _masters_of(sentinel)) for address, sentinel in servers.items()]
        answers = await asyncio.gather(*(answer for _, answer in asked), return_exceptions=True)
        findings: list[Finding] = []
        for (address, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                findings.append(_unreachable("redis.sentinel", address, answer, is_fatal=False))
            elif (state := answer.get(service.name)) is not None:
                findings += self._judge_sentinel(address, state)
        return findings

    def _judge_sentinel(self, address: str, state: Mapping[str, str]) -> Iterator[Finding]:
        sentinels, quorum = int(state["num-other-sentinels"]) + 1, int(state["quorum"])
        down_after, name = int(state["down-after-milliseconds"]) / 1000, state["name"]
        if quorum > sentinels:
            what = f"{address}: the quorum is {quorum}, and {sentinels} Sentinels are known"
            mend = f"SENTINEL SET {name} quorum {sentinels // 2 + 1}, on each Sentinel"
            yield error("redis.sentinel-quorum", what, "a master that is down is never replaced", mend)
        elif quorum == 1 < sentinels:
            what, mend = f"{address}: the quorum is 1", f"SENTINEL SET {name} quorum {sentinels // 2 + 1}, on each"
            reason = "one Sentinel that is cut off takes a master for dead that is well"
            yield warning("redis.sentinel-quorum", what, reason, mend)
        if sentinels < _FEWEST_SENTINELS:
            what, mend = f"{address}: {sentinels} Sentinels are known", "run three, on machines of their own"
            yield warning("redis.sentinels", what, "no majority is left when one is lost", mend)
        if int(state["num-slaves"]) == 0:
            what, mend = f"{address}: {name} has no replica", "start a replica of the master"
            yield warning("redis.sentinel-replicas", what, "no server can replace the master", mend)
        if down_after > _FAILOVER * self._ttl:
            what = f"{address}: down-after-milliseconds is {1000 * down_after:.0f}, and the ttl is {self._ttl:g} s"
            mend = f"SENTINEL SET {name} down-after-milliseconds 2000, on each Sentinel; or a longer ttl"
            yield warning("redis.sentinel-down-after", what, "every lease is lost when the master is", mend)

    async def _of_cluster(self, slots: SlotMap) -> list[Finding]:
        try:
            await slots.refresh()
        except Exception as failure:  # noqa: BLE001  (which nodes fail is told below)
            what = translated("diagnose", failure).detail
            mend = "start the nodes; redis-cli --cluster check host:port"
            found = [error("redis.cluster-coverage", what, "no lock can be taken", mend)]
        else:
            found = []
        facts, findings = await _ask_each(slots.servers(), is_fatal=False)
        masters = [each for each in facts if each.info.get("role") == "master"]
        return [*found, *findings, *self._judge(masters), *_coverage(facts), *_bare(masters)]


def _coverage(facts: Sequence[RedisFacts]) -> Iterator[Finding]:
    """One finding, although each node knows of it."""
    for each in facts:
        covered = int(each.cluster.get("cluster_slots_ok") or SLOTS)
        if covered < SLOTS or each.cluster.get("cluster_state", "ok") != "ok":
            what = (
                f"{each.address}: {covered} of {SLOTS} slots are served, the state is {each.cluster['cluster_state']}"
            )
            reason = "locks in the other slots cannot be taken, and perhaps none at all"
            yield error("redis.cluster-coverage", what, reason, f"redis-cli --cluster fix {each.address}")
            return


def _bare(masters: Sequence[RedisFacts]) -> Iterator[Finding]:
    bare = [each.address for each in masters if each.number("connected_slaves") == 0]
    if bare:
        what, mend = f"masters without a replica: {', '.join(bare)}", "redis-cli --cluster add-node ... --cluster-slave"
        yield note("redis.cluster-replicas", what, "their locks stand still while they are down", mend)


def _independent(facts: Sequence[RedisFacts]) -> Iterator[Finding]:
    """The nodes of a quorum have to be lost one by one."""
    for run_id, times in Counter(each.info.get("run_id", "") for each in facts).items():
        if run_id and times > 1:
            same = ", ".join(each.address for each in facts if each.info.get("run_id") == run_id)
            what, mend = f"one server has several addresses: {same}", "name each server once"
            yield error("redis.quorum", what, "one server votes more than once: two majorities need not meet", mend)


async def _ask_each(servers: Mapping[str, ServerSettings], *, is_fatal: bool) -> tuple[list[RedisFacts], list[Finding]]:
    answers = await asyncio.gather(*map(read_facts, servers.values()), return_exceptions=True)
    facts = [answer for answer in answers if isinstance(answer, RedisFacts)]
    findings = [
        _unreachable("redis.host", address, answer, is_fatal=is_fatal)
        for address, answer in zip(servers, answers, strict=True)
        if isinstance(answer, BaseException)
    ]
    return facts, findings


def _unreachable(check: str, address: str, failure: BaseException, *, is_fatal: bool) -> Finding:
    if not isinstance(failure, Exception):
        raise failure
    what = translated("diagnose", failure).detail
    what = what if address in what else f"{address}: {what}"
    reason = "no lock can be taken" if is_fatal else "one more loss, and no lock can be taken"
    mend = "start the server, or correct its address, its login or the firewall"
    return (error if is_fatal else warning)(check, what, reason, mend)


async def _masters_of(sentinel: ServerSettings) -> dict[str, dict[str, str]]:
    """What one Sentinel knows of the services that it watches, by name."""
    reply = await sentinel.ask("SENTINEL", "MASTERS")
    known: dict[str, dict[str, str]] = {}
    for fields in reply if isinstance(reply, list) else ():
        words = [str(word, errors="replace") for word in fields]
        state = dict(zip(words[::2], words[1::2], strict=False))
        known[state["name"]] = state
    return known


def read_time(reply: object) -> float | None:
    """Seconds since 1970, from the answer to TIME; None if this user may not ask. A broken connection is raised."""
    if isinstance(reply, Exception) and not isinstance(reply, ReplyError):
        raise reply
    if not isinstance(reply, list):
        return None
    return int(reply[0]) + int(reply[1]) / 1_000_000
