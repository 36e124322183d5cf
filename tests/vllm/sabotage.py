"""What a test does to the model inside of vLLM's worker process."""

from __future__ import annotations

from typing import Any

from ray_apr.serve.vllm.probe import WeightProbe

EXTENSION = "tests.vllm.sabotage.Sabotage"


class Sabotage(WeightProbe):
    """`WeightProbe`, and a head that can be kept as it is."""

    kept_head: Any

    def keep_head(self) -> None:
        """Remember how the head computes now."""
        self.kept_head = self.model_runner.get_model().lm_head.cpu_linear

    def restore_head(self) -> None:
        """Let it compute like that again, with the weights that were packed then."""
        self.model_runner.get_model().lm_head.cpu_linear = self.kept_head
