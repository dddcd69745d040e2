"""Every shipped check has a test that plants its cause, and a row in the documentation."""

import ast
import functools
from pathlib import Path

import fencing_sdk

HERE = Path(__file__).parent
PACKAGE = Path(fencing_sdk.__file__).parent
PAGE = PACKAGE.parent / "docs" / "doctor.md"


@functools.cache
def checks() -> list[str]:
    """The names that findings are made with: the first argument, a text such as ``redis.eviction``."""
    names = {
        node.value
        for path in PACKAGE.glob("diagnosis/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_check(node.value, path)
    }
    return sorted(names)


def _is_check(text: str, path: Path) -> bool:
    room, dot, name = text.partition(".")
    rooms = {"store", "machine", "self-test", "memory", "redis", "postgresql", "mysql", "etcd", "zookeeper"}
    rooms |= {"kahuna", "sqlite"}
    return bool(dot) and room in rooms and name.replace("-", "").isalpha() and not text.endswith(".py")


def test_each_is_planted():
    planted = "".join(path.read_text() for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
    assert [check for check in checks() if f'"{check}"' not in planted] == []


def test_each_is_on_the_page():
    page = PAGE.read_text()
    ours = [check for check in checks() if not check.startswith(("self-test.", "memory."))]
    assert [check for check in ours if f"`{check}`" not in page] == []
