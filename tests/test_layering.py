"""The house keeps its rooms: imports go where the map allows, never in a circle, and some words have one home."""

import ast
import functools
from pathlib import Path

import pytest

import fencing_sdk

PACKAGE = Path(fencing_sdk.__file__).parent

ROOMS = {
    "errors": set(),
    "_values": {"errors"},
    "events": {"errors", "_values"},
    "abc": {"errors", "_values"},
    "_dialing": set(),
    "_http": {"errors", "_values"},
    "_etcd": {"errors", "_values", "_http"},
    "_kahuna": {"errors", "_values", "_http"},
    "_mysql": {"errors", "_values", "_dialing", "_http"},
    "backends": {"errors", "events", "abc", "_values", "_dialing", "_http", "_etcd", "_kahuna", "_mysql"},
    "guards": {"errors", "events", "abc", "_values", "_dialing", "_http", "_etcd", "_kahuna", "_mysql"},
    "_name_template": {"errors", "_values"},
    "_recording": {"errors", "events", "_values"},
    "_lease_state": {"errors", "_values"},
    "_lease": {"errors", "_values", "_lease_state"},
    "_engine": {"errors", "events", "abc", "_values", "_lease_state", "_lease"},
    "_lock": {"errors", "events", "abc", "_values", "_engine", "_lease"},
    "_arguments": {"errors", "events", "abc", "_values", "_engine"},
    "recipes": {"errors", "events", "abc", "_values", "_engine", "_name_template", "_lease", "_lock"}
    | {"_lease_state", "_arguments"},
    "_client_sharing": {"errors", "abc", "_values", "_lock", "_arguments", "recipes"},
    "diagnosis": {"errors", "abc", "_values", "backends", "_http", "_etcd", "_mysql"},  # stores do not know it
    "_client_operating": {"errors", "abc", "_values", "_engine", "recipes", "diagnosis"},
    "_client": {"errors", "events", "abc", "_values", "_engine", "_lease", "_lock", "_arguments", "_name_template"}
    | {"recipes", "_client_sharing", "_client_operating"},
    "_connect": {"errors", "events", "abc", "_values", "_arguments", "_recording", "backends", "_client"},
    "sync": {"errors", "events", "abc", "_values", "_engine", "_lease", "_lock", "_arguments"}
    | {"_lease_state", "_name_template", "recipes", "_client_operating", "_client", "_connect"},
}
"""Which rooms a room may enter besides itself, all of them above it. A room is a folder, or a module at the front."""
EDGES = ("integrations", "testing", "cli")
CHECKER = "testing.history"  # imports nothing but the errors, so that the command line may judge and draw what it reads

ONE_HOME = {
    "CancelScope": {"_values.tasks", "_engine.lease_scope", "_lease_state"},
    "ContextVar": {"_lease"},
    "tenacity": {"_engine.acquisition", "_engine.terms"},
    "aiohttp": {"_http", "_etcd", "_kahuna", "integrations"},
    "threading": {"_engine.timers", "backends.sqlite", "backends.zookeeper", "guards.memory", "guards.files"}
    | {"cli", "sync", "diagnosis.measuring", "_values.forks"},
}
TIME_HOME = {"_values.clock"}
RANDOM_HOME = {"_values.clock"}
"""What draws from the generator of the process changes what a program with a seed does."""
FRAMEWORKS = {
    "aiohttp": {"_http", "_etcd", "_kahuna", "integrations.aiohttp"},
    "fastapi": {"integrations.fastapi"},
    "django": {"integrations.django"},
    "requests": {"integrations.requests"},
    "httpx": set(),  # recognised by what its objects can do
    "httpx2": set(),
    "kazoo": {"backends.zookeeper", "recipes.old_locks"},
    "asyncmy": {"_mysql"},
    "opentelemetry": {"integrations.opentelemetry"},
    "prometheus_client": {"integrations.prometheus"},
    "multidict": {"backends.kahuna", "integrations.aiohttp"},
    "starlette": set(),
}
HEADER_HOME = {"_values.token"}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The whole syntax tree of *path*, read once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    """Every fencing_sdk module that *path* imports, in functions and for typing too."""
    known = {f"fencing_sdk.{name}" for name in modules()}
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by exact path, not relative to a package"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
    return {name.removeprefix("fencing_sdk.") for name in found & known}


def room(module: str) -> str:
    return module.split(".", 1)[0]


def allowed(importer: str, imported: str) -> bool:
    """Whether the module *importer* may import the module *imported*."""
    if room(importer) == "cli" and f"{imported}.".startswith(f"{CHECKER}."):
        return True
    if importer in {"", "__main__"} or room(importer) in EDGES:
        return room(imported) not in EDGES or room(importer) in {room(imported), "__main__"}
    return room(imported) == room(importer) or bool({room(imported), imported} & ROOMS[room(importer)])


