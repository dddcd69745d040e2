"""Django's ``runserver`` starts its process anew when a file has changed, and what the old one held is free at once."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from local_ports import HOST, free_port
from patience import wait_until

from fencing_sdk.sync import connect

APP = Path(__file__).parent / "apps" / "reloaded.py"
LIMIT = 100.0
"""Seconds for what several processes do on a busy machine."""


@pytest.mark.slow
def test_a_lock_of_the_process_before_is_free_after_a_reload(tmp_path: Path):
    app = tmp_path / "manage.py"
    shutil.copy(APP, app)
    store, port = f"sqlite:///{tmp_path / 'locks.db'}", free_port()
    command = [sys.executable, str(app), "runserver", f"{HOST}:{port}"]
    log = tmp_path / "log"
    with log.open("w") as said:
        environment = os.environ | {"FENCING_URL": store}
        server = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    processes: set[str] = set()

    def keeps() -> bool:
        """Whether a process that was not seen yet took the lock, which is kept for 300 s by one that lives."""
        assert server.poll() is None, log.read_text()
        with requests.Session() as session:
            session.trust_env = False
            try:
                answer = session.get(f"http://{HOST}:{port}/keep", timeout=LIMIT)
            except requests.ConnectionError:
                return False
        assert answer.status_code == 200, log.read_text()
        processes.add(answer.text)
        return True

    try:
        wait_until(keeps, what="Django answers", within=LIMIT)
        with connect(store) as locks:
            first = locks.inspect("kept")
            assert first is not None

            def released() -> bool:
                app.touch()  # again and again: the first look at the files may come later than that at the lock
                return locks.inspect("kept") is None

            wait_until(released, what="the lock is released", within=LIMIT)
            (old,) = processes  # its server may answer until the end of it
            wait_until(lambda: not Path("/proc", old).exists(), what="the old process ends", within=LIMIT)
            wait_until(keeps, what="the new process answers", within=LIMIT)
            again = locks.inspect("kept")
            assert again is not None
            assert again.token > first.token
        assert len(processes) == 2
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert "fencing_sdk" not in log.read_text(), "runserver itself prints errors of requests that come while it ends"
