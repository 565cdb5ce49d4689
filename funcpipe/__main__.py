"""The command, as `python -m funcpipe`."""

from funcpipe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
