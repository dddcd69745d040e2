"""The example of Celery on a real broker: a task that is delivered four times does its work once, in both pools."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["redis_fixtures"]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 90


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_is_delivered_again_does_its_work_once(pool, redis_server, tmp_path):
    environment = {
        **os.environ,
        "REDIS_URL": redis_server.url,
        "INVOICES": str(tmp_path / "invoices.db"),
        "PYTHONPATH": str(EXAMPLES),
    }
    command = [sys.executable, "-m", "celery", "-A", "celery_invoices", "worker", "--pool", pool, "--concurrency", "4"]
    log = tmp_path / "worker.log"
    with log.open("w") as said:
        worker = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=said, stderr=said)
    try:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "celery_invoices.py")],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert (done.returncode, done.stdout) == (0, "sent: 5 sent before: 15\n"), done.stderr + log.read_text()
        worker.terminate()
        assert worker.wait(LIMIT) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        worker.kill()
        worker.wait()
