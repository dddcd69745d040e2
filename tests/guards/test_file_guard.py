"""FileGuard: files with the token in their name."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from fencing_sdk import ConfigurationError, StaleTokenError, Token
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.guards import files
from fencing_sdk.guards.files import FileGuard, ResourceFolder
from fencing_sdk.testing.suites import GuardSuite

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


class FileSuite(GuardSuite):
    @pytest.fixture
    def guard(self, tmp_path):
        self.path = tmp_path / "files"
        return FileGuard(self.path)

    @asynccontextmanager
    async def reopen(self, guard):
        yield FileGuard(self.path)


class TestFileGuard(FileSuite):
    async def write(self, guard, resource, token, value):
        await guard.write(resource, token, value.encode())

    async def read(self, guard, resource):
        data = await guard.read(resource)
        return None if data is None else data.decode()


class TestFileGuardWithoutALoop(FileSuite):
    async def write(self, guard, resource, token, value):
        await asyncio.to_thread(guard.write_sync, resource, token, value.encode())

    async def read(self, guard, resource):
        data = await asyncio.to_thread(guard.read_sync, resource)
        return None if data is None else data.decode()


@pytest.fixture
def guard(tmp_path):
    return FileGuard(tmp_path)


def names(directory: Path, resource: str = "a") -> list[str]:
    return sorted(path.name for path in (directory / resource).iterdir() if path.name != ".lock")


# What is on disk.


def test_the_last_name_of_a_listing_is_the_one_that_counts(tmp_path, guard):
    for write, name in (
        (lambda: guard.raise_to_sync("a", 7), "0000000000000007.00000000.-.empty"),
        (lambda: guard.write_sync("a", 7, b"plain"), "0000000000000007.00000001.-"),
        (lambda: guard.write_sync("a", Token(7, "ff"), b"known"), "0000000000000007.00000002.ff"),
        (lambda: guard.write_sync("a", Token(1_000, "0"), b"later"), "0000000000001000.00000000.0"),
        (lambda: guard.raise_to_sync("a", Token(2**53 - 1, "a")), "9007199254740991.00000000.a"),
    ):
        write()
        assert names(tmp_path)[-1] == name
    assert (tmp_path / "a" / names(tmp_path)[-1]).read_bytes() == b"later"


def test_raising_a_fence_again_publishes_nothing(tmp_path, guard):
    guard.write_sync("a", OLD, b"data")
    for _ in range(3):
        guard.raise_to_sync("a", NEW)
    assert len(names(tmp_path)) == 2


def test_old_generations_are_cleaned_and_the_one_that_counts_never(tmp_path, guard):
    for token in range(4):
        for _ in range(3):
            guard.write_sync("a", token, b"%d" % token)
            guard.raise_to_sync("a", token)
            assert guard.read_sync("a") == b"%d" % token
    assert names(tmp_path) == ["0000000000000003.00000001.-", "0000000000000003.00000002.-"]


def test_any_bytes_are_data_and_empty_is_not_none(guard):
    for token, data in enumerate([b"", b"\0\xff\r\n", os.urandom(3_000_000), bytearray(b"ab"), memoryview(b"cd")]):
        guard.write_sync("a", token, data)
        assert guard.read_sync("a") == bytes(data)


@pytest.mark.parametrize("data", ["text", None, 7, ["b"]])
async def test_what_are_no_bytes_is_refused(guard, data):
    with pytest.raises(ConfigurationError, match="bytes"):
        guard.write_sync("a", 1, data)
    with pytest.raises(ConfigurationError, match="bytes"):
        await guard.write("a", 1, data)
    assert guard.read_sync("a") is None


def test_a_long_name_is_cut_without_meeting_another_one(tmp_path, guard):
    """A name that looks like a cut one is longer than those that are not cut, so it is cut itself."""
    long = "x" * 400
    guard.write_sync(long, 1, b"long")
    (folder,) = (path.name for path in tmp_path.iterdir())
    assert len(folder) <= 255
    guard.write_sync(folder, 2, b"its shadow")
    assert guard.read_sync(long) == b"long"
    assert guard.read_sync(folder) == b"its shadow"
    assert len(list(tmp_path.iterdir())) == 2


def test_names_never_lead_out_of_the_directory(tmp_path):
    directory = tmp_path / "inside"
    guard = FileGuard(directory)
    for resource in ("../outside", "..", ".", "/outside", "a/../../outside", "~", "a\\..\\b"):
        guard.write_sync(resource, 1, b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert all(path.is_dir() and len(names(directory, path.name)) == 1 for path in directory.iterdir())


def test_a_link_in_place_of_a_resource_is_not_followed(tmp_path, guard):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "a").symlink_to(outside, target_is_directory=True)
    for call in (lambda: guard.write_sync("a", 1, b"data"), lambda: guard.raise_to_sync("a", 1)):
        with pytest.raises(OSError, match=r"ymbolic link|directory"):
            call()
    with pytest.raises(OSError, match=r"ymbolic link|directory"):
        guard.read_sync("a")
    assert list(outside.iterdir()) == []


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path, guard):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    guard.write_sync("a", OLD, b"data")
    (tmp_path / "a" / "0000000000000099.00000000.-").symlink_to(secret)
    with pytest.raises(OSError, match="ymbolic link"):
        guard.read_sync("a")


def test_foreign_files_are_left_alone(tmp_path, guard):
    guard.write_sync("a", OLD, b"data")
    beyond = ("9999999999999999.00000000.-", f"0000000000000099.00000000.{'a' * 65}")  # no token, and no holder
    foreign = [tmp_path / "a" / name for name in ("notes.txt", "34", "0000000000000099.0.-", "zzz", *beyond)]
    for path in foreign:
        path.write_bytes(b"foreign")
    guard.write_sync("a", NEW, b"newer")
    guard.write_sync("a", NEW, b"newest")
    assert guard.read_sync("a") == b"newest"
    assert all(path.exists() for path in foreign)


@pytest.mark.parametrize("holder", ["", "../x", "a/b", "AB", "g", "a" * 65, "a\n", "\N{ARABIC-INDIC DIGIT THREE}", 7])
def test_a_holder_that_is_no_digest_never_gets_into_a_file_name(tmp_path, guard, holder):
    with pytest.raises(ConfigurationError, match="holder"):
        guard.write_sync("a", Token(1, holder), b"data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("directory", ["", "a\0b", b"a", None, 7])
def test_a_directory_must_be_a_path(directory):
    with pytest.raises(ConfigurationError, match="directory"):
        FileGuard(directory)


def test_nothing_is_created_before_the_first_write(tmp_path):
    guard = FileGuard(tmp_path / "files")
    assert guard.read_sync("a") is None
    assert not (tmp_path / "files").exists()


def test_a_system_without_flock_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HAS_FLOCK", False)
    with pytest.raises(UnsupportedError, match="flock"):
        FileGuard(tmp_path)


# Check and write are one step.


@contextmanager
def locked(directory: Path, resource: str = "a"):
    """Keep the resource locked, as a process would that was stopped while it published."""
    with (directory / resource / ".lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def test_nobody_decides_while_somebody_publishes(tmp_path, monkeypatch):
    """33 has been admitted and is not published yet: 34 waits, so that it takes over what 33 wrote."""
    guard = FileGuard(tmp_path)
    publishing, go_on = threading.Event(), threading.Event()
    publish = ResourceFolder.publish

    def slow_publish(opened, source, generation, *, first):
        if generation.token == 33:
            publishing.set()
            assert go_on.wait(10)
        publish(opened, source, generation, first=first)

    monkeypatch.setattr(ResourceFolder, "publish", slow_publish)
    old = asyncio.create_task(guard.write("a", OLD, b"old"))
    await asyncio.to_thread(publishing.wait, 10)
    new = asyncio.create_task(guard.raise_to("a", NEW))
    done, _ = await asyncio.wait([new], timeout=0.2)
    assert not done, "the fence was raised to 34 between the check and the write of 33"
    go_on.set()
    await asyncio.gather(old, new)
    assert await guard.read("a") == b"old"
    assert await guard.highest("a") == 34


async def test_data_is_written_before_the_lock_is_taken(tmp_path, monkeypatch):
    """However long the disk takes, nobody waits for it; who was overtaken meanwhile is refused."""
    guard = FileGuard(tmp_path)
    drafted, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow_fsync(handle):
        if threading.current_thread().name == "slow disk":
            drafted.set()
            assert go_on.wait(10)
        fsync(handle)

    outcome = []

    def write_slowly():
        try:
            guard.write_sync("a", OLD, b"slow")
        except StaleTokenError as error:
            outcome.append(error)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    writer = threading.Thread(target=write_slowly, name="slow disk")
    writer.start()
    assert await asyncio.to_thread(drafted.wait, 10)
    await guard.write("a", NEW, b"fast")
    assert any(name.startswith(".draft-") for name in names(tmp_path)), "a living writer's draft was cleaned away"
    go_on.set()
    await asyncio.to_thread(writer.join)
    assert [error.fence for error in outcome] == [34]
    assert names(tmp_path) == ["0000000000000034.00000000.bbbbbbbb"]


async def test_a_stopped_process_holds_writers_up_for_seconds_and_readers_not_at_all(tmp_path, monkeypatch):
    guard = FileGuard(tmp_path)
    await guard.write("a", OLD, b"old")
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    with locked(tmp_path):
        with pytest.raises(TimeoutError, match="stopped"):
            await guard.write("a", NEW, b"new")
        with pytest.raises(TimeoutError, match="stopped"):
            await guard.raise_to("a", NEW)
        assert await guard.read("a") == b"old"
        assert await guard.highest("a") == 33
    await guard.write("a", NEW, b"new")
    assert await guard.read("a") == b"new"
    assert len(names(tmp_path)) == 2


def test_an_existing_generation_is_never_overwritten(tmp_path, guard, monkeypatch):
    """Even if the lock were lost: the name is taken, and linking to it fails."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(ResourceFolder, "last", lambda opened: None)
    guard.write_sync("a", NEW, b"first")
    with pytest.raises(FileExistsError):
        guard.write_sync("a", NEW, b"second")
    monkeypatch.undo()
    assert guard.read_sync("a") == b"first"


