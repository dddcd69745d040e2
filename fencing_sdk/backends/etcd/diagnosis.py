"""What an etcd cluster tells of itself, and what of that breaks a promise. Each member is asked by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fencing_sdk._etcd.gateway import ALARM, MEMBERS, STATUS, Gateway
from fencing_sdk._etcd.json_codec import Json
from fencing_sdk._values.findings import Finding, error, is_local, note, warning
from fencing_sdk.errors import BackendError

_QUOTA = re.compile(r"^etcd_server_quota_backend_bytes (\S+)$", re.MULTILINE)
_NEARLY_FULL = 0.8
_INCONSISTENT = ((3, 5, 0), (3, 5, 3))
_DIFFERING = (((0, 0, 0), (3, 4, 22)), ((3, 5, 0), (3, 5, 6)))
"""Versions whose members may have different data after a crash: from, and before."""
_REVOKING = (((0, 0, 0), (3, 4, 31)), ((3, 5, 0), (3, 5, 13)))
"""Versions whose leader may end leases that were kept alive."""
_FEWEST = 3

Answers = Mapping[str, Json | BackendError]


async def diagnose_etcd(gateway: Gateway) -> list[Finding]:
    """Ask every member, and judge what they tell."""
    states = await gateway.ask_each("diagnose", STATUS, {})
    findings = list(_hosts(states))
    told = {origin: state for origin, state in states.items() if not isinstance(state, BackendError)}
    if not told:
        return findings
    findings += [*_versions(told), *_leader(told)]
    findings += _alarms(await gateway.ask_each("diagnose", ALARM, {"action": "GET"}))
    findings += _members(await gateway.ask_each("diagnose", MEMBERS, {}), len(states))
    findings += _space(told, await gateway.metrics())
    return [*findings, *_access(gateway, states)]


def _hosts(states: Answers) -> Iterator[Finding]:
    down = {origin: state for origin, state in states.items() if isinstance(state, BackendError)}
    majority_left = 2 * len(down) < len(states)
    for origin, failure in down.items():
        reason = "one more loss, and no lock can be taken" if majority_left else "no lock can be taken"
        mend = "start the member, or correct its address, its certificates or the firewall"
        severe = warning if majority_left else error
        yield severe("etcd.host", f"{origin}: {failure.detail}", reason, mend)


def _versions(told: Mapping[str, Json]) -> Iterator[Finding]:
    for origin, state in told.items():
        text = str(state.get("version", ""))
        version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
        if not version:
            continue
        what, mend = f"{origin}: version {text}", "upgrade to 3.4.31, 3.5.13 or newer"
        if _INCONSISTENT[0] <= version < _INCONSISTENT[1]:
            yield error("etcd.version", what, "members may disagree on what is stored after a crash", mend)
        elif any(first <= version < fixed for first, fixed in _DIFFERING):
            reason = "after a crash members may have different data, and then tokens are not reliable"
            yield warning("etcd.version", what, reason, mend)
        elif any(first <= version < fixed for first, fixed in _REVOKING):
            reason = "a leader that was frozen may end leases that were kept alive: use a ttl longer than any freeze"
            yield warning("etcd.version", what, reason, mend)


def _leader(told: Mapping[str, Json]) -> Iterator[Finding]:
    for origin, state in told.items():
        if str(state.get("leader", "0")) in {"0", ""}:
            mend = "start a majority of the members; etcdctl endpoint status --cluster"
            yield error("etcd.leader", f"{origin}: there is no leader", "no lock can be taken", mend)


def _alarms(answers: Answers) -> Iterator[Finding]:
    """One finding for each kind of alarm, although every member knows of it."""
    kinds = {
        str(alarm.get("alarm"))
        for answer in answers.values()
        if not isinstance(answer, BackendError)
        for alarm in _dicts(answer.get("alarms"))
    }
    for kind in sorted(kinds):
        mend = "etcdctl compact, etcdctl defrag, raise --quota-backend-bytes; then etcdctl alarm disarm"
        mend = mend if kind == "NOSPACE" else "replace the member with the alarm; see etcd's page on data corruption"
        reason = "etcd takes no writes" if kind == "NOSPACE" else "members disagree on what is stored"
        yield error("etcd.alarm", f"the alarm {kind} is on", reason, mend)


def _members(answers: Answers, named: int) -> Iterator[Finding]:
    lists = [_dicts(each.get("members")) for each in answers.values() if not isinstance(each, BackendError)]
    if not lists or not lists[0]:
        return
    voters = sum(not member.get("isLearner") for member in lists[0])
    if voters < _FEWEST:
        what, reason = f"the cluster has {voters} voting members", "no lock can be taken while one is down"
        yield warning("etcd.members", what, reason, "etcdctl member add, up to three or five")
    elif voters % 2 == 0:
        what = f"the cluster has {voters} voting members"
        yield note("etcd.members", what, "it survives no more losses than with one fewer", "run three or five")
    if named < len(lists[0]):
        what = f"the URL names {named} of {len(lists[0])} members"
        yield note("etcd.endpoints", what, "if those are down, this client is too", "name every member in the URL")


def _space(told: Mapping[str, Json], metrics: str) -> Iterator[Finding]:
    match = _QUOTA.search(metrics)
    quota = float(match[1]) if match else 0.0
    for origin, state in told.items():
        size = int(str(state.get("dbSize", 0)))
        if quota > 0 and size > _NEARLY_FULL * quota:
            what = f"{origin}: {size / 2**20:.1f} MB of the quota of {quota / 2**20:.1f} MB are used"
            mend = "etcdctl compact, etcdctl defrag; --auto-compaction-retention=1h, a higher --quota-backend-bytes"
            yield warning("etcd.quota", what, "at the quota etcd takes no writes", mend)


def _access(gateway: Gateway, states: Answers) -> Iterator[Finding]:
    if not gateway.logs_in:
        what, mend = "no login is needed", "etcdctl auth enable, and a role for the prefix: see the page of etcd"
        yield note("etcd.authentication", what, "any client that reaches a member can delete locks", mend)
    for origin in states:
        scheme, _, address = origin.partition("://")
        if scheme == "http" and not is_local(address.rpartition(":")[0]):
            what, mend = (
                f"{origin}: the connection is not encrypted",
                "--cert-file and --key-file, and etcd+https:// here",
            )
            yield note("etcd.tls", what, "the network sees owner ids, which can release locks", mend)


def _dicts(value: object) -> list[dict[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
