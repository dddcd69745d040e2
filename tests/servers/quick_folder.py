"""Where servers of tests keep their data: in memory, so that a slow disk makes no test slow."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
NEEDED = 512 * 2**20
"""Bytes that must be free; containers may have as few as 64 MB."""


def quick_folder(prefix: str) -> Path:
    """
    Make a folder, in memory where the machine has enough of it.

    A process that is killed loses nothing that it has written, so what a server promises to keep is proven there too.
    """
    enough = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= NEEDED
    return Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY if enough else None))
