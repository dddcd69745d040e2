"""`fencing run`: what a command gets, what its caller gets, and who is left alive."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_line import PATIENCE, Fencing, alive, state, until
from inside import check_label, facts_about_command, read_facts, say_kept
from redis_server import RedisServer

from fencing_sdk import Holder, connect
from fencing_sdk.cli.run import CommandRun

pytest_plugins = ["redis_fixtures"]

LONG = "60"


def shell(script: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", script)


# What a command gets, and what its caller gets back.


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -PIPE $$; exit 1", 141)])
def test_the_exit_code_of_the_command_passes_through(fencing: Fencing, script: str, code: int):
    done = fencing("run", "job", *shell(script))
    assert done.returncode == code
    assert not done.stderr


def test_the_command_gets_streams_files_and_arguments_as_they_are(fencing: Fencing):
    with fencing.path("three").open("wb") as three:
        script = f'cat; echo "$@"; echo error >&2; echo three > /dev/fd/{three.fileno()}'
        process = fencing.start(
            "run",
            "job",
            "--ttl",
            "60",
            *shell(script),
            "zero",
            "--ttl",
            "--",
            "a b",
            stdin=subprocess.PIPE,
            pass_fds=(three.fileno(),),
        )
        out, err = process.communicate("in\n")
    assert (process.returncode, out, err) == (0, "in\n--ttl -- a b\n", "error\n")
    assert fencing.path("three").read_text() == "three\n"


def test_the_command_finds_the_lease_in_its_environment(fencing: Fencing):
    fencing.environment["MINE"] = "kept"
    fencing.environment["FENCING_HOLDER"] = "00000000"  # of the command that has started this one
    script = "echo $FENCING_TOKEN $FENCING_LOCK $FENCING_DEADLINE $MINE $FENCING_HOLDER"
    before = time.time()
    first, second = (fencing("run", "job/é", "--ttl", "60", *shell(script)).stdout.split() for _ in range(2))
    assert first[1] == "job/é"
    assert first[3] == "kept"
    assert before + 40 < float(first[2]) < time.time() + 60
    assert int(first[0]) < int(second[0])
    assert re.fullmatch(r"[0-9a-f]{8}", first[4])
    assert first[4] not in {second[4], "00000000"}


def test_the_default_store_is_a_file_that_only_its_user_can_reach(fencing: Fencing):
    del fencing.environment["FENCING_URL"]
    assert fencing("run", "job", "--", "true").returncode == 0
    folder = fencing.state / "fencing"
    assert (folder / "locks.db").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_environment_names_the_store(fencing: Fencing):
    fencing.environment["FENCING_URL"] = "sqlite:///mine.db"
    assert fencing("run", "job", "--", "true").returncode == 0
    assert fencing.path("mine.db").exists()
    assert not fencing.state.exists()


# One at a time.


def test_a_taken_lock_means_75_and_nothing_was_run(fencing: Fencing):
    fencing.start("run", "job", *shell(f"echo $$ > holder.pid; exec sleep {LONG}"))
    fencing.appears("holder.pid")
    second = fencing("run", "job", *shell("echo > ran"))
    quiet = fencing("run", "job", "--quiet", "--wait", "0.1", *shell("echo > ran"))
    assert (second.returncode, quiet.returncode) == (75, 75)
    assert re.search(r"'job' was held by sh \(pid \d+\) on .+ since \d{4}-.+, nothing was run", second.stderr)
    assert not quiet.stderr
    assert not fencing.path("ran").exists()
    assert fencing("run", "another job", "--", "true").returncode == 0


def test_waiting_commands_run_one_after_the_other(fencing: Fencing):
    fencing.path("count").write_text("0")
    add_one = "n=$(cat count); sleep 0.1; echo $((n + 1)) > count"
    processes = [fencing.start("run", "count", "--wait", wait, *shell(add_one)) for wait in ("forever", "30") * 2]
    assert [process.wait() for process in processes] == [0] * 4
    assert fencing.path("count").read_text() == "4\n"


def test_a_lock_stays_taken_for_a_time_although_the_command_has_ended(fencing: Fencing):
    began = time.monotonic()
    first = fencing("run", "job", "--at-least", "1s", "--", "true")
    assert first.returncode == 0
    while (done := fencing("run", "job", "--at-least", "1s", *shell("echo > ran"))).returncode == 75:
        pass
    assert done.returncode == 0
    assert time.monotonic() - began >= 1
    assert fencing.path("ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--label", "deploy 42")])
def test_others_see_until_when_a_lock_is_kept_and_that_nothing_runs(fencing: Fencing, options: tuple[str, ...]):
    """And do not look for a command that has ended."""
    before = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    assert fencing("run", "job", "--at-least", "1h", *options, "--", "true").returncode == 0
    refused = fencing("run", "job", "--", "true")
    assert refused.returncode == 75
    listed = json.loads(fencing("ls", "--json").stdout)["kept_until"]
    looks = (fencing("ls").stdout, fencing("show", "job").stdout, refused.stderr, f"kept until {listed}, nothing runs")
    for seen in looks:
        note = re.search(r"kept until (\S{25}), nothing runs", seen)
        assert note, seen
        assert before <= datetime.fromisoformat(note[1]) <= datetime.now(UTC) + timedelta(hours=1.02)  # a store's clock
    for seen in looks[:3]:
        assert ("deploy 42" if options else "true (pid ") in seen


def test_others_see_that_a_command_runs_whose_lock_is_kept_later(fencing: Fencing):
    fencing.start("run", "job", "--at-least", "1h", *HOLDS)
    fencing.appears("holder.pid")
    for seen in (fencing("ls").stdout, fencing("show", "job").stdout, fencing("run", "job", "--", "true").stderr):
        assert "when its run has ended, kept until " in seen
        assert "nothing runs" not in seen
    assert json.loads(fencing("ls", "--json").stdout)["kept_until"] is None


@pytest.mark.slow
@pytest.mark.parametrize("on", [(), ("--at-least-on", "success"), ("--at-least-on", "any")], ids=" ".join)
def test_a_command_that_fails_gives_its_lock_back_at_once_unless_any_end_keeps_it(
    fencing: Fencing, on: tuple[str, ...]
):
    """So that another machine may take over; a command that cannot run keeps nothing in any case."""
    assert fencing("run", "fails", "--at-least", "1h", *on, *shell("exit 7")).returncode == 7
    assert fencing("run", "fails", "--", "true").returncode == (75 if "any" in on else 0)
    assert fencing("run", "missing", "--at-least", "1h", *on, "--", "no-such-command").returncode == 127
    assert fencing("run", "missing", "--", "true").returncode == 0


def test_a_command_that_takes_longer_gives_its_lock_back_at_once(fencing: Fencing):
    assert fencing("run", "job", "--at-least", "100ms", "--", "sleep", "0.2").returncode == 0
    assert fencing("run", "job", "--", "true").returncode == 0


def test_a_lock_that_was_taken_away_meanwhile_cannot_be_kept(fencing: Fencing):
    options = ("--at-least", "1h", "--ttl", "600")
    process = fencing.start("run", "job", *options, *shell("echo $$ > holder.pid; read _"), stdin=subprocess.PIPE)
    fencing.appears("holder.pid")
    fencing.take_away()
    _, err = process.communicate("\n")
    assert process.returncode == 76
    assert "the command had ended" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--at-least", "25h"), "at_least_for must be at most"),
        (("--at-least", "60s", "--wait", "5"), "goes without --wait"),
        (("--at-least", "soon"), "--at-least"),
    ],
)
def test_a_time_that_cannot_be_kept_is_wrong_usage(fencing: Fencing, options: tuple[str, ...], message: str):
    done = fencing("run", "job", *options, "--", "true")
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("no-such-command", 127, "command not found"),
        ("./data", 126, "cannot be executed: Permission denied"),
        ("./foreign", 126, "'./foreign': cannot be executed: there is no interpreter '/no/such/sh'"),
        ("./binary", 126, "'./binary': cannot be executed: Exec format error"),
    ],
)
def test_a_command_that_cannot_run_leaves_the_lock_free(fencing: Fencing, command: str, code: int, message: str):
    script(fencing, "data", "not for execution").chmod(0o644)
    script(fencing, "foreign", "#!/no/such/sh\n")
    script(fencing, "binary", "\x7fELF\0\n")
    done = fencing("run", "job", "--", command)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.split("\nfencing: ")) == 1
    assert fencing("run", "job", "--", "true").returncode == 0


def script(fencing: Fencing, name: str, text: str) -> Path:
    path = fencing.path(name)
    path.write_bytes(text.encode())
    path.chmod(0o755)
    return path


def test_a_script_without_a_first_line_is_run_by_a_shell(fencing: Fencing):
    """As flock, nohup and every shell run it."""
    script(fencing, "report", 'echo "$0: $@"; exit 3\n')
    done = fencing("run", "job", "--", "./report", "-x", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (3, "./report: -x a b\n", "")
    fencing.environment["PATH"] = f"{fencing.folder}{os.pathsep}{os.environ['PATH']}"
    done = fencing("run", "job", "--", "report")
    assert (done.returncode, done.stdout) == (3, f"{fencing.folder}/report: \n")


@pytest.mark.parametrize(("wait", "between"), [("0", ()), ("forever", ("second",))])
def test_a_command_that_asks_for_the_lock_around_it_is_told_so(fencing: Fencing, wait: str, between: tuple[str, ...]):
    program = f"{sys.executable} -m fencing_sdk"
    deeper = "".join(f"{program} run {name} --pass-url -- " for name in between)
    inner = f"{deeper}{program} run job --wait {wait} -- touch ran"
    done = fencing("run", "job", "--pass-url", *shell(inner))
    assert done.returncode == 2
    assert "'job' is held by the fencing run around this one, which would wait for itself" in done.stderr
    inner = inner.replace(" run ", f" run --url sqlite:///{fencing.store} ", 1)  # a lock of the same name
    elsewhere = fencing("run", "job", "--url", "sqlite:///other.db", *shell(inner))
    assert (elsewhere.returncode, elsewhere.stderr) == (0, "")
    assert fencing.path("ran").exists()


def test_a_lock_is_free_for_what_a_command_has_left_behind(fencing: Fencing):
    fencing.environment["FENCING_AROUND"] = '1;holder="00000000"'
    assert fencing("run", "job", "--", "true").returncode == 0
    fencing.start("run", "job", *shell(f"echo $$ > holder.pid; exec sleep {LONG}"))
    fencing.appears("holder.pid")
    assert fencing("run", "job", "--", "true").returncode == 75


def test_a_store_that_cannot_be_used_means_69(fencing: Fencing):
    done = fencing("run", "job", "--url", "sqlite:////no/such/folder/locks.db", *shell("echo > ran"))
    assert done.returncode == 69
    assert "nothing was run" in done.stderr
    assert "Traceback" not in done.stderr
    assert not fencing.path("ran").exists()


@pytest.fixture
def away(fencing: Fencing, start_redis: Callable[[], RedisServer]) -> RedisServer:
    """The store of the commands, which is stopped. What they ask of it is in a file."""
    server = start_redis()
    server.stop()
    fencing.environment |= {"FENCING_URL": server.url, "FENCING_RECORD": str(fencing.path("record"))}
    return server


def test_the_wait_for_the_lock_waits_for_a_store_that_is_away(fencing: Fencing, away: RedisServer):
    process = fencing.start("run", "job", "--wait", "5m", *shell("echo held"))
    fencing.appears("record")
    away.start()
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "held\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("around", ["", '1;holder="00000000"'], ids=["", "in another fencing run"])
def test_a_store_that_stays_away_means_69_at_the_end_of_the_wait(fencing: Fencing, away: RedisServer, around: str):
    fencing.environment["FENCING_AROUND"] = around
    done = fencing("run", "job", "--wait", "1", *shell("echo > ran"))
    assert done.returncode == 69
    assert re.search(r"nothing was run: RedisBackend: open failed: no connection .*; waited [\d.]+ s$", done.stderr)
    assert not fencing.path("ran").exists()
    done = fencing("run", "job", *shell("echo > ran"))
    assert done.returncode == 69
    assert "waited" not in done.stderr


def test_a_signal_ends_the_wait_for_a_store_that_is_away(fencing: Fencing, away: RedisServer):
    process = fencing.start("run", "job", "--wait", "5m", *shell("echo > ran"))
    fencing.appears("record")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (143, "", "")


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_ends_work_reaches_everything_the_command_started(fencing: Fencing, number: signal.Signals):
    # A shell waits for what it started before it looks at its trap.
    script = f'trap "echo caught; exit 9" {number.name[3:]}; sh -c "echo > ready; exec sleep {LONG}"'
    process = fencing.start("run", "job", *shell(script))
    fencing.appears("ready")
    process.send_signal(number)
    out, _ = process.communicate()
    assert (process.returncode, out) == (9, "caught\n")


def test_a_signal_for_the_command_alone_does_not_reach_what_it_started(fencing: Fencing):
    script = f'trap "echo caught > caught" USR1; sleep {LONG} & echo $! > child.pid; echo > ready; wait; wait; exit 3'
    process = fencing.start("run", "job", *shell(script))
    fencing.appears("ready")
    process.send_signal(signal.SIGUSR1)
    fencing.appears("caught")
    assert alive(fencing.pid("child.pid"))
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM


def test_a_signal_while_waiting_ends_the_wait_and_nothing_was_run(fencing: Fencing):
    fencing.start("run", "job", *shell(f"echo $$ > holder.pid; exec sleep {LONG}"))
    fencing.appears("holder.pid")
    fencing.environment["FENCING_RECORD"] = "events.jsonl"
    waiting = fencing.start("run", "job", "--wait", "forever", *shell("echo > ran"))
    fencing.appears("events.jsonl")
    waiting.terminate()
    assert waiting.wait() == 128 + signal.SIGTERM
    assert not fencing.path("ran").exists()


def test_a_signal_that_was_ignored_stays_ignored(fencing: Fencing):
    command = [sys.executable, "-m", "fencing_sdk", "run", "job", *shell("echo > ready; sleep 0.3; echo done")]
    process = subprocess.Popen(
        ["nohup", *command],
        cwd=fencing.folder,
        env=fencing.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    fencing.appears("ready")
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate()
    assert (process.returncode, out) == (0, "done\n")


BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP})"
IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"


@pytest.mark.parametrize("how", [BLOCKED, IGNORED], ids=["blocked", "ignored"])
def test_the_end_of_the_command_is_heard_although_its_signal_was_blocked(fencing: Fencing, how: str):
    arguments = [sys.executable, "-m", "fencing_sdk", "run", "job", *shell("sleep 0.1; exit 7")]
    start = f"import os, signal, sys; {how}; os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", start, *arguments], cwd=fencing.folder, env=fencing.environment, timeout=PATIENCE
    )
    assert done.returncode == 7


IN_NAMESPACES = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
LEAVE_ORPHANS = """
for n in 1 2 3; do (sh -c 'exit 0' &); done
n=0
until [ $n -gt 400 ]; do
    grep -qs '^[0-9]* (sh) Z 1 ' /proc/[0-9]*/stat || exit 7
    n=$((n + 1)); sleep 0.05
