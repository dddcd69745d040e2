"""
What the API reference lists changes only on purpose: each public name, its parameters and its members stand in a file.

After a change that is meant, write the file anew and say in CHANGELOG.md what users have to do:

    uv run python tests/test_public_signatures.py > tests/public_signatures.txt
"""

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import django_settings  # noqa: F401  (it configures Django)

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "docs" / "api"
KNOWN = HERE / "public_signatures.txt"


def public_signatures() -> list[str]:
    """A line for each name of the API reference, and for each public member of a class."""
    return sorted({line for name, members in _listed() for line in _described(name, _found(name), members=members)})


def _listed() -> Iterator[tuple[str, bool]]:
    """Each name of the reference, and whether its members are shown there."""
    directives = re.compile(r"^\.\. (?:py:)?(\w+):: ([\w.]+)(?:\(\))?((?:\n   :.*)*)", re.MULTILINE)
    for page in sorted(REFERENCE.glob("*.rst")):
        module = ""
        for directive, name, options in directives.findall(page.read_text()):
            members = ":no-members:" not in options
            if directive == "currentmodule":
                module = name
            elif directive == "automodule":
                yield from (
                    (f"{name}.{each}", members) for each in getattr(importlib.import_module(name), "__all__", ())
                )
            elif directive.startswith("auto"):
                yield (name if name.startswith("fencing_sdk.") else f"{module}.{name}"), members


def _found(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _described(name: str, thing: object, *, members: bool) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield name + _signature(thing)
        return
    bases = [base.__name__ for base in thing.__bases__] if issubclass(thing, BaseException) else []
    yield f"class {name}({', '.join(bases)})"
    if issubclass(thing, enum.Enum):
        yield from (f"{name}.{member}" for member in thing.__members__)
        return
    if (begin := _own(thing, "__init__")) is not None and not getattr(thing, "_is_protocol", False):
        yield f"{name}{_signature(begin)}"
    ours = [base for base in thing.__mro__ if base.__module__.startswith("fencing_sdk") and members]
    for member in {each for base in ours for each in {*vars(base), *inspect.get_annotations(base)}}:
        if not member.startswith("_"):
            yield f"{name}.{member}{_signature(inspect.getattr_static(thing, member, None))}"


def _own(thing: type, member: str) -> object:
    """The member, if a class of this package defines it: those of the standard library differ between its versions."""
    found = inspect.getattr_static(thing, member)
    return found if getattr(found, "__module__", "fencing_sdk").startswith("fencing_sdk") and callable(found) else None


def _signature(thing: object) -> str:
    """The parameters with their annotations as they are written, and with defaults that every version shows alike."""
    if isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    if not inspect.isfunction(thing):
        return ""
    shown = inspect.signature(thing)
    parameters = [
        each.replace(default=_default(each), annotation=_text(each.annotation)) for each in shown.parameters.values()
    ]
    return str(shown.replace(parameters=parameters, return_annotation=_text(shown.return_annotation)))


def _default(parameter: inspect.Parameter) -> object:
    plain = {bool, int, float, str, bytes, tuple, type(None), type}
    return parameter.default if type(parameter.default) in plain else ...


def _text(annotation: object) -> object:
    """Nothing for an annotation that the module does not keep as text: versions of Python show it differently."""
    return annotation if isinstance(annotation, str) else inspect.Parameter.empty


def test_no_public_name_or_signature_changes_unnoticed():
    known, now = KNOWN.read_text().splitlines(), public_signatures()
    gone, new = sorted(set(known) - set(now)), sorted(set(now) - set(known))
    changes = [*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)]
    assert not changes, "\n".join(["the head of this file says what to do with these changes:", *changes])


def test_the_reference_lists_what_the_doors_export():
    import fencing_sdk
    from fencing_sdk import sync

    listed = {name.rpartition(".")[2] for name, _ in _listed()}
    assert set(fencing_sdk.__all__) | set(sync.__all__) <= listed | {"holding", "current_token"}


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in public_signatures())
