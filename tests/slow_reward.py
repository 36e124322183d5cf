"""The reward of the arithmetic example, of which some calls take long.

A run takes it with ``reward=slow_reward.py:reward``; ray_apr knows nothing of this file.
"""

from __future__ import annotations

import time
import zlib

ONE_IN = 20
SLOW_S = 4.0


def reward(sample) -> float:
    """1 for a right sum, else 0; one of `ONE_IN` calls takes `SLOW_S` seconds.

    Which one goes by the sample's id: if it went by the response, slow and so dropped samples would
    be of some lengths more than of others.
    """
    if zlib.crc32(sample.sample_id.encode()) % ONE_IN == 0:
        time.sleep(SLOW_S)
    return float(sample.response_text.rpartition(",")[2] == str(sample.row["answer"]))
