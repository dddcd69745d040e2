"""``@locks.locked``: every call holds the lock, and the function stays what it was."""

import asyncio
import datetime as dt
import functools
import inspect

import pytest

from fencing_sdk import (
    ConfigurationError,
    LockClient,
    LockHeldError,
    NoLeaseError,
    UsageError,
    current_lease,
    current_token,
)
from fencing_sdk.backends.memory import MemoryBackend


@pytest.fixture
async def locks():
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        yield locks


async def test_every_call_holds_the_lock_and_returns_its_value(locks):
    @locks.locked("report/{report_id}")
    async def build(report_id, *, scale=2):
        assert current_lease().name == f"report/{report_id}"
        return report_id * scale, current_token()

    assert await build(7) == (14, 1)
    assert await build(report_id=7, scale=3) == (21, 2)
    assert await locks.inspect("report/7") is None
    with pytest.raises(NoLeaseError):
        current_lease()


async def test_calls_with_one_name_take_turns_and_calls_with_two_do_not(locks):
    inside, most = [], []

    @locks.locked("report/{report_id}", backoff=lambda _: 0.001)
    async def build(report_id):
        inside.append(report_id)
        most.append(tuple(inside))
        await asyncio.sleep(0.005)
        inside.remove(report_id)

    await asyncio.gather(build(1), build(1), build(2))
    assert (1, 1) not in {tuple(sorted(seen)) for seen in most}
    assert (1, 2) in {tuple(sorted(seen)) for seen in most}


async def test_errors_of_the_function_leave_as_they_are(locks):
    mine = ValueError("mine")

    @locks.locked("a")
    async def fail():
        raise mine

    with pytest.raises(ValueError) as left:
        await fail()
    assert left.value is mine
    assert await locks.inspect("a") is None


async def test_the_function_stays_what_it_was_for_those_who_look_at_it(locks):
    async def build(report_id: int, /, *parts: str, scale: float = 1.0) -> str:
        """Build a report."""

    locked = locks.locked("report/{report_id}")(build)
    assert locked.__wrapped__ is build
    assert locked.__name__ == "build"
    assert locked.__qualname__ == build.__qualname__
    assert locked.__module__ == __name__
    assert locked.__doc__ == "Build a report."
    assert inspect.signature(locked) == inspect.signature(build)
    assert inspect.iscoroutinefunction(locked)


# The name


async def test_methods_fill_in_what_belongs_to_their_object(locks):
    class Tenant:
        kind = "gold"

        def __init__(self, key):
            self.key = key

        @locks.locked("tenant/{self.key}/{what}")
        async def update(self, what="all"):
            return current_lease().name

        @classmethod
        @locks.locked("kind/{cls.kind}")
        async def count(cls):
            return current_lease().name

        @staticmethod
        @locks.locked("row/{row[0]}")
        async def insert(row):
            return current_lease().name

    assert await Tenant("acme").update() == "tenant/acme/all"
    assert await Tenant("acme").update("price") == "tenant/acme/price"
    assert await Tenant.update(Tenant("b"), what="x") == "tenant/b/x"
    assert await Tenant.count() == "kind/gold"
    assert await Tenant.insert([5, 6]) == "row/5"


async def test_formats_work_as_in_a_format_string(locks):
    @locks.locked("day/{day:%F}/{part:03d}/{text!r}")
    async def build(day, part, text):
        return current_lease().name

    assert await build(dt.date(2024, 2, 29), 7, "x") == "day/2024-02-29/007/'x'"


async def test_an_argument_cannot_smuggle_in_a_placeholder(locks):
    @locks.locked("report/{report_id}")
    async def build(report_id, secret="s3cret"):
        return current_lease().name

    assert await build("{secret}") == "report/{secret}"


async def test_doubled_braces_are_braces(locks):
    @locks.locked("{{literal}}/{x}")
    async def build(x):
        return current_lease().name

    assert await build(1) == "{literal}/1"


