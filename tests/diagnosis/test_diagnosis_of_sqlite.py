"""SQLite: the file and its file system."""

import asyncio
from pathlib import Path

import pytest
from diagnosing import ERROR, WARNING, found

from fencing_sdk.diagnosis import local


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that the folder of the tests is on a disk."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    monkeypatch.setattr(local, "MOUNTS", mounts)
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
        ("fuse.sshfs", "hybrid", WARNING),
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


@pytest.mark.parametrize(("tokens", "checks"), [("hybrid", set()), ("counter", {"sqlite.synchronous"})])
async def test_a_counter_that_a_power_failure_repeats_is_found(tmp_path: Path, tokens: str, checks: set[str]):
    assert set(await found(url_of(tmp_path), tokens=tokens, synchronous="normal")) == checks


@pytest.mark.parametrize("folder", ["", "none"])
async def test_a_file_that_cannot_be_opened_is_found(tmp_path: Path, folder: str):
    (tmp_path / "locks.db").write_text("not a database, but text\n" * 100)
    assert (await found(url_of(tmp_path / folder)))["store.reachable"].severity == ERROR
