"""
What must not get out: owner ids, which may release a lock, and URLs, which may hold a password.

One client goes through everything that happens to leases, on a store made from a URL with a
password, while a curious reader collects whatever can be read: logs at DEBUG, events, recordings,
reprs, warnings, headers, and every error with its causes, its locals and its pickle.
"""

import asyncio
import contextlib
import copy
import gc
import io
import logging
import os
import pickle
import random
import re
import stat
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from inside import label_of, state_of

import fencing_sdk
from fencing_sdk import (
    AcquireTimeoutError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LockClient,
    LockHeldError,
    StaleTokenError,
    Token,
    UsageError,
    connect,
    current_token,
)
from fencing_sdk._values.token import parse_token
from fencing_sdk.abc import Claim
from fencing_sdk.backends import take_options
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.events import Event
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

PASSWORD = "hunter2" + "-is-secret"
URL = f"vault://admin:{PASSWORD}@vault.example:8200/locks"


class VaultBackend(FaultyBackend):
    """A store behind a bad network, which knows its URL as every driver does, and notes the owners it meets."""

    def __init__(self, url: str) -> None:
        self.store = MemoryBackend()
        super().__init__(self.store)
        self.url = url
        self.claims: dict[str, Claim] = {}
        self.acquiring = asyncio.Event()

    async def draw(self, claim, **options):
        self.claims[claim.owner] = claim
        self.acquiring.set()
        return await super().draw(claim, **options)

    def on_loss(self, notice: Any) -> Any:
        return self.store.on_loss(notice)


def from_url(url: str, **options: object) -> VaultBackend:
    """What the entry point of the vault's distribution names."""
    take_options(url, options, ())
    return VaultBackend(url)


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with a backend for vault:// URLs, which is given its URL by the environment."""
    info = tmp_path / "site" / "vault_locks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vault-locks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fencing_sdk.backends]\nvault = vault_locks_of_this_test:from_url\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(sys.modules, "vault_locks_of_this_test", sys.modules[__name__])
    monkeypatch.setenv("FENCING_URL", URL)
    return


