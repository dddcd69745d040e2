"""
What a check of a store is, who makes the checks of a store, and the checks that several stores have.

The module of a store asks each host by itself, keeps the answers as facts, and has a table of checks: what is wrong
with the facts, how much that matters, why, and what fixes it. `judged` runs a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, NamedTuple, TypeVar

from fencing_sdk._values.reports import Finding, Severity, error, is_local, warning
from fencing_sdk.abc import Backend, SupportsDiagnosis

FEWEST = 3
"""Servers of which one may be lost, and a majority is left."""
COUNTED = "; with tokens=counter, tokens repeat"
ONE_DOWN = "no lock can be taken while one is down"
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_BACKENDS = "fencing_sdk.backends."
_STORES = {
    "memory": "MemoryDiagnosis",
    "sqlite": "SqliteDiagnosis",
    "redis": "RedisDiagnosis",
    "postgresql": "PostgresqlDiagnosis",
    "mysql": "MysqlDiagnosis",
    "etcd": "EtcdDiagnosis",
    "zookeeper": "ZooKeeperDiagnosis",
    "kahuna": "KahunaDiagnosis",
}
"""The modules here, named like those of the backends, and the class in each."""

Facts = TypeVar("Facts")
BackendType = TypeVar("BackendType", bound=Backend)


class Group(NamedTuple):
    """Servers that decide by majority: how many vote, 0 if that is not known, how many there are, and in the URL."""

    voters: int
    members: int
    named: int


class StoreDiagnosis(ABC, Generic[BackendType]):
    """The checks of one store: a `fencing_sdk.abc.SupportsDiagnosis` that looks at *backend* from the inside."""

    def __init__(self, backend: BackendType) -> None:
        self.backend = backend

    @abstractmethod
    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        return None


def diagnosis_of(backend: Backend) -> SupportsDiagnosis | None:
    """Find what checks the store of *backend*: the backend itself if it can, else the module that is named like it."""
    if isinstance(backend, SupportsDiagnosis):
        return backend
    for kind in type(backend).__mro__:
        store = kind.__module__.removeprefix(_BACKENDS).split(".")[0]
        if kind.__module__.startswith(_BACKENDS) and store in _STORES:
            module = import_module(f"fencing_sdk.diagnosis.{store}")
            checks: SupportsDiagnosis = getattr(module, _STORES[store])(backend)
            return checks
    return None


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """One row of a table. ``{it.x}`` in a text stands for what the facts say of ``x``."""

    name: str
    severity: Severity | Callable[[Facts], Severity]
    fails: Callable[[Facts], object]
    what: str
    reason: str
    fix: str


def judged(checks: Sequence[Check[Facts]], it: Facts, place: str = "") -> list[Finding]:
    """Run *checks* on the facts *it*, which are those of the host *place*."""
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


def host_down(check: str, what: str, fix: str, *, fatal: bool) -> Finding:
    """Return the finding about a host that does not answer. *fatal*: too few others are left."""
    if fatal:
        return error(check, what, "no lock can be taken", fix)
    return warning(check, what, "one more loss, and no lock can be taken", fix)


def too_slow(check: str, limit: float, reason: str) -> Finding:
    """A store that has not answered within *limit* seconds."""
    return error(check, f"no answer within {limit:g} s", reason, "look at the store's load and log")


def is_exposed(origin: str) -> bool:
    """Return whether a network carries what is sent to *origin*, such as ``http://etcd-1:2379``, without TLS."""
    scheme, _, address = origin.partition("://")
    return scheme == "http" and not is_local(address.rpartition(":")[0])


def unencrypted(
    check: str,
    exposed: Callable[[Facts], object],
    fix: str,
    seen: str = "owner ids, which can release locks",
) -> Check[Facts]:
    """The check of a connection over a network."""
    return Check(check, NOTE, exposed, "the connection is not encrypted", f"the network sees {seen}", fix)


def open_to_all(check: str, is_open: Callable[[Facts], object], what: str, fix: str) -> Check[Facts]:
    """The check of a store that any client may change."""
    return Check(check, NOTE, is_open, what, "any client that reaches the store can delete locks", fix)


def majority(of_size: str, of_url: str, group: str, fix: str) -> tuple[Check[Group], ...]:
    """
    The checks of a group that decides by majority.

    Args:
        of_size: The name of those of its size.

        of_url: The name of that of the hosts that the URL names.

        group: What it is called.

        fix: How to make it larger.
    """
    voting, fewer = f"the {group} has {{it.voters}} voting members", "it survives no more losses than with one fewer"
    unnamed, down_too = "the URL names {it.named} of {it.members} members", "if those are down, this client is too"
    odd, all_named = "run three or five", "name every member in the URL"
    return (
        Check(of_size, WARNING, lambda it: 0 < it.voters < FEWEST, voting, ONE_DOWN, fix),
        Check(of_size, NOTE, lambda it: it.voters > FEWEST and it.voters % 2 == 0, voting, fewer, odd),
        Check(of_url, NOTE, lambda it: it.named < it.members, unnamed, down_too, all_named),
    )
