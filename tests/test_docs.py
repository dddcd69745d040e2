"""Every Python block of the README and of docs/ runs, and every example runs and keeps its promises."""

import ast
import asyncio
import gc
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from on_stores import OnEtcd, OnMemory, OnMysql, OnPostgresql, OnRedis, OnSqlite, OnZooKeeper
from store_bench import StoreBench

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")])
WITH_A_SERVER = {"celery_invoices.py", "seat_booking_postgresql.py"}  # run by a test that has one
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in WITH_A_SERVER)
BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


URL = re.compile(r'"(memory://|sqlite:///locks\.db)"')
"""The store in the code of a page that holds for every store."""


def blocks(page: Path, url: str = r"\1") -> list[CodeType]:
    """Compile the blocks of *page* at their own lines; top-level await is allowed, ``skip`` is not run."""
    text = URL.sub(f'"{url}"', page.read_text())
    compiled = []
    for match in BLOCK.finditer(text):
        if "skip" in match["info"]:
            continue
        line = text.count("\n", 0, match.start("code"))
        source = "\n" * line + match["code"]
        compiled.append(compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    return compiled


def run(page: Path, url: str = r"\1") -> None:
    """Run the blocks one after the other, in one event loop if one of them awaits at its top level."""
    codes, module = blocks(page, url), ModuleType("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "docs", module)  # Litestar looks there for what the annotations of a handler mean
        if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
            asyncio.run(awaited(codes, vars(module)))
        else:
            for code in codes:
                exec(code, vars(module))


async def awaited(codes: list[CodeType], namespace: dict[str, object]) -> None:
    for code in codes:
        result = eval(code, namespace)
        if asyncio.iscoroutine(result):
            await result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run(page)
    gc.collect()  # what a page leaves open is reported here and now, not in a test that runs later


class OnEveryStore:
    """Pages about locks, recipes and guards. What a page shows must not depend on the store that its example names."""

    passes_on = True
    """False where leases do not change hands, as the page about that says."""

    @pytest.mark.parametrize("page", ["README", "guarantees", "guards", "operations", "threads", "recipes/*"])
    def test_the_code_of_a_page_runs(self, page: str, bench: StoreBench, tmp_path: Path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for path in (path for path in PAGES if path.match(f"{page}.md")):
            if self.passes_on or path.name != "detached.md":
                run(path, bench.url)
        gc.collect()


class TestOnMemory(OnMemory, OnEveryStore): ...


class TestOnSqlite(OnSqlite, OnEveryStore): ...


class TestOnRedis(OnRedis, OnEveryStore): ...


class TestOnPostgresql(OnPostgresql, OnEveryStore): ...


class TestOnMysql(OnMysql, OnEveryStore): ...


class TestOnEtcd(OnEtcd, OnEveryStore):
    passes_on = False


class TestOnZooKeeper(OnZooKeeper, OnEveryStore):
    passes_on = False


def test_a_page_or_example_with_locks_in_memory_says_that_they_are_those_of_one_process():
    """Four workers of gunicorn with such a client are four holders at once."""
    shown = [path for path in (*PAGES, *EXAMPLES) if '("memory://' in path.read_text()]
    assert [path.name for path in shown if "within one process" not in path.read_text().lower()] == []


def test_each_block_of_the_readme_is_a_whole_file_that_can_be_run_again(tmp_path: Path):
    found = [match["code"] for match in BLOCK.finditer((ROOT / "README.md").read_text())]
    assert found
    for number, code in enumerate(found):
        file = tmp_path / f"block_{number}.py"
        file.write_text(code)
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-W", "error", str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=500
            )
            assert (done.returncode, done.stderr) == (0, ""), f"block {number}"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs(example: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_programs_that_a_page_names_are_there(page: Path):
    text = page.read_text()
    modules = {name.replace(".", "/") for name in re.findall(r"python -m ((?:tests|fencing_sdk)[\w.]*)", text)}
    scripts = re.findall(r"python ((?:tests|examples)/\S+\.py)", text)
    benchmarks = re.findall(r"python -m benchmarks ([a-z]+)", text)
    assert [
        name for name in modules if not any((ROOT / f"{name}{end}").exists() for end in (".py", "/__main__.py"))
    ] == []
    assert not [path for path in scripts if not (ROOT / path).exists()]
    assert not [name for name in benchmarks if not list((ROOT / "benchmarks").glob(f"{name}*"))]


def test_every_example_is_on_the_page_of_the_examples():
    shown = re.findall(r"\{literalinclude\} \.\./examples/(\S+)", (ROOT / "docs" / "examples.md").read_text())
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