done
"""


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*IN_NAMESPACES, "true"], capture_output=True).returncode != 0,
    reason="needs a namespace of its own",
)
def test_the_first_process_of_a_container_collects_what_has_ended(fencing: Fencing):
    arguments = [sys.executable, "-m", "fencing_sdk", "run", "job", *shell(LEAVE_ORPHANS)]
    done = subprocess.run([*IN_NAMESPACES, *arguments], cwd=fencing.folder, env=fencing.environment, timeout=PATIENCE)
    assert done.returncode == 7


# The lease is lost.

SESSION = "import os; os.setsid(); os.execvp('sh', ['sh', '-c', os.environ['RUN']])"
DAEMON = f"import os; os.fork() and os._exit(0); {SESSION[len('import os; ') :]}"
GROUPS_OF_THEIR_OWN = f"""
timeout {LONG} sh -c 'echo $$ > step.pid; while :; do sleep 1; done' &
RUN='echo $$ > session.pid; exec sleep {LONG}' {sys.executable} -c "{SESSION}" &
(timeout {LONG} sh -c 'echo $$ > orphan.pid; trap "" TERM; while :; do sleep 1; done' &)
RUN='echo $$ > daemon.pid; exec sleep {LONG}' {sys.executable} -c "{DAEMON}" > nowhere 2>&1
echo > ready; wait
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what a command has started")
@pytest.mark.parametrize("on_loss", ["term", "kill"])
def test_a_lost_lease_stops_what_has_left_the_group_and_names_what_was_detached(fencing: Fencing, on_loss: str):
    process = fencing.start("run", "job", "--ttl", "20", "--on-loss", on_loss, *shell(GROUPS_OF_THEIR_OWN))
    step, session, orphan, daemon = (fencing.pid(f"{name}.pid") for name in ("step", "session", "orphan", "daemon"))
    fencing.appears("ready")
    assert fencing("break", "job", "--reason", "it hangs", "--yes").returncode == 0
    _, err = process.communicate()
    assert process.returncode == 76
    for pid in (step, session, orphan):
        until(lambda pid=pid: not alive(pid), "the end of what the command started")
    assert alive(daemon)
    assert f"the command was stopped, but not what it has detached: process {daemon}" in err


