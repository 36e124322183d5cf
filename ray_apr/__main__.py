"""``python -m ray_apr``."""

from __future__ import annotations

import logging
import os
import sys

from ray_apr.cli.main import main


def run() -> None:
    """Run one command and end the process with its exit code.

    At once, without taking the interpreter down: the run is closed and Ray is shut down by then,
    but threads of Ray's libraries may be left. One that calls Ray after its shutdown ends the
    process with exit code 1; so would one that crashes while the interpreter goes.
    """
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
