"""The tests' assertions are rewritten once before a parallel run, and not by each of its processes at the same time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_COLLECT = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n0", "-p", "no:cacheprovider"]


def rewrite_assertions(tests: Path, say: Callable[[str], None]) -> None:
    """Let two processes import half of the *tests* each, and keep what pytest makes of them, unless that was done."""
    kept = Path(importlib.util.cache_from_source(str(tests / "unit" / "any.py"))).parent
    if sys.dont_write_bytecode or any(kept.glob(f"*.{sys.implementation.cache_tag}-pytest-*.pyc")):
        return
    say("The first run compiles the tests: up to a minute on two cores.")
    sizes = {folder: sum(path.stat().st_size for path in folder.rglob("*.py")) for folder in tests.iterdir()}
    folders = sorted(filter(sizes.get, sizes), key=lambda folder: sizes[folder])
    halves = [list(map(str, folders[which::2])) for which in (0, 1)]
    collecting = [
        subprocess.Popen([*_COLLECT, *half], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for half in halves
    ]
    for process in collecting:
        process.wait()  # an error of a module is told by the run itself
