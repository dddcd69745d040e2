"""Nothing is shipped untested: every backend and every guard has its suite, and says aloud what it lacks."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import fencing_sdk
from fencing_sdk.backends import BUILTIN
from fencing_sdk.backends.postgresql import DRIVER_OPTIONS as LIBPQ_OPTIONS
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS as REDIS_OPTIONS
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing.promises.under_test import BackendUnderTest

TESTS = Path(__file__).parent
PACKAGE = Path(fencing_sdk.__file__).parent

LACKS = {
    "memory": {"processes", "breakable", "survives_restart"},
    "sqlite": set(),
    "kahuna": {"lines", "shares"},
    "etcd": {"redraws"},
    "redis": set(),
    "redis.quorum": {"lines", "shares"},
    "postgresql": set(),
    "mysql": set(),
    "zookeeper": {"keeps_alone"},
}
"""What a backend may declare as False although the suite expects it. A new entry is a decision, not a skip."""

POWERS = {name for name, default in vars(BackendUnderTest).items() if isinstance(default, bool)}
EXPECTED = {power for power in POWERS if getattr(BackendUnderTest, power)}
assert {"lines", "shares", "processes", "breakable", "keeps_alone"} <= EXPECTED


def subjects(room: str) -> list[str]:
    """The modules and folders of a room that hold a backend or a guard."""
    paths = [path for path in (PACKAGE / room).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    nested = [builtin.module.removeprefix("fencing_sdk.backends.") for builtin in BUILTIN.values()]
    found = {path.stem for path in paths if not path.stem.startswith("_")}
    return sorted({*found, *(name for name in nested if "." in name and room == "backends")})


def suites(folder: Path, suite: str) -> dict[str, list[ast.ClassDef]]:
    """The subclasses of *suite* below *folder*, by the modules that their files import."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in folder.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        classes = _collected(tree, suite)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and classes:
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    found.setdefault(module, []).extend(classes)
    return found


def _collected(tree: ast.Module, suite: str) -> list[ast.ClassDef]:
    """The classes that pytest collects and that inherit from *suite*, directly or through one another."""
    family = {suite}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in classes:
        if family & {ast.unparse(parent) for parent in node.bases}:
            family.add(node.name)
    return [node for node in classes if node.name in family and node.name.startswith("Test")]


