"""What an etcd cluster reports of itself, and what of that breaks a promise. Each member gets its own questions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fencing_sdk._etcd.gateway import ALARM, MEMBERS, STATUS
from fencing_sdk._etcd.messages import Json
from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.diagnosis.checks import (
    ERROR,
    WARNING,
    Check,
    Group,
    StoreDiagnosis,
    host_down,
    is_exposed,
    judged,
    majority,
    open_to_all,
    unencrypted,
)
from fencing_sdk.errors import BackendError

_QUOTA = re.compile(r"^etcd_server_quota_backend_bytes (\S+)$", re.MULTILINE)
_NEARLY_FULL = 0.8
_UPGRADE = "upgrade to 3.4.31, 3.5.13 or newer"
_INCONSISTENT = (((3, 5, 0), (3, 5, 3)),)
_DIFFERING = (((0, 0, 0), (3, 4, 22)), ((3, 5, 3), (3, 5, 6)))
"""Versions whose members may have different data after a crash: from, and before."""
_REVOKING = (((3, 4, 22), (3, 4, 31)), ((3, 5, 6), (3, 5, 13)))
"""Versions whose leader may end leases that were kept alive."""

Answers = Mapping[str, Json | BackendError]


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One member that has answered: its state, and the quota of the cluster in MB, 0 if that is not known."""

    state: Json
    quota: float = 0.0

    @property
    def text(self) -> str:
        """Its version, as the member reports it."""
        return str(self.state.get("version", ""))

    @property
    def used(self) -> float:
        """MB of the quota that are used."""
        return int(str(self.state.get("dbSize", 0))) / 2**20

    def is_one_of(self, versions: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
        """Return whether its version is in one of these ranges."""
        version = tuple(int(part) for part in re.findall(r"\d+", self.text)[:3])
        return bool(version) and any(first <= version < fixed for first, fixed in versions)


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Which alarms are on, and whether the client logs in."""

    no_space: bool = False
    others: str = ""
    logs_in: bool = True


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
OF_MEMBER: tuple[Check[MemberFacts], ...] = (
    Check("etcd.version", ERROR, lambda it: it.is_one_of(_INCONSISTENT),
        "version {it.text}", "members may disagree on what is stored after a crash", _UPGRADE),
    Check("etcd.version", WARNING, lambda it: it.is_one_of(_DIFFERING),
        "version {it.text}", "after a crash members may have different data, and then tokens are not reliable",
        _UPGRADE),
    Check("etcd.version", WARNING, lambda it: it.is_one_of(_REVOKING),
        "version {it.text}",
        "a leader that was frozen may end leases that were kept alive: use a ttl longer than any freeze", _UPGRADE),
    Check("etcd.leader", ERROR, lambda it: str(it.state.get("leader", "0")) in {"0", ""},
        "there is no leader", "no lock can be taken",
        "start a majority of the members; etcdctl endpoint status --cluster"),
    Check("etcd.quota", WARNING, lambda it: it.used > _NEARLY_FULL * it.quota > 0,
        "{it.used:.1f} MB of the quota of {it.quota:.1f} MB are used", "at the quota etcd takes no writes",
        "etcdctl compact, etcdctl defrag; --auto-compaction-retention=1h, a higher --quota-backend-bytes"),
)
OF_CLUSTER: tuple[Check[ClusterFacts], ...] = (
    Check("etcd.alarm", ERROR, lambda it: it.no_space,
        "the alarm NOSPACE is on", "etcd takes no writes",
        "etcdctl compact, etcdctl defrag, raise --quota-backend-bytes; then etcdctl alarm disarm"),
    Check("etcd.alarm", ERROR, lambda it: it.others,
        "the alarm {it.others} is on", "members disagree on what is stored",
        "replace the member with the alarm; see etcd's page on data corruption"),
    open_to_all("etcd.authentication", lambda it: not it.logs_in, "no login is needed",
        "etcdctl auth enable, and a role for the prefix: see the page of etcd"),
)
MAJORITY = majority("etcd.members", "etcd.endpoints", "cluster", "etcdctl member add, up to three or five")
OF_ORIGIN: tuple[Check[str], ...] = (
    unencrypted("etcd.tls", is_exposed, "--cert-file and --key-file, and etcd+https:// here"),
)
# fmt: on


class EtcdDiagnosis(StoreDiagnosis[EtcdBackend]):
    """The checks of one cluster."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        gateway = self.backend._gateway
        states = await gateway.ask_each("diagnose", STATUS, {})
        up = {origin: state for origin, state in states.items() if not isinstance(state, BackendError)}
        findings = list(_down(states))
        if not up:
            return findings
        quota = _QUOTA.search(await gateway.metrics())
        for origin, state in up.items():
            findings += judged(OF_MEMBER, MemberFacts(state, float(quota[1]) / 2**20 if quota else 0.0), origin)
        lists = _lists("members", await gateway.ask_each("diagnose", MEMBERS, {}))
        members: Sequence[Mapping[str, object]] = next(lists, ())
        voters = sum(not member.get("isLearner") for member in members)
        findings += judged(MAJORITY, Group(voters, len(members), len(states)))
        alarms = _lists("alarms", await gateway.ask_each("diagnose", ALARM, {"action": "GET"}))
        kinds = {str(alarm.get("alarm")) for listed in alarms for alarm in listed}
        others = ", ".join(sorted(kinds - {"NOSPACE"}))
        findings += judged(OF_CLUSTER, ClusterFacts("NOSPACE" in kinds, others, gateway.logs_in))
        return findings + [finding for origin in states for finding in judged(OF_ORIGIN, origin, origin)]


def _down(states: Answers) -> Iterator[Finding]:
    down = {origin: state for origin, state in states.items() if isinstance(state, BackendError)}
    fix = "start the member, or correct its address, its certificates or the firewall"
    for origin, failure in down.items():
        yield host_down("etcd.host", f"{origin}: {failure.detail}", fix, fatal=2 * len(down) >= len(states))


def _lists(name: str, answers: Answers) -> Iterator[Sequence[Mapping[str, object]]]:
    """The list *name* of each member that has answered."""
    for answer in answers.values():
        listed = () if isinstance(answer, BackendError) else answer.get(name)
        if isinstance(listed, list):
            yield [each for each in listed if isinstance(each, dict)]
