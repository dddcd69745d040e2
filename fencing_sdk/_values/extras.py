"""How to install what an extra of the package brings, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["imported_from", "install"]


def install(extra: str) -> str:
    """The command that installs *extra*, for an installed package and for a checkout."""
    return f"pip install 'fencing-sdk[{extra}]', or '.[{extra}]' in a checkout"


@contextmanager
def imported_from(extra: str | None, module: str) -> Iterator[None]:
    """
    Name the package to install if the import of *module* in this block fails because it is missing.

    Args:
        extra: The extra of this package that brings it; None if no extra does.

        module: The top-level module.

    Raises:
        ModuleNotFoundError: *module* is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module:
            raise
        command = f"pip install {module}" if extra is None else install(extra)
        msg = f"{module} is not installed; run: {command}"
        raise ModuleNotFoundError(msg, name=error.name) from error
