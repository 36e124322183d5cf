"""How far apart trainer and engine may be, and what is said when they are (weights/check.py)."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayError

from ray_apr.config import RolloutConfig, TrainConfig
from ray_apr.core.exceptions import ConfigError, RolloutError, WeightMismatchError, WeightSyncError
from ray_apr.serve import client as client_module
from ray_apr.serve.server import RolloutServer
from ray_apr.serve.vllm import scores as scores_module
from ray_apr.serve.vllm.scores import WeightScorer
from ray_apr.train import control as control_module
from ray_apr.weights.check import (
    Limits,
    canary_sequences,
    compare,
    follows,
    worst_modules,
)
from ray_apr.weights.sync import WeightSync
from tests.fakes import FixedPart, ScriptedEngine

FLOATS = ("float32", "float32")


def noisy(logprobs, size, seed):
    rng = random.Random(seed)
    return [[p + rng.gauss(0, size) for p in ps] for ps in logprobs]


OURS = [[-1.0 - (i % 7) for i in range(63)] for _ in range(4)]


def test_sequences_are_fixed_and_leave_out_both_ends_of_the_vocabulary():
    sequences = canary_sequences(1000, 4096)
    assert sequences == canary_sequences(1000, 4096)
    assert [len(s) for s in sequences] == [64] * 4 and len(set(sequences)) == 4
    assert min(map(min, sequences)) >= 125 and max(map(max, sequences)) < 875
    assert {len(s) for s in canary_sequences(17, 16)} == {16}, "a model of short contexts"


def test_k3_and_gap_are_those_of_the_differences():
    found = compare([[-1.0, -2.0]], [[-1.5, -2.0]])
    assert found.gap == 0.5 and found.num_tokens == 2
    assert found.k3 == pytest.approx((math.exp(0.5) - 1.5) / 2)


def test_an_engine_may_cut_the_sequences():
    assert compare([[-1.0, -2.0, -3.0]], [[-1.0, -2.0]]).num_tokens == 2


@pytest.mark.parametrize(
    "theirs", [[[-1.0, -2.0]], [[-1.0, -2.0], [-1.0]], [[-1.0, -2.0, -3.0]] * 2, [[-1.0, -2.0]] * 3]
)
def test_missing_or_short_sequences_do_not_pass(theirs):
    """known fault: what was missing was not compared."""
    found = compare([[-1.0, -2.0]] * 2, theirs)
    assert math.isnan(found.gap) and not found.is_within(Limits(gap=1.0, k3=1.0))


@pytest.mark.parametrize("theirs", [[[-1.0, math.nan]], [[-1.0, -math.inf]], [[]], []])
def test_no_answer_and_no_number_are_never_within_limits(theirs):
    limits = Limits(gap=math.inf, k3=math.inf)
    assert not compare([[-1.0, -2.0]], theirs).is_within(limits)


def test_huge_differences_do_not_overflow():
    assert compare([[0.0]], [[-5000.0]]).k3 > 1e20


def test_limits_follow_the_coarser_type_the_depth_and_the_setting():
    def gap(*dtypes, num_layers=8, tolerance=1.0, ours=OURS):
        return Limits.of(dtypes, num_layers=num_layers, ours=ours, tolerance=tolerance).gap

    assert gap("float32", "float32") < gap("float32", "bfloat16") == gap("bfloat16", "bfloat16")
    assert gap(*FLOATS, num_layers=35) == pytest.approx(2 * gap(*FLOATS))
    assert gap(*FLOATS, tolerance=3.0) == pytest.approx(3 * gap(*FLOATS))
    assert gap(*FLOATS, ours=[[-0.01]]) < gap(*FLOATS)


@pytest.mark.parametrize("size", [0, 5e-4])
def test_an_engine_follows_the_trainer_or_has_stale_weights(size):
    """Rounding of 3e-3 hides a step of 5e-3 from any limit; that the engine stood still tells."""
    rounding, step = 3e-3, 5e-3
    theirs_before = noisy(OURS, rounding, 0)
    ours = noisy(OURS, step, 1)
    followed = noisy(noisy(ours, 0, 0), rounding, 2)
    assert follows(ours, followed, OURS, theirs_before)
    stale = noisy(theirs_before, size, 3)
    assert not follows(ours, stale, OURS, theirs_before)


def test_a_single_token_that_stands_out_decides_nothing():
    """Rounding of an unlikely token may be larger than all else, and undo its step."""
    ours_before = [[-1.0] * 62 + [-20.0]]
    theirs_before = [[p + 1e-3 for p in ours_before[0]]]
    ours = [[p + 2e-3 for p in ours_before[0][:-1]] + [-19.5]]
    theirs = [[p + 1e-3 for p in ours[0][:-1]] + [theirs_before[0][-1]]]
    assert follows(ours, theirs, ours_before, theirs_before)


def test_a_step_below_rounding_may_not_move_the_engine():
    theirs = noisy(OURS, 3e-3, 0)
    assert follows(noisy(OURS, 1e-3, 1), theirs, OURS, theirs)


@pytest.mark.parametrize("step", [4e-3, 1e-1])
def test_no_false_alarm_of_an_engine_that_follows_in_many_syncs(step):
    ours, theirs = OURS, noisy(OURS, 3e-3, -1)
    for seed in range(300):
        moved = noisy(ours, step, f"step {seed}")
        theirs_moved = noisy(moved, 3e-3, f"round {seed}")
        assert follows(moved, theirs_moved, ours, theirs)
        ours, theirs = moved, theirs_moved


PROBES = {
    "model.embed_tokens": [[1.0, 2.0]],
    "model.layers.0.self_attn.q_proj": [[3.0, 4.0]],
    "model.layers.1.self_attn.q_proj": [[3.0, 4.0]],
    "model.layers.1.mlp.down_proj": [[6.0, 8.0]],
    "model.layers.1.mlp.experts": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
    "model.norm": [[1.0, 1.0]],
    "lm_head": [[1.0, 2.0]],
}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model.embed_tokens": [[2.0, 4.0]]}, "embedding (by 50 %)"),
        ({"lm_head": [[1.0, 2.5]]}, "head (by 18.6 %)"),
        ({"model.norm": [[1.1, 1.1]]}, "norm (by 9.09 %)"),
        (
            {
                "model.layers.1.mlp.down_proj": [[3.0, 4.0]],
                "model.layers.1.self_attn.q_proj": [[0.0, 0.0]],
                "lm_head": [[1.0, 2.5]],
            },
            "layer 1 (q_proj by 100 %, down_proj by 50 %), head (by 18.6 %)",
        ),
        (
            {"model.layers.1.mlp.experts": [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]},
            "experts of layer 1 (expert 1 by 141 %, expert 0 by 141 %)",
        ),
        ({"model.norm": [[math.nan, 1.0]]}, "norm (by nan %)"),
        ({}, "not localised: 7 modules compute alike"),
    ],
)
def test_the_worst_groups_are_named(changed, says):
    assert worst_modules(PROBES, {**PROBES, **changed}, FLOATS) == says


def test_what_cannot_be_compared_is_said():
    assert worst_modules(PROBES, {}, FLOATS) == (
        "not localised: 0 modules compute alike; 7 not compared"
    )


def test_modules_with_other_paths_are_found_by_layer_and_name():
    moved = {name.replace("mlp", "block_sparse_moe"): rows for name, rows in PROBES.items()}
    moved["model.layers.1.block_sparse_moe.down_proj"] = [[0.0, 0.0]]
    assert worst_modules(PROBES, moved, FLOATS) == "layer 1 (down_proj by 100 %)"


def test_rounding_of_bfloat16_is_not_named():
    rounded = {"lm_head": [[1.01, 2.02]]}
    assert "not localised" in worst_modules(PROBES, rounded, ("float32", "bfloat16"))
    assert "head" in worst_modules(PROBES, rounded, FLOATS)


def test_the_error_is_of_its_own_kind_and_travels():
    error = pickle.loads(pickle.dumps(WeightMismatchError("engine-0 does not compute")))
    assert isinstance(error, WeightSyncError) and str(error) == "engine-0 does not compute"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_check_every", -1),
        ("weight_check_every", 1.5),
        ("weight_check_every", "always"),
        ("weight_check_tolerance", 0),
        ("weight_check_tolerance", math.nan),
    ],
)
def test_settings_that_mean_nothing_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        TrainConfig(**{field: value})


def test_a_tolerance_of_no_check_is_refused():
    """known fault: it was accepted, and nothing was compared."""
    with pytest.raises(ConfigError, match=r"train\.weight_check_tolerance = 4\.0: .*every = 0"):
        TrainConfig(weight_check_every=0, weight_check_tolerance=4.0)
    TrainConfig(weight_check_every=0)


@pytest.mark.parametrize("holds_device", [False, True])
async def test_engines_score_once_they_have_the_weights_and_go_on(holds_device):
    """Those that share the trainer's device have no KV cache before they go on."""
    engine = ScriptedEngine(num_replicas=2)
    sync = WeightSync(engine, pause_mode="abort", timeout_s=5.0)
    sequences = canary_sequences(100, 8)
    await engine.expect_scores(3, sequences)
    await sync.begin(3, holds_device=holds_device)
    await sync.wait_until_received()
    if holds_device:
        assert await engine.weight_scores() == [] and engine.is_paused
    await sync.finish()
    scores = await engine.weight_scores()
    assert [s.replica_id for s in scores] == ["engine-0", "engine-1"]
    assert {s.policy_version for s in scores} == {3}
    assert [len(ps) for ps in scores[0].logprobs] == [7] * 4


