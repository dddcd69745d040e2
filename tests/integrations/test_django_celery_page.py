"""The page "Django and Celery, end to end": its project, its tests, and its tasks in a real worker on a real broker."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest
from page_project import run_pytest, write_from_page

pytestmark = pytest.mark.slow

pytest_plugins = ["redis_fixtures"]

PAGE = "django-celery.md"
LIMIT = 200  # seconds, for a machine that does much else
OPTIONS = ("-c", "pytest.ini", "--disable-plugin-autoload", "-p", "pytest_django.plugin")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the page lets a reader make, in its order."""
    folder = tmp_path_factory.mktemp("made")
    for words in ("django startproject config .", "django startapp booking"):
        subprocess.run([sys.executable, "-m", *words.split()], cwd=folder, env=environment_of(folder), check=True)
    write_from_page(PAGE, folder)
    manage((folder, environment_of(folder)), "makemigrations", "booking")
    return folder


@pytest.fixture
def project(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path, environment_of(tmp_path)


def environment_of(folder):
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    found.pop("DJANGO_SETTINGS_MODULE", None)
    return found


def manage(project, *words):
    folder, environment = project
    done = subprocess.run(
        [sys.executable, "manage.py", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not {"Traceback", "ignored"} & set(done.stderr.split()), done.stderr
    return done.stdout


def test_the_tests_of_the_page_pass(project):
    code, output = run_pytest(project[0], *OPTIONS)
    assert code == pytest.ExitCode.OK, output
    assert "6 passed" in output


def test_a_careless_view_is_caught(project):
    views = project[0] / "booking" / "views.py"
    careful = "write_fenced(Seat.objects.filter(pk=number), lease.token, passenger=passenger, ticket_sent=False)"
    assert careful in views.read_text()
    views.write_text(views.read_text().replace(careful, "Seat.objects.filter(pk=number).update(passenger=passenger)"))
    code, output = run_pytest(project[0], *OPTIONS)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "2 failed, 4 passed" in output
    assert "assert (503, 'ada@example.org') == (503, 'bob@example.org')" in output


def test_a_task_that_looks_for_nothing_is_caught(project):
    tasks = project[0] / "booking" / "tasks.py"
    careful = "if seat.ticket_sent or seat.passenger != passenger:"
    assert careful in tasks.read_text()
    tasks.write_text(tasks.read_text().replace(careful, "if False:"))
    code, output = run_pytest(project[0], *OPTIONS)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 5 passed" in output


BOOK = """
from booking import tasks
from booking.models import Seat
from django.test import Client

Seat.objects.create(pk=42)
client = Client(SERVER_NAME="localhost")
for who in ("ada@example.org", "bob@example.org"):
    print(client.post("/seats/42", {"passenger": who}).content)
deliveries = [tasks.send_ticket.delay(42, "ada@example.org") for _ in range(3)]
print(sorted(delivery.get(timeout=150) for delivery in deliveries)[:2])
ticks = [tasks.remind.delay() for _ in range(2)]
print(sorted(str(tick.get(timeout=150)) for tick in ticks))
"""


def test_a_worker_sends_one_ticket_and_runs_one_tick(project, redis_server):
    environment = project[1]
    environment["REDIS_URL"] = environment["FENCING_URL"] = redis_server.url
    manage(project, "migrate")
    with worker(project) as log:
        said = manage(project, "shell", "--no-imports", "-c", BOOK)
    answers = "b'booked\\n'\nb'taken\\n'"
    assert said == f"{answers}\n['nothing to send', 'nothing to send']\n['0', 'None']\n", log.read_text()
    assert log.read_text().count("Subject: Your ticket") == 1
    manage(project, "clear_seat", "42")


@contextlib.contextmanager
def worker(project):
    """The worker of the page, and what it prints. It leaves in order."""
    folder, environment = project
    log = folder / "worker.log"
    with log.open("w") as said:
        command = [sys.executable, "-m", "celery", "-A", "config", "worker", "--concurrency", "4", "--loglevel", "INFO"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
    try:
        yield log
        process.terminate()
        assert process.wait(LIMIT) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
