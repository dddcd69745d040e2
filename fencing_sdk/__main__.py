"""``python -m fencing_sdk`` is the ``fencing`` command."""

import sys

from fencing_sdk.cli import main

if __name__ == "__main__":
    sys.exit(main())
