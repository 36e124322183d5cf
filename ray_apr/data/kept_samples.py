"""Which trained samples the run folder keeps with their texts, and their way there."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import ObjectLostError, RayError, RayTaskError

from ray_apr.core.exceptions import one_line

if TYPE_CHECKING:
    from ray_apr.scheduling.grant import Grant

logger = logging.getLogger(__name__)

_SHARES = 1 << 32


def is_kept(group_id: str, share: float) -> bool:
    """Whether the samples of a group are among a share of all, the same ones in each process."""
    return zlib.crc32(group_id.encode()) < share * _SHARES


class KeptSamples:
    """Hands the samples of trained steps to the recorder, a step behind the trainer at most.

    Args:
        recorder: Handle.
        share: Of the groups; 0 keeps none.
    """

    def __init__(self, recorder: Any, share: float) -> None:
        self._recorder = recorder
        self._share = share
        self._writing: Any = None

    async def keep(self, grant: Grant, rows: Sequence[Mapping[str, Any]]) -> None:
        """A step was trained.

        Waits for: the samples of the step before. Unblocked by: the recorder, or the error of what
        the object store has lost.

        Args:
            grant: The step, with its batch.
            rows: Of its samples.

        Raises:
            ResourceError: If the samples of the step before could not be written.
        """
        await self.finish()
        kept = [
            ref
            for group, ref in zip(grant.groups, grant.refs, strict=True)
            if is_kept(group.group_id, self._share)
        ]
        if kept:
            self._writing = self._recorder.save_samples.remote(rows, *kept)

    async def finish(self) -> None:
        """Wait until all that was handed over is in the run folder, or lost.

        Waits for: the recorder. Unblocked by: its answer, or the error of what the object store has
        lost.

        Raises:
            ResourceError: If it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await writing
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error, ObjectLostError):
                raise  # of the recorder, which cannot write
            # it, or the rollout worker that had the samples, has died
            logger.warning("the texts of a trained step are lost: %s", one_line(error))
