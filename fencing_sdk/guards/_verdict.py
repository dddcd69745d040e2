"""
The one decision of every guard: may a write with this token go on?

    the resource has no fence            yes; the token is the fence
    higher than the fence                yes; the token is the fence
    equal, and no two holders known      yes; a holder that was unknown is remembered
    equal, from another holder           no: two grants shared a number
    lower than the fence                 no: the lock has gone to a later holder

Pure: the caller must keep the fence unchanged until it has acted on the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fencing_sdk._values.claim import Token
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.names import check_name
from fencing_sdk._values.observers import Observers, stale_rejected
from fencing_sdk._values.token_wire import check_token, conflicting
from fencing_sdk.errors import ConfigurationError, StaleTokenError, shown
from fencing_sdk.events import FenceRaised, Observer


def admitted(resource: str, token: int, fence: Token | None) -> Token:
    """
    Return the fence to remember when *token* writes to a resource whose fence is *fence*.

    For guards of your own. Keep what it returns in the same atomic step as the write, holder included.

    Raises:
        StaleTokenError: the token is lower, or equal and another holder's.
        ConfigurationError: *resource* or *token* is not one.
    """
    resource, token = check_name(resource, parameter="resource"), check_token(token)
    if fence is None or token > fence:
        return token
    if token < fence or conflicting(token, fence):
        raise refusal(resource, token, fence)
    return fence if token.holder is None else token


def check_tokens(tokens: object) -> dict[str, Token]:
    """
    Return the token of each resource, sorted by the resources as every guard sorts them: by their bytes.

    Raises:
        ConfigurationError: it is no mapping of such, or an empty one.
    """
    if not isinstance(tokens, Mapping) or not tokens:
        msg = f"tokens must be a mapping of resources to their tokens, such as held.tokens, not {shown(tokens)}"
        raise ConfigurationError(msg)
    checked = {check_name(resource, parameter="resource"): check_token(token) for resource, token in tokens.items()}
    return dict(sorted(checked.items()))


def check_token_of(resource: str, token: int) -> dict[str, Token]:
    """
    Do the same for one *resource*.

    Raises:
        ConfigurationError: *resource* or *token* is not one.
    """
    return {check_name(resource, parameter="resource"): check_token(token)}


def refusal(resource: str, token: Token, fence: Token) -> StaleTokenError:
    """The error that refuses *token* because of *fence*."""
    return StaleTokenError(resource, int(token), int(fence), conflict=token == fence)


class Reports:
    """Tells a guard's observers what it refused and which fence it raised."""

    __slots__ = ("_clock", "_observers")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = Observers(observers)
        self._clock = BootClock()

    @contextmanager
    def of_refusals(self, tokens: int | Mapping[str, int]) -> Iterator[None]:
        """Report the `StaleTokenError` that leaves the body, if one does; *tokens* is a token, or those by resource."""
        try:
            yield
        except StaleTokenError as error:
            token = tokens.get(error.resource) if isinstance(tokens, Mapping) else tokens
            now, holder = self._clock.now(), token.holder if isinstance(token, Token) else None
            self._observers.emit(stale_rejected(error, name=error.resource, at=now, holder=holder))
            raise

    def raised(self, resource: str, token: Token) -> None:
        """Report that every token below *token* is refused from now on."""
        if self._observers:
            now = self._clock.now()
            self._observers.emit(
                FenceRaised(name=resource, at=now, holder=token.holder, token=token, resource=resource)
            )
