"""
The form of a check, and the choice of a store's checks.

The module of a store asks each host, keeps the answers as facts, and has a table of checks: the condition that breaks a
promise, its severity, the reason, and the fix. `judged` runs a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar

from fencing_sdk._values.reports import Finding, Severity
from fencing_sdk.abc import Backend, SupportsDiagnosis

COUNTED = "; with tokens=counter, tokens repeat"
ERROR, WARNING = Severity.ERROR, Severity.WARNING
_BACKENDS = "fencing_sdk.backends."
STORES = {
    "memory": ("local", "MemoryDiagnosis"),
    "sqlite": ("local", "SqliteDiagnosis"),
    "redis": ("redis", "RedisDiagnosis"),
    "postgresql": ("postgresql", "PostgresqlDiagnosis"),
    "mysql": ("mysql", "MysqlDiagnosis"),
    "etcd": ("gateways", "EtcdDiagnosis"),
    "zookeeper": ("zookeeper", "ZooKeeperDiagnosis"),
    "kahuna": ("gateways", "KahunaDiagnosis"),
}
"""Backend module to the module and class of its checks."""

Facts = TypeVar("Facts")
BackendType = TypeVar("BackendType", bound=Backend)


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """One row of a table. ``{it.x}`` in a text is replaced by the attribute ``x`` of the facts."""

    name: str
    severity: Severity | Callable[[Facts], Severity]
    fails: Callable[[Facts], object]
    what: str
    reason: str
    fix: str


def judged(checks: Sequence[Check[Facts]], it: Facts, place: str = "") -> list[Finding]:
    """Run *checks* on the facts *it* of the host *place*."""
    return [
        Finding(
            check.name,
            check.severity if isinstance(check.severity, Severity) else check.severity(it),
            (f"{place}: " if place else "") + check.what.format(it=it),
            check.reason.format(it=it),
            check.fix.format(it=it),
        )
        for check in checks
        if check.fails(it)
    ]


def host_down(check: str, what: str, *, fatal: bool) -> Finding:
    """Return the finding about a host that does not answer. *fatal* means that too few hosts are left."""
    reason = "no lock can be taken" if fatal else "one more loss, and no lock can be taken"
    fix = "start the server, or correct its address, its login or the firewall"
    return Finding(check, ERROR if fatal else WARNING, what, reason, fix)


class StoreDiagnosis(ABC, Generic[BackendType]):
    """Checks of one store: a `fencing_sdk.abc.SupportsDiagnosis` that reads private attributes of *backend*."""

    def __init__(self, backend: BackendType) -> None:
        self.backend = backend

    @abstractmethod
    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        return None


def diagnosis_of(backend: Backend) -> SupportsDiagnosis | None:
    """Return *backend* if it has checks of its own, else the checks of its store; None for an unknown store."""
    if isinstance(backend, SupportsDiagnosis):
        return backend
    for kind in type(backend).__mro__:
        store = kind.__module__.removeprefix(_BACKENDS).split(".")[0]
        if kind.__module__.startswith(_BACKENDS) and store in STORES:
            module, name = STORES[store]
            checks: SupportsDiagnosis = getattr(import_module(f"fencing_sdk.diagnosis.{module}"), name)(backend)
            return checks
    return None