async def test_a_forked_child_does_not_keep_the_lock(tmp_path, monkeypatch):
    """It inherits the handle of a lock that another thread holds at that moment."""
    guard = FileGuard(tmp_path)
    publish, inherited = ResourceFolder.publish, []

    def publish_and_copy(opened, source, generation, *, first):
        lock = next(handle for handle in range(3, 200) if _leads_to_lock(handle))
        inherited.append(os.dup(lock))  # what fork() does to every handle
        publish(opened, source, generation, first=first)

    monkeypatch.setattr(ResourceFolder, "publish", publish_and_copy)
    guard.write_sync("a", OLD, b"old")
    monkeypatch.undo()
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    guard.write_sync("a", NEW, b"new")
    os.close(*inherited)


def _leads_to_lock(handle: int) -> bool:
    try:
        return Path(f"/proc/self/fd/{handle}").readlink().name == ".lock"
    except OSError:
        return False


# Readers take no lock.


def listing_then(monkeypatch, meanwhile, *, shown=None):
    """Let *meanwhile* happen once, between a reader's listing and what it does with it."""
    listing, pending = ResourceFolder._names, [meanwhile]

    def interrupted(opened):
        found = listing(opened) if shown is None or not pending else shown
        if pending:
            pending.pop()()
        return found

    monkeypatch.setattr(ResourceFolder, "_names", interrupted)


