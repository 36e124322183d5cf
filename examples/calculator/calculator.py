"""A calculator for the policy of the arithmetic example, in the middle of its responses.

The policy adds column by column, ``2+4+0=06;1+9+0=10,106``. Here it writes only up to each ``=``:
there its turn ends (``rollout.sampling.stop_token_ids``), the calculator answers with the two
digits, and the policy goes on. What the calculator wrote is read, and not trained.
"""

from __future__ import annotations

import re
from typing import Any

from ray_apr import Environment, Step

CALL = re.compile(r"(\d)\+(\d)\+(\d)=$")


class Calculator(Environment):
    """Answers a column; a turn that asks nothing was the last one."""

    def step(self, sample: Any) -> Step:
        """Return the sum of the column, or the end with the reward.

        Args:
            sample: has `turn_text`, the last turn, `finish_reason`, and `row`, the prompt's row
                with the column `answer`.
        """
        if sample.finish_reason is None and sample.turn_text.endswith("="):
            call = CALL.search(sample.turn_text)
            if call:
                return Step(text=f"{sum(map(int, call.groups())):02d}")
        _, mark, answer = (sample.turn_text or "").rpartition(",")
        return Step(done=True, reward=float(bool(mark) and answer == str(sample.row["answer"])))
