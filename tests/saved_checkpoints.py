"""What the stored checkpoints of ``tests/data/checkpoints`` hold, and what writes one of today.

    .venv/bin/python -m tests.saved_checkpoints FOLDER

The folders there are named by their format, and each was written by the code of its time: they are
never written anew. A new format gets a folder of its own beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ray_apr.config import RolloutConfig
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment, pack_ids
from ray_apr.data.resumption import (
    PROGRESS_FILE,
    ROLLOUT_FILE,
    Counters,
    RolloutProgress,
    sampled_with,
)
from ray_apr.data.saved_samples import samples_table
from ray_apr.train.checkpoint import save_rollout

STORED = Path(__file__).parent / "data" / "checkpoints"
ROLLOUT = RolloutConfig(group_size=2, max_response_tokens=16)
NUM_PROMPTS = 4
COUNTERS = Counters(
    samples_trained=8, tokens_trained=50, samples_interrupted=2, samples_resumed=1,
    tokens_generated=90, tokens_discarded={"stale": 10},
)  # fmt: skip


def prompt_of(name: str) -> Prompt:
    """The prompt of an id, as a dataset would have it."""
    return Prompt(prompt_id=name, token_ids=(1, 5, 2**31 - 1), row={"answer": "4"})


def live_group() -> tuple[Sample, ...]:
    """One that was interrupted, and one whose environment has to answer."""
    of_version = [
        Segment(policy_version=1, token_ids=(7, 8), logprobs=(-0.5, -1.25), support=_support(2)),
        Segment(policy_version=2, token_ids=(9,), logprobs=(-0.1,), support=_support(1)),
    ]
    observed = Segment(policy_version=2, token_ids=(3, 3), logprobs=(0.0, 0.0), is_generated=False)
    return (
        _sample("e1-1", 0, segments=tuple(of_version), num_interruptions=1),
        _sample(
            "e1-1", 1, segments=(of_version[0], observed, of_version[1]), num_turns=2,
            awaits_step=True, environment_state={"board": [1, 2], "at": "b"}, turn_text="up",
        ),
    )  # fmt: skip


def group_in_buffer() -> tuple[Sample, ...]:
    """Two that have ended, with their rewards."""
    segment = Segment(policy_version=2, token_ids=(4, 2), logprobs=(-0.75, -2.0))
    return tuple(
        _sample(
            "e1-3", i, segments=(segment,), finish_reason=FinishReason.STOP, num_turns=1,
            response_text="4", reward=float(i), reward_metrics={"digits": 1.0},
        )
        for i in range(2)
    )  # fmt: skip


def progress() -> RolloutProgress:
    """Where the rollout side stood, without what follows from the samples' file."""
    return RolloutProgress(
        seed=3, num_prompts=NUM_PROMPTS, position=8, pending=(2, 5, 6, 7), counters=COUNTERS,
        retries=("e1-2~1",), num_long_retries=1, num_stops={"e1-2~1": 1}, num_owed=2,
        sampled=sampled_with(ROLLOUT, resets=True),
    )  # fmt: skip


def write_checkpoint(folder: Path) -> None:
    """Write the rollout side of a checkpoint as this code does."""
    folder.mkdir(parents=True)
    where = {"step": 2, "policy_version": 2}
    (folder / PROGRESS_FILE).write_text(json.dumps(where), encoding="utf-8")
    save_rollout(folder, progress(), samples_table([live_group()], [group_in_buffer()]))
    assert (folder / ROLLOUT_FILE).is_file()


def _support(num_tokens: int) -> tuple[bytes, ...]:
    return tuple(pack_ids(range(n, n + 3)) for n in range(num_tokens))


def _sample(group_id: str, number: int, **fields: object) -> Sample:
    prompt = prompt_of(group_id)
    return Sample(
        sample_id=f"{group_id}-{number}", group_id=group_id, prompt=prompt,
        max_response_tokens=16, **fields,
    )  # fmt: skip


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
