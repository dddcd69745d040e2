"""The example of Celery on a real broker: a task that is delivered again does its work once, and is not thrown away."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import redis

pytestmark = pytest.mark.slow

pytest_plugins = ["redis_fixtures"]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 200  # seconds, for a machine that does much else

DEADLY = """
import os, threading
import celery_invoices, redis
from celery_invoices import app

store = redis.Redis.from_url(celery_invoices.REDIS)

def deliver(what):
    if store.set("begun:" + what, 1, nx=True):
        store.lpush("children", os.getpid())
        threading.Event().wait()  # until the child is killed

celery_invoices.deliver = deliver
"""

ASKING = """
import sys, deadly
from celery_invoices import close_month, send_invoice

task = {"send_invoice": send_invoice, "close_month": close_month}[sys.argv[1]]
print(task.delay(7).get(timeout=int(sys.argv[2])))
"""


@pytest.fixture
def environment(redis_server, tmp_path):
    return {
        **os.environ,
        "REDIS_URL": redis_server.url,
        "INVOICES": str(tmp_path / "invoices.db"),
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(tmp_path)]),
    }


@contextlib.contextmanager
def worker_of(app, pool, environment, folder):
    """A worker, and what it says. In the end it leaves in order."""
    command = [sys.executable, "-m", "celery", "-A", app, "worker", "--pool", pool, "--concurrency", "4"]
    log = folder / "worker.log"
    with log.open("w") as said:
        worker = subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=said)
    try:
        yield log
        worker.terminate()
        assert worker.wait(LIMIT) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_is_delivered_again_does_its_work_once(pool, environment, tmp_path):
    with worker_of("celery_invoices", pool, environment, tmp_path) as log:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "celery_invoices.py")],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        printed = "sent: 5 sent before: 15\nreminders: 3 None\n"
        assert (done.returncode, done.stdout) == (0, printed), done.stderr + log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(("task", "outcome"), [("send_invoice", "sent"), ("close_month", "closed")])
def test_a_task_whose_child_was_killed_is_done_by_its_next_delivery(task, outcome, redis_server, environment, tmp_path):
    """The next delivery comes at once, and meets the lease of the dead child, which lasts for one ttl."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    with contextlib.closing(sqlite3.connect(environment["INVOICES"])) as database:
        database.execute("CREATE TABLE done (what TEXT, by INTEGER)")
    with (
        worker_of("deadly", "prefork", environment, tmp_path) as log,
        contextlib.closing(redis.Redis.from_url(redis_server.url, socket_timeout=2 * LIMIT)) as store,
        subprocess.Popen(
            [sys.executable, "-c", ASKING, task, str(LIMIT)], env=environment, stdout=subprocess.PIPE, text=True
        ) as asking,
    ):
        _, child = store.blpop("children", timeout=LIMIT) or pytest.fail(log.read_text())
        os.kill(int(child), signal.SIGKILL)
        assert asking.communicate(timeout=2 * LIMIT)[0] == f"{outcome}\n", log.read_text()
    with contextlib.closing(sqlite3.connect(environment["INVOICES"])) as database:
        ((_, by),) = database.execute("SELECT * FROM done")
    assert by != int(child)
