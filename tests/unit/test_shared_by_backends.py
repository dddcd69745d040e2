"""Chores that backends share: tasks behind the calls, errors, and the name of a server that takes no connection."""

from __future__ import annotations

import asyncio
import contextvars
import re

import pytest

from fencing_sdk import connect
from fencing_sdk.backends._shared.background_task import BackgroundTask, BackgroundTasks
from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    Verdict,
    verdict_by_class,
)
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError


async def forever() -> None:
    await asyncio.Event().wait()


class TestBackgroundTask:
    async def test_work_is_not_begun_twice(self):
        begun: list[None] = []

        async def work() -> None:
            begun.append(None)
            await asyncio.Event().wait()

        task = BackgroundTask()
        assert not task.running
        for _ in range(3):
            task.start(work)
            await asyncio.sleep(0)
        assert len(begun) == 1
        assert task.running
        await task.aclose()
        assert not task.running
        await task.aclose()

    async def test_it_sees_no_context_variable_of_the_caller(self):
        variable = contextvars.ContextVar("variable", default="none")
        variable.set("the caller's")
        seen: list[str] = []

        async def work() -> None:
            seen.append(variable.get())

        task = BackgroundTask()
        task.start(work)
        await asyncio.sleep(0)
        assert seen == ["none"]

    def test_the_next_loop_has_a_task_of_its_own(self):
        task = BackgroundTask()
        begun: list[asyncio.AbstractEventLoop] = []

        async def work() -> None:
            begun.append(asyncio.get_running_loop())
            await asyncio.Event().wait()

        async def use(*, close: bool) -> bool:
            running = task.running
            task.start(work)
            await asyncio.sleep(0)
            if close:
                await task.aclose()
            return running

        assert [asyncio.run(use(close=False)), asyncio.run(use(close=True))] == [False, False]
        assert len(set(begun)) == 2


class TestBackgroundTasks:
    async def test_a_forked_child_forgets_those_of_its_parent(self):
        tasks = BackgroundTasks()
        task = tasks.start(forever())
        tasks.forget()
        await tasks.aclose(patience=0.0)
        assert not task.done()
        task.cancel()

    def test_without_a_loop_the_work_is_not_left_unawaited(self):
        with pytest.raises(RuntimeError):
            BackgroundTasks().start(forever())  # a warning would be an error here


class TestErrorTranslation:
    CLASSES: tuple[tuple[type[Exception], Verdict], ...] = (
        (ConnectionRefusedError, (BackendUnavailableError, "nothing listens")),
        (PermissionError, (BackendRefusedError, "no permission")),
        (OSError, (BackendUnavailableError, "no connection")),
    )
    UNKNOWN: Verdict = (BackendUnavailableError, "the store failed")

    def translated(self, operation: str, error: Exception) -> BackendError:
        kind, hint = verdict_by_class(error, self.CLASSES, self.UNKNOWN)
        return kind("Store", operation, hint)

    @pytest.mark.parametrize(
        ("error", "kind", "hint"),
        [
            (ConnectionRefusedError(), BackendUnavailableError, "nothing listens"),
            (PermissionError(), BackendRefusedError, "no permission"),
            (TimeoutError(), BackendUnavailableError, "no connection"),
            (ValueError("secret"), BackendUnavailableError, "the store failed"),
        ],
    )
    def test_an_error_of_the_driver_leaves_as_one_of_the_contract(self, error, kind, hint):
        with pytest.raises(kind, match=hint) as caught, ErrorTranslation(self.translated, "acquire"):
            raise error
        assert caught.value.__cause__ is error
        assert "secret" not in str(caught.value)

    def test_errors_of_the_package_and_cancellations_pass(self):
        ours = BackendRefusedError("Store", "acquire", "because")
        with pytest.raises(BackendRefusedError) as caught, ErrorTranslation(self.translated, "acquire"):
            raise ours
        assert caught.value is ours
        with pytest.raises(asyncio.CancelledError), ErrorTranslation(self.translated, "acquire"):
            raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("redis://:secret@127.0.0.1:1", "127.0.0.1:1"),
        ("etcd://127.0.0.1:1", "127.0.0.1:1"),
        ("kahuna://127.0.0.1:1", "127.0.0.1:1"),
        ("postgresql://user:secret@127.0.0.1:1/app", "127.0.0.1:1"),
        ("postgresql://user:secret@127.0.0.1:1,127.0.0.1:2/app", "127.0.0.1:1 (Connection refused), 127.0.0.1:2"),
        ("zookeeper://user:secret@127.0.0.1:1,127.0.0.1:2", "127.0.0.1:1, 127.0.0.1:2"),
    ],
)
async def test_servers_that_take_no_connection_are_told_with_their_hosts_and_ports(url: str, servers: str):
    with pytest.raises(BackendUnavailableError, match=rf"no connection to {re.escape(servers)} \(") as heard:
        async with connect(url):
            pass
    assert "secret" not in f"{heard.value} {heard.value.__cause__!r} {heard.value.__cause__}"
