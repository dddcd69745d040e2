"""
Checks a Redis store: every server, and the Sentinels or the cluster around them.

Each server is asked on a connection of its own, so one that is down or slow is a finding, and the others still answer.
The promises and what they need: docs/backends/redis.md, "What survives what".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from redis.exceptions import RedisError

from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.redis import RedisBackend
from fencing_sdk.backends.redis.connection.dial import SentinelDialer, SentinelService, ServerSettings
from fencing_sdk.backends.redis.connection.node import outcome_of
from fencing_sdk.backends.redis.connection.pipe import ReplyError
from fencing_sdk.backends.redis.connection.router import SLOTS, SlotMap
from fencing_sdk.backends.redis.errors import translated, translating
from fencing_sdk.backends.redis.quorum import RedisQuorumBackend
from fencing_sdk.diagnosis.checks import COUNTED, ERROR, WARNING, Check, StoreDiagnosis, host_down, judged

_COMMANDS = (("INFO",), ("CONFIG", "GET", "*"), ("ACL", "WHOAMI"), ("CLUSTER", "INFO"))
_FAILOVER = 0.57
"""Part of the ttl within which a renewal has to succeed again: docs/choosing-a-ttl.md."""
_LOST = "leases are lost, and two holders may have one lock{it.repeat}"


class RedisFacts:
    """
    One server. A field that it may not report, or does not know, is empty.

    Args:
        info: The lines of INFO.

        settings: The answer to CONFIG GET.

        cluster: The lines of CLUSTER INFO.

        user: The answer to ACL WHOAMI.

        hybrid: True if tokens survive the loss of the server's data.

        min_replicas: Replicas that the client demands.

        votes: True for a node of a quorum, which demands no replicas.
    """

    def __init__(
        self,
        address: str,
        info: Mapping[str, str],
        settings: Mapping[str, str],
        *,
        cluster: Mapping[str, str] | None = None,
        user: str = "",
        hybrid: bool = True,
        min_replicas: int = 0,
        votes: bool = False,
    ) -> None:
        self.address, self.settings, self.user = address, settings, user or "USER"
        self.run_id, self.is_master = info.get("run_id", ""), info.get("role") == "master"
        self.hidden = "" if info and settings else "CONFIG GET" if info else "INFO"
        self.policy, self.limit = settings.get("maxmemory-policy", "noeviction"), settings.get("maxmemory", "0")
        self.hybrid, self.min_replicas = hybrid, min_replicas
        self.forgetting, self.repeat = (WARNING, "") if hybrid else (ERROR, COUNTED)
        self.is_appended, self.fsync = settings.get("appendonly") == "yes", settings.get("appendfsync")
        self.online = sum(name.startswith("slave") and "state=online" in text for name, text in info.items())
        hint = "; no lock is granted then while that replica is away: add a second one" if self.online == 1 else ""
        self.replicas_mend = (
            "disconnect them: a replica that is promoted votes without what it has missed"
            if votes
            else f"add min_replicas={-(-self.online // 2)} to the URL or the backend{hint}"
        )
        cluster = cluster or {}
        self.slots, self.state = int(cluster.get("cluster_slots_ok") or SLOTS), cluster.get("cluster_state", "ok")


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
OF_SERVER: tuple[Check[RedisFacts], ...] = (
    Check("redis.settings", WARNING, lambda it: it.hidden,
        "this user may not use {it.hidden}", "persistence, eviction and replicas were not checked",
        "ACL SETUSER {it.user} +info +config|get, or compare the settings with the page of Redis"),
    Check("redis.eviction", lambda it: WARNING if it.limit == "0" else ERROR, lambda it: it.policy != "noeviction",
        "maxmemory-policy is {it.policy}, maxmemory is {it.limit}",
        "a server that is full deletes leases, and with allkeys-* the last tokens too",
        "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"),
    Check("redis.persistence", lambda it: it.forgetting, lambda it: it.settings and not it.is_appended,
        "appendonly is no", f"after a restart {_LOST}", "CONFIG SET appendonly yes, and the same in redis.conf"),
    Check("redis.appendfsync", lambda it: it.forgetting,
        lambda it: it.is_appended and (it.fsync == "no" or (it.fsync != "always" and not it.hybrid)),
        "appendfsync is {it.fsync}", f"after a power failure the latest {_LOST}",
        "CONFIG SET appendfsync always, and in redis.conf"),
    Check("redis.replicas", WARNING, lambda it: it.is_master and it.online and not it.min_replicas,
        "{it.online} replicas, and min_replicas is 0",
        "if a replica without the latest grants is promoted, it grants those locks again",
        "{it.replicas_mend}"),
)
OF_CLUSTER: tuple[Check[RedisFacts], ...] = (
    Check("redis.cluster-coverage", ERROR, lambda it: it.slots < SLOTS or it.state != "ok",
        f"{{it.slots}} of {SLOTS} slots are served, the state is {{it.state}}",
        "locks in the other slots cannot be taken, and perhaps none at all", "redis-cli --cluster fix {it.address}"),
)


class SentinelFacts:
    """State of a service at one Sentinel, and the ttl of its locks."""

    def __init__(self, state: Mapping[str, str], ttl: float) -> None:
        self.name, self.ttl = state["name"], ttl
        self.known, self.quorum = int(state["num-other-sentinels"]) + 1, int(state["quorum"])
        self.half, self.down_after = self.known // 2 + 1, int(state["down-after-milliseconds"])


OF_SENTINEL: tuple[Check[SentinelFacts], ...] = (
    Check("redis.sentinel-quorum", ERROR, lambda it: it.quorum > it.known,
        "the quorum is {it.quorum}, and {it.known} Sentinels are known", "a master that is down is never replaced",
        "SENTINEL SET {it.name} quorum {it.half}, on each Sentinel"),
    Check("redis.sentinel-quorum", WARNING, lambda it: it.quorum == 1 < it.known,
        "the quorum is 1", "one Sentinel that is cut off takes a master for dead that is well",
        "SENTINEL SET {it.name} quorum {it.half}, on each Sentinel"),
    Check("redis.sentinel-down-after", WARNING, lambda it: it.down_after > 1000 * _FAILOVER * it.ttl,
        "down-after-milliseconds is {it.down_after}, and the ttl is {it.ttl:g} s",
        "every lease is lost when the master is",
        "SENTINEL SET {it.name} down-after-milliseconds 2000, on each Sentinel; or a longer ttl"),
)
# fmt: on


class RedisDiagnosis(StoreDiagnosis[RedisBackend | RedisQuorumBackend]):
    """The checks of one store, of whatever servers."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        if isinstance(self.backend, RedisQuorumBackend):
            return await self._of_quorum([each.server for each in self.backend._dialers])
        servers = self.backend._servers
        if isinstance(servers, SlotMap):
            return await self._of_cluster(servers)
        if isinstance(servers, SentinelDialer):
            findings = await _of_sentinels(servers.service, ttl)
            with suppress(Exception):  # without a master, opening the store has failed with what the Sentinels say
                master = servers.server.at(*await servers.service.master())
                findings += (await self._ask_each([master], fatal=True))[1]
            return findings
        return (await self._ask_each([servers.server], fatal=True))[1]

    async def server_time(self) -> float | None:
        """Return None also for a quorum, of which no single server's clock counts."""
        if isinstance(self.backend, RedisQuorumBackend):
            return None
        with translating("diagnose"):
            pipe = await (await self.backend._router.node(self.backend._at("?")[0])).pipe()
            reply = await outcome_of(pipe.call("TIME"))
            if isinstance(reply, Exception) and not isinstance(reply, ReplyError):
                raise reply  # the connection broke; else this user may not ask
        return int(reply[0]) + int(reply[1]) / 1_000_000 if isinstance(reply, list) else None

    async def _of_quorum(self, nodes: Sequence[ServerSettings]) -> list[Finding]:
        facts, findings = await self._ask_each(nodes, fatal=False)
        for run_id, times in Counter(each.run_id for each in facts).items():
            if run_id and times > 1:
                same = ", ".join(each.address for each in facts if each.run_id == run_id)
                what, reason = f"one server has several addresses: {same}", "it votes more than once"
                findings.append(Finding("redis.quorum", ERROR, what, reason, "name each server once"))
        return findings

    async def _of_cluster(self, slots: SlotMap) -> list[Finding]:
        findings = []
        try:
            await slots.refresh()
        except Exception as failure:  # noqa: BLE001  (a finding below names the nodes that fail)
            what, fix = translated("diagnose", failure).detail, "start the nodes; redis-cli --cluster check host:port"
            findings.append(Finding("redis.cluster-coverage", ERROR, what, "no lock can be taken", fix))
        facts, of_servers = await self._ask_each(list(slots.servers().values()), fatal=False)
        uncovered = [finding for node in facts for finding in judged(OF_CLUSTER, node, node.address)]
        return [*findings, *of_servers, *uncovered[:1]]  # each node knows it

    async def _ask_each(
        self, servers: Sequence[ServerSettings], *, fatal: bool
    ) -> tuple[list[RedisFacts], list[Finding]]:
        """Ask every server. Return the facts of those that answer, and the findings about all."""
        facts, findings = [], []
        answers = await asyncio.gather(*map(self._ask, servers), return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, BaseException):
                findings.append(_down("redis.host", server, answer, fatal=fatal))
            else:
                facts.append(answer)
                findings += judged(OF_SERVER, answer, answer.address)
        return facts, findings

    async def _ask(self, server: ServerSettings) -> RedisFacts:
        """Ask one server. A field that it refuses is empty; if it is unreachable, raise the driver's error."""
        replies = await server.ask_all(*_COMMANDS)
        info, settings, user, cluster = (None if isinstance(reply, RedisError) else reply for reply in replies)
        one = None if isinstance(self.backend, RedisQuorumBackend) else self.backend
        return RedisFacts(
            server.address,
            _lines(info),
            _pairs(settings if isinstance(settings, list) else ()),
            cluster=_lines(cluster),
            user=user.decode() if isinstance(user, bytes) else "",
            hybrid=one is not None and one._hybrid,
            min_replicas=one._replicas if one else 0,
            votes=one is None,
        )


async def _of_sentinels(service: SentinelService, ttl: float) -> list[Finding]:
    asked = (sentinel.ask("SENTINEL", "MASTERS") for sentinel in service.sentinels)
    findings: list[Finding] = []
    for server, reply in zip(service.sentinels, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(reply, BaseException):
            findings.append(_down("redis.sentinel", server, reply, fatal=False))
            continue
        for state in map(_pairs, reply if isinstance(reply, list) else ()):
            if state["name"] == service.name:
                findings += judged(OF_SENTINEL, SentinelFacts(state, ttl), server.address)
    return findings


def _down(check: str, server: ServerSettings, failure: BaseException, *, fatal: bool) -> Finding:
    if not isinstance(failure, Exception):
        raise failure
    what = translated("diagnose", failure).detail
    return host_down(check, what if server.address in what else f"{server.address}: {what}", fatal=fatal)


def _lines(reply: object) -> dict[str, str]:
    """Read the lines of INFO, ``name:value``."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    split = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, colon, value in split if colon}


def _pairs(reply: Sequence[object]) -> dict[str, str]:
    """Read names and values that alternate."""
    words = [str(word, errors="replace") if isinstance(word, bytes) else str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=False))
