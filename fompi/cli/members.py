"""`fompi members serve`: the store by which members of epochs find each other, until it is ended."""

from __future__ import annotations

import argparse
import signal
from time import sleep

from fompi.base.errors import LaunchError
from fompi.members import Server
from fompi.members.membership import PORTS

EXAMPLE = "{} members serve --port 7777"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["serve"], help="serve: the store fompi://HOST:PORT (FOMPI_MEMBERS_TOKEN)")
    parser.add_argument("--host", default="127.0.0.1", help="an address of this host (127.0.0.1: for this host only)")
    parser.add_argument("--port", type=int, default=PORTS["fompi"], metavar="N", help=f"({PORTS['fompi']})")


def run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Server(options.host, options.port) as server:
            print(f"{server.address} is there for members with the same FOMPI_MEMBERS_TOKEN", flush=True)
            while True:
                sleep(0.5)  # `signal.pause` would miss a signal that comes right before it
    except KeyboardInterrupt:  # the way to end it
        pass
    except OSError as error:
        raise LaunchError(f"{options.host}:{options.port}: {error.strerror or error}") from error
    return 0
