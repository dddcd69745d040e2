"""What a process is made of does not disturb its locks: forks and spawns, signals, exits, and patched threads."""

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys

import pytest
from child_processes import WARNINGS

from fencing_sdk.sync import connect

LIMIT = 60


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/locks.db"


def run(tmp_path, text):
    """Run a script as a user would, with warnings as errors; what it said."""
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, *WARNINGS, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_gives_each_child_a_client_of_its_own(method, tmp_path, url):
    """A child that ends with a lock in its hands frees it at once, although it ends without functions of atexit."""
    said = run(
        tmp_path,
        f"""
import multiprocessing
from fencing_sdk.sync import connect

locks = connect({url!r})
kept = []

def work(number):
    with locks.lock("shared", ttl=30, wait=30) as lease:
        token = int(lease.token)
    kept.append(locks.lock(f"kept/{{number}}", ttl=300).acquire())
    return token

def main():
    with locks.lock("a", ttl=300) as lease:  # open, and held, when the children begin
        pool = multiprocessing.get_context({method!r}).Pool(3)
        tokens = pool.map(work, range(12), chunksize=1)
        pool.close()
        pool.join()
        assert len(set(tokens)) == 12
        assert lease.held
        for number in range(12):
            locks.lock(f"kept/{{number}}", wait=0).acquire().release()
    print("done")

if __name__ == "__main__":
    main()
""",
    )
    assert said == ["done"]


def test_a_child_that_was_forked_and_ends_as_a_process_does_leaves_its_parent_alone(tmp_path, url):
    said = run(
        tmp_path,
        f"""
import os
from fencing_sdk.sync import connect

locks = connect({url!r})
with locks.lock("a", ttl=300) as lease:
    child = os.fork()
    if child == 0:
        os._exit(int(lease.held))
    assert os.waitpid(child, 0)[1] == 0
    child = os.fork()
    if child == 0:
        raise SystemExit(0)  # through the block of the parent, and through atexit
    assert os.waitpid(child, 0)[1] == 0
    lease.renew()
    assert lease.held
print("done")
""",
    )
    assert said == ["done"]


def test_a_forked_child_of_a_leader_stands_for_itself(tmp_path, url):
    said = run(
        tmp_path,
        f"""
import os
from fencing_sdk.sync import connect

locks = connect({url!r})
election = locks.election("a", ttl=300)
for term in election:
    with term:
        child = os.fork()
        if child == 0:
            print(election.standing.value, election.leading, flush=True)
            for own in election:
                with own:
                    print(election.standing.value, election.leading, flush=True)
                    os._exit(0)
        standing = election.standing.value
    break
assert os.waitpid(child, 0)[1] == 0  # only then: two processes that print at once mix their words
print(standing)
print(election.standing.value)
""",
    )
    assert said == ["idle False", "leading True", "leading", "idle"]


def test_a_lock_that_was_made_before_a_fork_names_the_child_that_holds_it(tmp_path, url):
    said = run(
        tmp_path,
        f"""
import asyncio, json, os
import fencing_sdk, fencing_sdk.sync

tasks, threads = fencing_sdk.connect("memory://"), fencing_sdk.sync.connect({url!r})
lock, other = tasks.lock("a"), threads.lock("b")

async def seen():
    async with tasks, lock:
        return json.loads((await tasks.inspect("a")).label)

here = asyncio.run(seen())
print(here["pid"] == os.getpid(), here["program"], flush=True)
child = os.fork()
if child == 0:
    with other:
        there = json.loads(threads.inspect("b").label)
    print(asyncio.run(seen())["pid"] == there["pid"] == os.getpid() != here["pid"], there["program"], flush=True)
else:
    assert os.waitpid(child, 0)[1] == 0
""",
    )
    assert said == ["True script.py"] * 2


@pytest.mark.parametrize("entered", [True, False])
def test_a_term_that_was_begun_before_a_fork_is_not_the_childs(entered, tmp_path, url):
    said = run(
        tmp_path,
        f"""
import os
from fencing_sdk import UsageError
from fencing_sdk.sync import connect

locks = connect({url!r})
parent, child = os.getpid(), None
for term in locks.election("a", ttl=300):
    if child is None:
        child = os.fork()
        if child == 0:
            if {entered}:
                try:
                    with term:
                        print("led")
                except UsageError as error:
                    print(error, flush=True)
            continue
    if os.getpid() != parent:
        with term as lease:
            print(lease.held, flush=True)
        os._exit(0)
    with term as lease:
        lease.renew()
    break
assert os.waitpid(child, 0)[1] == 0
print("ended")
""",
    )
    if entered:
        refusal = said.pop(0)
        assert refusal.startswith("this term of election 'a' was begun before a fork, and belongs to the parent")
    assert said == ["True", "ended"]


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(tmp_path, url):
    """At the fork another thread hands a call over, or closes the client: no thread of the child will end that."""
    said = run(
        tmp_path,
        f"""
import os, threading
from fencing_sdk.sync import connect

locks = connect({url!r})
lease = locks.lock("a", ttl=300).acquire()
forked, inside = threading.Event(), threading.Event()

def hand_over():
    with locks._bridge()._gate:
        inside.set()
        forked.wait()

thread = threading.Thread(target=hand_over)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    lease.release()
    lease.on_lost(lambda reason: None)
    print(lease.held, locks.inspect("a") is not None, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
forked.set()
thread.join()
lease.renew()
print("ended")
""",
    )
    assert said == ["False True", "ended"]


