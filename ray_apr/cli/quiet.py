"""Ray's own lines of a run are in a file of its folder, so that a terminal shows the run's."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ray_apr.core.exceptions import one_line

logger = logging.getLogger(__name__)

RAY_LOG = "ray.log"
_MOST = 64 << 20
"""Bytes of that file."""
_LOGGERS = ("ray", "ray.data", "ray.serve")
"""Those with a handler of their own for the terminal."""
_NO_NEWS = ("Progress bars disabled", "Token authentication is enabled")
"""Begins of what Ray warns of here, and nobody need act on."""
_SKIPPED = "RAY_DEDUP_LOGS_SKIP_REGEX"
"""Ray's variable of the lines of its daemons that a driver does not print."""
_DAEMONS_NO_NEWS = "|".join(
    (
        r"PYTHON worker processes have been started on node",
        r"Task ServeController\.\w+ failed\. There are infinite retries remaining",
        r"Task RunRecorder\.hold failed\. There are infinite retries remaining",
    )
)
"""A run has more processes than the machine has cores, and at its end it takes Serve away, and the
recorder, which the servers' lease still asks."""


class _InFolder(logging.handlers.RotatingFileHandler):
    """Makes the folder with the first line: a run that is refused has none."""

    _is_told = False

    def _open(self) -> io.TextIOWrapper:
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            return super()._open()
        except OSError as error:  # raised here it would be one of Ray's, which has the line
            logger.warning("Ray's lines are not kept: %s", one_line(error))
            return open(os.devnull, "w", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that lines are lost, as on a full disk, in place of a traceback for each."""
        error = sys.exception()
        if error is not None and not self._is_told:
            self._is_told = True
            logger.warning("lines of Ray are lost: %s", one_line(error))


def skip_daemons_lines() -> None:
    """Have Ray not print lines of its daemons that mean nothing here; to be called before Ray is
    imported. They are in the logs of its session, and a variable that is set outside wins."""
    os.environ.setdefault(_SKIPPED, _DAEMONS_NO_NEWS)


@contextlib.contextmanager
def no_advice_to_delete() -> Iterator[None]:
    """Have Ray Train not say that it found checkpoints where nothing is trained: it goes on to
    advise to delete the run folder."""
    ray_train = logging.getLogger("ray.train")
    level = ray_train.level
    ray_train.setLevel(logging.WARNING)
    try:
        yield
    finally:
        ray_train.setLevel(level)


@contextlib.contextmanager
def ray_lines_in(file: Path) -> Iterator[None]:
    """Have what Ray says go to a file, and to the terminal from warnings on, without progress bars
    of Ray Data.

    Args:
        file: It grows to 64 MiB, and is then `ray.log.1`, in place of that one; without it, as on a
            disk that is read-only, the lines are not kept.
    """
    import ray.data
    import ray.serve

    kept = _InFolder(file, maxBytes=_MOST, backupCount=1, delay=True, encoding="utf-8")
    kept.setLevel(logging.INFO)
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    shown = [  # not Ray Data's own file of the session, which is no `FileHandler`
        (handler, handler.level)
        for ray_logger in loggers
        for handler in ray_logger.handlers
        if isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
    ]
    context = ray.data.DataContext.get_current()
    has_bars, context.enable_progress_bars = context.enable_progress_bars, False
    for ray_logger in loggers:
        ray_logger.addHandler(kept)
    for handler, level in shown:
        handler.setLevel(max(level, logging.WARNING))
        handler.addFilter(_is_news)
    try:
        yield
    finally:
        for handler, level in shown:
            handler.setLevel(level)
            handler.removeFilter(_is_news)
        for ray_logger in loggers:
            ray_logger.removeHandler(kept)
        kept.close()
        context.enable_progress_bars = has_bars


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_NEWS)
