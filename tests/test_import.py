"""Importing the package is cheap: no driver, no framework, no tool comes along, and nothing starts."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

LOOK = """
import sys, threading, logging
before = set(sys.modules)
import fencing_sdk
facts = {
    "modules": sorted(set(sys.modules) - before),
    "threads": threading.active_count(),
    "handlers": len(logging.getLogger().handlers),
    "hook": sys.excepthook is sys.__excepthook__,
}
import json
print(json.dumps(facts))
"""

NOT_NEEDED_YET = [
    "aiohttp",
    "aiosqlite",
    "argparse",
    "fastapi",
    "httpx",
    "httpx2",
    "hashlib",
    "hypothesis",
    "importlib.metadata",
    "ipaddress",
    "json",
    "pathlib",
    "pytest",
    "rich",
    "sqlalchemy",
    "sqlite3",
    "starlette",
    "trio",
    "unittest",
    "urllib.parse",
    "uvloop",
]

EVERY_PROGRAM_NEEDS = {
    "_arguments",
    "_client",
    "_connect",
    "_engine",
    "_lease",
    "_lease_state",
    "_lease_ticket",
    "_lock",
    "_name_template",
    "_values",
    "abc",
    "errors",
}
"""The rooms of the package that come with its import."""

FROM_EXTRAS = {  # the module, what it needs -> what to install
    ("backends.postgresql", "asyncpg"): "'fencing-sdk[postgresql]'",
    ("backends.redis", "hiredis"): "'fencing-sdk[redis]'",
    ("backends.redis", "redis"): "'fencing-sdk[redis]'",
    ("backends.zookeeper", "kazoo"): "'fencing-sdk[zookeeper]'",
    ("integrations.django", "django"): "django",
    ("integrations.fastapi", "fastapi"): "'fencing-sdk[fastapi]'",
    ("integrations.opentelemetry", "opentelemetry"): "'fencing-sdk[opentelemetry]'",
    ("integrations.prometheus", "prometheus_client"): "'fencing-sdk[prometheus]'",
    ("rows.django", "django"): "django",
    ("rows.sqlalchemy", "sqlalchemy"): "'fencing-sdk[sqlalchemy]'",
}

IMPORT_WITHOUT = """
import importlib, json, sys
said = []
for module, missing in json.loads(sys.argv[1]):
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == missing}
    sys.modules[missing] = None
    try:
        importlib.import_module(f"fencing_sdk.{module}")
    except ModuleNotFoundError as error:
        said.append(str(error))
    for name in [missing, *(name for name in sys.modules if name.startswith(f"fencing_sdk.{module}"))]:
        del sys.modules[name]
    sys.modules |= kept
print(json.dumps(said))
"""


@cache
def facts() -> dict[str, object]:
    command = [sys.executable, "-W", "error", "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NOT_NEEDED_YET)
def test_the_import_loads_nothing_that_is_not_needed_yet(name):
    assert not [module for module in facts()["modules"] if module == name or module.startswith(f"{name}.")]


def ours() -> list[str]:
    return [module for module in facts()["modules"] if module.startswith("fencing_sdk.")]


def test_the_import_loads_what_every_program_needs_and_no_store_recipe_event_or_tool():
    assert {module.split(".")[1] for module in ours()} == EVERY_PROGRAM_NEEDS


def test_the_import_starts_and_installs_nothing():
    assert (facts()["threads"], facts()["handlers"], facts()["hook"]) == (1, 0, True)


def test_connecting_to_memory_loads_no_database():
    code = (
        "import sys; from fencing_sdk import connect; connect('memory://')\n"
        "print([name for name in ('sqlite3', 'sqlalchemy', 'aiohttp') if name in sys.modules])"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    unmeasured = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")
    }  # it needs sqlite3
    done = subprocess.run(command, env=unmeasured, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["asgi", "clients", "messages", "wsgi"])
def test_an_integration_that_needs_no_framework_loads_none(module):
    code = (
        f"import sys; import fencing_sdk.integrations.{module}\n"
        "others = ('aiohttp', 'django', 'fastapi', 'httpx', 'httpx2', 'requests', 'starlette')\n"
        "print([name for name in others if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_costs_a_bounded_number_of_modules():
    """Counted, not timed: ours, and those of anyio, tenacity and asyncio."""
    assert len(ours()) <= 55
    assert len(facts()["modules"]) < 200


def test_a_recipe_is_loaded_alone():
    code = (
        "import sys; from fencing_sdk import connect\n"
        "from fencing_sdk.recipes import Semaphore\n"
        "connect('memory://').rwlock('a')\n"
        "print(sorted(name for name in sys.modules if name.startswith('fencing_sdk.recipes.')))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['fencing_sdk.recipes.shares']"


def test_the_room_of_recipes_lists_what_it_has_not_loaded_yet():
    code = (
        "from fencing_sdk import recipes; assert {*recipes.__all__} <= {*dir(recipes)}\n"
        "assert 'Election' not in vars(recipes)\n"
        "from fencing_sdk.recipes import *\n"
        "assert Election is recipes.Election is vars(recipes)['Election']"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_rooms_of_the_door_are_read_as_its_attributes():
    code = (
        "import fencing_sdk; fencing_sdk.events.Lost; fencing_sdk.recipes; fencing_sdk.backends; fencing_sdk.diagnosis"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_module_whose_driver_is_missing_names_what_to_install():
    command = [sys.executable, "-c", IMPORT_WITHOUT, json.dumps(list(FROM_EXTRAS))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for (_, missing), install, said in zip(FROM_EXTRAS, FROM_EXTRAS.values(), json.loads(done.stdout), strict=True):
        assert said.startswith(f"{missing} is not installed; run: pip install {install}")