async def test_the_namespace_of_the_client_applies():
    store = MemoryBackend()

    @(client := LockClient(store, namespace="shop")).locked("a")
    async def build():
        return await store.inspect("shop:a")

    async with client:
        assert await build() is not None


# Mistakes


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("report/{id}", "report_id"),
        ("report/{}", "placeholder"),
        ("report/{0}", "placeholder"),
        ("report/{report_id", "not a template"),
        ("report/{report_id:{width}}", "width"),
        ("", "must not be empty"),
    ],
)
def test_a_name_that_cannot_be_filled_in_is_refused_at_decoration(name, complaint):
    async def build(report_id): ...

    with pytest.raises(ConfigurationError, match=complaint):
        LockClient(MemoryBackend()).locked(name)(build)


def test_a_function_that_is_no_coroutine_function_is_refused_at_decoration():
    async def generator():
        yield

    for function in (lambda: None, generator, functools.partial(print)):
        with pytest.raises(ConfigurationError, match="async def"):
            LockClient(MemoryBackend()).locked("a")(function)


@pytest.mark.parametrize("options", [{"ttl": -1}, {"wait": "5"}, {"fences": "guard"}, {"backoff": 3}])
def test_an_option_that_cannot_work_is_refused_before_there_is_a_function(options):
    with pytest.raises(ConfigurationError):
        LockClient(MemoryBackend()).locked("a", **options)


async def test_a_call_that_does_not_fit_the_function_fails_as_without_the_lock(stage):
    @stage.client.locked("report/{report_id}")
    async def build(report_id): ...

    with pytest.raises(TypeError, match="report_id"):
        await build()
    with pytest.raises(TypeError, match="unexpected"):
        await build(1, colour="red")
    assert stage.network.calls == []


async def test_arguments_that_make_an_invalid_name_are_refused_before_anything_is_sent(stage):
    @stage.client.locked("{name}")
    async def build(name): ...

    for name in ("", "a\0b", "x" * 600):
        with pytest.raises(ConfigurationError):
            await build(name)
    assert stage.network.calls == []


async def test_a_function_decorated_at_import_time_needs_its_client_open_when_it_is_called():
    locks = LockClient(MemoryBackend())

    @locks.locked("a")
    async def build():
        return "built"

    with pytest.raises(UsageError, match="async with"):
        await build()
    async with locks:
        assert await build() == "built"


async def test_the_options_are_those_of_a_lock(locks):
    @locks.locked("a", ttl=60, wait=0, metadata="decorated")
    async def build():
        return current_lease().ttl, (await locks.inspect("a")).metadata

    assert await build() == (60, "decorated")
    async with locks.lock("a"):
        with pytest.raises(LockHeldError):
            await build()


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"report_id": 1}), ((1,), {"day": 2})], ids=str
)
async def test_a_call_that_does_not_fit_fails_as_without_the_decorator(locks, args, kwargs):
    async def build(report_id, *, scale=2):
        raise AssertionError

    with pytest.raises(TypeError) as plain:
        build(*args, **kwargs)
    with pytest.raises(TypeError) as decorated:
        await locks.locked("report/{report_id}")(build)(*args, **kwargs)
    assert str(decorated.value) == str(plain.value)
    assert "build() " in str(plain.value)
    assert decorated.value.__context__ is None


async def test_a_call_that_does_not_fit_a_wrapped_function_names_it_and_runs_nothing(locks):
    async def build(report_id):
        raise AssertionError

    @functools.wraps(build)
    async def wrapped(*args, **kwargs):
        raise AssertionError

    for function in (wrapped, functools.partial(wrapped), functools.wraps(build)(functools.partial(wrapped))):
        with pytest.raises(TypeError, match=r"build.*\(\): missing a required argument: 'report_id'$") as refused:
            await locks.locked("report/{report_id}")(function)()
        assert refused.value.__context__ is None
