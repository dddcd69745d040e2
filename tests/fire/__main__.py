"""``uv run python -m tests.fire``, from a checkout. The tests are not a package, so their folders are named here."""

import sys
from pathlib import Path

FIRE = Path(__file__).parent
sys.path[:0] = [str(FIRE), str(FIRE.parent / "servers")]

from fire_command import main  # noqa: E402

sys.exit(main())
