"""
The map of the rooms in docs/CONTRIBUTING.md is what the layering test enforces.

    uv run python tests/test_room_map.py     writes the map into the page
"""

import ast
import re
from pathlib import Path

from test_layering import CHECKER, EDGES, PACKAGE, ROOMS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "CONTRIBUTING.md"
BEGIN = '<!-- the rooms, written by "uv run python tests/test_room_map.py" -->\n'
END = "<!-- the end of the rooms -->\n"


def purpose(room: str) -> str:
    """The first line of the room's docstring."""
    home = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
    return ast.get_docstring(ast.parse(home.read_text())).splitlines()[0]


def entered(rooms: set[str]) -> str:
    """The rooms in the order of the table, and parts of rooms after them."""
    order = [*ROOMS, *sorted(rooms)]
    return ", ".join(f"`{room}`" for room in sorted(rooms, key=order.index)) or "nothing"


def room_map() -> str:
    """The table that the page should show."""
    rows = [f"| `{room}` | {purpose(room)} | {entered(rooms)} |" for room, rooms in ROOMS.items()]
    for edge in EDGES:
        checker = f"; `{CHECKER}`" if edge == "cli" else ""
        rows.append(f"| `{edge}` | {purpose(edge)} | every room above{checker} |")
    return "\n".join(["| room | what is in it | it may import from |", "| --- | --- | --- |", *rows, ""])


def test_the_map_on_the_page_is_what_the_layering_test_enforces():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == room_map(), "run: uv run python tests/test_room_map.py"


def test_every_file_and_folder_that_the_page_names_is_there():
    named = re.findall(r"`([\w./]+(?:\.py|/))`", PAGE.read_text())
    roots = (ROOT, PACKAGE, PACKAGE / "backends" / "postgresql")
    assert len(named) > 15
    assert not [path for path in named if not any((root / path).exists() for root in roots)]


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + room_map() + END + rest.partition(END)[2])
