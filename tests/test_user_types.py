"""What a strict type checker says about a user's code, where no driver is installed that the user does not need."""

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from once import once_per_run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def required(name: str, seen: set[str]) -> Iterator[str]:
    """The distributions that *name* needs without any of its extras, and itself."""
    name = canonicalize_name(name)
    if name in seen:
        return
    seen.add(name)
    yield name
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from required(requirement.name, seen)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter with the package and what it needs, and nothing else: links, so there is nothing to install."""
    return once_per_run(tmp_path_factory, "user-environment", make_environment) / "bin" / "python"


def make_environment(home: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(home)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    (site / "fencing_sdk").symlink_to(ROOT / "fencing_sdk")
    for name in required("fencing-sdk", set()):
        if name == "fencing-sdk":
            continue
        found = distribution(name)
        for top in {file.parts[0] for file in found.files if file.parts[0] not in {"..", "__pycache__"}}:
            (site / top).symlink_to(found.locate_file(top))


EVERY_GUARD = """
import sqlite3

from fencing_sdk.guards.etcd import EtcdGuard, put
from fencing_sdk.guards.files import FileGuard
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import FenceColumn, SqlGuard


async def write(connection: sqlite3.Connection, token: int) -> None:
    await SqlGuard("app.db").admit(connection, "a", token)
    await SqlGuard("app.db").raise_in(connection, "a", token)
    await FenceColumn("seats", key="seat").written(connection, 42, token, connection.execute("UPDATE ..."))
    await RedisGuard("redis://localhost").execute("a", token, ("SET", "a", 1))
    await EtcdGuard("etcd://localhost").execute("a", token, put("a", "1"))
    await FileGuard("folder").write("a", token, b"1")
    MemoryGuard().write("a", token, print, 1)
"""


@pytest.mark.slow
def test_the_code_of_users_passes_a_strict_check_without_any_extra(python, tmp_path):
    """The README's, and a call of every guard: an installed driver must not be needed to know what a guard takes."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(blocks) >= 2
    for number, code in enumerate([*blocks, EVERY_GUARD]):
        (tmp_path / f"code_{number}.py").write_text(code)
    assert complaints(tmp_path, python, "strict", files=len(blocks) + 1) == []


def complaints(folder: Path, python: Path | str, mode: str, files: int) -> list[str]:
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": mode}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", str(python), "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == files
    return [f"{problem['file']}: {problem['message']}" for problem in report["generalDiagnostics"]]


@pytest.mark.slow
def test_the_service_of_the_fastapi_page_passes_a_check(tmp_path):
    """A function has no aliases of types, so its annotations stand where they are used."""
    (tmp_path / "shop.py").write_text(BLOCK.findall((ROOT / "docs" / "fastapi.md").read_text())[0])
    assert complaints(tmp_path, sys.executable, "standard", files=1) == []


def test_the_environment_has_no_driver(python):
    """Else the check above would show nothing."""
    code = "import fencing_sdk; from importlib.util import find_spec as f; print(*map(f, {drivers}))"
    drivers = ["asyncpg", "kazoo", "psycopg", "redis", "sqlalchemy", "valkey"]
    done = subprocess.run([python, "-c", code.format(drivers=drivers)], capture_output=True, text=True)
    assert done.stdout.split() == ["None"] * len(drivers), done.stderr
