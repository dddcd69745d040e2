"""SQLite: the file and its file system."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from diagnosing import ERROR, WARNING, found
from required_program import require_program

from fencing_sdk import connect
from fencing_sdk.backends.sqlite import file_system
from fencing_sdk.diagnosis import local


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that the folder of the tests is on a disk."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    monkeypatch.setattr(file_system, "MOUNTS", mounts)
    return mounts


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder}/locks.db"


async def test_nothing_is_found_in_a_sound_file(tmp_path: Path):
    assert await found(url_of(tmp_path)) == {}


@pytest.mark.parametrize(
    ("kind", "tokens", "severity"),
    [
        ("nfs4", "hybrid", ERROR),
        ("cifs", "hybrid", ERROR),
        ("gpfs", "hybrid", ERROR),
        ("fuse.glusterfs", "hybrid", ERROR),
        ("fuse.sshfs", "hybrid", WARNING),
        ("fakeowner", "hybrid", WARNING),
        ("overlay", "hybrid", WARNING),
        ("fuse.fuse-overlayfs", "hybrid", WARNING),
        ("tmpfs", "hybrid", None),
        ("tmpfs", "counter", ERROR),
        ("ext4", "counter", None),
    ],
)
def test_a_file_system_is_found(tmp_path: Path, on_a_disk: Path, kind: str, tokens: str, severity):
    on_a_disk.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
    findings = asyncio.run(found(url_of(tmp_path), tokens=tokens))
    assert {check: each.severity for check, each in findings.items()} == (
        {"sqlite.file-system": severity} if severity else {}
    )


@pytest.mark.parametrize(("kind", "said"), [("nfs4", 1), ("smb2", 1), ("overlay", 0), ("fakeowner", 0)])
def test_a_client_says_once_that_its_file_is_on_a_network(tmp_path, on_a_disk: Path, caplog, kind, said):
    async def open_twice() -> None:
        async with connect(url_of(tmp_path)) as locks:
            for file in tmp_path.glob("locks.db*"):
                file.unlink()
            assert await locks.inspect("a") is None

    on_a_disk.write_text(f"server:/x {tmp_path} {kind} rw 0 0\n")
    asyncio.run(open_twice())
    assert [record.getMessage() for record in caplog.records] == said * [
        f"SQLite: '{tmp_path}/locks.db' is on {kind}: two machines may hold one lock; run fencing doctor"
    ]


def test_file_locks_that_exclude_no_other_process_are_found(tmp_path: Path):
    cc, shim = require_program("cc", "gcc"), tmp_path / "no_file_locks.so"
    subprocess.run(
        [cc, "-shared", "-fPIC", "-o", shim, Path(__file__).with_name("no_file_locks.c"), "-ldl"], check=True
    )
    doctor = [sys.executable, "-m", "fencing_sdk", "doctor", "--for", "0", "--json", "--url", url_of(tmp_path)]
    done = subprocess.run(doctor, env={**os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "sqlite.locks" in {finding["check"] for finding in json.loads(done.stdout)["findings"]}


def test_file_locks_of_a_file_that_no_other_process_can_open_are_not_judged(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert asyncio.run(found(url_of(tmp_path))) == {}
    assert local.locks_work(str(tmp_path / "locks.db")) is None


@pytest.mark.parametrize(("tokens", "checks"), [("hybrid", set()), ("counter", {"sqlite.synchronous"})])
async def test_a_counter_that_a_power_failure_repeats_is_found(tmp_path: Path, tokens: str, checks: set[str]):
    assert set(await found(url_of(tmp_path), tokens=tokens, synchronous="normal")) == checks


@pytest.mark.parametrize("folder", ["", "none"])
async def test_a_file_that_cannot_be_opened_is_found(tmp_path: Path, folder: str):
    (tmp_path / "locks.db").write_text("not a database, but text\n" * 100)
    assert (await found(url_of(tmp_path / folder)))["store.reachable"].severity == ERROR
