"""The guard on the page about guards passes the suite."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "guards.md"
OWN = PAGE.read_text().partition("## A guard of your own")[2]
CODE = "".join(re.findall(r"^```python\n(.*?)^```", OWN, re.MULTILINE | re.DOTALL))
INI = "[pytest]\nasyncio_mode=auto\nasyncio_default_fixture_loop_scope=function\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_bucket.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--tb=short"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50)


def test_the_guard_on_the_page_passes_its_suite(tmp_path: Path):
    done = run(tmp_path, CODE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 40
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("protection", "without", "promise"),
    [
        ("admitted(resource, token, fence)", "check_token(token)", "test_a_lower_token_is_refused"),
        ("if self.objects.get(key, (None, 0))[1] != version:", "if False:", "test_no_update_is_lost"),
    ],
)
def test_without_one_of_its_protections_it_does_not(tmp_path: Path, protection: str, without: str, promise: str):
    assert protection in CODE
    done = run(tmp_path, "from fencing_sdk._values.token_wire import check_token\n" + CODE.replace(protection, without))
    assert done.returncode == 1
    assert f"FAILED test_bucket.py::TestBucketGuard::{promise}" in done.stdout


SILENT = """
from fencing_sdk.testing import GuardSuite

class TestNothing(GuardSuite): pass
"""


def test_a_suite_without_its_fixture_says_what_to_provide(tmp_path: Path):
    done = run(tmp_path, SILENT)
    assert done.returncode == 1
    assert "provide a fixture 'guard'" in done.stdout
