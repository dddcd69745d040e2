"""Imports go down the layers, never in a circle, and some modules are imported in one place only."""

import ast
import functools
from pathlib import Path

import pytest

import fencing_sdk

PACKAGE = Path(fencing_sdk.__file__).parent

GROUND = ("errors", "_values", "events", "abc", "_name_template", "_recording")
STORES = ("_http", "_etcd", "_kahuna", "_mysql", "backends", "guards", "diagnosis")
HOLDER = ("_lease_ticket", "_lease_state", "_lease", "_engine", "_lock", "_arguments", "recipes")
HOLDER += ("_client",)
FRONT = ("_connect", "sync", "rows")
ORDER = GROUND + STORES + HOLDER + FRONT
"""Rooms, which are folders or modules at the front. A room imports only from rooms before it."""
EDGES = ("integrations", "testing", "cli", "_pyinstaller")
"""Edges import from every room, but not from each other, and no room imports from them."""

HOMES = {
    "time": {"_values.clock"},
    "random": {"_values.clock"},  # drawing from the process's generator changes what a seeded program does
    "threading": {"_engine.timers", "_values.drivers", "backends.sqlite", "backends.zookeeper", "diagnosis", "guards"}
    | {"sync", "rows.sync"},
    "CancelScope": {"_values.tasks", "_engine.lease_scope", "_lease_state"},
    "ContextVar": {"_lease"},
    "tenacity": {"_engine"},
    "aiohttp": {"_http", "_etcd", "_kahuna", "integrations"},
    "fastapi": {"integrations.fastapi"},
    "django": {"integrations.django", "rows.django"},
    "requests": {"integrations.clients"},
    "httpx": set(),
    "starlette": set(),
    "kazoo": {"backends.zookeeper", "recipes.old_locks"},
    "asyncmy": {"_mysql"},
    "sqlalchemy": {"recipes.old_locks", "rows.sqlalchemy"},
    "opentelemetry": {"integrations.opentelemetry"},
    "prometheus_client": {"integrations.prometheus"},
}
"""The rooms and modules that may import a module or a name. Edges may tell the time and start threads."""
FREE_AT_EDGES = {"time", "random", "threading", "CancelScope", "ContextVar"}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(modules()[module].read_text())))


@functools.cache
def imports(module: str) -> set[str]:
    """Return every module of the package that *module* imports, in functions and for typing too."""
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: import by exact path, not relative to a package"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if name.removeprefix("fencing_sdk.") in modules()} or {node.module}
    found = {name.removeprefix("fencing_sdk.") for name in found if name.startswith("fencing_sdk")}
    return {"" if name == "fencing_sdk" else name for name in found} - {module}


def room(module: str) -> str:
    return module.split(".", 1)[0]


def allowed(importer: str, imported: str) -> bool:
    above, below = room(importer), room(imported)
    if above in {"", "__main__", *EDGES}:
        return below not in EDGES or below == above or above == "__main__"
    if below not in ORDER or ORDER.index(below) > ORDER.index(above):
        return False
    if above in HOLDER or above == "sync":
        return below not in STORES or below == "diagnosis"
    return above == below or (above, below) != ("guards", "backends")


def test_every_module_has_a_room():
    assert {room(name) for name in modules()} <= {"", "__main__", *ORDER, *EDGES}


def test_imports_go_down():
    wrong = [
        f"{importer or 'fencing_sdk'} imports {imported or 'fencing_sdk'}"
        for importer in modules()
        for imported in imports(importer)
        if not allowed(importer, imported)
    ]
    assert not wrong


def test_no_module_is_imported_by_what_it_imports():
    """Directly or through others. A package's `__init__` counts as a module of its own."""
    begun, done = set(), set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in begun, " -> ".join((*trail, name))
        if name not in done:
            begun.add(name)
            for imported in imports(name) - {""}:
                visit(imported, (*trail, name))
            begun.discard(name)
            done.add(name)

    for name in modules().keys() - {""}:
        visit(name, ())


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("_lease", "_engine.heartbeat"),
        ("_lease", "_http.requests"),
        ("_values.claim", "abc"),
        ("_http.requests", "backends.kahuna"),
        ("backends.memory", "_engine.engine"),
        ("backends.memory", ""),
        ("guards.memory", "_lease"),
        ("guards.memory", "backends.memory"),
        ("_client", "testing.faults"),
        ("_client", "backends"),
        ("", "cli"),
        ("cli.demo", "testing.world"),
    ],
)
def test_the_rule_itself_refuses_what_it_should(importer: str, imported: str):
    assert not allowed(importer, imported)


@pytest.mark.parametrize("word", HOMES)
def test_a_word_stays_in_its_home(word: str):
    strangers = {
        name
        for name in modules()
        if word in imported_words(name)
        and not any(f"{name}.".startswith(f"{home}.") for home in HOMES[word])
        and not (word in FREE_AT_EDGES and room(name) in EDGES)
    }
    assert not strangers


@functools.cache
def imported_words(module: str) -> set[str]:
    """Return the top-level modules and names that *module* imports, and classes it reaches as ``anyio.CancelScope``."""
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute) and node.attr[0].isupper():
            found.add(node.attr)
    return found


def test_only_the_wire_knows_the_names_of_headers():
    writers = {
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Constant) and str(node.value).lower() in {"fencing-token", "x-fencing-token"}
    }
    assert writers == {"_values.token"}


def test_the_two_sides_of_http_meet_in_the_wire_and_the_problem_alone():
    holders, resources = (imports(f"integrations.{side}") for side in ("clients", "_incoming"))
    shared = {"integrations._problem"}
    assert not {name for name in holders - shared if room(name) == "guards" or name.startswith("integrations.")}
    assert not resources & {"_lease", "_client", "integrations.clients"}


def test_each_task_gets_a_name():
    """So that a list of tasks shows whose they are: ``python -m asyncio ps``."""
    makers = {"create_task", "ensure_future", "Task"}
    nameless = [
        f"{module}:{node.lineno}"
        for module in modules()
        if room(module) != "testing"  # its loop runs what it is given
        for node in nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in makers
        and "name" not in {keyword.arg for keyword in node.keywords}
    ]
    assert nameless == []
