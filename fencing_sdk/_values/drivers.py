"""
Errors for an installation in which something is missing, differs, or cannot work.

A driver that an extra brings is missing; or a packager has left out modules or scripts of this package.

Of some drivers more is used than they promise. Where such a part is used, an AttributeError or a TypeError means that
the installed version differs: another try will not help, another version will. `tests/test_private_parts.py` lists
the parts, and takes away each of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fencing_sdk.errors import BackendRefusedError, ConfigurationError, UnsupportedError


def is_frozen() -> bool:
    """Return whether this program was frozen, by Nuitka or one of those that set ``sys.frozen``: it has no pip."""
    return "__compiled__" in globals() or getattr(sys, "frozen", False)


def check_python(user: str) -> None:
    """Raise `ConfigurationError` in a frozen program: *user* starts another Python, which is not in there."""
    if is_frozen():
        msg = f"{user} starts a Python, and a frozen program has none; install fencing-sdk on this machine"
        raise ConfigurationError(msg)


def packed_text(package: str, file: str) -> str:
    """
    Return the text of *file* beside the modules of *package*, in a folder, a zip file or a frozen program.

    Raises:
        ConfigurationError: the file was left out when the program was packed.
    """
    from pkgutil import get_data  # noqa: PLC0415  (it loads less than importlib.resources, and many programs need none)

    try:
        content = get_data(package, file)
    except OSError as error:
        what = f"{package.replace('.', '/')}/{file}"
        msg = _left_out(what, "--collect-data=fencing_sdk", "--include-package-data=fencing_sdk")
        raise ConfigurationError(msg) from error
    assert content is not None  # the loader of each of them reads data
    return content.decode()


def missing(module: str | None, extra: str | None) -> str:
    """
    Say which *module* an import has not found, and how to get it.

    Args:
        module: The ``name`` of the ModuleNotFoundError.

        extra: The extra of this package that brings it; None if no extra does.
    """
    parts = str(module).split(".")
    ours = parts[0] == "fencing_sdk"
    command = f"pip install {module}" if extra is None else install(extra)
    if not (ours or is_frozen()):
        return f"{module} is not installed; run: {command}"
    room = ".".join(parts[: 1 + ours])
    options = f"--collect-submodules={room}", f"--include-package={room}"
    return _left_out(module, *options, before="" if ours else f"run there: {command}; if that was done, ")


def _left_out(what: str | None, pyinstaller: str, nuitka: str, *, before: str = "") -> str:
    add = f"{before}add {pyinstaller} (PyInstaller) or {nuitka} (Nuitka)"
    return f"{what} was left out when this program was packed; {add}"


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
        raise ModuleNotFoundError(missing(module, extra), name=error.name) from error


def daemon_threads_allowed() -> bool:
    """Return False in a subinterpreter of `concurrent.interpreters`: there, many drivers cannot be imported either."""
    try:
        threading.Thread(daemon=True)
    except RuntimeError:
        return False
    return True


def check_daemon_threads(user: str) -> None:
    """
    Refuse *user*, whose thread must not keep the interpreter from ending, where Python allows no such thread.

    Raises:
        UnsupportedError: this is a subinterpreter.
    """
    if not daemon_threads_allowed():
        msg = (
            f"{user} needs a daemon thread, and a subinterpreter has none; use it in the main interpreter or a process"
        )
        raise UnsupportedError(msg)


IDLE_LIMIT = "SET LOCAL idle_in_transaction_session_timeout = '3s'"
"""For a transaction of this package in PostgreSQL. Else a client that froze there would keep its rows locked."""

DIFFERS = (AttributeError, TypeError)
"""Errors by which a private part of a driver shows that it is gone, or takes other arguments."""

WORKS = {
    "Python": ">=3.11,<3.16",
    "asyncpg": ">=0.30,<0.33",
    "django": ">=5.2,<7",
    "kazoo": ">=2.11,<2.12",
    "redis": ">=7,<9",
    "valkey": ">=6.1,<7",
}
"""The versions with which the tests have passed. pyproject.toml has the same bounds for what an extra installs."""


class KnownDriver:
    """
    One driver.

    Args:
        package: Its name in the package index, or Python.

        user: What of this package uses it, such as ``RedisBackend``.
    """

    def __init__(self, package: str, *, user: str) -> None:
        self.package = package
        self._user = user

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

    def check(self, operation: str, owner: object, *names: str) -> None:
        """Check that *owner*, a class or a module of the driver, has these *names*, as in `known`."""
        with self.known(operation):
            for name in names:
                getattr(owner, name)

    def changed(self, operation: str, error: Exception) -> BackendRefusedError:
        """Make the error for a version that differs; the text of *error* may be anything, and is not repeated."""
        return BackendRefusedError(self._user, operation, self.described(error))

    def described(self, error: Exception) -> str:
        """Name the version that differs, and those that work."""
        return (
            f"{self.package} {self._installed()} has changed inside ({type(error).__name__}); "
            f"fencing_sdk works with {self.package}{WORKS[self.package]}"
        )

    def _installed(self) -> str:
        if self.package == "Python":
            import platform  # noqa: PLC0415  (as below)

            return platform.python_version()
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  (an error alone needs it)

        try:
            return version(self.package)
        except PackageNotFoundError:
            return "of an unknown version"
