"""A backend whose posts make its calls, each in a task: so that one backend is asked the short way and the full way."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from fencing_sdk.abc import Claim, Renewal, Revoked
from fencing_sdk.abc._powers import PostOutcome
from fencing_sdk.errors import BackendError, BackendUnavailableError

Answer = Callable[[Any], None]


class PostInTask:
    """One post: a call of the backend, and the callback that takes its outcome."""

    def __init__(self, call: Coroutine[Any, Any, Any], operation: str, answer: Answer) -> None:
        self._operation = operation
        self._answer = answer
        self._task = asyncio.get_running_loop().create_task(call, context=Context())
        self._task.add_done_callback(self._done, context=Context())

    def give_up(self) -> None:
        """See ``abc._powers.PendingPost.give_up``."""
        self._task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (error is not None and not isinstance(error, BackendError)):
            error = BackendUnavailableError(type(self).__name__, self._operation)
        self._answer(task.result() if error is None else error)


class Posting:
    """Mix it in before a backend. With ``posts`` off, the posts send nothing."""

    posts = True

    def post_acquire(self, claim: Claim, answer: Answer) -> PostInTask | None:
        """See ``abc._powers.SupportsPosts.post_acquire``."""
        return PostInTask(self.acquire(claim), "acquire", answer) if self.posts else None  # type: ignore[attr-defined]

    def post_release(self, claim: Claim, answer: Answer) -> PostInTask | None:
        """See ``abc._powers.SupportsPosts.post_release``."""

        async def release() -> PostOutcome | Renewal | Revoked:
            return await self.release(claim) or PostOutcome.RELEASED  # type: ignore[attr-defined]

        return PostInTask(release(), "release", answer) if self.posts else None


@functools.cache
def posting(kind: type[Any]) -> type[Any]:
    """The class of backends *kind*, asked by posts."""
    return type(f"Posting{kind.__name__}", (Posting, kind), {})
