"""A process that trains the arithmetic example by RLlib, saves, stops, and says what is left.

Run: ``python -m tests.rllib_run FOLDER NUM_ITERATIONS [CHECKPOINT]``; writes ``found.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import ray
from ray.rllib.utils.test_utils import check_train_results_new_api_stack

import ray_apr
from ray_apr.cli.user_files import load_function
from ray_apr.data.rows import PromptRows
from ray_apr.rllib import APR, APRConfig
from tests.whole_runs import RAYS_OWN

ARITHMETIC = Path(__file__).parents[1] / "examples" / "arithmetic"


def make_config(folder: Path) -> APRConfig:
    """The arithmetic example in small steps, on one engine and one train worker."""
    prompts = PromptRows(pq.read_table(ARITHMETIC / "prompts.parquet"))
    held_out = PromptRows(pq.read_table(ARITHMETIC / "held_out.parquet").slice(0, 8))
    return (
        APRConfig()
        .training(
            model=str(ARITHMETIC / "base_model"),
            prompts=prompts,
            reward=load_function("reward", "task.py:reward", ARITHMETIC),
            lr=1e-4,
            train_batch_size=32,
            steps=6,
            steps_per_iteration=2,
            train={"micro_batch_tokens": 2048, "num_threads": 1},
        )
        .rollouts(rollout={"group_size": 4, "max_response_tokens": 96, "engine": {"device": "cpu"}})
        .evaluation(evaluation_prompts=held_out, evaluation_interval=1)
        .checkpointing(storage_path=str(folder / "runs"))
    )


def main() -> None:
    folder, num_iterations, *checkpoint = sys.argv[1:]
    ray_apr.init("local", num_cpus=4)
    if checkpoint:
        algo = APR.from_checkpoint(checkpoint[0])
    else:
        algo = make_config(Path(folder)).build_algo()
    said = []
    for _ in range(int(num_iterations)):
        result = algo.train()
        check_train_results_new_api_stack(result)
        said.append(
            {
                "iteration": result["training_iteration"],
                "steps": result["num_training_steps_lifetime"],
                "env_steps": result["num_env_steps_sampled_lifetime"],
                "version": result["learners"]["default_policy"]["weights_seq_no"],
                "reward": result["env_runners"]["episode_return_mean"],
                "done": result["done"],
                "evaluated": result.get("evaluation", {}).get("weights_seq_no"),
            }
        )
    path = algo.save_to_path(Path(folder) / f"saved-{len(checkpoint)}")
    algo.stop()
    found = {"path": path, "iterations": said, "left": living_actors()}
    (Path(folder) / "found.json").write_text(json.dumps(found))
    ray.shutdown()


def living_actors() -> list[str]:
    """Classes of actors that are left and not Ray's own."""
    from ray.util.state import list_actors

    here = ray.get_runtime_context().gcs_address  # others may be on this machine, too
    actors = list_actors(here, filters=[("state", "!=", "DEAD")], limit=1000)
    return [a.class_name for a in actors if a.class_name not in RAYS_OWN]


if __name__ == "__main__":
    main()