def declared(suite: ast.ClassDef) -> dict[str, bool]:
    """The powers that a subclass declares."""
    return {
        target.id: ast.literal_eval(node.value)
        for node in suite.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in POWERS
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", subjects("backends"))
def test_every_backend_runs_the_suite_and_lacks_only_what_is_written_here(backend: str):
    found = suites(TESTS / "stores", "BackendSuite").get(f"fencing_sdk.backends.{backend}", [])
    assert found, f"tests/stores/{backend.rpartition('.')[2]} needs a subclass of BackendSuite"
    for suite in found:
        lacks = {power for power, there in declared(suite).items() if power in EXPECTED and not there}
        assert lacks <= LACKS[backend], f"{suite.name} lacks more than it may"


@pytest.mark.parametrize("guard", subjects("guards"))
def test_every_guard_runs_the_suite(guard: str):
    found = suites(TESTS / "guards", "GuardSuite").get(f"fencing_sdk.guards.{guard}", [])
    assert found, f"tests/guards/test_{guard}.py needs a subclass of GuardSuite"


def test_every_backend_has_a_url_and_a_page():
    reached = {builtin.module.removeprefix("fencing_sdk.backends.") for builtin in BUILTIN.values()}
    assert set(subjects("backends")) == reached == set(LACKS)
    for backend in subjects("backends"):
        assert (PACKAGE.parent / "docs" / "backends" / f"{backend.replace('.', '-')}.md").exists()


URLS = {"redis": "redis://h", "redis.quorum": "redis+quorum://a,b,c", "zookeeper": "zk://h", "sqlite": "sqlite:///a"}


@pytest.mark.parametrize("backend", sorted(LACKS))
def test_the_page_of_a_backend_names_exactly_its_options_with_their_defaults(backend: str):
    opener = importlib.import_module(f"fencing_sdk.backends.{backend}").from_url
    with pytest.raises(ConfigurationError, match="known are") as refused:
        opener(URLS.get(backend, f"{backend}://h"), nosuch=1)
    known = str(refused.value).partition("known are ")[2].split(", ")
    of_driver = {*REDIS_OPTIONS} if "redis" in backend else {*LIBPQ_OPTIONS} if backend == "postgresql" else set()
    parameters = inspect.signature(inspect.get_annotations(opener, eval_str=True)["return"]).parameters
    declared = {name: parameters[name].default for name in known if name not in of_driver}

    page = (PACKAGE.parent / "docs" / "backends" / f"{backend.replace('.', '-')}.md").read_text()
    table = page.partition("| option | default | meaning |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    shown = {}
    for names, default, _ in (cells(row) for row in table.split("\n")):
        literal = re.match("`(.+?)`", default)
        shown |= dict.fromkeys(re.findall("`(.+?)`", names), literal[1] if literal else None)
    assert set(shown) == set(declared)
    assert {name: shown[name] for name, default in declared.items() if default is not None} == {
        name: str(default).lower() for name, default in declared.items() if default is not None
    }


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|", 2)]


PASS_NOTHING_ON = ("redisquorum", "etcd", "kahuna", "zookeeper")
"""Stores that cannot change the owner of a ticket in one step."""

SCENARIOS = {
    "FaultsSuite": {
        "memory": "there is no server and no network between: the faults are those of tests/scenarios/test_fm_*.py",
        "sqlite": "there is no server and no network between: test_sqlite_processes.py has what a file can do",
    },
    "LostAnswersSuite": {
        "memory": "there is no network between",
        "sqlite": "there is no network between",
        "redisquorum": "a lost answer is one of several: tests/stores/quorum/test_redis_quorum_nodes.py",
        "etcd": "the network of a test sees none of its requests: tests/stores/etcd/test_etcd_faults.py",
        "zookeeper": "the network of a test sees none of its requests: tests/stores/zookeeper/test_zookeeper_faults.py",
        "kahuna": "the network of a test sees none of its requests: tests/stores/kahuna/test_kahuna_faults.py",
    },
    "FailoverSuite": {
        "memory": "it lives in one process",
        "sqlite": "it has no replicas",
        "redisquorum": "it loses no grant that a majority has: tests/stores/quorum/test_redis_quorum_nodes.py",
        "etcd": "it loses no grant: tests/stores/etcd/test_etcd_cluster.py",
        "zookeeper": "it loses no grant: tests/stores/zookeeper/test_zookeeper_failover.py",
        "kahuna": "it loses no grant: tests/stores/kahuna/test_kahuna_cluster.py",
    },
    "OpeningSuite": {"memory": "it is never away: tests/unit/test_opening.py has one that says so"},
    "ElectionSuite": {
        "memory": "it lives in one process: tests/unit/test_election.py",
        "kahuna": "it has no line in which a candidate could be seen",
    },
    "FaultyElectionSuite": {
        "memory": "there is no server and no network between: tests/unit/test_election.py",
        "sqlite": "there is no server and no network between",
        "kahuna": "its stand-in lives in the process of the test, without a network",
    },
    "RevokingSuite": {
        "memory": "it lives in one process, and no call of another one comes in between",
    },
    "BellSuite": {
        "memory": "its bells are those of BackendSuite, and the ends of tests/scenarios",
        "kahuna": "it rings no bell",
        "redisquorum": "it rings no bell: the next heartbeat finds the end",
    },
    "SharesSuite": {
        "memory": "it lives in one process, and its shares are those of BackendSuite",
        "kahuna": "it has no shares",
        "redisquorum": "it has no shares",
    },
    "WaitersSuite": {
        "memory": "it lives in one process, and its line is that of BackendSuite",
        "kahuna": "it has no line",
        "redisquorum": "it has no line",
    },
    "FencesSuite": dict.fromkeys(
        ("memory", "sqlite", "redis", "redisquorum", "etcd", "zookeeper", "kahuna"), "it keeps no fences of a guard"
    ),
    "TicketsSuite": {"zookeeper": "its tickets end with a session: NoHandOverSuite"},
    "HandOverSuite": dict.fromkeys(PASS_NOTHING_ON, "its tickets do not change hands: NoHandOverSuite"),
    "HandOverInLineSuite": {"memory": "two clients share it in one process alone: tests/unit/test_hand_over.py"}
    | dict.fromkeys(PASS_NOTHING_ON, "its tickets do not change hands"),
    "HandOverProcessesSuite": {"memory": "it lives in one process"}
    | dict.fromkeys(PASS_NOTHING_ON, "its tickets do not change hands"),
    "NoHandOverSuite": dict.fromkeys(("memory", "sqlite", "redis", "postgresql", "mysql"), "its tickets change hands"),
    "LoopsSuite": {},
    "SyncSuite": {},
    "SyncRevokingSuite": {},
    "SyncProcessesSuite": {"memory": "it lives in one process"},
}
"""The suites of tests/stores, and the backends that do not run them, each with the reason."""


def test_every_suite_of_scenarios_is_in_this_matrix():
    written = {
        node.name
        for path in (TESTS / "stores").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Suite")
    }
    assert written == set(SCENARIOS)


@pytest.mark.parametrize("suite", SCENARIOS)
def test_every_scenario_runs_on_every_store_or_it_is_written_here_why_not(suite: str):
    runs = {
        node.name.removeprefix("Test").lower()
        for path in (TESTS / "stores").glob("test_*.py")
        for node in _collected(ast.parse(path.read_text()), suite)
    }
    assert runs | set(SCENARIOS[suite]) == {name.replace(".", "") for name in LACKS}
    assert not runs & set(SCENARIOS[suite]), "what runs needs no reason"


@pytest.mark.parametrize(("room", "suite"), [("stores", "BackendSuite"), ("guards", "GuardSuite")])
def test_no_suite_of_a_shipped_store_skips(room: str, suite: str):
    """What a store lacks is declared, and then not collected; a skip would hide it."""
    trees = [ast.parse(path.read_text()) for path in (TESTS / room).rglob("test_*.py")]
    suites = [tree for tree in trees if _collected(tree, suite)]
    assert suites
    for tree in suites:
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & {"skip", "skipif", "importorskip", "xfail"}, ast.get_docstring(tree)