# -- the way to the engines ------------------------------------------------------------------------


@pytest.fixture
def servers(monkeypatch):
    """(client, engines): two servers and one that has died."""

    class Engine:
        def __init__(self, replica_id):
            self.replica_id, self.scorer = replica_id, WeightScorer(replica_id)
            self.expect_scores = self.scorer.expect

        @property
        def scores(self):
            return self.scorer.result

        async def probe_weights(self, token_ids):
            return {"lm_head": [[float(len(token_ids))]]}

    engines = [Engine(replica_id) for replica_id in "ba"]
    deployed = []
    for engine in engines:
        server = RolloutServer.__new__(RolloutServer)
        server._engine = engine
        engine.shutdown = lambda: None
        deployed.append(server)

    def handle(name, app_name):
        """Of one of them; the last engine is dead."""

        def broadcast(verb, *args):
            async def results_async(*, timeout_s):
                if name == "engine-2":
                    raise ActorDiedError()
                return [await getattr(deployed[int(name[-1])], verb)(*args)]

            return SimpleNamespace(results_async=results_async)

        return SimpleNamespace(broadcast=broadcast)

    monkeypatch.setattr("ray_apr.serve.handle.serve.get_deployment_handle", handle)
    return client_module.ServeRolloutClient("app", RolloutConfig(num_replicas=3)), engines


