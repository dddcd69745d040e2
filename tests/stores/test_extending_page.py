"""The backend on the page about backends passes the suite, whichever plugin runs the tests."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fencing_sdk.abc import Claim
from fencing_sdk.testing import Comparison

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
ANYIO = "\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
AUTO = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function")
STRICT = ("asyncio_mode=strict", "asyncio_default_fixture_loop_scope=function")
PLUGINS = {
    "asyncio, strict mode": (STRICT, "\npytestmark = pytest.mark.asyncio\n"),
    "anyio": (("addopts=-p no:asyncio",), ANYIO + "\npytestmark = pytest.mark.anyio\n"),
}


CODE = "".join(BLOCKS)


def run(folder: Path, code: str, options: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n" + "\n".join(options))
    (folder / "test_kv.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)


PAGE_MODULE: dict[str, Any] = {"__name__": __name__}
exec(CODE, PAGE_MODULE)
TestKvBackend = PAGE_MODULE["TestKvBackend"]  # pytest collects its tests here, one by one


class TestWithoutALine(TestKvBackend):
    """The page in its simplest form: one owner alone, and waiters that try again."""

    lines = shares = passes_on = False

    @pytest.fixture
    def reopen(self, kv):
        simple = type("Simple", (PAGE_MODULE["KvBackend"],), {"modes": {"lock"}, "rings": False, "pass_on": None})
        return lambda: simple(kv)


def test_the_page_and_its_backend_are_short():
    """A store of about 120 lines, on a page that is read in one go."""
    assert len(PAGE.read_text().splitlines()) <= 300
    assert max(len(block.splitlines()) for block in BLOCKS) <= 120
    assert len([name for name in dir(TestKvBackend) if name.startswith("test_")]) > 100


async def test_it_answers_as_the_rules_in_long_histories_too():
    kv = PAGE_MODULE["Kv"]()
    clients = [PAGE_MODULE["KvBackend"](kv) for _ in range(2)]
    for seed in range(200):
        await Comparison(clients, seed, lambda now: setattr(kv, "clock", now)).play()


async def test_a_keep_without_an_answer_takes_no_other_one_along():
    """The suite cannot make one key fail, so it would not see it."""
    kv = PAGE_MODULE["Kv"]()
    backend = PAGE_MODULE["KvBackend"](kv)
    claims = [Claim(name, 60.0) for name in "abc"]
    for claim in claims:
        await backend.draw(claim)
    made, asked = kv.get, []

    async def breaks(key: str) -> object:
        asked.append(key)
        if len(asked) == 2:
            raise ConnectionError
        return await made(key)

    kv.get = breaks
    answers = await backend.keep([(claim, 0) for claim in claims])
    assert [getattr(answer, "token", None) for answer in answers] == [1, None, 1]


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_suite_runs_under_any_plugin(tmp_path: Path, plugin: str):
    options, lines = PLUGINS[plugin]
    done = run(tmp_path, CODE + lines, options, "-k", "declared or token or outage or bell or odd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 15


HALF = """
import pytest
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import BackendSuite

class TestNothing(BackendSuite): pass

class TestHalf(BackendSuite):
    @pytest.fixture
    def backend(self):
        return MemoryBackend()
"""


@pytest.mark.slow
def test_a_suite_without_its_fixtures_says_what_to_provide(tmp_path: Path):
    done = run(tmp_path, HALF, AUTO, "-k", "survive or processes or outage")
    assert done.returncode == 1
    for missing in ("fixture 'backend'", "fixture 'reopen'", "fixture 'url'", "break_store()"):
        assert f"provide a {missing}" in done.stdout or f"provide {missing}" in done.stdout


@pytest.mark.slow
def test_a_failed_promise_is_explained_with_its_values(tmp_path: Path):
    assert "last + 1)" in CODE
    done = run(tmp_path, CODE.replace("last + 1)", "7)"), AUTO, "-k", "tokens_grow_over_releases")
    assert done.returncode == 1
    assert "assert 7 < 7" in done.stdout
