"""The documentation site has a place for every page and an entry for every public name. CI also builds it."""

import functools
import importlib
import pkgutil
import re
from pathlib import Path

import django_settings  # noqa: F401  (it configures Django)

import fencing_sdk

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("") for kind in ("*.md", "*.rst") for path in DOCS.rglob(kind)}

NOT_FOR_USERS = ("cli", "testing.promises")
NOT_IN_THE_REFERENCE = {"from_url", "shown"}
"""What `connect` calls with a URL, and how messages quote a text: for code of this package."""


def navigation(page: Path) -> set[Path]:
    """Every page that can be reached from *page* through tables of contents."""
    text = next(DOCS.glob(f"{page}.*")).read_text()
    reached = {page}
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in filter(None, block.splitlines()):
            entry = line.partition("<")[2].rstrip(">") or line
            if not entry.startswith(":") and entry != "self":
                found = (DOCS / page.parent).glob(f"{entry}.*")
                reached |= {reached for path in found for reached in navigation(path.relative_to(DOCS).with_suffix(""))}
    return reached


def test_every_page_can_be_reached_from_the_first_one():
    assert navigation(Path("index")) == PAGES


def test_a_link_to_a_page_that_is_not_there_reaches_nothing():
    assert Path("nowhere") not in PAGES
    assert navigation(Path("glossary")) == {Path("glossary")}


@functools.cache
def public_modules() -> dict[str, list[str]]:
    """Each module that users import from, and the names that it promises."""
    found = {}
    for module in pkgutil.walk_packages(fencing_sdk.__path__, "fencing_sdk."):
        inside = module.name.removeprefix("fencing_sdk.")
        inside_a_folder = inside.count(".") > 1  # users import from `fencing_sdk.backends.redis`, not from its modules
        if "._" in f".{inside}" or inside_a_folder or inside.startswith(NOT_FOR_USERS):
            continue
        found[module.name] = getattr(importlib.import_module(module.name), "__all__", [])
    return found | {"fencing_sdk": fencing_sdk.__all__}


def left_out(page: Path) -> set[str]:
    """The names that *page* leaves to another one."""
    listed = re.findall(r"^ *:exclude-members: (.*)$", page.read_text(), re.MULTILINE)
    return {name.strip() for line in listed for name in line.split(",")}


def documented() -> list[object]:
    """Every object that a page of the reference asks autodoc for."""
    objects = []
    for page in (DOCS / "api").glob("*.rst"):
        module = ""
        for kind, name in re.findall(r"^ *\.\. (currentmodule|auto\w+):: ([\w.]+)", page.read_text(), re.MULTILINE):
            if kind == "currentmodule":
                module = name
            elif kind == "automodule":
                module = name
                shown = set(public_modules()[name]) - left_out(page)
                objects += [getattr(importlib.import_module(name), member) for member in shown]
            elif kind != "automethod":
                home, _, member = (name if "." in name else f"{module}.{name}").rpartition(".")
                objects.append(getattr(importlib.import_module(home), member))
    return objects


def test_every_public_name_is_in_the_reference():
    there = {id(thing) for thing in documented()}
    missing = [
        f"{module}.{name}"
        for module, names in public_modules().items()
        for name in names
        if name not in NOT_IN_THE_REFERENCE and id(getattr(importlib.import_module(module), name)) not in there
    ]
    assert len(there) > 100
    assert not missing
