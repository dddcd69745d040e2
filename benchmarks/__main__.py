"""
Run the benchmarks, each in a process of its own, and print a table for each.

    uv run python -m benchmarks [NAME ...] [--quick] [--uvloop] [--page=docs/performance.md]

It starts the servers that they need. A benchmark whose server is not installed prints that, and the others go on. With
``--page``, the tables also replace those of a page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NAMES = (
    "memory",
    "sqlite",
    "redis",
    "quorum",
    "postgresql",
    "mysql",
    "etcd",
    "zookeeper",
    "kahuna",
    "kahuna_cluster",
    "http",
    "listing",
    "distance",
    "outages",
    "drain",
    "shares",
    "rows",
    "sync",
    "start",
)
_PAGE = "--page="


def main() -> int:
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    chosen = [word for word in sys.argv[1:] if word not in options] or NAMES
    if unknown := set(chosen) - set(NAMES):
        print(f"there is no benchmark {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
        return 2
    pages = [Path(option.removeprefix(_PAGE)) for option in options if option.startswith(_PAGE)]
    passed_on = [option for option in options if not option.startswith(_PAGE)]
    failed = []
    for name in chosen:
        print(f"\n## {name}\n", flush=True)
        said, ended_well = run(name, passed_on)
        if not ended_well:
            failed.append(name)
            continue
        for page in pages:
            put_into(page, name, said)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return bool(failed)


def run(name: str, options: list[str]) -> tuple[list[str], bool]:
    """The lines that one benchmark prints, which are shown as they come, and whether it ended well."""
    lines = []
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return lines, process.returncode == 0


def put_into(page: Path, name: str, said: list[str]) -> None:
    """Replace the table of *name* on a page, if it has one. The first line says with what it was measured."""
    last = max((number for number, line in enumerate(said) if not line.startswith("|")), default=-1)
    table = "".join(["\n", *said[last + 1 :], "\n", said[0].strip(), ".\n\n"])
    begin, end = f"<!-- table: {name} -->\n", "<!-- end of the table -->"
    pattern = re.compile(f"({re.escape(begin)}).*?({end})", re.DOTALL)
    page.write_text(pattern.sub(lambda found: found[1] + table + found[2], page.read_text()))


if __name__ == "__main__":
    sys.exit(main())
