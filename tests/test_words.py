"""The house keeps its words: one meaning for each class name, and sentences whose subject is a noun of the field."""

import ast
import functools
import io
import re
import tokenize
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

PHRASES = {
    # phrase: what is counted, how often it may stand, and the names and quotations that do not count
    "tell": (re.compile(r"(?i)\b(told|tells?|telling)\b"), 5, re.compile(r"\*tell\*|\btell: |\"Tell\"")),
    "is told": (re.compile(r"(?i)\b(is|are|was|were|be|been)\s+(told|asked|given)\b"), 10, None),
    "Whether": (re.compile(r'"""\s*Whether\b'), 0, None),
    "any more": (re.compile(r"(?i)\bany\s+more\b"), 0, None),
    "is no": (re.compile(r"(?i)(?<!\bthere )\b(is|are|was|were)\s+no\s+(?!longer|more)[a-z]"), 0, None),
    "give back": (re.compile(r"(?i)\bg(ives?|iven|iving|ave)\s+(\S*[\w*]\s+){0,3}back\b"), 2, None),
    "says so": (re.compile(r"(?i)\b(says?|said|saying)\s+so\b"), 0, None),
}
"""Code returns and raises, a store answers and notifies, a caller asks: name the actor, and use its verb.
What it is not, it *is not*; and a lock is released. Only money is given back, by two examples."""
TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
"""Tokens that hold sentences. From Python 3.12 on, f-strings have tokens of their own."""
NAMES = re.compile(r"`[^`\n]*(?:\n[^`\n]*)?`")
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("phrase", PHRASES)
def test_sentences_have_an_actor_and_its_verb(phrase: str):
    pattern, most, allowed = PHRASES[phrase]
    folders = [ROOT / name for name in ("benchmarks", "docs", "examples", "fencing_sdk")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ".lua", ".sql"}]
    assert len(files) > 300
    found = []
    for path in sorted([*files, ROOT / "README.md"]):
        text = _prose(path)
        text = text if allowed is None else allowed.sub("", text)
        for match in pattern.finditer(text):
            number = text.count("\n", 0, match.start())
            found.append(f"{path.relative_to(ROOT)}:{number + 1}: {text.splitlines()[number].strip()}")
    assert len(found) <= most, "\n".join(found)


def test_names_are_no_sentences_and_all_else_is(tmp_path: Path):
    code = 'def told(tell):  # told 1\n    """It is\n    told 2: `told`."""\n    return f"told 3 {tell}", "told 4"\n'
    (tmp_path / "code.py").write_text(code)
    (tmp_path / "page.md").write_text(f"told 5\n\n```python\n{code}```\n\n`told` told 6\n")
    for name, found in (("code.py", 4), ("page.md", 6)):
        assert len(PHRASES["tell"][0].findall(_prose(tmp_path / name))) == found
        assert len(PHRASES["is told"][0].findall(_prose(tmp_path / name))) == 1


@functools.cache
def _prose(path: Path) -> str:
    """Return the sentences of a file on their lines: comments and texts of Python, and whole pages, without `names`."""
    text = path.read_text()
    if path.suffix == ".py":
        text = _sentences(text)
    elif path.suffix == ".md":
        text = BLOCK.sub(lambda block: f"\n{_sentences(block[1])}", text)
    return NAMES.sub(lambda name: "\n" * name[0].count("\n"), text)


def _sentences(code: str) -> str:
    lines = [""] * (code.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in TEXTS:
            is_format = re.match(r"(?i)r?f", token.string) is not None  # before Python 3.12, with its expressions
            text = re.sub(r"\{[^{}]*\}", "", token.string) if is_format else token.string
            for number, line in enumerate(text.split("\n"), token.start[0] - 1):
                lines[number] += f" {line}"
    return "\n".join(lines)
