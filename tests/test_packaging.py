"""The wheel works without the source tree: everything it needs is inside, and the console script starts."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from once import once_per_run

from fencing_sdk._pyinstaller import hook_dirs
from fencing_sdk._values.drivers import WORKS
from fencing_sdk.backends import BUILTIN, GROUP

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, built from a copy of the tree."""
    return once_per_run(tmp_path_factory, "wheel", unpack_wheel) / "site"


def unpack_wheel(out: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")


def python(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=installed if installed.is_dir() else installed.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_package_runs_from_the_wheel(installed: Path):
    code = """
import asyncio, fencing_sdk, sys
async def main():
    async with fencing_sdk.connect("sqlite:///locks.db") as locks:
        async with locks.lock("a") as lease:
            print(lease.token > 0, fencing_sdk.__file__)
asyncio.run(main())
"""
    done = python(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "True"
    assert done.stdout.split()[1].startswith(str(installed))


FROM_A_ZIP_FILE = """
import importlib, sys
from fencing_sdk import ConfigurationError, cli
from fencing_sdk.backends import BUILTIN
from fencing_sdk.guards.redis._scripts import EXECUTE, CheckedScript
for each in {builtin.module: builtin for builtin in BUILTIN.values()}:
    importlib.import_module(each)
CheckedScript(EXECUTE)
sys.argv = ["fencing", "run", "a", "--url", "sqlite:///locks.db", "--", "echo", "done"]
sys.exit(cli.main())
"""


def test_the_package_runs_from_a_zip_file(installed: Path, tmp_path: Path):
    archive = Path(shutil.make_archive(str(tmp_path / "app"), "zip", installed))
    done = python(archive, "-c", FROM_A_ZIP_FILE)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize(
    ("left_out", "url", "says"),
    [
        ("backends/memory.py", "memory://", "fencing_sdk.backends.memory was left out .* --collect-submodules="),
        ("backends/redis", "redis://host", "fencing_sdk.backends.redis was left out .* --include-package="),
        ("backends/sqlite/schema.sql", "sqlite:///a.db", "backends/sqlite/schema.sql was left out .* --collect-data="),
        ("backends/mysql/schema.sql", "mysql://host/db", "mysql/schema.sql was left out .* --include-package-data="),
    ],
)
def test_a_part_that_a_packager_has_left_out_is_named(installed: Path, tmp_path: Path, left_out: str, url: str, says):
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in (installed / "fencing_sdk").rglob("*"):
            name = path.relative_to(installed / "fencing_sdk").as_posix()
            if not name.startswith(left_out) and path.is_file():
                zipped.write(path, f"fencing_sdk/{name}")
    done = python(archive, "-c", f"import fencing_sdk; fencing_sdk.connect({url!r})")
    assert re.search(rf"^fencing_sdk.errors.ConfigurationError: .*{says}", done.stderr, re.MULTILINE), done.stderr


def test_pyinstaller_finds_a_hook_that_packs_every_store(installed: Path, monkeypatch: pytest.MonkeyPatch):
    """PyInstaller is no part of the tests: docs/deploying.md names the version with which a program was packed."""
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "[pyinstaller40]\nhook-dirs = fencing_sdk._pyinstaller:hook_dirs" in entry_points.read_text()
    assert hook_dirs() == [str(ROOT / "fencing_sdk" / "_pyinstaller")]
    hooks = SimpleNamespace(
        collect_data_files=lambda package: [(f"{package}/schema.sql", package)],
        collect_entry_point=lambda group: ([(group, ".")], ["a_plugin"]),
        collect_submodules=lambda package: [f"{package}.part"],
    )
    monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", hooks)
    packed = runpy.run_path(str(installed / "fencing_sdk" / "_pyinstaller" / "hook-fencing_sdk.py"))
    assert packed["datas"] == [("fencing_sdk/schema.sql", "fencing_sdk"), (GROUP, ".")]
    found = {*packed["hiddenimports"]} - {"a_plugin", "asyncmy.part"}
    assert {builtin.module for builtin in BUILTIN.values()} < found
    assert [name for name in found if find_spec(name) is None] == []


def test_the_wheel_has_types_scripts_and_a_licence(installed: Path):
    package = installed / "fencing_sdk"
    assert (package / "py.typed").exists()
    assert {path.relative_to(package) for path in package.rglob("*.lua")} == {
        path.relative_to(ROOT / "fencing_sdk") for path in (ROOT / "fencing_sdk").rglob("*.lua")
    }
    assert list(package.rglob("*.lua"))
    metadata = next(installed.glob("*.dist-info"))
    assert "fencing = fencing_sdk.cli:main" in (metadata / "entry_points.txt").read_text()
    assert list(metadata.rglob("LICENSE"))


def test_a_package_index_shows_a_readme_whose_links_lead_somewhere(installed: Path):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    shown = metadata.read_text().partition("\n\n")[2]
    links = re.findall(r"!?\[[^\[\]]+\]\(([^)]+)\)", shown)
    assert not [link for link in links if not link.startswith("https://")]
    assert "Guarantees, what they need" in shown, "the text of a link stays"
    assert "source archive" in shown
    assert "locks.lock(name, ttl=15, wait=5, fences=[seats])" in shown, "code looks like links, and stays"


def test_drivers_that_are_used_from_the_inside_are_bounded_as_their_errors_say():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["redis"] == [f"redis[hiredis]{WORKS['redis']}"]
    assert extras["zookeeper"] == [f"kazoo{WORKS['kazoo']}"]
    for works in WORKS.values():
        assert re.fullmatch(r">=[\d.]+,<[\d.]+", works)


def test_the_wheel_holds_nothing_but_the_package(installed: Path):
    assert {path.name for path in installed.iterdir()} <= {
        "fencing_sdk",
        "locks.db",
        "locks.db-wal",
        "locks.db-shm",
    } | {path.name for path in installed.glob("*.dist-info")}


def test_the_simulation_and_its_broken_variants_stay_with_the_tests(installed: Path):
    modules = [path.relative_to(installed).as_posix() for path in installed.rglob("*.py")]
    assert not [module for module in modules if "simulation" in module or "broken" in module or "judge" in module]


def test_the_console_script_starts_from_the_wheel(installed: Path):
    done = python(installed, "-m", "fencing_sdk", "--help")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "run" in done.stdout
