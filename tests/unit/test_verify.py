"""What is proved of a run from its folder (tools/verify.py)."""

from __future__ import annotations

import json
import random

import pytest
import ray.train
from scipy.stats import ks_2samp

from ray_apr.cli import main as cli
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.resumption import (
    PROGRESS_FILE,
    ROLLOUT_FILE,
    Begin,
    Counters,
    RolloutProgress,
)
from ray_apr.run.begun import note_begin
from ray_apr.tools.verify import ks_test, verify
from tests.run_specs import run_spec

SIZE, STEPS = 4, 6
TRAINED = ("metrics.jsonl", "samples.jsonl")


def write(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    """A run that kept everything: a group of two samples a prompt, one group was dropped."""
    rng = random.Random(0)
    samples, ended = [], []
    for number in range(1, 1 + STEPS * SIZE // 2):
        for member in range(2):
            step, length = (number - 1) * 2 // SIZE, rng.randint(3, 30)
            sample_id = f"e0-{number}-{member}"
            older = list(range(max(0, step - 2), step))
            samples.append({
                "step": step, "sample_id": sample_id, "group_id": f"e0-{number}",
                "staleness": min(step, 1), "num_generated": length,
                "num_masked_tokens": int(step > 1),
                "version_tokens": [*([v, 1] for v in older), [step, length - len(older)]],
            })  # fmt: skip
            ended.append({"sample_id": sample_id, "num_generated": length})
    write(tmp_path, "samples.jsonl", samples)
    write(tmp_path, "ended.jsonl", [*ended, {"sample_id": "e0-0-0", "num_generated": 9}])
    write(tmp_path, "dropped.jsonl", [{"group_id": "e0-0", "reason": "stale"}])
    write(tmp_path, "metrics.jsonl",
          [{"step": s, "policy_version": s + 1, "time_s": s} for s in range(STEPS)])  # fmt: skip
    final = {
        "steps": STEPS, "batch_size": SIZE, "max_staleness": 1, "ledger_error": 0,
        "tokens_generated": 21, "tokens_trained": 0, "tokens_buffered": 7, "tokens_interrupted": 5,
        "tokens_discarded": {"stale": 9, "masked": 0}, "num_prompts": 20,
        "prompts_position": 15, "prompts_pending": [13, 14],
    }  # fmt: skip
    (tmp_path / "final.json").write_text(json.dumps(final))
    count_tokens(tmp_path)
    return tmp_path


def count_tokens(folder):
    """Have the counters say what the rows of the samples do."""
    generated = sum(r["num_generated"] for r in rows(folder, TRAINED[1]))
    masked = sum(r["num_masked_tokens"] for r in rows(folder, TRAINED[1]))

    def counted(final):
        lost = final["tokens_discarded"]
        before = final["tokens_trained"] + lost["masked"]
        return {
            "tokens_trained": generated - masked,
            "tokens_discarded": {**lost, "masked": masked},
            "tokens_generated": final["tokens_generated"] + generated - before,
        }

    change_final(counted)(folder)


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def broken(folder):
    return {check.name: check.seen for check in verify(folder) if not check.ok}


def test_a_run_that_kept_everything(run, capsys):
    assert broken(run) == {}
    assert cli.main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert "15 handed out: 12 trained, 2 pending, 1 dropped" in said and "BROKEN" not in said


@pytest.mark.parametrize("name", ["final.json", "samples.jsonl", "ended.jsonl"])
def test_json_that_is_no_object_is_named(run, name, capsys):
    (run / name).write_text("[1]\n")
    assert cli.main(["verify", str(run)]) == 2
    assert f"{run / name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "place"), [("final.json", "final.json"), ("samples.jsonl", "samples.jsonl, line 2")]
)
def test_a_damaged_file_is_named(run, name, place, capsys):
    file = run / name
    text = file.read_text()
    file.write_text(text[:-2] if name == "final.json" else text.replace("\n", "\n!", 1))
    assert cli.main(["verify", str(run)]) == 2
    assert f"'{run / place}': is cut off or no JSON (" in capsys.readouterr().err


def change_rows(name, change):
    def apply(folder):
        found = rows(folder, name)
        changed = change(found)
        write(folder, name, found if changed is None else changed)

    return apply


def change_final(of=lambda final: {}, **values):
    def apply(folder):
        final = json.loads((folder / "final.json").read_text())
        (folder / "final.json").write_text(json.dumps(final | of(final) | values))

    return apply


def put(index, **values):
    return lambda found: found[index].update(values)


@pytest.mark.parametrize(
    ("name", "seen", "damage"),
    [
        ("steps", "5 rows", change_rows("metrics.jsonl", lambda found: found[:-1])),
        ("steps", "6 rows", change_rows("metrics.jsonl", put(3, step=2))),
        ("steps", "6 rows", change_rows("metrics.jsonl", put(3, policy_version=3))),
        ("steps", "6 rows", change_rows("metrics.jsonl", put(3, time_s=0.5))),
        ("batches", "other sizes in steps 0, 1",
         change_rows("samples.jsonl", put(0, step=1, staleness=1))),
        ("batches", "; not whole e0-2, e0-3", change_rows("samples.jsonl", lambda found: [
            *found[:3], found[3] | {"step": 1, "staleness": 1}, found[4] | {"step": 0} | {
                "staleness": 0, "version_tokens": [[0, found[4]["num_generated"]]]},
            *found[5:]])),
        ("batches", "; not whole e0-3", change_rows("samples.jsonl", put(4, group_id="e0-4"))),
        ("staleness", "at most 2, the bound", change_rows("samples.jsonl", put(9, staleness=2))),
        ("staleness", "at most 2, the bound is 1; above it in steps 2; other than version_tokens "
         "says in e0-5-1", change_rows("samples.jsonl", lambda found: found[9].update(
             version_tokens=[[0, 2], [2, found[9]["num_generated"] - 2]]))),
        ("staleness", "says in e0-5-1", change_rows("samples.jsonl", put(9, staleness=None))),
        ("staleness", "says in e0-5-1", change_rows("samples.jsonl", put(9, staleness=0))),
        ("versions", "not in e0-5-0",
         change_rows("samples.jsonl", put(8, version_tokens=[[2, 1], [1, 3]]))),
        ("versions", "in e0-5-0",
         change_rows("samples.jsonl", put(8, version_tokens=[[0, 1], [1, 1], [3, 1]]))),
        ("versions", "not in e0-5-0", change_rows("samples.jsonl", lambda found: found[8].update(
            version_tokens=[[0, 1], [1, 1], [2, found[8]["num_generated"] - 1]]))),
        ("ledger", "error 3", change_final(ledger_error=3)),
        ("ledger", "error None", change_final(ledger_error=None)),
        ("ledger", "1 tokens trained", change_final(tokens_trained=1)),
        ("ledger", "error 0; ", change_final(tokens_generated=1000)),
        ("ledger", "give an error of -1", change_final(lambda final: {
            "tokens_discarded": {**final["tokens_discarded"], "stale": 10}})),
        ("ledger", "15 masked, 16 in these rows", change_final(lambda final: {
            "tokens_discarded": {"stale": 10, "masked": 15}})),
        ("prompts", "lost 0", change_rows("dropped.jsonl", lambda found: [])),
        ("prompts", "lost 14", change_final(prompts_pending=[13])),
        ("prompts", "twice 3", change_final(prompts_pending=[3, 13, 14])),
        ("prompts", "twice 1", change_rows("samples.jsonl", lambda found: [
            r | {"group_id": "e0-1~1"} if r["group_id"] == "e0-2" else r for r in found])),
        ("prompts", "did not answer", change_final(prompts_position=None)),
        ("prompts", "never handed out 12", change_final(prompts_position=12, prompts_pending=[])),
    ],
)  # fmt: skip
def test_what_was_not_kept_is_found(run, name, seen, damage):
    damage(run)
    found = broken(run)
    assert list(found) == [name] and seen in found[name]
    assert cli.main(["verify", str(run)]) == 1


def test_a_sample_that_was_trained_twice_is_found(run):
    change_rows("samples.jsonl", put(0, sample_id="e0-1-1"))(run)
    assert broken(run)["batches"] == "24 samples in batches of 4; trained twice e0-1-1"


def test_a_run_may_go_on_with_another_batch_size_and_bound(run):
    """known fault: all steps were held against what the last part had, so that a run was said to
    have trained too old tokens, and batches that were none, once it went on with less."""
    fewer = [row for row in rows(run, "samples.jsonl") if row["step"] < 3]
    halved = [r for r in rows(run, "samples.jsonl") if r["step"] >= 3 and r["group_id"][-1] in "79"]
    write(run, "samples.jsonl", [*fewer, *halved])
    write(run, "metrics.jsonl", rows(run, "metrics.jsonl")[:5])
    change_rows("samples.jsonl", lambda found: [r | {"step": 4} if r["group_id"] == "e0-9" else r
                                                for r in found])(run)  # fmt: skip
    change_final(steps=5, batch_size=2, max_staleness=0)(run)
    change_final(prompts_pending=[8, 10, 11, 12, 13, 14])(run)
    fresh = {"staleness": 0, "num_masked_tokens": 2}
    change_rows("samples.jsonl", lambda found: [r | fresh if r["step"] >= 3 else r
                                                for r in found])(run)  # fmt: skip
    count_tokens(run)
    assert list(broken(run)) == ["batches", "staleness"], "as a folder that does not tell it"
    parts = [
        {"step": 0, "batch_size": SIZE, "max_staleness": 1},
        {"step": 4, "batch_size": 8, "max_staleness": 1},  # whose steps were trained once more
        {"step": 3, "batch_size": 2, "max_staleness": 0},
    ]
    write(run, "ranks.jsonl", parts)
    assert broken(run) == {}
    seen = {check.name: check.seen for check in verify(run)}
    assert seen["batches"] == "16 samples in batches of 4, then 2"
    assert seen["staleness"] == "at most 1, the bound is 1, then 0"
    change_rows("samples.jsonl", put(-1, staleness=1, num_masked_tokens=1))(run)
    count_tokens(run)
    assert broken(run) == {"staleness": f"{seen['staleness']}; above it in steps 4"}
    write(run, "ranks.jsonl", parts[:2])
    assert list(broken(run)) == ["batches"]


def test_a_step_without_its_row_is_found(run):
    """known fault: as `final.json` counts rows, one that was lost at the end was not missed."""
    change_rows("metrics.jsonl", lambda found: found[:-1])(run)
    change_final(steps=STEPS - 1, status="ok")(run)
    seen = "5 rows, 5 steps in final.json; samples without a row of their steps 5"
    assert broken(run) == {"steps": seen}
    change_final(status="stopped")(run)  # in the weight sync, after which the row is written
    assert broken(run) == {}
    assert {check.name: check.seen for check in verify(run)}["steps"] == seen
    change_rows("metrics.jsonl", lambda found: found[:-1])(run)
    change_final(steps=STEPS - 2)(run)
    assert list(broken(run)) == ["steps"]


def test_a_step_without_samples_is_found(run):
    """known fault: sizes were those of the steps that have samples."""
    change_rows("samples.jsonl", lambda found: [r for r in found if r["step"] != 3])(run)
    count_tokens(run)
    change_final(prompts_pending=[7, 8, 13, 14])(run)
    assert broken(run) == {"batches": "20 samples in batches of 4; other sizes in steps 3"}


def test_a_prompt_that_was_to_be_tried_again_and_got_lost_is_found(run):
    """known fault: the row of its first group stood for it."""
    first = {"group_id": "e0-0", "reason": "filtered", "retried": True}
    write(run, "dropped.jsonl", [first])
    assert broken(run)["prompts"].endswith("; lost 0")
    change_final(prompts_pending=[0, 13, 14])(run)
    assert broken(run) == {}
    change_final(prompts_pending=[13, 14])(run)
    write(run, "dropped.jsonl", [{"group_id": "e0-0~1", "reason": "filtered"}, first])
    assert broken(run) == {}, "a buffer's row may come before one of the rollout worker"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("metrics.jsonl", "policy_version"),
        ("samples.jsonl", "staleness"),
        ("ended.jsonl", "sample_id"),
        ("dropped.jsonl", "reason"),
        ("final.json", "max_staleness"),
    ],
)
def test_what_a_row_lacks_is_named(run, name, key, capsys):
    """known fault: a KeyError."""
    if name == "final.json":
        file, final = run / name, json.loads((run / name).read_text())
        file.write_text(json.dumps({k: value for k, value in final.items() if k != key}))
    else:
        change_rows(name, lambda found: found[-1].pop(key) and None)(run)
    place = name if name == "final.json" else f"{name}, line {len(rows(run, name))}"
    assert cli.main(["verify", str(run)]) == 2
    assert f"'{run / place}': lacks {key}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("samples.jsonl", "num_masked_tokens", None),
        ("samples.jsonl", "version_tokens", "x"),
        ("samples.jsonl", "version_tokens", [[1]]),
        ("metrics.jsonl", "time_s", "1"),
        ("ended.jsonl", "num_generated", None),
        ("final.json", "batch_size", None),
    ],
)
def test_a_value_that_no_run_writes_is_named(run, name, key, value, capsys):
    """known fault: a TypeError."""
    damage = {key: value}
    (change_final(**damage) if name == "final.json" else change_rows(name, put(2, **damage)))(run)
    place = name if name == "final.json" else f"{name}, line 3"
    assert cli.main(["verify", str(run)]) == 2
    assert f"'{run / place}': has {key} = {value!r}, which no run" in capsys.readouterr().err


