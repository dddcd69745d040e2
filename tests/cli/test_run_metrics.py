"""`fencing run --metrics-file`: what Prometheus reads of each end of a run, and what outlives it."""

import asyncio
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest
from command_line import PATIENCE, Fencing, until
from prometheus_client.parser import text_string_to_metric_families
from required_program import require_program

from fencing_sdk.cli._metrics_file import MetricsFile, Result

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
    options = ("--ttl", "3", "--on-loss", on_loss, "--metrics-file", "job.prom")
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
def test_a_file_that_cannot_be_written_is_a_message_and_the_command_runs(fencing: Fencing, path: str):
    fencing.path("folder.prom").mkdir()
    done = fencing("run", "job", "--metrics-file", path, "--", "touch", "ran")
    assert done.returncode == 0
    assert f"the metrics file '{path}' cannot be written: " in done.stderr
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
