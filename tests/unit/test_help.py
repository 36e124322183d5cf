"""What the commands say of themselves with ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import get_args

import pytest

from ray_apr.cli import main as cli
from ray_apr.config import Mode
from ray_apr.tools.simulator.arguments import MODES
from ray_apr.tools.trace import TRACE_FILE


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands_of(command)


@pytest.mark.parametrize(
    "command", list(commands_of(cli._parser())), ids=lambda command: command.prog
)
def test_each_command_says_what_it_does_and_takes(command: argparse.ArgumentParser) -> None:
    """known fault: those of watch, verify and doctor had usage alone."""
    assert command.description
    assert command.description[0].isupper() and command.description.endswith(".")
    assert command.description in " ".join(command.format_help().split())
    assert all(a.help for a in command._actions if a.metavar == "RUN_DIR")


def test_defaults_and_modes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for name in ("report", "trace", "simulate", "tune"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        told[name] = " ".join(capsys.readouterr().out.split())
    assert "default: report.html in RUN_DIR" in told["report"]
    assert f"default: {TRACE_FILE} in RUN_DIR" in told["trace"]
    assert ", ".join(get_args(Mode)) == MODES
    assert MODES in told["simulate"] and MODES in told["tune"]
