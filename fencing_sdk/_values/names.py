"""Which lock names are valid, and how names become parts of keys, paths and headers."""

from __future__ import annotations

import unicodedata
from typing import Self
from urllib.parse import quote

from fencing_sdk.errors import ConfigurationError, InvalidNameError, shown

NAME_LIMIT = 512
"""Bytes of UTF-8. Every store takes keys of this size after escaping."""
_EMPTY_HINTS = {
    "name": "; name what it protects, such as 'invoices/42'",
    "resource": "; name what the guard protects, such as 'invoices/42'",
    "pattern": "; '*' matches every name",
}


PLAIN = "lock"
"""The recipe of a plain lock, whose name remembers none."""


class LockName(str):
    """A lock name that remembers how it was made, by which metrics are kept: by a template, or for a recipe."""

    __slots__ = ("recipe", "template")

    recipe: str
    """What it names: ``lock``, ``semaphore``, ``reader``, ``writer``, ``multilock``, ``election`` or ``job``."""
    template: str | None
    """What was filled in; None for a name that no template made."""

    def __new__(cls, name: str, template: str | None = None, recipe: str = PLAIN) -> Self:
        made = super().__new__(cls, name)
        made.template = template
        made.recipe = recipe
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[str, str | None, str]]:
        return type(self), (str(self), self.template, self.recipe)


def name_for(recipe: str, name: object) -> LockName:
    """
    Return *name* as one that remembers its *recipe*.

    Raises:
        ConfigurationError: it is no name.
    """
    checked = check_name(name)
    return LockName(checked, template_of(checked), recipe)


def template_of(name: str) -> str | None:
    """Return the template that made *name*, such as ``report/{report_id}``, or None."""
    return name.template if isinstance(name, LockName) else None


def recipe_of(name: str) -> str:
    """Return what *name* was made for: ``lock`` where it does not remember anything else."""
    return name.recipe if isinstance(name, LockName) else PLAIN


def check_name(name: object, *, parameter: str = "name") -> str:
    """
    Return *name* if it can name a lock or a resource.

    Names are untrusted input, so what could break a log line, a header or a key is refused here
    once: the empty name, control characters (NUL, CR, LF), lone surrogates, more than 512 bytes.
    Everything else is allowed and kept as it is: two spellings of an accent are two names.

    Raises:
        InvalidNameError: *name* is not such a string.
        ConfigurationError: it is no string at all, which is no fault of who sent it.
    """
    if not isinstance(name, str):
        msg = f"{parameter} must be a str, not {type(name).__name__}"
        raise ConfigurationError(msg)
    if type(name) is not LockName:
        name = str.__str__(name)  # the text itself: a member of an enum may print as something else
    if not name:
        hint = _EMPTY_HINTS.get(parameter, "")
        msg = f"{parameter} must not be empty{hint}"
        raise InvalidNameError(msg)
    if len(name) > NAME_LIMIT or (not name.isascii() and len(name.encode("utf-8", "surrogatepass")) > NAME_LIMIT):
        msg = f"{parameter} {shown(name)} is longer than {NAME_LIMIT} bytes; use a hash of it"
        raise InvalidNameError(msg)
    if not name.isprintable() and any(unicodedata.category(char) in {"Cc", "Cs"} for char in name):
        msg = f"{parameter} {shown(name)} has a control character or a lone surrogate; escape it"
        raise InvalidNameError(msg)
    return name


def check_namespace(namespace: object) -> str:
    """Return *namespace* if it can prefix names; the empty one means no prefix."""
    if isinstance(namespace, str) and not namespace:
        return ""
    try:
        return check_name(namespace, parameter="namespace")
    except InvalidNameError as error:  # which no request can have made
        raise ConfigurationError(str(error)) from None


def in_namespace(namespace: str, name: str) -> str:
    """Return the name as the store knows it: a *namespace* is nothing but a prefix."""
    name = check_name(name)
    return check_name(f"{namespace}:{name}", parameter="namespace:name") if namespace else name


def safe_segment(name: str) -> str:
    """Percent-encode *name* into one path segment: no slash, no leading dot, ASCII only."""
    segment = quote(name, safe="-_~")
    return segment.replace(".", "%2E")
