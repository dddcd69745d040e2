"""A subinterpreter of Python 3.14 (`InterpreterPoolExecutor`) allows no daemon thread: leases do without."""

import subprocess
import sys
import threading

import pytest
from child_processes import WARNINGS
from event_log import Log
from patience import until

import fencing_sdk.sync
from fencing_sdk import connect
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.events import Renewed

REAL = threading.Thread


class PlainThread(REAL):
    """A thread as a subinterpreter makes it."""

    def __init__(self, *args, daemon=None, **others):
        if daemon:
            msg = "daemon threads are disabled in this (sub)interpreter"
            raise RuntimeError(msg)
        super().__init__(*args, daemon=daemon, **others)


class NoThread(REAL):
    """A thread for which the system has no room."""

    def start(self):
        if self.name == "fencing-stall-watch":
            msg = "can't start new thread"
            raise RuntimeError(msg)
        super().start()


@pytest.fixture
def at_the_end(monkeypatch):
    """Functions that Python calls before it waits for the threads of an interpreter that ends."""
    called = []
    monkeypatch.setattr(threading, "_register_atexit", called.append)
    return called


def of_sqlite():
    return [thread for thread in threading.enumerate() if thread.name == "fencing-sqlite"]


@pytest.mark.parametrize("kind", [PlainThread, NoThread])
@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/locks.db"])
async def test_a_lease_is_renewed_without_the_thread_that_looks_for_stalls(
    kind, url, monkeypatch, tmp_path, at_the_end
):
    monkeypatch.setattr(threading, "Thread", kind)
    log = Log()
    async with connect(url.format(tmp_path), observers=[log]) as locks:
        async with locks.lock("a", ttl=10, heartbeat_interval=0.05):
            await log.seen(Renewed, 2)
        assert not [thread for thread in threading.enumerate() if thread.name == "fencing-stall-watch"]


async def test_the_plain_thread_of_sqlite_ends_with_the_client_and_with_its_interpreter(
    monkeypatch, tmp_path, at_the_end
):
    others = of_sqlite()
    monkeypatch.setattr(threading, "Thread", PlainThread)
    backend = SqliteBackend(str(tmp_path / "locks.db"))
    for end in (backend.aclose, None):
        await backend.tickets(["a"])
        (thread,) = [one for one in of_sqlite() if one not in others]
        assert not thread.daemon
        if end is None:
            at_the_end[-1]()
        else:
            await end()
        await until(lambda thread=thread: not thread.is_alive())


@pytest.mark.parametrize(
    ("who", "make"),
    [
        ("a client of fencing_sdk.sync", lambda: fencing_sdk.sync.connect("memory://")),
        ("ZooKeeperBackend", lambda: connect("zk://127.0.0.1:1")),
    ],
)
def test_a_user_of_daemon_threads_is_refused_in_a_sentence(who, make, monkeypatch):
    monkeypatch.setattr(threading, "Thread", PlainThread)
    with pytest.raises(UnsupportedError) as refused:
        make()
    assert str(refused.value) == (
        f"{who} needs a daemon thread, and a subinterpreter has none; use it in the main interpreter or a process"
    )


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python 3.14 has made subinterpreters a part of its library")
def test_a_real_subinterpreter_renews_its_leases_refuses_drivers_and_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
from concurrent import interpreters
from concurrent.futures import InterpreterPoolExecutor

def held(url):
    import asyncio
    from fencing_sdk import connect
    async def main():
        async with connect(url) as locks, locks.lock("a", ttl=0.6) as lease:
            await asyncio.sleep(1)
            return lease.held
    return asyncio.run(main())

def refused(url):
    from fencing_sdk import connect
    from fencing_sdk.errors import UnsupportedError
    try:
        connect(url)
    except UnsupportedError as error:
        return str(error)

if __name__ == "__main__":
    with InterpreterPoolExecutor(1) as pool:
        print(pool.submit(held, "memory://").result(), pool.submit(held, "sqlite:///locks.db").result())
        print(pool.submit(refused, "redis://h").result(), pool.submit(refused, "mysql://u@h/d").result(), sep="\\n")
    left_open = interpreters.create()
    left_open.exec('''
import asyncio
from fencing_sdk import connect
asyncio.new_event_loop().run_until_complete(connect("sqlite:///locks.db").__aenter__())
''')
    left_open.close()
"""
    )
    command = [sys.executable, *WARNINGS, "-W", "ignore::ResourceWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    leases, *sentences = done.stdout.splitlines()
    assert leases == "True True"
    assert len(sentences) == 2
    for said in sentences:
        assert said.startswith("the driver cannot be used in a subinterpreter (module ")
        assert said.endswith("; use it in the main interpreter or a process")
