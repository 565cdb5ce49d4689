"""The command, as `python -m funcpipe`."""

import os
import sys

if sys.path[0] == os.getcwd():
    del sys.path[0]  # modules of the user come after Python's own, which libraries import: see `cli.factories`

from funcpipe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
