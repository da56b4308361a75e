"""python -m fompi: the command line."""

from fompi.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
