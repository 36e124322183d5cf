"""What the command line says, and how it ends."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    _SubParsers = argparse._SubParsersAction

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class Commands(_SubParsers):
    """Commands whose own ``--help`` says what they do: as the list does, or in more words."""

    def add_parser(self, name: str, **arguments: Any) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            name: What it is called.
            arguments: Of its parser, with ``help``.
        """
        told = arguments["help"]
        return super().add_parser(
            name, **{"description": f"{told[0].upper()}{told[1:]}.", **arguments}
        )


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Have a command take the folder of a run."""
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="folder of a run, e.g. runs/NAME")


def show(text: str) -> None:
    """Say what was asked for."""
    print(text, flush=True)


def tell(text: str) -> None:
    """Say how a run goes, which goes on where nobody reads it any more: Ctrl-C ends `tee`, too."""
    try:
        show(text)
    except OSError as error:
        _silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # as a full disk, which nobody chose
            complain(f"the lines of the run are not shown any more: {error}", verbose=False)


def complain(text: str, verbose: bool) -> None:
    """Say what is wrong, with the traceback of the error at hand if it is wanted."""
    try:
        print(text, file=sys.stderr, flush=True)
        if verbose:
            traceback.print_exc()
    except OSError:  # nobody reads it: the exit code says it
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Have what is written from here on, and at the end of this process, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
