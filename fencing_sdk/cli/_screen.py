"""What a command prints, as an SVG picture of a terminal for the documentation."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from fencing_sdk.errors import ConfigurationError, shown

_COLUMNS = 80
_FROM_ELSEWHERE = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


def draw_screen(path: Path, title: str, show: Callable[[Console], None]) -> None:
    """
    Write what *show* prints on 80 columns into the file *path*. The picture loads nothing from elsewhere.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    show(console)
    picture = _FROM_ELSEWHERE.sub("", console.export_svg(title=title, unique_id="screen"))
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as failure:
        msg = f"cannot write {shown(str(path))}: {failure.strerror}"
        raise ConfigurationError(msg) from failure
