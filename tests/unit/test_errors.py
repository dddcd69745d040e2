"""The errors, the futures that carry them, and the door of the testing package."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import json
import pickle
import re
import string
import subprocess
import sys

import pytest

from fencing_sdk import errors, testing
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.errors import (
    AcquireCancelledError,
    AcquireError,
    AcquireTimeoutError,
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    InvalidNameError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    NoLeaseError,
    StaleTokenError,
    TicketRefusedError,
    UnsupportedError,
    UsageError,
    shown,
)

# The errors: the documented tree, plain values that survive any journey, one sentence on one line.


EXAMPLES = [
    ConfigurationError("ttl must be at least 0.05 s, got 0"),
    InvalidNameError("name must not be empty; name what it protects, such as 'invoices/42'"),
    UnsupportedError("memory:// has no permits"),
    UsageError("this client is closed"),
    NoLeaseError(),
    NoLeaseError("seats/42"),
    AcquireError("seats/42", 1.5),
    LockHeldError("seats/42", 0.001),
    LockHeldError("seats/42", 0.001, 7.5),
    AcquireTimeoutError("seats/42", 5.0),
    AcquireCancelledError("seats/42", 5.0),
    DrainingError("seats/42", 5.0),
    TicketRefusedError("seats/42", 34, LossReason.HANDED_OVER, "9f8a01c2 (token 35)"),
    TicketRefusedError("seats/42", 34, LossReason.TAKEN_OVER),
    TicketRefusedError("seats/42", 34, LossReason.EXPIRED),
    TicketRefusedError("seats/42", None, LossReason.REFUSED),
    TicketRefusedError("seats/42", 34, LossReason.REVOKED, "wrong\ncluster"),
    *[LeaseLostError("seats/42", 34, reason) for reason in LossReason],
    LeaseLostError("seats/42", 34, LossReason.EXPIRED, "max_hold=5 is over"),
    StaleTokenError("seats/42", 33, 34),
    StaleTokenError("seats/42", 34, 34, conflict=True),
    BackendError("MemoryBackend", "acquire"),
    BackendUnavailableError("MemoryBackend", "renew", "no answer within 2 s"),
    BackendRefusedError("MemoryBackend", "release", "not one outcome per claim"),
]
each_error = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: f"{type(error).__name__} {error.args}"[:50])


def documented_tree() -> dict[str, set[str]]:
    """Name to bases, read from the drawing at the top of the module."""
    tree: dict[str, set[str]] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():
        found = re.match(r"( *)(\w+Error)(?: \((\w+)\))?(?: |$)", line)
        if found is None:
            continue
        depth = (len(found[1]) - 4) // 2
        path[depth:] = [found[2]]
        tree[found[2]] = {path[depth - 1] if depth else "Exception"} | ({found[3]} if found[3] else set())
    return tree


def test_what_was_not_asked_for_is_in_no_repr():
    assert (repr(NoLeaseError()), repr(NoLeaseError("a"))) == ("NoLeaseError()", "NoLeaseError('a')")
    assert repr(NoLeaseError(shared="pool")) == "NoLeaseError('pool')"
    copied = pickle.loads(pickle.dumps(NoLeaseError(shared="pool")))
    assert (copied.name, copied.shared, str(copied)) == (None, "pool", str(NoLeaseError(shared="pool")))


def test_the_tree_is_exactly_the_documented_one():
    real = {
        name: {base.__name__ for base in thing.__bases__}
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, Exception)
    }
    assert real == documented_tree()
    assert len(real) == 17


def test_the_attributes_are_exactly_the_documented_ones():
    for name, attributes in re.findall(r"^ +(\w+Error).*?((?: \.\w+)+)", inspect.getdoc(errors), re.MULTILINE):
        (example,) = [error for error in EXAMPLES if type(error).__name__ == name][-1:]
        for attribute in attributes.split():
            assert attribute[1:] in vars(example), (name, attribute)


def test_every_error_is_tried_here():
    assert {type(error).__name__ for error in EXAMPLES} == set(documented_tree()) - {"FencingError"}


@each_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_with_all_it_knows(error, protocol):
    sent = copy.copy(error)
    sent.add_note("while booking seat 42")
    back = pickle.loads(pickle.dumps(sent, protocol))
    assert type(back) is type(error)
    assert vars(back) == vars(sent)
    assert str(back) == str(error)
    assert back.args == error.args
    assert back.__notes__ == ["while booking seat 42"]
    assert pickle.loads(pickle.dumps(back)).__notes__ == back.__notes__


@each_error
def test_an_error_survives_copying(error):
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert (vars(twin), twin.args, str(twin)) == (vars(error), error.args, str(error))


@each_error
def test_an_error_holds_plain_values_only(error):
    json.dumps([vars(error), error.args])


@each_error
def test_a_message_is_one_sentence_on_one_line(error):
    text = str(error)
    assert text.isprintable()
    assert text[0] in string.ascii_letters
    assert text[-1] not in string.whitespace + ".!"
    assert ". " not in text


ELSEWHERE = (
    "call from inside the block of the lock, or pass the lease along: "
    "asyncio.to_thread carries it, but a new thread and loop.run_in_executor do not"
)
CONFLICT = (
    "another holder already used this very number; two grants shared a token, check the lock service's durability"
)


VOID = "the ticket for 'seats/42' (token 34) is void:"


def test_what_a_reader_of_the_message_learns():
    texts = [str(error) for error in EXAMPLES[4:]]
    assert texts == [
        f"no lease in this context; {ELSEWHERE}",
        f"no lease on 'seats/42' in this context; {ELSEWHERE}",
        "lock 'seats/42' not acquired after 1.5 s",
        "lock 'seats/42' is held already; pass wait= to wait for it",
        "lock 'seats/42' is held already (its lease has 7.5 s left); pass wait= to wait for it",
        "lock 'seats/42' not acquired within 5 s; it is still held",
        "lock 'seats/42' not acquired: the wait was cancelled after 5 s",
        "lock 'seats/42' not acquired: this client is draining, so nothing new begins",
        f"{VOID} it was used or released before, and 9f8a01c2 (token 35) has the lock now",
        f"{VOID} it ran out, and another holder has the lock now",
        f"{VOID} it ran out",
        "the ticket for 'seats/42' is void: it was used or released before, or it is of another store",
        f"{VOID} an operator took the lock away: 'wrong\\ncluster'",
        "lease on 'seats/42' (token 34) is over: its deadline passed",
        "lease on 'seats/42' (token 34) is over: the store says the grant is no longer ours",
        "lease on 'seats/42' (token 34) is over: another holder has the lock now",
        "lease on 'seats/42' (token 34) is over: an operator took it away, or the store lost its record",
        "lease on 'seats/42' (token 34) is over: the event loop stood still past the lease's deadline",
        "lease on 'seats/42' (token 34) is over: its client was closed",
        "lease on 'seats/42' (token 34) is over: its client was drained, and the body had not ended within the bound",
        "lease on 'seats/42' (token 34) is over: it was handed over by its ticket",
        "lease on 'seats/42' (token 34) is over: its deadline passed: max_hold=5 is over",
        "token 33 for 'seats/42' refused: the resource has seen 34; the lock has gone to a later holder",
        f"token 34 for 'seats/42' refused: {CONFLICT}",
        "MemoryBackend: acquire failed",
        "MemoryBackend: renew failed: no answer within 2 s",
        "MemoryBackend: release failed: not one outcome per claim",
    ]


@pytest.mark.parametrize(
    ("waited", "text"),
    [(0.0, "0 s"), (0.05, "0.05 s"), (1.23456, "1.23 s"), (99.99, "100 s"), (123.4, "123 s"), (3600, "3600 s")],
)
def test_seconds_are_written_for_people(waited, text):
    assert f"within {text};" in str(AcquireTimeoutError("a", waited))
    assert f"has {text} left" in str(LockHeldError("a", 0.0, waited))


ODD = [
    "a\nb",
    "a\r\nERROR forged",
    "\x1b[31mred",
    "a\u2028b",
    "\u202egnp",
    "é" * 600,
    "x" * 1_000_000,
    "\ud800",
    "'\"",
    "",
]


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
def test_a_name_in_a_message_is_escaped_and_cut(name):
    made = [
        NoLeaseError(name),
        AcquireError(name, 1.0),
        LockHeldError(name, 1.0),
        AcquireTimeoutError(name, 1.0),
        AcquireCancelledError(name, 1.0),
        DrainingError(name, 1.0),
        LeaseLostError(name, 34, LossReason.EXPIRED),
        StaleTokenError(name, 33, 34),
        StaleTokenError(name, 33, 34, conflict=True),
    ]
    for error in made:
        text = str(error)
        assert text.isascii()
        assert text.isprintable()
        assert len(text) < 320
        assert name in error.args  # whole, for the code that handles it


@pytest.mark.parametrize("detail", ["a\nCRITICAL forged", "\x1b[2J", "\r", "x\x00"], ids=ascii)
def test_what_a_store_said_cannot_break_the_line(detail):
    text = str(BackendRefusedError("MemoryBackend", "acquire", detail))
    assert text.isprintable()
    assert text.startswith("MemoryBackend: acquire failed: ")


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


class Lines:
    def __repr__(self) -> str:
        return "<one\ntwo\x1b[31m>"


@pytest.mark.parametrize(
    "thing",
    [*ODD, b"bytes" * 100, 10**5000, -(10**4000), float("nan"), Broken(), Lines(), [Broken()], None, ["x"] * 500],
    ids=lambda thing: type(thing).__name__,
)
def test_whatever_is_shown_is_short_printable_ascii(thing):
    text = shown(thing)
    assert text
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 84


def test_a_cut_text_says_that_it_was_cut():
    assert shown("x" * 100) == f"'{'x' * 79}...'"


# What no other task awaits is neither reported by asyncio nor left running.


@pytest.fixture
async def reported():
    """Return what the loop reports while the test runs."""
    contexts: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context["message"]))
    yield contexts
    asyncio.get_running_loop().set_exception_handler(None)


async def fail() -> None:
    raise ValueError


async def test_an_outcome_that_was_retrieved_is_not_reported(reported: list[str]):
    task = asyncio.ensure_future(fail())
    task.add_done_callback(retrieve)
    await asyncio.wait((task,))
    del task
    gc.collect()
    assert not reported


# `fencing_sdk.testing` costs nothing until a name is asked for, and says what is missing.


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_of_the_door_is_there(name: str):
    assert getattr(testing, name).__name__ == name
    assert name in dir(testing)


def test_opening_the_door_loads_neither_pytest_nor_a_suite():
    loaded = python("import sys, fencing_sdk.testing; print(*sys.modules)").split()
    assert "pytest" not in loaded
    assert not [name for name in loaded if name.startswith("fencing_sdk.testing.")]


@pytest.mark.parametrize("suite", ["BackendSuite", "GuardSuite"])
def test_without_pytest_a_suite_names_the_extra_to_install(suite: str):
    code = f"""
import sys
sys.modules["pytest"] = None
from fencing_sdk import ConfigurationError
try:
    from fencing_sdk.testing import {suite}
except ConfigurationError as error:
    print(error)
"""
    assert (
        python(code).strip()
        == f"{suite} needs pytest; run: pip install 'fencing-sdk[testing]', or '.[testing]' in a checkout"
    )


@pytest.mark.parametrize("name", ["FaultyBackend", "World"])
def test_without_pytest_the_rest_still_works(name: str):
    python(f"import sys; sys.modules['pytest'] = None; from fencing_sdk.testing import {name}")