STUBBORN = f"""
trap 'echo > told' TERM
sh -c 'trap "" TERM; echo $$ > grandchild.pid; while :; do sleep {LONG}; done' &
echo $$ > command.pid; echo > ready
while :; do sleep {LONG} & wait $!; done
"""


def test_a_lost_lease_stops_the_whole_group_stubborn_or_not(fencing: Fencing):
    process = fencing.start("run", "job", "--ttl", "20", *shell(STUBBORN))  # 2 s to answer SIGTERM
    fencing.appears("ready")
    fencing.appears("grandchild.pid")
    broken = fencing("break", "job", "--reason", "it hangs", "--yes")  # the supervisor is told, and need not renew
    assert broken.returncode == 0
    _, err = process.communicate()
    assert process.returncode == 76
    assert "'job'" in err
    assert "the command was stopped" in err
    fencing.appears("told")  # SIGTERM first
    until(lambda: not alive(fencing.pid("command.pid")), "the end of the command")
    until(lambda: not alive(fencing.pid("grandchild.pid")), "the end of what it started")


def test_on_loss_kill_does_not_ask(fencing: Fencing):
    process = fencing.start("run", "job", "--ttl", "12", "--on-loss", "kill", *shell(STUBBORN))
    fencing.appears("ready")
    fencing.appears("grandchild.pid")
    fencing.take_away()
    assert process.wait() == 76
    until(lambda: not alive(fencing.pid("grandchild.pid")), "the end of what the command started")
    assert not fencing.path("told").exists()