@dataclass
class Reader:
    """Collects whatever can be read."""

    log: io.StringIO = field(default_factory=io.StringIO)
    records: list[logging.LogRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, event: Event) -> None:
        self.events.append(event)
        self.news.set()

    def note(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.news.set()

    def look_at(self, *things: object) -> None:
        for thing in things:
            self.texts += [repr(thing), str(thing), f"{thing}", repr([thing]), repr({"key": thing})]

    @contextlib.contextmanager
    def catch(self, *kinds: type[BaseException]) -> Iterator[None]:
        with pytest.raises(kinds) as caught:
            yield
        self.errors.append(caught.value)

    async def heard(self, kind: str) -> None:
        """Wait until an event of *kind* comes."""
        seen = len(self.events)
        await self.until(lambda: kind in {event.kind for event in self.events[seen:]})

    async def logged(self, pattern: str) -> None:
        """Wait for a log line."""
        await self.until(lambda: any(re.match(pattern, record.getMessage()) for record in self.records))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def everything(self, recording: str) -> str:
        texts = [self.log.getvalue(), recording, *self.texts]
        texts += [repr(event) + repr(event.as_dict()) for event in self.events]
        texts += [repr(vars(record)) for record in self.records]
        texts += [story for error in self.errors for story in stories(error)]
        texts += [story for record in self.records if record.exc_info for story in stories(record.exc_info[1])]
        return "\n".join(texts)


def stories(error: BaseException) -> list[str]:
    """An error as a log, an error tracker that shows locals, and another process get to see it."""
    said = ["".join(traceback.format_exception(error)), repr(error), repr(vars(error)), repr(error.args)]
    said.append("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
        said.append(pickle.dumps(error, protocol=0).decode("latin-1"))
        said.append(pickle.dumps(error).decode("latin-1"))
        said.append(repr(vars(copy.copy(error))))
    return said


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    stream = logging.StreamHandler(reader.log)
    stream.setFormatter(
        logging.Formatter("%(levelname)s %(name)s %(threadName)s %(taskName)s %(message)s", defaults={"taskName": ""})
    )
    note = logging.Handler()
    note.emit = reader.note
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG)
    for handler in (stream, note):
        root.addHandler(handler)
    yield reader
    root.setLevel(before)
    for handler in (stream, note):
        root.removeHandler(handler)


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FENCING_RECORD", str(tmp_path / "run.jsonl"))
    return tmp_path / "run.jsonl"


def complain(event: Event) -> None:
    if event.kind == "released":
        raise RuntimeError("an observer with troubles of its own")


@contextlib.asynccontextmanager
async def opened(reader: Reader) -> AsyncIterator[tuple[LockClient, VaultBackend]]:
    asyncio.get_running_loop().set_debug(True)  # the loop then logs what it runs for long, with its arguments
    client = connect(observers=[reader.observe, complain])
    async with client as locks:
        reader.look_at(client)
        yield locks, client._backend
    reader.look_at(client)


async def live_through_everything(locks: LockClient, backend: VaultBackend, reader: Reader) -> None:
    """Every event and every error there is, once."""
    quick = {"ttl": 10.0, "heartbeat_interval": 0.02}

    async with locks.lock("seats/1", label="worker-1", **quick) as lease:
        await reader.heard("renewed")
        await lease.renew()
        reader.look_at(
            lease,
            locks.lock("seats/1"),
            await locks.inspect("seats/1"),
            lease.token,
            lease.headers(),
            state_of(lease).claim,
        )
        reader.look_at(*backend.claims.values(), current_token("seats/1"))
        reader.look_at(*asyncio.all_tasks())
        with reader.catch(LockHeldError):
            await locks.lock("seats/1", wait=0).acquire()
        with reader.catch(UsageError):
            await locks.lock("seats/1").acquire()
        with reader.catch(NoLeaseError):
            current_token("seats/other")

        async def impatient() -> None:
            with reader.catch(AcquireTimeoutError):
                await locks.lock("seats/1", wait=0.05).acquire()

        await asyncio.create_task(impatient())
        backend.fail("renew", BackendRefusedError("VaultBackend", "renew", "malformed"))
        await reader.heard("renewal_failed")
        backend.heal()
        backend.fail("renew")
        await reader.heard("renewal_failed")
        with reader.catch(BackendUnavailableError):
            await lease.renew()
        backend.heal()
        backend.fail("release", times=2)

    with reader.catch(LeaseLostError):
        async with locks.lock("seats/2", **quick) as lease:
            await backend.store.give_back(state_of(lease).claim)  # behind our back
            await asyncio.sleep(10)
    with reader.catch(LeaseLostError):
        lease.check()
    reader.look_at(lease)

    with reader.catch(LeaseLostError):
        async with locks.lock("seats/3", **quick):
            backend.store.take_away("seats/3")
            await asyncio.sleep(10)

    with reader.catch(ZeroDivisionError):  # with a note that the lease was lost too
        async with locks.lock("seats/4", **quick):
            backend.store.take_away("seats/4")
            raise ZeroDivisionError

    with reader.catch(LeaseLostError):
        async with locks.lock("seats/5", ttl=0.4, heartbeat_interval=0.05):
            time.sleep(0.6)  # noqa: ASYNC251  (this is the stall)
            await asyncio.sleep(1)

    guard = MemoryGuard(observers=[reader.observe])
    async with locks.lock("seats/6", fences=[guard], **quick) as lease:
        reader.look_at(guard, await guard.highest("seats/6"))
    await guard.raise_to("seats/6", Token(2**53 - 1, "0" * 8))
    with reader.catch(StaleTokenError):
        await locks.lock("seats/6", fences=[guard], **quick).acquire()

    @locks.job("seats/job", at_least_for=1)
    async def job() -> None:
        pass

    reader.look_at(await job(), await job())

    backend.fail("acquire", times=1)
    with reader.catch(BackendUnavailableError):
        await locks.lock("seats/7", ttl=0.5, wait=0).acquire()
    backend.fail("acquire", BackendRefusedError("VaultBackend", "acquire", "no permission"), times=1)
    with reader.catch(BackendRefusedError):
        await locks.lock("seats/7").acquire()
    backend.fail("acquire", OSError("a driver's own error"), times=1)
    with reader.catch(OSError, BackendUnavailableError, BackendRefusedError):
        await locks.lock("seats/7", wait=0).acquire()

    backend.hang("acquire", times=1)
    backend.acquiring.clear()
    waiting = asyncio.create_task(locks.lock("seats/8", ttl=0.5).acquire())
    await backend.acquiring.wait()
    waiting.cancel()
    with reader.catch(asyncio.CancelledError):
        await waiting

    backend.fail("release", BackendRefusedError("VaultBackend", "release", "no permission"), times=1)
    async with locks.lock("seats/9", **quick):
        pass
    backend.fail("release", OSError("a driver's own error"))
    async with locks.lock("seats/9-again", ttl=1):  # for so long its release is repeated
        pass
    backend.heal()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dropped = await locks.lock("seats/10").acquire()
        del dropped
        gc.collect()
        await asyncio.sleep(0)
    assert [each.category for each in warned] == [ResourceWarning]
    reader.look_at(*warned)
    reader.look_at(await locks.lock("seats/11").acquire())  # lost when the client is closed


async def test_no_owner_and_no_password_is_readable_anywhere_in_a_full_life(vault, reader, recording):
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the lease that is still held at the end
        async with opened(reader) as (locks, backend):
            await live_through_everything(locks, backend, reader)
            kept.append(backend)
        with reader.catch(UsageError):
            await locks.lock("seats/1").acquire()
        gc.collect()
    said = reader.everything(recording.read_text())
    (backend,) = kept

    owners = list(backend.claims)
    assert len(owners) > 12
    assert [owner for owner in owners if owner in said] == []
    assert PASSWORD not in said
    assert "vault.example" not in said
    # The digests and the reader are the proof that anything was read at all.
    assert any(claim.holder in said for claim in backend.claims.values())
    public = [getattr(fencing_sdk.events, name) for name in fencing_sdk.events.__all__]
    kinds = {thing for thing in public if isinstance(thing, type) and issubclass(thing, Event)}
    of_resources = fencing_sdk.events.TokenMissing
    assert {type(event) for event in reader.events} == kinds - {Event, of_resources}
    assert {type(error) for error in reader.errors} >= {
        *(LockHeldError, AcquireTimeoutError, LeaseLostError, StaleTokenError, UsageError, NoLeaseError),
        *(BackendUnavailableError, BackendRefusedError),
    }
    assert {"fencing_sdk", "asyncio"} <= {record.name for record in reader.records}
    assert "an observer with troubles of its own" in reader.log.getvalue()


async def test_the_label_is_what_the_user_wrote_or_names_the_process_and_nothing_else(vault, reader):
    async with opened(reader) as (locks, backend):
        async with locks.lock("seats/1", label="worker-1"), locks.lock("seats/2"):
            assert (await locks.inspect("seats/1")).label == "worker-1"
            assert (await locks.inspect("seats/2")).label == label_of()
        assert [claim.label for claim in backend.claims.values()] == ["worker-1", label_of()]


NASTY = [
    "a\u2028CRITICAL root forged",
    "\u202egnp.exe",
    "é🔒",
    '";holder="00000000',
    "%0d%0aX: y",
    "${jndi:x}",
    "'; --",
]


@pytest.mark.parametrize("name", NASTY, ids=ascii)
async def test_a_header_carries_digits_and_a_digest_whatever_the_names_are(name):
    guard = MemoryGuard()
    locks = LockClient(MemoryBackend(), namespace=name)
    async with locks, locks.lock(name, label=name, fences=[(guard, name)]) as lease:
        ((header, value),) = lease.headers().items()
        assert header == "Fencing-Token"
        assert re.fullmatch(r'[0-9]{1,16};holder="[0-9a-f]{8}"', value, re.ASCII)
        assert lease.owner not in value
        assert parse_token(value).holder == lease.holder


@pytest.mark.parametrize("name", NASTY, ids=ascii)
async def test_a_log_line_cannot_be_forged_by_a_name_or_by_a_store(name, reader):
    backend = FaultyBackend(MemoryBackend())
    async with LockClient(backend) as locks:
        forged = BackendRefusedError("Backend", "release", f"no\nCRITICAL root forged {name}")
        backend.fail("release", forged, times=1)
        async with locks.lock(name):
            pass
        backend.fail("release", OSError("away"))
        async with locks.lock(f"{name}/2", ttl=1):  # for so long its release is repeated
            pass
        await reader.logged(r"release of .*/2['\"] failed$")
        backend.heal()
    ours = [record for record in reader.records if record.name == "fencing_sdk"]
    messages = [record.getMessage() for record in ours if record.levelno >= logging.WARNING]
    assert len(messages) >= 2
    for message in messages:
        assert message.isprintable()
        assert "\u202e" not in message


@pytest.mark.parametrize("name", ["a\nb", "a\r\nb", "\x1b[31m", "a\0b"], ids=ascii)
def test_a_name_that_breaks_a_line_becomes_no_lock_at_all(name):
    with pytest.raises(ConfigurationError) as caught:
        LockClient(MemoryBackend()).lock(name)
    assert str(caught.value).isprintable()


def test_owners_do_not_come_from_a_generator_that_can_be_seeded():
    random.seed(7)
    first = Claim("a", 1.0).owner
    random.seed(7)
    assert Claim("a", 1.0).owner != first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_workers_do_not_share_owners():
    script = (
        "import os, random, sys\n"
        "from fencing_sdk._values.claim import Claim\n"
        "random.seed(7)\n"
        "Claim('a', 1.0)\n"
        "children = []\n"
        "for _ in range(4):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.stdout.write(Claim('a', 1.0).owner + '\\n')\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    children.append(child)\n"
        "for child in children:\n"
        "    os.waitpid(child, 0)\n"
        "print(Claim('a', 1.0).owner)\n"
    )
    owners = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert len(owners) == len(set(owners)) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", owner) for owner in owners)


def test_an_owner_cannot_be_found_from_its_digest():
    """32 bits of SHA-256 over 128 random bits: 2**96 owners share each digest."""
    claim = Claim("a", 1.0)
    assert len(bytes.fromhex(claim.owner)) * 8 == 128
    assert len(bytes.fromhex(claim.holder)) * 8 == 32


@pytest.mark.parametrize("digits", ["9" * 5_000_000, "1" + "0" * 5_000_000], ids=["nines", "power"])
def test_a_token_of_millions_of_digits_costs_nothing_even_where_the_limit_of_python_is_lifted(digits, monkeypatch):
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        began = time.process_time()
        with pytest.raises(ConfigurationError):
            parse_token(digits)
        assert time.process_time() - began < 2  # int() would take minutes
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "url",
    [
        f"nosuch://admin:{PASSWORD}@host",
        f"admin:{PASSWORD}@host/?next=http://x",
        f"memory://admin:{PASSWORD}@host",
        f"memory://admin:a?{PASSWORD}@host",
        f"memory://[{PASSWORD}",
        f"sqlite://admin:{PASSWORD}@host/locks.db",
        f"{URL}#x",
        f"{URL}?{PASSWORD}",
        f"{URL}\n",
    ],
)
def test_a_bad_url_from_the_environment_is_not_repeated(url, vault, monkeypatch, reader):
    monkeypatch.setenv("FENCING_URL", url)
    with pytest.raises(ConfigurationError) as caught:
        connect()
    said = "".join(traceback.format_exception(caught.value))
    said += "".join(repr((error, error.args, vars(error))) for error in chain(caught.value))
    assert PASSWORD not in said + reader.log.getvalue()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and what it replaced."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.skipif(os.name != "posix", reason="file modes are of POSIX")
async def test_a_recording_that_the_environment_asks_for_is_private(recording):
    before = os.umask(0)
    try:
        async with connect("memory://") as locks, locks.lock("patients/4711"):
            pass
    finally:
        os.umask(before)
    assert "patients/4711" in recording.read_text()
    assert stat.S_IMODE(recording.stat().st_mode) == 0o600


async def test_the_text_of_a_drivers_own_error_stays_out_of_events():
    """A driver may quote the URL that it could not reach, password and all; recordings keep every event."""
    store = FaultyBackend(MemoryBackend())
    errors = asyncio.Queue()

    def observe(event):
        if event.kind == "renewal_failed":
            errors.put_nowait(event.error)

    async with (
        LockClient(store, observers=[observe]) as locks,
        locks.lock("seats/42", ttl=5, heartbeat_interval=0.1) as lease,
    ):
        store.fail("renew", OSError("cannot reach redis://admin:hunter2@host"), times=1)
        async with asyncio.timeout(10):
            assert await errors.get() == "OSError"
        assert lease.held
