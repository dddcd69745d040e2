"""
Acquire and release without a task: the command leaves at once, and its reply is read where it arrives.

A command is packed by one format, made once from the script's call. What a post cannot do is left to the full call:
opening a connection, finding the server of a slot, loading a script, replicas that have to confirm.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from fencing_sdk._values.claim import Claim, Grant, Renewal, Revoked
from fencing_sdk.abc._powers import PostOutcome
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.losses import Reasons, with_reasons
from fencing_sdk.backends.redis.connection.node import NOT_MASTER, SILENCE
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.errors import translated
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.requests import (
    RedisKeys,
    RedisRequests,
    milliseconds,
    read_acquired,
    read_release,
    stored,
)
from fencing_sdk.backends.redis.scripts import ScriptCall
from fencing_sdk.errors import BackendError

_NOT_EXECUTED = {"NOSCRIPT", "MOVED", "ASK", "TRYAGAIN"}
_OPEN = Claim("\1", 987_654.321, "\2", "\3")
"""A placeholder: `PackedCall` finds its parts in the words of a call, and leaves them open in the format."""
_SUFFIX = 2
"""Characters that every key of a lock has behind its tag."""

Parts = tuple[Any, ...]
"""The length of a key and the tag; then a length and a text each for owner, ttl and label."""


class PackedCall:
    """One call of a script as bytes of the protocol, but for the parts that a claim fills in."""

    __slots__ = ("_format", "_pick")

    def __init__(self, call: ScriptCall, tag: str) -> None:
        open_words = {_OPEN.owner: 2, str(milliseconds(_OPEN.ttl)): 4, stored(_OPEN.label): 6}
        commands = [call.by_hash(), *([("EXISTS", *call.follow)] if call.follow else [])]
        order: list[int] = []
        text = ""
        for command in commands:
            text += f"*{len(command)}\r\n"
            for word in map(str, command):
                before, found, after = word.partition(tag)
                if found:
                    assert len(before + after) == _SUFFIX, "the format fills in one length for every key"
                    order += (0, 1)
                    text += f"$%d\r\n{before}%b{after}\r\n"
                elif (part := open_words.get(word)) is not None:
                    order += (part, part + 1)
                    text += "$%d\r\n%b\r\n"
                else:
                    text += f"${len(word)}\r\n{word}\r\n".replace("%", "%%")
        self._format = text.encode()
        self._pick: Callable[[Parts], Parts] = itemgetter(*order)

    def __call__(self, parts: Parts) -> bytes:
        """Fill in *parts*."""
        return self._format % self._pick(parts)


class RedisPosts:
    """Posts the requests of one backend. *reasons* says why a grant was revoked, when its release is refused."""

    def __init__(
        self,
        keys: RedisKeys,
        requests: RedisRequests,
        router: RedisRouter,
        losses: RedisLossWatcher,
        reasons: Reasons,
    ) -> None:
        self._keys = keys
        self._router = router
        self.losses = losses
        self._reasons = reasons
        self._asking = BackgroundTasks()
        self._acquire = PackedCall(requests.acquire(_OPEN), keys.tag(_OPEN.name))
        self._release = PackedCall(requests.release(_OPEN), keys.tag(_OPEN.name))

    def acquire(self, claim: Claim, answer: Callable[[Any], None]) -> AcquirePost | None:
        """See ``abc._powers.SupportsPosts.post_acquire``."""
        tag = self._keys.tag(claim.name)
        lease = f"{tag}:l"
        pipe = self._router.last_pipe(lease)
        if pipe is None:
            return None
        packed_tag, owner, ttl = tag.encode(), claim.owner.encode(), b"%d" % milliseconds(claim.ttl)
        label = stored(claim.label).encode()
        parts = (len(packed_tag) + _SUFFIX, packed_tag, len(owner), owner, len(ttl), ttl, len(label), label)
        post = AcquirePost(pipe, answer, self, claim, lease)
        return post if pipe.post(self._acquire(parts), post, followed=True) else None

    def release(self, claim: Claim, answer: Callable[[Any], None]) -> ReleasePost | None:
        """See ``abc._powers.SupportsPosts.post_release``."""
        tag = self._keys.tag(claim.name)
        lease = f"{tag}:l"
        pipe = self._router.last_pipe(lease)
        if pipe is None:
            return None
        self.losses.ended(lease, claim)
        packed_tag, owner = tag.encode(), claim.owner.encode()
        packed = self._release((len(packed_tag) + _SUFFIX, packed_tag, len(owner), owner))
        post = ReleasePost(pipe, answer, self, claim, lease)
        return post if pipe.post(packed, post) else None

    def refused(self, claim: Claim, refusal: Renewal, answer: Callable[[Any], None]) -> None:
        """Answer a release that has found no grant of its owner, with the reason if an operator took it away."""

        async def ask() -> None:
            outcome: Renewal | Revoked = refusal
            try:
                (outcome,) = await with_reasons([claim], [refusal], self._reasons)
            finally:
                answer(outcome)

        self._asking.start(ask())

    async def aclose(self) -> None:
        """Ask no more for reasons."""
        await self._asking.aclose(patience=0.0)


class _Post:
    """A request on its way. Called with the reply, or with an error instead."""

    __slots__ = ("_answer", "_claim", "_lease", "_pipe", "_posts")

    _operation: str

    def __init__(self, pipe: Pipe, answer: Callable[[Any], None], posts: RedisPosts, claim: Claim, lease: str) -> None:
        self._pipe = pipe
        self._answer = answer
        self._posts = posts
        self._claim = claim
        self._lease = lease

    def __call__(self, reply: Reply) -> None:
        """Pass the outcome on."""
        outcome: object
        try:
            outcome = self._failed(reply) if isinstance(reply, Exception) else self._read(reply)
        except Exception as error:  # noqa: BLE001  (the reply is not what the script returns)
            outcome = self._failed(error)
        if outcome is not None:
            self._answer(outcome)

    def give_up(self) -> None:
        """See ``abc._powers.PendingPost.give_up``."""
        if self._pipe.silent_for >= SILENCE:
            self._pipe.close("the server was silent")

    def _read(self, reply: Reply) -> object:
        """Read a reply; None: it is answered later."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> BackendError | PostOutcome:
        if isinstance(error, ReplyError):
            if error.code in _NOT_EXECUTED:
                return PostOutcome.NOT_EXECUTED
            if error.code in NOT_MASTER:
                self._pipe.close_soon("the server is not a master")  # the next call looks for the master again
        failure = translated(self._operation, error)
        failure.__cause__ = error
        return failure


class AcquirePost(_Post):
    """An acquisition on its way."""

    __slots__ = ()

    _operation = "acquire"

    def _read(self, reply: Reply) -> object:
        answer = read_acquired(reply)
        if isinstance(answer, Grant):
            self._posts.losses.granted(self._lease, self._claim, answer.token)
        return answer


class ReleasePost(_Post):
    """A release on its way."""

    __slots__ = ()

    _operation = "release"

    def _read(self, reply: Reply) -> object:
        refusal = read_release(reply)
        if refusal is None or self._posts.losses.may_be_released(self._claim):
            return PostOutcome.RELEASED
        self._posts.refused(self._claim, refusal, self._answer)
        return None
