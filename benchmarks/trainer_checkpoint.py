"""A checkpoint of the trainer: what training waits for, and what is done beside it.

    python benchmarks/trainer_checkpoint.py --shape 0.1B --out results/trainer-checkpoint-2cpu.json

One train worker of Ray Train takes steps on made-up samples. Turns of `--steps` steps follow each
other, round after round:

    none        no checkpoint
    beside      one after the first step, as runs write them: on a GPU by another process
    threads     the same, by threads of the train worker, as runs do on a CPU
    waited      the same, waited for, as `TrainingSession.save` does

The step after that waits for the copy of the state, and the others may be slowed down by what is
written meanwhile: what a checkpoint costs is what holds the loop up, and what its turn's other
steps take longer than those of `none`. The first turn of each kind is timed apart: it takes memory
that this process never had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from gpu_models import make_model
from gpu_trainer import make_samples
from host import describe_call, package_versions, ray_environment
from ray.train.torch import TorchTrainer

KINDS = ("none", "beside", "threads", "waited")
GROUP_SIZE = 8


class Noting:
    """Rank 0's line to a rollout side without samples; notes when checkpoints are durable."""

    def __init__(self) -> None:
        self.durable_s: list[float] = []

    def capture(self) -> Any:
        """A rollout side of nothing."""
        from ray_apr.data.resumption import Counters, RolloutProgress
        from ray_apr.data.saved_samples import samples_table

        progress = RolloutProgress(
            seed=0, num_prompts=1, position=0, pending=(), counters=Counters()
        )
        return lambda: (progress, samples_table([]))

    def checkpoint_written(self, step: int, taken_at: float, oldest_epoch: int | None) -> None:
        """Note how long it took."""
        self.durable_s.append(time.time() - taken_at)


class Trainer:
    """One train worker with its checkpoints.

    Args:
        settings: Those of the command line, and the model's folder.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from ray_apr.config import TrainConfig
        from ray_apr.scheduling.batch import build_rank_batches
        from ray_apr.train.fsdp import build_model, build_optimizer
        from ray_apr.train.saving import CheckpointWriter

        torch.set_num_threads(settings["threads"])
        tokens, samples = settings["tokens"], settings["samples"]
        at_a_time = min(tokens, settings["micro_batch_tokens"])
        self._config = TrainConfig(batch_size=samples, micro_batch_tokens=at_a_time)
        device = ray.train.torch.get_device()
        self.model = build_model(settings["model"], self._config, device)
        self.optimizer = build_optimizer(self.model, self._config)
        (self._batch,) = build_rank_batches(
            make_samples(tokens, samples, self.model.config.vocab_size),
            step=0, policy_version=1, oldest_version=0, num_ranks=1, micro_batch_tokens=at_a_time,
            mini_batches=1, packed=self._config.packs(device.type),
        )  # fmt: skip
        self._control: Any = Noting()
        self.writer = CheckpointWriter(
            self.model, self.optimizer, self._control, source=settings["model"]
        )
        self._scribe = self.writer._scribe
        self._number = 0

    def take_step(self) -> float:
        """Train a step; returns the seconds."""
        from ray_apr.config import AlgorithmConfig
        from ray_apr.train.step import train_step

        began = time.perf_counter()
        train_step(self.model, self.optimizer, self._batch, AlgorithmConfig(), self._config)
        self._number += 1
        return time.perf_counter() - began

    def save(self, kind: str) -> float:
        """Take a checkpoint; returns the seconds."""
        from ray_apr.train.checkpoint import Progress

        began = time.perf_counter()
        name = f"named_{self._number}" if kind == "waited" else None
        self.writer._scribe = None if kind == "threads" else self._scribe
        self.writer.save({}, Progress(step=self._number, policy_version=self._number), name=name)
        return time.perf_counter() - began

    def take_turn(self, kind: str, num_steps: int) -> dict[str, Any]:
        """Take so many steps, with a checkpoint of a kind after the first one."""
        self._control.durable_s = []
        steps, saves = [self.take_step()], []
        if kind != "none":
            saves.append(self.save(kind))
        steps += [self.take_step() for _ in range(num_steps - 1)]
        self.writer.wait()
        durable_s = list(self._control.durable_s)
        return {"kind": kind, "step_s": steps, "save_s": saves, "durable_s": durable_s}


def train(settings: dict[str, Any]) -> None:
    """Take all turns; runs in the train worker."""
    from ray_apr.core.heap import freeze_heap
    from ray_apr.train.checkpoint import Progress, take_snapshot

    trainer = Trainer(settings)
    freeze_heap()  # as a train worker does
    trainer.take_step()
    progress = Progress(step=0, policy_version=0)
    state = take_snapshot(trainer.model, trainer.optimizer, progress).state()
    turns = [
        trainer.take_turn(kind, settings["steps"])
        for _ in range(1 + settings["rounds"])
        for kind in KINDS
    ]
    trainer.writer.close()
    result = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "state_bytes": _bytes_of(state),
        "turns": turns,
    }
    Path(settings["result"]).write_text(json.dumps(result))


def _bytes_of(state: Any, seen: set[int] | None = None) -> int:
    """Bytes of a state's tensors; those of tied weights once."""
    import torch

    from ray_apr.train.tensors import local_tensor

    seen = set() if seen is None else seen
    if isinstance(state, torch.Tensor):
        shard = local_tensor(state)
        is_new = shard.data_ptr() not in seen
        seen.add(shard.data_ptr())
        return is_new * shard.nbytes
    values = state.values() if isinstance(state, dict) else state
    return sum(_bytes_of(v, seen) for v in values if isinstance(v, dict | list | torch.Tensor))


def main() -> None:
    """Measure, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="0.1B")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, prompts included")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=GROUP_SIZE)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="beside the first one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="the train worker has one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ray.init(runtime_env=ray_environment(), num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args.shape, Path(folder) / "model", context=4096, dtype="float32")
        result = Path(folder) / "result.json"
        settings = {**vars(args), "model": str(model), "result": str(result)}
        settings.pop("out")
        TorchTrainer(
            train,
            train_loop_config=settings,
            scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=args.gpu),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=folder,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
        measured = json.loads(result.read_text())
    found = {
        **describe_call(),
        "versions": package_versions(),
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        **measured,
        "medians": summary(measured),
    }
    print(json.dumps(found["medians"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians of all turns but the first ones, and what follows from them."""

    def turns(kind: str) -> list[dict[str, Any]]:
        return [turn for turn in measured["turns"] if turn["kind"] == kind]

    without = turns("none")[1:]
    step_s = statistics.median(s for turn in without for s in turn["step_s"])
    others_s = statistics.mean(sum(turn["step_s"][1:]) for turn in without)

    def cost_s(turn: dict[str, Any]) -> float:
        return float(turn["save_s"][0] + sum(turn["step_s"][1:]) - others_s)

    def of_kind(kind: str) -> dict[str, float]:
        first, *later = turns(kind)
        return {
            "in_the_way_s": statistics.median(turn["save_s"][0] for turn in later),
            "next_step_s": statistics.median(turn["step_s"][1] for turn in later),
            "cost_s": statistics.median(map(cost_s, later)),
            "cost_of_the_first_s": cost_s(first),
            "until_durable_s": statistics.median(turn["durable_s"][0] for turn in later),
        }

    return {"step_s": step_s, **{kind: of_kind(kind) for kind in KINDS if kind != "none"}}


if __name__ == "__main__":
    main()
