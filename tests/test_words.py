"""The house keeps its words: one meaning for each class name, and sentences whose subject is a noun of the field."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import fencing_sdk

PACKAGE = Path(fencing_sdk.__file__).parent
ROOT = PACKAGE.parent
RIDDLES = re.compile(r"\b(whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
"""A reader has to guess which of caller, holder, waiter, client or store is meant. For pages, see test_docs."""
FORMER = re.compile(r"\b(Errands|Tenure|Cohort|Newcomers|Alarms|OurErrors|Doubts|Ears|Debts|Stakes?|doze|outwait)\b")
"""Names that said nothing about what they are. The glossary has the words that replaced them."""


def test_every_class_of_the_package_has_a_name_of_its_own_and_threads_have_the_names_of_tasks():
    names = {where: Counter(_classes(where)) for where in (PACKAGE, PACKAGE / "sync")}
    twice = {name for name, count in names[PACKAGE].items() if count > 1}
    assert twice <= set(names[PACKAGE / "sync"]), "one name for two things"
    assert {name for name in twice if names[PACKAGE][name] > 2 or names[PACKAGE / "sync"][name] > 1} == set()
    assert not [name for name in names[PACKAGE / "sync"] if name.startswith("Sync")]


def _classes(folder: Path) -> list[str]:
    return [
        node.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


@pytest.mark.parametrize("banned", [RIDDLES, FORMER], ids=["riddles", "former names"])
def test_the_package_has_no_banned_word(banned: re.Pattern[str]):
    files = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".lua", ".sql"}]
    assert len(files) > 100
    assert _found(banned, files) == []


def _found(banned: re.Pattern[str], files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if banned.search(line)
    ]