def test_a_room_enters_only_rooms_above_it():
    above: set[str] = set()
    for name, enters in ROOMS.items():
        assert enters <= above, name
        above.add(name)


def test_every_module_has_a_room():
    homeless = {room(name) for name in modules()} - {"", "__main__", *ROOMS, *EDGES}
    assert not homeless


def test_imports_go_where_they_may():
    wrong = [
        f"{importer or 'fencing_sdk'} imports {imported}"
        for importer, path in modules().items()
        for imported in imports(path) - {importer}
        if not allowed(importer, imported)
    ]
    assert not wrong


def test_no_module_is_imported_by_what_it_imports():
    """Not by way of others either. A package's `__init__` counts as a module of its own."""
    below = {name: imports(path) - {name, ""} for name, path in modules().items() if name}
    begun, done = set(), set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in begun, " -> ".join((*trail, name))
        if name not in done:
            begun.add(name)
            for imported in below[name]:
                visit(imported, (*trail, name))
            begun.discard(name)
            done.add(name)

    for name in below:
        visit(name, ())


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("_lease", "_engine.heartbeat"),
        ("backends.memory", "_engine.engine"),
        ("guards.memory", "_lease"),
        ("guards.memory", "backends.memory"),
        ("_http.pool", "backends.kahuna"),
        ("_lease", "_http.pool"),
        ("_values.claim", "abc"),
        ("_client", "testing.faults"),
        ("_client", "backends"),
        ("", "cli"),
        ("cli.recordings", "testing.world"),
        ("integrations.asgi", "testing.history"),
    ],
)
def test_the_rule_itself_refuses_what_it_should(importer: str, imported: str):
    assert not allowed(importer, imported)


def test_the_checker_shares_no_code_with_what_it_checks():
    parts = {name: path for name, path in modules().items() if name == CHECKER or name.startswith(f"{CHECKER}.")}
    assert len(parts) >= 7
    strangers = {
        f"{name} imports {imported}"
        for name, path in parts.items()
        for imported in imports(path)
        if imported not in {*parts, "errors", ""}
    }
    assert not strangers


def test_nobody_imports_from_the_front_door():
    through_the_door = [
        name
        for name, path in modules().items()
        if room(name) not in EDGES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == "fencing_sdk"
    ]
    assert not through_the_door


@pytest.mark.parametrize("word", ONE_HOME)
def test_a_word_stays_in_its_home(word: str):
    used = {
        name
        for name, path in modules().items()
        for node in nodes(path)
        if (isinstance(node, ast.Name) and node.id == word)
        or (isinstance(node, ast.Attribute) and node.attr == word)
        or (isinstance(node, ast.alias) and node.name.split(".")[0] == word)
    }
    strangers = {
        name
        for name in used
        if room(name) not in {"testing", "cli"}
        and not any(name == home or name.startswith(f"{home}.") for home in ONE_HOME[word])
    }
    assert not strangers


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_is_imported_in_its_home_only(framework: str):
    users = {
        name
        for name, path in modules().items()
        for node in nodes(path)
        if (isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == framework)
        or (isinstance(node, ast.Import) and framework in {alias.name.split(".")[0] for alias in node.names})
    }
    homes = FRAMEWORKS[framework]
    assert not {name for name in users if not any(name == home or name.startswith(f"{home}.") for home in homes)}


def test_only_the_wire_knows_the_names_of_headers():
    writers = {
        name
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and str(node.value).lower() in {"fencing-token", "x-fencing-token"}
    }
    assert writers == HEADER_HOME


def test_the_two_sides_of_http_meet_in_the_wire_and_the_problem_alone():
    holders, resources = (imports(modules()[f"integrations.{side}"]) for side in ("_outgoing", "_incoming"))
    assert not {name for name in holders if room(name) == "guards" or name.startswith("integrations.")}
    assert not resources & {"_lease", "_client", "integrations._outgoing"}


def test_only_the_clock_reads_time():
    readers = {
        name
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.alias) and node.name == "time"
    }
    assert {name for name in readers if room(name) not in EDGES} <= TIME_HOME


def test_no_module_draws_from_the_random_numbers_of_the_program():
    drawers = {
        name
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.alias) and node.name == "random"
    }
    assert {name for name in drawers if room(name) not in EDGES} == RANDOM_HOME


@pytest.mark.parametrize("banned", ["core", "common", "utils", "helpers", "base", "manager", "types", "misc"])
def test_no_module_is_a_drawer(banned: str):
    assert not [name for name in modules() if name.split(".")[-1].strip("_") == banned]


def test_modules_stay_readable():
    long = {name: lines for name, path in modules().items() if (lines := path.read_text().count("\n")) > 450}
    assert not long, "split it along a noun"


def test_functions_stay_short():
    long = []
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (length := body[-1].end_lineno - body[0].lineno + 1) > 50:
                    long.append((name, node.name, length))
    assert not long
