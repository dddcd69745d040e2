"""SQLite: the file, its folder and its file system."""

import asyncio
import os
import stat
from pathlib import Path

import pytest
from diagnosing import ERROR, NOTE, WARNING, by_check, diagnosed, found

from fencing_sdk.diagnosis import Severity, sqlite
from fencing_sdk.diagnosis.checks import judged


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of the file systems: the folder of the tests may well be in memory."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    monkeypatch.setattr(sqlite, "MOUNTS", mounts)
    return mounts


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder}/locks.db"


async def test_nothing_is_found_in_a_sound_file(tmp_path: Path):
    diagnosis = await diagnosed(url_of(tmp_path))
    assert by_check(diagnosis) == {}
    assert diagnosis.measurements.clock_difference is None
    assert len(diagnosis.measurements.tokens) >= 4


@pytest.mark.parametrize(
    ("kind", "tokens", "severity"),
    [
        ("nfs4", "hybrid", ERROR),
        ("cifs", "hybrid", ERROR),
        ("fuse.sshfs", "hybrid", WARNING),
        ("tmpfs", "hybrid", NOTE),
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


async def test_a_folder_that_is_missing_is_found(tmp_path: Path):
    findings = await found(url_of(tmp_path / "none"))
    assert findings["sqlite.folder"].severity == findings["store.reachable"].severity == ERROR


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_found(tmp_path: Path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert asyncio.run(found(url_of(tmp_path)))["sqlite.folder"].severity == ERROR


async def test_a_file_that_every_user_may_write_is_noted(tmp_path: Path):
    (tmp_path / "locks.db").touch()
    (tmp_path / "locks.db").chmod(0o666)
    assert (await found(url_of(tmp_path)))["sqlite.permissions"].severity == NOTE


@pytest.mark.parametrize(("tokens", "severity"), [("hybrid", NOTE), ("counter", ERROR)])
async def test_grants_that_are_not_waited_for_are_found(tmp_path: Path, tokens: str, severity):
    findings = await found(url_of(tmp_path), tokens=tokens, synchronous="normal")
    assert findings["sqlite.synchronous"].severity == severity


async def test_a_disk_that_is_full_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite, "LEAST_FREE", 2**70)
    assert (await found(url_of(tmp_path)))["sqlite.space"].severity == WARNING


async def test_a_file_that_is_no_database_is_found(tmp_path: Path):
    (tmp_path / "locks.db").write_text("no database at all, but text\n" * 100)
    assert (await found(url_of(tmp_path)))["store.reachable"].severity == ERROR


@pytest.mark.parametrize(("version", "severity"), [((3, 23, 9), ERROR), ((3, 24, 0), NOTE), ((3, 34, 9), NOTE)])
def test_a_file_that_may_not_be_written_and_an_old_sqlite_are_found(
    version: tuple[int, int, int], severity: Severity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "locks.db").touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path / "locks.db")  # root may write all
    monkeypatch.setattr(sqlite.sqlite3, "sqlite_version_info", version)
    findings = judged(sqlite.CHECKS, sqlite.FileFacts(tmp_path / "locks.db"))
    assert {finding.check: finding.severity for finding in findings} == {
        "sqlite.file": ERROR,
        "sqlite.version": severity,
    }