FORK = """
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(("options", "then"), [("", ""), ("", FORK), (", drain=25", "")])
def test_what_a_script_holds_is_free_when_it_ends(options, then, tmp_path, url):
    """Python 3.12 starts no thread then, SQLite's was ended by the fork, and nothing is left that could drain."""
    run(
        tmp_path,
        f"""
import os
from fencing_sdk.sync import connect

locks = connect({url!r}{options})
lease = locks.lock("a", ttl=300).acquire()
{then}
assert lease.held
""",
    )
    with connect(url) as locks:
        assert locks.inspect("a") is None


def test_a_callback_is_told_of_the_end_of_the_interpreter(tmp_path, url):
    said = run(
        tmp_path,
        f"""
from fencing_sdk.sync import connect

locks = connect({url!r})
lease = locks.lock("a", ttl=300).acquire()
lease.on_lost(lambda reason: print(reason, flush=True))
""",
    )
    assert said == ["closed"]


def test_a_signal_that_unwinds_the_script_frees_its_lock(tmp_path, url):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import signal, sys, time
from fencing_sdk.sync import connect

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with connect({url!r}).lock("a", ttl=300):
    print("held", flush=True)
    time.sleep({LIMIT})
"""
    )
    process = subprocess.Popen([sys.executable, *WARNINGS, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=LIMIT) == (b"", b"")
    assert process.returncode == 143
    with connect(url) as locks, locks.lock("a", wait=LIMIT):  # far less than the ttl
        pass


def test_a_worker_that_drains_on_sigterm_ends_its_work_and_frees_its_lock(tmp_path, url):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import signal, sys, time
from fencing_sdk.sync import connect

with connect({url!r}) as locks:
    with locks.draining_on(signal.SIGTERM, signal.SIGINT, within={LIMIT}):
        while True:
            with locks.lock("a", ttl=300) as lease:
                print("held", flush=True)
                sys.stdin.readline()  # goes on after the signal
                while not locks.draining:
                    time.sleep(0.01)
                print("worked", lease.held, flush=True)
print("ended", flush=True)
"""
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, *WARNINGS, script], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "held\n"
    with connect(url) as locks:
        process.send_signal(signal.SIGTERM)
        assert locks.lock("a").try_acquire() is None
        output = process.communicate("\n", timeout=LIMIT)
        assert output == ("worked True\nended\n", "")
        assert process.returncode == 0
        with locks.lock("a", wait=LIMIT):  # far less than the ttl
            pass


def test_ctrl_c_while_a_script_waits_leaves_the_line(tmp_path, url):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
from fencing_sdk.sync import connect

print("waits", flush=True)
with connect({url!r}).lock("a", ttl=300):
    pass
"""
    )
    with connect(url) as locks:
        with locks.lock("a", ttl=300):
            pipe = subprocess.PIPE
            process = subprocess.Popen([sys.executable, script], stdout=pipe, stderr=pipe)
            assert process.stdout.readline() == b"waits\n"
            while not waiters(tmp_path):
                pass
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT)
            assert b"KeyboardInterrupt" in errors
            assert process.returncode in {-signal.SIGINT, 130}
            assert not waiters(tmp_path)


def waiters(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "locks.db", timeout=LIMIT)) as database:
        rows = database.execute("SELECT line FROM fencing_line").fetchall()
    return [ticket for (line,) in rows for *ticket, token, _, _ in json.loads(line)[1] if token is None]


@pytest.mark.parametrize(
    ("library", "patch"),
    [
        ("gevent", "from gevent import monkey; monkey.patch_all()"),
        # Without its resolver: dnspython imports httpx where HTTP/2 is installed, and eventlet patches that in vain.
        ("eventlet", "import os; os.environ['EVENTLET_NO_GREENDNS'] = 'yes'; import eventlet; eventlet.monkey_patch()"),
    ],
)
def test_threads_that_are_greenlets_are_refused_with_a_sentence_when_a_client_is_made(library, patch, tmp_path):
    """In both worlds, before the first task of a worker; and a client that was made earlier, when it is used."""
    said = run(
        tmp_path,
        f"""
import warnings
warnings.simplefilter("ignore")  # of the library
import fencing_sdk
import fencing_sdk.sync
from fencing_sdk.backends.memory import MemoryBackend

early = fencing_sdk.sync.connect("memory://")
{patch}

def refused(call):
    try:
        call()
    except fencing_sdk.errors.UnsupportedError as error:
        print(error)

refused(lambda: fencing_sdk.sync.connect("memory://"))
refused(lambda: fencing_sdk.connect("memory://"))
refused(lambda: fencing_sdk.LockClient(MemoryBackend()))
refused(lambda: early.inspect("a"))
""",
    )
    assert len(said) == 4
    for line in said:
        assert line.startswith(f"{library} has replaced threads and sockets in this process")
        assert line.endswith("celery --pool threads")