async def test_each_replica_scores_a_version_once_and_only_that_one(servers, monkeypatch):
    client, engines = servers
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=5, dtype="torch.bfloat16"))
    asked: list[tuple] = []

    async def logprobs(llm, request_id, sequence, priority):
        asked.append((request_id, len(sequence), priority))
        return (-1.0,) * (len(sequence) - 1)

    monkeypatch.setattr(scores_module, "_logprobs", logprobs)
    await client.expect_scores(7, [[1] * 8, [2] * 8])
    for engine in engines:
        await engine.scorer.score(llm, 6, has_priorities=False)
    assert await client.weight_scores() == [] and not asked
    for _ in range(2):
        await engines[0].scorer.score(llm, 7, has_priorities=True)
    (scores,) = await client.weight_scores()
    assert (scores.replica_id, scores.policy_version, scores.dtype) == ("b", 7, "bfloat16")
    assert scores.logprobs == ((-1.0,) * 3,) * 2, "cut to what the engine takes"
    assert asked == [(f"weight-check-7-{i}", 4, {"priority": -2}) for i in range(2)]
    await engines[1].scorer.score(llm, 7, has_priorities=False)
    assert [s.replica_id for s in await client.weight_scores()] == ["a", "b"]
    await client.expect_scores(8, [[1] * 8])
    assert await client.weight_scores() == [], "those of before are no answer"


async def test_an_engine_that_has_no_place_for_the_sequences_goes_on(monkeypatch, caplog):
    """known fault: frozen calls kept their places, the sync broke off, and the run ended."""
    aborted: list[str] = []

    async def abort(ids):
        aborted.extend(ids)

    async def never(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(scores_module, "_logprobs", never)
    monkeypatch.setattr(scores_module, "SCORE_LIMIT_S", 0.01)
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64), abort=abort)
    scorer = WeightScorer("a")
    scorer.expect(1, [[1, 2]])
    await scorer.score(llm, 1, has_priorities=False)
    assert aborted == ["weight-check-1-0"] and scorer.result is None
    assert "a did not score version 1" in caplog.text
    monkeypatch.setattr(scores_module, "SCORE_LIMIT_S", 60.0)
    aborted.clear()
    scorer.expect(2, [[1, 2]])
    cancelled = asyncio.create_task(scorer.score(llm, 2, has_priorities=False))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert aborted == ["weight-check-2-0"], "a caller that gives up leaves nothing in the engine"


async def test_what_vllm_refuses_to_score_is_an_error_of_ours(monkeypatch):
    """known fault: vLLM's own error left the server, and no class of ours told what to do."""

    async def refuse(*_):
        raise ValueError("prompt_logprobs is not supported")

    async def abort(ids):
        pass

    monkeypatch.setattr(scores_module, "_logprobs", refuse)
    config = SimpleNamespace(max_model_len=64)
    llm = SimpleNamespace(model_config=config, abort=abort, errored=False)
    scorer = WeightScorer("a")
    scorer.expect(1, [[1, 2]])
    with pytest.raises(RolloutError, match="a cannot score version 1: prompt_logprobs"):
        await scorer.score(llm, 1, has_priorities=False)
    llm.errored = True
    scorer.expect(1, [[1, 2]])
    with pytest.raises(ValueError, match="prompt_logprobs"):
        await scorer.score(llm, 1, has_priorities=False)


async def test_one_replica_alone_is_probed(servers):
    client, _ = servers
    assert await client.probe_weights("a", [1, 2, 3]) == {"lm_head": [[3.0]]}
    assert await client.probe_weights("gone", [1]) == {}


def test_rank_0_asks_through_the_rollout_worker(monkeypatch):
    class Worker:
        def __getattr__(self, verb):
            return SimpleNamespace(remote=lambda *args: (verb, *args))

    monkeypatch.setattr(control_module.ray, "get", lambda ref, timeout: ref)
    control = control_module.RunControl(
        buffer=None, worker=FixedPart(Worker()), recorder=None, sync_timeout_s=5.0
    )
    control.expect_scores(3, [[1, 2]])
    assert control.weight_scores() == ("weight_scores",)
    assert control.probe_weights("a", [1]) == ("probe_weights", "a", [1])

    def dead(ref, timeout):
        raise RayError("it is dead")

    monkeypatch.setattr(control_module.ray, "get", dead)
    assert control.probe_weights("a", [1]) == {}, "the mismatch is told without it"