def test_a_reader_whose_file_was_cleaned_away_finds_the_newer_one(guard, monkeypatch):
    guard.write_sync("a", OLD, b"old")
    listing_then(monkeypatch, lambda: write_twice(guard))
    assert guard.read_sync("a") == b"new"


def write_twice(guard):
    """After the second write, the generation before the first one has gone."""
    for _ in range(2):
        guard.write_sync("a", NEW, b"new")


def test_a_reader_whose_listing_missed_everything_looks_under_the_lock(tmp_path, guard, monkeypatch):
    guard.write_sync("a", OLD, b"data")
    listing_then(monkeypatch, lambda: None, shown=[])
    assert guard.read_sync("a") == b"data"


def test_a_reader_does_not_take_an_outdated_marker_for_an_empty_resource(guard, monkeypatch):
    guard.raise_to_sync("a", OLD)
    listing_then(monkeypatch, lambda: write_twice(guard))
    assert guard.read_sync("a") == b"new"


def test_a_file_that_is_listed_and_never_there_is_an_error_and_not_an_empty_resource(tmp_path, guard, monkeypatch):
    guard.write_sync("a", OLD, b"data")
    monkeypatch.setattr(ResourceFolder, "_names", lambda opened: ["0000000000000034.00000000.-"])
    with pytest.raises(OSError, match="listed"):
        guard.read_sync("a")


