"""``fencing timeline``: a recording as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fencing_sdk.cli._output import check_output
from fencing_sdk.cli._picture import draw
from fencing_sdk.cli._recording_lines import read_recording
from fencing_sdk.cli._story import tell
from fencing_sdk.errors import ConfigurationError, shown


def draw_recordings(recordings: Sequence[Path], svg: Path) -> None:
    """
    Draw the runs in *recordings*, which one machine made, into the file *svg*.

    Raises:
        ConfigurationError: a file cannot be read or written, or there is nothing to draw.
    """
    check_output(svg)
    stories = tell(read_recording(recordings))
    if not stories:
        msg = f"nothing to draw in {', '.join(shown(str(path)) for path in recordings)}"
        raise ConfigurationError(msg)
    try:
        svg.write_text(draw(stories), encoding="utf-8")
    except OSError as error:
        msg = f"cannot write {shown(str(svg))}: {error.strerror}"
        raise ConfigurationError(msg) from error
