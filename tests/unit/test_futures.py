"""What no other task awaits is neither reported by asyncio nor left running."""

import asyncio
import gc

import pytest

from fencing_sdk._values.unawaited import cancel_and_wait, retrieve


@pytest.fixture
async def reported():
    """What the loop reports while the test runs."""
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


async def test_without_it_the_loop_reports_the_error(reported: list[str]):
    task = asyncio.ensure_future(fail())
    await asyncio.wait((task,))
    del task
    gc.collect()
    assert reported == ["Task exception was never retrieved"]


async def test_a_cancelled_future_has_no_outcome_to_retrieve():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    retrieve(future)


async def test_a_task_is_cancelled_and_has_ended_afterwards():
    task = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()


async def test_an_error_of_the_cancelled_task_is_dropped(reported: list[str]):
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    task = asyncio.ensure_future(fail_when_cancelled())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    del task
    gc.collect()
    assert not reported


async def test_a_task_that_ignores_its_cancellation_is_waited_for_no_longer_than_the_limit():
    leave = asyncio.Event()

    async def ignore_cancellation() -> None:
        while not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.ensure_future(ignore_cancellation())
    await asyncio.sleep(0)
    await cancel_and_wait(task, limit=0.01)
    assert not task.done()
    leave.set()
    await task
