"""From whatever a driver raises to the errors of the contract, around every call of a backend."""

from __future__ import annotations

from collections.abc import Callable

from fencing_sdk.errors import BackendError, FencingError

__all__ = ["ErrorTranslation"]


class ErrorTranslation:
    """
    Raises what *translated* makes of a driver's error; ours pass. A generator would cost five times as much.

    Args:
        translated: Makes an error of the contract of an operation and an error.

        operation: What the backend was asked to do.
    """

    __slots__ = ("_operation", "_translated")

    def __init__(self, translated: Callable[[str, Exception], BackendError], operation: str) -> None:
        self._translated = translated
        self._operation = operation

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FencingError):
            raise self._translated(self._operation, error) from error
