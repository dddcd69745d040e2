"""The files that a page shows, written as a project of their own, and the tests of a project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"^```(?:python skip|ini)\n# (?P<file>[\w/]+\.\w+)(?P<end>, at the end)?\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def write_from_page(page: str, folder: Path, *files: str) -> None:
    """Write the blocks of *page* that begin with the name of a file: those of *files*, or all of them."""
    for match in BLOCK.finditer((DOCS / page).read_text()):
        file = folder / match["file"]
        if not files or match["file"] in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((file.read_text() if match["end"] else "") + match["code"])


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    """Run the tests in *folder*; no configuration of ours is in reach."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-c", "/dev/null"]
    command += [f"--rootdir={folder}", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr
