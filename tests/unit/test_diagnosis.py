"""What `ray_apr doctor RUN_DIR` says of made-up runs, whose faults are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ray_apr.cli.main import main
from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.diagnosis import findings
from ray_apr.tools.report.load import RunData
from ray_apr.tools.report.summary import summarize
from ray_apr.tools.room import lacks
from ray_apr.tools.shares import has_batch, shares_of
from ray_apr.tools.simulator import of_run
from ray_apr.tools.simulator.cluster import BatchConfig, ClusterConfig, EngineConfig, TrainerConfig
from ray_apr.tools.simulator.commands import cluster_to_tune
from ray_apr.tools.simulator.measured import trace_of
from ray_apr.tools.simulator.of_run import cluster_of, estimate, fitted, steps_to_simulate
from ray_apr.tools.simulator.study import study
from tests.fakes import step_row

NUM_STEPS = 24
GROUPS, SIZE = 8, 4


def run_of(
    *,
    waits: float = 0.0,
    generates: float = 1.0,
    paused: float = 0.0,
    placement: str = "disaggregated",
    rows: list[dict[str, Any]] | None = None,
    samples: list[dict[str, Any]] | None = None,
    num_steps: int = NUM_STEPS,
    **final: Any,
) -> RunData:
    """A run of steps of 10 s, in each of which the parts do so much of the time."""
    timeline, steps = [], []
    for k in range(num_steps):
        start = 10.0 * k
        spans = [
            (f"engine-{i}", what, *span)
            for i in range(2)
            for what, span in {
                "generate": (0.0, generates),
                "paused": (generates, generates + paused),
            }.items()
        ]
        timeline += [
            {"actor": actor, "what": what, "start_s": start + 10 * begin, "end_s": start + 10 * end}
            for actor, what, begin, end in spans
        ]
        times = {"trainer_wait_s": 10 * waits, "trainer_step_s": 10 * (1 - waits)}
        steps.append(step_row(k, time_s=start + 10.0, **times))
    config = PartialRolloutConfig.preset("apr")
    return RunData(
        path=Path("runs/made-up"),
        config={
            "rollout": {
                "num_replicas": 2, "group_size": SIZE, "reward": {"concurrency": 16},
                "engine": {"placement": placement, "kwargs": {"max_num_seqs": 64}},
            },
            "partial_rollout": {"mode": "apr", "max_staleness": config.max_staleness},
            "train": {"batch_size": GROUPS * SIZE},
            "scaling": {"num_workers": 1},
        },
        steps=[row | change for row, change in zip(steps, rows or [{}] * num_steps, strict=True)],
        samples=samples or [],
        timeline=timeline,
        evaluations=[],
        final={"setup_s": 0.0, "wall_s": 10.0 * num_steps} | final,
    )  # fmt: skip


def said(run: RunData) -> str:
    return "\n".join(f"{found.what} -> {found.remedy}" for found in findings(run, shares_of(run)))


def test_shares_are_those_of_the_spans():
    shares = shares_of(run_of(waits=0.25, generates=0.5, paused=0.125))
    assert (shares.starves, shares.trains) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (shares.generates, shares.paused) == (pytest.approx(0.5), pytest.approx(0.125))
    assert shares.idle == pytest.approx(0.375)


def test_the_sync_after_the_first_steps_counts_and_there_is_none_after_the_last():
    """known fault: as a step's row has the wait for the sync after it, the share left out the first
    one of the time that it is of, and had that of the last step, which has none."""
    synced = [{"trainer_step_s": 5.0, "weight_wait_s": 5.0} for _ in range(5)]
    rows = [*synced, {"trainer_step_s": 5.0, "weight_wait_s": 0.0}]
    shares = shares_of(run_of(num_steps=6, rows=rows))
    assert (shares.seconds, shares.trains, shares.syncs) == (40.0, 0.5, 0.5)


def test_a_trainer_that_waits_for_checkpoints_is_told_to_write_fewer():
    """known fault: with a checkpoint every two steps the trainer waited for them half of the time;
    that share was told nowhere, and more train workers were advised."""
    run = run_of(waits=0.05, generates=0.6)
    saved = [
        {"actor": "trainer", "what": "checkpoint", "start_s": 10.0 * k + 5, "end_s": 10.0 * k + 9}
        for k in range(NUM_STEPS)
    ]
    run = dataclasses.replace(run, timeline=[*run.timeline, *saved])
    assert shares_of(run).saves == pytest.approx(0.4)
    (found,) = findings(run, shares_of(run))
    assert "checkpoints hold the trainer up 40% (88.0 s)" in found.what
    assert found.remedy == "a larger train.checkpoint_every"


def test_engines_that_came_later_were_not_idle_before():
    """known fault: the share of each was of the whole run, so that a run that was given engines was
    told to take some away."""
    run = run_of()
    half_s = 10.0 * NUM_STEPS / 2
    timeline = [
        row for row in run.timeline if row["actor"] != "engine-1" or row["start_s"] >= half_s
    ]
    scaled = dataclasses.replace(
        run, timeline=timeline, scalings=[{"time_s": half_s, "before": 1, "after": 2}]
    )
    assert shares_of(scaled) == shares_of(run) and said(scaled) == ""


def test_an_engine_that_was_replaced_is_one_engine():
    """known fault: the engine that had died counted as idle to the end, and the one that Serve
    started in its place as idle from the begin."""
    run = run_of()
    half_s = 10.0 * NUM_STEPS / 2
    timeline = [
        row | {"actor": "engine-2"} if row["actor"] == "engine-1" and row["start_s"] >= half_s
        else row for row in run.timeline
    ]  # fmt: skip
    replaced = dataclasses.replace(run, timeline=timeline)
    assert shares_of(replaced) == shares_of(run) and said(replaced) == ""
    assert summarize(replaced)["generation_idle_ratio"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("parts", "remedy"),
    [
        ({"waits": 0.5}, "more engines (rollout.num_replicas)"),
        ({"generates": 0.5}, "more train workers (scaling.num_workers)"),
        ({"waits": 0.5, "generates": 0.5}, "the longest responses of a batch"),
        ({"waits": 0.05, "generates": 0.95}, None),
        (
            {"waits": 0.5, "generates": 0.5, "placement": "colocated"},
            "rollout.engine.placement: disaggregated",
        ),
    ],
)
def test_who_waits_says_what_to_change(parts, remedy):
    run = run_of(**parts)
    assert said(run) == "" if remedy is None else remedy in said(run)


def test_each_cause_has_the_share_of_the_wait_that_it_explains():
    """known fault: a trainer that waited 48 % beside engines that generated 83 % was explained by
    the 2 % that they were idle, as the last of all findings."""
    run = run_of(waits=0.48, generates=0.83, paused=0.15, setup_s=200.0)
    found = findings(run, shares_of(run))
    assert [round(finding.share, 2) for finding in found] == [0.31, 0.15, 0.83]
    assert "waits for samples 31% (68.2 s) of the time while the engines are busy" in found[0].what
    assert found[0].remedy.startswith("more engines")
    assert "weight syncs cost 15% (33.0 s) of the time" in found[1].what
    assert "the start took" in found[2].what
    idler = run_of(waits=0.48, generates=0.6, paused=0.15)
    assert [round(f.share, 2) for f in findings(idler, shares_of(idler))] == [0.25, 0.15, 0.08]
    assert "neither side is busy 25%" in findings(idler, shares_of(idler))[0].what


def test_the_trainer_in_a_sync_is_told_as_one():
    run = run_of(rows=[{"weight_wait_s": 2.0}] * NUM_STEPS)
    (found,) = findings(run, shares_of(run))
    assert found.share == pytest.approx(0.2) and "weight syncs cost 20%" in found.what
    assert "partial_rollout.overlap_sync: true" in found.remedy
    assert "a larger partial_rollout.sync_every (at most" in found.remedy
    none = said(with_settings(run, max_staleness=0, overlap_sync=True))
    assert "sync_every" not in none and "overlap_sync" not in none


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"inflight": 2, "unscored": 30}, "30 samples wait for their reward, as a rule ->"),
        (
            {"inflight": 2, "unscored": 30, "reward_s": 1.25},
            "30 samples wait for their reward, as a rule, which takes 1.2 s",
        ),
        # known fault: of a synchronous run with quick rewards these were called the reason
        ({"inflight": 2, "unscored": 30, "reward_s": 0.01}, "the longest responses"),
        ({"inflight": 2, "stepping": 30}, "30 samples wait for their environment"),
        ({"limited_by": "max_staleness is reached"}, "-> a larger partial_rollout.max_staleness"),
        ({"limited_by": "interrupt is reached"}, "-> partial_rollout.after_interrupt: resume"),
        ({"limited_by": "64 samples generate"}, "-> partial_rollout.admission: stream"),
        ({"limited_by": None}, "the longest responses"),
    ],
)
def test_where_both_wait_the_rows_say_for_what(row, text):
    assert text in said(run_of(waits=0.5, generates=0.5, rows=[row] * NUM_STEPS))


def with_settings(run: RunData, section: str = "partial_rollout", **settings: Any) -> RunData:
    changed = run.config.get(section, {}) | settings
    return dataclasses.replace(run, config=run.config | {section: changed})


def test_a_synchronous_run_is_not_advised_the_staleness_that_it_refuses():
    rows = [{"limited_by": "max_staleness is reached"}] * NUM_STEPS
    run = run_of(waits=0.5, generates=0.5, rows=rows)
    assert said(with_settings(run, mode="sync", max_staleness=0)).count("-> mode: apr") == 1


@pytest.mark.parametrize("limit", ["oversampling_factor is reached", None])
def test_no_more_samples_are_advised_than_the_staleness_lets_be(limit):
    """known fault: a synchronous run was told to have a larger oversampling_factor, which its mode
    refuses, and others one beyond `max_staleness + 1`, which is refused as well."""
    run = run_of(waits=0.5, generates=0.5, rows=[{"limited_by": limit}] * NUM_STEPS)
    sync = said(with_settings(run, mode="sync", max_staleness=0, oversampling_factor=1.0))
    assert sync.endswith("-> mode: apr")
    larger = "a larger partial_rollout.max_staleness, and oversampling_factor with it"
    bound = said(with_settings(run, mode="async", max_staleness=1, oversampling_factor=2.0))
    assert larger in bound and "a larger partial_rollout.oversampling_factor" not in bound
    stream = {"max_staleness": 0, "interrupt": "batch_full", "after_interrupt": "restart"}
    for free in ({"max_staleness": 2}, stream):
        text = said(with_settings(run, mode="stream", oversampling_factor=2.0, **free))
        assert larger not in text and "a larger partial_rollout.oversampling_factor" in text


def test_nothing_is_advised_that_is_in_use():
    """known fault: a run with mode: apr was advised mode: apr."""
    row = {"inflight": 2, "unscored": 30}
    tail, unscored = (
        run_of(waits=0.5, generates=0.5, rows=rows) for rows in (None, [row] * NUM_STEPS)
    )
    limited = run_of(
        waits=0.5, generates=0.5, rows=[{"limited_by": "max_live_batches is reached"}] * NUM_STEPS
    )
    for run in (tail, limited):
        assert "mode: apr" not in said(run)
        assert "mode: apr" in said(with_settings(run, mode="sync"))
    assert said(limited).endswith("-> a larger partial_rollout.max_live_batches")
    assert "overlap_rewards: true" in said(unscored)
    assert "overlap_rewards" not in said(with_settings(unscored, overlap_rewards=True))
    turns = run_of(waits=0.5, generates=0.5, placement="colocated")
    assert "disaggregated" in said(turns) and "mode: apr" not in said(turns)
    awake = with_settings(turns, "rollout", engine={"placement": "colocated", "sleep": False})
    assert "take turns" not in said(awake) and "the longest responses" in said(awake)
    syncs = run_of(generates=0.5, paused=0.4, waits=0.3, placement="colocated")
    syncs = with_settings(syncs, "rollout", engine={"placement": "colocated", "sleep": False})
    assert "weight syncs cost" in said(syncs) and "overlap_sync: true" in said(syncs)
    assert "weight_transport" not in said(syncs), "there is one alone"
    trainer = run_of(generates=0.5)
    assert "train.packing: packed" in said(trainer) and "train.compile: true" in said(trainer)
    auto = with_settings(trainer, "train", packing="auto", compile="auto")
    on_gpu = said(with_settings(auto, "scaling", use_gpu=True))
    assert "packing" not in on_gpu and "compile" not in on_gpu, "auto is both of them there"
    assert "train.packing: packed" in said(with_settings(auto, "scaling", use_gpu=False))
    fast = with_settings(trainer, "train", packing="packed", compile=True)
    on_cpu = with_settings(trainer, "scaling", use_gpu=False)
    assert "packing" in said(on_cpu) and "compile" not in said(on_cpu)
    assert "packing" not in said(fast) and "compile" not in said(fast)
    assert "fewer engines" not in said(with_settings(trainer, "rollout", num_replicas=1))
    restarted = run_of(tokens_generated=10, tokens_discarded={"restarted": 5})
    assert "after_interrupt: resume" in said(restarted)
    resumed = said(with_settings(restarted, after_interrupt="resume"))
    assert resumed.endswith("-> nothing: what helps is set already")


def stock(buffered: int, version: int) -> dict[str, int]:
    """Of a row of batches of 64, where the buffer holds so much and the engines have a version."""
    return {"num_samples": 64, "buffered": buffered, "engines_version": version}


@pytest.mark.parametrize(
    ("buffered", "version", "lies_there"),
    [(128, 6, True), (127, 6, False), (64, 7, True), (60, 7, False), (191, 5, False)],
)
def test_a_batch_that_lies_in_the_buffer_is_read_from_the_row(buffered, version, lies_there):
    """Beside that of the step that ends, while the engines have not got its weights."""
    row = step_row(6, **stock(buffered, version))
    assert row["policy_version"] == 7 and has_batch(row) is lies_there
    assert not has_batch(step_row(6)) and not has_batch({"step": 6, "policy_version": 7})


def test_waits_beside_a_whole_batch_are_told_apart():
    """known fault: the hand-over of a batch counted as a lack of samples, and a limit that bound at
    a step's end as its cause."""
    limit = "max_live_batches is reached"
    rows = [stock(128 + k if k % 4 else 70, k) | {"limited_by": limit} for k in range(NUM_STEPS)]
    run = run_of(waits=0.4, generates=0.9, rows=rows)
    shares = shares_of(run)
    starved = sum((k - 1) % 4 == 0 for k in range(2, NUM_STEPS))
    assert shares.starves == pytest.approx(0.4 * starved / (NUM_STEPS - 2))
    assert shares.starves + shares.handed == pytest.approx(0.4)
    first = findings(run, shares)[0]
    assert first.share == pytest.approx(shares.handed) and first.remedy.startswith("no setting")
    assert (
        f"although a whole batch lies in the buffer (at {22 - starved} of 22 steps)" in first.what
    )
    all_there = [stock(192, k) | {"limited_by": limit} for k in range(NUM_STEPS)]
    text = said(run_of(waits=0.4, generates=0.95, rows=all_there))
    assert "waits 40% (88.0 s) of the time although" in text and "max_live_batches" not in text


def test_the_first_filling_is_left_out():
    """known fault: the first wait, for engines that fill, weighed on the shares of a short run."""
    rows = [{"trainer_wait_s": 8.0} if k < 2 else {"trainer_wait_s": 0.0} for k in range(NUM_STEPS)]
    shares = shares_of(run_of(rows=rows))
    assert shares.starves == 0.0 and shares.seconds == pytest.approx(10.0 * (NUM_STEPS - 2))


def test_what_stops_engines_and_what_is_thrown_away_is_told_by_its_share():
    run = run_of(
        waits=0.3,
        generates=0.8,
        paused=0.2,
        tokens_generated=1000,
        tokens_discarded={"stale": 300, "masked": 10, "shutdown": 50},
        setup_s=200.0,
    )
    found = findings(run, shares_of(run))
    assert [round(finding.share, 2) for finding in found] == [0.2, 0.1, 0.3, 0.05, 0.83]
    text = said(run)
    assert "the engines stop 20%" in text
    assert "30% of the generated tokens were discarded: stale" in text
    assert "the start took 200 of 240 s" in text.splitlines()[-1] and "masked" not in text
    assert "5% of the generated tokens were discarded: shutdown -> none" in text


@pytest.mark.parametrize("reason", ["stale", "masked", "surplus"])
def test_no_less_than_one_batch_is_advised_to_be_under_generation(reason):
    """known fault: a run whose oversampling_factor is 1 was told to have a smaller one, which is
    refused."""
    run = run_of(tokens_generated=10, tokens_discarded={reason: 5})
    for factor in (1.0, 2.0):
        told = said(with_settings(run, oversampling_factor=factor))
        assert f"discarded: {reason} -> " in told
        assert ("oversampling_factor" in told) is (factor > 1)


def test_a_failure_that_cost_tokens_is_told_with_its_error():
    run = run_of(tokens_generated=100, tokens_discarded={"failed": 24})
    error = "reward of sample e0-4-5 raised: ValueError: cannot score"
    dropped = [{"group_id": "e0-4", "reason": "failed", "num_generated": 24, "error": error}]
    where = "`error` of its group's row in dropped.jsonl"
    assert said(run).endswith(where)
    assert said(dataclasses.replace(run, dropped=dropped)).endswith(f"{where}; the last: {error}")


def test_samples_that_teach_little_are_told():
    samples = [
        {
            "step": k, "group_id": f"g{k}", "reward": float(k == 0 and i == 0),
            "num_tokens": 10, "finish_reason": "length" if i else "stop",
            "staleness": 0, "num_interruptions": 0,
        }
        for k in range(4)
        for i in range(4)
    ]  # fmt: skip
    run = run_of(samples=samples)
    alike = "in 75% of the trained groups all samples have the same reward"
    assert alike in said(run) and "75% of the trained responses were cut" in said(run)
    assert alike in said(with_settings(run, "algorithm", advantage="rloo"))
    own = said(with_settings(run, "algorithm", advantage="rules:of_each_sample"))
    assert "same reward" not in own, "it was said to be 0"


def test_responses_that_are_cut_are_not_to_be_shorter():
    """known fault: rollout.max_response_tokens was to be smaller and larger."""
    sample = {"step": 0, "group_id": "g", "reward": 1.0, "num_tokens": 10, "staleness": 0}
    sample["num_interruptions"] = 0
    ended, cut = ({**sample, "finish_reason": reason} for reason in ("stop", "length"))
    text = said(run_of(waits=0.5, samples=[ended] * 9 + [cut]))
    assert "a larger rollout.max_response_tokens" in text and "shorter responses" not in text
    text = said(run_of(waits=0.5, samples=[ended] * 10 + [cut]))
    assert "a larger rollout.max_response_tokens" not in text and "shorter responses" in text


def test_a_run_of_few_steps_is_refused_with_what_it_waits_for():
    run = run_of()
    for num_steps, has, end in (
        (5, "5 steps", r"6 of them\. At the end of the last one: 0 of 4 groups wait"),
        (1, "1 step", "6 of them"),
        (0, "0 steps", "6 of them$"),
    ):
        with pytest.raises(
            ConfigError, match=f"has {has}, of which nothing .* said; wait for {end}"
        ):
            shares_of(dataclasses.replace(run, steps=run.steps[:num_steps], final=None))
    ended = dataclasses.replace(run, steps=[], final={"status": "failed"})
    with pytest.raises(ConfigError, match=r"nothing can be said; it takes 6 of them$"):
        shares_of(ended)
    with pytest.raises(ConfigError, match=r"has no timeline\.jsonl"):
        shares_of(dataclasses.replace(run, timeline=[]))


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)], (1.0, 2.0)),
        ([(2.0, 5.0), (2.0, 7.0)], (6.0, 0.0)),
        ([(1.0, 5.0), (2.0, 3.0)], (4.0, 0.0)),
        ([(1.0, 1.0), (3.0, 9.0)], (0.5, 2.25)),
        ([(0.0, 2.0), (0.0, 4.0)], (3.0, 0.0)),
    ],
)
def test_a_line_is_fitted_that_a_machine_can_have(points, line):
    assert fitted(points) == pytest.approx(line)


# -- estimates -------------------------------------------------------------------------------------

ENGINE = EngineConfig(
    decode_base_s=0.02, decode_per_sequence_s=0.001, decode_per_context_token_s=0.0,
    kv_capacity_tokens=1 << 40, max_sequences=64, prefill_tokens_per_s=float(1 << 40),
)  # fmt: skip


def simulated(
    trainer: TrainerConfig, num_steps: int = NUM_STEPS, reward_s: float | None = None
) -> tuple[RunData, ClusterConfig]:
    """A run whose times are those of a simulated one on a known machine, and that machine."""
    samples = [
        {
            "step": k, "group_id": f"g{k}-{g}", "reward": 1.0, "num_prompt_tokens": 10,
            "num_tokens": 20 + 37 * (7 * k + 3 * g + i) % 200, "staleness": 0,
            "num_interruptions": 0,
        }
        for k in range(num_steps) for g in range(GROUPS) for i in range(SIZE)
    ]  # fmt: skip
    cluster = ClusterConfig(
        gpus=3, rollout_gpus=2, engine=ENGINE, trainer=trainer, weight_sync_s=0.1,
        reward_workers=16, batch=BatchConfig(prompts=GROUPS, group_size=SIZE), steps=num_steps,
    )  # fmt: skip
    run = run_of(
        samples=samples, num_steps=num_steps, rows=[{"reward_s": reward_s}] * num_steps
    )  # fmt: skip
    ends = study(trace_of(run), cluster, PartialRolloutConfig.preset("apr")).outcome.step_ends
    rows, tokens, busy_s, request_s = [], 0.0, 0.0, 0.0
    for k, end in enumerate(ends):
        running, seconds = 20 + k % 9, 10.0
        busy_s, request_s = busy_s + seconds, request_s + seconds * running
        decode_s = ENGINE.decode_base_s + ENGINE.decode_per_sequence_s * running
        tokens += seconds * running / decode_s
        num_tokens = 3000 + 100 * (k % 7)
        step_s = trainer.step_overhead_s + num_tokens / trainer.tokens_per_s_per_gpu
        rows.append(
            {
                "time_s": end, "engines_busy_s": busy_s, "engines_request_s": request_s,
                "engines_tokens": tokens, "num_tokens": num_tokens, "trainer_step_s": step_s,
                "generation_stopped_s": 0.1,
            }
        )  # fmt: skip
    steps = [row | change for row, change in zip(run.steps, rows, strict=True)]
    return dataclasses.replace(run, steps=steps), cluster


SLOW = TrainerConfig(tokens_per_s_per_gpu=800.0, step_overhead_s=0.5)
FAST = TrainerConfig(tokens_per_s_per_gpu=80000.0, step_overhead_s=0.01)


@pytest.mark.parametrize("trainer", [SLOW, FAST])
def test_the_machine_of_a_run_is_found_in_its_rows(trainer):
    run, cluster = simulated(trainer)
    found = cluster_of(run)
    assert found.engine.decode_base_s == pytest.approx(ENGINE.decode_base_s)
    assert found.engine.decode_per_sequence_s == pytest.approx(ENGINE.decode_per_sequence_s)
    assert found.trainer.tokens_per_s_per_gpu == pytest.approx(trainer.tokens_per_s_per_gpu)
    assert found.trainer.step_overhead_s == pytest.approx(trainer.step_overhead_s, abs=1e-3)
    assert dataclasses.replace(
        found, engine=cluster.engine, trainer=trainer, notes=""
    ) == dataclasses.replace(cluster, weight_sync_s=found.weight_sync_s)


def test_the_machine_of_a_run_has_the_engines_that_it_had_last():
    """known fault: a run that was given engines was simulated with those of its settings."""
    run, _ = simulated(SLOW)
    scaled = dataclasses.replace(run, scalings=[{"time_s": 1.0, "before": 2, "after": 6}])
    found = cluster_of(scaled)
    assert (found.gpus, found.rollout_gpus) == (7, 6)


def test_the_machine_of_a_run_has_the_train_workers_that_it_had_last():
    """known fault: of `scaling.num_workers: [1, 4]` the most were taken, so that a run that had one
    of them was advised a fifth, and the gain of a second was that of a fifth."""
    run, _ = simulated(SLOW)
    alone = estimate(run).changes[0]
    run.config["scaling"]["num_workers"] = [1, 4]
    starts = [{"time_s": 0.0, "step": 0, "num_train_workers": 1, "num_engines": 2}]
    elastic = dataclasses.replace(run, ranks=starts)
    assert cluster_of(elastic) == cluster_of(simulated(SLOW)[0])
    assert estimate(elastic).changes[0] == alone
    assert "a train worker more (scaling.num_workers: 2)" in alone.what
    grown = dataclasses.replace(
        run, ranks=[*starts, starts[0] | {"step": 12, "num_train_workers": 2}]
    )
    for row in run.steps[12:]:
        tokens_s = row["num_tokens"] / SLOW.tokens_per_s_per_gpu
        row["trainer_step_s"] = SLOW.step_overhead_s + tokens_s / 2
    found = cluster_of(grown)
    assert (found.gpus, found.num_train_gpus()) == (4, 2)
    assert found.trainer.tokens_per_s_per_gpu == pytest.approx(SLOW.tokens_per_s_per_gpu)
    assert found.trainer.step_overhead_s == pytest.approx(SLOW.step_overhead_s, abs=1e-3)


@pytest.mark.parametrize(("trainer", "first"), [(SLOW, "a train worker"), (FAST, "an engine more")])
def test_what_limits_a_run_is_what_the_simulator_would_add(trainer, first):
    guess = estimate(simulated(trainer)[0])
    assert abs(guess.off) < 0.02
    assert first in guess.changes[0].what and guess.changes[0].gain > 0.2
    assert [change.gain for change in guess.changes] == sorted(
        (change.gain for change in guess.changes), reverse=True
    )
    useless = "an engine more (" if trainer is SLOW else "a train worker more"
    assert abs(next(c.gain for c in guess.changes if useless in c.what)) < 0.03


def on(run: RunData, *, cpus: float, gpus: float = 0.0, **engine: Any) -> RunData:
    """The same on machines that have so much."""
    config = json.loads(json.dumps(run.config))
    config["rollout"]["engine"] |= {"device": "cpu", "num_cpus_per_replica": 1.0} | engine
    config["scaling"]["use_gpu"] = bool(gpus)
    row = {"time_s": 0.0, "step": 0, "num_train_workers": 1, "num_engines": 2}
    row |= {"num_cpus": cpus, "num_gpus": gpus}
    return dataclasses.replace(run, config=config, ranks=[row])


ON_CUDA = {"device": "cuda", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("machines", "lacking"),
    [
        ({"cpus": 3.0}, "CPU cores"),
        ({"cpus": 4.0}, None),
        ({"cpus": 1.0, "gpus": 6.0, **ON_CUDA}, "GPUs"),
        ({"cpus": 1.0, "gpus": 7.0, **ON_CUDA}, None),
        ({"cpus": 1.0, "placement": "colocated"}, None),
    ],
)
def test_engines_for_which_there_is_no_room_are_not_advised(machines, lacking):
    """known fault: a run on two cores was told to have more engines."""
    assert lacks(on(run_of(), **machines), engines=1) == lacking
    text = said(on(run_of(waits=0.5), **machines))
    more = "more engines (rollout.num_replicas)"
    assert f"-> {more if lacking is None else f'a machine with more {lacking}, for {more}'}" in text


def test_what_has_no_room_is_not_simulated():
    text = said(on(run_of(generates=0.5), cpus=3.0))
    assert "a machine with more CPU cores, for more train workers (scaling.num_workers)" in text
    guess = estimate(on(simulated(FAST)[0], cpus=3.0))
    assert sorted(change.what.split(" (")[0] for change in guess.changes) == [
        "an engine less and a train worker more", "partial_rollout.max_staleness: 6"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "train", "machines", "tried"),
    [
        ((2, 1), {}, {"cpus": 64.0}, [(3, 1), (2, 2), (1, 2)]),
        ((4, 2), {}, {"cpus": 64.0}, [(5, 2), (4, 4), (2, 4), (5, 1)]),
        ((4, 3), {"batch_size": 24}, {"cpus": 64.0}, [(5, 3), (4, 4), (3, 4), (5, 2)]),
        ((4, 2), {"mini_batches": 16}, {"cpus": 64.0}, [(5, 2), (5, 1)]),
        ((4, 1), {"batch_size": 24, "mini_batches": 8}, {"cpus": 64.0}, [(5, 1), (4, 3), (2, 3)]),
        ((4, 4), {"shard_ranks": 4}, {"cpus": 64.0}, [(5, 4), (4, 8)]),
        ((2, 2), {"batch_size": 24}, {"cpus": 1.0, "gpus": 6.0, **ON_CUDA}, [(1, 3)]),
        ((2, 2), {"batch_size": 24}, {"cpus": 2.0, "gpus": 2.0}, []),
    ],
)  # fmt: skip
def test_machines_that_a_run_cannot_have_are_not_tried(parts, train, machines, tried):
    """known fault: `scaling.num_workers: 3` was advised for batches of 32, which it refuses; and a
    train worker was to make room for an engine of two GPUs, or for one on CPU cores."""
    run = with_settings(on(simulated(SLOW)[0], **machines), "train", **train)
    engines, workers = parts
    run = dataclasses.replace(
        run, ranks=[run.ranks[0] | {"num_engines": engines, "num_train_workers": workers}]
    )
    changes = of_run._changes(run, cluster_of(run), PartialRolloutConfig.preset("apr"), 0.0)
    assert [(other.rollout_gpus, other.num_train_gpus()) for _, other, _ in changes[:-1]] == tried
    if parts == (4, 2) and not train:
        own = "with a GPU or CPU cores of its own"
        assert [what for what, *_ in changes[:-1]] == [
            f"an engine more (rollout.num_replicas: 5), {own}",
            f"2 train workers more (scaling.num_workers: 4), each {own}",
            "2 engines less and 2 train workers more (2 and 4)",
            "a train worker less and an engine more (1 and 5)",
        ]


@pytest.mark.parametrize(
    ("mode", "own", "kept"),
    [
        ("sync", {}, True),
        ("sync", {"max_live_batches": 3.0}, True),
        ("async", {"max_staleness": 0, "oversampling_factor": 1.0}, True),
        ("async", {"max_staleness": 0, "oversampling_factor": 1.0, "drain": False}, True),
        ("sync", {"drain": True}, False),  # which apr refuses, as it interrupts
    ],
)
def test_another_mode_keeps_what_a_run_has_set(mode, own, kept):
    """known fault: `mode: apr` was estimated with that preset's values of all settings."""
    found = of_run._as_apr(PartialRolloutConfig.preset(mode, **own))
    if not kept:
        assert found is None
        return
    expected = PartialRolloutConfig.preset("apr", **own)
    assert found == expected


def test_what_an_environment_said_is_not_generated():
    """known fault: the simulated engines made these tokens, too, so that of a run with short turns
    and long answers of a tool nothing was right, in `tune --run` without a word about it."""
    run, _ = simulated(FAST)
    samples = [
        row | {"num_tokens": 3 * row["num_tokens"], "num_generated": row["num_tokens"]}
        for row in run.samples
    ]
    steps = [row | {"num_tokens": 3 * row["num_tokens"]} for row in run.steps]
    heard = dataclasses.replace(run, samples=samples, steps=steps)
    found, alike = cluster_of(heard), cluster_of(run)
    assert found.trainer.tokens_per_s_per_gpu == pytest.approx(alike.trainer.tokens_per_s_per_gpu)
    assert estimate(heard).off == pytest.approx(estimate(run).off)


def test_slow_rewards_are_simulated_and_more_of_them_at_once_are_tried():
    """known fault: they counted as instant, so that such a run was 85 % off and got no estimate."""
    run, _ = simulated(FAST, reward_s=3.0)  # 32 samples, 16 rewards at once: 6 s a step
    guess = estimate(run)
    assert abs(guess.off) < 0.02
    best = guess.changes[0]
    assert best.what.startswith("rollout.reward.concurrency: 32,") and 0.5 < best.gain < 1.0
    assert all(change.gain < 0.05 for change in guess.changes[1:])
    quick = estimate(simulated(FAST, reward_s=0.01)[0])
    assert not any("rollout.reward" in change.what for change in quick.changes)


def test_a_step_of_several_batches_is_one_of_so_many_samples(monkeypatch):
    """known fault: rewards, and steps to simulate, were looked at as of one batch."""
    step_s = of_run.measured_step_s(simulated(FAST)[0])
    run, _ = simulated(FAST, reward_s=0.07 * step_s)
    halves = with_settings(run, "train", batch_size=GROUPS * SIZE // 2)
    halves = with_settings(halves, batches_per_step=2)
    monkeypatch.setattr(of_run, "_MOST_SAMPLES", 22 * GROUPS * SIZE)
    assert estimate(halves) == estimate(run)
    assert any("rollout.reward" in change.what for change in estimate(run).changes)
    assert cluster_to_tune(halves) == cluster_to_tune(run)
    rows = [{"inflight": 2, "unscored": 30, "reward_s": 0.3}] * NUM_STEPS
    waits = run_of(waits=0.5, generates=0.5, rows=rows)
    assert "samples wait for their reward" not in said(waits)
    assert "samples wait for their reward" in said(with_settings(waits, batches_per_step=2))


@pytest.mark.parametrize("trainer", [SLOW, FAST])
def test_a_long_run_is_simulated_in_part_with_the_same_answer(trainer, monkeypatch):
    """known fault: all of 3,900 steps were simulated five times, for minutes."""
    run, cluster = simulated(trainer, num_steps=96)
    whole = estimate(run)
    monkeypatch.setattr(of_run, "_MOST_SAMPLES", 32 * GROUPS * SIZE)
    assert steps_to_simulate(cluster) == 32
    part = estimate(run)
    assert part.off == pytest.approx(whole.off, abs=0.05)
    assert part.changes[0].what == whole.changes[0].what
    gains = {change.what: change.gain for change in whole.changes}
    assert {c.what: c.gain for c in part.changes} == pytest.approx(gains, abs=0.08)


def test_steps_without_a_sync_do_not_make_one_shorter():
    run, _ = simulated(FAST)
    for row in run.steps:
        row["generation_stopped_s"] = 4.0 if row["step"] % 3 == 0 else 0.0
    assert cluster_of(run).weight_sync_s == 4.0
    for row in run.steps:
        row["generation_stopped_s"] = 0.0
    assert cluster_of(run).weight_sync_s == 0.0


@pytest.mark.parametrize(
    ("steps", "batch_size", "fewer"),
    [
        (3900, 64, 128),
        (100, 64, 100),
        (200, 1024, 20),
        (3900, 1024, 20),
        (9000, 64, 128),
        (10, 4096, 10),
    ],
)
def test_how_many_steps_are_simulated_follows_from_their_samples(steps, batch_size, fewer):
    cluster = cluster_of(simulated(FAST)[0])
    batch = BatchConfig(prompts=batch_size // SIZE, group_size=SIZE)
    assert steps_to_simulate(dataclasses.replace(cluster, steps=steps, batch=batch)) == fewer


def test_a_simulation_that_is_far_off_gives_no_estimates():
    run, _ = simulated(FAST)
    slower = [row | {"time_s": 2 * row["time_s"]} for row in run.steps]
    slow = dataclasses.replace(run, steps=slower)
    with pytest.raises(ConfigError, match=r"simulator does not fit this run: (49|50|51)% off in"):
        estimate(slow)
    faster = [row | {"time_s": row["time_s"] / 36} for row in run.steps]
    fast = dataclasses.replace(run, steps=faster)
    with pytest.raises(ConfigError, match="fit this run: more than 100% off"):
        estimate(fast)
    with pytest.raises(ConfigError, match=r"is too short to simulate \(8 steps\); it takes 20"):
        estimate(dataclasses.replace(fast, steps=faster[:8]))


def test_steps_before_the_engines_told_anything_are_left_out():
    """known fault: a KeyError. A step may end before the rollout worker's first figures, at a run's
    begin and where it goes on."""
    run, _ = simulated(SLOW)
    counted = ("engines_tokens", "engines_busy_s", "engines_request_s")
    steps = [
        {k: v for k, v in row.items() if k not in counted} if row["step"] in (2, 12, 13) else row
        for row in run.steps
    ]
    guess = estimate(dataclasses.replace(run, steps=steps))
    assert abs(guess.off) < 0.02 and "a train worker" in guess.changes[0].what


def test_a_run_of_an_older_version_or_with_code_of_its_own_gets_no_estimate():
    """known fault: KeyErrors; and of code a remedy for the settings of a run that has ended."""
    run, _ = simulated(SLOW)
    older = [{k: v for k, v in row.items() if k != "engines_request_s"} for row in run.steps]
    flat = {"rollout": {"num_replicas": 2, "placement": "disaggregated"}}
    for old in ({"steps": older}, {"config": {}}, {"config": run.config | flat}):
        with pytest.raises(ConfigError, match="an older ray_apr made it"):
            estimate(dataclasses.replace(run, **old))
    partial = run.config["partial_rollout"] | {"admission": "my_rules:Slowly"}
    own = dataclasses.replace(run, config=run.config | {"partial_rollout": partial})
    with pytest.raises(ConfigError, match=r"RUN_DIR.* partial_rollout\.admission, which the sim"):
        estimate(own)


def test_a_run_that_takes_turns_or_is_short_gets_no_estimate():
    with pytest.raises(ConfigError, match="train workers on the same GPUs"):
        cluster_of(run_of(placement="colocated"))
    run, _ = simulated(FAST)
    with pytest.raises(ConfigError, match=r"run is too short to simulate \(7 steps\); it takes 20"):
        cluster_of(dataclasses.replace(run, steps=run.steps[:7]))


def test_the_command_shows_shares_findings_and_estimates(tmp_path, capsys):
    run, _ = simulated(SLOW)
    tables = {"metrics": run.steps, "samples": run.samples, "timeline": run.timeline}
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, values in (("config", run.config), ("final", run.final)):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path.name}, {NUM_STEPS} steps" in out and "trainer   trains" in out
    assert "the run as it was: " in out and "steps in a time: a train worker more" in out
    assert "without the first 2, in which the engines fill" in out
    faster = [row | {"time_s": row["time_s"] / 36} for row in run.steps[:8]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in faster))
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no estimates of the simulator: this run is too short to simulate (8 steps)" in out
    assert "the run as it was" not in out and "failed" not in out
    failed = {**run.final, "status": "failed", "error": "no GPU is left"}
    (tmp_path / "final.json").write_text(json.dumps(failed))
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("the run failed: no GPU is left\n")
