"""`python -m fompi`: the command line, the same as `fompi`."""

from fompi.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
