"""What the command line says, and how it ends."""

from __future__ import annotations

import sys
import traceback

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def show(text: str) -> None:
    """Say what was asked for."""
    print(text, flush=True)


def complain(text: str, verbose: bool) -> None:
    """Say what is wrong, with the traceback of the error at hand if it is wanted."""
    print(text, file=sys.stderr, flush=True)
    if verbose:
        traceback.print_exc()
