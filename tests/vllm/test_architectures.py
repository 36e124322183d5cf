"""Other architectures than the main job's, through the whole path of weights.

`make architectures` tries all of them.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import WeightSyncError
from ray_apr.train.checkpoint import export_hf
from ray_apr.train.fsdp import build_model
from ray_apr.train.logprobs import micro_batches, response_logprobs
from tests.fakes import generate_request
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group
from tests.vllm.engines import (
    FREE,
    PROMPT,
    Trainer,
    hf_logprobs,
    ids_of,
    largest_gap,
    logprobs_of,
    make_engine,
    running,
    versions_of,
)
from tests.vllm.families_run import run_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["tied with biases", "untied without biases"])
def folder(request, tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        architecture="llama",
        tie=request.param.startswith("tied"),
        bias="with biases" in request.param,
    )


def test_after_each_sync_a_llama_in_the_engine_equals_the_trainer_s(folder, monkeypatch):
    trainer = Trainer(folder)
    parameters = dict(trainer.model.named_parameters())
    del parameters["model.norm.weight"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "named_parameters", lambda **_: iter(parameters.items()))
        forgetful = Trainer(folder, trainer.model)

    async def body():
        async with running(make_engine(folder)) as engine:
            await trainer.join(engine)
            for version in (1, 2):
                trainer.change()
                await trainer.sync(engine, version)
                generation = await engine.generate(
                    generate_request(
                        request_id=f"r{version}",
                        token_ids=PROMPT * 30,
                        sampling=FREE,
                        max_tokens=32,
                        session_id="",
                    )
                )
                assert set(versions_of(generation)) == {version}
                expected = hf_logprobs(trainer.model, PROMPT * 30, ids_of(generation))
                assert largest_gap(logprobs_of(generation), expected) < 1e-4
            await forgetful.join(engine)
            with pytest.raises(WeightSyncError, match=r"1 parameters got no .*model\.norm\.weight"):
                await forgetful.sync(engine, 3)

    asyncio.run(body())


@pytest.mark.long
@pytest.mark.parametrize("family", ["Mixtral", "OLMo-2"])
def test_after_each_sync_and_export_a_family_in_the_engine_equals_the_trainer_s(tmp_path, family):
    """Mixtral: experts, and other names and shapes in memory than in the checkpoint. OLMo-2: vLLM
    runs the code of Transformers."""
    gaps = run_family(family, tmp_path)
    assert max(gaps.before, gaps.sync_1, gaps.sync_2, gaps.exported) <= 1e-4
    assert gaps.moved > 0.1, "a sync that was missed would be seen"


def test_a_llama_trains_and_exports_what_transformers_loads(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    with process_group(tmp_path):
        model = build_model(str(folder), TrainConfig(), torch.device("cpu"))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        samples = make_samples()
        (row,) = make_batches(samples)
        for part in micro_batches(row, torch.device("cpu")):
            logprobs, _ = response_logprobs(model, part)
            for i, index in enumerate(part.sample_index):
                sample = samples[index]
                expected = hf_logprobs(plain, sample.prompt.token_ids, sample.response_ids)
                assert largest_gap(logprobs[i, : len(expected)].tolist(), expected) < 1e-5
        export_hf(tmp_path / "hf", model, str(folder))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for (name, ours), theirs in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