@pytest.fixture
def begun(run, tmp_path_factory):
    """The run as it would be had it begun with the checkpoint of step 2 of another one, whose
    prompts 5 and 6 were under way by then."""
    of_steps = {n: [r for r in rows(run, n) if r["step"] >= 2] for n in TRAINED}
    for name, found in of_steps.items():
        write(run, name, found)
    ids = {row["sample_id"] for row in of_steps["samples.jsonl"]}
    change_rows("ended.jsonl", lambda found: [r for r in found if r["sample_id"] in ids])(run)
    write(run, "dropped.jsonl", [])
    count_tokens(run)
    change_final(steps=STEPS - 2)(run)
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / PROGRESS_FILE).write_text('{"step": 2, "policy_version": 2}')
    progress = RolloutProgress(
        seed=0, num_prompts=20, position=7, pending=(5, 6), counters=Counters()
    )
    (folder / ROLLOUT_FILE).write_text(progress.to_json())
    settings = ray.train.RunConfig(name=run.name, storage_path=str(run.parent))
    return run_spec(run=settings, checkpoint=ray.train.Checkpoint(str(folder)))


def note(spec, checkpoint):
    note_begin(spec, Begin(step=2, policy_version=2, checkpoint=checkpoint))


def test_a_run_that_began_with_another_ones_checkpoint_is_proved_from_there_on(begun):
    assert list(broken(begun.folder)) == ["steps", "prompts"], "as of one that began by itself"
    note(begun, begun.checkpoint)
    assert broken(begun.folder) == {}
    seen = {check.name: check.seen for check in verify(begun.folder)}
    assert "10 handed out: 8 trained, 2 pending" in seen["prompts"]
    assert "begun with step 2 of another run" in seen["steps"]
    note(begun, object())  # its own, with which it was gone on with
    assert broken(begun.folder) == {}
    note(begun, None)  # anew, as it was gone on with without that checkpoint
    assert list(broken(begun.folder)) == ["steps", "prompts"]


@pytest.mark.parametrize(
    ("name", "seen", "damage"),
    [
        ("steps", "3 rows", change_rows("metrics.jsonl", lambda found: found[1:])),
        ("steps", "4 rows", change_rows("metrics.jsonl", put(0, policy_version=2))),
        ("prompts", "lost 5",
         change_rows("samples.jsonl", lambda found: [r for r in found if r["group_id"] != "e0-5"])),
        ("prompts", "twice 4", change_rows("samples.jsonl", put(0, group_id="e0-4"))),
    ],
)  # fmt: skip
def test_what_such_a_run_did_not_keep_is_found(begun, name, seen, damage):
    note(begun, begun.checkpoint)
    damage(begun.folder)
    assert seen in broken(begun.folder)[name]


def test_long_responses_that_are_not_trained_are_found(run):
    change_final(prompts_position=130, prompts_pending=[])(run)
    long = [{"sample_id": f"e0-{n}-0", "num_generated": 60} for n in range(13, 43)]
    dropped = rows(run, "dropped.jsonl")
    later = [{"group_id": f"e0-{n}", "reason": "stale"} for n in range(13, 130)]
    write(run, "ended.jsonl", [*rows(run, "ended.jsonl"), *long])
    write(run, "dropped.jsonl", [*dropped, *later])
    assert "p = " in broken(run)["lengths"]
    filtered = [{**row, "reason": "filtered"} for row in later]
    write(run, "dropped.jsonl", [*dropped, *filtered])
    assert broken(run) == {}, "a filter may well look at lengths"


