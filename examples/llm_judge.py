"""A judge: another model says what a response is worth.

    python examples/llm_judge.py --steps 20

The judge is a deployment of Ray Serve beside the run; what it returns must hold a number. Here it
is the tiny model of the arithmetic example, which cannot follow an instruction: it reads prompt and
response, and tells how probable it finds the response's tokens. A judge that can is told what to
do, and may as well be behind an OpenAI-compatible endpoint:

    llm_judge("Question: {row[question]}\\nAnswer: {response}\\nEnd with `Score: <0 to 10>`.",
              base_url="http://127.0.0.1:8000/v1", model="judge", maximum=10)

A policy learns what pleases its judge. So the right answers are counted beside it, with weight 0.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import ray
from ray import serve
from ray.train import RunConfig, ScalingConfig

import ray_apr
from ray_apr import APRTrainer, RolloutConfig, Sample, TrainConfig
from ray_apr.rewards import llm_judge, weighted_sum

TINY = Path(__file__).parent / "arithmetic" / "base_model"


@serve.deployment(ray_actor_options={"num_cpus": 0.5}, max_ongoing_requests=16)
class Judge:
    """Mean probability of the tokens after ``=``, in [0, 1]."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model)

    def __call__(self, text: str) -> str:
        import torch

        ids_BT = self._tokenizer(text, return_tensors="pt").input_ids
        begin = self._tokenizer(text.partition("=")[0] + "=", return_tensors="pt").input_ids.shape[
            1
        ]
        if ids_BT.shape[1] == begin:
            return "Score: 0"
        with torch.inference_mode():
            probs_BTV = self._model(ids_BT).logits.softmax(-1)
        of_next_BT = probs_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
        return f"Score: {float(of_next_BT[:, begin - 1 :].mean()):.4f}"


def is_right(sample: Sample) -> float:
    """1 for the right sum after the last comma."""
    return float(sample.response_text.rpartition(",")[2] == sample.row["answer"])


def prompts(number: int) -> ray.data.Dataset:
    """Sums of two numbers of two digits."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(number)]
    return ray.data.from_items([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def main() -> None:
    """Start the judge, train, and show whether what it likes is right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    ray_apr.init(num_cpus=5, ignore_reinit_error=True)
    serve.start(http_options={"location": "NoServer"})  # only the run's rewards ask it
    judge = serve.run(Judge.bind(str(TINY)), name="judge", route_prefix=None)
    judged = llm_judge("{row[prompt]}{response}", handle=judge, timeout_s=20)
    trainer = APRTrainer(
        model=str(TINY),
        prompts=prompts(1000),
        reward=weighted_sum({"judged": (1.0, judged), "right": (0.0, is_right)}),
        rollout_config=RolloutConfig(
            group_size=8, max_response_tokens=64, engine={"kwargs": {"max_num_seqs": 64}}
        ),
        train_config=TrainConfig(steps=args.steps, batch_size=64, learning_rate=1e-4),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name="llm-judge", storage_path=str(Path(args.storage).resolve())),
    )
    last = trainer.fit(progress=print).metrics
    serve.delete("judge")
    judged_mean, right_mean = last["reward/judged_mean"], last["reward/right_mean"]
    print(f"last step: the judge gives {judged_mean:.2f}, and {right_mean:.0%} are right")


if __name__ == "__main__":
    main()
