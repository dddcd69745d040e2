"""
Which settings of a Redis server break a promise. Pure: from what the server told to findings.

The promises and what they need: docs/backends/redis.md, "What survives what".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fencing_sdk._values.findings import Finding, error, note, warning
from fencing_sdk.backends.redis.connection.dial import OLDEST
from fencing_sdk.backends.redis.server_facts import RedisFacts

_NEARLY_FULL = 0.9


def judge_server(facts: RedisFacts, *, hybrid: bool, min_replicas: int) -> list[Finding]:
    """Every finding about one server that grants locks."""
    checks: tuple[Callable[[RedisFacts], Iterator[Finding]], ...] = (
        _told,
        _version,
        _role,
        _eviction,
        _memory,
        lambda facts: _persistence(facts, hybrid=hybrid),
        _disk,
        lambda facts: _replicas(facts, min_replicas),
        _access,
    )
    return [finding for check in checks for finding in check(facts)]


def _told(facts: RedisFacts) -> Iterator[Finding]:
    if not facts.info or not facts.settings:
        missing = "INFO" if not facts.info else "CONFIG GET"
        what = f"{facts.address}: this user may not use {missing}"
        mend = f"ACL SETUSER {facts.user or 'USER'} +info +config|get, or compare the settings with the page of Redis"
        yield note("redis.settings", what, "its settings were not checked", mend)


def _version(facts: RedisFacts) -> Iterator[Finding]:
    text = facts.info.get("redis_version", "")
    version = tuple(int(part) for part in text.split(".") if part.isdigit())
    if version and version < OLDEST:
        what = f"{facts.address}: version {text}"
        yield error("redis.version", what, "Redis before 6.2 lacks commands of the scripts", "upgrade to 6.2 or newer")


def _role(facts: RedisFacts) -> Iterator[Finding]:
    if facts.info.get("role") == "slave":
        what = f"{facts.address}: the server is a replica of {facts.info.get('master_host')}"
        mend = "name the master, or write redis+sentinel:// or redis+cluster://, which find it"
        yield error("redis.role", what, "a replica takes no writes, so it grants no locks", mend)


def _eviction(facts: RedisFacts) -> Iterator[Finding]:
    policy, limit = facts.settings.get("maxmemory-policy", "noeviction"), facts.settings.get("maxmemory", "0")
    if policy == "noeviction":
        return
    what = f"{facts.address}: maxmemory-policy is {policy}, maxmemory is {limit}"
    reason = "a server that is full deletes leases, and with allkeys-* the last tokens too"
    mend = "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
    yield (warning if limit == "0" else error)("redis.eviction", what, reason, mend)


def _memory(facts: RedisFacts) -> Iterator[Finding]:
    used, limit = facts.number("used_memory"), facts.number("maxmemory")
    if limit and used > _NEARLY_FULL * limit:
        what = f"{facts.address}: {used / 2**20:.1f} MB of maxmemory {limit / 2**20:.1f} MB are used"
        mend = "CONFIG SET maxmemory to more, or keep other data elsewhere"
        yield note("redis.memory", what, "a full server refuses the writes of other programs; locks go on", mend)


def _persistence(facts: RedisFacts, *, hybrid: bool) -> Iterator[Finding]:
    if not facts.settings:
        return
    severe = warning if hybrid else error
    after = "leases are lost, and two holders may have one lock"
    tokens = "" if hybrid else "; with tokens=counter, tokens repeat"
    if facts.settings.get("appendonly") != "yes":
        what, mend = f"{facts.address}: appendonly is no", "CONFIG SET appendonly yes, and the same in redis.conf"
        yield severe("redis.persistence", what, f"after a restart {after}{tokens}", mend)
    elif (fsync := facts.settings.get("appendfsync")) != "always":
        severe = severe if fsync == "no" or not hybrid else note
        what, mend = f"{facts.address}: appendfsync is {fsync}", "CONFIG SET appendfsync always, and in redis.conf"
        yield severe("redis.appendfsync", what, f"after a power failure the latest {after}{tokens}", mend)


def _disk(facts: RedisFacts) -> Iterator[Finding]:
    failed = [
        name
        for name in ("aof_last_write_status", "rdb_last_bgsave_status", "aof_last_bgrewrite_status")
        if facts.info.get(name, "ok") != "ok"
    ]
    if failed:
        what = f"{facts.address}: {', '.join(failed)} failed"
        mend = "free the disk and look at the server's log; then BGSAVE or BGREWRITEAOF"
        yield error("redis.disk", what, "the server cannot save its data, and may refuse writes (MISCONF)", mend)


def _replicas(facts: RedisFacts, min_replicas: int) -> Iterator[Finding]:
    if not facts.info or facts.info.get("role") == "slave":
        return
    online, demanded = facts.good_replicas, int(facts.settings.get("min-replicas-to-write") or 0)
    if min_replicas > online:
        what = f"{facts.address}: min_replicas={min_replicas}, and {online} replicas are connected"
        yield error(
            "redis.min-replicas", what, "no grant counts", "start replicas, or lower min_replicas of the client"
        )
    elif online and not min_replicas:
        what = f"{facts.address}: {online} replicas, and min_replicas is 0"
        reason = "if a replica without the latest grants is promoted, it grants those locks again"
        demand = -(-online // 2)
        mend = f"add min_replicas={demand} to the URL or the backend"
        if demand == online:
            mend += "; no lock is granted then while that replica is away: add a second one"
        yield warning("redis.replicas", what, reason, mend)
    if demanded > online:
        what = f"{facts.address}: min-replicas-to-write is {demanded}, and {online} replicas are connected"
        yield error("redis.min-replicas-to-write", what, "the server refuses writes (NOREPLICAS)", "start the replicas")


def _access(facts: RedisFacts) -> Iterator[Finding]:
    if not facts.password:
        what, mend = f"{facts.address}: no password is needed", "ACL SETUSER locks on >..., and name it in the URL"
        yield note("redis.authentication", what, "any client that reaches the server can delete leases", mend)
    if facts.exposed:
        what, mend = f"{facts.address}: the connection is not encrypted", "tls-port in redis.conf, and rediss:// here"
        yield note("redis.tls", what, "the network sees owner ids, which can release locks", mend)