def test_groups_that_failed_are_counted(run, capsys):
    change_rows("dropped.jsonl", put(0, reason="failed"))(run)
    assert cli.main(["verify", str(run)]) == 0
    assert "2 pending, 1 dropped (failed: 1)" in capsys.readouterr().out


def test_short_responses_that_end_before_long_ones_are_not_compared(run):
    """Those of the first prompts that are all over: what came after is still under way in part."""
    change_final(prompts_position=45, prompts_pending=list(range(13, 45)))(run)
    short = [{"sample_id": f"e0-{n}-0", "num_generated": 1} for n in range(14, 45)]
    write(run, "ended.jsonl", [*rows(run, "ended.jsonl"), *short])
    assert broken(run) == {}
    seen = {check.name: check.seen for check in verify(run)}["lengths"]
    assert "of the first 13 of 45 prompts" in seen and "p = 1" in seen


def test_a_run_whose_first_prompt_is_pending_has_no_lengths_to_compare(run):
    change_final(prompts_pending=[0, 13, 14])(run)
    assert "lengths" not in broken(run)
    seen = {check.name: check.seen for check in verify(run)}["lengths"]
    assert seen == "nothing to compare of the first 0 of 15 prompts"


def test_a_trained_sample_without_a_row_of_its_end_is_found(run):
    """known fault: a run that had lost a third of `ended.jsonl` was said to have kept all."""
    change_rows("ended.jsonl", lambda found: found[::3])(run)
    lost = "trained without a row of their end e0-1-1, e0-2-0, e0-3-0, e0-3-1, e0-4-1 and 11 more"
    assert lost in broken(run)["lengths"]


