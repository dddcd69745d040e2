"""`fencing hold`, `renew`, `release` and `run --ticket`: leases that no process carries, for steps of a shell."""

import asyncio
import json
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import time

import pytest
from campaigns import amount
from command_line import Fencing, until
from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnSqlite, OnZooKeeper
from store_bench import StoreBench

from fencing_sdk import LeaseTicket, connect
from fencing_sdk.cli._ticket_file import TicketFile

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

BY_A = ("deploy", "--holder", "a")
BY_B = ("deploy", "--holder", "b")
BY_FILE = ("deploy", "--ticket", "t")


def said(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the variables that a command has printed, and nothing else."""
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def held(fencing: Fencing, *arguments: str) -> int:
    """Return the token of a lock that is taken or renewed."""
    return int(said(fencing("hold", *arguments))["FENCING_TOKEN"])


# Exit codes and output


def test_a_lock_is_held_by_no_process_until_it_is_given_back(fencing: Fencing):
    first = said(fencing("hold", *BY_A))
    assert first.keys() == {"FENCING_TOKEN", "FENCING_HOLDER", "FENCING_DEADLINE"}
    assert 500 < float(first["FENCING_DEADLINE"]) - time.time() <= 600
    again, renewed = said(fencing("hold", *BY_A)), said(fencing("renew", *BY_A))
    assert first["FENCING_TOKEN"] == again["FENCING_TOKEN"] == renewed["FENCING_TOKEN"]
    assert first["FENCING_HOLDER"] == again["FENCING_HOLDER"] == renewed["FENCING_HOLDER"]
    assert first["FENCING_DEADLINE"] < again["FENCING_DEADLINE"] < renewed["FENCING_DEADLINE"]
    for _ in range(2):  # released, and over before
        assert fencing("release", *BY_A).returncode == 0
    assert held(fencing, *BY_B) > int(first["FENCING_TOKEN"])


def test_another_holder_is_refused_with_who_has_it_since_when_and_how_long_still(fencing: Fencing):
    token = held(fencing, *BY_A, "--label", "why: rollout 7")
    done = fencing("hold", *BY_B)
    assert (done.returncode, done.stdout) == (75, "")
    shown = rf"fencing: lock 'deploy' is held by [0-9a-f]{{8}} \(token {token}\) for \d+(\.\d)?s, 9m\d\ds left: "
    assert re.fullmatch(shown + r"detached until 20\S+, nothing runs; why: rollout 7\n", done.stderr)
    quiet = fencing("hold", *BY_B, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (75, "", "")
    told = json.loads(fencing("hold", *BY_B, "--json").stdout)
    assert (told["lock"], told["held"], [each["token"] for each in told["by"]]) == ("deploy", False, [token])


def test_a_renewal_asks_whether_it_is_held_and_says_why_not(fencing: Fencing):
    nothing = fencing("renew", *BY_A)
    assert (nothing.returncode, nothing.stdout) == (76, "")
    token = held(fencing, *BY_A)
    assert fencing("break", "deploy", "--reason", "it hangs", "--yes").returncode == 0
    revoked = fencing("renew", *BY_A, "--json")
    assert revoked.returncode == 76
    assert json.loads(revoked.stdout)["problem"].endswith(": an operator took the lock away: it hangs")
    assert fencing("renew", *BY_A, "--quiet").stderr == ""
    assert held(fencing, *BY_A) > token, "the same holder takes it anew"


def test_a_lease_that_ran_out_is_taken_anew_unless_another_holder_has_it(fencing: Fencing):
    first = held(fencing, *BY_A, "--ttl", "1s")
    second = held(fencing, *BY_B, "--wait", "1m")
    assert second > first
    gone = fencing("renew", *BY_A)
    assert gone.returncode == 76
    assert f"(token {second}) has the lock now" in gone.stderr
    assert fencing("hold", *BY_A).returncode == 75
    assert fencing("release", *BY_A).returncode == 0, "what it had is over"
    assert int(said(fencing("renew", *BY_B))["FENCING_TOKEN"]) == second


def test_as_json_a_lock_is_an_object_with_seconds(fencing: Fencing):
    taken, again = (json.loads(fencing("hold", *BY_FILE, "--ttl", "5m", "--json").stdout) for _ in range(2))
    assert taken.keys() == {"lock", "held", "taken", "token", "holder", "ttl", "until", "left", "ticket"}
    assert (taken["lock"], taken["held"], taken["taken"], taken["ttl"], taken["ticket"]) == (
        "deploy",
        True,
        True,
        300,
        "t",
    )
    assert 0 < taken["left"] <= 300
    assert again == taken | {"taken": False, "until": again["until"], "left": again["left"]}
    assert json.loads(fencing("release", "--ticket", "t", "--json").stdout)["held"] is False


def test_a_ticket_passes_through_a_pipe(fencing: Fencing):
    kept = fencing("hold", "deploy", "--ticket", "-")
    assert LeaseTicket.load(kept.stdout).name == "deploy"
    with fencing.path("sent").open("w+") as pipe:
        pipe.write(kept.stdout)
        for command, code in (("renew", 0), ("release", 0), ("renew", 76)):
            pipe.seek(0)
            assert fencing(command, "--ticket", "-", stdin=pipe).returncode == code
    fencing.path("sent").write_bytes(b"\xff\x00")
    with fencing.path("sent").open() as pipe:
        assert fencing("renew", "--ticket", "-", stdin=pipe).returncode == 2


def test_lists_say_that_nothing_runs(fencing: Fencing):
    held(fencing, *BY_FILE)
    until_when = r"detached until 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00, nothing runs"
    assert re.search(rf"{until_when}; ticket t on \S+$", fencing("ls").stdout.strip())
    assert re.search(until_when, fencing("show", "deploy").stdout)
    row = json.loads(fencing("ls", "--json").stdout)
    assert re.fullmatch(r"20\S+", row["detached_until"])
    assert row["kept_until"] is None
    skipped = fencing("run", "deploy", "--", "true")
    assert (skipped.returncode, re.search(until_when, skipped.stderr) is not None) == (75, True)


@pytest.mark.parametrize("command", ["hold", "renew", "release"])
def test_a_store_that_does_not_answer_means_69_and_the_ticket_stays(fencing: Fencing, command: str):
    held(fencing, *BY_FILE)
    before = fencing.path("t").read_text()
    done = fencing(command, *BY_FILE, "--url", "redis://127.0.0.1:1")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (69, "", 1)
    assert fencing.path("t").read_text() == before


# Whose lock it is, and bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hold", "deploy"], "say whose lock it is by LOCK --holder ID, or by --ticket FILE"),
        (["hold", "deploy", "--holder", "a", "--ticket", "t"], "say whose lock it is"),
        (["renew", "--holder", "a"], "say whose lock it is by LOCK --holder ID"),
        (["hold", "deploy", "--holder", ""], "--holder is empty; is the variable in it not set?"),
        (["hold", "deploy", "--ticket", ""], "--ticket '' is not a regular file"),
        (["hold", "deploy", "--ticket", "x" * 300], "is not a regular file"),
        (["hold", "deploy", "--ticket", "/dev/null"], "--ticket '/dev/null' is not a regular file"),
        (["hold", "deploy", "--holder", "a", "--ttl", "2d"], "ttl must be at most 86400 s"),
        (["hold", "", "--holder", "a"], "name must not be empty"),
        (["hold", "deploy", "--holder", "a", "--wait", "-1"], "wait must be at least 0 s"),
        (["hold", "deploy", "--ticket", "-", "--json"], "--ticket - prints the ticket and nothing else"),
        (["hold", "deploy", "--holder", "a", "--url", "memory://"], "only inside one process"),
        (["run", "deploy", "--ticket", "t", "--", "true"], "write: fencing run --ticket FILE -- COMMAND"),
        (["run", "--ticket", "t", "true"], "write: fencing run --ticket FILE -- COMMAND"),
        (["run", "--ticket", "t", "--wait", "3s", "--", "true"], "--ticket goes without --wait"),
        (["run", "--ticket", "t", "--shared", "--", "true"], "--ticket goes without --shared"),
    ],
)
def test_what_cannot_work_is_wrong_usage(fencing: Fencing, arguments: list[str], message: str):
    done = fencing(*arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert message in done.stderr


def test_a_ticket_in_an_argument_is_refused_and_never_shown(fencing: Fencing):
    held(fencing, *BY_FILE)
    secret = fencing.path("t").read_text().strip()
    for text in (secret, secret[:-9]):
        for command in (["renew"], ["release"], ["hold", "deploy"]):
            done = fencing(*command, "--ticket", text)
            assert done.returncode == 2
            assert "takes the name of a file, not a ticket" in done.stderr
            assert secret[20:40] not in done.stdout + done.stderr
    assert fencing("run", "--ticket", secret, "--", "true").returncode == 2


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: "", lambda text: text[:60] + text[61:]])
def test_a_ticket_that_was_cut_or_changed_is_refused_never_shown_and_left_as_it_is(fencing: Fencing, damage):
    held(fencing, *BY_FILE)
    damaged = damage(fencing.path("t").read_text().strip())
    fencing.path("t").write_text(damaged)
    for command in (["hold", *BY_FILE], ["renew", "--ticket", "t"], ["run", "--ticket", "t", "--", "true"]):
        done = fencing(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert "the ticket in 't' cannot be used: " in done.stderr
        assert damaged[20:40] not in done.stderr or not damaged
    assert fencing.path("t").read_text() == damaged


def test_a_ticket_of_another_lock_or_store_is_refused(fencing: Fencing):
    token = held(fencing, *BY_FILE)
    other = fencing("hold", "other", "--ticket", "t")
    assert (other.returncode, "the ticket is one of lock 'deploy'" in other.stderr) == (2, True)
    elsewhere = fencing("renew", "--ticket", "t", "--url", f"sqlite:///{fencing.folder}/other.db")
    assert (elsewhere.returncode, "or it is of another store" in elsewhere.stderr) == (76, True)
    assert held(fencing, *BY_FILE) == token


def test_two_holders_are_two_in_each_store_and_for_each_lock(fencing: Fencing):
    held(fencing, *BY_A)
    held(fencing, "other", "--holder", "a")
    fencing.environment["FENCING_URL"] = "sqlite:///locks2.db"  # its path depends on the folder
    held(fencing, *BY_A)
    below = fencing.folder / "below"
    below.mkdir()
    assert said(fencing("hold", *BY_B, cwd=below))
    assert fencing("release", *BY_A, cwd=below).returncode == 0
    assert fencing("hold", *BY_B).returncode == 75


def test_a_ticket_belongs_to_its_user_alone_and_a_warning_says_when_it_does_not(fencing: Fencing):
    held(fencing, *BY_FILE)
    held(fencing, "other", "--holder", "a")
    tickets = fencing.state / "fencing" / "tickets"
    files = [fencing.path("t"), *(path for path in tickets.iterdir() if not path.name.endswith(".lock"))]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (*files, tickets)] == [0o600, 0o600, 0o700]
    fencing.path("t").chmod(0o640)
    for warned in (True, False):  # it was written anew
        done = fencing("renew", "--ticket", "t")
        assert done.returncode == 0
        assert ("a secret that other users may read; run: chmod 600" in done.stderr) == warned


def test_a_ticket_of_a_client_with_a_namespace_is_known_by_the_name_in_the_store(fencing: Fencing):
    async def detached() -> None:
        async with connect(fencing.environment["FENCING_URL"], namespace="app") as locks:
            lease = await locks.lock("deploy").acquire()
            TicketFile(str(fencing.path("t"))).write(await lease.detach(keep=60))

    asyncio.run(detached())
    assert fencing("hold", *BY_FILE).returncode == 2
    held(fencing, "app:deploy", "--ticket", "t")
    assert fencing("run", "--ticket", "t", "--", "true").returncode == 0
    assert json.loads(fencing("ls", "--json").stdout)["name"] == "app:deploy"
    assert fencing("release", "app:deploy", "--ticket", "t").returncode == 0


# Commands that are killed, or come together


DYING = """
import os, signal, sys
from fencing_sdk.cli import _ticket_file, main
from fencing_sdk.cli._ticket_file import TicketFile

def die(*given):
    os.kill(os.getpid(), signal.SIGKILL)

def dying_at(number, before):
    left, method = [number], TicketFile.publish
    def publish(file):
        left[0] -= 1
        if not left[0] and before:
            die()
        method(file)
        if not left[0]:
            die()
    return publish

TicketFile.publish = dying_at(int(sys.argv[1]), sys.argv[2] == "before")
del sys.argv[1:3]
sys.exit(main())
"""
"""The command line, killed before or after it puts a ticket into its place for the nth time."""


def killed_at(fencing: Fencing, number: int, when: str, *arguments: str) -> None:
    command = [sys.executable, "-c", DYING, str(number), when, *arguments]
    done = subprocess.run(command, cwd=fencing.folder, env=fencing.environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "when", "taken"), [(1, "before", False), (1, "after", False), (2, "before", True), (2, "after", True)]
)
def test_a_hold_that_was_killed_at_any_step_is_found_by_the_next_one(
    fencing: Fencing, number: int, when: str, taken: bool
):
    """A wait of the command for its own ticket would last ten minutes."""
    killed_at(fencing, number, when, "hold", *BY_FILE)
    left = [json.loads(line)["token"] for line in fencing("ls", "--json").stdout.splitlines()]
    assert len(left) == int(taken)
    token = held(fencing, *BY_FILE)
    assert left in ([], [token])
    assert [path.name for path in fencing.folder.glob(".t*")] == []


def test_what_a_killed_hold_got_is_renewed_resumed_and_released_by_its_ticket(fencing: Fencing):
    for command in (["renew", "--ticket", "t"], ["run", "--ticket", "t", "--", "true"], ["release", "--ticket", "t"]):
        killed_at(fencing, 2, "before", "hold", *BY_FILE)
        assert fencing(*command).returncode == 0
        assert fencing("release", "--ticket", "t").returncode == 0
    assert fencing("ls", "--json").stdout == ""


READY = """
import sys, fencing_sdk.backends.sqlite, fencing_sdk.cli.detached
from fencing_sdk.cli import main
print("ready", flush=True)
sys.exit(main())
"""
"""The command line with its imports behind it, which take longer than the rest."""


async def tokens_in_line(fencing: Fencing) -> list[int | None]:
    async with connect(fencing.environment["FENCING_URL"]) as locks:
        waiting = await locks.waiters("deploy")
        return [*(each.token for each in await locks.holders("deploy")), *(None for _ in waiting)]


@pytest.mark.campaign
def test_a_hold_that_is_killed_at_random_moments_never_costs_a_wait(fencing: Fencing):
    dice, last, took = random.Random(7), 0, 0.2
    for _ in range(amount(200, short=6)):
        process = subprocess.Popen(
            [sys.executable, "-c", READY, "hold", *BY_FILE, "--quiet"],
            cwd=fencing.folder,
            env=fencing.environment,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(dice.uniform(0, took))
            process.kill()
        token = held(fencing, *BY_FILE)  # now, and not after its ten minutes
        assert asyncio.run(tokens_in_line(fencing)) == [token], "one ticket, and ours"
        assert token >= last
        last = token
        if dice.random() < 0.5:
            assert fencing("release", "--ticket", "t").returncode == 0


def test_two_holds_of_one_holder_at_once_are_one(fencing: Fencing):
    together = [fencing.start("hold", *BY_A) for _ in range(4)]
    ends = [(process.communicate(timeout=300), process.returncode) for process in together]
    assert [code for _, code in ends] == [0, 0, 0, 0]
    assert len({out.splitlines()[0] for (out, _), _ in ends}) == 1
    assert fencing("release", *BY_A).returncode == 0
    assert fencing("ls", "--json").stdout == ""


def waiting_in_line(fencing: Fencing, *arguments: str) -> subprocess.Popen[str]:
    waiter = fencing.start("hold", *arguments, "--wait", "forever")
    until(lambda: json.loads(fencing("show", "deploy", "--json").stdout)["waiting"], "a waiter")
    return waiter


def test_a_ticket_that_another_command_uses_is_left_alone(fencing: Fencing):
    held(fencing, *BY_A)
    waiter = waiting_in_line(fencing, *BY_FILE)
    commands = ["hold", *BY_FILE], ["renew", "--ticket", "t"], ["run", "--ticket", "t", "--", "true"]
    for busy in [fencing.start(*command) for command in commands]:
        out, err = busy.communicate(timeout=300)
        assert (busy.returncode, out) == (75, "")
        assert "another fencing command uses the ticket in 't'" in err
    assert fencing("release", *BY_A).returncode == 0
    assert waiter.wait(300) == 0
    assert fencing("renew", "--ticket", "t").returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_hold_that_is_told_to_end_leaves_neither_its_place_in_line_nor_a_ticket(fencing: Fencing, number, code):
    held(fencing, *BY_A)
    waiter = waiting_in_line(fencing, *BY_FILE)
    waiter.send_signal(number)
    out, err = waiter.communicate(timeout=300)
    assert (waiter.returncode, out, err) == (code, "", "")
    assert json.loads(fencing("show", "deploy", "--json").stdout)["waiting"] == []
    assert not fencing.path("t").exists()


def test_a_waiter_that_was_killed_keeps_its_place_for_the_next_hold(fencing: Fencing):
    held(fencing, *BY_A)
    waiter = waiting_in_line(fencing, *BY_FILE)
    waiter.kill()
    waiter.wait()
    assert fencing("release", *BY_A).returncode == 0
    assert held(fencing, *BY_FILE)


# A command under a ticket


def test_a_command_goes_on_with_a_lease_and_leaves_it_to_the_ticket(fencing: Fencing):
    first = held(fencing, *BY_FILE)
    script = (
        f"echo $FENCING_TOKEN $FENCING_LOCK; {sys.executable} -m fencing_sdk hold deploy --holder b; echo $?; exit 7"
    )
    done = fencing("run", "--ticket", "t", "--pass-url", "--", "sh", "-c", script)
    assert done.returncode == 7
    (token, name), (others,) = map(str.split, done.stdout.splitlines())
    assert (int(token) > first, name, others) == (True, "deploy", "75")
    after = said(fencing("renew", "--ticket", "t"))
    assert int(after["FENCING_TOKEN"]) > int(token)
    assert float(after["FENCING_DEADLINE"]) - time.time() > 500, "as hold has chosen it"
    assert re.search(r"nothing runs; ticket t on \S+$", fencing("ls").stdout.strip())
    assert fencing("hold", *BY_B).returncode == 75


def test_a_ticket_that_was_used_before_runs_nothing(fencing: Fencing):
    held(fencing, *BY_FILE)
    fencing.path("copy").write_text(fencing.path("t").read_text())
    assert fencing("run", "--ticket", "t", "--", "true").returncode == 0
    done = fencing("run", "--ticket", "copy", "--", "touch", "ran")
    assert (done.returncode, fencing.path("ran").exists()) == (76, False)
    assert "is void: it was used or released before, and " in done.stderr
    assert done.stderr.endswith("has the lock now; nothing was run\n")
    missing = fencing("run", "--ticket", "none", "--", "touch", "ran")
    assert (missing.returncode, fencing.path("ran").exists()) == (76, False)
    assert fencing("renew", "--ticket", "t").returncode == 0


def test_a_lease_that_is_lost_under_a_command_stops_it_and_voids_the_ticket(fencing: Fencing):
    held(fencing, *BY_FILE)
    runs = fencing.start("run", "--ticket", "t", "--ttl", "1s", "--", "sh", "-c", "echo $$ > run.pid; sleep 300")
    fencing.pid("run.pid")
    fencing.take_away()
    assert runs.wait(300) == 76
    assert fencing("renew", "--ticket", "t").returncode == 76


@pytest.mark.parametrize(("number", "when"), [(1, "before"), (1, "after"), (2, "before"), (2, "after")])
def test_a_run_that_was_killed_while_it_detaches_costs_its_own_ttl_at_most(fencing: Fencing, number: int, when: str):
    held(fencing, *BY_FILE)
    killed_at(fencing, number, when, "run", "--ticket", "t", "--ttl", "1s", "--", "touch", "ran")
    assert fencing.path("ran").exists()
    wait = () if number == 2 else ("--wait", "5m")  # the lease of the run, and then ours, or the ticket's at once
    assert held(fencing, *BY_FILE, *wait)
    assert len(fencing("ls", "--json").stdout.splitlines()) == 1


# Stores, and a full disk


class StepsSuite:
    """Steps of one lease on each store."""

    passes_on = True

    async def test_steps_that_are_processes_share_a_lease(self, fencing: Fencing, bench: StoreBench):
        fencing.environment["FENCING_URL"] = bench.url
        await asyncio.to_thread(self._take_steps, fencing)

    def _take_steps(self, fencing: Fencing) -> None:
        token = held(fencing, *BY_FILE)
        assert held(fencing, *BY_FILE) == int(said(fencing("renew", "--ticket", "t"))["FENCING_TOKEN"]) == token
        assert fencing("hold", *BY_A).returncode == 75
        done = fencing("run", "--ticket", "t", "--", "sh", "-c", "echo $FENCING_TOKEN")
        if self.passes_on:
            assert token < int(done.stdout) < int(said(fencing("renew", "--ticket", "t"))["FENCING_TOKEN"])
        else:
            assert (done.returncode, "cannot hand a lease over" in done.stderr) == (69, True)
        assert fencing("renew", "--ticket", "t").returncode == 0
        assert fencing("release", "--ticket", "t").returncode == 0
        assert held(fencing, *BY_A) > token
        assert fencing("release", *BY_A).returncode == 0


class TestSqlite(OnSqlite, StepsSuite): ...


@pytest.mark.slow
class TestPostgresql(OnPostgresql, StepsSuite): ...


@pytest.mark.slow
class TestMysql(OnMysql, StepsSuite): ...


@pytest.mark.slow
class TestEtcd(OnEtcd, StepsSuite):
    passes_on = False


class TestZooKeeper(OnZooKeeper):
    async def test_a_lease_ends_with_its_process(self, fencing: Fencing, bench: StoreBench):
        fencing.environment["FENCING_URL"] = bench.url
        done = await asyncio.to_thread(fencing, "hold", *BY_FILE)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (69, "", 1)
        assert "its store ends them with the session of the process" in done.stderr
        assert not fencing.path("t").exists()


def limited(size: int):
    """Make files of at most *size* bytes, as on a disk that gets full."""
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}


class TestRedis(OnRedis, StepsSuite):
    async def test_a_full_disk_takes_no_lock_and_loses_none(self, fencing: Fencing, bench: StoreBench):
        """The store is a server: its disk is another one."""
        fencing.environment["FENCING_URL"] = bench.url
        await asyncio.to_thread(self._fill_the_disk, fencing)

    def _fill_the_disk(self, fencing: Fencing) -> None:
        full = fencing("hold", *BY_FILE, **limited(20))
        assert (full.returncode, full.stdout) == (74, "")
        assert full.stderr == "fencing: the ticket cannot be written to 't': File too large; nothing was done\n"
        assert (fencing("ls", "--json").stdout, list(fencing.folder.glob("*t"))) == ("", [])

        token = held(fencing, *BY_FILE)
        ticket = fencing.path("t").read_text()
        renewed = fencing("renew", "--ticket", "t", **limited(20))
        assert int(said(renewed)["FENCING_TOKEN"]) == token
        assert renewed.stderr.endswith("File too large; the ticket that is there stays good\n")
        assert fencing.path("t").read_text() == ticket
        nothing = fencing("run", "--ticket", "t", "--", "touch", "ran", **limited(20))
        assert (nothing.returncode, fencing.path("ran").exists()) == (74, False)
        assert fencing("renew", "--ticket", "t").returncode == 0

        middle = len(ticket) - 10  # bytes: enough for a ticket without a token, and not for one with it
        assert fencing("run", "--ticket", "t", "--", "true", **limited(middle)).returncode == 0
        assert int(said(fencing("renew", "--ticket", "t"))["FENCING_TOKEN"]) > token
        assert fencing("release", "--ticket", "t").returncode == 0
        taken = fencing("hold", *BY_FILE, **limited(middle))
        assert (taken.returncode, "stays good" in taken.stderr) == (0, True)
        assert said(fencing("renew", "--ticket", "t"))["FENCING_TOKEN"] in taken.stdout
        assert fencing("release", "--ticket", "t").returncode == 0


def test_a_ticket_that_cannot_be_written_takes_no_lock(fencing: Fencing):
    fencing.state.write_text("in the way")
    nowhere = fencing("hold", *BY_A, "--quiet")
    assert (nowhere.returncode, len(nowhere.stderr.splitlines())) == (74, 1)
    assert "set XDG_STATE_HOME, or give --ticket FILE; nothing was done" in nowhere.stderr
    done = fencing("hold", "deploy", "--ticket", "nowhere/t")
    assert (done.returncode, done.stdout) == (74, "")
    assert "the ticket cannot be written to 'nowhere/t': No such file or directory; nothing was done" in done.stderr
    assert fencing("ls", "--json").stdout == ""