@pytest.mark.parametrize("read", [True, False])
def test_on_loss_warn_goes_on_and_says_so_if_anybody_listens(fencing: Fencing, read: bool):
    script = "echo > ready; until [ -e enough ]; do sleep 0.05; done; exit 5"
    fencing.environment["FENCING_RECORD"] = "events.jsonl"
    process = fencing.start("run", "job", "--ttl", "4", "--on-loss", "warn", *shell(script))
    fencing.appears("ready")
    if not read:
        process.stderr.close()
    fencing.take_away()
    if read:
        assert "the command goes on" in process.stderr.readline()
    until(lambda: '"lost"' in fencing.path("events.jsonl").read_text(), "the loss")
    fencing.path("enough").touch()
    assert process.wait() == 5


def test_a_supervisor_that_was_frozen_stops_its_command_as_soon_as_it_runs(fencing: Fencing):
    process = fencing.start("run", "job", "--ttl", "4", *shell(STUBBORN))
    fencing.appears("ready")
    fencing.appears("grandchild.pid")
    process.send_signal(signal.SIGSTOP)
    assert fencing("run", "job", "--wait", "60", "--", "true").returncode == 0  # the lock is handed on
    assert alive(fencing.pid("command.pid"))  # a frozen supervisor stops nobody: FENCING_TOKEN is for that
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 76
    assert "stood still past the lease's deadline" in err
    until(lambda: not alive(fencing.pid("grandchild.pid")), "the end of what the command started")
    assert not fencing.path("told").exists()  # too late to ask


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process's children and states")
def test_a_stop_at_the_moment_in_which_the_command_is_started_stops_it_too(fencing: Fencing):
    """Ctrl-Z must not stop the heartbeat alone."""
    stop_at_once = """
import os, signal
spawn = os.posix_spawn

def spawn_and_stop(*arguments, **options):
    pid = spawn(*arguments, **options)
    signal.raise_signal(signal.SIGTSTP)
    return pid

os.posix_spawn = spawn_and_stop
"""
    (fencing.folder / "sitecustomize.py").write_text(stop_at_once)
    fencing.environment["PYTHONPATH"] = f"{fencing.folder}{os.pathsep}{fencing.environment.get('PYTHONPATH', '')}"
    process = fencing.start("run", "job", *shell("echo > ready; until [ -e enough ]; do sleep 0.05; done"))
    until(lambda: state(process.pid) == "T", "the stop")
    (command,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert state(int(command)) == "T"
    process.send_signal(signal.SIGCONT)
    fencing.appears("ready")
    fencing.path("enough").touch()
    assert process.wait() == 0


def test_a_store_that_is_gone_ends_the_command_at_the_deadline(fencing: Fencing):
    del fencing.environment["FENCING_URL"]
    process = fencing.start("run", "job", "--ttl", "4", *shell(f"echo > ready; exec sleep {LONG}"))
    fencing.appears("ready")
    (fencing.state / "fencing").rename(fencing.state / "gone")
    assert process.wait() == 76


def test_a_command_that_ends_after_the_deadline_did_not_end_well(fencing: Fencing):
    script = "echo > ready; until [ -e enough ]; do sleep 0.05; done"
    process = fencing.start("run", "job", "--ttl", "4", *shell(script))
    fencing.appears("ready")
    process.send_signal(signal.SIGSTOP)
    assert fencing("run", "job", "--wait", "60", *shell("touch enough; sleep 0.3")).returncode == 0
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 76
    assert "the command ended too late" in err or "the command was stopped" in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent died")
def test_a_supervisor_that_is_killed_takes_its_command_along(fencing: Fencing):
    process = fencing.start("run", "job", *shell(f"echo $$ > command.pid; exec sleep {LONG}"))
    pid = fencing.pid("command.pid")
    process.kill()
    until(lambda: not alive(pid), "the end of the command")


# How long, who, and what is told.


def test_times_are_durations(fencing: Fencing):
    fencing.environment["FENCING_RECORD"] = "events.jsonl"
    done = fencing("run", "job", "--ttl", "2m", "--wait", "1500ms", "--max-hold", "1h30m", "--", "true")
    assert (done.returncode, done.stderr) == (0, "")
    lines = map(json.loads, fencing.path("events.jsonl").read_text().splitlines())
    assert [line["ttl"] for line in lines if line["kind"] == "acquired"] == [120.0]


def test_a_command_that_hangs_is_stopped_after_max_hold(fencing: Fencing):
    done = fencing("run", "job", "--ttl", "1h", "--max-hold", "500ms", *shell(f"exec sleep {LONG}"))
    assert done.returncode == 76
    assert "max_hold" in done.stderr
    assert "the command was stopped" in done.stderr
    assert fencing("run", "job", "--", "true").returncode == 0


async def seen_by_others(fencing: Fencing, *arguments: str) -> str | None:
    fencing.start("run", "job", *arguments)
    fencing.appears("holder.pid")
    async with connect(f"sqlite:///{fencing.store}") as locks:
        holder = await locks.inspect("job")
    return holder.label


HOLDS = shell(f"echo $PPID > supervisor; echo $$ > holder.pid; exec sleep {LONG}")


async def test_others_see_where_a_command_runs_and_since_when_but_not_its_arguments(fencing: Fencing):
    before = datetime.now(UTC).replace(microsecond=0)
    label = await seen_by_others(fencing, *HOLDS, "--password=secret")
    heard = json.loads(label)
    assert {**heard, "start": ""} == {
        "host": os.uname().nodename,
        "pid": int(fencing.path("supervisor").read_text()),
        "program": "sh",
        "start": "",
    }
    assert before <= datetime.fromisoformat(heard["start"]) <= datetime.now(UTC)
    assert "secret" not in label


@pytest.mark.parametrize("label", ["deploy 42", ""])
async def test_others_see_the_label_that_was_given(fencing: Fencing, label: str):
    assert (await seen_by_others(fencing, "--label", label, *HOLDS) or "") == label
    refused = fencing("run", "job", "--", "true")
    assert "'job' was held by another holder, nothing was run" + f": '{label}'" * bool(label) in refused.stderr


@pytest.mark.parametrize(
    "program", [b"/opt/" + b"d" * 900 + b"/" + b"n" * 900, b"\xff\xfe" * 200, b'"\\' * 300, "\U0001f600é".encode() * 90]
)
def test_a_name_of_any_bytes_makes_a_label_that_every_store_keeps(program: bytes):
    label = facts_about_command(CommandRun((os.fsdecode(program), "--password=secret"), "term").program)
    kept = say_kept(label, 86_400, 0.05)
    assert check_label(kept) == kept
    assert kept.isascii(), "so that a database in any encoding keeps it"
    assert "secret" not in kept
    assert len(json.loads(label)["program"]) <= 64
    assert read_facts(Holder("job", 1, "9f8a01c2", 100.0, kept)).who


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_verbose_is_one_line_at_the_start_and_one_at_the_end(fencing: Fencing, script: str, code: int):
    done = fencing("run", "job", "--verbose", *shell(f"echo $FENCING_TOKEN; {script}"), "--password=secret")
    start, end = done.stderr.splitlines()
    assert start == f"fencing: lock 'job' is held with token {done.stdout.strip()}; 'sh' starts"
    assert re.fullmatch(rf"fencing: 'sh' has ended with exit code {code} after \d+\.\d s", end)