def test_a_trained_sample_of_another_length_than_it_ended_with_is_found(run):
    """known fault: the test of distributions does not see a response that lost some tokens."""
    change_rows("ended.jsonl", lambda found: found[5].update(
        num_generated=found[5]["num_generated"] + 1))(run)  # fmt: skip
    seen = broken(run)["lengths"]
    assert seen.endswith("p = 1; trained with other lengths than they ended with e0-3-1")


def test_a_sample_that_ended_twice_counts_once(run):
    again = [{**row, "num_generated": 500} for row in rows(run, "ended.jsonl")]
    write(run, "ended.jsonl", [*again, *rows(run, "ended.jsonl")])
    assert broken(run) == {}


def test_a_run_that_has_not_ended_is_not_judged(tmp_path):
    with pytest.raises(
        ConfigError, match=r"RUN_DIR = .*is no run folder, or .*has not ended.*--resume"
    ):
        verify(tmp_path)
    assert cli.main(["verify", str(tmp_path)]) == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_p_value_is_that_of_scipy(seed):
    rng = random.Random(seed)
    first = [rng.randint(0, 50) for _ in range(rng.randint(60, 400))]
    second = [rng.randint(0, 50) + seed for _ in range(rng.randint(60, 400))]
    expected = ks_2samp(first, second, method="asymp")
    distance, p = ks_test(first, second)
    assert distance == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue, abs=0.02)
    assert ks_test(first, first) == (0.0, 1.0)
