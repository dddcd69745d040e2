"""The plugin in a project of its own: real pytest in its own process, on a service with a bug and on the mended one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
BLOCK = re.compile(r"^```python skip\n# (?P<file>[\w/]+\.py)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
ALONE = "--disable-plugin-autoload"
IN_PROJECT = 'pytest_plugins = ["fencing_sdk.testing.plugin"]\n'


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    """Run the tests in *folder*; no configuration of ours is in reach."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-c", "/dev/null"]
    command += [f"--rootdir={folder}", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


def write_project(folder: Path, **files: str) -> None:
    for name, text in {"conftest": IN_PROJECT, **files}.items():
        (folder / f"{name}.py").write_text(text)


DJANGO_PROJECT = {
    "conftest.py": IN_PROJECT,
    "settings.py": """
from fencing_sdk.integrations.django import guard_middleware

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["booking"]
MIDDLEWARE = ["settings.answers_errors"]
ROOT_URLCONF = "urls"
SECRET_KEY = "a test"
USE_TZ = True
answers_errors = guard_middleware(required=False)
""",
    "urls.py": """
from booking import seats
from django.urls import path

urlpatterns = [path("seats/<int:number>", seats.book)]
""",
    "booking/__init__.py": "",
    "booking/models.py": """
from django.db import models

from fencing_sdk.integrations.django import FenceField

class Seat(models.Model):
    passenger = models.TextField(default="")
    fence = FenceField()
""",
    "booking/payments.py": "def charge(passenger): ...",
}
"""What a project with the view and the task of the page has besides."""


def write_from_page(folder: Path, *files: str) -> None:
    blocks = {match["file"]: match["code"] for match in BLOCK.finditer(PAGE.read_text())}
    for file in files:
        (folder / file).write_text(blocks[file])


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The project of the page for coroutines."""
    write_from_page(tmp_path, "shop.py", "test_shop.py")
    return tmp_path


@pytest.fixture
def booking(tmp_path: Path) -> Path:
    """The project of the page for Django."""
    (tmp_path / "booking").mkdir()
    for name, text in DJANGO_PROJECT.items():
        (tmp_path / name).write_text(text)
    write_from_page(tmp_path, "booking/seats.py", "test_booking.py")
    return tmp_path


def test_the_test_of_the_page_has_ten_lines(shop: Path):
    test = (shop / "test_shop.py").read_text().partition("def test_")[2]
    assert len(test.splitlines()) <= 10


def test_the_service_of_the_page_is_caught_and_the_history_is_shown_once(shop: Path):
    code, output = run_pytest(shop, ALONE)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "assert ['Bob', 'Ada'] == ['Bob']" in output
    assert "1 failed" in output
    assert "1 error" not in output, "one story, one verdict"
    assert output.count("history of the lock world") == 1
    assert re.search(r"1\.000000 Ada paused\n.*Bob acquired seats/42 token=2\n.*Ada resumed\n", output, re.DOTALL)


def test_the_mended_service_passes(shop: Path):
    service = shop / "shop.py"
    careless = "seats.buyers.append(buyer)"
    assert careless in service.read_text()
    mended = service.read_text().replace(
        careless, 'MemoryGuard().write("seats/42", lease.token, seats.buyers.append, buyer)'
    )
    service.write_text(f"from fencing_sdk.guards.memory import MemoryGuard\n{mended}")
    code, output = run_pytest(shop, ALONE)
    assert code == pytest.ExitCode.OK, output
    assert "1 passed" in output


WITH_DJANGO = (ALONE, "-p", "pytest_django.plugin", "--ds=settings")


def test_the_django_project_of_the_page_passes_under_pytest_django(booking: Path):
    code, output = run_pytest(booking, *WITH_DJANGO)
    assert code == pytest.ExitCode.OK, output
    assert "5 passed" in output


def test_a_careless_view_is_caught_under_pytest_django(booking: Path):
    seats = booking / "booking" / "seats.py"
    careful = "write_fenced(Seat.objects.filter(pk=number), lease.token, passenger=passenger)"
    assert careful in seats.read_text()
    seats.write_text(seats.read_text().replace(careful, "Seat.objects.filter(pk=number).update(passenger=passenger)"))
    code, output = run_pytest(booking, *WITH_DJANGO)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "2 failed, 3 passed" in output
    assert "assert (503, 'Ada') == (503, 'Bob')" in output


def test_an_error_that_nobody_waited_for_fails_a_test_and_is_no_second_verdict_on_a_failed_one(tmp_path: Path):
    story = """
async def fail():
    raise RuntimeError("nobody waits for this")

def test_passes(lock_world):
    kept.append(lock_world.client("A").start(fail))
    lock_world.sleep(1)

def test_fails(lock_world):
    test_passes(lock_world)
    assert False

kept = []
"""
    write_project(tmp_path, test_story=story)
    code, output = run_pytest(tmp_path, ALONE)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed, 1 error" in output, output
    assert "ERROR at teardown of test_passes" in output
    assert "and when the world ended: RuntimeError('nobody waits for this')" in output


def test_it_gets_along_with_plugins_for_asynchronous_tests(tmp_path: Path):
    story = """
import anyio, pytest
from fencing_sdk import LeaseLostError, LossReason, connect, current_lease

async def story(backend, end, reason):
    async with connect(backend) as locks:
        with pytest.raises(LeaseLostError) as raised:
            async with locks.lock("a"):
                end(current_lease())
                await anyio.sleep_forever()
        assert raised.value.reason is reason
        assert await locks.inspect("a") is None

@pytest.mark.asyncio
async def test_asyncio(faulty_backend, expire):
    await story(faulty_backend, expire, LossReason.EXPIRED)

@pytest.mark.anyio
async def test_anyio(faulty_backend, lose):
    await story(faulty_backend, lose, LossReason.REVOKED)

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""
    write_project(tmp_path, test_story=story)
    code, output = run_pytest(tmp_path, "-o", "asyncio_default_fixture_loop_scope=function")
    assert code == pytest.ExitCode.OK, output
    assert "2 passed" in output


def test_tests_without_locks_pay_for_nothing(tmp_path: Path):
    story = """
import sys

def test_nothing_is_loaded():
    assert "fencing_sdk.testing.plugin" in sys.modules
    loaded = {name for name in sys.modules if name.startswith("fencing_sdk.testing.")}
    assert loaded == {"fencing_sdk.testing.plugin"}
    assert not {"redis", "asyncpg", "kazoo", "fencing_sdk.backends.sqlite"} & sys.modules.keys()
"""
    write_project(tmp_path, test_story=story)
    code, output = run_pytest(tmp_path, ALONE)
    assert code == pytest.ExitCode.OK, output


def test_the_fixtures_are_listed_with_their_meaning(tmp_path: Path):
    write_project(tmp_path)
    _, output = run_pytest(tmp_path, ALONE, "--fixtures")
    for fixture in ("lock_world", "pause", "pause_anywhere", "expire", "lose", "faulty_backend"):
        assert re.search(rf"^{fixture} -- .*plugin\.py:\d+\n +\S", output, re.MULTILINE), output
