"""Checks etcd and Kahuna, whose members are each asked over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from fencing_sdk._etcd import ALARM, STATUS
from fencing_sdk._http.nodes import Endpoint
from fencing_sdk._http.requests import RequestFailedError
from fencing_sdk._values.reports import Finding
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.backends.kahuna import KahunaBackend
from fencing_sdk.backends.kahuna.cluster import HEALTH
from fencing_sdk.diagnosis.checks import ERROR, WARNING, Check, StoreDiagnosis, host_down, judged
from fencing_sdk.errors import BackendError

_LIMIT = 5.0
_UPGRADE = "upgrade to 3.4.31, 3.5.13 or newer"
_INCONSISTENT = (((3, 5, 0), (3, 5, 3)),)
_DIFFERING = (((0, 0, 0), (3, 4, 22)), ((3, 5, 3), (3, 5, 6)))
"""Versions whose members may have different data after a crash: from, and before."""
_REVOKING = (((3, 4, 22), (3, 4, 31)), ((3, 5, 6), (3, 5, 13)))
"""Versions whose leader may end leases that were kept alive."""


def _is_one_of(version: str, ranges: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return bool(numbers) and any(first <= numbers < fixed for first, fixed in ranges)


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
OF_VERSION: tuple[Check[str], ...] = (
    Check("etcd.version", ERROR, lambda it: _is_one_of(it, _INCONSISTENT),
        "version {it}", "members may disagree on what is stored after a crash", _UPGRADE),
    Check("etcd.version", WARNING, lambda it: _is_one_of(it, _DIFFERING),
        "version {it}", "after a crash members may have different data, and then tokens are not reliable", _UPGRADE),
    Check("etcd.version", WARNING, lambda it: _is_one_of(it, _REVOKING),
        "version {it}",
        "a leader that was frozen may end leases that were kept alive: use a ttl longer than any freeze", _UPGRADE),
)
OF_ALARMS: tuple[Check[str], ...] = (
    Check("etcd.alarm", ERROR, lambda it: it,
        "the alarm {it} is on", "members disagree on what is stored",
        "replace the member with the alarm; see etcd's page on data corruption"),
)
# fmt: on


class EtcdDiagnosis(StoreDiagnosis[EtcdBackend]):
    """The checks of one cluster."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        gateway = self.backend._gateway
        states = await gateway.ask_each("diagnose", STATUS, {})
        down = {origin: state for origin, state in states.items() if isinstance(state, BackendError)}
        fatal, findings = 2 * len(down) >= len(states), []
        for origin, state in states.items():
            if isinstance(state, BackendError):
                findings.append(host_down("etcd.host", f"{origin}: {state.detail}", fatal=fatal))
            else:
                findings += judged(OF_VERSION, str(state.get("version", "")), origin)
        answers = await gateway.ask_each("diagnose", ALARM, {"action": "GET"}) if len(down) < len(states) else {}
        return [*findings, *judged(OF_ALARMS, corrupted(answers))]


def corrupted(answers: Mapping[str, object]) -> str:
    """Return the alarms in *answers* other than NOSPACE, which the store's refusals of writes report."""
    listed = [answer.get("alarms") for answer in answers.values() if isinstance(answer, Mapping)]
    alarms = [alarm for each in listed if isinstance(each, list) for alarm in each if isinstance(alarm, Mapping)]
    return ", ".join(sorted({str(alarm.get("alarm")) for alarm in alarms} - {"NOSPACE"}))


class KahunaDiagnosis(StoreDiagnosis[KahunaBackend]):
    """The checks of one cluster."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        nodes = self.backend._endpoints.in_turn()
        failures = await asyncio.gather(*map(self._failure_of, nodes))
        down = [f"{node.origin}: {why}" for node, why in zip(nodes, failures, strict=True) if why]
        findings = [host_down("kahuna.host", what, fatal=2 * len(down) >= len(nodes)) for what in down]
        for text in await self.backend.warnings():
            what, _, fix = text.partition("; ")
            findings.append(Finding("kahuna.settings", ERROR, what, "two clients may hold one lock", fix))
        return findings

    async def _failure_of(self, node: Endpoint) -> str:
        try:
            async with asyncio.timeout(_LIMIT):
                await self.backend._nodes.get(node.urls[HEALTH])
        except RequestFailedError as failure:
            return failure.detail
        except TimeoutError:
            return f"no answer within {_LIMIT:g} s"
        return ""
