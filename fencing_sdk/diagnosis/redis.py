"""
What a Redis store reports of itself: every server, the Sentinels or the cluster around them.

The diagnosis asks each server on a connection of its own. So one that is down, slow, or a replica is a finding, and the
others still answer. The promises and what they need: docs/backends/redis.md, "What survives what".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError

from fencing_sdk._values.reports import Finding, error, is_local, note
from fencing_sdk.backends.redis import RedisBackend
from fencing_sdk.backends.redis.connection.dial import OLDEST, ServerDialer, ServerSettings
from fencing_sdk.backends.redis.connection.node import outcome_of
from fencing_sdk.backends.redis.connection.pipe import ReplyError
from fencing_sdk.backends.redis.connection.topology import SLOTS, SentinelDialer, SentinelService, SlotMap
from fencing_sdk.backends.redis.errors import translated, translating
from fencing_sdk.backends.redis.quorum import RedisQuorumBackend
from fencing_sdk.diagnosis.checks import (
    COUNTED,
    ERROR,
    FEWEST,
    NOTE,
    WARNING,
    Check,
    StoreDiagnosis,
    host_down,
    judged,
    open_to_all,
    unencrypted,
)

_COMMANDS = (("INFO",), ("CONFIG", "GET", "*"), ("ACL", "WHOAMI"), ("CLUSTER", "INFO"))
_NEARLY_FULL = 0.9
_SAVES = ("aof_last_write_status", "rdb_last_bgsave_status", "aof_last_bgrewrite_status")
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

        password: Whether the client logged in with a password.

        exposed: Whether a network carries what is sent, without TLS.

        hybrid: Whether tokens survive the loss of the server's data.

        min_replicas: Replicas that the client demands.

        votes: Whether it is a node of a quorum, which demands none.
    """

    def __init__(
        self,
        address: str,
        info: Mapping[str, str],
        settings: Mapping[str, str],
        *,
        cluster: Mapping[str, str] | None = None,
        user: str = "",
        password: bool = True,
        exposed: bool = False,
        hybrid: bool = True,
        min_replicas: int = 0,
        votes: bool = False,
    ) -> None:
        self.address, self.info, self.settings, self.cluster = address, info, settings, cluster or {}
        self.user, self.password, self.exposed = user or "USER", password, exposed
        self.hybrid, self.min_replicas = hybrid, min_replicas
        self.hidden = "" if info and settings else "CONFIG GET" if info else "INFO"
        self.version = tuple(int(part) for part in info.get("redis_version", "").split(".") if part.isdigit())
        self.policy, self.limit = settings.get("maxmemory-policy", "noeviction"), settings.get("maxmemory", "0")
        self.used, self.most = (int(info.get(name) or 0) / 2**20 for name in ("used_memory", "maxmemory"))
        self.forgetting = WARNING if hybrid else ERROR
        self.repeat = "" if hybrid else COUNTED
        self.is_appended, self.fsync = settings.get("appendonly") == "yes", settings.get("appendfsync")
        self.failed = ", ".join(name for name in _SAVES if info.get(name, "ok") != "ok")
        self.is_replica, self.is_master = info.get("role") == "slave", info.get("role", "slave") != "slave"
        followers = (text for name, text in info.items() if name.startswith("slave") and "state=" in text)
        self.online = sum("state=online" in text for text in followers)
        self.half = -(-self.online // 2)
        self.hint = "; no lock is granted then while that replica is away: add a second one" if self.online == 1 else ""
        self.replicas_mend = (
            "disconnect them: a replica that is promoted votes without what it has missed"
            if votes
            else f"add min_replicas={self.half} to the URL or the backend{self.hint}"
        )
        self.demanded = int(settings.get("min-replicas-to-write") or 0)
        self.slots = int(self.cluster.get("cluster_slots_ok") or SLOTS)
        self.state = self.cluster.get("cluster_state", "ok")


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
OF_SERVER: tuple[Check[RedisFacts], ...] = (
    Check("redis.settings", NOTE, lambda it: it.hidden,
        "this user may not use {it.hidden}", "its settings were not checked",
        "ACL SETUSER {it.user} +info +config|get, or compare the settings with the page of Redis"),
    Check("redis.version", ERROR, lambda it: it.version and it.version < OLDEST,
        "version {it.info[redis_version]}", "Redis before 6.2 lacks commands of the scripts",
        "upgrade to 6.2 or newer"),
    Check("redis.role", ERROR, lambda it: it.is_replica,
        "the server is a replica of {it.info[master_host]}", "a replica takes no writes, so it grants no locks",
        "name the master, or write redis+sentinel:// or redis+cluster://, which find it"),
    Check("redis.eviction", lambda it: WARNING if it.limit == "0" else ERROR, lambda it: it.policy != "noeviction",
        "maxmemory-policy is {it.policy}, maxmemory is {it.limit}",
        "a server that is full deletes leases, and with allkeys-* the last tokens too",
        "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"),
    Check("redis.memory", NOTE, lambda it: it.used > _NEARLY_FULL * it.most > 0,
        "{it.used:.1f} MB of maxmemory {it.most:.1f} MB are used",
        "a full server refuses the writes of other programs; locks go on",
        "CONFIG SET maxmemory to more, or keep other data elsewhere"),
    Check("redis.persistence", lambda it: it.forgetting, lambda it: it.settings and not it.is_appended,
        "appendonly is no", f"after a restart {_LOST}", "CONFIG SET appendonly yes, and the same in redis.conf"),
    Check("redis.appendfsync", lambda it: NOTE if it.hybrid and it.fsync != "no" else it.forgetting,
        lambda it: it.is_appended and it.fsync != "always",
        "appendfsync is {it.fsync}", f"after a power failure the latest {_LOST}",
        "CONFIG SET appendfsync always, and in redis.conf"),
    Check("redis.disk", ERROR, lambda it: it.failed,
        "{it.failed} failed", "the server cannot save its data, and may refuse writes (MISCONF)",
        "free the disk and look at the server's log; then BGSAVE or BGREWRITEAOF"),
    Check("redis.min-replicas", ERROR, lambda it: it.is_master and it.min_replicas > it.online,
        "min_replicas={it.min_replicas}, and {it.online} replicas are connected", "no grant counts",
        "start replicas, or lower min_replicas of the client"),
    Check("redis.replicas", WARNING, lambda it: it.is_master and it.online and not it.min_replicas,
        "{it.online} replicas, and min_replicas is 0",
        "if a replica without the latest grants is promoted, it grants those locks again",
        "{it.replicas_mend}"),
    Check("redis.min-replicas-to-write", ERROR, lambda it: it.is_master and it.demanded > it.online,
        "min-replicas-to-write is {it.demanded}, and {it.online} replicas are connected",
        "the server refuses writes (NOREPLICAS)", "start the replicas"),
    open_to_all("redis.authentication", lambda it: not it.password, "no password is needed",
        "ACL SETUSER locks on >..., and name it in the URL"),
    unencrypted("redis.tls", lambda it: it.exposed, "tls-port in redis.conf, and rediss:// here"),
)
OF_CLUSTER: tuple[Check[RedisFacts], ...] = (
    Check("redis.cluster-coverage", ERROR, lambda it: it.slots < SLOTS or it.state != "ok",
        f"{{it.slots}} of {SLOTS} slots are served, the state is {{it.state}}",
        "locks in the other slots cannot be taken, and perhaps none at all", "redis-cli --cluster fix {it.address}"),
)


class SentinelFacts:
    """What one Sentinel knows of a service, and the ttl of its locks."""

    def __init__(self, state: Mapping[str, str], ttl: float) -> None:
        self.name, self.ttl = state["name"], ttl
        self.known, self.quorum = int(state["num-other-sentinels"]) + 1, int(state["quorum"])
        self.half = self.known // 2 + 1
        self.replicas, self.down_after = int(state["num-slaves"]), int(state["down-after-milliseconds"])


OF_SENTINEL: tuple[Check[SentinelFacts], ...] = (
    Check("redis.sentinel-quorum", ERROR, lambda it: it.quorum > it.known,
        "the quorum is {it.quorum}, and {it.known} Sentinels are known", "a master that is down is never replaced",
        "SENTINEL SET {it.name} quorum {it.half}, on each Sentinel"),
    Check("redis.sentinel-quorum", WARNING, lambda it: it.quorum == 1 < it.known,
        "the quorum is 1", "one Sentinel that is cut off takes a master for dead that is well",
        "SENTINEL SET {it.name} quorum {it.half}, on each Sentinel"),
    Check("redis.sentinels", WARNING, lambda it: it.known < FEWEST,
        "{it.known} Sentinels are known", "no majority is left when one is lost",
        "run three, on machines of their own"),
    Check("redis.sentinel-replicas", WARNING, lambda it: it.replicas == 0,
        "{it.name} has no replica", "no server can replace the master", "start a replica of the master"),
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
            dialers = [each for each in self.backend._dialers if isinstance(each, ServerDialer)]
            facts, down = await self._ask_each([each.server for each in dialers], fatal=False)
            return [*down, *_judged(facts), *_independent(facts)]
        servers = self.backend._servers
        if isinstance(servers, SlotMap):
            return await self._of_cluster(servers)
        if isinstance(servers, SentinelDialer):
            return [*await _of_sentinels(servers.service, ttl), *await self._of_master(servers)]
        facts, down = await self._ask_each([servers.server] if isinstance(servers, ServerDialer) else [], fatal=True)
        return [*down, *_judged(facts)]

    async def server_time(self) -> float | None:
        """Return None also for a quorum, of which no single server's clock counts."""
        if isinstance(self.backend, RedisQuorumBackend):
            return None
        with translating("diagnose"):
            pipe = await (await self.backend._router.node(self.backend._requests.lease("?"))).pipe()
            reply = await outcome_of(pipe.call("TIME"))
            if isinstance(reply, Exception) and not isinstance(reply, ReplyError):
                raise reply  # the connection broke; else this user may not ask
        return int(reply[0]) + int(reply[1]) / 1_000_000 if isinstance(reply, list) else None

    async def _of_master(self, dialer: SentinelDialer) -> list[Finding]:
        try:
            address = await dialer.service.master()
        except Exception as failure:  # noqa: BLE001  (what the Sentinels say instead is the finding)
            what = translated("diagnose", failure).detail
            return [error("redis.master", what, "no lock can be taken", "look at SENTINEL MASTERS on each Sentinel")]
        facts, down = await self._ask_each([dialer.server.at(*address)], fatal=True)
        return [*down, *_judged(facts)]

    async def _of_cluster(self, slots: SlotMap) -> list[Finding]:
        findings = []
        try:
            await slots.refresh()
        except Exception as failure:  # noqa: BLE001  (a finding below names the nodes that fail)
            what, fix = translated("diagnose", failure).detail, "start the nodes; redis-cli --cluster check host:port"
            findings.append(error("redis.cluster-coverage", what, "no lock can be taken", fix))
        facts, down = await self._ask_each(list(slots.servers().values()), fatal=False)
        masters = [each for each in facts if each.info.get("role") == "master"]
        findings += [*down, *_judged(masters)]
        findings += [each for node in facts for each in judged(OF_CLUSTER, node, node.address)][
            :1
        ]  # each node knows it
        if bare := [each.address for each in masters if not int(each.info.get("connected_slaves") or 0)]:
            what, reason = (
                f"masters without a replica: {', '.join(bare)}",
                "their locks stand still while they are down",
            )
            fix = "redis-cli --cluster add-node ... --cluster-slave"
            findings.append(note("redis.cluster-replicas", what, reason, fix))
        return findings

    async def _ask_each(
        self, servers: Sequence[ServerSettings], *, fatal: bool
    ) -> tuple[list[RedisFacts], list[Finding]]:
        """Ask every server. Return the facts of those that answer, and findings about the others."""
        answers = await asyncio.gather(*map(self._ask, servers), return_exceptions=True)
        answered = list(zip(servers, answers, strict=True))
        down = [
            _down("redis.host", server, each, fatal=fatal)
            for server, each in answered
            if isinstance(each, BaseException)
        ]
        return [answer for answer in answers if isinstance(answer, RedisFacts)], down

    async def _ask(self, server: ServerSettings) -> RedisFacts:
        """Ask one server. A field that it refuses is empty; if it is unreachable, raise the driver's error."""
        replies = await server.ask_all(*_COMMANDS)
        info, settings, user, cluster = (None if isinstance(reply, RedisError) else reply for reply in replies)
        local = issubclass(server.kind, UnixDomainSocketConnection) or is_local(str(server.arguments.get("host", "")))
        one = None if isinstance(self.backend, RedisQuorumBackend) else self.backend._requests
        return RedisFacts(
            server.address,
            _lines(info),
            _pairs(settings if isinstance(settings, list) else ()),
            cluster=_lines(cluster),
            user=user.decode() if isinstance(user, bytes) else "",
            password=any(server.arguments.get(name) for name in ("password", "credential_provider")),
            exposed=not local and not issubclass(server.kind, SSLConnection),
            hybrid=one is not None and one.hybrid,
            min_replicas=one.replicas if one else 0,
            votes=one is None,
        )


def _judged(servers: Sequence[RedisFacts]) -> list[Finding]:
    return [finding for each in servers for finding in judged(OF_SERVER, each, each.address)]


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


def _independent(facts: Sequence[RedisFacts]) -> Iterator[Finding]:
    """The nodes of a quorum have to be lost one by one."""
    for run_id, times in Counter(each.info.get("run_id", "") for each in facts).items():
        if run_id and times > 1:
            same = ", ".join(each.address for each in facts if each.info.get("run_id") == run_id)
            what, fix = f"one server has several addresses: {same}", "name each server once"
            yield error("redis.quorum", what, "one server votes more than once: two majorities need not meet", fix)


def _down(check: str, server: ServerSettings, failure: BaseException, *, fatal: bool) -> Finding:
    if not isinstance(failure, Exception):
        raise failure
    what = translated("diagnose", failure).detail
    what = what if server.address in what else f"{server.address}: {what}"
    fix = "start the server, or correct its address, its login or the firewall"
    return host_down(check, what, fix, fatal=fatal)


def _lines(reply: object) -> dict[str, str]:
    """The lines of INFO: ``name:value``."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    split = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, colon, value in split if colon}


def _pairs(reply: Sequence[object]) -> dict[str, str]:
    """Names and values that alternate."""
    words = [str(word, errors="replace") if isinstance(word, bytes) else str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=False))