def test_generations_go_oldest_first(guard, monkeypatch):
    """Else a reader that missed the newest could open an old one that is still there."""
    with monkeypatch.context() as patch:
        patch.setattr(ResourceFolder, "clean", lambda opened: None)
        for token in (3, 1_000, 20_000):
            guard.write_sync("a", token, b"")
    removed, remove = [], ResourceFolder._remove

    def watch(opened, name):
        removed.append(name)
        remove(opened, name)

    monkeypatch.setattr(ResourceFolder, "_remove", watch)
    guard.write_sync("a", 300_000, b"")
    assert [int(name.split(".")[0]) for name in removed if not name.startswith(".")] == [3, 1_000]


def test_what_cannot_be_removed_stays_and_the_write_is_done(tmp_path, guard, monkeypatch):
    unlink = os.unlink

    def stubborn(path, **options):
        if str(path).startswith("0000000000000001"):
            raise PermissionError(path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", stubborn)
    for token in (1, 2, 3, 4):
        guard.write_sync("a", token, b"%d" % token)
    assert guard.read_sync("a") == b"4"
    assert [int(name[:16]) for name in names(tmp_path)] == [1, 2, 3, 4]


# Killed writers.


KILLED = """
import os, signal, sys
from fencing_sdk.guards.files import FileGuard
fsync, left = os.fsync, int(sys.argv[2])
def die(handle):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)
os.fsync = die
FileGuard(sys.argv[1]).write_sync("a", 34, b"by the killed writer")
"""


def kill_at(directory: Path, fsync: int) -> None:
    """Write in a process that is killed at its *fsync*-th fsync: 1 has a draft, 2 has published it."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(directory), str(fsync)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_writer_killed_over_its_draft_changed_nothing_and_the_next_one_cleans_up(tmp_path, guard):
    guard.write_sync("a", OLD, b"before")
    kill_at(tmp_path, 1)
    assert any(name.startswith(".draft-") for name in names(tmp_path))
    assert (guard.read_sync("a"), guard.read_sync("a")) == (b"before", b"before")
    guard.write_sync("a", OLD, b"after")
    assert not any(name.startswith(".draft-") for name in names(tmp_path))


def test_a_writer_killed_after_publishing_has_written_and_nobody_waits_for_it(tmp_path, guard):
    guard.write_sync("a", OLD, b"before")
    kill_at(tmp_path, 2)
    assert guard.read_sync("a") == b"by the killed writer"
    with pytest.raises(StaleTokenError):
        guard.write_sync("a", OLD, b"stale")
    guard.write_sync("a", 35, b"after")
    guard.write_sync("a", 35, b"and again")
    assert len(names(tmp_path)) == 2


def test_a_draft_that_was_taken_for_abandoned_is_made_anew(tmp_path, guard, monkeypatch):
    """Another writer may clean between the creation of a draft and its lock."""
    guard.write_sync("a", OLD, b"before")
    flock, cleaned = fcntl.flock, []

    def cleaned_before(handle, operation):
        if operation == fcntl.LOCK_EX and not cleaned:
            (draft,) = (tmp_path / "a").glob(".draft-*")
            cleaned.append(draft)
            draft.unlink()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", cleaned_before)
    guard.write_sync("a", NEW, b"after")
    assert cleaned
    assert guard.read_sync("a") == b"after"


# The event loop.


async def test_the_event_loop_is_never_blocked(tmp_path, no_blocking_calls):
    guard = FileGuard(tmp_path)
    await guard.write("a", OLD, b"data")
    await guard.raise_to("a", NEW)
    assert await guard.read("a") == b"data"
    assert await guard.highest("a") == 34
