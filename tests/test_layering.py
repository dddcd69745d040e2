"""The house keeps its floors: imports go down, never up or sideways, and some words have one home."""

import ast
from pathlib import Path

import pytest

import fencing_sdk

PACKAGE = Path(fencing_sdk.__file__).parent

FLOORS = [
    {"errors", "_claim", "_clock", "_fork", "_cancellation", "_wakeup"},
    {"_timing", "_names", "_events", "_wire", "_schedule", "_places", "_loops"},
    {"abc", "_template", "_recording"},
    {"_lease_state", "_stall", "_alarms", "_suspend", "_acquisition_report", "_queue_place"},
    {"_lease", "_lease_report", "_errands", "_cohort"},
    {"_current", "_heartbeat", "_acquire", "_fences", "_closing", "_releases"},
    {"_lease_scope"},
    {"_engine"},
    {"_lock", "_arguments"},
    {"_client"},
]
GROUND = {name for floor in FLOORS[:3] for name in floor} - {"_template", "_recording"}
SHARED = "_rest"
"""A room below the backends and the guards, which both may enter."""
EDGES = ("integrations", "testing", "cli")
CHECKER = "testing.history"  # imports nothing but the errors, so that the command line may use it too

ONE_HOME = {
    "CancelScope": {"_cancellation", "_lease_state", "_suspend"},  # the lease's, the shield around a release, sleeps
    "ContextVar": {"_current"},
    "tenacity": {"_acquire"},
    "secrets": {"_claim"},
    "aiohttp": {"_rest", "backends.kahuna", "integrations"},
    "threading": {"_stall", "backends.sqlite", "backends.zookeeper", "guards.memory", "guards.files", "cli"},
}
TIME_HOME = {"_clock"}
FRAMEWORKS = {
    "aiohttp": {"_rest", "backends.kahuna", "integrations.aiohttp"},
    "fastapi": {"integrations.fastapi"},
    "httpx": set(),  # recognised by what its objects can do
    "httpx2": set(),
    "kazoo": {"backends.zookeeper"},
    "multidict": {"backends.kahuna", "integrations.aiohttp"},
    "starlette": set(),
}
HEADER_HOME = {"_wire"}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Every fencing_sdk module that *path* imports, in functions and for typing too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by exact path, not relative to a package"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("fencing_sdk.") for name in found if name.startswith("fencing_sdk")} & modules().keys()


def floor(module: str) -> int | None:
    return next((level for level, names in enumerate(FLOORS) if module in names), None)


def room(module: str) -> str:
    return module.split(".", 1)[0]


def allowed(importer: str, imported: str) -> bool:
    if room(importer) == "cli" and imported == CHECKER:
        return True
    if importer == "" or room(importer) in EDGES or importer == "__main__":
        return room(imported) not in EDGES or room(importer) in {room(imported), "__main__"}
    if room(importer) in {"backends", "guards"}:
        return imported in GROUND or room(imported) in {room(importer), SHARED}
    if room(importer) == SHARED:
        return imported in GROUND or room(imported) == SHARED
    above = floor(importer)
    below = floor(imported)
    if importer == "_client" and imported == "backends":
        return True
    return above is not None and below is not None and below < above


def test_every_module_of_the_engine_has_a_floor():
    homeless = [
        name
        for name in modules()
        if name not in {"", "__main__"}
        and room(name) not in {"backends", "guards", SHARED, *EDGES}
        and floor(name) is None
    ]
    assert not homeless


def test_imports_go_down():
    wrong = [
        f"{importer or 'fencing_sdk'} imports {imported}"
        for importer, path in modules().items()
        for imported in imports(path) - {importer}
        if not allowed(importer, imported)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("_lease", "_heartbeat"),
        ("backends.memory", "_engine"),
        ("guards.memory", "_lease"),
        ("guards.memory", "backends.memory"),
        ("_rest.pool", "backends.kahuna"),
        ("_lease", "_rest.pool"),
        ("_claim", "errors"),
        ("_client", "testing.faults"),
        ("", "cli"),
        ("cli.check", "testing.world"),
        ("integrations.asgi", "testing.history"),
    ],
)
def test_the_rule_itself_refuses_what_it_should(importer: str, imported: str):
    assert not allowed(importer, imported)


def test_the_checker_shares_no_code_with_what_it_checks():
    parts = {name: path for name, path in modules().items() if name == CHECKER or name.startswith(f"{CHECKER}.")}
    assert len(parts) >= 8
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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "fencing_sdk"
    ]
    assert not through_the_door


@pytest.mark.parametrize("word", ONE_HOME)
def test_a_word_stays_in_its_home(word: str):
    used = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
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
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == framework)
        or (isinstance(node, ast.Import) and framework in {alias.name.split(".")[0] for alias in node.names})
    }
    homes = FRAMEWORKS[framework]
    assert not {name for name in users if not any(name == home or name.startswith(f"{home}.") for home in homes)}


def test_only_the_wire_knows_the_names_of_headers():
    writers = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and str(node.value).lower() in {"fencing-token", "x-fencing-token"}
    }
    assert writers == HEADER_HOME


def test_the_two_sides_of_http_meet_in_the_wire_and_the_problem_alone():
    holders, resources = (imports(modules()[f"integrations.{side}"]) for side in ("_outgoing", "_incoming"))
    assert not {name for name in holders if room(name) == "guards" or name.startswith("integrations.")}
    assert not resources & {"_current", "_lease", "_client", "integrations._outgoing"}


def test_only_the_clock_reads_time():
    readers = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.alias) and node.name == "time"
    }
    assert {name for name in readers if room(name) not in EDGES} <= TIME_HOME


@pytest.mark.parametrize("banned", ["core", "common", "utils", "helpers", "base", "manager", "types", "misc"])
def test_no_module_is_a_drawer(banned: str):
    assert not [name for name in modules() if name.split(".")[-1].strip("_") == banned]


def test_modules_stay_readable():
    long = {name: lines for name, path in modules().items() if (lines := path.read_text().count("\n")) > 420}
    assert not long, "split it along a noun"


def test_functions_stay_short():
    long = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (length := body[-1].end_lineno - body[0].lineno + 1) > 50:
                    long.append((name, node.name, length))
    assert not long
