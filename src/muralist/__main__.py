"""`python -m muralist` is `muralist`."""

import sys

from muralist.cli import main

if __name__ == "__main__":
    sys.exit(main())
