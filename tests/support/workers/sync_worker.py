"""
A process without an event loop that uses locks from its threads, as services do.

    sync_worker.py URL KIND [FILE]

It says a line for each step, and goes on when it reads one. The kinds are functions below.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path

from fencing_sdk import BackendUnavailableError, LeaseLostError
from fencing_sdk.sync import connect, current_token

locks = connect(sys.argv[1])
held = []


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def wait():
    assert sys.stdin.readline()


def answered(ask):
    """Ask until the store answers: a call without patience has a second for that, and a machine may stand still."""
    for _ in range(20):
        with contextlib.suppress(BackendUnavailableError):
            return ask()
    return ask()


def see_renewed(lease):
    """Return when *lease* was renewed by a call that was sent from now on, or when it is over."""
    for _ in range(2):  # the first answer may be that of an earlier call
        before = lease._state.deadline
        while lease._state.deadline == before and lease.wait_lost(0.05) is None:
            pass


def counts():
    """Four threads add to a number in a file, under a lock, without any other protection."""

    def add():
        for _ in range(5):
            with locks.lock("a", ttl=60, wait=100) as lease, Path(sys.argv[3]).open("r+") as file:
                number = int(file.read())
                file.seek(0)
                file.write(str(number + 1))
                say("token", int(lease.token))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def siblings():
    """It forks four children, which all use the client that was made, and opened, before."""
    locks.inspect("a")
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            status = 1
            try:
                counts()
                locks.close()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(ends))


def exits():
    """It ends with a lock in its hands."""
    held.append(locks.lock("a", ttl=300).acquire())
    say("held", int(held[0].token))


def raises():
    """Its main thread fails while another thread, a daemon, is inside a block."""
    inside = threading.Event()

    def hold():
        with locks.lock("a", ttl=300) as lease:
            say("held", int(lease.token))
            inside.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    inside.wait()
    raise SystemExit(3)


def holds():
    """It works until it is killed, or frozen."""
    try:
        with locks.lock("a", ttl=2, safety_buffer=0.6) as lease:
            say("held", int(lease.token))
            wait()
            with contextlib.suppress(LeaseLostError):
                say("readable", int(lease.token))
    except LeaseLostError as error:
        say("lost", error.reason.value)


def forks():
    """It forks inside a block. The child is not a holder, and has a client that works."""
    with locks.lock("a", ttl=30, heartbeat_interval=0.3) as lease:
        token = int(lease.token)
        child = os.fork()
        if child == 0:
            found = answered(locks.lock("a").try_acquire)
            say("inert", lease.held, lease.lost_reason.value, found)
            with locks.lock("b", ttl=30) as own:
                say("child", current_token() == own.token)
            lease.release()  # does nothing
            locks.close()
            os._exit(0)
        os.waitpid(child, 0)
        see_renewed(lease)
        say("parent", lease.wait_lost(0), current_token() == token, lease.held)


{"counts": counts, "siblings": siblings, "exits": exits, "raises": raises, "holds": holds, "forks": forks}[
    sys.argv[2]
]()
