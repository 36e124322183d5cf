"""The trainer's side of the check after a weight sync (train/weight_check.py)."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from ray_apr.config import LoRAConfig, TrainConfig
from ray_apr.core.exceptions import RolloutError, WeightMismatchError, WeightSyncError
from ray_apr.core.messages import WeightScores
from ray_apr.train.fsdp import build_model
from ray_apr.train.publish import WeightPublisher
from ray_apr.train.weight_check import WeightCheck
from tests.tiny_model import make_tiny_model
from tests.train_batches import process_group, start_ranks
from tests.vllm.engines import hf_logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Control:
    """Engines that say what `scores` holds for each version, once its weights were sent."""

    sync_limit_s = retry_limit_s = 10.0

    def __init__(self, scores) -> None:
        self.scores = scores
        self.expected: list[int] = []
        self.num_broadcasts = 0
        self.is_whole = True
        self.may_send = threading.Event()
        self.may_send.set()
        self.members = frozenset({"engine-0"})

    def is_group_whole(self) -> bool:
        return self.is_whole

    def connect(self, sender, *, timeout_s) -> None:
        pass

    def expect_scores(self, policy_version, sequences) -> None:
        self.expected.append(policy_version)

    def broadcast(self, sender, policy_version):
        assert self.may_send.wait(10)
        self.num_broadcasts += 1
        self.version = policy_version
        return {"stopped_s": 0.0}

    def weight_scores(self):
        return [
            WeightScores(
                replica_id=replica,
                policy_version=self.version,
                dtype="float32",
                logprobs=logprobs,
                duration_s=0.5,
            )
            for replica, logprobs in self.scores[self.version].items()
        ]

    def probe_weights(self, replica_id, token_ids):
        return {}

    def record_span(self, *_, **__) -> None:
        pass


class Sender:
    def gather(self) -> None:
        pass

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def plain_scores(model, sequences):
    return [hf_logprobs(model, sequence[:1], sequence[1:]) for sequence in sequences]


def step(model, size=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def make(folder, *, overlaps=False, **train):
    config = TrainConfig(**{"weight_check_every": 1, **train})
    model = build_model(str(folder), config, torch.device("cpu"))
    check = WeightCheck(model, config)
    control = Control({})
    publisher = WeightPublisher(
        Sender(),
        control,
        sync_every=1,
        overlaps=overlaps,
        timeout_s=5.0,
        wait_limit_s=5.0,
        check=check,
    )
    return model, check, control, publisher


def test_a_replica_without_scores_is_named_and_ends_the_run_after_ten_checks(
    folder, tmp_path, caplog
):
    """known fault: an engine that was never checked passed."""
    with process_group(tmp_path):
        model, check, control, publisher = make(folder)
        control.members = frozenset({"engine-0", "engine-1"})
        ours = plain_scores(model, check.sequences)
        control.scores = {version: {"engine-0": ours} for version in range(30)}
        control.scores[4]["engine-1"] = ours
        for version in range(1, 14):
            publisher.after_step(version, version, is_last=False)
            told = f"not checked at version {version}: engine-1"
            assert (told in caplog.text) == (version != 4)
        with pytest.raises(WeightSyncError, match=r"10 checks in a row.*engine-1"):
            publisher.after_step(14, 14, is_last=False)


def test_replicas_that_do_not_answer_are_not_checked_and_the_run_goes_on(
    folder, tmp_path, monkeypatch, caplog
):
    def silent():
        raise RolloutError("weight_scores: no answer within the time limit")

    with process_group(tmp_path):
        _, _, control, publisher = make(folder)
        monkeypatch.setattr(control, "weight_scores", silent)
        assert "weight_check_gap" not in publisher.after_step(1, 1, is_last=False)
        assert "not checked at version 1: engine-0" in caplog.text


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_engines_that_score_like_the_model_pass(folder, tmp_path, packing):
    with process_group(tmp_path):
        model, check, control, publisher = make(folder, packing=packing)
        for version in (1, 2):
            step(model)
            ours = plain_scores(model, check.sequences)
            near = [[p + 1e-6 for p in ps] for ps in ours]
            control.scores[version] = {"engine-0": ours, "engine-1": near}
            figures = publisher.after_step(version, version, is_last=False)
            assert 1e-6 < figures["weight_check_gap"] < 1e-4
            assert 0 <= figures["weight_check_k3"] < 1e-8
            assert 0.5 < figures["weight_check_s"] < 5


def test_every_nth_sync_is_checked_from_the_first_on(folder, tmp_path):
    with process_group(tmp_path):
        model, check, control, publisher = make(folder, weight_check_every=3)
        for version in range(1, 8):
            step(model)
            control.scores[version] = {"engine-0": plain_scores(model, check.sequences)}
            figures = publisher.after_step(version, version, is_last=False)
            assert ("weight_check_gap" in figures) == (version in (1, 4, 7))
        assert control.expected == [1, 4, 7]


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_as_many_syncs_are_checked_as_take_one_percent_of_the_time(folder, tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("ray_apr.train.weight_check.time", clock)
    with process_group(tmp_path):
        model, check, control, publisher = make(folder, weight_check_every="auto")
        for version in range(1, 31):
            clock.now += 20.0
            control.scores[version] = {"engine-0": plain_scores(model, check.sequences)}
            figures = publisher.after_step(version, version, is_last=False)
            assert figures.get("weight_check_s", 0.5) < 0.7, "an engine's 0.5 s, and the trainer's"
        assert control.expected[:2] == [1, 2]
        waits = [b - a for a, b in itertools.pairwise(control.expected[1:])]
        assert set(waits) <= {3, 4} and len(waits) >= 7, "0.5 to 0.7 s in 60 to 80 s"


def test_rank_0_says_which_syncs_are_checked(folder, tmp_path):
    start_ranks(_record_when_due, 2, tmp_path, folder)
    recorded = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert recorded[0] == recorded[1] == [True, True, False, True]


def _record_when_due(rank, world_size, path, folder):
    with process_group(path, rank=rank, world_size=world_size):
        _, check, _, _ = make(folder, weight_check_every="auto")
        recorded = []
        for number in range(4):
            check._cost_s = 0.0 if (number == 3) == (rank == 0) else 1e9
            check.record(number)
            recorded.append(check._record is not None)
        torch.save(recorded, path / f"{rank}.pt")


def test_an_overlapped_sync_is_compared_with_the_model_that_was_gathered(folder, tmp_path):
    with process_group(tmp_path):
        model, check, control, publisher = make(folder, overlaps=True)
        control.may_send.clear()
        control.scores[1] = {"engine-0": plain_scores(model, check.sequences)}
        publisher.after_step(1, 1, is_last=False)
        step(model)  # while the weights travel
        control.may_send.set()
        figures = publisher.after_step(2, 2, is_last=True)
        assert figures["weight_check_gap"] < 1e-4


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_mismatch_ends_the_run_and_is_not_tried_again(folder, tmp_path, overlaps):
    with process_group(tmp_path):
        model, check, control, publisher = make(folder, overlaps=overlaps)
        control.is_whole = False  # which lets other errors of a sync be tried again
        ours = plain_scores(model, check.sequences)
        step(model)
        control.scores[1] = {
            "engine-0": plain_scores(model, check.sequences),
            "engine-1": ours,
        }
        message = (
            r"engine-1 does not compute like the trainer at version 1: log-probs of 252 tokens"
        )
        with pytest.raises(WeightMismatchError, match=message):
            publisher.after_step(1, 1, is_last=False)
            publisher.close()
        assert control.num_broadcasts == 1


def test_a_replica_without_the_weights_is_not_compared(folder, tmp_path, caplog):
    with process_group(tmp_path):
        _, _, control, publisher = make(folder)
        control.scores[1] = {}
        figures = publisher.after_step(1, 1, is_last=False)
        assert "weight_check_gap" not in figures
        assert "not checked at version 1: engine-0" in caplog.text


def test_the_tolerance_is_obeyed(folder, tmp_path):
    with process_group(tmp_path):
        model, check, control, publisher = make(folder, weight_check_tolerance=1e9)
        control.scores[1] = {"engine-0": plain_scores(model, check.sequences)}
        step(model)
        assert publisher.after_step(1, 1, is_last=False)["weight_check_gap"] > 0.1


def test_a_module_that_cannot_be_probed_costs_no_more_than_its_name(folder, tmp_path, caplog):
    with process_group(tmp_path):
        model, check, _, _ = make(folder)
        down = model.model.layers[0].mlp.down_proj
        down.register_forward_pre_hook(_only_whole_sequences)
        check.record(1)
        probes = check._record.outputs
        assert "model.layers.0.mlp.down_proj" not in probes and len(probes) == 24
        assert "model.layers.0.mlp.down_proj is not localised" in caplog.text


def _only_whole_sequences(module, args):
    if len(args[0]) == 1:
        raise RuntimeError("a module of its own kind")


def test_adapters_belong_to_the_layer_that_they_adapt(folder, tmp_path):
    with process_group(tmp_path):
        plain, _, _, _ = make(folder)
        model, check, _, _ = make(folder, lora=LoRAConfig(rank=2))
        other = WeightCheck(plain, TrainConfig())
        for recorded in (check, other):
            recorded.record(0)
        ours, theirs = check._record.outputs, other._record.outputs
        assert ours.keys() == theirs.keys()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.lora_B["default"].weight.add_(0.1)
        check.record(1)
        name = "model.layers.0.mlp.up_proj"
        assert [n for n in ours if not torch.equal(ours[n], check._record.outputs[n])] == [name]


def test_shards_are_scored_and_probed_as_a_whole(folder, tmp_path):
    start_ranks(_record_on_shards, 2, tmp_path, folder)
    (tmp_path / "alone").mkdir()
    with process_group(tmp_path / "alone"):
        _, check, _, _ = make(folder)
        check.record(0)
    for rank in range(2):
        logprobs, outputs = torch.load(tmp_path / f"{rank}.pt")
        assert torch.allclose(torch.tensor(check._record.logprobs), logprobs, atol=1e-5)
        assert outputs.keys() == check._record.outputs.keys()
        for name, rows in outputs.items():
            assert torch.allclose(rows, check._record.outputs[name], rtol=1e-4, atol=1e-4), name


def _record_on_shards(rank, world_size, path, folder):
    with process_group(path, rank=rank, world_size=world_size):
        _, check, _, _ = make(folder)
        check.record(0)
        record = check._record
        torch.save((torch.tensor(record.logprobs), dict(record.outputs)), path / f"{rank}.pt")
