"""
Drivers of which more is used than they promise, and what is said of a version that differs there.

redis-py and kazoo have no public way for some of what a lock service needs. So their versions are bounded in
pyproject.toml. Where such a part is used, an AttributeError or a TypeError means that the installed version
differs: another try will not help, another version will.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from fencing_sdk.errors import BackendRefusedError

__all__ = ["DIFFERS", "KnownDriver"]

DIFFERS = (AttributeError, TypeError)
"""What using a part raises that is not there, or takes other arguments."""


class KnownDriver:
    """
    One driver.

    Args:
        package: Its name in the package index.

        works: The versions that work, as in pyproject.toml.

        backend: The backend that uses it.
    """

    def __init__(self, package: str, works: str, *, backend: str) -> None:
        self.package = package
        self.works = works
        self._backend = backend

    @contextmanager
    def known(self, operation: str) -> Iterator[None]:
        """
        Around the use of what the driver does not promise.

        Raises:
            BackendRefusedError: the installed version differs there.
        """
        try:
            yield
        except DIFFERS as error:
            raise self.changed(operation, error) from error

    def changed(self, operation: str, error: Exception) -> BackendRefusedError:
        """Make the error for a version that differs; the text of *error* may be anything, and is not repeated."""
        return BackendRefusedError(self._backend, operation, self.described(error))

    def described(self, error: Exception) -> str:
        """Tell which version differs, and which ones work."""
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            installed = "of an unknown version"
        return (
            f"{self.package} {installed} has changed inside ({type(error).__name__}); "
            f"this backend works with {self.package}{self.works}"
        )
