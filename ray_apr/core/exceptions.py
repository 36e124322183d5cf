"""Errors of ray_apr: one root, each also a standard type, all of them picklable.

A message says what is wrong, the value that was seen, and what to do about it.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ray_apr.core.names import did_you_mean, nearest


class APRError(Exception):
    """Root of every error that ray_apr raises on purpose."""


class ConfigError(APRError, ValueError):
    """A setting or an input is invalid; raised at construction, before a cluster starts.

    Args:
        field: Dotted name of the setting, e.g. ``"partial_rollout.max_staleness"``.
        value: The value that was given.
        remedy: What to write instead, as a sentence.
    """

    def __init__(self, field: str, value: Any, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field = field
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.remedy}"


class UnknownKeyError(ConfigError):
    """There is no setting of this name.

    Args:
        field: Dotted name that was given.
        value: The value that was given.
        known: Names that its section has.
        elsewhere: Dotted names of the same settings in other sections.
    """

    def __init__(
        self, field: str, value: Any, known: Sequence[str], elsewhere: Sequence[str] = ()
    ) -> None:
        near = [*elsewhere, *nearest(field.rpartition(".")[2], known)]
        names = did_you_mean(near, f"known: {', '.join(known)}")
        super().__init__(field, value, f"unknown key; {names}")
        self.args = (field, value, known, elsewhere)
        self.known = known


class ResourceError(APRError, RuntimeError):
    """The cluster or this machine lacks what the configuration asks for."""


class FolderTakenError(ResourceError):
    """Another driver goes on with the run in its folder; this one was cut off or suspended."""


class RanksChange(APRError, RuntimeError):
    """The train workers of a run become more or fewer: no failure, its parts begin again."""


class RolloutError(APRError, RuntimeError):
    """Generation failed in a way that a retry on the same server cannot cure."""


class EngineUnavailableError(RolloutError):
    """The engine is dead, or its weights are undefined after a broken weight sync."""


class NoEngineError(EngineUnavailableError):
    """No rollout server runs, and those that are started again have not come yet."""


class EngineDiedError(EngineUnavailableError):
    """The engine's own processes have ended; Serve replaces the server that had them. A generate
    call ends with it only if it ran there, so that it may be the cause."""


class UserCodeError(APRError, RuntimeError):
    """A function of the user's gave no usable answer for a sample; never replaced by a zero.

    Args:
        sample_id: The sample it was called for.
        kind: ``"timeout"``, ``"raised"`` or ``"invalid"`` (an answer of another kind).
        detail: What it did.
    """

    what = "user code"

    def __init__(self, sample_id: str, kind: str, detail: str) -> None:
        super().__init__(sample_id, kind, detail)
        self.sample_id = sample_id
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.what} of sample {self.sample_id} {self.kind}: {self.detail}"


class RewardError(UserCodeError):
    """The reward function gave no finite number."""

    what = "reward"


class StepError(UserCodeError):
    """The environment gave no usable `Step`."""

    what = "environment"


class StarvedError(APRError, TimeoutError):
    """A wait ran into its limit; the message says who waited, for what, and how long."""


class TrainError(APRError, RuntimeError):
    """An optimizer step cannot be done: its batch or its numbers are not what they must be."""


class WeightSyncError(APRError, RuntimeError):
    """Weights could not be moved to every rollout server."""


class SyncBrokenError(WeightSyncError):
    """A weight sync broke off: a peer has died, or did not answer. Another try may succeed, without
    those that are gone; errors of other classes would come again."""


SYNC_BROKEN = "the weight sync broke off"
"""In the message of each `SyncBrokenError` of an engine's worker: vLLM hands on what an error says,
not its class."""


class WeightMismatchError(WeightSyncError):
    """An engine computes otherwise than the trainer, though it has received the weights; to send
    them again would not help."""


class LedgerError(APRError, AssertionError):
    """Generated tokens are missing or counted twice (invariant 1)."""


class SimulationError(APRError, RuntimeError):
    """A simulated run cannot go on."""


class Stopped(KeyboardInterrupt):
    """Somebody ends the run: with Ctrl-C, or with SIGTERM as ``ray job stop`` does; no error.

    Args:
        signum: The signal.
    """

    of_sigint: ClassVar[str] = "stopped by you (Ctrl-C)"
    """What SIGINT says in this process; that of a run's host is Ray's (`run.host`)."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__(signum)
        self.signum = int(signum)

    @property
    def exit_code(self) -> int:
        """What a shell says of a process that this signal ended: 130 or 143."""
        return 128 + self.signum

    def __str__(self) -> str:
        return "stopped by SIGTERM" if self.signum == signal.SIGTERM else self.of_sigint


class PrivateNameError(APRError, ImportError):
    """Ray, PyTorch or vLLM lacks something of its inside that ray_apr uses: another version."""


_TRACEBACK = "Traceback (most recent call last):"
_FRAME = 'File "'
"""Begin of a line of a traceback, of Ray's, too, which have no line above them."""
_NAMED = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)(: |$)")
"""Line of a traceback that says what was raised."""
_OF_GROUPS = re.compile(r"^(?:[|+] +|\+[-+ \d]+$)")
"""What Python draws beside the traceback of an exception group."""
_PACKAGES = (
    Path(__file__).parents[1],
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
_NOT_OF_USERS = ("<frozen ", "<string>", *(f"{folder}{os.sep}" for folder in _PACKAGES))
"""Begins of the names of files that are no user's; <string> has methods of dataclasses."""
_COMPILED = (".pyx", ".pxi")
"""Ends of the names of Cython's files, which are where their package was compiled."""


def raised_at(error: BaseException) -> tuple[str, str]:
    """Where an error was raised: file and number of the line, and the line itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return _place(last), last.line or ""


def raised_by_user(error: BaseException) -> str:
    """Which line of the user's raised an error: file and number of the innermost one that is of no
    package and not of the standard library; where there is none, of the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [
        frame
        for frame in frames
        if not frame.filename.startswith(_NOT_OF_USERS) and not frame.filename.endswith(_COMPILED)
    ]
    return _place((of_user or frames)[-1])


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def one_line(error: BaseException) -> str:
    """What an error says, in one line: of a traceback inside of it, what was raised.

    Example:
        >>> one_line(ValueError("Traceback (most recent call last):\\n  ...\\nKeyError: 'answer'"))
        "KeyError: 'answer'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return repr(error)
    traces = any(line.endswith(_TRACEBACK) or line.startswith(_FRAME) for line in lines)
    raised = _raised(lines) if traces else None
    if not isinstance(error, APRError):
        return raised or lines[0]
    if raised is None:
        return " ".join(lines)
    return raised if lines[0].startswith(_TRACEBACK) else f"{lines[0]} … {raised}"


def _raised(lines: Sequence[str]) -> str:
    """What the last error of a traceback says, all of it; its last line, where none has a name."""
    lines = [said for line in lines if (said := _OF_GROUPS.sub("", line))]
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    after = lines[frames[-1] :] if frames else lines
    named = [number for number, line in enumerate(after) if _NAMED.match(line)]
    return " ".join(after[named[-1] :]) if named else lines[-1]


def all_lines(error: BaseException) -> str:
    """All that an error says, as one line without a full stop, which a remedy may follow.

    Example:
        >>> all_lines(ValueError("no such split.\\n\\nKnown:  train, test."))
        'no such split. Known: train, test'
    """
    return " ".join(str(error).split()).rstrip(".")
