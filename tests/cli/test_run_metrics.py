"""`fencing run` with metrics and with shares, and the process that it starts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import PATIENCE, Fencing, alive, state, until
from prometheus_client.parser import text_string_to_metric_families
from required_program import require_program

from fencing_sdk import connect
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.cli._child import Child
from fencing_sdk.cli._metrics_file import MetricsFile, Result
from fencing_sdk.cli._options import StoreOptions
from fencing_sdk.cli.run import CommandRun, Supervision
from fencing_sdk.events import Acquired, Event

# `fencing run --metrics-file`: what Prometheus reads of each end of a run, and what outlives it.


Values = dict[str, float]
DOCS = Path(__file__).parents[2] / "docs"
NAMES = {f"{result}" for result in Result}


def read(path: Path, lock: str = "job") -> Values:
    """The values of the file, by short names: ``start``, ``end``, ``exit_code``, and a result for its last time."""
    families = list(text_string_to_metric_families(path.read_text()))
    assert all(family.type == "gauge" and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert [sample.labels for sample in samples] == [{"lock": lock}] * len(samples)
    assert all(sample.name.startswith("fencing_run_") for sample in samples)
    values = {
        sample.name.removeprefix("fencing_run_").removesuffix("_timestamp_seconds").removeprefix("last_"): sample.value
        for sample in samples
    }
    assert values.keys() == {"start", "end", "exit_code", *NAMES}
    return values


def run(fencing: Fencing, *arguments: str, code: int) -> Values:
    done = fencing("run", "job", "--metrics-file", "job.prom", *arguments)
    assert done.returncode == code, done.stderr
    return read(fencing.path("job.prom"))


def test_the_last_success_outlives_what_comes_after_it(fencing: Fencing):
    before = time.time()
    first = run(fencing, "--", "sleep", "0.1", code=0)
    assert before < first["start"] < first["end"] == first["success"] < time.time()
    assert {first[name] for name in NAMES - {"success"}} == {0}
    assert stat.S_IMODE(fencing.path("job.prom").stat().st_mode) == 0o644
    failed = run(fencing, "--", "sh", "-c", "exit 7", code=7)
    assert (failed["exit_code"], failed["success"]) == (7, first["success"])
    assert first["end"] < failed["start"] <= failed["end"] == failed["failure"]
    missing = run(fencing, "--", "no-such-command", code=127)
    assert (missing["exit_code"], missing["success"]) == (127, first["success"])
    away = run(fencing, "--url", "sqlite:////no/such/folder/locks.db", "--", "true", code=69)
    assert away["unavailable"] > missing["end"]
    assert away | {"unavailable": 0} == missing  # nothing was run
    assert [path.name for path in fencing.folder.glob("*job.prom*")] == ["job.prom"]


def test_a_command_that_runs_has_a_start_after_its_end_and_a_skipped_one_changes_neither(fencing: Fencing):
    ended = run(fencing, "--", "true", code=0)
    script = "echo > ready; until [ -e enough ]; do sleep 0.05; done"
    process = fencing.start("run", "job", "--metrics-file", "job.prom", "--", "sh", "-c", script)
    until(lambda: read(fencing.path("job.prom"))["start"] > ended["start"], "the start")
    running = read(fencing.path("job.prom"))
    assert running | {"start": ended["start"]} == ended
    skipped = run(fencing, "--quiet", "--", "true", code=75)
    assert skipped["skip"] > running["start"]
    assert skipped | {"skip": 0} == running
    fencing.path("enough").touch()
    assert process.wait() == 0
    assert read(fencing.path("job.prom"))["skip"] == skipped["skip"]


@pytest.mark.parametrize(("on_loss", "code"), [("kill", 76), ("warn", 5)])
def test_a_loss_is_no_success_whatever_became_of_the_command(fencing: Fencing, on_loss: str, code: int):
    script = "echo > ready; until [ -e enough ]; do sleep 0.05; done; exit 5"
    options = ("--ttl", "8", "--on-loss", on_loss, "--metrics-file", "job.prom")
    process = fencing.start("run", "job", *options, "--", "sh", "-c", script)
    fencing.appears("ready")
    fencing.take_away()
    if on_loss == "warn":
        assert "the command goes on" in process.stderr.readline()
        fencing.path("enough").touch()
    assert process.wait() == code
    lost = read(fencing.path("job.prom"))
    assert lost["loss"] == lost["end"] > lost["start"]
    assert (lost["exit_code"], lost["success"], lost["failure"]) == (code, 0, 0)


def test_a_name_cannot_end_its_label(fencing: Fencing):
    name = 'a"} 1\\n\\'
    for _ in range(2):
        assert fencing("run", name, "--metrics-file", "job.prom", "--", "true").returncode == 0
    values = read(fencing.path("job.prom"), name)
    failed = fencing("run", name, "--metrics-file", "job.prom", "--", "false")
    assert failed.returncode == 1
    assert read(fencing.path("job.prom"), name)["success"] == values["success"] > 0


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\xff\xfe\x00",
        b'fencing_run_last_success_timestamp_seconds{lock="job"} NaN\n',
        b'fencing_run_last_success_timestamp_seconds{lock="another"} 5\n',
    ],
)
def test_a_file_of_others_is_replaced(fencing: Fencing, before: bytes):
    fencing.path("job.prom").write_bytes(before)
    assert run(fencing, "--", "false", code=1)["success"] == 0


@pytest.mark.parametrize("path", ["no/such/folder/job.prom", "folder.prom"])
def test_a_file_that_cannot_be_written_is_one_message_and_the_command_runs(fencing: Fencing, path: str):
    fencing.path("folder.prom").mkdir()
    done = fencing("run", "job", "--metrics-file", path, "--", "touch", "ran")
    assert done.returncode == 0
    assert done.stderr.count(f"the metrics file '{path}' cannot be written: ") == 1
    assert fencing.path("ran").exists()
    assert list(fencing.folder.glob(".*prom*")) == []


async def test_runs_that_write_at_the_same_time_lose_no_value_and_show_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fencing_sdk.cli._metrics_file._PATIENCE", PATIENCE)  # a machine may stand still
    path = tmp_path / "job.prom"
    files = [MetricsFile(path, "job") for _ in Result]
    for turn in range(1, 30):
        began = float(turn)
        ends = [file.ended(result, 0, began, began) for file, result in zip(files, Result, strict=True)]
        async with asyncio.TaskGroup() as tasks:
            for end in ends:
                tasks.create_task(end)
            if turn > 1:
                read(path)
        values = read(path)
        assert {values[name] for name in NAMES} == {turn}


def test_the_rules_for_alerts_pass_their_tests():
    program = require_program("promtool", "prometheus")
    done = subprocess.run([program, "test", "rules", DOCS / "alerts-run_test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_rules_ask_for_what_is_in_the_file_and_the_page_names_them(tmp_path: Path):
    await MetricsFile(tmp_path / "job.prom", "job").started(1.0)
    rules, page = (DOCS / "alerts-run.yml").read_text(), (DOCS / "cli.md").read_text()
    asked = set(re.findall(r"fencing_run_\w+_seconds", rules))
    there = set(re.findall(r"^(fencing_run_\w+){", (tmp_path / "job.prom").read_text(), re.MULTILINE))
    assert asked <= there
    assert there <= set(re.findall(r"`(fencing_run_\w+)`", page))
    assert re.findall(r"^\| `(FencingRun\w+)` \|", page, re.MULTILINE) == re.findall(r"alert: (\w+)", rules)


# `fencing run --permits`, `--shared` and `--exclusive`: who runs beside whom, and what each of them is told.


LONG = "60"
PROGRAM = f"{sys.executable} -m fencing_sdk"


def hold(fencing: Fencing, name: str, *options: str) -> dict[str, str]:
    """Start a command under the lock ``job`` that goes on; return what it finds in its environment."""
    script = f"env > {name}.part; echo $$ > {name}.pid; mv {name}.part {name}; exec sleep {LONG}"
    fencing.start("run", "job", *options, "--", "sh", "-c", script)
    until(lambda: fencing.path(name).exists(), f"the start of {name}")
    lines = fencing.path(name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("FENCING_"))


def refused(fencing: Fencing, *options: str) -> bool:
    done: subprocess.CompletedProcess[str] = fencing("run", "job", *options, "--", "true")
    assert done.returncode in {0, 75}
    return done.returncode == 75


def test_so_many_commands_run_at_a_time_each_with_a_number_and_a_token(fencing: Fencing):
    first, second = hold(fencing, "first", "--permits", "2"), hold(fencing, "second", "--permits", "2")
    assert (first["FENCING_PERMIT"], second["FENCING_PERMIT"]) == ("0", "1")
    assert first["FENCING_LOCK"] == second["FENCING_LOCK"] == "job"
    assert int(first["FENCING_TOKEN"]) < int(second["FENCING_TOKEN"])
    assert first["FENCING_HOLDER"] != second["FENCING_HOLDER"]
    third = fencing("run", "job", "--permits", "2", "--", "true")
    assert third.returncode == 75
    assert re.search("all 2 permits of 'job' were held, one of them by sh .*, nothing was run", third.stderr)
    assert refused(fencing)
    assert not refused(fencing, "--permits", "3")


def test_a_lock_within_a_permit_has_no_permit(fencing: Fencing):
    inner = [*PROGRAM.split(), "run", "other", "--", "env"]
    out = fencing("run", "job", "--permits", "2", "--pass-url", "--", *inner).stdout
    assert "FENCING_LOCK=other\n" in out
    assert "FENCING_PERMIT" not in out


async def test_those_who_share_a_lock_are_one_holder_to_a_guard_and_no_one_else_runs_beside_them(fencing: Fencing):
    first = await asyncio.to_thread(hold, fencing, "first", "--shared")
    second = await asyncio.to_thread(hold, fencing, "second", "--shared")
    assert first["FENCING_TOKEN"] == second["FENCING_TOKEN"]
    assert first["FENCING_HOLDER"] == second["FENCING_HOLDER"]  # else a guard would refuse one of them
    assert "FENCING_PERMIT" not in first
    async with connect(f"sqlite:///{fencing.store}") as locks, asyncio.TaskGroup() as tasks:
        assert len(await locks.holders("job")) == 2
        assert await asyncio.to_thread(refused, fencing, "--exclusive")
        assert await asyncio.to_thread(refused, fencing)
        options = ("run", "job", "--exclusive", "--wait", "forever", "--", "true")
        waiting = tasks.create_task(asyncio.to_thread(fencing, *options))
        while not await locks.waiters("job"):  # noqa: ASYNC110  (it is in the store)
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(refused, fencing, "--shared"), "it passed one who waits"
        for name in ("first", "second"):
            os.kill(await asyncio.to_thread(fencing.pid, f"{name}.pid"), signal.SIGTERM)
        assert (await waiting).returncode == 0


def test_exclusive_excludes_those_who_share(fencing: Fencing):
    hold(fencing, "first", "--exclusive")
    assert refused(fencing, "--shared")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what a command has started")
def test_a_loss_does_not_stop_what_another_command_has_started_that_shares_the_lock(fencing: Fencing):
    """They have the same token."""
    orphan = f"(timeout {LONG} sh -c 'echo $$ > orphan.pid; exec sleep {LONG}' &); exec sleep {LONG}"
    other = fencing.start("run", "job", "--shared", "--", "sh", "-c", orphan)
    pid = fencing.pid("orphan.pid")
    done = fencing("run", "job", "--shared", "--max-hold", "500ms", "--", "sleep", LONG)
    assert done.returncode == 76
    assert alive(pid)
    assert other.poll() is None
    assert "detached" not in done.stderr


@pytest.mark.parametrize("options", [("--permits", "2"), ("--shared",), ("--exclusive",)], ids=" ".join)
def test_a_command_that_asks_for_a_share_of_the_lock_around_it_is_told_so(fencing: Fencing, options: tuple[str, ...]):
    inner = [*PROGRAM.split(), "run", "job", *options, "--wait", "forever", "--", "true"]
    done = fencing("run", "job", *options, "--pass-url", "--", *inner)
    assert done.returncode == 2
    assert "'job' is held by the fencing run around this one" in done.stderr


@pytest.mark.parametrize("option", [("--permits", "2"), ("--shared",), ("--exclusive",)], ids=" ".join)
def test_a_store_without_shares_means_69(fencing: Fencing, option: tuple[str, ...]):
    done = fencing("run", "job", *option, "--url", "kahuna://127.0.0.1:1", "--", "touch", "ran")
    assert done.returncode == 69
    assert done.stderr.endswith("nothing was run\n")
    assert not fencing.path("ran").exists()


# What no signal from outside can hit at the right moment.


STORE = StoreOptions("memory://").store()


async def test_a_signal_between_the_grant_and_the_start_starts_nothing(tmp_path: Path):
    job = CommandRun(("touch", str(tmp_path / "ran")), "term", quiet=False)
    watch = Supervision(job, STORE)

    def interrupt(event: Event) -> None:
        if isinstance(event, Acquired):
            watch.receive(signal.SIGTERM)

    async with connect(MemoryBackend(), observers=[interrupt]) as locks:
        await watch.run(locks.lock("job"))
        assert await locks.inspect("job") is None
    assert (watch.fate, watch.code) == ("nothing was run", 128 + signal.SIGTERM)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("may_go_on", [True, False])
async def test_a_suspended_command_goes_on_only_with_its_lease(tmp_path: Path, may_go_on: bool):
    script = f"echo $$ > {tmp_path}/pid; exec sleep 60"
    child = Child(["sh", "-c", script], os.environ, death_signal=signal.SIGKILL, may_go_on=lambda: may_go_on)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T", "the stop")
    child.suspended = True
    child.go_on()
    assert (state(pid) != "T") == may_go_on
    await child.stop(0)
    assert child.code == 128 + signal.SIGKILL


async def test_a_command_that_cannot_even_be_started_gives_the_lock_back(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    job = CommandRun(("true", "x" * 2**22), "term", quiet=False)
    watch = Supervision(job, STORE)
    async with connect(MemoryBackend()) as locks:
        await watch.run(locks.lock("job"))
        assert await locks.inspect("job") is None
    assert watch.code == 126
    assert not caplog.records
    assert "cannot be started: Argument list too long" in capfd.readouterr().err
